"""What the kernels around grouped GEMMs do to memory, on the emulated GPU (`tests.ptx`)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from aot.compile.lower import Lowered

from ..ptx.compiled import functions_once, run

K = 16
SCHEDULES = pytest.mark.parametrize("schedule", ["one_launch", "two_launches"])
AT_ONCE = 2, 4, 8


def permute(schedule: str, mapped: bool = False, weighted: bool = False) -> str:
    elements = (
        "bf16",
        "i32",
        *(["i32"] if mapped else []),
        *(["f32"] if weighted else []),
        "bf16",
        "i32",
        "i32",
        "f32",
    )
    return f"own.moe_permute.{'_'.join(elements)}.{schedule}.threads128.sm_90a"


def combine(at_once: int, weighted: bool = True) -> str:
    elements = "bf16_i32_f32_bf16_f32" if weighted else "bf16_i32_bf16_f32"
    return f"own.moe_combine.{elements}.at_once{at_once}.threads128.sm_90a"


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Mapping[str, Lowered]:
    """Kernels that stage few ids, so that they do several times, and rank with a block that is no power of two."""
    names = [
        permute(schedule, mapped, weighted)
        for schedule in ("one_launch", "two_launches")
        for mapped in (False, True)
        for weighted in (False, True)
    ]
    names += [*map(combine, AT_ONCE), combine(2, weighted=False)]
    constants = {"aot.kernels.moe_permute:_STAGED": 64, "aot.kernels.moe_permute:_RANKING_THREADS": 96}
    return functions_once(request, "moe", names, constants=constants)


def check(
    kernels: Mapping[str, Lowered],
    ids: Tensor,
    experts: int,
    schedule: str,
    expert_map: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """All that a launch writes is right, and what it must not write is what it was."""
    (tokens, top_k), random = ids.shape, torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (tokens, K), generator=random).bfloat16()
    local = ids.clone().long()
    if expert_map is not None:
        there = (local >= 0) & (local < len(expert_map))
        local = torch.where(there, expert_map.long()[local.clamp(0, len(expert_map) - 1)], -1)
    rows = torch.full((tokens * top_k, K), -7777.0).bfloat16()
    wanted, ends, positions, row = rows.clone(), [], torch.full(ids.shape, -1, dtype=torch.int32), 0
    for expert in range(experts):
        for token, slot in (local == expert).nonzero().tolist():
            factor = 1.0 if weights is None else weights[token, slot]
            wanted[row], positions[token, slot], row = (x[token].float() * factor).bfloat16(), row, row + 1
        ends.append(row)
    found = [rows, torch.full((experts,), -7777, dtype=torch.int32), torch.full_like(positions, -7777)]
    kernel = kernels[permute(schedule, expert_map is not None, weights is not None)]
    run(kernel, [x, ids.int(), expert_map, weights, *found], found)
    for have, want in zip(found, (wanted, torch.tensor(ends), positions), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=0, check_dtype=False)


def drawn(seed: int, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@SCHEDULES
@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (3, 5), (9, 8), pytest.param((33, 4), marks=pytest.mark.long)])
@pytest.mark.parametrize("experts", [1, 7, 40, 130])
def test_rows_follow_experts_then_tokens_then_slots(
    kernels: Mapping[str, Lowered], schedule: str, shape: tuple[int, int], experts: int
) -> None:
    check(kernels, drawn(experts, 0, experts, shape), experts, schedule)


@SCHEDULES
@pytest.mark.parametrize(("shape", "expert", "experts"), [((20, 4), 3, 6), ((5, 2), 0, 1), ((5, 2), 511, 512)])
def test_one_expert_may_take_all_and_others_none(
    kernels: Mapping[str, Lowered], schedule: str, shape: tuple[int, int], expert: int, experts: int
) -> None:
    check(kernels, torch.full(shape, expert), experts, schedule)


@SCHEDULES
def test_ids_that_are_no_experts_get_no_row_and_write_nothing(kernels: Mapping[str, Lowered], schedule: str) -> None:
    ids = drawn(1, -3, 9, (17, 5))
    ids[0, 0], ids[1, 1], ids[2, 2] = -(1 << 31), (1 << 31) - 1, 1 << 30
    check(kernels, ids, 6, schedule)
    check(kernels, torch.full((4, 3), -1), 6, schedule)


@SCHEDULES
def test_an_expert_map_says_which_experts_are_here(kernels: Mapping[str, Lowered], schedule: str) -> None:
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2))
    expert_map = torch.full((24,), -1, dtype=torch.int32)
    expert_map[order[:8]] = torch.arange(8, dtype=torch.int32)
    expert_map[order[9]] = 99  # hostile: there is no such expert here
    check(kernels, drawn(2, -2, 27, (19, 6)), 8, schedule, expert_map)


@SCHEDULES
@pytest.mark.parametrize("mapped", [False, True])
def test_each_row_is_its_token_times_the_weight_of_the_assignment(
    kernels: Mapping[str, Lowered], schedule: str, mapped: bool
) -> None:
    weights = torch.randn((7, 3), generator=torch.Generator().manual_seed(3))
    expert_map = torch.arange(6, dtype=torch.int32).flip(0).contiguous() if mapped else None
    check(kernels, drawn(3, -1, 6, (7, 3)), 6, schedule, expert_map, weights)


def combined(kernel: Lowered, rows: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    y = torch.full((len(positions), rows.shape[1]), float("nan")).bfloat16()
    run(kernel, [rows, positions.int(), weights, y], [y])
    return y


def sums(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """Slot by slot, in f32."""
    y = torch.zeros((len(positions), rows.shape[1]))
    for token, of_token in enumerate(positions.tolist()):
        for slot, place in enumerate(of_token):
            y[token] += rows[place].float() * weights[token, slot]
    return y.bfloat16()


@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize(("top_k", "n"), [(1, 8), (3, 264), (8, 48), (11, 1032)])
def test_rows_are_added_by_their_weights_in_the_order_of_slots(
    kernels: Mapping[str, Lowered], at_once: int, top_k: int, n: int
) -> None:
    """Products are exact, and sums only in their order: small numbers are lost beside large ones that cancel."""
    random, tokens = torch.Generator().manual_seed(top_k), 3
    numbers = torch.tensor([1.0, -3.0, 5.0, 2.0**26, -(2.0**26)])
    rows = numbers[torch.randint(5, (tokens * top_k, n), generator=random)].bfloat16()
    positions = torch.randperm(tokens * top_k, generator=random).view(tokens, top_k)
    weights = 2.0 ** torch.randint(-1, 2, (tokens, top_k), generator=random)
    wanted = sums(rows, positions, weights)
    assert torch.equal(combined(kernels[combine(at_once)], rows, positions, weights), wanted)
    if top_k > 3:
        assert not torch.equal(sums(rows, positions.flip(1), weights.flip(1)), wanted)


def test_rows_without_weights_are_added_alone(kernels: Mapping[str, Lowered]) -> None:
    random = torch.Generator().manual_seed(0)
    rows, positions = torch.randn((9, 48), generator=random).bfloat16(), torch.randperm(9, generator=random).view(3, 3)
    found = combined(kernels[combine(2, weighted=False)], rows, positions, None)
    assert torch.equal(found, sums(rows, positions, torch.ones(3, 3)))


def test_positions_that_are_no_rows_add_nothing_not_even_nan(kernels: Mapping[str, Lowered]) -> None:
    rows = torch.ones(12, 16).bfloat16()
    rows[0] = float("nan")  # what is loaded in the place of none
    positions = torch.tensor([[-1, 3, 12, 5], [-1, -1, -1, -1], [11, 1 << 30, -(1 << 31), 1]])
    found = combined(kernels[combine(8)], rows, positions, torch.full((3, 4), 2.0))
    assert torch.equal(found, torch.tensor([4.0, 0.0, 4.0]).bfloat16()[:, None].expand(3, 16))
