"""The stages between the producer warp and the consumer warp groups: their barriers, and where each side is in them.

Also every named barrier of a CTA, so that no two have one number. Knows nothing of what is loaded or multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from ..sizes import WARP, WARP_GROUP
from .plan import CONSUMERS, Plan

CONSUMER_THREADS = CONSUMERS * WARP_GROUP
# Named barriers; the first two kinds are one for each consumer warp group.
_ORDERED = 2
_EPILOGUE = 4
_REDUCED = 6  # the last one where K is split
_DRAINED = 7
_SCALED = 8


class Pipeline(NamedTuple):
    """The mbarriers of all stages, in shared memory."""

    full: cute.Pointer  # the producer's bytes have come
    empty: cute.Pointer  # every warp that reads them has


class PipelineState(NamedTuple):
    """Where one side is: a stage, and the parity of its rounds over all stages."""

    stage: Any
    phase: Any


class ClusterCta(NamedTuple):
    """This CTA in its cluster's grid of CTAs, which counts rows first, and, where K is split, slices last; `first` is
    the first CTA of its slice."""

    row: Any
    column: Any
    first: Any = None

    def rank(self, plan: Plan, row: Any, column: Any) -> Any:
        """The number in the cluster of the CTA of its slice at a row and column."""
        number = column * plan.cluster_rows + row
        return number if self.first is None else self.first + number


def advance(plan: Plan, state: PipelineState, stages: int = 1) -> PipelineState:
    """The state so many stages further on, without a branch."""
    stage, phase = state
    for _ in range(stages):
        stage = stage + 1
        around = stage == plan.stages
        stage, phase = cutlass.select_(around, cutlass.Int32(0), stage), cutlass.select_(around, phase ^ 1, phase)
    return PipelineState(stage, phase)


@cute.jit
def release(plan: cutlass.Constexpr, empty: cute.Pointer, cta: ClusterCta) -> None:
    """Arrive at the empty barrier of a stage, of all CTAs that write this stage here: this warp has read it."""
    if cutlass.const_expr(plan.cluster_rows > 1 and plan.cluster_columns > 1):
        _release_both(plan, empty, cta)
    else:
        _release_one(plan, empty, cta)


@cute.jit
def _release_both(plan: cutlass.Constexpr, empty: cute.Pointer, cta: ClusterCta) -> None:
    """Where both operands are shared: a thread for each CTA of the row and of the column; this CTA is in both."""
    lane = cute.arch.lane_idx()
    in_column = cta.rank(plan, lane, cta.column)
    in_row = cta.rank(plan, cta.row, lane - plan.cluster_rows)
    if lane < plan.cluster_rows + plan.cluster_columns:
        cute.arch.mbarrier_arrive(empty, cutlass.select_(lane < plan.cluster_rows, in_column, in_row))


@cute.jit
def _release_one(plan: cutlass.Constexpr, empty: cute.Pointer, cta: ClusterCta) -> None:
    with cute.arch.elect_one():
        if cutlass.const_expr(not plan.multicasts):
            cute.arch.mbarrier_arrive(empty)
        for row in cutlass.range_constexpr(plan.cluster_rows if plan.cluster_rows > 1 else 0):
            cute.arch.mbarrier_arrive(empty, cta.rank(plan, row, cta.column))
        for column in cutlass.range_constexpr(plan.cluster_columns if plan.cluster_columns > 1 else 0):
            cute.arch.mbarrier_arrive(empty, cta.rank(plan, cta.row, column))


@dataclass(frozen=True)
class HandOver:
    """The named barrier that the other consumer warp group waits for, and whether it has a tile to do so for."""

    barrier: Any
    wanted: Any

    def arrive(self) -> None:
        """Let it through."""
        cute.arch.barrier_arrive(barrier_id=self.barrier, number_of_threads=CONSUMER_THREADS)


@dataclass(frozen=True)
class OrderedBarrier:
    """Lets the two consumer warp groups through in turn; `group` is this one. The second arrives once to begin."""

    group: Any

    def wait(self) -> None:
        """Wait for this warp group's turn."""
        cute.arch.barrier(barrier_id=_ORDERED + self.group, number_of_threads=CONSUMER_THREADS)

    def arrive(self) -> None:
        """Let the other one through."""
        HandOver(self.other, True).arrive()

    @property
    def other(self) -> Any:
        """The named barrier that the other one waits for."""
        return _ORDERED + 1 - self.group


def meet_in_epilogue(group: Any) -> None:
    """Wait for all threads of consumer warp group `group`."""
    cute.arch.barrier(barrier_id=_EPILOGUE + group, number_of_threads=WARP_GROUP)


def meet_to_scale() -> None:
    """Wait for both consumer warp groups, which have parts of the same rows."""
    cute.arch.barrier(barrier_id=_SCALED, number_of_threads=CONSUMER_THREADS)


def await_drained() -> None:
    """Wait until both consumer warp groups have read their last stage."""
    cute.arch.barrier(barrier_id=_DRAINED, number_of_threads=CONSUMER_THREADS)


def arrive_reduced() -> None:
    """Say that partial sums that others pushed have been read, so that stages may take their place again."""
    cute.arch.barrier_arrive(barrier_id=_REDUCED, number_of_threads=CONSUMER_THREADS + WARP)


def await_reduced() -> None:
    """The producer warp: wait until all consumers have said so."""
    cute.arch.barrier(barrier_id=_REDUCED, number_of_threads=CONSUMER_THREADS + WARP)
