"""Grouped GEMM as an operation: rows of A by groups, each multiplied with a B of its own, as experts are.

D[r] = act(scale(A[r] @ B[e]^T) + bias[e]) for every row r of group e. Rows of a group follow each other: group e ends
before row `ends[e]`, and begins where the one before it ends, as the `offs` of `torch.nn.functional.grouped_mm` say it.
Only the device knows `ends`, so a launch that a CUDA graph captured serves whatever they are when it is replayed.

Where rows are masked, each group has room for as many, and `counts` on the device say how many of them are there. Where
rows are gathered, `indices` on the device say which row of A stands for A[r]: A[indices[r]]. So tokens that
several experts take are read where they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from .container.fields import is_int
from .errors import ArgumentError, LayoutError, RecordError
from .limits import MAX_EXTENT
from .numbers.dtypes import DTYPES
from .numbers.epilogue import ACTIVATIONS, EPILOGUES, GATED, Epilogue, extra_dtype
from .numbers.products import scalings_of, unsupported_scaling
from .numbers.scaling import FRAGMENTS, SCALE_BLOCK, SCALINGS, blocks, extent_of
from .numbers.weights import FORMATS
from .program.field_operation import FieldOperation, FieldSignature
from .program.geometry import contiguous_strides, flatten_rows, share_memory
from .program.operation import OVERLAPS, Asked, Operand, extents_at
from .program.outputs import allocate, check_apart, result_dtype
from .program.record import TensorView

SCALINGS_OF_GROUPS = ("none", "row_column", "block", *FORMATS)
_KEY = re.compile(
    r"(?P<a>[^_]+)_(?P<b>[^_]+)_(?P<d>[^_]+)_grouped_(?P<epilogue>.+)_g(?P<groups>\d{1,10})_n(?P<n>\d{1,10})"
    r"_k(?P<k>\d{1,10})(?:_(?P<scaling>" + "|".join(SCALINGS_OF_GROUPS[1:]) + r"))?(?:_(?P<rows>masked|gathered))?"
    r"(?:_(?P<overlap>launch|weights))?",
    re.ASCII,
)
OVERLAP_OF_EXPERTS = "launch"  # each of their launches waits before it reads what the others made
ROWS = "contiguous", "masked", "gathered"  # how rows of A come to their groups
EPILOGUES_OF_GROUPS = tuple(w for w, e in EPILOGUES.items() if not (e.residual or e.scale))
_ACTIVATIONS = tuple(w for w in EPILOGUES_OF_GROUPS if not EPILOGUES[w].bias)


@dataclass(frozen=True)
class Signature(FieldSignature):
    """A (M, K), B (groups, N, K), ends (groups), i32, and D (M, N), or (M, N/2) where the epilogue is gated; bias
    (groups, N) in D's type where the epilogue has one. With gathered rows A is (T, K), for any T, and indices (M), i32,
    come before ends. With masked rows A is (groups, M, K), D (groups, M, N) or (groups, M, N/2), scale_a has groups in
    front too, and in place of ends there are counts (groups), i32: of M rows of group e the first counts[e] are there,
    none where that is negative, all where it is more.

    `scaling` says what multiplies the products (`runtime.numbers.scaling`), in f32: "row_column", scale_a (M) and
    scale_b (groups, N); "block", scale_a (M, K/128), one for each 1 x 128 of A, and scale_b (groups, N/128, K/128), one
    for each 128 x 128 of B. With the latter D may be in e4m3: scale_d (M, N/128), or (M, N/256) where the epilogue is
    gated, is then made with it, for each 1 x 128 of D, as `runtime.quantise` does; bias is bf16. "mxfp4_weight" and
    "int4_weight" are of B alone, in e2m1 or u4 under A in bf16: each group's B and scales, scale_b (groups, K/64, 2*N),
    ue8m0, or (groups, K/128, N), bf16, lie in memory as `runtime.numbers.weights` says, a group behind the other or
    with room between them. So do "int4_zero_weight" and its scale_b (groups, K/64, N), every other of which is a zero
    point. Which epilogue there is changes nothing there: rows of gates and of ups are where
    `runtime.numbers.epilogue` says.

    Element types by short name; sums are in f32. `epilogue` is one of `EPILOGUES_OF_GROUPS`, `overlap` of
    `runtime.program.operation.OVERLAPS`, `rows` of `ROWS`.
    """

    operation: ClassVar[str] = "grouped_gemm"
    added: ClassVar[tuple[str, ...]] = ("rows",)

    a: str
    b: str
    d: str
    groups: int
    n: int
    k: int
    epilogue: str = "none"
    overlap: str = "serial"
    scaling: str = "none"
    rows: str = "contiguous"

    @cached_property
    def parts(self) -> Epilogue:
        """What `epilogue` says."""
        return Epilogue.of(self.epilogue)

    @property
    def quantises(self) -> bool:
        """Whether D is in 8 bits, with scales that are made with it."""
        return DTYPES[self.d].narrow

    @property
    def columns(self) -> int:
        """Columns of D: N, or half of it where the epilogue is gated."""
        return self.n // 2 if self.parts.gated else self.n

    def key(self) -> str:
        """One readable word, the same for equal signatures and only for them."""
        word = f"{self.a}_{self.b}_{self.d}_grouped_{self.epilogue}_g{self.groups}_n{self.n}_k{self.k}"
        if self.scaling != "none":
            word += f"_{self.scaling}"
        if self.rows != "contiguous":
            word += f"_{self.rows}"
        return word if self.overlap == "serial" else f"{word}_{self.overlap}"

    def operands(self) -> tuple[Operand, ...]:
        """The tensors that kernels take, in order."""
        return self._operands

    @cached_property
    def _operands(self) -> tuple[Operand, ...]:
        masked, gathered = self.rows == "masked", self.rows == "gathered"
        groups = ("groups",) if masked else ()
        prepared = SCALINGS[self.scaling].layout == FRAGMENTS
        plain = (
            Operand("a", self.a, (*groups, "T" if gathered else "M", "K")),
            Operand("b", self.b, ("groups", "N", "K"), "tiles" if prepared else "rows"),
            *([Operand("indices", "i32", ("M",))] if gathered else []),
            Operand("counts" if masked else "ends", "i32", ("groups",)),
            Operand("d", self.d, (*groups, "M", "P" if self.parts.gated else "N")),
        )
        return plain + group_operands(self.d, self.scaling, self.epilogue, masked)

    def extents(self) -> Mapping[str, int]:
        """The extent of each axis of `operands` that does not depend on M."""
        known = {"groups": self.groups, "N": self.n, "K": self.k, "P": self.columns}
        axes = {axis for operand in self._operands for axis in operand.axes if axis not in ("M", "T")}
        return known | {axis: extent_of(axis, known) for axis in axes}


def group_operands(d: str, scaling: str, epilogue: str, masked: bool = False) -> tuple[Operand, ...]:
    """What a grouped GEMM takes after A, B, ends and D, in this order: scale_a, scale_b, bias, and of D in 8 bits
    scale_d, which it writes."""
    scales, found = SCALINGS[scaling], []
    if "a" in scales.operands:
        of_a = (*(["groups"] if masked else []), *scales.axes("a"))
        found.append(Operand("scale_a", scales.dtype, of_a, "rows" if scales.k is None else "free"))
    if "b" in scales.operands:
        layout = "tiles" if scales.layout == FRAGMENTS else "rows"
        found.append(Operand("scale_b", scales.dtype, ("groups", *scales.axes("b")), layout))
    if Epilogue.of(epilogue).bias:
        found.append(Operand("bias", extra_dtype(d), ("groups", "N")))
    if DTYPES[d].narrow:
        columns = "P" if Epilogue.of(epilogue).gated else "N"
        found.append(Operand("scale_d", "f32", ("M", blocks(columns, SCALE_BLOCK))))
    return tuple(found)


class GroupedGemm(FieldOperation[Signature]):
    """The operation; see `runtime.program.operation.Operation`."""

    name = "grouped_gemm"
    signature = Signature
    pattern = _KEY
    labels: Mapping[str, str] = {"a": "A", "b": "B", "d": "D", "n": "N", "k": "K"}
    words: Mapping[str, tuple[str, ...]] = {
        "epilogue": EPILOGUES_OF_GROUPS,
        "overlap": OVERLAPS,
        "scaling": SCALINGS_OF_GROUPS,
        "rows": ROWS,
    }
    minor = ("overlap",)

    def read(self, obj: Any) -> Signature:
        """The signature that `Signature.to_json` wrote; words may be absent where they are `usual`.

        Raises:
            RecordError: it is malformed.
        """
        found = super().read({**self.usual, **obj} if isinstance(obj, dict) else obj)
        if found.parts.gated and found.n % 2:
            raise RecordError(f"signature field 'n' must be even for {found.epilogue}, found {found.n}")
        if problem := unsupported_scaling(found.a, found.scaling, found.b):
            known = " or ".join(word for word in scalings_of(found.a, found.b) if word in SCALINGS_OF_GROUPS)
            raise RecordError(f"signature field 'scaling': {problem}{f'; write {known}' if known else ''}")
        if found.scaling in FORMATS and found.rows != "contiguous":
            raise RecordError(f"signature field 'rows': scaling {found.scaling} is for contiguous rows")
        if found.quantises and (found.scaling, found.rows) != ("block", "contiguous"):
            raise RecordError(f"signature field 'd': {found.d} is for scaling block and contiguous rows")
        return found

    def relying_on_less(self, signature: Signature) -> Iterator[Signature]:
        """Those that promise less overlap."""
        for word in reversed(OVERLAPS[: OVERLAPS.index(signature.overlap)]):
            yield replace(signature, overlap=word)

    def ask(
        self,
        view: Callable[[Any, str, bool], TensorView],
        a: Any,
        b: Any,
        ends: Any,
        *,
        masked: bool = False,
        indices: Any = None,
        out: Any = None,
        scale_a: Any = None,
        scale_b: Any = None,
        scale_d: Any = None,
        bias: Any = None,
        epilogue: str = "none",
        overlap: str = "serial",
        expected_rows: int = 0,
    ) -> Asked:
        """D for A (..., K), its rows by groups, B (groups, N, K) and where groups end, i32 (groups); without `out` a
        torch `a` gives a new tensor of its type, or in bf16 where that has 8 bits. Rows of `out` behind the last
        group's end are left as they are. `scale_a` and `scale_b` are as `Signature` says, M being all rows of D; B of 4
        bits comes with `scale_b` alone, as `runtime.torch.prepare_weight` makes both.

        If `masked`, A is (groups, rows, K), `out` and `scale_a` are likewise, and what stands for `ends` is how many
        rows each group has, i32 (groups); those behind are left as they are.

        The function that serves is chosen for `expected_rows`: how many rows all groups are expected to have, or each
        if `masked`; 0 for as many as there is room for.

        With `indices`, i32 (M), A is (T, K), and row r of `out` (M, columns) is made of A's row `indices[r]`. The
        device takes an index outside A as that of A's first row or last.

        `bias` (groups, N) is added before the epilogue: "none", relu, gelu, gelu_tanh, silu, or gated: swiglu, geglu,
        geglu_tanh or swiglu_clamped, also `_interleaved`. `out` in e4m3 comes with `scale_d`, f32 (M, columns/128),
        which is written too: a scale for each 1 x 128 of D, made of the numbers there. `overlap` is the most that a
        function may rely on: where there is no entry for it, one that promises less serves.

        Raises:
            ArgumentError: the tensors do not go together.
        """
        if epilogue not in _ACTIVATIONS:
            known = ", ".join((*ACTIVATIONS, *GATED))
            raise ArgumentError(f"grouped_gemm has no epilogue {epilogue!r:.50}; it has {known}")
        if overlap not in OVERLAPS:
            raise ArgumentError(f"overlap must be one of {', '.join(OVERLAPS)}, found {overlap!r:.50}")
        lie = _rows(masked, indices)
        if expected_rows and not is_int(expected_rows, 1, MAX_EXTENT):
            raise ArgumentError(f"expected_rows must be 0 or more, found {expected_rows!r:.50}")
        rows, of_b = view(a, "a", False), view(b, "b", False)
        split = view(ends, "counts" if masked else "ends", False)
        _check_shapes(rows, of_b, split, masked)
        gated, (groups, n, k) = EPILOGUES[epilogue].gated, of_b.shape
        if gated and n % 2:
            raise ArgumentError(f"{epilogue} makes one column of two, and N = {n} is odd")
        # Indices come before ends.
        lists = [split] if indices is None else [_of_indices(view(indices, "indices", False), rows), split]
        shape = (*(rows.shape[:-1] if indices is None else lists[0].shape), n // 2 if gated else n)
        if out is None:
            out = allocate(a, shape, result_dtype(rows.dtype))
        d = view(out, "out", True)
        if d.shape != shape:
            raise ArgumentError(f"out must have the shape {shape}, found {d.shape}")
        check_apart("out", d, (rows, of_b, *lists))
        passed = (("scale_a", scale_a), ("scale_b", scale_b), ("bias", bias), ("scale_d", scale_d))
        given = {name: view(x, name, name == "scale_d") for name, x in passed if x is not None}
        scaling = _scaling(rows, of_b, given)
        if scaling in FORMATS and lie != "contiguous":
            raise ArgumentError(f"b in {of_b.dtype} is multiplied with contiguous rows, found {lie} rows")
        words = EPILOGUES[epilogue]._replace(bias=bias is not None).word(), overlap, scaling, lie
        signature = Signature(rows.dtype, of_b.dtype, d.dtype, groups, n, k, *words)
        if not masked:
            rows, d = flatten_rows(rows, "a"), flatten_rows(d, "out")
        m = d.shape[-2]
        extras = _extras(signature, m, given, d)
        arguments = (rows, of_b, *lists, d, *extras)
        if signature.quantises:
            check_apart("scale_d", extras[-1], arguments[:-1])
        return Asked(signature, min(m, expected_rows or m), arguments, out)


def active_groups(groups: int, m: int) -> float:
    """How many of so many groups have a row on average, of `m` rows that fall to each of them alike:
    groups * (1 - (1 - 1/groups)^m)."""
    return groups * -math.expm1(m * math.log1p(-1.0 / groups)) if groups > 1 else 1.0


def _rows(masked: bool, indices: Any) -> str:
    """How rows come to their groups, one of `ROWS`, by what was given.

    Raises:
        ArgumentError: these do not go together.
    """
    if masked and indices is not None:
        raise ArgumentError("indices go with ends of groups, and masked rows are not gathered")
    return "masked" if masked else "contiguous" if indices is None else "gathered"


def _check_shapes(a: TensorView, b: TensorView, split: TensorView, masked: bool) -> None:
    """Whether A and B have the same K, and as many groups as ends or counts, `split`, say.

    Raises:
        ArgumentError: they have not.
    """
    groups, k = (b.shape[0], b.shape[-1]) if b.shape else (0, 0)
    fits = len(a.shape) == 3 and a.shape[0] == groups if masked else bool(a.shape)
    if len(b.shape) != 3 or not fits or a.shape[-1] != k:
        takes = "(groups, rows, K)" if masked else "(..., K)"
        raise ArgumentError(f"grouped_gemm takes a {takes} and b (groups, N, K); found {a.shape} and {b.shape}")
    if split.dtype != "i32" or split.shape != (groups,):
        name = "counts" if masked else "ends"
        raise ArgumentError(
            f"grouped_gemm takes {name} of type i32, one for each of {groups} groups; found {split.dtype} {split.shape}"
        )


def _of_indices(indices: TensorView, a: TensorView) -> TensorView:
    """The indices, which may choose rows of A.

    Raises:
        ArgumentError: they are of another type or rank, or A has no rows to choose from.
    """
    if indices.dtype != "i32" or len(indices.shape) != 1:
        found = f"{indices.dtype} {indices.shape}"
        raise ArgumentError(f"grouped_gemm takes indices of type i32, one for each row of out; found {found}")
    if indices.shape[0] and 0 in a.shape[:-1]:
        raise ArgumentError(f"indices choose rows of a, which has none: its shape is {a.shape}")
    return indices


def _scaling(a: TensorView, b: TensorView, given: Mapping[str, TensorView]) -> str:
    """Which scaling the scales that were given mean for A and B of these types, by how many extents scale_b has.

    Raises:
        ArgumentError: one of the two is missing, or there is none such.
    """
    scales = [name for name in ("scale_a", "scale_b") if name in given]
    if of_weights := [word for word in FORMATS if b.dtype in SCALINGS[word].of_b]:
        return _scaling_of_weights(of_weights, a, b, given)
    if len(scales) == 1:
        raise ArgumentError("scale_a and scale_b come together; pass both or neither")
    found = "none"
    if scales:
        found = {2: "row_column", 3: "block"}.get(len(given["scale_b"].shape), "")
        if not found:
            raise ArgumentError(
                "scale_b must be (groups, N), one for each row of B, or (groups, N/128, K/128), one for each block; "
                f"found {given['scale_b'].shape}"
            )
    if problem := unsupported_scaling(a.dtype, found):
        raise ArgumentError(f"scaling {problem}")
    return found


def _scaling_of_weights(words: Sequence[str], a: TensorView, b: TensorView, given: Mapping[str, TensorView]) -> str:
    """Which of the scalings `words` scale_b has, which alone is given, where both lie as kernels read them.

    Raises:
        ArgumentError: A is of another type, or scales are missing or not as they must be.
        LayoutError: there is room between the blocks of a group.
    """
    made, known = "runtime.torch.prepare_weight makes b and scale_b", {"N": b.shape[1], "K": b.shape[2]}
    shapes = {w: (b.shape[0], *(extent_of(axis, known) for axis in SCALINGS[w].axes("b"))) for w in words}
    wanted = " or ".join(str(shape) for shape in shapes.values())
    if problem := unsupported_scaling(a.dtype, words[0], b.dtype):
        raise ArgumentError(f"scaling {problem}")
    if "scale_a" in given or "scale_b" not in given:
        raise ArgumentError(f"b in {b.dtype} comes with scale_b {wanted} and without scale_a; {made}")
    found = given["scale_b"]
    word = next((w for w in words if (found.dtype, found.shape) == (SCALINGS[w].dtype, shapes[w])), None)
    if word is None:
        raise ArgumentError(
            f"scale_b of b {b.shape} in {b.dtype} must be {SCALINGS[words[0]].dtype} of shape {wanted}, found "
            f"{found.dtype} of {found.shape}; {made}"
        )
    for name, view in (("b", b), ("scale_b", found)):
        if view.strides[1:] != contiguous_strides(view.shape[1:]):
            raise LayoutError(
                f"{name} of shape {view.shape} must be without a gap in a group, found strides {view.strides}; {made}",
                f"strides of {name}",
            )
    return word


def _extras(signature: Signature, m: int, given: Mapping[str, TensorView], d: TensorView) -> list[TensorView]:
    """The operands behind D, of those that were given by name, in the order that kernels take them.

    Raises:
        ArgumentError: one is not of its type or shape, or shares memory with D.
    """
    extents, found = extents_at(signature, m), []
    if ("scale_d" in given) != signature.quantises or (signature.quantises and signature.rows != "contiguous"):
        raise ArgumentError(
            f"out in e4m3 and scale_d come together, of contiguous rows; found out in {signature.d}, "
            f"{'a' if 'scale_d' in given else 'no'} scale_d and {signature.rows} rows"
        )
    for operand in group_operands(signature.d, signature.scaling, signature.epilogue, signature.rows == "masked"):
        of, shape = given[operand.name], tuple(extents[axis] for axis in operand.axes)
        if (of.dtype, of.shape) != (operand.dtype, shape):
            raise ArgumentError(
                f"{operand.name} must be {operand.dtype} of shape {shape}, found {of.dtype} of {of.shape}"
            )
        if share_memory(d, of):
            raise ArgumentError(f"out shares memory with {operand.name}; pass another")
        found.append(of)
    return found


GROUPED_GEMM = GroupedGemm()
