"""Which choices the GEMM of 4-bit weights has, and which go together for a form, as pure arithmetic.

Knows nothing of how a kernel is made (`plan` says what choices come to), and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.program.operation import OVERLAPS

from ...w4.form import BLOCK_K, SLAB_ROWS, Form
from ..sizes import CLUSTER_EXTENTS, THREADS_PER_SM, TILE_EXTENTS, WARP_GROUP, WGMMA_ROWS
from ..small_m.choices import rule_of_shape
from .plan import Plan

_FEWEST_STAGES = 3  # of each slice of K: a stage is said to be free when the next one is under way
_MOST_THREADS = 1024
REGISTERS_PER_SM, _MOST_REGISTERS = 1 << 16, 255
_OTHER_REGISTERS = 62  # of a consumer thread, besides its accumulators: two blocks of weights as bf16, and codes

_FEWEST_BLOCKS_K = 2  # of a stage: while the second is multiplied, the stage before is said to be free
_MOST_GROUPS = _MOST_THREADS // WARP_GROUP - 1  # consumer warp groups beside the producer's

# What the kernel can be asked for. What is worth asking for is in `aot.providers.likely_w4`.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "tile_m": TILE_EXTENTS,  # tokens
    "tile_n": tuple(range(SLAB_ROWS, _MOST_GROUPS * WGMMA_ROWS + 1, SLAB_ROWS)),  # rows of B
    "tile_k": tuple(range(_FEWEST_BLOCKS_K * BLOCK_K, 513, 2 * BLOCK_K)),  # columns of a stage, whole groups of int4
    "split_k": CLUSTER_EXTENTS,  # CTAs of a cluster that share a tile of D
    "cluster_n": CLUSTER_EXTENTS,  # tiles of D whose CTAs, in one cluster, share the loads of A
    "sliced_k": tuple(range(1, _MOST_GROUPS + 1)),  # groups of warp groups of a CTA that take its stages in turn
    "ctas_per_sm": tuple(range(1, THREADS_PER_SM // (2 * WARP_GROUP) + 1)),  # that fit, by shared memory and registers
    "overlap": OVERLAPS,  # as `small_m.choices` has it
}


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together in a kernel of this form, or None: what the hardware and
    this kernel demand."""
    return rule_of_shape(options) or rule_of_resources(Plan.of(options, form))


def hopeless(options: Mapping[str, Any]) -> bool:
    """Whether no form admits these choices, which are the first of `OPTIONS`, whatever the others are."""
    *_, last = options
    return last == "cluster_n" and rule_of_shape(options) is not None


def rule_of_resources(plan: Plan) -> str | None:
    """Why an SM has too few threads, registers or bytes of shared memory for a plan, or None."""
    if plan.threads > _MOST_THREADS:
        return f"{plan.threads} threads exceed {_MOST_THREADS} of a CTA"
    fewest = _FEWEST_STAGES * plan.sliced_k
    if plan.stages < fewest:
        return f"shared memory holds {plan.stages} stages, fewer than {fewest}"
    accumulators = plan.tile_m // 2  # of a thread: 64 rows by the tokens, over 128 threads
    threads = (plan.consumer_threads + WARP_GROUP) * plan.ctas_per_sm
    registers = min(_MOST_REGISTERS, REGISTERS_PER_SM // threads // 8 * 8)
    if accumulators + _OTHER_REGISTERS > registers:
        return f"{accumulators} accumulators of a thread leave fewer than {_OTHER_REGISTERS} of {registers} registers"
    return None
