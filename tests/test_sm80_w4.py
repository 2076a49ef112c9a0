"""The GEMM of 4-bit weights by mma.sync: what it does to memory, thread by thread on the CPU (`tests.emulated`), and
which kernels there are."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

from aot.compile.cache import Cache
from aot.compile.compiler import compile_variants
from aot.kernels.sm80.w4.choices import rule
from aot.kernels.sm80.w4.plan import Plan
from aot.kernels.w4.form import Form
from aot.problem.model_config import default_targets
from aot.search.legal import of_name, unsuited
from aot.search.provider import provider
from aot.search.targets import TARGETS
from aot.search.variants import Variant
from runtime import Library
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature
from runtime.numbers.weights import FORMATS, WeightFormat, arrange_codes, arrange_scales

from .command_line import ROOT
from .emulated import BFLOAT16, Pointer, Tensor, module, run
from .recording_driver import RecordingDriver
from .sm80_w4_samples import CHOICES as SAMPLES
from .sm80_w4_samples import FAMILY, FULL, choices, pack, variant

KERNEL = module(ROOT / "aot/kernels/sm80/w4/kernel.py", "aot.kernels.sm80.w4")
MXFP4, INT4 = FORMATS["mxfp4_weight"], FORMATS["int4_weight"]
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GUARD = 64  # elements before and behind D that nobody may write
formats = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.word)


class Weights(NamedTuple):
    """As kernels have them, and the numbers (N, K) that they are."""

    b: Any
    scale_b: Any
    numbers: Any


def weights(form: WeightFormat, n: int, k: int, seed: int = 0) -> Weights:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (n, k))
    words = arrange_codes(torch.from_numpy(codes), form).numpy().astype(np.uint32)
    if form is MXFP4:
        exponents = random.integers(115, 124, (n, k // 32))
        held = torch.from_numpy((exponents + form.scale_exponent).astype(np.uint8))
        scale = 2.0 ** (exponents - 127.0)
        numbers = E2M1[codes & 7] * np.where(codes > 7, -1.0, 1.0) * scale.repeat(32, 1)
    else:
        scale = (random.random((n, k // 128)) * 0.02 + 0.001).astype(ml_dtypes.bfloat16).astype(np.float64)
        held = torch.from_numpy(scale * 2.0**form.scale_exponent).bfloat16().view(torch.int16)
        numbers = ((codes - 8) * scale.repeat(128, 1)).astype(ml_dtypes.bfloat16).astype(np.float64)
    return Weights(words.view(np.uint8).reshape(-1), arrange_scales(held, form).contiguous().numpy(), numbers)


def bf16(x: Any) -> Any:
    return np.asarray(x).astype(ml_dtypes.bfloat16)


def multiplied(form: WeightFormat, m: int, n: int, k: int, options: dict[str, Any], epilogue: str = "none") -> float:
    """The largest error of D over what rounding it to bf16 may be wrong by."""
    of = Form(form.word, epilogue)
    assert rule(options, of) is None
    kernel, plan = KERNEL["W4"](options, of), Plan.of(options, of)
    random = np.random.default_rng(m)
    weight = weights(form, n, k)
    padded = bf16(random.standard_normal((m, k + 8)))  # columns past K are no numbers
    padded[:, k:] = np.nan
    a = Tensor(Pointer(padded.reshape(-1)), (m, k), (k + 8, 1), BFLOAT16)
    b = Tensor(Pointer(weight.b), (n, k), (k, 1))
    views = KERNEL["views"]
    codes, scales = (
        views.codes_of(b),
        views.scales_of(form, b, Tensor.of(weight.scale_b.reshape(-1).view(np.uint8))),
    )
    around = np.full(GUARD * 2 + m * (n + 8), np.nan, ml_dtypes.bfloat16)
    d = Tensor(Pointer(around, GUARD), (m, n), (n + 8, 1), BFLOAT16)
    bias, residual, scale_d = (bf16(random.standard_normal(shape)) for shape in ((n,), (m, n), (1,)))
    extras = [
        Tensor.of(bias, BFLOAT16) if of.parts.bias else None,
        Tensor.of(residual, BFLOAT16) if of.parts.residual else None,
        Tensor.of(scale_d.astype(np.float32)) if of.parts.scale else None,
    ]
    grid = -(-n // plan.tile_n), -(-m // plan.tile_m)
    run(kernel.kernel, grid, plan.threads, a, codes, scales, d, *extras)
    wanted = padded[:, :k].astype(np.float64) @ weight.numbers.T
    magnitude = np.abs(padded[:, :k].astype(np.float64)) @ np.abs(weight.numbers.T)
    if of.parts.bias:
        wanted = wanted + bias.astype(np.float64)
    if of.parts.activation == "silu":
        wanted = wanted / (1 + np.exp(-wanted))
    if of.parts.residual:
        wanted = wanted + residual.astype(np.float64)
    if of.parts.scale:
        wanted = wanted * float(scale_d[0])
    found = around[GUARD : GUARD + m * (n + 8)].reshape(m, n + 8)
    written = np.isfinite(found[:, :n].astype(np.float32))
    assert written.all(), f"{written.size - written.sum()} of {written.size} elements of D are no numbers"
    left = np.concatenate([around[:GUARD], around[-GUARD:], found[:, n:].reshape(-1)])
    assert np.isnan(left.astype(np.float32)).all(), "something else was written"
    allowed = np.abs(wanted) * 2.0**-8 + magnitude * 2.0**-18 + 2.0**-20
    return float((np.abs(found[:, :n].astype(np.float64) - wanted) / allowed).max())


SMALL = choices((8, 16, 128), 16, 1, 2)
CHOICES = {
    "one warp": SMALL,
    "rows side by side": choices((8, 32, 128), 16, 1, 3),
    "two slabs a warp": choices((16, 32, 128), 32, 1, 2),
    "slices of K": choices((8, 16, 128), 16, 2, 3),
    "blocks in turn": choices((16, 32, 256), 32, 2, 2),
}


@pytest.mark.long
@formats
@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("m", [1, 11])
def test_d_is_the_product_with_the_weights_numbers(form: WeightFormat, options: dict[str, Any], m: int) -> None:
    """The first stage is filled again, sums take its place, and neither N nor K, where it can be so, is whole tiles."""
    k = options["stages"] * options["tile_k"] + (64 if form is MXFP4 else 128)
    assert multiplied(form, m, 48, k, options) < 1


@formats
def test_an_epilogue_has_all_its_parts(form: WeightFormat) -> None:
    assert multiplied(form, 5, 48, 384, CHOICES["slices of K"], "bias+silu+residual+scale") < 1


def test_tiles_that_are_full_are_right() -> None:
    assert multiplied(MXFP4, 64, 32, 128, choices((64, 32, 64), 32, 1, 2)) < 1


@pytest.mark.long
@formats
@pytest.mark.parametrize("m", [3, 33])
def test_likely_choices_are_right(form: WeightFormat, m: int) -> None:
    for options in (choices((8, 16, 1024), 16, 8, 3), choices((32, 64, 256), 32, 2, 3)):
        assert multiplied(form, m, 80, 1408, options) < 1


# --- banks of shared memory ---


@pytest.mark.parametrize("options", SAMPLES, ids=str)
def test_eight_rows_that_a_warp_reads_or_eight_accesses_that_it_writes_are_in_different_banks(
    options: dict[str, Any],
) -> None:
    """Of 128 bytes, which is all banks: a place for each eight elements of bf16."""
    plan = Plan.of(options, Form())
    loads = module(ROOT / "aot/kernels/sm80/w4/loads.py", "aot.kernels.sm80.w4")
    stages = loads["Stages"](Pointer(np.empty(plan.stages * plan.tokens_bytes // 2, np.int16)), None, None)

    def place(stage: int, token: int, access: int) -> int:
        return loads["tokens_at"](plan, stages, stage, token, access).iterator.offset // 8 % 8

    for stage, access in itertools.product(range(plan.stages), range(plan.row_accesses)):
        read = {place(stage, token, access) for token in range(plan.tile_m - 8, plan.tile_m)}
        written = {place(stage, 3, access // 8 * 8 + i) for i in range(8)}
        assert read == written == set(range(8))


@pytest.mark.parametrize("tile_n", range(16, 257, 16))
def test_the_sums_that_a_warp_stores_at_a_time_are_in_different_banks(tile_n: int) -> None:
    pitch = Plan.of(choices((8, tile_n, 128), 16, 1, 2), Form()).staging_pitch
    for second in range(2):
        assert len({(lane // 4 + (lane % 4 * 2 + second) * pitch) % 32 for lane in range(32)}) == 32


# --- which kernels there are ---

PLAIN = Signature("bf16", "e2m1", "bf16", "f32", "none", 4096, 4096, scaling="mxfp4_weight")
SIGNATURES = PLAIN, dataclasses.replace(PLAIN, b="u4", scaling="int4_weight")
NAME = "own.sm80_w4.bf16_e2m1_bf16_f32.mxfp4_weight_scaled.tile%s.sliced_k%d.stages%d.warp_n%d.sm_80"


def variants(target: str, signature: Signature) -> list[Variant]:
    return [v for v in provider("own").variants(target, signature) if v.family == "sm80_w4"]


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.scaling)
def test_builds_choose_it_where_nothing_better_multiplies(signature: Signature) -> None:
    for target in ("sm_80", "sm_120a"):
        assert 50 < len(variants(target, signature)) < 300
    assert variants("sm_90a", signature) == []
    one = variants("sm_80", signature)[0]
    named = dataclasses.replace(one, target="sm_90a")
    assert of_name(named.name()) == named
    assert "sm90_w4" in (FAMILY.likely.unlikely(named) or "")


def test_a_manifest_of_such_weights_is_for_all_targets_that_have_it() -> None:
    assert default_targets(SIGNATURES) == ("sm_80", "sm_90a", "sm_120a")


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.scaling)
def test_a_cta_has_no_more_of_a_gpu_than_there_is(signature: Signature) -> None:
    for v in variants("sm_80", signature):
        plan = Plan.of(v.options, Form(v.scaling, v.epilogue))
        assert plan.shared_bytes + 1024 <= TARGETS["sm_80"].shared_bytes_per_block
        assert plan.threads <= 1024


@pytest.mark.parametrize(
    "name",
    [
        ("8x48x128", 1, 2, 32),  # rows that are no whole warps
        ("8x16x128", 4, 2, 16),  # slices that are no whole blocks
        ("8x16x320", 1, 2, 16),  # more blocks of a slice than are written out
        ("8x512x512", 8, 2, 16),  # threads
        ("64x32x1024", 4, 2, 32),  # shared memory
        ("64x512x64", 1, 2, 16),  # registers
    ],
    ids=str,
)
def test_choices_that_no_gpu_can_have_are_refused(name: tuple[Any, ...]) -> None:
    assert of_name(NAME % ("8x16x128", 1, 2, 16)) is not None
    assert of_name(NAME % name) is None


def test_extents_that_fill_no_block_are_refused() -> None:
    one = variants("sm_80", PLAIN)[0]
    for n, k, reason in ((4104, 4096, "N must be a multiple of 16"), (4096, 4128, "K must be a multiple of 64")):
        assert reason in (unsuited(one, dataclasses.replace(PLAIN, n=n, k=k)) or "")


@pytest.mark.parametrize("target", FAMILY.targets)
def test_kernels_compile_for_every_target_and_load(target: str, tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    samples = [variant(SAMPLES[1], "int4_weight", target, FULL), variant(SAMPLES[0], "mxfp4_weight", target)]
    with Archive.open(pack(samples, tmp_path)) as archive:
        kernels = {}
        for name in archive.functions:
            (launch,), (kernel,) = archive.record(name)["program"]["launches"], archive.record(name)["kernels"]
            assert "i32gmemalign32o1281128i64div128" in kernel["symbol"], "offsets into codes have 64 bits"
            kernels[archive.cubin(name)] = {kernel["symbol"]: tuple(p["size"] for p in launch["parameters"])}
        driver = RecordingDriver(kernels=kernels, capability=TARGETS[target].compute_capability)
        with Library(archive, driver) as library:
            assert sorted(library.functions) == sorted(v.name() for v in samples)


@pytest.mark.long
@pytest.mark.parametrize("target", FAMILY.targets)
def test_all_samples_compile_or_spill_as_one_on_sm_120a_does(target: str, tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    variants = [variant(c, word, target, FULL) for c in SAMPLES for word in FORMATS]
    refused = compile_variants(variants, Cache(tmp_path / "cache"), jobs=1).failures.values()
    assert [reason for reason in refused if "bytes a thread in local memory" not in reason] == []
    assert len(refused) <= (target == "sm_120a")
