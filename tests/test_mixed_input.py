"""Weights of integers under activations of 16 bits on Blackwell, from a signature to a launch. No GPU that runs it was
at hand: what a kernel is given is tested here, and what the reference says; what a kernel computes is not."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aot.problem.manifest import signature_problem
from aot.providers.operator_api import mixed_input
from aot.providers.operator_api.operator import found_design
from aot.search.legal import illegal, legal_variants, unsuited
from aot.search.shape import Shape
from aot.search.variants import Variant, choices
from runtime import ArgumentError, KernelMiss, Library
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature

from .command_line import ALONE, COMMAND, ROOT
from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, kernels_of
from .shared import made_once

INT4 = Signature("bf16", "i4", "bf16", "f32", "none", 512, 1024, scaling="int4_group128")
INT8 = Signature("bf16", "i8", "bf16", "f32", "none", 512, 1024)


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a", "sm_110a"])
@pytest.mark.parametrize("wide", ["bf16", "f16"])
def test_choices_are_those_that_the_operator_api_offers(target: str, wide: str) -> None:
    ops, torch = pytest.importorskip("cutlass.operators"), pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = legal_variants("cutlass_operators", target, dataclasses.replace(INT8, a=wide, d=wide))
    like = Variant("", "", target, (), (wide, "i8", wide), operation="gemm")
    with FakeTensorMode():
        found = ops.get_operators(mixed_input.arguments(torch, like), target_sm=target.removeprefix("sm_"))
    assert len(found) == len(given) == (0 if target == "sm_103a" else 136)
    assert {str(found_design(o.metadata)) for o in found} == {str(mixed_input.design(v)) for v in given}


def test_choices_for_int4_are_those_whose_kernels_the_package_says_fit() -> None:
    pytest.importorskip("cutlass.operators")
    import cutlass
    from cutlass.operators.providers.cutedsl.gemm.sm100_mixed_input import MixedInputGemmOperator

    def wanted(metadata: Any) -> bool:
        a, b = metadata.operands.A, metadata.operands.B
        types = getattr(getattr(a, "quantized", None), "dtype", None), b.dtype, metadata.operands.out.dtype
        if types != (cutlass.Int4, cutlass.BFloat16, cutlass.BFloat16) or tuple(a.mode) != (1, 128):
            return False
        return (a.quantized.stride, b.stride) == ((0, 0, 1), (0, 1, 0))

    theirs = {str(found_design(o.metadata)) for o in MixedInputGemmOperator._generate_operators(wanted)}
    ours = legal_variants("cutlass_operators", "sm_103a", INT4)
    assert {str(mixed_input.design(v)) for v in ours} == theirs
    assert len(theirs) == len(ours) > 50


def test_a_pair_of_ctas_shares_a_tile_along_n() -> None:
    variant, *_ = (v for v in legal_variants("cutlass_operators", "sm_100a", INT8) if v.options["two_cta"])
    odd = dataclasses.replace(variant, config=choices(**{**variant.options, "cluster_n": 1}))
    assert illegal(odd) == "cluster_n must be 2 with two_cta"
    shape = Shape.of(variant)
    assert (shape.tile_m, shape.tile_n) == (variant.integer("tile_m"), variant.integer("tile_n") // 2)


def test_k_fills_whole_pieces_of_weights() -> None:
    variant, *_ = legal_variants("cutlass_operators", "sm_100a", INT8)
    short = dataclasses.replace(INT8, k=1032)
    assert unsuited(variant, short) == "k = 1032 is not a multiple of 16, which 16-byte access to i8 needs"
    assert "rows of B in i8 must be multiples of 16 bytes: pad to 1040" in str(signature_problem(short))
    assert signature_problem(INT8) is None


def test_the_reference_takes_integers_for_what_they_are() -> None:
    torch = pytest.importorskip("torch")
    from aot.tune.gemm.operands import Weights, reference

    operands = Weights(INT8, 5, 0, 0, device="cpu").operands(5)[0]
    assert operands.b.dtype == torch.int8
    assert operands.b.min() < -100
    assert operands.b.max() > 100
    expected = operands.a.double() @ operands.b.double().T
    torch.testing.assert_close(reference(INT8, operands).double(), expected)
    assert 0.2 < float(expected.std()) / INT8.k**0.5 < 2


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
def test_int4_of_a_checkpoint_in_rows_is_what_the_checkpoint_says(layout: str) -> None:
    torch = pytest.importorskip("torch")
    from aot.tune.gemm.prepared_weights import dequantised
    from runtime.torch.weights import int4_rows

    numbers = torch.randint(-8, 8, (32, 256))
    scales = torch.rand(32, 2).to(torch.bfloat16)
    shifts = 4 * torch.arange(8)
    packed = ((numbers + 8).reshape(32, 32, 8) << shifts).sum(-1).to(torch.int32)
    given = (packed.t(), scales.t()) if layout == "gptq" else (packed, scales)
    b, scale_b = int4_rows(*given, layout)
    assert (b.dtype, tuple(b.shape), tuple(scale_b.shape)) == (torch.int4, (32, 128), (2, 32))
    expected = numbers * scales.float().repeat_interleave(128, 1)
    torch.testing.assert_close(dequantised(INT4.scaling, b, scale_b), expected.to(torch.bfloat16).float())


def test_groups_that_are_cut_are_refused() -> None:
    torch = pytest.importorskip("torch")
    from runtime.torch.weights import int4_rows

    with pytest.raises(ArgumentError, match="needs K in multiples of 128"):
        int4_rows(torch.zeros((32, 24), dtype=torch.int32), torch.ones(32, 2), "compressed-tensors")
    with pytest.raises(ArgumentError, match="layout must be one of compressed-tensors, gptq"):
        int4_rows(torch.zeros((32, 32), dtype=torch.int32), torch.ones(32, 2), "mxfp4")
    variant, *_ = legal_variants("cutlass_operators", "sm_100a", INT4)
    assert "K must be a multiple of 128" in str(unsuited(variant, dataclasses.replace(INT4, k=1056)))


MANIFEST = """
format: 1
model: mixed
source: made up
tokens: [16]
targets: [sm_100a]
gemms:
  - {name: up, n: 512, k: 1024, dtypes: {a: bf16, b: i8, d: bf16}}
  - {name: down, n: 512, k: 1024, dtypes: {a: bf16, b: i4, d: bf16}, scaling: int4_group128}
"""


@pytest.fixture(scope="module")
def archive(request: pytest.FixtureRequest) -> Path:
    """A compiled kernel of each."""
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    return made_once(request, "mixed", build) / "mixed.aot"


def build(folder: Path) -> None:
    (folder / "mixed.yaml").write_text(MANIFEST)
    words = ["build", "mixed.yaml", "-o", "mixed.aot", "--candidates", "1", "--cache", "cache", "--no-tune", *ALONE]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*COMMAND, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def driver_of(archive: Archive) -> RecordingDriver:
    return RecordingDriver(capability=(10, 0), kernels=kernels_of(archive))


@pytest.mark.parametrize("m", [1, 16, 333])
def test_a_call_gives_the_kernel_weights_activations_and_d_transposed(archive: Path, torch: FakeTorch, m: int) -> None:
    with Archive.open(archive) as opened:
        driver = driver_of(opened)
        library = Library(opened, driver)
        given: dict[str, Any] = {
            "a": FakeTensor((m, 1024)),
            "b": FakeTensor((512, 1024), "int8"),
            "out": FakeTensor((m, 512)),
        }
        assert library.gemm(**given) is given["out"]
        (launch,) = driver.launches
        maps = {
            struct.unpack_from("<Q", p)[0]: struct.unpack_from("<II", p, 32) for p in launch.parameters if len(p) == 128
        }
        extents = {"a": (1024, m), "b": (1024, 512), "out": (512, m)}  # the contiguous first
        assert maps == {given[name].data_ptr(): tuple(e - 1 for e in of) for name, of in extents.items()}
        library.close()


def test_a_call_gives_the_kernel_the_scales_of_groups(archive: Path, torch: FakeTorch) -> None:
    with Archive.open(archive) as opened:
        driver = driver_of(opened)
        library = Library(opened, driver)
        scales = FakeTensor((8, 512))
        library.gemm(FakeTensor((16, 1024)), FakeTensor((512, 512), "int4"), scale_b=scales, out=FakeTensor((16, 512)))
        (launch,) = driver.launches
        maps = {
            struct.unpack_from("<Q", p)[0]: struct.unpack_from("<III", p, 32)
            for p in launch.parameters
            if len(p) == 128
        }
        assert len(maps) == 4
        assert {512 - 1, 8 - 1} <= set(maps[scales.data_ptr()])
        with pytest.raises(ArgumentError, match=r"int4_group128 \(8, 512\) of bf16"):
            library.gemm(FakeTensor((16, 1024)), FakeTensor((512, 512), "int4"), scale_b=FakeTensor((512, 8)))
        library.close()


def test_integers_under_8_bit_floats_are_refused(archive: Path, torch: FakeTorch) -> None:
    with Archive.open(archive) as opened:
        library = Library(opened, driver_of(opened))
        with pytest.raises(KernelMiss, match="e4m3_i8"):
            library.gemm(FakeTensor((4, 1024), "float8_e4m3fn"), FakeTensor((512, 1024), "int8"))
        library.close()
