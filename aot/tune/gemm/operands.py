"""Random operands of a GEMM, what it must make of them, and how exactly.

Needs torch; on the GPU for measurements, on the CPU for tests of this file. Knows nothing of kernels or archives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from runtime.gemm.call import GemmOptions
from runtime.gemm.fallback import apply_activation
from runtime.gemm.signature import Operand, Signature
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import CLAMPED
from runtime.numbers.packed import from_tiles
from runtime.numbers.quantised import LEAST_AMAX
from runtime.numbers.scaling import SCALE_BLOCK, SCALINGS, TILES
from runtime.program.operation import extents_at

from ..elements import TORCH_DTYPES, name_of, poisoned, to_numbers, to_type
from ..measure import tolerance
from ..operand_sets import CLAMPED_SIZE, FieldOperands, RandomOperands, reference_dtype
from .prepared_weights import dequantised, put_zero_points, random_weight, scale_size

# What the norm of the error may be is `DType.tolerance` of the output, of which rounding takes 1.7e-3 for bf16, 2.1e-4
# for f16 and 2.6e-2 for e4m3. For 8-bit inputs to a 16-bit output it is this: Hopper's fp8 tensor cores keep 14 bits of
# a partial sum (DeepSeek-V3 technical report, 3.3.2), and kernels may let them add up all of K. Those that add up parts
# in f32 are not off by as much, and where scales are for rows or blocks, that is for accuracy, all must do so.
MAX_ERROR_FP8 = 1e-2
MAX_ERROR_FP8_PROMOTED = DTYPES["bf16"].tolerance
_ZERO_ROWS = 5, 11  # of A, where a sum of zeros shall be looked at
# cuBLAS wants scales of blocks in rows of a multiple of 4, and as many rows of A (see `baseline`); we take any.
_SCALE_ALIGNMENT = 4


@dataclass(frozen=True)
class OperandSet(FieldOperands):
    """One A, B and D of a GEMM, and by name what follows them, in the order of `Signature.operands`."""

    written = ("d",)

    a: torch.Tensor
    b: torch.Tensor
    d: torch.Tensor
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """All of them, in the order in which a function takes them."""
        return (self.a, self.b, self.d, *self.extras.values())


class Weights(RandomOperands[Signature]):
    """Random B matrices of a signature, enough of them that using them in turn finds L2 cold.

    Values are such that results are of the order of 1, or of the root of K where inputs of at most 8 bits are not
    scaled; integers use their whole range. Scales differ from each other by factors of about e, so that none can stand
    for another.
    """

    def __init__(self, signature: Signature, m: int, l2_bytes: int, seed: int, device: str = "cuda") -> None:
        super().__init__(signature, m, l2_bytes, seed, device)
        self.b = [self._b() for _ in range(self.count)]

    def operands(self, m: int) -> list[OperandSet]:
        """Fresh random operands and poisoned outputs for `m` rows, one for each B."""
        s = self.signature
        batch = (s.batch,) if s.batch > 1 else ()
        return [
            OperandSet(
                self._rows(m, s.k, s.a),
                b,
                poisoned((*batch, m, s.columns), s.d, self.device),
                {operand.name: self._extra(operand, m) for operand in s.operands()[3:]},
            )
            for b in self.b
        ]

    def _normal(self, shape: tuple[int, ...], dtype: str = "f32", size: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, device=self.device, generator=self.generator, dtype=torch.bfloat16)
        return to_type(values.mul_(size), dtype)

    def _b(self) -> torch.Tensor:
        s = self.signature
        batch = (s.batch,) if s.batch > 1 else ()
        n_major = s.b_major == "n"
        if SCALINGS[s.scaling].operands == "b" and not SCALINGS[s.scaling].quantises:
            return random_weight(s.n, s.k, s.b, self.generator)
        shape = (*batch, s.k, s.n) if n_major else (*batch, s.n, s.k)
        if DTYPES[s.b].mantissa_bits is None:
            limits = torch.iinfo(TORCH_DTYPES[s.b])
            drawn = {"device": self.device, "generator": self.generator, "dtype": TORCH_DTYPES[s.b]}
            return torch.randint(limits.min, limits.max + 1, shape, **drawn)
        # Narrow values use their type's range: nothing underflows to a constant.
        scale = 1.0 if DTYPES[s.b].narrow else s.k**-0.5
        values = torch.randn(shape, device=self.device, generator=self.generator, dtype=torch.bfloat16)
        values = to_type(values.mul_(scale), s.b)
        return values.transpose(-1, -2) if n_major else values

    def _rows(self, m: int, columns: int, dtype: str) -> torch.Tensor:
        """A matrix of `m` rows for each batch; for scales of blocks with rows behind it that nobody counts."""
        s = self.signature
        if s.batch > 1:
            return self._normal((s.batch, m, columns), dtype)
        rows = _round_up(m, _SCALE_ALIGNMENT) if SCALINGS[s.scaling].k else m
        size = CLAMPED_SIZE if s.parts.activation == CLAMPED else 1.0
        if DTYPES[s.b].mantissa_bits is None and s.scaling == "none":
            size = 2.0 ** (1 - DTYPES[s.b].bits)
        return self._normal((rows, columns), dtype, size)[:m]

    def _extra(self, operand: Operand, m: int) -> torch.Tensor:
        s = self.signature
        extents = extents_at(s, m)
        shape = tuple(extents[axis] for axis in operand.axes)
        # What sums are like without scales, so that a bias or a residual that is left out is seen.
        size = s.k**0.5 if DTYPES[s.a].narrow and s.scaling == "none" else 1.0
        if operand.name in ("bias", "residual"):
            values = self._normal(shape, "f32").mul_(size)
            return values.to(TORCH_DTYPES[operand.dtype])
        if operand.name == "scale_d" and DTYPES[s.d].narrow:  # so that some results saturate, and few are subnormal
            return torch.rand(shape, device=self.device, generator=self.generator).mul_(48).add_(16).div_(size)
        smallest = "scale_ab" if SCALINGS[s.scaling].tensor_scale else "scale_b"
        share = s.k**-0.5 * scale_size(s.scaling) if operand.name == smallest else 1.0
        if len(shape) != 2 or operand.layout == "tiles":
            found = self._scales(shape).mul_(share).to(TORCH_DTYPES[operand.dtype])
            return put_zero_points(s.scaling, found, self.generator) if operand.name == "scale_b" else found
        if operand.name == "scale_a":
            stride = _round_up(shape[0], _SCALE_ALIGNMENT)
            return self._scales((shape[1], stride)).to(TORCH_DTYPES[operand.dtype]).t()[: shape[0]]
        blocks = _round_up(shape[1], _SCALE_ALIGNMENT)
        return self._scales((shape[0], blocks)).mul_(share).to(TORCH_DTYPES[operand.dtype])[:, : shape[1]]

    def _scales(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._normal(shape).mul_(0.5).exp_()


def gemm_options(signature: Signature, operands: OperandSet) -> GemmOptions:
    """What `Library.gemm` takes by keyword for a signature and these operands; nothing where it is plain."""
    options: dict[str, Any] = dict(operands.extras)
    if signature.parts.activation != "none":
        options["epilogue"] = signature.parts.activation_word
    if signature.overlap != "serial":
        options["overlap"] = signature.overlap
    return cast(GemmOptions, options)


def put_zeros(operands: OperandSet) -> None:
    """Make two rows of A zeros, of one sign each, if there are so many, and the numbers of a row of B positive.

    A sum of zeros has a sign, which may depend on how it is made.
    """
    a, b = operands.a, operands.b
    for row, zero in zip(_ZERO_ROWS, (0.0, -0.0), strict=True):
        if row < a.shape[-2]:
            _put(a[..., row, :], to_numbers(a[..., row, :], name_of(a)).fill_(zero))
    if name_of(a) == name_of(b):  # else B lies in no rows
        _put(b[..., 0, :], to_numbers(b[..., 0, :], name_of(b)).abs_())


def _put(tensor: torch.Tensor, numbers: torch.Tensor) -> None:
    """Write numbers into a part of a tensor."""
    found = to_type(numbers, name_of(tensor))
    if DTYPES[name_of(tensor)].unit > 1:  # which torch does not copy
        tensor, found = tensor.view(torch.uint8), found.view(torch.uint8)
    tensor.copy_(found)


def max_error(signature: Signature) -> float:
    """The relative error, in the norm, that a kernel for `signature` may have.

    Raises:
        MeasureError: nobody has said what a result of its type may have.
    """
    of_output = tolerance(signature.d)
    if DTYPES[signature.d].narrow or not DTYPES[signature.a].narrow:
        return of_output
    return MAX_ERROR_FP8_PROMOTED if SCALINGS[signature.scaling].fine else MAX_ERROR_FP8


def reference(signature: Signature, operands: OperandSet) -> torch.Tensor:
    """What D is before it is rounded, though after it saturates: float64 where that is cheap, else float32."""
    a, b, extras = operands.a, operands.b, operands.extras
    wide = reference_dtype(a.numel() + b.numel() + operands.d.numel())
    scale_a, scale_b = extras.get("scale_a"), extras.get("scale_b")
    scaling = SCALINGS[signature.scaling]
    a, b = to_numbers(a, signature.a, wide), weights_as_numbers(signature, b, extras, wide)
    if scaling.quantises:
        a = _requantised(a, signature.b)
    if scale_a is not None and scale_b is not None:
        if scaling.layout == TILES:
            scale_a, scale_b = from_tiles(scale_a), from_tiles(scale_b)
        scale_a = _spread(scale_a.to(wide), (scaling.rows_a, scaling.k), a.shape)
        scale_b = _spread(scale_b.to(wide), (scaling.rows_b, scaling.k), b.shape)
        if scaling.k is not None:
            a, b = a * scale_a, b * scale_b
            scale_a = scale_b = None
    with _exact_products():
        value = a @ b.transpose(-1, -2)
    del a, b
    if scale_a is not None and scale_b is not None:
        value *= scale_a * scale_b.T
    if "scale_ab" in extras:
        value *= extras["scale_ab"]
    if "bias" in extras:
        value += extras["bias"]
    value = apply_activation(torch, signature.parts, value)
    if "residual" in extras:
        value += extras["residual"]
    if "scale_d" in extras:
        value *= extras["scale_d"]
    return saturated(value, signature.d)


def weights_as_numbers(
    signature: Signature, b: torch.Tensor, extras: Mapping[str, torch.Tensor], wide: torch.dtype = torch.float32
) -> torch.Tensor:
    """B (N, K) as what A is multiplied with, where it has scales alone; as it is, where scales are of both."""
    scaling = SCALINGS[signature.scaling]
    if scaling.operands != "b":
        return to_numbers(b, signature.b, wide)
    if not scaling.quantises:
        return dequantised(signature.scaling, b, extras["scale_b"]).to(wide)
    return to_numbers(b, signature.b, wide) * _spread(extras["scale_b"].to(wide), (scaling.rows_b, scaling.k), b.shape)


def _requantised(a: torch.Tensor, dtype: str) -> torch.Tensor:
    """The numbers of A (M, K) after kernels have quantised them to `dtype` by 1 x 128.

    They are multiplied by the inverse of the scale, rounded, because ties are frequent: A has few bits.
    """
    rows, k = a.shape
    blocks = torch.nn.functional.pad(a.float(), (0, -k % SCALE_BLOCK)).view(rows, -1, SCALE_BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(LEAST_AMAX)
    largest = amax.new_tensor(DTYPES[dtype].largest)  # torch divides a number by a tensor in two steps
    narrow = to_numbers((blocks * (largest / amax)).to(TORCH_DTYPES[dtype]), dtype, a.dtype)
    return (narrow * (amax / largest)).view(rows, -1)[:, :k]


def saturated(value: torch.Tensor, dtype: str) -> torch.Tensor:
    """`value` with what a narrow type cannot hold at its largest number; it is changed in place."""
    largest = DTYPES[dtype].largest
    return value.clamp_(-largest, largest) if DTYPES[dtype].narrow else value


def _spread(scales: torch.Tensor, blocks: tuple[int | None, int | None], shape: torch.Size) -> torch.Tensor:
    """One scale for each row and element of K, from one for each block of them; 1 of those that share all."""
    if None in blocks:
        scales = scales.reshape([1 if size is None else -1 for size in blocks])
    for dim, size in enumerate(blocks):
        if size is not None:
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scales


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """No TF32 in here."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
