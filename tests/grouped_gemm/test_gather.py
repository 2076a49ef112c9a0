"""Which bytes the gathering warps copy to where, as their own code says it on numbers: rows that indices name, into the
places that WGMMA reads them from, and nothing outside A. And that a pipeline with their lag goes on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="the DSL is not installed")

import cutlass  # needs the DSL
from cutlass import cute

from aot.kernels.group_sizes import GROUPS_BYTES
from aot.kernels.sm90.grouped.choices import OPTIONS_OF_GATHERED, rule
from aot.kernels.sm90.grouped.plan import plan_of
from aot.kernels.sm90.persistent import gather
from aot.kernels.sm90.persistent.form import Form
from aot.kernels.sm90.persistent.operands import stage_layout
from aot.kernels.sm90.persistent.plan import Plan
from aot.kernels.sm90.persistent.scheduler import TileCoord

FORM = Form("bf16", "bf16", scheduler_bytes=GROUPS_BYTES, gathered=True)
TILES = [(8, True), (16, True), (32, True), (64, True), (64, False), (128, False), (192, False), (256, False)]
A_AT, STAGES_AT = 1 << 40, 1 << 14  # made-up addresses of A and of its stages
STAGE_BYTES_OF_ROW = 128
ELEMENT_BYTES = 2
# The compiler's arithmetic, on numbers that are there; and A as a kernel sees it.
NUMBERS = SimpleNamespace(
    Int32=int, Int64=int, min=min, max=max, select_=lambda which, one, other: one if which else other
)
LANES = SimpleNamespace(shuffle_sync=lambda of_lanes, lane: of_lanes[lane])
A_LIKE = SimpleNamespace(size=lambda tensor, mode: tensor.shape[mode[0]], arch=LANES)


def plan_with(tile_m: int, swap: bool, schedule: str = "cooperative") -> Plan:
    options = {"schedule": schedule, "swap": swap, "tile_m": tile_m, "tile_n": 128, "overlap": "serial"}
    assert rule(options, FORM) is None
    return plan_of(options, FORM)


def a_of(rows: int, k: int, stride: int) -> Any:
    pointer, element = SimpleNamespace(toint=lambda: A_AT), SimpleNamespace(width=8 * ELEMENT_BYTES)
    return SimpleNamespace(shape=(rows, k), stride=(stride, 1), iterator=pointer, element_type=element)


def copies(plan: Plan, a: Any, indices: list[int], tile: range, k_tile: int, stage: int) -> list[tuple[int, int, int]]:
    """(source, target, size) of everything that all gathering warps copy for one stage of a tile of rows."""
    found: list[tuple[int, int, int]] = []
    coord = TileCoord(0, 0, 0, -tile.start, tile.stop)
    shared = SimpleNamespace(iterator=SimpleNamespace(toint=lambda: STAGES_AT))
    operand = gather.GatheredOperand(a, indices, shared)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gather, "cutlass", NUMBERS)
        patched.setattr(gather, "cute", A_LIKE)
        patched.setattr(gather, "_copy", lambda *copy: found.append(copy))
        for warp in range(plan.gather_warps):
            held = [gather._addresses(plan, operand, coord, warp, lane) for lane in range(32)]
            registers = list(zip(*held, strict=True))  # each as all lanes have it
            for lane in range(32):
                gather._load_stage(plan, operand, registers, gather._thread(warp, lane), k_tile, stage)
    return found


def layout_of(plan: Plan) -> Any:
    """Where the layout that WGMMA and TMA have of stages puts an element, in bytes: of (row, column, stage)."""
    seen = []

    @cute.jit
    def trace() -> None:
        layout = stage_layout(plan, cutlass.BFloat16, plan.tokens)
        seen.append((str(layout.inner), layout.outer.shape, layout.outer.stride))

    trace()
    ((swizzle, shape, stride),) = seen
    assert swizzle == "S<3,4,3>", "bits 4 to 6 of an address in bytes are combined with bits 7 to 9"

    def place(*coordinate: int) -> int:
        at = 0
        for x, extents, steps in zip(coordinate, shape, stride, strict=True):
            for extent, step in zip(extents, steps, strict=True):
                at += x % extent * step
                x //= extent
        at *= ELEMENT_BYTES
        return at ^ (at >> 3 & 0b111 << 4)

    return place


@pytest.mark.parametrize(("tile_m", "swap"), TILES)
def test_each_16_bytes_of_a_tile_go_once_to_where_wgmma_reads_them(tile_m: int, swap: bool) -> None:
    plan = plan_with(tile_m, swap)
    place, a = layout_of(plan), a_of(1000, 256, 264)
    indices = [(37 * i) % 1000 for i in range(600)]
    for stage in (0, plan.stages - 1):
        found = copies(plan, a, indices, range(300, 300 + tile_m), 2, stage)
        wanted = [
            (A_AT + (indices[300 + row] * 264 + 128 + column) * 2, STAGES_AT + place(row, column, stage), 16)
            for row in range(tile_m)
            for column in range(0, 64, 8)
        ]
        assert Counter(found) == Counter(wanted)


@pytest.mark.parametrize(("tile_m", "swap"), TILES)
@given(
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=40),
    st.integers(1, 300),
    st.integers(1, 40),
    st.data(),
)
def test_nothing_outside_a_is_read_whatever_indices_are(
    tile_m: int, swap: bool, indices: list[int], rows: int, pieces: int, data: st.DataObject
) -> None:
    plan, k = plan_with(tile_m, swap), 8 * pieces
    first = data.draw(st.integers(0, len(indices) - 1))
    end = data.draw(st.integers(first + 1, len(indices)))
    a, last_tile = a_of(rows, k, k + 8), -(-k // 64) - 1
    for k_tile in range(last_tile + 1):
        for source, _, size in copies(plan, a, indices, range(first, end), k_tile, 0):
            row, column = divmod((source - A_AT) // ELEMENT_BYTES, k + 8)
            assert 0 <= row < rows
            assert column <= k - 8
            assert size == 16 or k_tile == last_tile
        # Each row of the tile has its columns of K, and zeros behind.
        sizes = Counter(size for _, _, size in copies(plan, a, indices, range(first, end), k_tile, 0))
        assert sizes[16] == min(8, pieces - 8 * k_tile) * tile_m
        assert sizes.total() == 8 * tile_m


def test_rows_behind_a_groups_end_are_its_last_one() -> None:
    plan = plan_with(64, False)
    a, indices = a_of(100, 64, 64), list(range(100))
    rows = {(source - A_AT) // 128 for source, *_ in copies(plan, a, indices, range(10, 13), 0, 0)}
    assert rows == {10, 11, 12}, "those of the next group are not read"


def _goes_on(stages: int, lag: int, count: int = 100) -> bool:
    """Whether all of `count` loads are consumed, where a stage is handed over `lag` loads later, and released when the
    next one is being multiplied."""
    loaded = multiplied = 0
    while multiplied < count:
        handed_over = count if loaded == count else max(0, loaded - lag)
        released = multiplied if multiplied == count else max(0, multiplied - 1)
        before = loaded, multiplied
        if loaded < count and loaded < released + stages:
            loaded += 1
        elif multiplied < handed_over:
            multiplied += 1
        if (loaded, multiplied) == before:
            return False
    return True


def test_no_pipeline_waits_for_stages_that_are_handed_over_later() -> None:
    assert not _goes_on(5, 4)
    assert _goes_on(5, 3)
    lags = {}
    for tile_m, swap in TILES:
        for schedule in OPTIONS_OF_GATHERED["schedule"]:
            plan = plan_with(tile_m, swap, str(schedule)) if (tile_m, schedule) != (256, "pingpong") else None
            if plan is not None:
                lags[plan.stages] = plan.gather_lag
                assert _goes_on(plan.stages, plan.gather_lag)
    assert min(lags) <= 5
    assert max(lags) >= 10


def test_the_full_barrier_counts_gathering_warps_and_bytes_of_b_alone() -> None:
    for swap in (False, True):
        plan = plan_with(64, swap)
        contiguous = replace(plan, form=replace(FORM, gathered=False))
        assert (contiguous.full_arrivals, contiguous.stage_bytes) == (1, (64 + 128) * STAGE_BYTES_OF_ROW)
        assert (plan.full_arrivals, plan.stage_bytes) == (1 + 2, 128 * STAGE_BYTES_OF_ROW)
