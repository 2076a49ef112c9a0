"""Which tiles the scheduler of grouped GEMMs gives: each row of each group is made, and no other group's is stored."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="the DSL is not installed")

from aot.compile.lower import Lowered
from aot.kernels import groups as of_groups  # needs the DSL
from aot.kernels.group_sizes import GROUPS_BYTES, MOST_GROUPS
from aot.kernels.sm90.grouped import scheduler  # needs the DSL
from aot.kernels.sm90.grouped.choices import limit, rule  # needs the DSL
from aot.kernels.sm90.grouped.plan import plan_of
from aot.kernels.sm90.persistent.form import Form
from aot.kernels.sm90.persistent.pipeline import ClusterCta
from aot.kernels.sm90.persistent.scheduler import KTiles

from ..parts_of_kernels import TOKENS, UNTOUCHED
from ..ptx.compiled import functions_once, run

FORM = Form("bf16", "bf16", scheduler_bytes=GROUPS_BYTES)
MASKED = replace(FORM, masked=True)
UNSWAPPED = {"swap": False, "tile_n": 128}
# The compiler's arithmetic, on numbers that are there.
NUMBERS = SimpleNamespace(Int32=int, min=min, max=max, select_=lambda which, one, other: one if which else other)
ADDED_UP = ("contiguous", "masked", "contiguous_pairs", "masked_pairs")
SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=40)


def tiles(plan: Any, sizes: list[int], across: int) -> list[tuple[int, int, range, range]]:
    """(group, number along N, rows of the tile, those that are stored) of every tile, of all CTAs of a cluster; of
    masked rows their numbers in their group."""
    rows, begins = [0], [0]
    for size in sizes:
        rows.append(size if plan.form.masked else rows[-1] + size)
        begins.append(begins[-1] + -(-size // plan.tokens) * across)
    grid = scheduler.GroupedGrid(len(sizes), across, begins[-1])
    found = []
    for rank in range(plan.cluster):
        cta = ClusterCta(rank % plan.cluster_rows, rank // plan.cluster_rows)
        of_cta = scheduler.GroupedScheduler(plan, grid, cta, KTiles(0, 1), of_groups.Groups(rows, begins))
        for index in range(begins[-1]):
            coord = of_cta.tile_coord(index)
            along_n, along_m = (coord.row, coord.column) if plan.swap else (coord.column, coord.row)
            first = along_m * plan.tokens - coord.moved_up
            made = range(first, first + plan.tokens)
            found.append((coord.batch, along_n, made, range(first, min(made.stop, coord.end))))
    return found


@pytest.mark.parametrize(
    ("tile_m", "swap", "cluster_n"), [(8, True, 1), (16, True, 2), (64, False, 1), (128, False, 2)]
)
@pytest.mark.parametrize("form", [FORM, MASKED], ids=["contiguous", "masked"])
@given(SIZES, st.integers(1, 3))
def test_every_row_of_every_group_is_stored_by_its_group_alone(
    form: Form, tile_m: int, swap: bool, cluster_n: int, sizes: list[int], across: int
) -> None:
    options = {"schedule": "cooperative", "swap": swap, "tile_m": tile_m, "tile_n": 128, "cluster_n": cluster_n}
    options["overlap"] = "serial"
    assert rule(options, form) is None
    plan = plan_of(options, form)
    with pytest.MonkeyPatch.context() as patched:
        for module_of in (scheduler, of_groups):
            patched.setattr(module_of, "cutlass", NUMBERS)
        found = tiles(plan, sizes, across)
    begin = 0
    wanted, stored = set(), []
    for group, size in enumerate(sizes):
        wanted |= {(group, n, row) for n in range(across * cluster_n) for row in range(begin, begin + size)}
        begin = 0 if form.masked else begin + size
    for group, along_n, made, kept in found:
        stored += [(group, along_n, row) for row in kept]
        assert made.start >= 0
        # TMA stores a tile as a whole where its group has as many rows.
        assert len(kept) == min(plan.tokens, sizes[group])
    assert set(stored) == wanted
    assert len(found) == sum(-(-size // plan.tokens) for size in sizes) * across * cluster_n


@pytest.mark.parametrize("form", [FORM, MASKED], ids=["contiguous", "masked"])
@given(SIZES, st.integers(1, 5))
def test_a_pair_of_tiles_has_the_same_rows_of_b_or_each_its_own(form: Form, sizes: list[int], across: int) -> None:
    options = {"schedule": "cooperative", "swap": False, "tile_m": 128, "tile_n": 128, "cluster_n": 1, "share_b": True}
    options["overlap"] = "serial"
    assert rule(options, form) is None
    plan = plan_of(options, form)
    assert (plan.pairs_tiles, plan.cluster) == (True, 2)
    rows, pairs, ends = [0], [0], list(itertools.accumulate(sizes))
    for size, end in zip(sizes, ends, strict=True):
        rows.append(size if form.masked else end)
        tall = -(-size // 128)
        pairs.append(pairs[-1] + tall // 2 * across + tall % 2 * -(-across // 2))
    grid, groups = scheduler.GroupedGrid(len(sizes), across, pairs[-1]), of_groups.Groups(rows, pairs)
    ctas = ClusterCta(0, 0), ClusterCta(1, 0)
    both = [scheduler.GroupedScheduler(plan, grid, cta, KTiles(0, 1), groups).tile_coord for cta in ctas]
    made: list[tuple[int, int, int]] = []
    with pytest.MonkeyPatch.context() as patched:
        for module_of in (scheduler, of_groups):
            patched.setattr(module_of, "cutlass", NUMBERS)
        for index in range(pairs[-1]):
            one, other = (of_rank(index) for of_rank in both)
            assert one.batch == other.batch
            assert one.alone == other.alone == (one.begin == other.begin)
            assert other.column == one.column + (1 if one.alone else 0)
            assert one.alone or other.begin == one.begin + 128
            made += [(c.batch, c.column, c.begin) for c in (one, other) if c.column < across]
    begins = [0] * len(sizes) if form.masked else [0, *ends[:-1]]
    wanted = [
        (group, n, begin + first)
        for group, (size, begin) in enumerate(zip(sizes, begins, strict=True))
        for n in range(across)
        for first in range(0, size, 128)
    ]
    assert sorted(made) == wanted


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Mapping[str, Lowered]:
    """A warp that adds up groups, of rows one after the other and of masked ones, and their tiles or pairs of these."""
    names = {rows: f"tests/parts_of_kernels.py:add_up.{rows}" for rows in ADDED_UP}
    found = functions_once(request, "add-up", names.values())
    return {rows: found[name] for rows, name in names.items()}


def added_up(kernel: Lowered, ends: list[int], m: int, across: int) -> tuple[list[int], list[int]]:
    """What a warp finds of where each group's rows and tiles end."""
    rows, tiles = (torch.zeros(MOST_GROUPS + 1, dtype=torch.int32) for _ in range(2))
    run(kernel, [torch.tensor(ends, dtype=torch.int32), m, across, rows, tiles], [rows, tiles])
    assert set(rows[len(ends) + 1 :].tolist()) | set(tiles[len(ends) + 1 :].tolist()) <= {UNTOUCHED}
    assert rows[0] == tiles[0] == 0
    return rows[1 : len(ends) + 1].tolist(), tiles[1 : len(ends) + 1].tolist()


@pytest.mark.parametrize("rows", ADDED_UP)
@pytest.mark.parametrize("count", [1, 3, 31, 128, 129, 300])
@pytest.mark.parametrize("hostile", [False, True])
def test_a_warp_adds_up_rows_and_tiles_of_whatever_groups(
    kernels: Mapping[str, Lowered], rows: str, count: int, hostile: bool
) -> None:
    masked = rows.startswith("masked")
    draw = random.Random(f"{masked} {count} {hostile}")
    sizes = [draw.choice((0, 1, 7, 8, 40)) for _ in range(count)]
    m, across = (40 if masked else sum(sizes)), 3
    given = sizes if masked else list(itertools.accumulate(sizes))
    if hostile:
        given = [draw.choice((end, -5, m + 9, 1 << 30, draw.randint(0, m))) for end in given]
    wanted = [min(max(end, 0), m) for end in given]
    if not masked:
        wanted = list(itertools.accumulate(wanted, max))
    begins = [0] * count if masked else [0, *wanted[:-1]]
    sizes = [end - begin for begin, end in zip(begins, wanted, strict=True)]
    tall = [-(-size // TOKENS) for size in sizes]
    each = [n // 2 * across + n % 2 * -(-across // 2) if rows.endswith("pairs") else n * across for n in tall]
    tiles = list(itertools.accumulate(each))
    assert added_up(kernels[rows], given, m, across) == (wanted, tiles)


def test_more_groups_than_there_is_room_for_are_refused() -> None:
    assert limit(UNSWAPPED, FORM, MOST_GROUPS, 256) is None
    assert limit(UNSWAPPED, FORM, MOST_GROUPS + 1, 256) == f"the scheduler has room for {MOST_GROUPS} groups"


def test_swapped_gates_are_whole_atoms_of_one_warp_group() -> None:
    gated = replace(FORM, epilogue="swiglu")
    tile = {"swap": True, "tile_m": 8, "cluster_n": 1, "overlap": "serial"}
    taken = {
        (schedule, tile_n): rule({**tile, "schedule": schedule, "tile_n": tile_n}, gated) is None
        for schedule in ("cooperative", "pingpong")
        for tile_n in (64, 128, 192, 256)
    }
    assert {choice for choice, legal in taken.items() if legal} == {
        ("cooperative", 192),  # ragged: two atoms for 96 gates
        ("cooperative", 256),
        ("pingpong", 64),  # ragged too
        ("pingpong", 128),
        ("pingpong", 192),
        ("pingpong", 256),
    }
    whole = {"swap": True, "tile_n": 256}
    assert limit(whole, gated, 8, 256) is None
    assert limit(whole, gated, 8, 192) == "gates and what they gate are loaded 64 rows at a time"
    assert limit(whole | {"tile_n": 192}, gated, 8, 144) is None
    assert limit(UNSWAPPED, gated, 8, 192) is None
