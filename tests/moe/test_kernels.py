"""What the kernels around grouped GEMMs do to memory, thread by thread on the CPU; see `tests.emulated`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..command_line import ROOT
from ..emulated import CUTLASS, Tensor, module, run

PERMUTE = module(ROOT / "aot/kernels/moe_permute.py")
COMBINE = module(ROOT / "aot/kernels/moe_combine.py")
UNTOUCHED = -7777
K = 16


def permuted(
    ids: Any, experts: int, schedule: str, threads: int = 64, expert_map: Any = None, weights: Any = None
) -> Any:
    """x, rows, ends and positions as the kernels leave them, behind and before each of which is what was there."""
    tokens, top_k = ids.shape
    kind = np.int64 if weights is None else np.float32
    x = np.arange(1, tokens * K + 1, dtype=kind).reshape(tokens, K)
    rows = np.full((tokens * top_k, K), UNTOUCHED, kind)
    ends, positions = np.full(experts, UNTOUCHED, np.int64), np.full((tokens, top_k), UNTOUCHED, np.int64)
    kernels = PERMUTE["MoePermute"](schedule, threads, mapped=expert_map is not None)
    given = [Tensor.of(np.ascontiguousarray(ids)), None if expert_map is None else Tensor.of(expert_map)]
    written = Tensor.of(rows), Tensor.of(ends), Tensor.of(positions)
    of_x = Tensor.of(x), None if weights is None else Tensor.of(weights)
    if weights is not None:
        of_x[0].iterator.memory = of_numbers(of_x[0].iterator.memory)
    if schedule == "one_launch":
        run(kernels.rank_and_copy, (tokens + 1, 1), threads, of_x, *given, (written[0], None), *written[1:])
    else:
        run(kernels.rank, (1, 1), PERMUTE["_RANKING_THREADS"], *given, *written[1:])
        run(kernels.copy, (tokens, 1), threads, of_x, (written[0], None), written[2])
    return x, rows, ends, positions


def expected(x: Any, ids: Any, experts: int, expert_map: Any) -> Any:
    tokens, top_k = ids.shape
    rows = np.full((tokens * top_k, K), UNTOUCHED, x.dtype)
    positions, local = np.full((tokens, top_k), -1, np.int64), ids.copy()
    if expert_map is not None:
        there = (ids >= 0) & (ids < len(expert_map))
        local = np.where(there, expert_map[np.where(there, ids, 0)], -1)
    ends, row = [], 0
    for expert in range(experts):
        for token, slot in np.argwhere(local == expert):
            rows[row], positions[token, slot] = x[token], row
            row += 1
        ends.append(row)
    return rows, ends, positions


def check(ids: Any, experts: int, schedule: str, threads: int = 64, expert_map: Any = None) -> None:
    x, *found = permuted(ids, experts, schedule, threads, expert_map)
    for have, want in zip(found, expected(x, ids, experts, expert_map), strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.fixture(autouse=True)
def _few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 1024 threads of Python's would take long; and few ids are staged, so that several times are."""
    monkeypatch.setitem(PERMUTE, "_RANKING_THREADS", 96)
    monkeypatch.setitem(PERMUTE, "_STAGED", 64)


SCHEDULES = pytest.mark.parametrize("schedule", ["one_launch", "two_launches"])


@SCHEDULES
@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (3, 5), (9, 8), pytest.param((33, 4), marks=pytest.mark.long)])
@pytest.mark.parametrize("experts", [1, 7, 40, 130])
def test_rows_follow_experts_then_tokens_then_slots(schedule: str, shape: tuple[int, int], experts: int) -> None:
    check(np.random.default_rng(experts).integers(0, experts, shape), experts, schedule)


@SCHEDULES
def test_one_expert_may_take_all_and_another_none(schedule: str) -> None:
    check(np.full((20, 4), 3), 6, schedule)
    check(np.full((5, 2), 0), 1, schedule)
    check(np.full((5, 2), 511), 512, schedule)


@SCHEDULES
def test_ids_that_are_no_experts_get_no_row_and_write_nothing(schedule: str) -> None:
    ids = np.random.default_rng(1).integers(-3, 9, (17, 5))
    ids[0, 0], ids[1, 1], ids[2, 2] = -(1 << 31), (1 << 31) - 1, 1 << 30
    check(ids, 6, schedule)
    check(np.full((4, 3), -1), 6, schedule)


@SCHEDULES
def test_an_expert_map_says_which_experts_are_here(schedule: str) -> None:
    random = np.random.default_rng(2)
    expert_map = np.full(24, -1, np.int64)
    expert_map[random.permutation(24)[:8]] = random.permutation(8)
    expert_map[3] = 99  # hostile: there is no such expert here
    check(random.integers(-2, 27, (19, 6)), 8, schedule, expert_map=expert_map)


@SCHEDULES
@pytest.mark.parametrize("mapped", [False, True])
def test_each_row_is_its_token_times_the_weight_of_the_assignment(schedule: str, mapped: bool) -> None:
    random = np.random.default_rng(3)
    ids, weights = random.integers(-1, 6, (7, 3)), random.standard_normal((7, 3)).astype(np.float32)
    expert_map = np.arange(6)[::-1].copy() if mapped else None
    x, *found = permuted(ids, 6, schedule, expert_map=expert_map, weights=weights)
    rows, ends, positions = expected(x, ids, 6, expert_map)
    for token, slot in np.argwhere(positions >= 0):
        rows[positions[token, slot]] = x[token] * weights[token, slot]
    for have, want in zip(found, (rows, ends, positions), strict=True):
        np.testing.assert_array_equal(have, want)


def combined(rows: Any, positions: Any, weights: Any, threads: int, at_once: int) -> Any:
    tokens, n = len(positions), rows.shape[1]
    y = np.full((tokens, n), UNTOUCHED, np.float32)
    kernel = COMBINE["MoeCombine"](threads, at_once)
    of_rows, places, of_y = (Tensor.of(np.ascontiguousarray(t)) for t in (rows, positions, y))
    of_rows.iterator.memory = of_numbers(of_rows.iterator.memory)
    of = of_rows, places, None if weights is None else Tensor.of(np.ascontiguousarray(weights)), of_y
    run(kernel.kernel, (tokens, -(-n // (8 * threads))), threads, *of)
    return y


def of_numbers(values: Any) -> Any:
    found = np.empty(values.shape, object)
    found[:] = [CUTLASS.Float32(value) for value in values]
    return found


@pytest.mark.parametrize("at_once", [2, 4, 8])
@pytest.mark.parametrize(("top_k", "n"), [(1, 8), (3, 264), (8, 48), (11, 520)])
def test_rows_are_added_by_their_weights_in_the_order_of_slots(at_once: int, top_k: int, n: int) -> None:
    random, tokens = np.random.default_rng(top_k), 3
    rows = random.standard_normal((tokens * top_k, n)).astype(np.float32)
    positions = random.permutation(tokens * top_k).reshape(tokens, top_k)
    weights = random.random((tokens, top_k)).astype(np.float32)
    found = combined(rows, positions, weights, 32, at_once)
    np.testing.assert_array_equal(found, _sums(rows, positions, weights))


def test_rows_without_weights_are_added_alone() -> None:
    random = np.random.default_rng(0)
    rows, positions = random.standard_normal((9, 48)).astype(np.float32), random.permutation(9).reshape(3, 3)
    found = combined(rows, positions, None, 32, 2)
    np.testing.assert_array_equal(found, _sums(rows, positions, np.ones((3, 3), np.float32)))


def test_positions_that_are_no_rows_add_nothing_not_even_nan() -> None:
    rows = np.ones((12, 16), np.float32)
    rows[0] = np.nan  # what is loaded in the place of none
    positions = np.array([[-1, 3, 12, 5], [-1, -1, -1, -1], [11, 1 << 30, -(1 << 31), 1]])
    found = combined(rows, positions, np.full((3, 4), 2, np.float32), 32, 8)
    np.testing.assert_array_equal(found, np.repeat([[4], [0], [4]], 16, 1))


def _sums(rows: Any, positions: Any, weights: Any) -> Any:
    y = np.zeros((len(positions), rows.shape[1]), np.float32)
    for token, of_token in enumerate(positions):
        for slot, place in enumerate(of_token):
            y[token] += rows[place] * weights[token, slot]
    return y
