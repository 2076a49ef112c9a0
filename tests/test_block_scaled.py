"""MXFP8, MXFP4 and NVFP4 on Blackwell, from a model's config to a launch. No GPU that runs them was at hand: what a
kernel computes is not tested here, what it is given is."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from aot.compile.lower import lower
from aot.problem.manifest import Gemm, Manifest
from aot.providers.operator_api import block_scaled
from aot.providers.operator_api.operator import found_design
from aot.providers.operator_api.tensor_scale import with_tensor_scale
from aot.search.legal import illegal, legal_variants, unsuited
from aot.search.provider import ProviderError, provider
from aot.selection import select
from runtime import ArgumentError, LayoutError, Library
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.scaling import SCALINGS

from .command_line import Run
from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, kernels_of
from .scale_tiles import tile_offset
from .shared import built_once

OF = Signature("e4m3", "e4m3", "bf16", "f32", "none", 512, 1088, scaling="mxfp8")
MXFP4 = dataclasses.replace(OF, a="e2m1", b="e2m1", scaling="mxfp4")
NVFP4 = dataclasses.replace(MXFP4, scaling="nvfp4")
FORMATS = pytest.mark.parametrize("of", [OF, MXFP4, NVFP4], ids=lambda s: s.scaling)
FAMILY = "sm100_block_scaled"
# What ml_dtypes calls them.
ML_DTYPES = {"e4m3": "float8_e4m3fn", "ue4m3": "float8_e4m3fn", "e2m1": "float4_e2m1fn", "ue8m0": "float8_e8m0fnu"}
CONFIG = {
    "model_type": "llama",
    **{"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8},
    **{"num_key_value_heads": 8, "vocab_size": 32000, "torch_dtype": "bfloat16"},
}
MANIFEST = """
format: 1
model: mx
source: made up
tokens: [4096]
targets: [sm_100a]
gemms:
  - {name: mxfp8, n: 512, k: 1088, dtypes: {a: e4m3, b: e4m3, d: bf16}, scaling: mxfp8}
  - {name: mxfp4, n: 512, k: 1088, dtypes: {a: e2m1, b: e2m1, d: bf16}, scaling: mxfp4}
  - {name: nvfp4, n: 512, k: 1088, dtypes: {a: e2m1, b: e2m1, d: bf16}, scaling: nvfp4}
"""


@FORMATS
@pytest.mark.parametrize("d", ["bf16", "f16"])
@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_blackwell_has_variants_and_other_targets_have_none(target: str, d: str, of: Signature) -> None:
    wanted = dataclasses.replace(of, d=d)
    found = legal_variants("cutlass_operators", target, wanted)
    assert {v.family for v in found} == {FAMILY}
    assert len(found) == 36, "as many as the Operator API offers"
    assert not legal_variants("own", target, wanted)
    assert not legal_variants("cutlass_operators", "sm_90a", wanted)


@FORMATS
def test_the_operator_api_offers_these_and_no_others(of: Signature) -> None:
    torch = pytest.importorskip("torch")
    ops = pytest.importorskip("cutlass.operators", reason="the Operator API is not installed")
    found = legal_variants("cutlass_operators", "sm_100a", of)
    offered = ops.get_operators(block_scaled.arguments(torch, found[0]), target_sm="100a")
    assert {found_design(o.metadata) for o in offered} == {block_scaled.design(v) for v in found}


@FORMATS
def test_tiles_that_two_ctas_share_are_candidates(of: Signature) -> None:
    """A tile of 256 rows is of one MMA of two CTAs."""
    manifest = Manifest("m", "s", (1, 4096), ("sm_100a",), (Gemm("g", of, 1, (1, 4096)),))
    for _, candidates in select([manifest]).problems[0].by_tokens:
        assert True in {v.options["two_cta"] for v in candidates}


def test_an_element_type_has_scalings_of_its_own() -> None:
    (variant, *_) = legal_variants("cutlass_operators", "sm_100a", MXFP4)
    assert illegal(dataclasses.replace(variant, scaling="mxfp8")) == "mxfp8 is for A and B in e4m3, found e2m1"


@FORMATS
@pytest.mark.parametrize(
    ("change", "what"), [({"n": 520}, "N must be a multiple of 32"), ({"k": 1104}, "multiple of 32")]
)
def test_extents_that_the_kernel_is_not_compiled_for_are_refused(
    change: dict[str, Any], what: str, of: Signature
) -> None:
    (variant, *_) = legal_variants("cutlass_operators", "sm_100a", of)
    assert what in str(unsuited(variant, dataclasses.replace(of, **change)))


@pytest.mark.parametrize("words", [["e4m3", "mxfp8"], ["e2m1", "mxfp4"], ["e2m1", "nvfp4"]])
def test_a_manifest_follows_from_a_config(run: Run, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    dtype, scaling = words
    options = ["--tp", "1", "--tokens", "1,64", "--dtype", dtype, "--scaling", scaling, "--target", "sm_100a"]
    result = run("manifest", "from-config", tmp_path / "config.json", *options, "-o", tmp_path / "model.yaml")
    assert result.status == 0, result.err
    assert f"scaling: {scaling}" in (tmp_path / "model.yaml").read_text()


@pytest.fixture(scope="module")
def archive(request: pytest.FixtureRequest) -> Path:
    """A compiled kernel of each format."""
    return built_once(request, "mx", MANIFEST, "--candidates", "1") / "mx.aot"


def driver_of(archive: Archive) -> RecordingDriver:
    return RecordingDriver(capability=(10, 0), kernels=kernels_of(archive))


def call(of: Signature, m: int) -> dict[str, Any]:
    """Tensors as torch has them: two numbers of 4 bits are one element, and tiles of scales have any shape."""
    rows, made = {"a": m, "b": of.n}, {}
    scaling = SCALINGS[of.scaling]
    for name, dtype in (("a", DTYPES[of.a]), ("b", DTYPES[of.b])):
        tiles = -(-rows[name] // 128), -(-of.k // (4 * (scaling.k or 1))) * 512
        made[name] = FakeTensor((rows[name], of.k // dtype.unit), dtype.torch)
        made[f"scale_{name}"] = FakeTensor(tiles, DTYPES[scaling.dtype].torch)
    if scaling.tensor_scale:
        made["scale_ab"] = FakeTensor((1,), "float32")
    return made | {"out": FakeTensor((m, of.n))}


@FORMATS
@pytest.mark.parametrize("m", [1, 128, 129, 4097])
def test_a_call_gives_the_kernel_every_row_and_every_tile_of_scales(
    archive: Path, torch: FakeTorch, m: int, of: Signature
) -> None:
    with Archive.open(archive) as opened:
        driver = driver_of(opened)
        library, given = Library(opened, driver), call(of, m)
        for _ in range(2):
            assert library.gemm(**given) is given["out"]
        launch, again = driver.launches
        assert again.parameters == launch.parameters
        maps = [p for p in launch.parameters if len(p) == 128]  # A, B, scales of A, scales of B, D
        assert len(maps) == 5
        for found, name in zip(maps, ("a", "b", "scale_a", "scale_b", "out"), strict=True):
            assert struct.unpack_from("<Q", found)[0] == given[name].data_ptr(), name
        # A tensor map has extents less 1 from byte 32 on: K and rows; of scales, rows of tiles are among them.
        assert struct.unpack_from("<II", maps[0], 32) == (of.k - 1, m - 1)
        assert struct.unpack_from("<II", maps[4], 32) == (of.n - 1, m - 1)
        assert -(-m // 128) - 1 in struct.unpack_from("<5I", maps[2], 32)
        addresses = [struct.unpack("<Q", p)[0] for p in launch.parameters if len(p) == 8]
        assert (given["scale_ab"].data_ptr() in addresses) if "scale_ab" in given else addresses
        library.close()


def test_a_call_of_nvfp4_without_a_tensor_scale_is_told_what_to_pass(archive: Path, torch: FakeTorch) -> None:
    with Archive.open(archive) as opened:
        library, given = Library(opened, driver_of(opened)), call(NVFP4, 64)
        del given["scale_ab"]
        with pytest.raises(ArgumentError, match="nvfp4 needs scale_ab, one f32 element"):
            library.gemm(**given)
        library.close()


@FORMATS
def test_rows_that_lie_apart_are_refused(archive: Path, torch: FakeTorch, of: Signature) -> None:
    """The kernel is told extents only."""
    with Archive.open(archive) as opened:
        library, given = Library(opened, driver_of(opened)), call(of, 64)
        columns = given["a"].shape[1]
        given["a"] = FakeTensor((64, columns), DTYPES[of.a].torch, strides=(2 * columns, 1))
        with pytest.raises(LayoutError, match="a"):
            library.gemm(**given)
        library.close()


@FORMATS
def test_the_kernel_takes_addresses_in_the_operators_order(of: Signature) -> None:
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    (variant, *_) = legal_variants("cutlass_operators", "sm_100a", of)
    built = provider("cutlass_operators").build(variant)
    factor = ["scale_ab"] if SCALINGS[of.scaling].tensor_scale else []
    tensors = ["a", "b", "d", "scale_a", "scale_b", *factor]
    assert [a.name for a in built.tree] == [*tensors, "max_active_clusters", "stream"]
    assert [built.symbols[extent].divisibility for extent in "nk"] == [32, 32]


def test_a_kernel_that_does_not_multiply_by_the_tensor_scale_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of another version of the Operator API might, whose steps have other names."""
    pytest.importorskip("cutlass", reason="the DSL is not installed")

    def renamed(impl: Any) -> Any:
        kernel: Any = with_tensor_scale(impl)
        del type(kernel).epilog_smem_copy_and_partition
        return kernel

    monkeypatch.setattr(block_scaled, "with_tensor_scale", renamed)
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    (variant, *_) = legal_variants("cutlass_operators", "sm_100a", NVFP4)
    with pytest.raises(ProviderError, match="does not multiply by the tensor scale"):
        lower(variant)


@FORMATS
def test_the_reference_is_what_ml_dtypes_makes_of_bytes(of: Signature) -> None:
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    import numpy

    from aot.tune.gemm.operands import Weights, reference

    m, scaling = 70, SCALINGS[of.scaling]
    assert scaling.k is not None
    o = Weights(of, m, 0, 0, device="cpu").operands(m)[0]

    def numbers(x: Any, dtype: str) -> Any:
        raw = numpy.asarray(x.contiguous().view(torch.uint8))
        if DTYPES[dtype].unit == 2:  # the lower bits are of the first
            raw = numpy.stack([raw & 15, raw >> 4], -1).reshape(raw.shape[0], -1)
        return raw.view(getattr(ml_dtypes, ML_DTYPES[dtype])).astype(numpy.float64)

    scaled = []
    for x, dtype, scales in ((o.a, of.a, o.extras["scale_a"]), (o.b, of.b, o.extras["scale_b"])):
        values, tiles = numbers(x, dtype), numbers(scales, scaling.dtype)
        factor = numpy.empty(values.shape)
        for row in range(values.shape[0]):
            for block in range(values.shape[1] // scaling.k):
                at = block // 4 * 512 + tile_offset(row % 128, block % 4)
                factor[row, block * scaling.k : (block + 1) * scaling.k] = tiles[row // 128, at]
        scaled.append(values * factor)
    expected = scaled[0] @ scaled[1].T * float(o.extras.get("scale_ab", torch.ones(1)))
    numpy.testing.assert_allclose(numpy.asarray(reference(of, o), dtype=numpy.float64), expected, rtol=1e-6)
