"""What the addresses of a call's tensors must be: by their bytes, and the same to Python and to native code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import native
from runtime.program.pointers import PointerChecks
from runtime.program.record import TensorView

MOST = 12  # tensors of a call that native code has room for


def matrix(rows: int, columns: int = 64, stride: int = 64) -> TensorView:
    return TensorView(1 << 40, "bf16", (rows, columns), (stride, 1), 0)


A, B, D = matrix(4), matrix(64), matrix(4)
CHECKS = PointerChecks.of([A, B, D], [16, 16, 4], [2])


@pytest.mark.parametrize(
    ("pointers", "fits"),
    [
        ((0x1000, 0x10000, 0x2000), True),
        ((0, 0x10000, 0x2000), False),
        ((0x1000, 0x10000, 0), False),
        ((0x1008, 0x10000, 0x2000), False),
        ((0x1000, 0x10000, 0x2004), True),
        ((0x1000, 0x10000, 0x2002), False),
        ((0x1000, 0x10000, 0x1000), False),
        ((0x1000, 0x10000, 0x1000 + 511 - 3), False),
        ((0x1000, 0x10000, 0x1000 + 512), True),
        ((0x1000, 0x10000, 0x1000 - 512), True),
        ((0x1000, 0x10000, 0x1000 - 508), False),
        ((0x1000, 0x1010, 0x8000), True),
        ((0x1000, 0x10000, 0x10000 + 8188), False),
    ],
)
def test_tensors_are_there_and_aligned_and_apart_from_what_is_written(pointers: tuple[int, ...], fits: bool) -> None:
    assert CHECKS.fit(pointers) is fits


def test_rows_that_are_added_are_checked_too() -> None:
    grown = CHECKS.grown(2, (128, 0, 128))
    assert grown == PointerChecks.of([matrix(6), B, matrix(6)], [16, 16, 4], [2])
    apart = (0x1000, 0x10000, 0x1000 + 512)
    assert (CHECKS.fit(apart), grown.fit(apart)) == (True, False)


def test_two_that_are_written_are_held_apart_once() -> None:
    assert PointerChecks.of([A, B, D], [1] * 3, [2, 1]).apart == ((2, 0), (1, 0), (1, 2))


@st.composite
def checks_and_pointers(draw: st.DrawFn) -> tuple[PointerChecks, list[int]]:
    """Mostly aligned, of few lengths and at few addresses, so that spans often touch or overlap."""
    count = draw(st.integers(2, MOST))
    each: Any = {"min_size": count, "max_size": count}
    masks = draw(st.lists(st.sampled_from([0, 3, 15]), **each))
    sizes = draw(st.lists(st.integers(0, 3).map(lambda x: 16 * x) | st.integers(0, 1 << 40), **each))
    apart = draw(st.lists(st.sampled_from(list(itertools.permutations(range(count), 2))), max_size=4))
    near = st.integers(1, 8).map(lambda x: 16 * x)
    pointers = draw(st.lists(near | near | st.integers(0, (1 << 48) - 1), **each))
    return PointerChecks(tuple(masks), tuple(sizes), tuple(apart)), pointers


def fit_by_bytes(checks: PointerChecks, pointers: Sequence[int]) -> bool:
    spans = [range(p, p + size) for p, size in zip(pointers, checks.sizes, strict=True)]
    if not all(p and p % (mask + 1) == 0 for p, mask in zip(pointers, checks.misaligned, strict=True)):
        return False
    return not any(_share(spans[x], spans[y]) for x, y in checks.apart)


def _share(x: range, y: range) -> bool:
    """An empty span is in another if it begins inside it."""
    return max(x.start, y.start) < min(x.stop, y.stop) or (x.start in y[1:] and not x) or (y.start in x[1:] and not y)


@given(checks_and_pointers())
def test_they_fit_where_no_byte_is_in_two_spans(drawn: tuple[PointerChecks, list[int]]) -> None:
    checks, pointers = drawn
    assert checks.fit(pointers) is fit_by_bytes(checks, pointers)


@pytest.mark.skipif(native._native is None, reason="runtime._native was not built")
@given(checks_and_pointers())
def test_native_code_and_python_agree(drawn: tuple[PointerChecks, list[int]]) -> None:
    checks, pointers = drawn
    assert native._native.pointers_fit(checks, pointers) is checks.fit(pointers)


@pytest.mark.skipif(native._native is None, reason="runtime._native was not built")
@pytest.mark.parametrize(
    ("checks", "error"),
    [
        (None, ValueError),
        (CHECKS[:2], ValueError),
        (CHECKS._replace(sizes=(1, 2)), ValueError),
        (CHECKS._replace(apart=((0, 3),)), ValueError),
        ((*CHECKS[:2], ((0,),)), ValueError),
        (CHECKS._replace(apart=((0, 1),) * 33), ValueError),
        (PointerChecks((0,) * 13, (0,) * 13, ()), ValueError),
        ((("x",) * 3, *CHECKS[1:]), TypeError),
    ],
)
def test_native_code_refuses_checks_that_are_none(checks: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        native._native.pointers_fit(checks, (16, 32, 48))


@given(checks_and_pointers(), st.randoms())
def test_in_another_order_they_say_the_same_of_the_same_tensors(
    drawn: tuple[PointerChecks, list[int]], random: Any
) -> None:
    checks, pointers = drawn
    order = list(range(len(pointers)))
    random.shuffle(order)
    assert checks.ordered(order).fit([pointers[of] for of in order]) == checks.fit(pointers)
