"""The stages between the producer warp and the consumer warp groups: their barriers, and what a CTA works on.

Also every named barrier of a CTA, so that no two have one number. Knows nothing of what is loaded or multiplied.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from .plan import Plan

# Named barriers.
FULL_READY = 1  # full barriers are initialised
EMPTY_READY = 2  # empty ones are
DRAINED = 3  # consumers have read their last stage
STAGED = 4  # accumulators are in shared memory


class Pipeline(NamedTuple):
    """The mbarriers of all stages, in shared memory."""

    full: Any  # the producer's bytes have come
    empty: Any  # every warp, or thread, that reads them has


class KTiles(NamedTuple):
    """A slice of K: its first K tile (a stage's columns), and how many there are."""

    first: Any
    count: Any


class Work(NamedTuple):
    """What a CTA does: a tile of D, or one slice of K of it."""

    tile_row: Any  # its numbers along tokens
    tile_column: Any  # and along rows of B
    batch: tuple[Any, ...]  # empty where there is none
    cta_n: Any  # which CTA of `cluster_n`, that share rows of A
    slice_k: Any  # which CTA of `split_k`
    k_tiles: KTiles
    tokens: Any  # from the tile's first to the last of all


@cute.jit
def release(plan: cutlass.Constexpr, empty: cute.Pointer, slice_k: cutlass.Int32) -> None:
    """A consumer warp: a stage may be filled again, here and where its A comes from."""
    if cutlass.const_expr(plan.form.scaled_by_stage):
        _arrive(plan, empty, slice_k)
    else:
        with cute.arch.elect_one():
            _arrive(plan, empty, slice_k)


def _arrive(plan: Plan, empty: cute.Pointer, slice_k: cutlass.Int32) -> None:
    """Arrive at the empty barrier of a stage, in every CTA that fills it."""
    if plan.cluster_n == 1:
        cute.arch.mbarrier_arrive(empty)
    else:
        for cta_n in range(plan.cluster_n):
            cute.arch.mbarrier_arrive(empty, slice_k + cta_n * plan.split_k)
