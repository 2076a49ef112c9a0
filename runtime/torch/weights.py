"""Checkpoints' 4-bit weights as kernels read them: `prepare_weight` is for when a model is loaded.

Needs torch, and works on the device of what it is given. `runtime.numbers.weights` says how prepared weights lie in
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..errors import ArgumentError
from ..numbers.packed import unpack
from ..numbers.weights import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    FORMATS,
    INT4_ZERO,
    LANES,
    MINUS_0,
    WORDS,
    WeightFormat,
    arrange_codes,
    arrange_scales,
    codes_of,
    in_turn,
    scales_of,
)

_MXFP4, _INT4 = FORMATS["mxfp4_weight"], FORMATS["int4_weight"]
_INT4_ZERO = FORMATS["int4_zero_weight"]
_LARGEST_U4 = 15
_CODES_AT_ONCE = 1 << 23
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # in which four bits of a word, from the low ones, each of eight columns is
_UE8M0_OF_ONE, _LARGEST_UE8M0 = 127, 254
_MATRIX = 2  # dimensions


class PreparedWeight(NamedTuple):
    """What `Library.gemm(x, b, scale_b=scale_b)` takes for a weight (N, K) of 4 bits: `b` (N, K / 2) in units of two,
    torch.float4_e2m1fn_x2 or torch.uint4; `scale_b` in torch.float8_e8m0fnu or torch.bfloat16. Of experts both have one
    dimension more in front, as `Library.grouped_gemm` and `moe` take them."""

    b: torch.Tensor
    scale_b: torch.Tensor


@torch.no_grad()
def prepare_weight(
    packed: torch.Tensor, scales: torch.Tensor, layout: str, zeros: torch.Tensor | None = None
) -> PreparedWeight:
    """A weight (N, K) as kernels read it. `layout` says what a checkpoint has:

    - "mxfp4": `packed` uint8, (N, K / 2) or (N, K / 32, 16), the first of two elements in the low bits; `scales` (N,
      K / 32), ue8m0 or uint8 (gpt-oss's blocks and scales);
    - "compressed-tensors": `packed` int32 (N, K / 8), the first of eight int4, each plus 8, in the low bits; `scales`
      (N, K / 128) (weight_packed and weight_scale of pack-quantized with groups of 128); `zeros` int32 (N / 8,
      K / 128), packed alike along N (weight_zero_point, where weights are asymmetric);
    - "gptq": `packed` int32 (K / 8, N); `scales` (K / 128, N) (qweight and scales, g_idx in order, that is, without
      act-order); `zeros` int32 (K / 128, N / 8), of eight along N, each less 1 (qzeros, where weights are asymmetric);
    - "gptq_v2": the same with zero points as they are (checkpoint_format gptq_v2);
    - "awq": `packed` int32 (K, N / 8), `scales` (K / 128, N) and `zeros` int32 (K / 128, N / 8), eight along N in AWQ's
      order (qweight, scales and qzeros of the version "gemm").

    Without `zeros` codes of int4 are numbers plus 8. Scales of int4 become bf16. N is a multiple of 16, K of 64 (mxfp4)
    or 128. Where `scales` have one dimension more, in front, all tensors are of that many experts, each of which is
    prepared so. Rows stay in their order, also those of gates and ups.

    Raises:
        ArgumentError: `layout` is unknown, or tensors are not of it; scales are too large for a kernel.
    """
    if layout not in tuple(_LAYOUTS):
        raise ArgumentError(f"layout must be one of {', '.join(_LAYOUTS)}, found {layout!r:.50}")
    if scales.ndim == _MATRIX + 1:
        return _prepare_experts(packed, scales, layout, zeros)
    form, read, read_zeros = _LAYOUTS[layout]
    codes, scales = read(packed, scales)
    n, k = codes.shape
    if n % BLOCK_ROWS or k % form.multiple:
        raise ArgumentError(
            f"a weight of {layout} needs N in multiples of {BLOCK_ROWS} and K of {form.multiple}, found ({n}, {k})"
        )
    if scales.shape != (n, k // form.group):
        raise ArgumentError(
            f"scales of a weight ({n}, {k}) in {layout} are one for each 1 x {form.group}, found {tuple(scales.shape)} "
            "of them by rows and groups"
        )
    elements = torch.float4_e2m1fn_x2 if form is _MXFP4 else torch.uint4
    b = _arranged(codes, form).view(torch.uint8).reshape(n, k // 2).view(elements)
    scales = _as_kernels_have_them(scales, form)
    if zeros is not None:
        points = _zeros_of(zeros, read_zeros, layout, (n, k // form.group))
        form, scales = (
            _INT4_ZERO,
            in_turn(scales, (points.to(torch.int32) + MINUS_0).to(torch.int16).view(torch.bfloat16)),
        )
    elif layout in _NEED_ZEROS:
        raise ArgumentError(f"a weight of {layout} has zero points; pass them as `zeros`")
    return PreparedWeight(b, arrange_scales(scales, form).contiguous())


def _arranged(codes: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """Codes (N, K) as words (K / 64, N / 16, 32, 4) without a gap; so many rows at a time that what is made of these in
    between, eight times as large, takes little memory."""
    n, k = codes.shape
    found = torch.empty((k // BLOCK_COLUMNS, n // BLOCK_ROWS, LANES, WORDS), dtype=torch.int32, device=codes.device)
    rows = max(1, _CODES_AT_ONCE // (k * BLOCK_ROWS)) * BLOCK_ROWS
    for first in range(0, n, rows):
        words = arrange_codes(codes[first : first + rows].to(torch.int32), form)
        found[:, first // BLOCK_ROWS : (first + rows) // BLOCK_ROWS] = words
    return found


def _zeros_of(zeros: torch.Tensor, read: _Read | None, layout: str, shape: tuple[int, int]) -> torch.Tensor:
    """Zero points (N, K / group), which is `shape`."""
    if read is None:
        raise ArgumentError(f"a weight of {layout} has no zero points; leave `zeros` out")
    found = read(zeros)
    if found.shape != shape:
        raise ArgumentError(
            f"zero points in {layout} must be as many as scales, {shape} by rows and groups; found {tuple(found.shape)}"
        )
    return found


def _prepare_experts(
    packed: torch.Tensor, scales: torch.Tensor, layout: str, zeros: torch.Tensor | None
) -> PreparedWeight:
    """Weights of experts, one after the other, so that no more than one expert's are spread out at a time."""
    given = [packed, scales] if zeros is None else [packed, scales, zeros]
    if packed.ndim <= _MATRIX or len({len(x) for x in given}) > 1 or not len(scales):
        raise ArgumentError(
            "packed, scales and zeros must be of as many experts, at least one; found "
            f"{' and '.join(str(tuple(x.shape)) for x in given)}"
        )
    first = prepare_weight(packed[0], scales[0], layout, None if zeros is None else zeros[0])
    raw = [torch.empty((len(scales), *of.shape), dtype=torch.uint8, device=of.device) for of in _bytes(first)]
    for expert in range(len(scales)):
        more = None if zeros is None else zeros[expert]
        one = first if expert == 0 else prepare_weight(packed[expert], scales[expert], layout, more)
        for whole, of in zip(raw, _bytes(one), strict=True):
            whole[expert] = of
    return PreparedWeight(*(whole.view(of.dtype) for whole, of in zip(raw, first, strict=True)))


def prepare_in_place(
    packed: torch.Tensor, scales: torch.Tensor, layout: str, zeros: torch.Tensor | None = None
) -> PreparedWeight:
    """The same of experts' weights, in the memory of `packed` (experts, ...) and, where there are no zero points, of
    `scales`, all contiguous; they lose a checkpoint's numbers; no more than one expert's are spread out at a time.

    Raises:
        ArgumentError: as `prepare_weight`; nothing was written.
    """
    each: list[torch.Tensor | None] = list(zeros) if zeros is not None else [None] * len(scales)
    first = prepare_weight(packed[0], scales[0], layout, each[0])
    check_scales(scales, layout)  # or the last expert's would be refused when others are written
    if layout == "gptq" and zeros is not None:
        _zeros_of_gptq(zeros.flatten(0, 1))  # likewise
    places = [packed, scales]
    if zeros is not None:
        places[1] = scales.new_empty((len(scales), *first.scale_b.shape), dtype=first.scale_b.dtype)
    found = [x.view(torch.uint8).view(len(x), *of.shape) for x, of in zip(places, _bytes(first), strict=True)]
    for expert in range(len(scales)):
        one = first if expert == 0 else prepare_weight(packed[expert], scales[expert], layout, each[expert])
        for whole, of in zip(found, _bytes(one), strict=True):
            whole[expert] = of
    return PreparedWeight(*(x.view(of.dtype) for x, of in zip(found, first, strict=True)))


def widened(weight: PreparedWeight) -> torch.Tensor:
    """A prepared weight as numbers in bf16, (N, K), or (experts, N, K); for where no kernel reads it as it is."""
    if weight.b.ndim > _MATRIX:
        experts, n, units = weight.b.shape
        whole = weight.scale_b.new_empty((experts, n, 2 * units), dtype=torch.bfloat16)
        for expert, (b, scale_b) in enumerate(zip(*_bytes(weight), strict=True)):
            whole[expert] = widened(PreparedWeight(b.view(weight.b.dtype), scale_b.view(weight.scale_b.dtype)))
        return whole
    form = _form_of(weight)
    (n, units), words = weight.b.shape, weight.b.view(torch.uint8).view(torch.int32)
    codes = codes_of(words.view(2 * units // BLOCK_COLUMNS, n // BLOCK_ROWS, LANES, WORDS), form)
    if form is _MXFP4:
        pairs = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.float4_e2m1fn_x2)
        numbers = unpack(torch, pairs, "e2m1", torch.float32)
    else:
        numbers = (codes - _zeros_in(weight.scale_b, form)).float()
    scales = scales_of(weight.scale_b.float() * 2.0**-form.scale_exponent, form)
    scales = scales[:, ::2] if form.zeros else scales
    return (numbers * scales.repeat_interleave(form.group, 1)).to(torch.bfloat16)


def _form_of(weight: PreparedWeight) -> WeightFormat:
    """By how many columns scales have, where the type of codes leaves a choice."""
    if weight.b.dtype == torch.float4_e2m1fn_x2:
        return _MXFP4
    return _INT4_ZERO if len(weight.scale_b) * _INT4_ZERO.columns == 2 * weight.b.shape[1] else _INT4


def _zeros_in(scale_b: torch.Tensor, form: WeightFormat) -> torch.Tensor | int:
    """The zero points (N, K) in the memory of scales, or the one that all codes have."""
    if not form.zeros:
        return INT4_ZERO
    points = scales_of(scale_b.view(torch.int16), form)[:, 1::2] - MINUS_0
    return points.to(torch.int32).repeat_interleave(form.group, 1)


def _bytes(weight: PreparedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tensors as bytes, which torch copies whatever they are of."""
    return weight.b.view(torch.uint8), weight.scale_b.view(torch.uint8)


def int4_rows(packed: torch.Tensor, scales: torch.Tensor, layout: str) -> PreparedWeight:
    """The same of int4 for kernels that read rows, the scaling "int4_group128": `b` (N, K / 2) in units of two signed
    int4, torch.int4, the first in the low bits, and `scale_b` (K / 128, N).

    Raises:
        ArgumentError: as `prepare_weight`, or `layout` is not of int4.
    """
    known = [name for name, (form, *_) in _LAYOUTS.items() if form is _INT4 and name not in _NEED_ZEROS]
    if layout not in known:
        raise ArgumentError(f"layout must be one of {', '.join(known)}, found {layout!r:.50}")
    codes, scales = _LAYOUTS[layout][1](packed, scales)
    n, k = codes.shape
    if k % _INT4.group or scales.shape != (n, k // _INT4.group):
        raise ArgumentError(
            f"a weight ({n}, {k}) in {layout} needs K in multiples of {_INT4.group} and a scale for each group, found "
            f"{tuple(scales.shape)} of them by rows and groups"
        )
    signed = (codes ^ INT4_ZERO).to(torch.uint8)  # two's complement of a code less 8
    return PreparedWeight(
        (signed[:, ::2] | signed[:, 1::2] << 4).view(torch.int4), scales.t().to(torch.bfloat16).contiguous()
    )


def _mxfp4(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (N, K), and ue8m0 (N, K / 32) as bytes."""
    if packed.dtype != torch.uint8 or packed.ndim not in (2, 3):
        raise ArgumentError(f"mxfp4 is packed in uint8 (N, K / 2), found {packed.dtype} {tuple(packed.shape)}")
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu) or scales.ndim != _MATRIX:
        raise ArgumentError(f"scales of mxfp4 are uint8 (N, K / 32), found {scales.dtype} {tuple(scales.shape)}")
    flat = packed.flatten(1)
    return torch.stack((flat & 15, flat >> 4), -1).flatten(1), scales.view(torch.uint8)


def _compressed_tensors(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _eights(packed, scales, "compressed-tensors"), scales


def _gptq(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _eights(packed.t(), scales.t(), "gptq"), scales.t()


def _eights(packed: torch.Tensor, scales: torch.Tensor, layout: str) -> torch.Tensor:
    """Codes (N, K) of eight in an int32, (N, K / 8)."""
    if packed.dtype != torch.int32 or packed.ndim != _MATRIX:
        raise ArgumentError(f"{layout} packs in an int32 matrix, found {packed.dtype} {tuple(packed.shape)}")
    if not scales.is_floating_point() or scales.ndim != _MATRIX:
        raise ArgumentError(f"scales of {layout} are a matrix of floats, found {scales.dtype} {tuple(scales.shape)}")
    return _eight_of_each(packed)


def _eight_of_each(packed: torch.Tensor) -> torch.Tensor:
    """Eight columns of 4 bits for each int32, from the low ones, as bytes."""
    found = torch.empty((*packed.shape, 8), dtype=torch.uint8, device=packed.device)
    for place in range(8):
        found[..., place] = packed >> (4 * place) & 15
    return found.flatten(1)


def _awq(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _in_awq_order(_eights(packed, scales, "awq")).t(), scales.t()


def _in_awq_order(found: torch.Tensor) -> torch.Tensor:
    """Columns in their order, of which a word had each eight in AWQ's."""
    return found.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)


def _zeros_of_compressed_tensors(zeros: torch.Tensor) -> torch.Tensor:
    return _packed_zeros(zeros.t(), "compressed-tensors").t()


def _zeros_of_gptq(zeros: torch.Tensor) -> torch.Tensor:
    found = _packed_zeros(zeros, "gptq").t()
    if bool((found == _LARGEST_U4).any()):
        raise ArgumentError(
            "a zero point of gptq, which is less 1 in a checkpoint, is 15 there: some libraries read it as 0, some as "
            '16; convert the checkpoint to gptq_v2 with the library that made it, and pass layout "gptq_v2"'
        )
    return found + 1


def _zeros_of_gptq_v2(zeros: torch.Tensor) -> torch.Tensor:
    return _packed_zeros(zeros, "gptq_v2").t()


def _zeros_of_awq(zeros: torch.Tensor) -> torch.Tensor:
    return _in_awq_order(_packed_zeros(zeros, "awq")).t()


def _packed_zeros(zeros: torch.Tensor, layout: str) -> torch.Tensor:
    if zeros.dtype != torch.int32 or zeros.ndim != _MATRIX:
        raise ArgumentError(f"{layout} packs zero points in an int32 matrix, found {zeros.dtype} {tuple(zeros.shape)}")
    return _eight_of_each(zeros)


_Read = Callable[[torch.Tensor], torch.Tensor]
# What a layout's weights are without zero points, and how codes and scales, and zero points, are read.
_LAYOUTS: dict[str, tuple[WeightFormat, Callable[..., tuple[torch.Tensor, torch.Tensor]], _Read | None]] = {
    "mxfp4": (_MXFP4, _mxfp4, None),
    "compressed-tensors": (_INT4, _compressed_tensors, _zeros_of_compressed_tensors),
    "gptq": (_INT4, _gptq, _zeros_of_gptq),
    "gptq_v2": (_INT4, _gptq, _zeros_of_gptq_v2),
    "awq": (_INT4, _awq, _zeros_of_awq),
}
_NEED_ZEROS = ("awq",)


def check_scales(scales: torch.Tensor, layout: str) -> None:
    """Read a checkpoint's scales, of one weight or of many.

    Raises:
        ArgumentError: they are too large for a kernel.
    """
    _check_scales(scales, _LAYOUTS[layout][0])


def _check_scales(scales: torch.Tensor, form: WeightFormat) -> None:
    if form is _MXFP4:
        largest = int(scales.view(torch.uint8).max())
        if largest + form.scale_exponent > _LARGEST_UE8M0:
            raise ArgumentError(
                f"a scale of mxfp4 is 2^{largest - _UE8M0_OF_ONE} or not a number; kernels take them below "
                f"2^{math.log2(form.limit):.0f}: is `scales` what it should be?"
            )
    elif not bool((scales.to(torch.bfloat16).abs() < form.limit).all()):
        raise ArgumentError(
            f"a scale of int4 is {float(scales.abs().max())} or not a number; kernels take them below "
            f"{form.limit:.0f}: is `scales` what it should be?"
        )


def _as_kernels_have_them(scales: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """Scales times their power of two."""
    _check_scales(scales, form)
    if form is _MXFP4:
        return (scales.to(torch.int32) + form.scale_exponent).to(torch.uint8).view(torch.float8_e8m0fnu)
    return scales.to(torch.bfloat16) * 2.0**form.scale_exponent
