"""From measurements to ranges: pure functions of the tuner. `aot.tune` itself needs torch, which CPU machines have."""

from __future__ import annotations

import itertools

import pytest

from aot.pack.ranges import invariant, ranges, without
from aot.search.m_values import points, waves
from aot.tune.session import candidates_at


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
    ("ranked", "summation", "answer"),
    [
        # The word whose functions are ranked before those of others most often, and of these the best at each M.
        ([(1, "abx"), (64, "xb"), (256, "b")], {"a": "one", "b": "one", "x": "two"}, [(1, "a"), (None, "b")]),
        ([(1, "ab"), (64, "ba"), (256, "b")], {"a": "one", "b": "two"}, [(None, "b")]),
        # Those without a word do not count, and M without any of the word fall to what follows, or to what was before.
        ([(1, "sa"), (64, "sb"), (256, "x")], {"a": "one", "b": "one", "x": "two"}, [(1, "a"), (None, "b")]),
        ([(1, "x"), (16, "a"), (64, "b")], {"a": "one", "b": "one", "x": "two"}, [(16, "a"), (None, "b")]),
        ([(1, "b"), (64, "ab")], {"a": "one", "b": "two"}, [(None, "b")]),  # as often first, and more often there
        ([(1, "ba"), (64, "ab")], {"a": "one", "b": "two"}, [(None, "a")]),
        ([(1, "axy"), (64, "axy")], {"a": "one", "x": "two", "y": "two"}, [(None, "a")]),
        ([(1, "s")], {}, None),
        ([(1, "ab"), (2, "ba"), (4, "ab")], {"a": "one", "b": "one"}, [(1, "a"), (2, "b"), (None, "a")]),
    ],
)
def test_equal_bits_come_from_alike_functions_of_which_one_is_ranked_first_most_often(
    ranked: list[tuple[int, str]], summation: dict[str, str], answer: list[tuple[int | None, str]] | None
) -> None:
    assert invariant([(m, list(names)) for m, names in ranked], summation) == answer


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        ("", [(4, "a"), (16, "b"), (64, "c"), (None, "b")]),
        ("a", [(16, "b"), (64, "c"), (None, "b")]),
        ("c", [(4, "a"), (None, "b")]),
        ("b", [(4, "a"), (None, "c")]),
        ("bc", [(None, "a")]),
        ("abc", None),
    ],
)
def test_ranges_without_a_function_fall_to_those_beside_it(
    gone: str, left: list[tuple[int | None, str]] | None
) -> None:
    assert without([(4, "a"), (16, "b"), (64, "c"), (None, "b")], gone) == left


@pytest.mark.parametrize("best", [[], [(16, "a"), (1, "b")], [(16, "a"), (16, "b")]])
def test_ranges_need_ascending_m(best: list[tuple[int, str]]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        ranges(best)


def test_points_fill_the_gaps_between_the_manifests_tokens() -> None:
    found = points([1, 333, 1024])
    assert found[:6] == [1, 8, 16, 32, 64, 68]
    assert {128, 256, 333, 512, 1024} <= set(found)
    assert found[-1] == 1024
    assert all(b <= 1.07 * a for a, b in itertools.pairwise(found[4:]))
    assert points([16]) == [16]
    assert points([64, 16]) == [16, 32, 64]
    assert points([4096, 1])[-1] == 4096


def test_waves_end_where_tiles_fill_the_sms() -> None:
    """4096 columns are 32 tiles of 128 and 16 of 256: of 132 SMs 4 and 8 rows of tiles fill 128."""
    found = waves(4096, 132, [1, 8192])
    assert {256, 257, 512, 513, 1024, 1025, 2048, 2049} <= set(found)
    assert found == sorted(found)
    assert waves(4096, 132, [512]) == []
    assert max(waves(4096, 132, [1, 300])) < 300
    assert waves(1 << 20, 132, [1, 8192]) == []


def test_candidates_for_an_m_are_those_ranked_near_it() -> None:
    ranked = [(1, ["a", "b"]), (64, ["b", "c"]), (256, ["d"])]
    assert candidates_at(ranked, 64) == ["b", "c"]
    assert candidates_at(ranked, 128) == ["b", "c", "d"]
    assert candidates_at(ranked, 192) == ["d"]
    assert candidates_at(ranked, 1) == ["a", "b"]
    assert candidates_at(ranked, 8192) == ["d"]
