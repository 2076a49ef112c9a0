"""`runtime.torch`'s MXFP8, MXFP4 and NVFP4 against ml_dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runtime.errors import ArgumentError
from runtime.gemm.signature import Signature
from runtime.numbers.scaling import SCALINGS

from .scale_tiles import tile_offset

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")

from runtime.numbers.packed import from_tiles, pack, to_tiles, unpack  # noqa: E402
from runtime.torch import Quantised, quantise_mxfp4, quantise_mxfp8, quantise_nvfp4  # noqa: E402

FORMATS = {"mxfp8": quantise_mxfp8, "mxfp4": quantise_mxfp4, "nvfp4": quantise_nvfp4}
EACH = pytest.mark.parametrize("word", FORMATS)


def numbers(x: Any) -> Any:
    """What ml_dtypes reads in the bytes of a tensor, as float64."""
    raw = numpy.asarray(x.contiguous().view(torch.uint8))
    if x.dtype == torch.float4_e2m1fn_x2:
        raw = numpy.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:-1], -1)
        return raw.view(ml_dtypes.float4_e2m1fn).astype(numpy.float64)
    return raw.view(getattr(ml_dtypes, str(x.dtype).removeprefix("torch."))).astype(numpy.float64)


def scale_of(found: Quantised, word: str, row: int, k: int) -> float:
    """The whole factor of one element, from where hardware reads it."""
    block = k // (SCALINGS[word].k or 1)
    scale = numbers(found.scales)[row // 128, block // 4 * 512 + tile_offset(row % 128, block % 4)]
    return float(scale * (1 if found.tensor_scale is None else found.tensor_scale.item()))


def test_four_bits_are_rounded_as_ml_dtypes_rounds_them() -> None:
    steps = torch.arange(-8.0, 8.0, 2**-6)  # every tie among them
    values = torch.cat([steps, torch.nextafter(steps, torch.full_like(steps, 9)), torch.tensor([-0.0, 1e30])])
    wanted = numpy.asarray(values).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(numpy.float64)
    found = pack(torch, values, "e2m1")
    numpy.testing.assert_array_equal(numbers(found), wanted)
    numpy.testing.assert_array_equal(unpack(torch, found, "e2m1", torch.float64).numpy(), wanted)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 4), (129, 5), (300, 34)])
def test_scales_go_where_hardware_reads_them_and_zeros_fill_up(rows: int, blocks: int) -> None:
    scales = torch.randint(1, 255, (rows, blocks), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    tiles = to_tiles(torch, scales)
    raw = tiles.view(torch.uint8)
    assert tiles.shape == (-(-rows // 128), -(-blocks // 4) * 512)
    for row in range(rows):
        for block in range(blocks):
            at = block // 4 * 512 + tile_offset(row % 128, block % 4)
            assert raw[row // 128, at] == scales.view(torch.uint8)[row, block]
    assert int((raw != 0).sum()) == rows * blocks
    assert torch.equal(from_tiles(tiles).view(torch.uint8)[:rows, :blocks], scales.view(torch.uint8))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_ml_dtypes_under_the_scales(word: str, dtype: Any) -> None:
    """Elements are what ml_dtypes rounds quotients to; scales what formats ask for of the largest of a block."""
    torch.manual_seed(0)
    x = (torch.randn(130, 160) * torch.logspace(-6, 6, 130)[:, None]).to(dtype)
    x[3] = 0.0
    found = FORMATS[word](x)
    element = ml_dtypes.float8_e4m3fn if word == "mxfp8" else ml_dtypes.float4_e2m1fn
    largest, size = float(ml_dtypes.finfo(element).max), SCALINGS[word].k or 1
    whole, exact = numbers(found.values), numpy.asarray(x.double())
    for row in (0, 3, 64, 127, 129):
        for k in range(0, 160, size):
            block, scale = exact[row, k : k + size], scale_of(found, word, row, k)
            most = numpy.abs(block).max()
            if not scale:  # too small for a scale, beside the largest number of the tensor
                assert not whole[row, k : k + size].any()
                assert most < numpy.abs(exact).max() * 2.0**-17
                continue
            quotients = (block.astype(numpy.float32) / numpy.float32(scale)).clip(-largest, largest)
            numpy.testing.assert_array_equal(whole[row, k : k + size], quotients.astype(element).astype(numpy.float64))
            if word.startswith("mx") and most:
                power = numpy.floor(numpy.log2(most)) - numpy.floor(numpy.log2(largest))
                assert scale == 2.0 ** max(power, -127)
            elif most > 1e-4 * numpy.abs(exact).max():
                assert scale == pytest.approx(most / largest, rel=0.07)  # half a unit in the last place of e4m3


@EACH
def test_leading_dimensions_are_rows_and_zeros_stay_zeros(word: str) -> None:
    x = torch.randn(3, 50, 64)
    found, flat = FORMATS[word](x), FORMATS[word](x.flatten(0, 1))
    assert found.values.shape == (3, 50, 64 if word == "mxfp8" else 32)
    assert torch.equal(found.values.view(torch.uint8).flatten(0, 1), flat.values.view(torch.uint8))
    assert torch.equal(found.scales.view(torch.uint8), flat.scales.view(torch.uint8))
    assert not numbers(FORMATS[word](torch.zeros(2, 64)).values).any()


def test_a_tensor_scale_may_be_a_checkpoints_own() -> None:
    x = torch.randn(4, 32)
    own = torch.tensor([0.25])
    found = quantise_nvfp4(x, own)
    assert found.tensor_scale is own
    assert scale_of(found, "nvfp4", 0, 0) == pytest.approx(float(x[0, :16].abs().max()) / 6, rel=0.07)
    with pytest.raises(ArgumentError, match=r"one element in torch.float32, found torch.float32 of shape \(2,\)"):
        quantise_nvfp4(x, torch.ones(2))


@EACH
def test_tensors_that_have_no_whole_blocks_are_refused(word: str) -> None:
    quantise: Callable[[Any], Quantised] = FORMATS[word]
    for x in (torch.zeros(2, 40), torch.zeros(2, 64, dtype=torch.int32), torch.zeros(0, 64)):
        with pytest.raises(ArgumentError, match=f"{word} is for tensors"):
            quantise(x)


@pytest.mark.parametrize(("word", "most"), [("mxfp8", 0.05), ("mxfp4", 0.2), ("nvfp4", 0.15)])
def test_a_product_of_what_is_quantised_is_that_of_the_numbers_but_for_rounding(word: str, most: float) -> None:
    """As the kernel is to make it, from the operands of a call."""
    from aot.tune.gemm.operands import OperandSet, reference

    torch.manual_seed(1)
    x, weight = torch.randn(70, 544) * 9, torch.randn(96, 544) / 50
    a, b = FORMATS[word](x), FORMATS[word](weight)
    element = SCALINGS[word].of[0]
    s = Signature(element, element, "bf16", "f32", "none", 96, 544, scaling=word)
    extras = {"scale_a": a.scales, "scale_b": b.scales}
    if a.tensor_scale is not None and b.tensor_scale is not None:
        extras["scale_ab"] = a.tensor_scale * b.tensor_scale
    found, wanted = reference(s, OperandSet(a.values, b.values, torch.empty(70, 96), extras)), (x @ weight.T).double()
    assert 0.2 * most < (found - wanted).norm() / wanted.norm() < most


@pytest.mark.parametrize("word", FORMATS)
def test_parameters_are_quantised_without_a_gradient_and_transposed_ones_by_rows(word: str) -> None:
    x = torch.nn.Parameter(torch.randn(64, 128).t())
    found = FORMATS[word](x)
    assert not any(of.requires_grad for of in found if of is not None)
    assert found.values.is_contiguous()
    assert found.scales.grad_fn is None
