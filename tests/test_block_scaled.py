"""MXFP8, MXFP4 and NVFP4 on Blackwell and Rubin, from a model's config to a launch. No GPU that runs them was at hand:
what a kernel computes is not tested here, what it is given is."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
import subprocess
import sys
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
from aot.search.targets import TARGETS
from aot.search.variants import Variant
from aot.selection import select
from runtime import ArgumentError, LayoutError, Library
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.scaling import SCALINGS

from .command_line import ROOT, Run
from .compilers import needed
from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, kernels_of
from .scale_tiles import tile_offset
from .shared import built_once

OF = Signature("e4m3", "e4m3", "bf16", "f32", "none", 512, 1088, scaling="mxfp8")
MXFP4 = dataclasses.replace(OF, a="e2m1", b="e2m1", scaling="mxfp4")
NVFP4 = dataclasses.replace(MXFP4, scaling="nvfp4")
FORMATS = pytest.mark.parametrize("of", [OF, MXFP4, NVFP4], ids=lambda s: s.scaling)
# Of each target the family that computes these, and how many variants the Operator API offers.
FAMILIES = {
    "sm_100a": ("sm100_block_scaled", 36),
    "sm_103a": ("sm100_block_scaled", 36),
    "sm_107a": ("sm107_block_scaled", 138),
}
ON = pytest.mark.parametrize("name", ["sm_100a", "sm_107a"])
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
targets: [{target}]
gemms:
  - {{name: mxfp8, n: 512, k: 1088, dtypes: {{a: e4m3, b: e4m3, d: bf16}}, scaling: mxfp8}}
  - {{name: mxfp4, n: 512, k: 1088, dtypes: {{a: e2m1, b: e2m1, d: bf16}}, scaling: mxfp4}}
  - {{name: nvfp4, n: 512, k: 1088, dtypes: {{a: e2m1, b: e2m1, d: bf16}}, scaling: nvfp4}}
"""


def variants_of(target: str, of: Signature) -> list[Variant]:
    """All that there are, where N is enough to fill every cluster."""
    return legal_variants("cutlass_operators", target, dataclasses.replace(of, n=4096))


@FORMATS
@pytest.mark.parametrize("d", ["bf16", "f16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_blackwell_and_rubin_have_variants_and_other_targets_have_none(name: str, d: str, of: Signature) -> None:
    wanted = dataclasses.replace(of, d=d)
    found = variants_of(name, wanted)
    family, count = FAMILIES[name]
    assert {v.family for v in found} == {family}
    assert len(found) == count, "as many as the Operator API offers"
    assert not legal_variants("own", name, wanted)
    for other in ("sm_90a", "sm_110a"):
        assert not legal_variants("cutlass_operators", other, wanted)


@FORMATS
@ON
def test_the_operator_api_offers_these_and_no_others(name: str, of: Signature) -> None:
    torch = pytest.importorskip("torch")
    ops = pytest.importorskip("cutlass.operators", reason="the Operator API is not installed")
    found = variants_of(name, of)
    family, _ = FAMILIES[name]
    operator_class, _ = block_scaled.OPERATORS[family]
    offered = ops.get_operators(block_scaled.arguments(torch, found[0]), target_sm=name.removeprefix("sm_"))
    # Rubin is offered Blackwell's as well.
    theirs = [design for o in offered if (design := found_design(o.metadata)).operator_class == operator_class]
    ours = [block_scaled.design(v) for v in found]
    assert len(ours) == len(theirs)
    assert set(ours) == set(theirs)


@FORMATS
def test_a_rubin_kernel_that_would_launch_nothing_at_one_row_is_refused(of: Signature) -> None:
    """Its grid is whole clusters, and no more CTAs than the smaller clusters would take."""
    largest = next(v for v in variants_of("sm_107a", of) if (v.options["cluster_m"], v.options["cluster_n"]) == (4, 4))
    fallback_m, fallback_n, tile_n = (largest.integer(name) for name in ("fallback_m", "fallback_n", "tile_n"))
    assert (fallback_m, fallback_n, tile_n) == (1, 1, 64)
    assert unsuited(largest, dataclasses.replace(of, n=16 * 64)) is None
    assert "nothing would be launched" in str(unsuited(largest, dataclasses.replace(of, n=15 * 64)))


@FORMATS
@ON
def test_tiles_that_two_ctas_share_are_candidates(name: str, of: Signature) -> None:
    manifest = Manifest("m", "s", (1, 4096), (name,), (Gemm("g", of, 1, (1, 4096)),))
    by_tokens = dict(select([manifest]).problems[0].by_tokens)
    for m in manifest.tokens:
        assert True in {v.options["two_cta"] for v in by_tokens[m]}


@ON
def test_an_element_type_has_scalings_of_its_own(name: str) -> None:
    (variant, *_) = legal_variants("cutlass_operators", name, MXFP4)
    assert illegal(dataclasses.replace(variant, scaling="mxfp8")) == "mxfp8 is for A and B in e4m3, found e2m1"


@FORMATS
@ON
@pytest.mark.parametrize(
    ("change", "what"), [({"n": 520}, "N must be a multiple of 32"), ({"k": 1104}, "multiple of 32")]
)
def test_extents_that_the_kernel_is_not_compiled_for_are_refused(
    change: dict[str, Any], what: str, name: str, of: Signature
) -> None:
    (variant, *_) = legal_variants("cutlass_operators", name, of)
    assert what in str(unsuited(variant, dataclasses.replace(of, **change)))


@pytest.mark.parametrize("words", [["e4m3", "mxfp8"], ["e2m1", "mxfp4"], ["e2m1", "nvfp4"]])
def test_a_manifest_follows_from_a_config(run: Run, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    dtype, scaling = words
    options = ["--tp", "1", "--tokens", "1,64", "--dtype", dtype, "--scaling", scaling, "--target", "sm_100a"]
    result = run("manifest", "from-config", tmp_path / "config.json", *options, "-o", tmp_path / "model.yaml")
    assert result.status == 0, result.err
    assert f"scaling: {scaling}" in (tmp_path / "model.yaml").read_text()


@pytest.fixture(scope="module", params=[pytest.param(t, marks=needed(t)) for t in ("sm_100a", "sm_107a")])
def archive(request: pytest.FixtureRequest) -> Path:
    """A compiled kernel of each format."""
    name = f"mx_{request.param}"
    return built_once(request, name, MANIFEST.format(target=request.param), "--candidates", "1") / f"{name}.aot"


def driver_of(archive: Archive) -> RecordingDriver:
    (name,) = archive.targets
    gpu = TARGETS[name]
    return RecordingDriver(
        capability=gpu.compute_capability, shared_bytes=gpu.shared_bytes_per_block, kernels=kernels_of(archive)
    )


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
        maps: dict[int, list[bytes]] = {}  # by address: Rubin's has two of each operand, one for each shape of cluster
        for p in launch.parameters:
            if len(p) == 128:
                maps.setdefault(struct.unpack_from("<Q", p)[0], []).append(p)
        operands = ["a", "b", "scale_a", "scale_b", "out"]
        assert list(maps) == [given[name].data_ptr() for name in operands]
        # A tensor map has extents less 1 from byte 32 on: K and rows; of scales, rows of tiles are among them.
        for name, rows, columns in (("a", m, of.k), ("b", of.n, of.k), ("out", m, of.n)):
            for found in maps[given[name].data_ptr()]:
                assert struct.unpack_from("<II", found, 32) == (columns - 1, rows - 1)
        for name, rows in (("scale_a", m), ("scale_b", of.n)):
            for found in maps[given[name].data_ptr()]:
                assert -(-rows // 128) - 1 in struct.unpack_from("<5I", found, 32)
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
@pytest.mark.parametrize(("name", "clusters"), [("sm_100a", (2,)), ("sm_107a", (2, 1))])
def test_the_kernel_takes_addresses_in_the_operators_order(name: str, clusters: tuple[int, ...], of: Signature) -> None:
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    (variant, *_) = legal_variants("cutlass_operators", name, of)
    built = provider("cutlass_operators").build(variant)
    factor = ["scale_ab"] if SCALINGS[of.scaling].tensor_scale else []
    tensors = ["a", "b", "d", "scale_a", "scale_b", *factor]
    counts = [f"max_active_clusters_{size}" for size in clusters]
    assert [a.name for a in built.tree] == [*tensors, *counts, "stream"]
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


# Prints the PTX of a variant of Rubin's; a process can compile for one target only.
PTX = """
import contextlib, json, os, sys
os.environ["CUTE_DSL_ARCH"] = "sm_107a"
from aot.compile.lower import lower
from aot.providers.operator_api import tensor_scale
from aot.search.variants import Variant
if sys.argv[1:] == ["forget the factor"]:
    tensor_scale._multiplying_epilogue = contextlib.nullcontext
print(lower(Variant.from_json(json.load(sys.stdin)), keep_ptx=True).ptx)
"""


def ptx(variant: Variant, *words: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    command, given = [sys.executable, "-c", PTX, *words], json.dumps(variant.to_json())
    return subprocess.run(command, input=given, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(params=[pytest.param("sm_107a", marks=needed("sm_107a"))])
def rubin(request: pytest.FixtureRequest) -> Variant:
    """A kernel each of whose CTAs has two tiles of sums."""
    found = variants_of(request.param, NVFP4)
    return next(v for v in found if v.options["two_cta"] and v.options["b_reuse"])


def test_rubin_multiplies_sums_by_the_tensor_scale_before_they_are_rounded(rubin: Variant) -> None:
    """One multiplication of two sums, each time by the same pair, for each conversion of two to D's type."""
    found, plain = ptx(rubin), ptx(dataclasses.replace(rubin, scaling="mxfp4"))
    assert found.returncode == plain.returncode == 0, found.stderr + plain.stderr
    converted = len(re.findall(r"cvt\.rn\.bf16x2\.f32", found.stdout))
    factors = re.findall(r"mul\.f32x2\s+%rd\d+, (%rd\d+), %rd\d+;", found.stdout)
    assert len(factors) == converted > 0
    assert len(set(factors)) == 2, "one for each shape of cluster"
    assert "mul.f32x2" not in plain.stdout


def test_a_rubin_kernel_that_does_not_multiply_by_the_tensor_scale_is_not_compiled(rubin: Variant) -> None:
    found = ptx(rubin, "forget the factor")
    assert found.returncode == 1
    assert "ProviderError: the kernel of" in found.stderr
    assert "does not multiply by the tensor scale" in found.stderr


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
