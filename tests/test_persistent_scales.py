"""Scales of e4m3 in the persistent GEMM: when sums are promoted, and which scale each is multiplied by."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from aot.kernels.sm90.persistent import choices as persistent_choices
from aot.kernels.sm90.persistent.plan import Plan
from aot.kernels.sm90.persistent.scale_blocks import ScaleBlocks
from aot.search.legal import unsuited
from runtime.gemm.signature import Signature

from .persistent_variants import BLOCK, FP8, PLAIN, SIGNATURES, form, legal_plans, variants


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
    options |= {"split_k": 1, "stream_k": False, "nonpersistent": False, "overlap": "serial"}

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
