"""MXFP8 (e4m3 with a ue8m0 scale for 32 elements along K) on Blackwell, from a model's config to a launch. No GPU that
runs it was at hand: what a kernel computes is not tested here, what it is given is."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aot.search.legal import legal_variants, unsuited
from aot.search.provider import provider
from runtime import LayoutError, Library
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature

from .command_line import ALONE, COMMAND, ROOT, Run
from .recording_driver import FakeTensor, FakeTorch, RecordingDriver
from .scale_tiles import tile_offset
from .shared import made_once

OF = Signature("e4m3", "e4m3", "bf16", "f32", "none", 512, 1088, scaling="mxfp8")
FAMILY = "sm100_block_scaled"
CONFIG = {
    "model_type": "llama",
    **{"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8},
    **{"num_key_value_heads": 8, "vocab_size": 32000, "torch_dtype": "bfloat16"},
}
MANIFEST = """
format: 1
model: mx
source: made up
tokens: [1, 4096]
targets: [sm_100a]
gemms:
  - {name: up, n: 512, k: 1088, dtypes: {a: e4m3, b: e4m3, d: bf16}, scaling: mxfp8}
"""


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_blackwell_has_variants_and_other_targets_have_none(target: str) -> None:
    found = legal_variants("cutlass_operators", target, OF)
    assert {v.family for v in found} == {FAMILY}
    assert len(found) == 36, "as many as the Operator API offers"
    assert not legal_variants("own", target, OF)
    assert not legal_variants("cutlass_operators", "sm_90a", OF)


@pytest.mark.parametrize(("change", "what"), [({"n": 520}, "N must be a multiple of 32"), ({"k": 1104}, "K must be")])
def test_extents_that_the_kernel_is_not_compiled_for_are_refused(change: dict[str, Any], what: str) -> None:
    (variant, *_) = legal_variants("cutlass_operators", "sm_100a", OF)
    assert what in str(unsuited(variant, dataclasses.replace(OF, **change)))


def test_a_manifest_follows_from_a_config(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["--tp", "1", "--tokens", "1,64", "--dtype", "e4m3", "--scaling", "mxfp8", "--target", "sm_100a"]
    arguments = (*words, "-o", tmp_path / "model.yaml")
    result = run("manifest", "from-config", tmp_path / "config.json", *arguments)
    assert result.status == 0, result.err
    assert "scaling: mxfp8" in (tmp_path / "model.yaml").read_text()


@pytest.fixture(scope="module")
def archive(request: pytest.FixtureRequest) -> Path:
    """Two compiled kernels."""
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    return made_once(request, "mx", build) / "mx.aot"


def build(folder: Path) -> None:
    (folder / "mx.yaml").write_text(MANIFEST)
    command = [
        *COMMAND,
        "build",
        "mx.yaml",
        "-o",
        "mx.aot",
        "--candidates",
        "1",
        "--cache",
        "cache",
        "--no-tune",
        *ALONE,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def driver_of(archive: Archive) -> RecordingDriver:
    kernels = {}
    for name in archive.functions:
        (launch,), (kernel,) = archive.record(name)["program"]["launches"], archive.record(name)["kernels"]
        kernels[archive.cubin(name)] = {kernel["symbol"]: tuple(p["size"] for p in launch["parameters"])}
    return RecordingDriver(capability=(10, 0), kernels=kernels)


def call(m: int) -> dict[str, Any]:
    tiles = -(-OF.k // 128)
    return {
        "a": FakeTensor((m, OF.k), "float8_e4m3fn"),
        "b": FakeTensor((OF.n, OF.k), "float8_e4m3fn"),
        "scale_a": FakeTensor((-(-m // 128), tiles * 512), "float8_e8m0fnu"),
        "scale_b": FakeTensor((-(-OF.n // 128), tiles * 512), "float8_e8m0fnu"),
        "out": FakeTensor((m, OF.n)),
    }


@pytest.mark.parametrize("m", [1, 128, 129, 4097])
def test_a_call_gives_the_kernel_every_row_and_every_tile_of_scales(archive: Path, torch: FakeTorch, m: int) -> None:
    with Archive.open(archive) as opened:
        driver = driver_of(opened)
        library, given = Library(opened, driver), call(m)
        assert library.gemm(**given) is given["out"]
        (launch,) = driver.launches
        maps = [p for p in launch.parameters if len(p) == 128]  # A, B, scales of A, scales of B, D
        assert len(maps) == 5
        for found, name in zip(maps, ("a", "b", "scale_a", "scale_b", "out"), strict=True):
            assert struct.unpack_from("<Q", found)[0] == given[name].data_ptr(), name
        # A tensor map has extents less 1 from byte 32 on: K and rows; of scales, rows of tiles are among them.
        assert struct.unpack_from("<II", maps[0], 32) == (OF.k - 1, m - 1)
        assert struct.unpack_from("<II", maps[4], 32) == (OF.n - 1, m - 1)
        assert -(-m // 128) - 1 in struct.unpack_from("<5I", maps[2], 32)
        library.close()


def test_rows_that_lie_apart_are_refused(archive: Path, torch: FakeTorch) -> None:
    """The kernel is told extents only."""
    with Archive.open(archive) as opened:
        library, given = Library(opened, driver_of(opened)), call(64)
        given["a"] = FakeTensor((64, OF.k), "float8_e4m3fn", strides=(2 * OF.k, 1))
        with pytest.raises(LayoutError, match="a"):
            library.gemm(**given)
        library.close()


def test_the_kernel_takes_addresses_in_the_operators_order() -> None:
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    (variant, *_) = legal_variants("cutlass_operators", "sm_100a", OF)
    built = provider("cutlass_operators").build(variant)
    assert [a.name for a in built.tree] == ["a", "b", "d", "scale_a", "scale_b", "max_active_clusters", "stream"]


def test_the_reference_is_what_ml_dtypes_makes_of_bytes() -> None:
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    import numpy

    from aot.tune.gemm.operands import Weights, reference

    m = 70
    o = Weights(OF, m, 0, 0, device="cpu").operands(m)[0]

    def numbers(x: Any, of: str) -> Any:
        return numpy.asarray(x.view(torch.uint8)).view(getattr(ml_dtypes, of)).astype(numpy.float64)

    a, b = numbers(o.a, "float8_e4m3fn"), numbers(o.b, "float8_e4m3fn")
    scaled = []
    for x, scales in ((a, o.extras["scale_a"]), (b, o.extras["scale_b"])):
        tiles = numbers(scales.contiguous(), "float8_e8m0fnu")
        rows, columns = x.shape
        factor = numpy.empty((rows, columns))
        for row in range(rows):
            for block in range(columns // 32):
                at = block // 4 * 512 + tile_offset(row % 128, block % 4)
                factor[row, block * 32 : block * 32 + 32] = tiles[row // 128, at]
        scaled.append(x * factor)
    expected = scaled[0] @ scaled[1].T
    numpy.testing.assert_allclose(numpy.asarray(reference(OF, o), dtype=numpy.float64), expected, rtol=1e-6)
