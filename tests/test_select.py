"""From measurements to ranges: pure functions of the tuner. `aot.tune` itself needs torch, which CPU machines have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot.select import fewest, invariant, points, ranges
from aot.tune import candidates_at


def test_a_function_serves_the_range_below_its_m_and_the_last_everything_above() -> None:
    assert ranges([(1, "a"), (64, "b"), (256, "c")]) == [
        (1, "a"),
        (64, "b"),
        (None, "c"),
    ]


def test_neighbours_with_one_function_become_one_range() -> None:
    assert ranges([(1, "a"), (16, "a"), (64, "b"), (256, "a")]) == [
        (16, "a"),
        (64, "b"),
        (None, "a"),
    ]


@pytest.mark.parametrize(
    ("ranked", "sharing", "answer"),
    [
        ([(1, ["a", "b"]), (64, ["b", "a"]), (256, ["b"])], [], "b"),
        ([(1, ["a", "b"]), (64, ["b", "a"]), (256, ["b"])], ["b"], "a"),
        ([(1, ["s", "a"]), (64, ["s", "a"]), (256, ["b"])], ["s"], "a"),  # first of those that may
        ([(1, ["b"]), (64, ["a", "b"])], [], "b"),  # as often first, and more often there
        ([(1, ["b", "a"]), (64, ["a", "b"])], [], "a"),
        ([(1, ["s"])], ["s"], None),
    ],
)
def test_equal_bits_come_from_what_is_ranked_first_most_often_and_shares_no_tiles(
    ranked: list[tuple[int, list[str]]], sharing: list[str], answer: str | None
) -> None:
    assert invariant(ranked, sharing) == answer


@pytest.mark.parametrize("best", [[], [(16, "a"), (1, "b")], [(16, "a"), (16, "b")]])
def test_ranges_need_ascending_m(best: list[tuple[int, str]]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        ranges(best)


def test_one_function_serves_where_it_is_nearly_the_best() -> None:
    times = [{"a": 10.0, "b": 10.05}, {"b": 20.0, "c": 19.9}, {"c": 30.0, "b": 30.2}]
    assert fewest(times, 0.01) == ["b", "b", "b"]
    assert fewest(times, 0.004) == ["a", "c", "c"]
    assert fewest(times, 0.0) == ["a", "c", "c"]


def test_what_is_kept_in_any_case_serves_first_and_the_best_of_it() -> None:
    times = [{"a": 10.0, "b": 10.05, "c": 10.02}]
    assert fewest(times, 0.01) == ["a"]
    assert fewest(times, 0.01, ["b", "c"]) == ["c"]
    assert fewest(times, 0.001, ["b", "c"]) == ["a"]


@given(
    times=st.lists(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(1, 10), min_size=1), min_size=1, max_size=20),
    tolerance=st.floats(0, 1),
)
def test_nothing_chosen_is_slower_than_allowed(times: list[dict[str, float]], tolerance: float) -> None:
    chosen = fewest(times, tolerance)
    assert all(at[f] <= min(at.values()) * (1 + tolerance) for at, f in zip(times, chosen, strict=True))
    assert chosen == fewest([dict(reversed(at.items())) for at in times], tolerance)


def test_points_fill_the_gaps_between_the_manifests_tokens() -> None:
    every_32 = [128, 160, 192, 224, 240, 256, 288, 320, 333, 336, 352, 384, 400, 416, 448, 480, 512]
    assert points([1, 333, 1024]) == [1, 8, 16, 32, 64, 96, *every_32, 640, 768, 1024]
    assert points([16]) == [16]
    assert points([4096, 1])[-3:] == [2048, 3072, 4096]


def test_candidates_for_an_m_are_those_ranked_near_it() -> None:
    ranked = [(1, ["a", "b"]), (64, ["b", "c"]), (256, ["d"])]
    assert candidates_at(ranked, 64) == ["b", "c"]
    assert candidates_at(ranked, 128) == ["b", "c", "d"]
    assert candidates_at(ranked, 192) == ["d"]
    assert candidates_at(ranked, 1) == ["a", "b"]
    assert candidates_at(ranked, 8192) == ["d"]
