"""What a GEMM computes, without M: the key under which a server looks a kernel up.

Knows nothing of kernels, tiles or devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from ..container.fields import is_int
from ..errors import RecordError
from ..limits import MAX_EXTENT
from ..numbers.dtypes import DTYPES
from ..numbers.epilogue import EPILOGUES, Epilogue, extra_dtype
from ..numbers.scaling import FRAGMENTS, PLAIN, SCALINGS, extent_of
from ..program.operation import OVERLAPS, Operand

MAJORS = ("k", "n")

_KEY = (
    r"(?P<a>[^_]+)_(?P<b>[^_]+)_(?P<d>[^_]+)_(?P<accumulator>[^_]+)_(?P<epilogue>.+)_n(?P<n>\d{1,10})_k(?P<k>\d{1,10})"
    r"(?:_b(?P<batch>\d{1,10}))?(?:_(?P<scaling>%s))?(?:_(?P<b_major>n)-major)?(?:_(?P<overlap>launch|weights))?"
)
_USUAL = {"batch": 1, "scaling": "none", "b_major": "k", "overlap": "serial"}


@dataclass(frozen=True)
class Signature:
    """D = epilogue(scale(A @ B^T)): A (M, K), B (N, K), D (M, columns); a leading batch extent when `batch` > 1.

    `a`, `b`, `d` and `accumulator` are element types by short name (`runtime.numbers.dtypes`). A and D are row-major.
    B is stored as `torch.nn.Linear` stores its weight where `b_major` is "k", and transposed, (K, N) in memory, where
    it is "n". `epilogue` is one of `runtime.numbers.epilogue.EPILOGUES`, `overlap` of
    `runtime.program.operation.OVERLAPS`. `scaling` says what multiplies the products
    (`runtime.numbers.scaling`):

    - "tensor": scale_a (1) and scale_b (1), f32;
    - "row_column": scale_a (M), one a token, and scale_b (N), one an output channel, f32;
    - "block": scale_a (M, K/128), one for each 1 x 128 of A, and scale_b (N/128, K/128), one for each 128 x 128 of B,
      f32;
    - "block_weight" and "column_weight": scale_b alone, as "block" and "row_column" have it, for B in e4m3; the kernel
      quantises A, in 16 bits, to e4m3 by 1 x 128, the largest magnitude of which becomes 448;
    - "mxfp8", "mxfp4": scale_a and scale_b, one for each 1 x 32 of A and of B, ue8m0 in tiles of 128 x 4;
    - "nvfp4": the same for each 1 x 16, e4m3 that are not negative; and scale_ab (1), f32, for the whole product;
    - "mxfp4_weight" and "int4_weight": scale_b alone, one for each 1 x 32 or 1 x 128 of B, ue8m0 or bf16; it and B lie
      in memory as `runtime.numbers.weights` says;
    - "int4_zero_weight": the same with a zero point behind each scale: scale_b has twice as many;
    - "int4_group128": scale_b (K/128, N) alone, one for each 1 x 128 of B, bf16.
    """

    a: str
    b: str
    d: str
    accumulator: str
    epilogue: str
    n: int
    k: int
    batch: int = 1
    scaling: str = "none"
    b_major: str = "k"
    overlap: str = "serial"

    @property
    def operation(self) -> str:
        """The name of the operation that it is of."""
        return "gemm"

    @cached_property
    def parts(self) -> Epilogue:
        """What `epilogue` says."""
        return Epilogue.of(self.epilogue)

    @property
    def columns(self) -> int:
        """Columns of D: N, or half of it where the epilogue is gated."""
        return self.n // 2 if self.parts.gated else self.n

    def key(self) -> str:
        """One readable word, the same for equal signatures and only for them."""
        word = f"{self.a}_{self.b}_{self.d}_{self.accumulator}_{self.epilogue}_n{self.n}_k{self.k}"
        if self.batch > 1:
            word += f"_b{self.batch}"
        if self.scaling != "none":
            word += f"_{self.scaling}"
        if self.b_major != "k":
            word += f"_{self.b_major}-major"
        if self.overlap != "serial":
            word += f"_{self.overlap}"
        return word

    @classmethod
    def of_key(cls, word: str) -> Signature | None:
        """The signature whose `key` is `word`, or None if there is none."""
        parts = re.fullmatch(_KEY % "|".join(SCALINGS), word, re.ASCII)
        if parts is None:
            return None
        obj: dict[str, Any] = {**_USUAL, **{name: part for name, part in parts.groupdict().items() if part is not None}}
        obj |= {name: int(obj[name]) for name in ("n", "k", "batch")}
        try:
            found = cls.from_json(obj)
        except RecordError:
            return None
        return found if found.key() == word else None

    def operands(self) -> tuple[Operand, ...]:
        """The tensors that a kernel takes, in order; `extra_operands` says what follows A, B and D.

        `runtime.numbers.scaling` says what words axes are.
        """
        return self._operands

    @cached_property
    def _operands(self) -> tuple[Operand, ...]:
        batch = ("batch",) if self.batch > 1 else ()
        columns = "P" if self.parts.gated else "N"
        plain = (
            Operand("a", self.a, (*batch, "M", "K")),
            Operand("b", self.b, (*batch, "N", "K"), self._layout_of_b),
            Operand("d", self.d, (*batch, "M", columns)),
        )
        return plain + extra_operands(self.d, self.scaling, self.epilogue, self.batch > 1)

    @property
    def _layout_of_b(self) -> str:
        if SCALINGS[self.scaling].layout == FRAGMENTS:
            return "tiles"
        return "columns" if self.b_major == "n" else "rows"

    def numbers(self) -> tuple[tuple[str, str], ...]:
        """The numbers that kernels take after these: none."""
        return ()

    def extents(self) -> Mapping[str, int]:
        """The extent of each axis of `operands` that does not depend on M."""
        return self._extents

    @cached_property
    def _extents(self) -> Mapping[str, int]:
        known = {"batch": self.batch, "N": self.n, "K": self.k, "P": self.columns}
        axes = {axis for operand in self._operands for axis in operand.axes}
        return known | {axis: extent_of(axis, known) for axis in axes if axis.partition("/")[0] != "M"}

    @cached_property
    def rows_alone(self) -> bool:
        """Whether M is the only extent of operands that depends on M."""
        return not any(axis.startswith("M/") for operand in self._operands for axis in operand.axes)

    def flops(self, m: int) -> int:
        """Floating-point operations at `m` rows: 2 M N K for each batch."""
        return 2 * m * self.n * self.k * self.batch

    def bytes(self, m: int) -> int:
        """The fewest bytes of device memory to move at `m` rows: A, B and residual read once, D written once."""
        a, b, d = (DTYPES[t] for t in (self.a, self.b, self.d))
        inputs = m * a.bytes_of(self.k) + self.n * b.bytes_of(self.k)
        residual = DTYPES[extra_dtype(self.d)].bytes_of(self.columns) if self.parts.residual else 0
        return self.batch * (inputs + m * (d.bytes_of(self.columns) + residual))

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, obj: Any) -> Signature:
        """Read what `to_json` wrote.

        Raises:
            RecordError: a field is missing, unknown, or not of its type.
        """
        names = {f.name for f in fields(cls)}
        if not isinstance(obj, dict) or set(obj) != names:
            raise RecordError(f"a signature needs exactly the fields {sorted(names)}, found {obj!r:.200}")
        for name in ("a", "b", "d", "accumulator"):
            if not isinstance(obj[name], str) or obj[name] not in DTYPES:
                raise RecordError(f"signature field {name!r}: unknown element type {obj[name]!r:.50}")
        for name, known in (
            ("epilogue", tuple(EPILOGUES)),
            ("scaling", tuple(SCALINGS)),
            ("b_major", MAJORS),
            ("overlap", OVERLAPS),
        ):
            if obj[name] not in known:
                raise RecordError(f"signature field {name!r}: unknown {name} {obj[name]!r:.50}")
        for name in ("n", "k", "batch"):
            if not is_int(obj[name], 1, MAX_EXTENT):
                raise RecordError(
                    f"signature field {name!r} must be an integer from 1 to {MAX_EXTENT}, found {obj[name]!r:.50}"
                )
        if EPILOGUES[obj["epilogue"]].gated and obj["n"] % 2:
            raise RecordError(f"signature field 'n' must be even for {obj['epilogue']}, found {obj['n']}")
        return cls(**obj)


def extra_operands(d: str, scaling: str, epilogue: str, batched: bool) -> tuple[Operand, ...]:
    """What a GEMM takes after A, B and D, in this order: scale_a, scale_b, scale_ab (the factor of the whole product,
    where scales are scaled), bias, residual, scale_d."""
    parts, scales = Epilogue.of(epilogue), SCALINGS[scaling]
    extras = []
    for of in scales.operands:
        axes = scales.axes(of)
        layout = "tiles" if scales.layout != PLAIN else "free" if of == "a" and len(axes) == 2 else "rows"
        extras.append(Operand(f"scale_{of}", DTYPES[scales.dtype].stored or scales.dtype, axes, layout))
    if scales.tensor_scale:
        extras.append(Operand("scale_ab", "f32", ("1",)))
    if parts.bias:
        extras.append(Operand("bias", extra_dtype(d), ("N",)))
    if parts.residual:
        batch = ("batch",) if batched else ()
        extras.append(Operand("residual", extra_dtype(d), (*batch, "M", "P" if parts.gated else "N")))
    if parts.scale:
        extras.append(Operand("scale_d", "f32", ("1",)))
    return tuple(extras)
