"""The tables of `runtime.numbers`: each fact against those who say it, and what follows from rows that are made up."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import re
from pathlib import Path

import pytest

from aot.problem.manifest import ManifestError, loads, signature_problem
from aot.providers.gemm_arguments import gemm_tensors
from aot.search.legal import unsuited
from aot.search.shape import Shape
from aot.search.targets import target
from aot.search.tile_waves import TileWaves
from runtime.errors import AotError, ArgumentError, LayoutError
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES, TORCH_NAMES, DType
from runtime.numbers.products import PRODUCTS, scalings_of, unsupported_scaling, unsupported_types
from runtime.program import geometry, tensor
from runtime.program.record import TensorArgument, TensorView

from .made_up_scaling import FP8, MANIFEST, VARIANT

FLOATS = [d for d in DTYPES.values() if d.mantissa_bits is not None]


def by_name(x: DType) -> str:
    return x.name


# --- element types ---


@pytest.mark.parametrize("d", [d for d in DTYPES.values() if d.torch], ids=by_name)
def test_torch_has_the_type_and_its_bits(d: DType) -> None:
    torch = pytest.importorskip("torch")
    found = getattr(torch, d.torch)
    assert found.itemsize == d.bytes_of(d.unit)
    if d.mantissa_bits is None and d.unit == 1:
        assert torch.iinfo(found).bits == d.bits
    elif d.unit == 1:
        assert torch.finfo(found).eps == 2 * d.rounding
        assert torch.finfo(found).max == d.largest


@pytest.mark.parametrize("d", [d for d in FLOATS if d.bits < 8], ids=by_name)
def test_packed_types_have_no_infinity(d: DType) -> None:
    assert d.mantissa_bits is not None
    exponent_bits = d.bits - 1 - d.mantissa_bits
    most = 2**exponent_bits - 1 - (2 ** (exponent_bits - 1) - 1)
    assert d.largest == (2 - 2.0**-d.mantissa_bits) * 2**most


@pytest.mark.parametrize("d", [d for d in FLOATS if d.torch and d.unit == 1 and d.bits < 32], ids=by_name)
def test_torch_rounds_to_nearest_by_as_much_as_the_table_says(d: DType) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(2.0, 4.0, 2**-12)
    worst = ((x.to(getattr(torch, d.torch)).float() - x).abs() / x).max().item()
    # A number that is half-way, of 1 + rounding, is off by rounding / (1 + rounding); powers of two by 1/3 at most.
    assert worst == pytest.approx(d.rounding / (1 + d.rounding), rel=0.01)


@pytest.mark.parametrize("d", [d for d in DTYPES.values() if d.dsl], ids=by_name)
def test_the_dsl_has_the_type_and_its_bits(d: DType) -> None:
    cutlass = pytest.importorskip("cutlass")
    assert getattr(cutlass, d.dsl).width == d.bits


# What torch exports of packed integers are bytes.
@pytest.mark.parametrize("d", [d for d in DTYPES.values() if d.torch and d.name not in ("u4", "i4")], ids=by_name)
def test_torch_exports_the_type_as_dlpack_codes_it(d: DType) -> None:
    torch = pytest.importorskip("torch")
    made = torch.zeros(8, dtype=torch.uint8).view(getattr(torch, d.torch))
    capsule = made.__dlpack__()
    found = tensor._DLManagedTensor.from_address(tensor._capsule_pointer(capsule, b"dltensor")).tensor
    assert (found.code, found.bits, found.lanes) == (d.dlpack, d.bits, d.unit)


def test_codes_are_those_of_the_header() -> None:
    package = importlib.util.find_spec("tvm_ffi")
    if package is None or package.origin is None:
        pytest.skip("apache-tvm-ffi, which has dlpack.h, is not installed")
    header = (Path(package.origin).parent / "include/dlpack/dlpack.h").read_text()
    names = {int(code): name for name, code in re.findall(r"(kDL\w+) = (\d+)U,", header.split("DLDeviceType;")[1])}
    words = {
        **{"f32": "Float", "bf16": "Bfloat", "f16": "Float", "e4m3": "Float8_e4m3fn", "e5m2": "Float8_e5m2"},
        **{"e3m2": "Float6_e3m2fn", "e2m1": "Float4_e2m1fn", "ue8m0": "Float8_e8m0fnu", "ue4m3": "Float8_e4m3fn"},
        **{"i64": "Int", "i32": "Int", "i8": "Int", "i4": "Int", "u8": "UInt", "u4": "UInt"},
    }
    assert {d.name: names[d.dlpack] for d in DTYPES.values()} == {name: f"kDL{word}" for name, word in words.items()}


@pytest.mark.parametrize("d", [d for d in DTYPES.values() if d.typestr], ids=by_name)
def test_numpy_has_the_typestr(d: DType) -> None:
    numpy = pytest.importorskip("numpy")
    assert numpy.dtype(d.typestr).name == d.torch


def test_types_that_tensors_have_are_told_apart() -> None:
    tensors = [d for d in DTYPES.values() if not d.stored]
    assert len({(d.dlpack, d.bits) for d in tensors}) == len(tensors)
    assert len(set(TORCH_NAMES.values())) == len(TORCH_NAMES) == len(tensors) - 1  # torch has no 6 bits
    for d in DTYPES.values():
        held = DTYPES[d.stored or d.name]
        assert (held.bits, held.torch, held.dlpack, held.dsl) == (d.bits, d.torch, d.dlpack, d.dsl)


@pytest.mark.parametrize("d", DTYPES.values(), ids=by_name)
def test_elements_have_bytes(d: DType) -> None:
    assert d.bytes_of(0) == 0
    for count in range(1, 70):
        assert 8 * d.bytes_of(count) >= count * d.bits > 8 * d.bytes_of(count) - 8
        fewest = next(n for n in itertools.count(1) if n * d.bits % (8 * count) == 0)
        assert d.filling(count) == fewest
    assert d.bytes_of(d.unit) * 8 == d.unit * d.bits
    assert d.filling(1) == d.unit


def test_what_shares_a_byte_has_no_bytes_of_its_own() -> None:
    assert [d.name for d in DTYPES.values() if d.unit > 1] == ["e3m2", "e2m1", "u4", "i4"]
    for name in ("e3m2", "e2m1", "u4", "i4"):
        with pytest.raises(ValueError, match=f"one {name} has . bits, no whole bytes"):
            _ = DTYPES[name].bytes
    assert [d.bytes for d in DTYPES.values() if d.unit == 1] == [4, 2, 2, 1, 1, 8, 4, 1, 1, 1, 1]


def test_integers_round_nothing() -> None:
    with pytest.raises(ValueError, match="i32 is an integer"):
        _ = DTYPES["i32"].rounding


# --- packed tensors ---


def test_numbers_of_4_bits_are_those_of_the_format_and_survive() -> None:
    torch = pytest.importorskip("torch")
    from aot.tune.elements import name_of, to_numbers, to_type

    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP Microscaling Formats 1.0, 5.3.3
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).view(torch.float4_e2m1fn_x2)  # lower bits first, as in DLPack
    assert name_of(packed) == "e2m1"
    found = to_numbers(packed, "e2m1")
    assert found.tolist() == [*numbers, *(-x for x in numbers)]
    assert torch.signbit(found).tolist() == [False] * 8 + [True] * 8
    assert torch.equal(to_type(found, "e2m1").view(torch.uint8), packed.view(torch.uint8))
    near = torch.tensor([[0.2, 0.3, -2.4, 2.6], [100.0, -5.1, -0.1, 4.9]])
    assert to_numbers(to_type(near, "e2m1"), "e2m1").tolist() == [[0.0, 0.5, -2.0, 3.0], [6.0, -6.0, -0.0, 4.0]]


def test_types_without_tensors_are_refused_by_name() -> None:
    torch = pytest.importorskip("torch")
    from aot.tune.elements import to_type

    with pytest.raises(AotError, match=r"torch has no tensors of e3m2; it has them of f32, .*e2m1"):
        to_type(torch.zeros(4), "e3m2")


def test_rows_of_zeros_are_put_into_packed_matrices_too() -> None:
    torch = pytest.importorskip("torch")
    from aot.tune.elements import to_numbers
    from aot.tune.gemm.operands import Weights, put_zeros

    o = Weights(dataclasses.replace(FP8, a="e2m1", b="e2m1"), 13, 0, 0, device="cpu").operands(13)[0]
    before = to_numbers(o.b, "e2m1")
    put_zeros(o)
    a, b = to_numbers(o.a, "e2m1"), to_numbers(o.b, "e2m1")
    assert [torch.signbit(a[row]).unique().tolist() for row in (5, 11)] == [[False], [True]]
    assert a[[5, 11]].abs().max() == 0
    assert torch.equal(b, torch.cat([before[:1].abs(), before[1:]]))


def test_extents_of_packed_tensors_are_in_elements() -> None:
    assert tensor.in_elements("e2m1", (3, 8), (8, 1), "a") == ((3, 16), (16, 1))
    assert tensor.in_elements("e2m1", (8, 3), (1, 8), "a") == ((16, 3), (1, 16))
    assert tensor.in_elements("e4m3", (3, 8), (16, 2), "a") == ((3, 8), (16, 2))
    with pytest.raises(LayoutError, match="a holds 2 elements of e2m1"):
        tensor.in_elements("e2m1", (3, 8), (16, 2), "a")


@pytest.mark.parametrize(("lanes", "shape"), [(2, (3, 16)), (1, (3, 8))])
def test_dlpack_tensors_of_4_bits_are_read(lanes: int, shape: tuple[int, ...]) -> None:
    found = tensor._DLTensor(data=512, device_type=2, ndim=2, code=17, bits=4, lanes=lanes)
    found.shape = (tensor.ctypes.c_int64 * 2)(3, 8)
    found.strides = (tensor.ctypes.c_int64 * 2)(8, 1)
    seen = tensor._read_dltensor(found, "a")
    assert (seen.dtype, seen.shape, seen.strides) == ("e2m1", shape, (shape[1], 1))
    assert geometry.span_bytes(seen) == 3 * shape[1] // 2
    found.lanes = 4
    with pytest.raises(ArgumentError, match="4 lanes"):
        tensor._read_dltensor(found, "a")


def test_columns_of_packed_matrices_share_no_memory() -> None:
    whole = TensorView(1 << 20, "e2m1", (4, 32), (64, 1), 0)
    assert not geometry.share_memory(whole, whole._replace(pointer=(1 << 20) + 16))
    assert geometry.share_memory(whole, whole._replace(pointer=(1 << 20) + 15))
    odd = whole._replace(strides=(63, 1), shape=(4, 20))  # rows begin within bytes
    assert geometry.share_memory(odd, odd._replace(pointer=(1 << 20) + 16))


def test_a_new_type_of_4_bits_has_bytes_limits_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DTYPES, "x4", DType("x4", 4))
    s = Signature("x4", "x4", "x4", "f32", "residual", 64, 96)
    assert Signature.of_key(s.key()) == s
    assert s.bytes(3) == (3 * 96 + 64 * 96) // 2 + 3 * (64 // 2 + 2 * 64)
    variant = dataclasses.replace(VARIANT, elements=("x4",) * 3, epilogue="residual")
    symbols, tree = gemm_tensors(variant)
    assert {name: symbols[name].divisibility for name in ("m", "n", "k", "lda", "ldd", "ldresidual")} == {
        **{"m": 1, "n": 32, "k": 32, "lda": 32, "ldd": 32},
        "ldresidual": 8,
    }
    assert [a.dtype for a in tree if isinstance(a, TensorArgument)] == ["x4", "x4", "x4", "bf16"]
    assert unsuited(variant, s) is None
    assert "not a multiple of 32" in str(unsuited(variant, dataclasses.replace(s, k=80)))
    shape = Shape.of(dataclasses.replace(variant, config=()))
    assert shape.tile_k == 256
    assert TileWaves(target("sm_90a")).cost(shape, s, 3) > 0
    monkeypatch.setattr("aot.problem.manifest.rules.unsupported_types", lambda *_: None)
    assert signature_problem(dataclasses.replace(s, k=80)) is not None
    assert signature_problem(s) is None


# --- what goes together ---


def test_what_is_not_supported_names_what_is() -> None:
    assert unsupported_types("bf16", "bf16", "bf16") is None
    assert unsupported_types("e2m1", "e2m1", "e4m3") == (
        "the combination {a: e2m1, b: e2m1, d: e4m3} is not supported; use one of "
        + "; ".join(f"{{a: {a}, b: {b}, d: {d}}}" for a, b, d in PRODUCTS)
    )
    assert scalings_of("bf16") == ("none",)
    assert scalings_of("e4m3") == ("none", "tensor", "row_column", "block", "mxfp8")
    assert scalings_of("e2m1") == ("none", "mxfp4", "nvfp4")
    assert unsupported_scaling("e4m3", "mxfp8") is None
    assert unsupported_scaling("bf16", "mxfp8") == "mxfp8 is for A and B in e4m3, found bf16"
    with pytest.raises(ManifestError, match="mxfp8 is for A and B in e4m3, found bf16; write `scaling: none`"):
        loads(MANIFEST.format(a="bf16", scaling="mxfp8"))


def test_nobody_says_how_exact_a_type_is_that_no_kernel_writes() -> None:
    pytest.importorskip("torch")
    from aot.tune import measure
    from aot.tune.gemm.operands import max_error

    with pytest.raises(measure.MeasureError, match="e5m2 must be is not known; it is for f32, bf16, f16, e4m3"):
        max_error(dataclasses.replace(FP8, d="e5m2"))
