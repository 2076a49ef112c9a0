"""What the kernels that quantise rows do to memory, thread by thread on the CPU; see `tests.emulated`."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from ..command_line import ROOT
from ..emulated import CUTLASS, E4M3, HERE, Pointer, Tensor, module, run

QUANTISE = module(ROOT / "aot/kernels/quantise.py")
PERMUTE = module(ROOT / "aot/kernels/moe_permute.py")
OUTPUT = module(
    ROOT / "aot/kernels/sm90/persistent/quantised_output.py",
    "aot.kernels.sm90.persistent",
    {
        **{name: QUANTISE[name] for name in ("inverse_of", "over_threads", "scale_of")},
        **dict.fromkeys(("EpilogueOperands", "EpilogueTile", "TileCoord"), Any),
        **{"WGMMA_ROWS": 64, "CONSUMERS": 2, "meet_to_scale": lambda: HERE.shared.barrier.wait()},
    },
)
UNTOUCHED = np.float32(-7777.0)
SCALINGS = pytest.mark.parametrize("scaling", ["block", "row_column"])


def rows_of(m: int, k: int, seed: int = 0) -> Any:
    """Rows of different magnitudes; one is zero, and so is the second block of each."""
    random = np.random.default_rng(seed)
    x = (random.standard_normal((m, k)) * 10.0 ** random.integers(-5, 5, (m, 1))).astype(np.float32)
    x[2 % m] = 0
    x[:, 128:256] = 0
    return x


def expected(x: Any, scaling: str) -> tuple[Any, Any]:
    """y and scales, in f32 as kernels compute."""
    m, k = x.shape
    width = 128 if scaling == "block" else k
    padded = np.zeros((m, -(-k // width), width), np.float32)
    padded.reshape(m, -1)[:, :k] = x
    amax = np.maximum(np.abs(padded).max(-1), np.float32(1e-10))
    y = np.array(E4M3.rounded((padded * (np.float32(448.0) / amax)[..., None]).reshape(m, -1)[:, :k]))
    scale = amax / np.float32(448.0)
    return y, scale if scaling == "block" else scale[:, 0]


def numbers(x: Any) -> Tensor:
    """A tensor whose elements know how to become f32."""
    found = np.empty(x.shape, object)
    found.reshape(-1)[:] = [CUTLASS.Float32(value) for value in x.flat]
    return Tensor.of(found)


def outputs(m: int, k: int, scaling: str) -> tuple[Any, Any]:
    shape = (m, -(-k // 128)) if scaling == "block" else (m,)
    return np.full((m, k), UNTOUCHED, np.float32), np.full(shape, UNTOUCHED, np.float32)


def quantised(x: Any, scaling: str, threads: int = 64, ends: Any = None) -> tuple[Any, Any]:
    (m, k), of_row = x.shape, scaling == "row_column"
    y, scale = outputs(m, k, scaling)
    kernels = QUANTISE["Quantise"](of_row, threads)
    grid = m if of_row else -(-scale.size // (threads // 8))
    given = numbers(x), None if ends is None else Tensor.of(ends), Tensor.of(y, E4M3), Tensor.of(scale)
    run(kernels.whole_rows if of_row else kernels.blocks_of_rows, (grid, 1), threads, *given)
    return y, scale


@SCALINGS
@pytest.mark.parametrize(("m", "k"), [(1, 16), (3, 128), (4, 400), (2, 1040), (5, 256)])
def test_rows_are_over_their_scales_and_rounded(scaling: str, m: int, k: int) -> None:
    x = rows_of(m, k, k)
    for found, wanted in zip(quantised(x, scaling), expected(x, scaling), strict=True):
        np.testing.assert_array_equal(found, wanted)


@SCALINGS
def test_what_is_all_zeros_stays_so_and_has_a_scale(scaling: str) -> None:
    y, scale = quantised(np.zeros((3, 144), np.float32), scaling)
    assert not y.any()
    np.testing.assert_array_equal(scale, np.float32(1e-10) / np.float32(448.0))


@SCALINGS
def test_the_largest_of_what_shares_a_scale_becomes_the_largest_there_is(scaling: str) -> None:
    x = rows_of(5, 384, 1)[[0, 1, 3, 4]]
    y, scale = quantised(x, scaling)
    assert np.abs(y).max() == 448.0
    assert np.abs(y[:, :128]).max(-1).tolist() == [448.0] * 4 or scaling == "row_column"
    np.testing.assert_allclose(np.abs(x).max(-1), 448 * (scale.max(-1) if scaling == "block" else scale), rtol=1e-6)


@SCALINGS
@pytest.mark.parametrize("end", [-3, 0, 2, 5, 99])
def test_rows_behind_the_last_group_stay_as_they_are(scaling: str, end: int) -> None:
    x, kept = rows_of(5, 160), min(max(end, 0), 5)
    for found, wanted in zip(quantised(x, scaling, ends=np.array([1, 0, end])), expected(x, scaling), strict=True):
        np.testing.assert_array_equal(found[:kept], wanted[:kept])
        assert (found[kept:] == UNTOUCHED).all()


@SCALINGS
@pytest.mark.parametrize("schedule", ["one_launch", "two_launches"])
@pytest.mark.parametrize(("k", "weighed"), [(48, False), (400, False), (400, True), (1040, False)])
def test_tokens_are_quantised_into_the_rows_of_their_experts(
    scaling: str, schedule: str, k: int, weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows, positions and untouched ends are those of a copy of quantised tokens, times weights where these are."""
    monkeypatch.setitem(PERMUTE, "_RANKING_THREADS", 96)
    ids, experts, threads = np.random.default_rng(k).integers(-1, 6, (5, 3)), 5, 64
    x, weights = rows_of(5, k, k), np.random.default_rng(k).standard_normal((5, 3)).astype(np.float32)
    given = numbers(x), Tensor.of(weights) if weighed else None
    rows, scale = outputs(15, k, scaling)
    ends, positions = np.full(experts, -9, np.int64), np.full((5, 3), -9, np.int64)
    kernels = PERMUTE["MoePermute"](schedule, threads, scaling=scaling, mapped=k == 48)
    to, of_ids, integers = (
        (Tensor.of(rows, E4M3), Tensor.of(scale)),
        Tensor.of(ids),
        (Tensor.of(ends), Tensor.of(positions)),
    )
    if schedule == "one_launch":
        run(kernels.rank_and_copy, (6, 1), threads, given, of_ids, None, to, *integers)
    else:
        run(kernels.rank, (1, 1), 96, of_ids, None, *integers)
        run(kernels.copy, (5, 1), threads, given, to, integers[1])
    order = [tuple(place) for expert in range(experts) for place in np.argwhere(ids == expert)]
    assert [positions[place] for place in order] == list(range(len(order)))
    of_rows = np.stack([x[token] * (weights[token, slot] if weighed else 1) for token, slot in order])
    for found, wanted in zip((rows, scale), expected(of_rows.astype(np.float32), scaling), strict=True):
        np.testing.assert_array_equal(found[: len(order)], wanted)
        assert (found[len(order) :] == UNTOUCHED).all()


@pytest.mark.parametrize("end", [64, 40, 3])
def test_both_warp_groups_of_a_tile_scale_a_row_by_the_largest_of_its_128_columns(end: int) -> None:
    """Tiles one after the other, the first of which has larger numbers, and the last of which is behind all columns of
    D, as a cluster's may be; rows behind a group's end get no scale."""
    random = np.random.default_rng(end)
    tiles = [(random.standard_normal((64, 128)) * size).astype(np.float32) for size in (8, 1, 1)]
    tiles[1][5] = 0
    found, scales = [np.zeros((64, 128), np.float32) for _ in tiles], np.full((64, 2), UNTOUCHED, np.float32)
    memory = np.full(128, np.nan, np.float32)

    def kernel() -> None:
        group, thread = HERE.thread // 128, HERE.thread % 128
        row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        operands = types.SimpleNamespace(shared_scales=Pointer(memory), group=group, row=row, column=column)
        operands.scale_d, operands.first_row = Tensor.of(scales), lambda coord, atom: 0
        places = [
            (row + 8 * half, 64 * group + 8 * j + column + i) for j in range(8) for half in (0, 1) for i in (0, 1)
        ]
        for number, tile in enumerate(tiles):
            at = types.SimpleNamespace(coord=types.SimpleNamespace(end=end, column=number), atom=0)
            values = [CUTLASS.Float32(tile[place]) for place in places]
            for place, value in zip(places, OUTPUT["quantised"](operands, values, at), strict=True):
                found[number][place] = value

    run(kernel, (1, 1), 256)
    for number, tile in enumerate(tiles[:2]):
        amax = np.maximum(np.abs(tile).max(-1), np.float32(1e-10))
        np.testing.assert_array_equal(scales[:end, number], amax[:end] / np.float32(448.0))
        np.testing.assert_allclose(found[number], tile * (np.float32(448.0) / amax)[:, None], rtol=1e-6)
    assert (scales[end:] == UNTOUCHED).all()
