"""Ragged tiles of few tokens: fewer rows of B than WGMMA's atoms multiply, so that tiles fill the GPU.

What they compute is seen on the emulated GPU, at groups of no row, of some, and of more than a tile has.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from aot.compile.lower import Lowered
from aot.kernels.group_sizes import GROUPS_BYTES
from aot.kernels.sm90.grouped.choices import rule
from aot.kernels.sm90.grouped.plan import plan_of
from aot.kernels.sm90.persistent.form import Form
from aot.kernels.sm90.sizes import TILE_EXTENTS
from aot.problem import manifest
from aot.providers import likely_grouped
from aot.providers.builders.grouped_gemm import grouped_plan
from aot.search import legal
from aot.search.legal import of_name, unsuited
from aot.search.operation import building
from aot.search.variants import Variant
from runtime.grouped_gemm import Signature

from ..command_line import ROOT
from ..ptx.compiled import functions_once, run

torch = pytest.importorskip("torch")

from aot.tune.grouped_gemm.measures import GroupedMeasures, Weights  # noqa: E402  # needs torch

MEASURES = GroupedMeasures()
FORM = Form(scheduler_bytes=GROUPS_BYTES)
GATED = dataclasses.replace(FORM, epilogue="swiglu")
OPTIONS = {"schedule": "cooperative", "swap": True, "tile_m": 8, "cluster_n": 1, "share_b": False, "overlap": "serial"}
SIZES = 0, 1, 3, 9, 0, 2
SIGNATURE = Signature("bf16", "bf16", "bf16", len(SIZES), 200, 136)
DEEP = dataclasses.replace(SIGNATURE, n=104, k=1288)  # more stages than the ring has
INTERLEAVED = "bias+swiglu_clamped_interleaved"
# By what a function's name has between its family and its target, what it computes.
COMPUTED = {
    "sm90_grouped.bf16_bf16_bf16_f32.tile8x88.cluster_n1.serial.cooperative.swap": DEEP,
    "sm90_grouped.bf16_bf16_bf16_f32.bias.tile8x112.cluster_n2.launch.pingpong.swap": dataclasses.replace(
        SIGNATURE, epilogue="bias"
    ),
    "sm90_grouped.bf16_bf16_bf16_f32.swiglu.tile8x96.cluster_n1.serial.pingpong.swap": dataclasses.replace(
        SIGNATURE, n=400, epilogue="swiglu"
    ),
    f"sm90_grouped.bf16_bf16_bf16_f32.{INTERLEAVED}.tile8x176.cluster_n1.serial.cooperative.swap": dataclasses.replace(
        SIGNATURE, n=400, epilogue=INTERLEAVED
    ),
    "sm90_grouped.e4m3_e4m3_bf16_f32.row_column_scaled.tile8x88.cluster_n1.serial.cooperative.swap": Signature(
        "e4m3", "e4m3", "bf16", len(SIZES), 200, 272, scaling="row_column"
    ),
    "sm90_masked.bf16_bf16_bf16_f32.tile8x88.cluster_n2.serial.cooperative.swap": dataclasses.replace(
        SIGNATURE, rows="masked"
    ),
}
BESIDE = 16  # columns beside D, which no kernel may write


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Mapping[str, Lowered]:
    """Those of `COMPUTED`."""
    names = {each: f"own.{each}.sm_90a" for each in COMPUTED}
    found = functions_once(request, "ragged", names.values())
    return {each: found[name] for each, name in names.items()}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_ragged_tile_makes_its_own_rows_of_groups_of_every_size(kernels: Mapping[str, Lowered], name: str) -> None:
    """And writes nothing beside D, nor rows of no group."""
    s = COMPUTED[name]
    masked = s.rows == "masked"
    m = max(SIZES) if masked else sum(SIZES) + 2  # the last two are of no group
    o: Any = Weights(s, m, 0, 1, device="cpu").operands(m)[0]
    o.ends.copy_(torch.tensor(SIZES if masked else list(itertools.accumulate(SIZES))))
    wide = torch.full((*o.d.shape[:-1], s.columns + BESIDE), float("nan"), dtype=o.d.dtype)
    o = dataclasses.replace(o, d=wide[..., : s.columns])
    run(kernels[name], o.arguments(), [o.d])
    wanted = MEASURES.reference(s, o)["d"]
    assert bool(wide[..., s.columns :].isnan().all()), "columns beside D"
    assert torch.equal(o.d.isnan(), wanted.isnan()), "rows of D that groups have"
    there = ~wanted.isnan()
    error = (o.d[there].double() - wanted[there]).norm() / wanted[there].norm()
    assert float(error) < MEASURES.max_error(s, "d")


@pytest.mark.parametrize(
    ("change", "form", "reason"),
    [
        ({"tile_n": 88}, FORM, None),
        ({"tile_n": 88, "schedule": "pingpong"}, FORM, None),
        ({"tile_n": 88, "tile_m": 64}, FORM, None),
        ({"tile_n": 88, "tile_m": 72}, FORM, "at most 64 tokens"),
        ({"tile_n": 136}, FORM, "an atom of WGMMA would have no row of the tile"),
        ({"tile_n": 96, "schedule": "pingpong"}, GATED, None),
        ({"tile_n": 96}, GATED, "an atom of WGMMA would have no row of the tile"),
        ({"tile_n": 88, "schedule": "pingpong"}, GATED, "rows of a tile, and gates of them, are whole swizzle atoms"),
        ({"tile_n": 176}, GATED, None),
        ({"tile_n": 176, "schedule": "pingpong"}, GATED, None),
        ({"tile_n": 88, "swap": False, "tile_m": 72}, FORM, "WGMMA's M side has multiples of 64 rows, not 72"),
    ],
)
def test_ragged_tiles_leave_no_atom_of_wgmma_without_rows(
    change: dict[str, Any], form: Form, reason: str | None
) -> None:
    found = rule(OPTIONS | change, form)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("form", [FORM, GATED, dataclasses.replace(FORM, a="e4m3", scaling="row_column")])
def test_wgmma_reads_no_further_than_stages(form: Form) -> None:
    every = itertools.product(("cooperative", "pingpong"), TILE_EXTENTS, TILE_EXTENTS)
    chosen = (OPTIONS | {"schedule": schedule, "tile_m": m, "tile_n": n} for schedule, m, n in every)
    plans = [plan for options in chosen if rule(options, form) is None and (plan := plan_of(options, form)).ragged]
    assert len(plans) > 20
    for plan in plans:
        last = (plan.stages - 1) * plan.loaded_rows
        parts = (0, plan.out_rows) if plan.pairs_atoms else (0,)
        read = max(parts) + plan.rows // len(parts)
        assert last + read <= plan.stages * (plan.loaded_rows + plan.columns)


def test_dense_gemms_have_no_ragged_tiles() -> None:
    name = "own.sm90_persistent.bf16_bf16_bf16_f32.tile8x{}.cluster1x1.rows.serial.{}.split_k1.swap.sm_90a"
    assert of_name(name.format(128, "cooperative"))
    assert of_name(name.format(88, "cooperative")) is None
    assert of_name(name.format(192, "pingpong"))
    gated = name.replace("f32.tile", "f32.swiglu.tile")
    assert of_name(gated.format(256, "cooperative"))
    assert of_name(gated.format(192, "pingpong")) is None


def test_a_stage_has_only_the_rows_that_are_loaded() -> None:
    ragged, whole = (plan_of(OPTIONS | {"tile_n": rows}, FORM) for rows in (88, 128))
    assert (ragged.rows, ragged.loaded_rows, ragged.out_rows) == (128, 88, 88)
    assert ragged.operand_bytes == (88 * 128, 8 * 128)
    assert ragged.stages > whole.stages
    assert not whole.ragged
    gated = plan_of(OPTIONS | {"tile_n": 176}, GATED)
    assert (gated.rows, gated.box_rows, gated.out_rows) == (256, (88, 2), 88)


def test_gates_of_ragged_tiles_are_of_any_n() -> None:
    """Where whole ones need a multiple of 128 rows of B."""
    signature = dataclasses.replace(SIGNATURE, n=400, epilogue="swiglu")
    name = "own.sm90_grouped.bf16_bf16_bf16_f32.swiglu.tile8x{}.cluster_n1.serial.pingpong.swap.sm_90a"
    whole, ragged = (of_name(name.format(rows)) for rows in (128, 96))
    assert whole
    assert ragged
    assert "64 rows at a time" in str(unsuited(whole, signature))
    assert unsuited(ragged, signature) is None


# Of benchmarks/moe.yaml: rows of A at one token and at two, and rows of B of the ragged tile that shares them best.
BALANCED = [
    ("gpt_oss_down", 4, 88),  # 4 experts of 2880 rows: 132 tiles
    ("gpt_oss_down", 8, 88),  # two of them for each SM
    ("gpt_oss_gate_up", 4, 176),  # of 5760 rows
    ("gpt_oss_gate_up", 8, 176),
    ("qwen3_gate_up", 8, 96),  # 8 of 1536: 128 tiles
    ("mixtral_down", 2, 96),  # 2 of 6144: 128 tiles
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Builds make ragged tiles."""
    monkeypatch.setattr(likely_grouped, "RAGGED", likely_grouped.RAGGED_TO_TIME)
    legal._legal.cache_clear()
    yield
    legal._legal.cache_clear()


def candidates(use: str, m: int) -> list[Variant]:
    """Of a grouped GEMM of benchmarks/moe.yaml at `m` rows, as a build takes them: eight, the best first."""
    found = manifest.load(ROOT / "benchmarks" / "moe.yaml")
    (signature,) = [each.signature for each in found.uses if each.name == use]
    ((_, variants),) = building("grouped_gemm").shortlist({signature: [m]}, "sm_90a", 8).by_signature[signature]
    return list(variants)


def is_ragged(v: Variant) -> bool:
    return grouped_plan(v).ragged


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(("use", "m", "tile_n"), BALANCED)
def test_ragged_tiles_are_candidates_where_they_share_rows_evenly(use: str, m: int, tile_n: int) -> None:
    """Beside whole ones, which are more."""
    found = candidates(use, m)
    assert next(v.options["tile_n"] for v in found if is_ragged(v)) == tile_n
    assert sum(map(is_ragged, found)) <= 3


@pytest.mark.parametrize(("use", "m", "_"), BALANCED)
def test_builds_make_none_before_a_gpu_has_run_them(use: str, m: int, _: int) -> None:
    assert not any(map(is_ragged, candidates(use, m)))


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("use", "m"),
    [
        ("qwen3_down", 8),  # 8 of 2048: 128 whole tiles
        ("mixtral_gate_up", 2),  # 2 of 8192: 128 too
        *((use, m) for use, m, _ in BALANCED for m in (128, 4096)),
    ],
)
def test_ragged_tiles_are_no_candidates_where_whole_ones_keep_sms_busy(use: str, m: int) -> None:
    assert not any(map(is_ragged, candidates(use, m)))
