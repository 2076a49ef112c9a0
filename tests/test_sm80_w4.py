"""The GEMM of 4-bit weights by mma.sync: what it does to memory, on the emulated GPU (`tests.ptx`), and which kernels
there are."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aot.compile.cache import Cache
from aot.compile.compiler import compile_variants
from aot.compile.lower import Lowered
from aot.kernels.sm80.w4.plan import Plan
from aot.kernels.w4.form import Form
from aot.problem.model_config import default_targets
from aot.search.legal import of_name, unsuited
from aot.search.provider import provider
from aot.search.targets import TARGETS
from aot.search.variants import Variant
from aot.tune.elements import poisoned
from aot.tune.operation import tuning
from runtime import Library
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature
from runtime.numbers.weights import FORMATS, WeightFormat

from .ptx.check import launching
from .ptx.compiled import functions_once
from .recording_driver import RecordingDriver, kernels_of
from .sm80_w4_samples import CHOICES as SAMPLES
from .sm80_w4_samples import FAMILY, FULL, choices, pack, variant

PLAIN = Signature("bf16", "e2m1", "bf16", "f32", "none", 4096, 4096, scaling="mxfp4_weight")
SIGNATURES = tuple(dataclasses.replace(PLAIN, b=form.codes, scaling=word) for word, form in FORMATS.items())
MXFP4 = FORMATS["mxfp4_weight"]
formats = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.word)
EPILOGUE = "bias+silu+residual+scale"
GUARD = 8  # columns behind A, which are NaN, and behind D, which nobody may write

SMALL = choices((8, 16, 128), 16, 1, 2)
SMALL_TILES = {
    "one warp": SMALL,
    "rows side by side": choices((8, 32, 128), 16, 1, 3),
    "two slabs a warp": choices((16, 32, 128), 32, 1, 2),
    "slices of K": choices((8, 16, 128), 16, 2, 3),
    "blocks in turn": choices((16, 32, 256), 32, 2, 2),
}
LIKELY = choices((8, 16, 1024), 16, 8, 3), choices((32, 64, 256), 32, 2, 3)
WHOLE = choices((64, 32, 64), 32, 1, 2)


def named(options: dict[str, Any], form: WeightFormat, epilogue: str = "none") -> Variant:
    return variant(options, form.word, "sm_80", epilogue)


def compiled(request: pytest.FixtureRequest, name: str, variants: Iterable[Variant]) -> Mapping[str, Lowered]:
    return functions_once(request, name, [each.name() for each in variants], "sm_80")


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Mapping[str, Lowered]:
    with_epilogue = [named(SMALL_TILES["slices of K"], form, EPILOGUE) for form in FORMATS.values()]
    return compiled(request, "sm80-w4", [*with_epilogue, named(WHOLE, MXFP4)])


@pytest.fixture(scope="module")
def more_kernels(request: pytest.FixtureRequest) -> Mapping[str, Lowered]:
    every = itertools.product([*SMALL_TILES.values(), *LIKELY], FORMATS.values())
    return compiled(request, "sm80-w4-more", [named(options, form) for options, form in every])


def check(kernels: Mapping[str, Lowered], v: Variant, m: int, n: int, k: int) -> None:
    """D is right on the emulated GPU, which refuses what is written beside it; rows of A and D lie apart."""
    s = dataclasses.replace(PLAIN, b=FORMATS[v.scaling].codes, scaling=v.scaling, n=n, k=k, epilogue=v.epilogue)
    measures = tuning(s).measures()
    o: Any = measures.weights(s, m, 0, m, device="cpu").operands(m)[0]
    a, around = poisoned((m, k + GUARD), "bf16", "cpu"), poisoned((m, n + GUARD), "bf16", "cpu")
    a[:, :k] = o.a
    o = dataclasses.replace(o, a=a[:, :k], d=around[:, :n])
    with launching(v, kernels[v.name()]) as launch:
        launch(o)
    wanted = measures.reference(s, o)["d"].double()
    assert bool(around[:, n:].isnan().all())
    of_rows = (around[:, :n].double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(of_rows.max()) < measures.max_error(s, "d"), of_rows


@pytest.mark.long
@formats
@pytest.mark.parametrize("options", SMALL_TILES.values(), ids=SMALL_TILES)
@pytest.mark.parametrize("m", [1, 11])
def test_d_is_the_product_with_the_weights_numbers(
    more_kernels: Mapping[str, Lowered], form: WeightFormat, options: dict[str, Any], m: int
) -> None:
    """The first stage is filled again, sums take its place, and neither N nor K, where it can be so, is whole tiles."""
    k = options["stages"] * options["tile_k"] + form.multiple
    check(more_kernels, named(options, form), m, 48, k)


@formats
def test_an_epilogue_has_all_its_parts(kernels: Mapping[str, Lowered], form: WeightFormat) -> None:
    check(kernels, named(SMALL_TILES["slices of K"], form, EPILOGUE), 5, 48, 384)


def test_tiles_that_are_full_are_right(kernels: Mapping[str, Lowered]) -> None:
    check(kernels, named(WHOLE, MXFP4), 64, 32, 128)


@pytest.mark.long
@formats
@pytest.mark.parametrize("m", [3, 33])
@pytest.mark.parametrize("options", LIKELY, ids=str)
def test_likely_choices_are_right(
    more_kernels: Mapping[str, Lowered], form: WeightFormat, options: dict[str, Any], m: int
) -> None:
    check(more_kernels, named(options, form), m, 80, 1408)


# --- banks of shared memory ---


@pytest.mark.parametrize("options", SAMPLES, ids=str)
def test_eight_rows_that_a_warp_reads_or_eight_accesses_that_it_writes_are_in_different_banks(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 128 bytes, which is all banks: a place for each eight elements of bf16."""
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    from aot.kernels.sm80.w4 import loads

    # Of what it makes of an offset, the offset.
    offsets = SimpleNamespace(assume=lambda at, divby: at, make_tensor=lambda at, layout: at, make_layout=lambda of: of)
    monkeypatch.setattr(loads, "cute", offsets)
    plan, stages = Plan.of(options, Form()), loads.Stages(0, None, None)

    def place(stage: int, token: int, access: int) -> int:
        return int(loads.tokens_at(plan, stages, stage, token, access)) // 8 % 8

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
        for name in archive.functions:
            (kernel,) = archive.record(name)["kernels"]
            assert "i32gmemalign32o1281128i64div128" in kernel["symbol"], "offsets into codes have 64 bits"
        driver = RecordingDriver(kernels=kernels_of(archive), capability=TARGETS[target].compute_capability)
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
