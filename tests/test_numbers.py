"""The tables of `runtime.numbers`: each fact against those who say it, and what follows from rows that are made up."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aot.problem.manifest import ManifestError, loads, signature_problem
from aot.providers.arguments import gemm_tensors
from aot.search import rank
from aot.search.legal import of_name, unsuited
from aot.search.targets import target
from aot.search.variants import Variant, choices
from runtime.container.archive import Archive
from runtime.errors import AotError, ArgumentError, LayoutError
from runtime.gemm.call import matrices, signature_of
from runtime.gemm.fallback import torch_runs
from runtime.gemm.signature import Epilogue, Signature
from runtime.numbers.dtypes import DTYPES, TORCH_NAMES, DType
from runtime.numbers.products import PRODUCTS, scalings_of, unsupported_scaling, unsupported_types
from runtime.numbers.scaling import SCALINGS, TILES, Scaling, extent_of, symbol_of, tile_offset
from runtime.program import tensor
from runtime.program.arguments import symbols_to_json, to_json
from runtime.program.operation import extents_at
from runtime.program.record import Record, Symbol, TensorArgument, TensorView
from runtime.tables.dispatch import record_mismatch

ROOT = Path(__file__).resolve().parents[1]
FLOATS = [d for d in DTYPES.values() if d.mantissa_bits is not None]
FP8 = Signature("e4m3", "e4m3", "bf16", "f32", "none", 144, 160)
VARIANT = Variant("own", "sm90_small_m", "sm_90a", choices(tile_m=64), ("e4m3", "e4m3", "bf16"))
# Rows that the tables do not have: plain scales of 1 x 32, blocks of several rows of A, and NVFP4's two levels.
MADE_UP = [
    Scaling("odd", ("e4m3",), "f32", rows_a=1, rows_b=1, k=32),
    Scaling("coarse", ("e4m3",), "f32", rows_a=4, rows_b=16, k=64),
    Scaling("one_row", ("e4m3",), "f32", rows_b=1),
    Scaling("along_k", ("e4m3",), "f32", k=64),
    Scaling("two_levels", ("e4m3",), "ue4m3", rows_a=1, rows_b=1, k=16, layout=TILES, tensor_scale=True),
]


@pytest.fixture(params=MADE_UP, ids=lambda s: s.word)
def made_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scaling:
    monkeypatch.setitem(SCALINGS, request.param.word, request.param)
    scaling: Scaling = request.param
    return scaling


def by_name(x: DType) -> str:
    return x.name


# --- element types ---


@pytest.mark.parametrize("d", [d for d in DTYPES.values() if d.torch], ids=by_name)
def test_torch_has_the_type_and_its_bits(d: DType) -> None:
    torch = pytest.importorskip("torch")
    found = getattr(torch, d.torch)
    assert found.itemsize == d.bytes_of(d.unit)
    if d.mantissa_bits is None:
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


@pytest.mark.parametrize("d", [d for d in DTYPES.values() if d.torch], ids=by_name)
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
        **{"i64": "Int", "i32": "Int", "i8": "Int", "u8": "UInt"},
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
    assert [d.name for d in DTYPES.values() if d.unit > 1] == ["e3m2", "e2m1"]
    for name in ("e3m2", "e2m1"):
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
    assert tensor.span_bytes(seen) == 3 * shape[1] // 2
    found.lanes = 4
    with pytest.raises(ArgumentError, match="4 lanes"):
        tensor._read_dltensor(found, "a")


def test_columns_of_packed_matrices_share_no_memory() -> None:
    whole = TensorView(1 << 20, "e2m1", (4, 32), (64, 1), 0)
    assert not tensor.share_memory(whole, whole._replace(pointer=(1 << 20) + 16))
    assert tensor.share_memory(whole, whole._replace(pointer=(1 << 20) + 15))
    odd = whole._replace(strides=(63, 1), shape=(4, 20))  # rows begin within bytes
    assert tensor.share_memory(odd, odd._replace(pointer=(1 << 20) + 16))


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
    shape = rank._Shape.of(dataclasses.replace(variant, config=()))
    assert shape.tile_k == 256
    assert rank._TileWaves(target("sm_90a")).cost(shape, s, 3) > 0
    monkeypatch.setattr("aot.problem.manifest.unsupported_types", lambda *_: None)
    assert signature_problem(dataclasses.replace(s, k=80)) is not None
    assert signature_problem(s) is None


# --- scalings ---


def test_axes_are_words() -> None:
    known = {"M": 5, "N": 129, "K": 256, "batch": 2}
    words = ("batch", "M", "N", "K/128", "N/128", "M/128", "1", "512")
    assert [extent_of(axis, known) for axis in words] == [2, 5, 129, 2, 2, 1, 1, 512]
    assert [symbol_of(axis) for axis in (*words, "K", "P")] == ["l", "m", "n", "kb", "nb", "mb", 1, 512, "k", "p"]


def test_every_scaling_is_one_that_there_can_be() -> None:
    for word, s in SCALINGS.items():
        assert s.word == word
        assert not re.search(r"[^a-z0-9_]", word)
        assert not s.dtype or s.dtype in DTYPES
        assert set(s.of) <= set(DTYPES)
        assert s.layout != TILES or None not in (s.rows_a, s.rows_b, s.k)


def test_operands_of_each_scaling() -> None:
    found = {
        word: [(o.name, o.dtype, o.axes) for o in dataclasses.replace(FP8, scaling=word).operands()[3:]]
        for word in SCALINGS
    }
    assert found == {
        "none": [],
        "tensor": [("scale_a", "f32", ("1",)), ("scale_b", "f32", ("1",))],
        "row_column": [("scale_a", "f32", ("M",)), ("scale_b", "f32", ("N",))],
        "block": [("scale_a", "f32", ("M", "K/128")), ("scale_b", "f32", ("N/128", "K/128"))],
        "mxfp8": [("scale_a", "ue8m0", ("M/128", "512*K/128")), ("scale_b", "ue8m0", ("N/128", "512*K/128"))],
    }


def test_two_levels_are_held_as_e4m3_and_scaled() -> None:
    two = MADE_UP[-1]
    assert two.axes("a") == ("M/128", "512*K/64")
    assert DTYPES[two.dtype].stored == "e4m3"


GOLDEN = {
    "bf16_bf16_bf16_f32_bias+swiglu+residual_n28672_k4096": Signature(
        "bf16", "bf16", "bf16", "f32", "bias+swiglu+residual", 28672, 4096
    ),
    "f16_f16_f16_f32_none_n8_k8_b3_n-major_weights": Signature(
        "f16", "f16", "f16", "f32", "none", 8, 8, 3, "none", "n", "weights"
    ),
    "e4m3_e4m3_bf16_f32_none_n144_k160": FP8,
    "e4m3_e4m3_bf16_f32_none_n144_k160_tensor": dataclasses.replace(FP8, scaling="tensor"),
    "e4m3_e4m3_bf16_f32_none_n144_k160_row_column_launch": dataclasses.replace(
        FP8, scaling="row_column", overlap="launch"
    ),
    "e4m3_e4m3_e4m3_f32_scale_n144_k160_block": dataclasses.replace(FP8, d="e4m3", epilogue="scale", scaling="block"),
    "e4m3_e4m3_bf16_f32_none_n144_k160_mxfp8": dataclasses.replace(FP8, scaling="mxfp8"),
}


def test_keys_are_what_they_were() -> None:
    assert {s.key(): s for s in GOLDEN.values()} == GOLDEN
    for key, s in GOLDEN.items():
        assert Signature.of_key(key) == s


def test_arguments_are_what_an_archive_was_built_with() -> None:
    checked = set()
    with Archive.open(ROOT / "runtime" / "universal.aot") as archive:
        for name in archive.functions:
            variant = of_name(name)
            assert variant is not None, name
            obj = archive.record(name)
            symbols, tree = gemm_tensors(variant)
            assert [a for a in obj["arguments"] if a["kind"] == "tensor"] == to_json(tree), name
            assert obj["symbols"] == symbols_to_json(symbols), name
            checked.add(variant.scaling)
    assert checked == {"none", "tensor", "row_column", "block"}


def test_arguments_of_scales_are_what_they_were() -> None:
    _, tree = gemm_tensors(dataclasses.replace(VARIANT, scaling="block"))
    assert tree[3:] == [
        TensorArgument("scale_a", "f32", ("m", "kb"), ("ldscale_a", "step_scale_a"), 4),
        TensorArgument("scale_b", "f32", ("nb", "kb"), ("ldscale_b", 1), 4),
    ]
    _, tree = gemm_tensors(dataclasses.replace(VARIANT, scaling="row_column"))
    assert tree[3:] == [
        TensorArgument("scale_a", "f32", ("m",), (1,), 4),
        TensorArgument("scale_b", "f32", ("n",), (1,), 16),
    ]
    _, tree = gemm_tensors(dataclasses.replace(VARIANT, scaling="tensor"))
    assert tree[3:] == [TensorArgument(name, "f32", (1,), (1,), 4) for name in ("scale_a", "scale_b")]
    symbols, tree = gemm_tensors(dataclasses.replace(VARIANT, scaling="mxfp8"))
    assert tree[3:] == [
        TensorArgument(name, "ue8m0", (rows, "kt"), ("kt", 1), 32)
        for name, rows in (("scale_a", "mb"), ("scale_b", "nb"))
    ]
    assert symbols["kt"] == Symbol(32, 512)


def test_b_stored_n_major_has_a_stride_of_its_batch_too() -> None:
    _, tree = gemm_tensors(dataclasses.replace(VARIANT, elements=("bf16",) * 3, b_major="n", batched=True))
    assert tree[:2] == [
        TensorArgument("a", "bf16", ("l", "m", "k"), ("batch_stride_a", "lda", 1), 16),
        TensorArgument("b", "bf16", ("l", "n", "k"), ("batch_stride_b", 1, "ldb"), 16),
    ]


def made_record(s: Signature) -> Record:
    """What a function for `s` would take, with nothing to launch."""
    symbols, tree = gemm_tensors(dataclasses.replace(VARIANT, elements=(s.a, s.b, VARIANT.d), scaling=s.scaling))
    tensors = tuple(a for a in tree if isinstance(a, TensorArgument))
    assert {e for a in tensors for e in (*a.shape, *a.strides) if isinstance(e, str)} == set(symbols)
    nothing: Any = SimpleNamespace(values=())
    return Record(("made_up", "sm_90a", "none", "0"), tensors, symbols, (), nothing)


def made_views(s: Signature, m: int) -> dict[str, TensorView]:
    """A call's tensors, packed."""
    views = {}
    for number, o in enumerate(s.operands()):
        shape = tuple(extents_at(s, m)[axis] for axis in o.axes)
        views[o.name] = TensorView((number + 1) << 30, o.dtype, shape, tensor.contiguous_strides(shape), 0)
    return views


def scale(s: Signature, of: str, scales: Any, row: int, k: int) -> float:
    """The factor of one element of A or B, as the docstring of `Scaling` has it."""
    scaling = SCALINGS[s.scaling]
    rows = scaling.rows_a if of == "a" else scaling.rows_b
    block_row, block_k = row // (rows or 1 << 30), k // (scaling.k or 1 << 30)
    if scaling.layout == TILES:
        return float(scales[block_row // 128, block_k // 4 * 512 + tile_offset(block_row % 128, block_k % 4)])
    index = ([block_row] if rows else []) + ([block_k] if scaling.k else [])
    return float(scales[tuple(index) or 0])


def check_scaling(s: Signature) -> None:
    """From the word to the reference."""
    torch = pytest.importorskip("torch")
    from aot.tune import measure
    from aot.tune.elements import TORCH_DTYPES, to_numbers
    from aot.tune.gemm.operands import Weights, max_error, reference

    m, scaling = 133, SCALINGS[s.scaling]
    assert Signature.of_key(s.key()) == s
    assert Signature.from_json(json.loads(json.dumps(s.to_json()))) == s
    made = made_record(s)
    assert record_mismatch(s, made) is None
    assert record_mismatch(dataclasses.replace(s, scaling="none"), made) is not None
    o = Weights(s, m, 0, 0, device="cpu").operands(m)[0]
    extents = extents_at(s, m)
    for operand, t in zip(s.operands(), o.arguments(), strict=True):
        assert t.dtype == TORCH_DTYPES[operand.dtype]
        shape, _ = tensor.in_elements(operand.dtype, tuple(t.shape), tuple(t.stride()), operand.name)
        assert shape == tuple(extents[axis] for axis in operand.axes)
    a, b = to_numbers(o.a, s.a), to_numbers(o.b, s.b)
    for name in ("scale_a", "scale_b"):
        assert o.extras[name].numel() == 1 or o.extras[name].float().unique().numel() > 2
    expected = reference(s, o)
    for row, column in ((0, 0), (132, 143), (40, 17), (99, 130)):
        value = sum(
            float(a[row, k])
            * float(b[column, k])
            * scale(s, "a", o.extras["scale_a"].double(), row, k)
            * scale(s, "b", o.extras["scale_b"].double(), column, k)
            for k in range(s.k)
        )
        value *= float(o.extras["scale_ab"]) if scaling.tensor_scale else 1.0
        assert float(expected[row, column]) == pytest.approx(value, rel=1e-9)
    assert 0.05 < expected.square().mean().sqrt().item() < 200
    assert max_error(s) == 3e-3
    right = {"right": lambda o: o.d.copy_(reference(s, o).to(torch.bfloat16))}
    assert isinstance(measure.check(s, m, Weights(s, m, 0, 1, device="cpu"), right)["right"], float)


def test_a_new_scaling_goes_from_its_word_to_the_reference(made_up: Scaling) -> None:
    check_scaling(dataclasses.replace(FP8, scaling=made_up.word))


def test_4_bits_in_two_levels_go_from_their_word_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFP4, as far as there is no kernel."""
    nvfp4 = MADE_UP[-1]._replace(word="nvfp4", of=("e2m1",))
    monkeypatch.setitem(SCALINGS, "nvfp4", nvfp4)
    check_scaling(dataclasses.replace(FP8, a="e2m1", b="e2m1", scaling="nvfp4"))


@pytest.mark.parametrize("word", ["row_column", "block", "mxfp8"])
def test_scalings_go_from_their_words_to_the_reference(word: str) -> None:
    check_scaling(dataclasses.replace(FP8, scaling=word))


@pytest.mark.parametrize("word", ["mxfp8", *(s.word for s in MADE_UP)])
def test_torch_computes_a_scaling_that_it_does_not_have(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from aot.tune.gemm.baseline import baseline
    from aot.tune.gemm.operands import Weights, reference

    for scaling in MADE_UP:
        monkeypatch.setitem(SCALINGS, scaling.word, scaling)
    s = dataclasses.replace(FP8, scaling=word)
    assert not torch_runs(s)
    o = Weights(s, 17, 0, 0, device="cpu").operands(17)[0]
    name, launch = baseline(s, o)
    assert name == "dequantise, torch.mm"
    launch(o)
    assert torch.equal(o.d, reference(s, o).to(torch.bfloat16))


MANIFEST = """
format: 1
model: m
source: s
tokens: [1]
targets: [sm_100a]
gemms: [{{name: g, n: 144, k: 160, dtypes: {{a: {a}, b: {a}, d: bf16}}, scaling: {scaling}}}]
"""


def test_a_new_scaling_is_one_that_manifests_know(made_up: Scaling) -> None:
    (gemm,) = loads(MANIFEST.format(a="e4m3", scaling=made_up.word)).gemms
    assert gemm.signature == dataclasses.replace(FP8, scaling=made_up.word)


CALLED = [*SCALINGS.values(), *(s for s in MADE_UP if not s.tensor_scale)]  # of two levels, calls take one so far


@pytest.mark.parametrize("scaling", CALLED, ids=lambda s: s.word)
def test_calls_find_the_scaling_and_bind(scaling: Scaling, monkeypatch: pytest.MonkeyPatch) -> None:
    for s in CALLED:
        monkeypatch.setitem(SCALINGS, s.word, s)
    wanted = dataclasses.replace(FP8, scaling=scaling.word)
    views = made_views(wanted, 133)
    assert signature_of(views, Epilogue(), "serial") == wanted
    made_record(wanted).bind(matrices(wanted, views), {})
    if scaling.dtype:
        views["scale_b"] = views["scale_b"]._replace(shape=(*views["scale_b"].shape, 7))
        with pytest.raises(ArgumentError, match=f"fit no scaling of .*{scaling.word} "):
            signature_of(views, Epilogue(), "serial")


def test_tiles_of_scales_may_have_any_shape_but_are_neighbours() -> None:
    s = dataclasses.replace(FP8, scaling="mxfp8")
    views = made_views(s, 133)
    for shape in ((256, 8), (2048,), (2, 2, 32, 4, 4)):
        given = views["scale_a"]._replace(shape=shape, strides=tensor.contiguous_strides(shape))
        assert signature_of(views | {"scale_a": given}, Epilogue(), "serial") == s
        (found,) = (v for v in matrices(s, views | {"scale_a": given}) if v.pointer == given.pointer)
        assert (found.shape, found.strides) == ((2, 1024), (1024, 1))
    apart = views["scale_a"]._replace(shape=(256, 8), strides=(16, 1))
    with pytest.raises(LayoutError, match="scale_a of shape"):
        matrices(s, views | {"scale_a": apart})


def test_records_with_tiles_that_lie_apart_are_none_for_the_signature() -> None:
    s = dataclasses.replace(FP8, scaling="mxfp8")
    made = made_record(s)
    *others, last = made.arguments
    assert isinstance(last, TensorArgument)
    for changed, reason in (
        (last._replace(strides=("apart", 1)), "takes scale_b with strides ('apart', 1), and not without gaps"),
        (last._replace(shape=("nb", "kt", 512), strides=("kt", 512, 1)), "takes scale_b of shape"),
        (last._replace(dtype="f32"), "takes scale_b as f32, not ue8m0"),
    ):
        made.arguments = (*others, changed)
        assert reason in str(record_mismatch(s, made))


def test_plans_are_not_grown_where_more_than_m_depends_on_m(monkeypatch: pytest.MonkeyPatch) -> None:
    for s in MADE_UP:
        monkeypatch.setitem(SCALINGS, s.word, s)
    found = {word for word in SCALINGS if not dataclasses.replace(FP8, scaling=word).rows_alone}
    assert found == {"mxfp8", "coarse", "two_levels"}


# --- what goes together ---


def test_what_is_not_supported_names_what_is() -> None:
    assert unsupported_types("bf16", "bf16", "bf16") is None
    assert unsupported_types("e2m1", "e2m1", "bf16") == (
        "the combination {a: e2m1, b: e2m1, d: bf16} is not supported; use one of "
        + "; ".join(f"{{a: {a}, b: {b}, d: {d}}}" for a, b, d in PRODUCTS)
    )
    assert scalings_of("bf16") == ("none",)
    assert scalings_of("e4m3") == tuple(SCALINGS)
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
