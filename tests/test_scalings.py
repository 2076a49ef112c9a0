"""Scalings: operands, keys, arguments and the reference of each, and what a new one takes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aot.kernels.sm90.persistent.plan import Plan
from aot.problem.manifest import loads
from aot.providers.builders.gemm import persistent_form
from aot.providers.gemm_arguments import gemm_tensors
from aot.search.legal import of_name
from runtime.container.archive import Archive
from runtime.errors import ArgumentError, LayoutError
from runtime.gemm.call import matrices, signature_of
from runtime.gemm.fallback import torch_runs
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import Epilogue
from runtime.numbers.scaling import SCALINGS, TILES, Scaling, extent_of, symbol_of
from runtime.program import geometry, tensor
from runtime.program.arguments import symbols_to_json, to_json
from runtime.program.operation import extents_at
from runtime.program.record import Record, Symbol, TensorArgument, TensorView
from runtime.tables.dispatch import record_mismatch

from .made_up_scaling import FP8, MANIFEST, VARIANT
from .scale_tiles import tile_offset

ROOT = Path(__file__).resolve().parents[1]

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
    tiles = ("M/128", "512*K/128"), ("N/128", "512*K/128")
    assert found == {
        "none": [],
        "tensor": [("scale_a", "f32", ("1",)), ("scale_b", "f32", ("1",))],
        "row_column": [("scale_a", "f32", ("M",)), ("scale_b", "f32", ("N",))],
        "block": [("scale_a", "f32", ("M", "K/128")), ("scale_b", "f32", ("N/128", "K/128"))],
        "mxfp8": [("scale_a", "ue8m0", tiles[0]), ("scale_b", "ue8m0", tiles[1])],
        "mxfp4": [("scale_a", "ue8m0", tiles[0]), ("scale_b", "ue8m0", tiles[1])],
        "nvfp4": [
            *(("scale_a", "e4m3", ("M/128", "512*K/64")), ("scale_b", "e4m3", ("N/128", "512*K/64"))),
            ("scale_ab", "f32", ("1",)),
        ],
        "block_weight": [("scale_b", "f32", ("N/128", "K/128"))],
        "column_weight": [("scale_b", "f32", ("N",))],
        "mxfp4_weight": [("scale_b", "ue8m0", ("K/64", "2*N"))],
        "int4_weight": [("scale_b", "bf16", ("K/128", "N"))],
        "int4_zero_weight": [("scale_b", "bf16", ("K/64", "N"))],
        "int4_group128": [("scale_b", "bf16", ("K/128", "N"))],
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
            persistent = variant.family == "sm90_persistent"
            n_multiple = Plan.of(variant.options, persistent_form(variant)).n_multiple if persistent else 1
            symbols, tree = gemm_tensors(variant, n_multiple)
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
        views[o.name] = TensorView((number + 1) << 30, o.dtype, shape, geometry.contiguous_strides(shape), 0)
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


@pytest.mark.parametrize("word", ["mxfp4", "nvfp4"])
def test_4_bits_go_from_their_word_to_the_reference(word: str) -> None:
    check_scaling(dataclasses.replace(FP8, a="e2m1", b="e2m1", scaling=word))


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


def test_a_new_scaling_is_one_that_manifests_know(made_up: Scaling) -> None:
    (gemm,) = loads(MANIFEST.format(a="e4m3", scaling=made_up.word)).gemms
    assert gemm.signature == dataclasses.replace(FP8, scaling=made_up.word)


CALLED = [*SCALINGS.values(), *MADE_UP]


@pytest.mark.parametrize("scaling", CALLED, ids=lambda s: s.word)
def test_calls_find_the_scaling_and_bind(scaling: Scaling, monkeypatch: pytest.MonkeyPatch) -> None:
    for s in CALLED:
        monkeypatch.setitem(SCALINGS, s.word, s)
    of = scaling.of[0] if scaling.of else FP8.a
    wanted = dataclasses.replace(FP8, a=of, b=(scaling.of_b or (of,))[0], scaling=scaling.word)
    if scaling.of_b:
        wanted = dataclasses.replace(wanted, n=272, k=384)  # whole blocks
    views = made_views(wanted, 133)
    assert signature_of(views, Epilogue(), "serial") == wanted
    made_record(wanted).bind(matrices(wanted, views), {})
    if scaling.dtype:
        views["scale_b"] = views["scale_b"]._replace(shape=(*views["scale_b"].shape, 7))
        with pytest.raises(ArgumentError, match=f"fits? no scaling of .*{scaling.word} "):
            signature_of(views, Epilogue(), "serial")


def test_a_tensor_scale_comes_with_the_scaling_that_has_one() -> None:
    views = made_views(dataclasses.replace(FP8, a="e2m1", b="e2m1", scaling="nvfp4"), 133)
    of_tensor = views.pop("scale_ab")
    with pytest.raises(ArgumentError, match="scaling nvfp4 needs scale_ab"):
        signature_of(views, Epilogue(), "serial")
    with pytest.raises(ArgumentError, match="scale_ab must have one element"):
        signature_of(views | {"scale_ab": of_tensor._replace(shape=(2,))}, Epilogue(), "serial")
    for given in (made_views(dataclasses.replace(FP8, scaling="mxfp8"), 133), {}):
        with pytest.raises(ArgumentError, match="scale_ab is for" if given else "scale_a and scale_b come together"):
            signature_of((given or made_views(FP8, 133)) | {"scale_ab": of_tensor}, Epilogue(), "serial")


def test_tiles_of_scales_may_have_any_shape_but_are_neighbours() -> None:
    s = dataclasses.replace(FP8, scaling="mxfp8")
    views = made_views(s, 133)
    for shape in ((256, 8), (2048,), (2, 2, 32, 4, 4)):
        given = views["scale_a"]._replace(shape=shape, strides=geometry.contiguous_strides(shape))
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
    assert found == {"mxfp8", "mxfp4", "nvfp4", "coarse", "two_levels"}
