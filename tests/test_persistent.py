"""The persistent Hopper GEMM: which forms exist, what they take of an SM, and on a GPU what they compute."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import subprocess
import sysconfig
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from aot.kernels.sm90.persistent import choices as persistent_choices
from aot.kernels.sm90.persistent.form import Form
from aot.kernels.sm90.persistent.plan import STAGE_BYTES_OF_K, Plan
from aot.kernels.sm90.persistent.scale_blocks import ScaleBlocks
from aot.providers import estimate_persistent, likely_persistent
from aot.search.legal import legal_variants, of_name, unsuited
from aot.search.rank import rank
from aot.search.variants import Variant, choices
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import EPILOGUES
from runtime.numbers.scaling import SCALINGS
from runtime.program.record import Record, TensorArgument, TensorView

from .legal_samples import drawn

FAMILY = "sm90_persistent"
PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 6144, 4096)
FP8 = Signature("e4m3", "e4m3", "bf16", "f32", "none", 6144, 4096, scaling="row_column")
BLOCK = Signature("e4m3", "e4m3", "bf16", "f32", "swiglu", 6144, 4096, scaling="block")
SIGNATURES = (
    PLAIN,
    FP8,
    BLOCK,
    Signature("f16", "f16", "f16", "f32", "bias+gelu+residual+scale", 4096, 4096),
    Signature("bf16", "bf16", "bf16", "f32", "bias+swiglu_interleaved", 4096, 4096),
    Signature("bf16", "bf16", "bf16", "f32", "none", 4096, 4096, batch=3),
    Signature("bf16", "bf16", "bf16", "f32", "none", 4096, 4096, b_major="n"),
    Signature("e4m3", "e4m3", "e4m3", "f32", "geglu+scale", 4096, 4096, scaling="tensor"),
)


def variants(signature: Signature) -> list[Variant]:
    return [v for v in legal_variants("own", "sm_90a", signature) if v.family == FAMILY]


@cache
def legal_plans(signature: Signature) -> list[Plan]:
    """Of some of what is legal, likely or not, each once."""
    return list(dict.fromkeys(Plan.of(v.options, form(signature)) for v in drawn(signature, FAMILY)))


def form(signature: Signature) -> Form:
    return Form(signature.a, signature.d, signature.scaling, signature.epilogue, signature.b_major)


def plain_form(_: Variant) -> Form:
    return form(PLAIN)


def test_consumers_wait_for_the_kernel_before_where_they_read_anything_themselves() -> None:
    for epilogue in ("none", "relu", "silu", "swiglu", "geglu_interleaved"):
        assert not Form(epilogue=epilogue).reads, epilogue
    for epilogue in ("bias", "bias+relu", "residual", "swiglu+residual", "scale", "gelu+scale"):
        assert Form(epilogue=epilogue).reads, epilogue
    assert all(Form(a="e4m3", scaling=scaling).reads for scaling in SCALINGS if scaling != "none")


@pytest.mark.parametrize("signature", SIGNATURES, ids=Signature.key)
def test_every_form_has_variants_and_not_too_many(signature: Signature) -> None:
    assert 8 <= len(variants(signature)) <= 640


@pytest.mark.parametrize("signature", [PLAIN, BLOCK], ids=Signature.key)
def test_what_enumeration_leaves_out_early_is_illegal_or_unlikely(signature: Signature) -> None:
    options = persistent_choices.OPTIONS | likely_persistent.OPTIONS
    assert list(options) == list(persistent_choices.OPTIONS)
    everything = (dict(zip(options, values, strict=True)) for values in itertools.product(*options.values()))
    legal = [o for o in everything if persistent_choices.rule(o, form(signature)) is None]
    likely = [o for o in legal if likely_persistent.unlikely(o, form(signature)) is None]
    promised = dataclasses.replace(signature, overlap="launch")
    assert likely == [{name: v.options[name] for name in options} for v in variants(promised)]


def test_what_overlaps_is_for_signatures_that_promise_it_and_has_no_workspace() -> None:
    assert {v.options["overlap"] for v in variants(PLAIN)} == {"serial"}
    for promise in ("launch", "weights"):
        found = variants(dataclasses.replace(PLAIN, overlap=promise))
        early = [v for v in found if v.options["overlap"] == "launch"]
        alone = sum(bool(v.options["stream_k"]) or v.options["order"] == "quads" for v in variants(PLAIN))
        assert len(early) == len(variants(PLAIN)) - alone
        assert not any(v.options["stream_k"] for v in early)
        assert all(Plan.of(v.options, form(PLAIN)).overlap for v in early)


def test_no_part_of_an_n_major_tile_ends_within_a_swizzle_atom() -> None:
    n_major = dataclasses.replace(PLAIN, b_major="n")
    for v in variants(n_major):
        plan = Plan.of(v.options, form(n_major))
        part = plan.columns // plan.atom_layout.columns
        assert part % 64 == 0 or 64 % part == 0, v.name()


def test_gates_are_loaded_by_the_cta_that_loads_what_they_gate() -> None:
    """8 of each by turns: half a turn cannot be said to TMA, and whoever waits for its bytes would wait for ever."""
    for epilogue in ("swiglu", "geglu_tanh_interleaved"):
        for a, scaling in (("bf16", "none"), ("e4m3", "row_column")):
            gated = Signature(a, a, "bf16", "f32", epilogue, 7168, 8192, scaling=scaling)
            found = [Plan.of(v.options, form(gated)) for v in variants(gated)]
            assert any(plan.cluster_rows > 1 for plan in found)
            assert all(plan.columns // plan.cluster_rows % 16 == 0 for plan in found)


def boxes(variant: Variant, signature: Signature) -> list[int]:
    """Elements of the boxes that a launch's TMA descriptors ask for. Their extents, less one, are a descriptor's bytes
    from 55 on, as descriptors of tiles that are known show."""
    from aot.compile.lower import lower

    record = Record.from_json(lower(variant).record)
    columns = signature.n // (2 if signature.parts.gated else 1)
    matrices = {"a": (64, signature.k), "b": (signature.n, signature.k), "d": (64, columns)}
    given: list[Any] = []
    for argument in record.leaves():
        if isinstance(argument, TensorArgument):
            shape = matrices.get(argument.name, (matrices["a" if argument.name == "scale_a" else "b"][0],))
            strides = (shape[1], 1) if len(shape) > 1 else (1,)
            given.append(TensorView(1 << 20, argument.dtype, shape, strides, 0))
    bound = record.bind(given, {argument.name: 66 for argument in record.device_arguments})
    (launch,) = record.plan(bound.values)
    starts = [slot.offset + 55 for slot in launch.slots if slot.tma]
    return [math.prod(extent + 1 for extent in launch.parameters[start : start + 5]) for start in starts]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)], ids=["a quarter", "all"])
@pytest.mark.parametrize(
    "signature",
    [
        Signature("bf16", "bf16", "bf16", "f32", "none", 7168, 8192),
        Signature("bf16", "bf16", "bf16", "f32", "swiglu", 7168, 8192),
        Signature("e4m3", "e4m3", "bf16", "f32", "geglu_interleaved", 7168, 8192, scaling="row_column"),
    ],
    ids=Signature.key,
)
def test_what_ctas_load_together_is_what_a_stage_waits_for(signature: Signature, every: int) -> None:
    """A byte more or less, and a kernel never ends. And what they store is a piece of D. Each is compiled."""
    pytest.importorskip("cutlass")
    found: dict[object, Variant] = {}
    for v in variants(signature):
        plan = Plan.of(v.options, form(signature))
        if not plan.swap and plan.rows >= 128 and plan.multicasts:
            rows = plan.rows if plan.columns == 144 else 128
            found.setdefault((rows, plan.columns, plan.cluster_rows, plan.cluster_columns), v)
    assert len(found) >= 8
    for v in list(found.values())[::every]:
        plan = Plan.of(v.options, form(signature))
        of_a, of_b, of_d = boxes(v, signature)
        together = (of_a * plan.cluster_columns + of_b * plan.cluster_rows) * DTYPES[signature.a].bytes
        assert together == (plan.rows + plan.columns) * STAGE_BYTES_OF_K, v.name()
        assert of_d == 64 * plan.epilogue_tile_columns, v.name()


@pytest.mark.parametrize(
    "tile", ["128x72.cluster1x1", "128x216.cluster3x1", "192x176.cluster1x3", "128x248.cluster1x8"]
)
def test_what_no_build_chooses_compiles_for_who_names_it(tile: str) -> None:
    pytest.importorskip("cutlass")
    v = of_name(f"own.{FAMILY}.bf16_bf16_bf16_f32.tile{tile}.rows.serial.cooperative.split_k1.sm_90a")
    assert v is not None
    assert v not in variants(PLAIN)
    plan = Plan.of(v.options, form(PLAIN))
    of_a, of_b, of_d = boxes(v, PLAIN)
    assert (of_a * plan.cluster_columns + of_b * plan.cluster_rows) * 2 == (plan.rows + plan.columns) * STAGE_BYTES_OF_K
    assert of_d == 64 * plan.epilogue_tile_columns


def test_ctas_share_n_major_b_by_whole_swizzle_atoms_along_k() -> None:
    """TMA would round a third of a stage up, and more bytes would come than are waited for."""
    name = f"own.{FAMILY}.bf16_bf16_bf16_f32.b_n_major.tile128x192.cluster%dx1.rows.serial.cooperative.split_k1.sm_90a"
    assert [m for m in range(1, 9) if of_name(name % m)] == [1, 2, 4, 8]


@pytest.mark.parametrize("signature", SIGNATURES, ids=Signature.key)
def test_tiles_cover_every_row_and_hang_over_m_only_where_there_are_fewer_rows(signature: Signature) -> None:
    plans = [Plan.of(v.options, form(signature)) for v in variants(signature)]
    by_tokens = {plan.tokens: plan for plan in plans if not plan.stream_k}
    for tokens, plan in by_tokens.items():
        for m in (*range(1, 2 * tokens + 2), 1000, 4095, 4096, 4097):
            # One more, as a cluster along M may have.
            starts = [tile * tokens - plan.moved_up(tile, m) for tile in range(-(-m // tokens) + 1)]
            assert {row for start in starts for row in range(start, min(start + tokens, m))} == set(range(m))
            assert min(starts) == 0
            assert max(starts) + tokens <= max(m, tokens)


@pytest.mark.parametrize("signature", SIGNATURES, ids=Signature.key)
def test_rows_before_a_tiles_place_are_few_and_none_where_tiles_are_full(signature: Signature) -> None:
    for plan in (Plan.of(v.options, form(signature)) for v in variants(signature) if not v.options["stream_k"]):
        assert [plan.moved_up(tile, 3 * plan.tokens) for tile in range(3)] == [0, 0, 0]
        assert [plan.moved_up(tile, 3 * plan.tokens - 5) for tile in range(3)] == [0, 0, 5]
        assert [plan.moved_up(tile, 5) for tile in range(2)] == [0, plan.tokens]


def test_no_two_tiles_that_add_up_in_different_orders_share_a_row() -> None:
    """Only tiles of a last wave are cut along K: a row that another tile makes too would have either's bits."""
    shared = [Plan.of(v.options, form(PLAIN)) for v in variants(PLAIN) if v.options["stream_k"]]
    assert shared
    for plan in shared:
        assert {plan.moved_up(tile, m) for m in (1, plan.tokens + 1, 1000) for tile in range(9)} == {0}


def test_the_estimate_of_a_tile_that_hangs_over_m_counts_rows_past_it() -> None:
    """Which is so where M is less than a tile: else the last tile begins before its place, and none is past M."""
    for v in variants(PLAIN):
        tiling = estimate_persistent.of_own
        tokens = Plan.of(v.options, form(PLAIN)).tokens
        full, hanging = (tiling(v, plain_form, PLAIN, m) for m in (tokens, tokens - 8))
        assert hanging > full - 0.2
        if not v.options["stream_k"]:
            assert tiling(v, plain_form, PLAIN, 2 * tokens - 8) <= tiling(v, plain_form, PLAIN, 2 * tokens)


@pytest.mark.parametrize("signature", [PLAIN, BLOCK], ids=Signature.key)
def test_every_legal_kernel_has_an_estimate(signature: Signature) -> None:
    clusters = set()
    for v in drawn(signature, FAMILY):
        assert 0 < estimate_persistent.of_own(v, lambda _: form(signature), signature, 300) < 1e4
        clusters.add(Plan.of(v.options, form(signature)).cluster)
    assert clusters >= {1, 2, 3, 4, 6, 8}


def test_every_activation_has_variants_alone_and_with_all_other_parts() -> None:
    words = [w for w, e in EPILOGUES.items() if e.bias == e.residual == e.scale]
    for word, a in itertools.product(words, ("bf16", "e4m3")):
        assert variants(Signature(a, a, "bf16", "f32", word, 4096, 4096, scaling="none")), (word, a)


@pytest.mark.parametrize("signature", [PLAIN, FP8, BLOCK], ids=Signature.key)
def test_stages_and_epilogue_tiles_fit_the_shared_memory_of_a_cta(signature: Signature) -> None:
    for plan in legal_plans(signature):
        stages = plan.stages * (plan.rows + plan.columns) * 128
        epilogue_tiles = 4 * 64 * plan.epilogue_tile_columns * DTYPES[signature.d].bytes
        scales = 2 * plan.shared_scales * 4
        scales += plan.stages * plan.staged_scales * 2 * 32 * 4  # of 32 quads of threads in two warp groups
        assert stages + epilogue_tiles + scales + 2048 <= 227 << 10  # 1 KiB of them is static, the other for mbarriers
        assert 16 * plan.stages + 8 <= 1024
        assert plan.stages >= 2


@pytest.mark.parametrize("signature", [PLAIN, FP8, BLOCK], ids=Signature.key)
def test_epilogue_tiles_and_warp_groups_cover_a_tile_once(signature: Signature) -> None:
    for plan in legal_plans(signature):
        assert plan.m_atoms * plan.atom_layout.rows * 64 == plan.rows
        assert plan.part_columns * plan.atom_layout.columns == plan.out_columns
        across, width = plan.epilogue_tiles_across, plan.epilogue_tile_columns
        starts = [plan.epilogue_tile_start(number) for number in range(across)]
        assert {column for start in starts for column in range(start, start + width)} == set(range(plan.part_columns))
        assert all(start % 8 == 0 for start in starts)
        if not plan.swap or plan.split_k > 1 or plan.stream_k:  # each is added up once
            assert across * width == plan.part_columns
    for v in variants(signature):
        plan = Plan.of(v.options, form(signature))
        assert {plan.rows, plan.columns} == {v.integer("tile_m"), v.integer("tile_n")}


@pytest.mark.parametrize("signature", [PLAIN, FP8, BLOCK], ids=Signature.key)
def test_rows_of_an_epilogue_tile_are_those_of_a_swizzle_atom_or_meet_no_bank_twice(signature: Signature) -> None:
    """8 rows of 16 bytes are stored at a time: where they lie an odd number of 16 bytes apart, each has banks of its
    own."""
    for plan in legal_plans(signature):
        if not plan.swap:
            units, rest = divmod(plan.epilogue_tile_columns * DTYPES[signature.d].bytes, 16)
            assert rest == 0
            assert units in (2, 4, 8) or len({row * units % 8 for row in range(8)}) == 8, plan


def test_5376_columns_and_gates_of_7168_are_whole_tiles_of_some_variant() -> None:
    """Gemma 3 has the one, 32 tiles of 168; Llama-3.3-70B over eight GPUs the other, 64 of 112."""
    for n, k, epilogue, tile_n, m in ((5376, 4096, "none", 168, 512), (7168, 8192, "swiglu", 112, 256)):
        signature = Signature("bf16", "bf16", "bf16", "f32", epilogue, n, k)
        best = rank(legal_variants("own", "sm_90a", signature), signature, m, "sm_90a").variants[:8]
        assert any(v.options.get("tile_n") == tile_n and not v.options["swap"] for v in best)


def test_sums_of_8_bit_products_and_no_others_are_promoted_every_256_columns_or_block_of_scales() -> None:
    assert [form(s).promotion_interval for s in (PLAIN, FP8, BLOCK)] == [0, 2, 1]


@pytest.mark.parametrize("signature", SIGNATURES, ids=Signature.key)
def test_partial_accumulators_are_of_one_atom_of_rows(signature: Signature) -> None:
    for plan in legal_plans(signature):
        assert plan.partial_accumulators == (plan.accumulators // plan.m_atoms if signature.a == "e4m3" else 0)
        assert plan.accumulators + plan.partial_accumulators <= 200


def test_scales_of_columns_wait_in_shared_memory_for_each_part_of_a_tile() -> None:
    for signature in SIGNATURES:
        for v in variants(signature):
            plan = Plan.of(v.options, form(signature))
            expected = plan.columns // plan.atom_layout.columns if signature.scaling == "row_column" else 0
            assert plan.shared_scales == expected


def test_tiles_of_block_scaling_touch_two_blocks_of_b_at_most() -> None:
    options = {"schedule": "cooperative", "swap": False, "cluster_m": 1, "cluster_n": 1, "order": "rows"}
    options |= {"split_k": 1, "stream_k": False, "overlap": "serial"}

    def columns(rows: int) -> list[Any]:
        tiles = ({**options, "tile_m": rows, "tile_n": n} for n in persistent_choices.OPTIONS["tile_n"])
        of_blocks = form(dataclasses.replace(BLOCK, epilogue="none"))
        return [tile["tile_n"] for tile in tiles if persistent_choices.rule(tile, of_blocks) is None]

    assert columns(128) == [8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192]
    assert columns(256) == [8, 16, 24, 32, 40, 48, 64, 80, 96, 128]


@pytest.mark.parametrize("epilogue", ["none", "bias", "swiglu", "swiglu_interleaved"])
def test_blocks_scales_are_staged_by_warps_that_a_stage_waits_for(epilogue: str) -> None:
    signature = dataclasses.replace(BLOCK, epilogue=epilogue)
    plans = legal_plans(signature)
    assert {plan.m_atoms for plan in plans} >= {1, 2}
    for plan in plans:
        gates = 2 if epilogue == "swiglu" else 1
        blocks_of_b = 1 if 128 % (plan.columns // plan.atom_layout.columns // gates) == 0 else 2
        assert plan.staged_scales == 2 * plan.m_atoms * gates * blocks_of_b
        assert plan.full_arrivals == 1 + 2, "the TMA warp, and those that load scales"


@pytest.mark.parametrize("columns", [32, 48, 64, 80, 96, 128, 144, 160, 192, 256])
def test_every_column_of_a_tile_is_scaled_by_the_block_of_b_that_it_is_in(columns: int) -> None:
    blocks = ScaleBlocks(columns)
    assert blocks.blocks <= 2
    for first in range(0, 20 * columns, columns):
        for column in range(first, first + columns):
            lane, sub_block = blocks.of_sum((column - first) // 8)
            assert lane == 0
            assert first // 128 + blocks.block_of(sub_block, first % 128) == column // 128


class _Rows:
    """Scales (rows, blocks of K), of which `[row, None]` is a row's: the same number in every block of K."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __getitem__(self, at: tuple[int, None]) -> list[int]:
        return [int(self.values[at[0]])]


@pytest.mark.parametrize("epilogue", ["none", "swiglu", "swiglu_interleaved"])
def test_every_sum_is_scaled_by_its_rows_scale_times_that_of_its_block_of_b(
    monkeypatch: pytest.MonkeyPatch, epilogue: str
) -> None:
    """From the warps that load scales to the accumulators, in the order in which the epilogue takes these for D."""
    pytest.importorskip("cutlass")
    from aot.kernels.sm90.persistent import epilogue_operands, promotion, staged_scales
    from aot.kernels.sm90.persistent.scheduler import TileCoord

    arch = SimpleNamespace(make_warp_uniform=lambda x: x)
    plain = SimpleNamespace(min=min, select_=lambda condition, one, other: one if condition else other)
    for module in (epilogue_operands, staged_scales):
        monkeypatch.setattr(module, "cute", SimpleNamespace(arch=arch))
        monkeypatch.setattr(module, "cutlass", plain)
    monkeypatch.setattr(promotion, "cutlass", plain)
    monkeypatch.setattr(promotion, "cute", SimpleNamespace(size=len))
    monkeypatch.setattr(promotion, "_here", lambda _code, old, x, scale: old + x * scale)
    m, n = 1000, 3072
    of_a, of_b = numpy.arange(1, m + 1), 10_000 * numpy.arange(1, n // 128 + 1)
    plans = legal_plans(dataclasses.replace(BLOCK, epilogue=epilogue))
    plans = list({(plan.rows, plan.columns): plan for plan in plans}.values())
    assert len(plans) >= 10
    for plan, column, group in itertools.product(plans, (0, 1, 2, 3, 5), (0, 1)):
        thread = group * 128 + 4 * 9 + 2
        extras = (_Rows(of_a), _Rows(of_b), None, None, None)
        operands = epilogue_operands.EpilogueOperands.of(plan, (m, n), extras, None, thread)
        coord = TileCoord(1, column, 0, 0)
        rows, columns = staged_scales._by_block(plan, operands, coord)
        factors, products = [0] * (len(rows) + len(columns)), [0] * plan.staged_scales
        staged_scales._fetch(factors, rows, columns, 0)
        staged_scales._multiply(products, factors, len(rows), len(columns))
        read = numpy.reshape(products, (plan.scale_blocks.scales, 2, plan.m_atoms), order="F")
        start = staged_scales.first_column(plan, operands, coord) % 128
        chosen = promotion.choose(plan, read, start)
        sums = [0] * plan.accumulators
        ones = [1] * plan.partial_accumulators
        for atom in range(plan.m_atoms):
            promotion.promote(plan, sums, ones, chosen, range(atom, atom + 1), True)
        lanes = 2 if plan.form.gated else 1
        for atom, j, lane, half in itertools.product(
            range(plan.m_atoms), range(plan.part_columns // 8), *[range(2)] * 2
        ):
            of_d = operands.first_column(coord, 0) + 8 * j + operands.column
            row = of_d if lanes == 1 else 2 * of_d + lane if operands.parts.interleaved else n // 2 * lane + of_d
            if lane < lanes and of_d < n // lanes:
                at = len(sums) // plan.m_atoms * atom + 4 * (j * lanes + lane) + 2 * half
                token = operands.first_row(coord, atom) + operands.row + 8 * half
                expected = of_a[min(token, m - 1)] * of_b[row // 128]
                assert sums[at] == sums[at + 1] == expected, (plan.rows, plan.columns, column, at)


def test_a_sub_block_is_chosen_at_run_time_only_where_it_is_not_always_of_one_block() -> None:
    start = SimpleNamespace()  # no number at all
    assert [ScaleBlocks(64).block_of(i, start) for i in range(1)] == [0]
    assert [ScaleBlocks(256).block_of(i, start) for i in range(2)] == [0, 1]
    blocks = ScaleBlocks(192)
    assert [blocks.block_of(0, start), blocks.block_of(2, start)] == [0, 1]
    assert [blocks.block_of(1, 0), blocks.block_of(1, 64)] == [0, 1]


def test_gates_and_what_they_gate_have_scales_of_their_own_blocks() -> None:
    """Of 96 gates and 96 others, which take turns by 8 columns: the third 32 of each."""
    blocks = ScaleBlocks(96, lanes=2)
    assert (blocks.sub_blocks, blocks.scales) == (3, 4)
    assert [blocks.of_sum(i) for i in (0, 1, 2, 16, 17, 23)] == [(0, 0), (1, 0), (0, 0), (0, 2), (1, 2), (1, 2)]


@pytest.mark.parametrize("tile_n", [96, 128, 192])
@pytest.mark.parametrize("epilogue", ["none", "bias", "swiglu", "swiglu_interleaved", "residual"])
def test_tiles_of_128_rows_keep_stages_enough_beside_their_scales(epilogue: str, tile_n: int) -> None:
    plans = [p for p in legal_plans(dataclasses.replace(BLOCK, epilogue=epilogue)) if p.columns == tile_n]
    plans = [plan for plan in plans if plan.rows == 128]
    assert plans
    four_scales_more = epilogue == "swiglu" and tile_n == 192
    assert all(plan.stages >= (4 if four_scales_more else 5) for plan in plans)


def test_a_thread_that_loads_scales_stands_for_consumers_of_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from aot.kernels.sm90.persistent import epilogue_operands
    from aot.kernels.sm90.persistent.staged_scales import first_thread_of_quad

    plain = SimpleNamespace(arch=SimpleNamespace(make_warp_uniform=lambda x: x))
    monkeypatch.setattr(epilogue_operands, "cute", plain)

    def rows(thread: Any) -> tuple[int, int]:
        plan = next(plan for plan in legal_plans(BLOCK) if plan.staged_scales)
        operands = epilogue_operands.EpilogueOperands.of(plan, (4096, 6144), (None,) * 5, None, thread)
        return operands.group, operands.row

    for thread in range(256):
        group, quad = thread // 128, thread % 128 // 4
        stands_for = first_thread_of_quad(64 + quad, group)  # in whichever warp
        assert stands_for % 128 // 4 == quad
        assert rows(stands_for) == rows(thread)


def test_gates_that_share_a_block_of_b_with_what_they_gate_are_unsuited() -> None:
    v = variants(BLOCK)[0]
    assert unsuited(v, BLOCK) is None
    assert unsuited(v, Signature("e4m3", "e4m3", "bf16", "f32", "swiglu", 6144 + 32, 4096, scaling="block"))


def test_more_rows_of_b_than_tiles_can_be_placed_for_are_unsuited() -> None:
    v = variants(PLAIN)[0]
    assert unsuited(v, dataclasses.replace(PLAIN, n=1 << 27)) is None
    assert "exact up to N" in (unsuited(v, dataclasses.replace(PLAIN, n=(1 << 27) + 8)) or "")


def shared(signature: Signature) -> list[Plan]:
    """Those that share tiles, and are likely."""
    return [Plan.of(v.options, form(signature)) for v in variants(signature) if v.options["stream_k"]]


def shareable(signature: Signature) -> list[Plan]:
    """All that share tiles."""
    return [plan for plan in legal_plans(signature) if plan.stream_k]


def test_tiles_are_shared_where_types_have_16_bits() -> None:
    for signature in SIGNATURES:
        plans = shared(signature)
        assert bool(plans) == (signature.a != "e4m3"), signature.key()
        assert len(plans) <= 6
        assert all(not plan.pingpong and plan.split_k == 1 for plan in plans)


@pytest.mark.parametrize("signature", [PLAIN, FP8, BLOCK], ids=Signature.key)
def test_every_slice_of_a_shared_tile_has_an_epilogue_tile_and_room_for_what_others_send(signature: Signature) -> None:
    for plan in shareable(signature):
        assert plan.slices
        for slices in plan.slices:
            most = -(-plan.epilogue_tiles // slices)
            assert plan.epilogue_tiles // slices >= 1
            each = plan.epilogue_tile_accumulators * 256 * 4
            assert most * slices * each <= plan.stages * (plan.rows + plan.columns) * 128


@pytest.mark.parametrize("signature", [PLAIN, FP8, BLOCK], ids=Signature.key)
def test_workspace_holds_all_sums_and_two_counters_of_every_cta(signature: Signature) -> None:
    for plan in shareable(signature):
        assert plan.partials_bytes == plan.cluster * plan.rows * plan.columns * 4
        assert plan.counters_bytes == plan.cluster * 2 * 32


def test_tiles_of_a_last_wave_are_cut_as_often_as_clusters_are_there() -> None:
    plan = shared(PLAIN)[0]
    of = partial(estimate_persistent._slices, plan)
    assert of(40, 132, 128) == (3, 40)
    assert of(132 + 40, 132, 128) == (3, 40)
    assert of(132, 132, 128) == (1, 0)
    assert of(80, 132, 128) == (1, 80), "there is less than a cluster more for each"
    assert of(40, 132, 9) == (2, 40), "a slice has a few stages"
    assert of(1, 132, 1024) == (plan.slices[-1], 1)


@pytest.mark.parametrize("m", [100, 333, 4096])
def test_estimates_grow_with_n_and_k(m: int) -> None:
    for v in variants(PLAIN):
        times = [
            estimate_persistent.of_own(v, plain_form, dataclasses.replace(PLAIN, n=n, k=k), m)
            for n, k in ((4096, 4096), (4096, 8192), (8192, 8192))
        ]
        assert times == sorted(times)
        assert times[0] > 0


def test_estimates_grow_with_m_where_tiles_are_full() -> None:
    full = 2 * math.lcm(*{v.integer("tile_m") for v in variants(PLAIN)})  # and clusters of two
    for v in variants(PLAIN):
        once, twice = (estimate_persistent.of_own(v, plain_form, PLAIN, m) for m in (full, 2 * full))
        assert once < twice


def test_what_may_begin_early_comes_before_the_same_that_may_not() -> None:
    for v in variants(dataclasses.replace(PLAIN, overlap="launch")):
        if v.options["overlap"] == "launch":
            late = dataclasses.replace(v, config=choices(**{**v.options, "overlap": "serial"}))
            assert estimate_persistent.of_own(v, plain_form, PLAIN, 512) < estimate_persistent.of_own(
                late, plain_form, PLAIN, 512
            )


@pytest.mark.parametrize(
    ("n", "m", "best"),
    [(6144, 512, (128, 192)), (6144, 1000, (128, 192)), (4096, 512, (64, 256)), (4096, 1000, (256, 128))],
)
def test_scales_of_blocks_leave_the_lead_to_tiles_that_fill_waves(n: int, m: int, best: tuple[int, int]) -> None:
    """On an H200 these were the fastest, 64 x 256 and 128 x 128 as fast as each other."""
    signature = Signature("e4m3", "e4m3", "bf16", "f32", "none", n, 4096, scaling="block")
    alike = [v for v in variants(signature) if v.options["order"] == "rows" and v.integer("tile_n") >= 96]
    first = rank(alike, signature, m, "sm_90a").variants[0]
    assert (first.integer("tile_m"), first.integer("tile_n")) == best


def test_narrow_tiles_wait_for_the_promotion_of_sums_that_have_scales_of_blocks() -> None:
    def us(tile_n: int, promoted_columns: int) -> float:
        tiling = estimate_persistent.Tiling(256, tile_n, 1, 1, bytes_in=1, promoted_columns=promoted_columns)
        return float(estimate_persistent.estimate_us(tiling, FP8, 4096))

    assert us(128, 128) == us(128, 0)
    assert us(64, 64) > 1.03 * us(64, 0)


def test_few_tokens_leave_the_lead_to_the_kernel_for_them() -> None:
    everything = legal_variants("own", "sm_90a", PLAIN)
    assert rank(everything, PLAIN, 8, "sm_90a").variants[0].family == "sm90_small_m"
    assert rank(everything, PLAIN, 4096, "sm_90a").variants[0].family == FAMILY


def test_token_tiles_follow_the_tokens() -> None:
    """333 tokens are 336 in tiles of 112 or 168, and 384 in tiles of 64 or 128."""
    best = rank(variants(PLAIN), PLAIN, 333, "sm_90a").variants[:8]
    assert any(v.options["swap"] for v in best)


@pytest.mark.parametrize("clusters", [1, 3, 35, 36, 39, 63, 64, 65, 66])
def test_every_tile_is_taken_once_whatever_gpc_takes_it(monkeypatch: pytest.MonkeyPatch, clusters: int) -> None:
    pytest.importorskip("cutlass")
    from aot.kernels.sm90.persistent import gpc

    plain = SimpleNamespace(Int32=int, select_=lambda condition, one, other: one if condition else other)
    monkeypatch.setattr(gpc, "cutlass", plain)

    def items(count: int) -> list[list[int]]:
        """Those of each cluster, in its order."""
        found = []
        for cluster in range(clusters):
            shift = gpc.gpc_shift(cluster, clusters, count)
            found.append([gpc.shifted(i, shift) for i in range(cluster, count, clusters)])
        return found

    for count in (*range(clusters, 3 * clusters + 2), 1000):
        assert sorted(itertools.chain.from_iterable(items(count))) == list(range(count))
    if clusters >= 64:  # a GPC's: four at the beginning, and of each eight and each seven the first
        first = [mine[0] for mine in items(clusters)]
        assert first[:4] == [0, 1, 2, 3]
        assert [first[c] for c in (4, 12, 20, 28)] == [4, 5, 6, 7]
        assert [first[c] for c in (36, 43, 50, 57)] == [36, 37, 38, 39]


class _Int(int):
    """An integer as kernels have them: `to` makes an f32 of it."""

    def to(self, _: object) -> _Float:
        return _Float(self)

    def __add__(self, other: int) -> _Int:
        return _Int(int(self) + int(other))

    def __sub__(self, other: int) -> _Int:
        return _Int(int(self) - int(other))

    def __mul__(self, other: int) -> _Int:
        return _Int(int(self) * int(other))

    def __floordiv__(self, other: int) -> _Int:
        return _Int(int(self) // int(other))

    __rmul__ = __mul__


class _Float:
    """An f32."""

    def __init__(self, x: Any) -> None:
        self.x: Any = numpy.float32(x.x if isinstance(x, _Float) else x)

    def __mul__(self, other: _Float) -> _Float:
        return _Float(self.x * other.x)

    def __truediv__(self, other: _Float) -> _Float:
        return _Float(self.x / other.x)

    def to(self, _: object) -> _Int:
        return _Int(self.x)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tile scheduler's module, with numbers in place of a kernel's."""
    pytest.importorskip("cutlass")
    from aot.kernels.sm90.persistent import gpc, scheduler

    plain = SimpleNamespace(
        Int32=_Int,
        Float32=_Float,
        min=lambda a, b: _Int(min(a, b)),
        max=lambda a, b: _Int(max(a, b)),
        select_=lambda condition, one, other: one if condition else other,
    )
    for module in (gpc, scheduler):
        monkeypatch.setattr(module, "cutlass", plain)
    return scheduler


def test_quotients_are_exact(scheduler: Any) -> None:
    """By way of f32, for quotients up to 2^21, next to multiples of the divisor as well."""
    random = numpy.random.default_rng(0)
    for _ in range(3000):
        divisor = _Int(random.integers(1, 2 ** random.integers(1, 25)))
        product = divisor * int(random.integers(0, 2 ** random.integers(1, 22)))
        for x in (product + int(random.integers(0, divisor)), product, product - 1):
            if 0 <= x < 2**31 - divisor and x // divisor < 2**21:
                assert scheduler._quotient(_Int(x), divisor, scheduler._reciprocal(divisor)) == x // divisor


@pytest.mark.parametrize("batched", [False, True])
def test_every_tile_is_scheduled_once(scheduler: Any, batched: bool) -> None:
    from aot.kernels.sm90.persistent.pipeline import ClusterCta

    orders = [
        {"raster_swizzle": swizzle, "raster_along_n": along_n, "split_k": split_k}
        for swizzle, along_n, split_k in itertools.product((1, 2, 8, 10, 16), (False, True), (1, 2))
    ]
    for order, rows, columns in itertools.product(orders, (1, 2, 7, 16, 33), (1, 3, 8, 41)):
        plan = SimpleNamespace(quads=False, cluster_rows=2, cluster_columns=1, k_tile_multiple=1, **order)
        plan.swap, plan.moved_up = False, lambda *_: 0
        batches = 3 if batched else 1
        grid = scheduler.Grid(1, _Int(rows), _Int(columns), rows * columns * batches, 1, None)
        tiles = scheduler.TileScheduler.of(plan, grid, 0, ClusterCta(1, 0), 0, batched)
        found = [tiles.tile_coord(_Int(i))[:3] for i in range(grid.work)]
        wanted = itertools.product(range(1, 2 * rows, 2), range(columns), range(batches))
        assert sorted(found) == sorted(wanted)
        assert [batch for *_, batch in found] == sorted(batch for *_, batch in found)


def machine_code(variant: Variant, directory: Path) -> list[str]:
    """The instructions of a variant's kernel, and its labels."""
    pytest.importorskip("cutlass")
    program = next(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"), None)
    if program is None:
        pytest.skip("nvdisasm is not installed")
    from aot.compile.lower import lower

    (directory / "kernel.cubin").write_bytes(lower(variant).cubin)
    command = [str(program), "-c", str(directory / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(?:\s*/\*[0-9a-f]{4,}\*/\s*(.*)|(\.L_\w+:))$", said, re.MULTILINE)
    return [(instruction or label).strip() for instruction, label in found]


def test_the_other_warp_group_is_let_through_right_behind_the_last_products(tmp_path: Path) -> None:
    """The compiler may put the barrier after whatever else there is to compute, and the tensor cores wait for it."""
    options = {"tile_m": 128, "tile_n": 128, "cluster_m": 1, "cluster_n": 2, "schedule": "pingpong", "order": "rows"}
    options |= {"split_k": 1, "stream_k": False, "swap": False}
    (variant,) = [v for v in variants(PLAIN) if options.items() <= v.options.items()]
    code = machine_code(variant, tmp_path)
    (last,) = [i for i, line in enumerate(code) if "HGMMA" in line and "gsb0" in line]
    arrival = next(i for i, line in enumerate(code) if i > last and "BAR.ARV" in line)
    between = code[last + 1 : arrival]
    assert len(between) < 8, between
    assert not any(word in line for line in between for word in ("MUFU", "F2I", "DEPBAR", "BRA"))


@pytest.mark.parametrize(("tile", "most"), [((256, 128), 230), ((128, 192), 175), ((128, 128), 130), ((128, 96), 120)])
def test_a_stage_takes_little_beside_its_products_and_their_promotion(
    tmp_path: Path, tile: tuple[int, int], most: int
) -> None:
    """4 products of 32 of K for each atom of 64 rows: the next products wait for all that is between."""
    rows, columns = tile
    atoms = rows // 128
    signature = dataclasses.replace(BLOCK, epilogue="none")
    options = {"tile_m": rows, "tile_n": columns, "cluster_m": 2, "cluster_n": 1, "schedule": "cooperative"}
    options |= {"order": "rows", "split_k": 1, "overlap": "serial", "swap": False}
    (variant,) = [v for v in variants(signature) if options.items() <= v.options.items()]
    code = machine_code(variant, tmp_path)
    labels = {line[:-1]: i for i, line in enumerate(code) if line.endswith(":")}
    branches = [(labels[name], i) for i, line in enumerate(code) for name in re.findall(r"BRA `\((\.L_\w+)\)", line)]
    loops = [code[begin:end] for begin, end in branches if begin < end]
    loop = min((loop for loop in loops if any("QGMMA" in line for line in loop)), key=len)
    assert sum("QGMMA" in line for line in loop) == 4 * atoms
    assert sum("FFMA" in line for line in loop) == atoms * columns // 2
    assert sum("DEPBAR" in line for line in loop) == atoms, "products wait for each other"
    behind = next(i for i, line in enumerate(reversed(loop)) if "FFMA" in line)
    assert behind + next(i for i, line in enumerate(loop) if "QGMMA" in line) <= 22
    assert not any("LDG" in line for line in loop)
    assert len(loop) <= most
