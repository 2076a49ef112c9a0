"""The CPU's stand-in for a GPU's threads: `tests.emulated` says when a kernel would hang, and what went wrong first."""

from __future__ import annotations

import pytest

from .emulated import ARCH, HERE, run


def test_a_barrier_that_some_thread_never_reaches_is_told() -> None:
    def kernel() -> None:
        if HERE.thread != 5:
            ARCH.sync_threads()

    with pytest.raises(AssertionError, match="at barriers that others never reach"):
        run(kernel, (1, 1), 64)


def test_what_a_thread_raises_is_raised_though_others_wait_for_it() -> None:
    def kernel() -> None:
        if HERE.thread == 40:
            raise ZeroDivisionError
        ARCH.sync_threads()

    with pytest.raises(ZeroDivisionError):
        run(kernel, (2, 1), 64)


def test_all_threads_are_behind_a_barrier_once_one_is() -> None:
    before, behind = set[int](), list[int]()

    def kernel() -> None:
        before.add(HERE.thread)
        ARCH.sync_threads()
        behind.append(len(before))

    run(kernel, (1, 1), 64)
    assert behind == [64] * 64
