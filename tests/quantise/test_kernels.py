"""What the kernels that quantise rows do to memory, on the emulated GPU (`tests.ptx`)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from aot.compile.lower import Lowered
from aot.tune.elements import poisoned

from ..ptx.compiled import functions_once, run

TILES = "tests/parts_of_kernels.py:quantised_tiles"
SCALINGS = pytest.mark.parametrize("scaling", ["block", "row_column"])
# By whether there is a map of experts, and weights: how many elements a row has.
PERMUTED = {(False, False): (400, 1040), (True, True): (48, 400)}


def quantise(scaling: str, grouped: bool = False) -> str:
    elements = "bf16_i32_e4m3_f32_f32" if grouped else "bf16_e4m3_f32_f32"
    return f"own.quantise.{elements}.{scaling}_scaled.threads128.sm_90a"


def gated(scaling: str, threads: int = 128) -> str:
    return f"own.quantise.bf16_e4m3_f32_f32.swiglu.{scaling}_scaled.threads{threads}.sm_90a"


def permute(scaling: str, schedule: str, mapped: bool, weighted: bool) -> str:
    given = ("bf16", "i32", *(["i32"] if mapped else []), *(["f32"] if weighted else []))
    elements = "_".join((*given, "e4m3", "i32", "i32", "f32", "f32"))
    return f"own.moe_permute.{elements}.{scaling}_scaled.{schedule}.threads128.sm_90a"


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Mapping[str, Lowered]:
    names = [quantise(scaling, grouped) for scaling in ("block", "row_column") for grouped in (False, True)]
    names += [
        permute(scaling, schedule, *given)
        for scaling in ("block", "row_column")
        for schedule in ("one_launch", "two_launches")
        for given in PERMUTED
    ]
    names += [gated(scaling, threads) for scaling in ("block", "row_column") for threads in (32, 128)]
    return functions_once(
        request, "quantise", [*names, TILES], constants={"aot.kernels.moe_permute:_RANKING_THREADS": 96}
    )


def rows_of(m: int, k: int, seed: int = 0) -> Tensor:
    """Rows of different magnitudes, the last element the largest of each; one is zero, and so is the second block."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn((m, k), generator=random) * 10.0 ** torch.randint(-5, 5, (m, 1), generator=random)
    x[:, -1] = 2 * x.abs().amax(1)
    x[2 % m] *= m < 3  # of more rows one is zero
    x[:, 128:256] = 0
    return x.bfloat16()


def expected(x: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """y and scales, in f32 as kernels compute."""
    m, k = x.shape
    width = 128 if scaling == "block" else k
    padded = torch.zeros((m, -(-k // width), width))
    padded.view(m, -1)[:, :k] = x.float()
    amax = padded.abs().amax(-1).clamp_min(1e-10)
    y = (padded * (torch.tensor(448.0) / amax)[..., None]).view(m, -1)[:, :k]
    scale = amax / torch.tensor(448.0)
    return y.to(torch.float8_e4m3fn).float(), scale if scaling == "block" else scale[:, 0]


def outputs(m: int, k: int, scaling: str) -> tuple[Tensor, Tensor]:
    """Full of NaN."""
    shape = (m, -(-k // 128)) if scaling == "block" else (m,)
    return poisoned((m, k), "e4m3", "cpu"), poisoned(shape, "f32", "cpu")


def quantised(
    kernels: Mapping[str, Lowered], x: Tensor, scaling: str, ends: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    found = outputs(x.shape[0], x.shape[1], scaling)
    run(kernels[quantise(scaling, ends is not None)], [x, ends, *found], found)
    return found[0].float(), found[1]


@SCALINGS
@pytest.mark.parametrize(("m", "k"), [(1, 16), (3, 128), (4, 400), (2, 2096), (5, 256), (1, 16_528)])
def test_rows_are_over_their_scales_and_rounded(kernels: Mapping[str, Lowered], scaling: str, m: int, k: int) -> None:
    x = rows_of(m, k, k)
    for found, wanted in zip(quantised(kernels, x, scaling), expected(x, scaling), strict=True):
        assert torch.equal(found, wanted)


@SCALINGS
@pytest.mark.parametrize("threads", [32, 128])
@pytest.mark.parametrize(("m", "k"), [(1, 16), (4, 400), (2, 1040), (1, 4304)])
def test_rows_with_gates_are_silu_of_these_times_the_others(
    kernels: Mapping[str, Lowered], scaling: str, threads: int, m: int, k: int
) -> None:
    """Bit for bit where gates are so large that silu is what it is of, or 0; else as near as e4m3 allows."""
    ups, large = rows_of(m, k, k), torch.full((m, k), 100.0).bfloat16()
    large[:, ::3] = -large[:, ::3]
    for gates in (large, rows_of(m, k, 7)):
        y, scale = outputs(m, k, scaling)
        run(kernels[gated(scaling, threads)], [torch.cat([gates, ups], 1), y, scale], [y, scale])
        act = (torch.nn.functional.silu(gates.float()) * ups.float()).bfloat16()
        wanted = expected(act, scaling)
        torch.testing.assert_close(scale, wanted[1], rtol=0 if gates is large else 2**-7, atol=0)
        if gates is large:
            assert torch.equal(y.float(), wanted[0])
        else:
            error = y.float() - wanted[0]
            assert bool((error.abs() <= wanted[0].abs() / 8 + 2**-9).all())


@SCALINGS
def test_what_is_all_zeros_stays_so_and_has_a_scale(kernels: Mapping[str, Lowered], scaling: str) -> None:
    y, scale = quantised(kernels, torch.zeros(3, 144).bfloat16(), scaling)
    assert not y.any()
    assert torch.equal(scale, (torch.tensor(1e-10) / torch.tensor(448.0)).expand_as(scale))


@SCALINGS
def test_the_largest_of_what_shares_a_scale_becomes_the_largest_there_is(
    kernels: Mapping[str, Lowered], scaling: str
) -> None:
    x = rows_of(5, 384, 1)[[0, 1, 3, 4]]
    y, scale = quantised(kernels, x, scaling)
    assert y.abs().max() == 448.0
    assert y[:, :128].abs().amax(-1).tolist() == [448.0] * 4 or scaling == "row_column"
    largest = scale.amax(-1) if scaling == "block" else scale
    torch.testing.assert_close(x.float().abs().amax(-1), 448 * largest, rtol=1e-6, atol=0)


@SCALINGS
@pytest.mark.parametrize("end", [-3, 0, 2, 5, 99])
def test_rows_behind_the_last_group_stay_as_they_are(kernels: Mapping[str, Lowered], scaling: str, end: int) -> None:
    x, kept = rows_of(5, 160), min(max(end, 0), 5)
    ends = torch.tensor([1, 0, end], dtype=torch.int32)
    for found, wanted in zip(quantised(kernels, x, scaling, ends), expected(x, scaling), strict=True):
        assert torch.equal(found[:kept], wanted[:kept])
        assert bool(found[kept:].isnan().all())


@SCALINGS
@pytest.mark.parametrize("schedule", ["one_launch", "two_launches"])
@pytest.mark.parametrize(
    ("mapped", "weighted", "k"), [(*given, k) for given, extents in PERMUTED.items() for k in extents]
)
def test_tokens_are_quantised_into_the_rows_of_their_experts(
    kernels: Mapping[str, Lowered], scaling: str, schedule: str, mapped: bool, weighted: bool, k: int
) -> None:
    """The rows, positions and untouched ends are those of a copy of quantised tokens, times weights where these are."""
    random, experts = torch.Generator().manual_seed(k), 5
    ids = torch.randint(-1, 6, (5, 3), generator=random, dtype=torch.int32)
    x, expert_map = rows_of(5, k, k), torch.arange(experts, dtype=torch.int32) if mapped else None
    weights = torch.randn((5, 3), generator=random) if weighted else None
    rows, scale = outputs(15, k, scaling)
    ends, positions = (torch.full(shape, -9, dtype=torch.int32) for shape in ((experts,), (5, 3)))
    written = rows, ends, positions, scale
    run(kernels[permute(scaling, schedule, mapped, weighted)], [x, ids, expert_map, weights, *written], written)
    order = [(token, slot) for expert in range(experts) for token, slot in (ids == expert).nonzero().tolist()]
    assert [int(positions[place]) for place in order] == list(range(len(order)))
    assert int((positions < 0).sum()) == 15 - len(order)
    of_rows = [x[token] if weights is None else (x[token].float() * weights[token, slot]) for token, slot in order]
    for found, wanted in zip((rows.float(), scale), expected(torch.stack(of_rows).bfloat16(), scaling), strict=True):
        assert torch.equal(found[: len(order)], wanted)
        assert bool(found[len(order) :].isnan().all())


@pytest.mark.parametrize("end", [64, 40, 3])
def test_both_warp_groups_of_a_tile_scale_a_row_by_the_largest_of_its_128_columns(
    kernels: Mapping[str, Lowered], end: int
) -> None:
    """Tiles one after the other, the first of which has larger numbers, and the last of which is behind all columns of
    D, as a cluster's may be; rows behind a group's end get no scale."""
    random = torch.Generator().manual_seed(end)
    x = torch.randn((3, 64, 128), generator=random) * torch.tensor([8.0, 1.0, 1.0])[:, None, None]
    x[1, 5] = 0
    y, scale = poisoned(tuple(x.shape), "f32", "cpu"), poisoned((64, 2), "f32", "cpu")
    run(kernels[TILES], [x, end, y, scale], [y, scale])
    amax = x.abs().amax(-1).clamp_min(1e-10)
    assert torch.equal(y, x * (torch.tensor(448.0) / amax)[..., None])
    assert torch.equal(scale[:end], (amax / torch.tensor(448.0))[:2, :end].T)
    assert bool(scale[end:].isnan().all())
