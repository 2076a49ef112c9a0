"""Which choices the GEMM for few tokens has, and which go together for a form, as pure arithmetic.

Knows nothing of how a kernel is made (`plan` says what choices come to), and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.program.operation import OVERLAPS

from ..sizes import (
    CLUSTER_EXTENTS,
    PORTABLE_CLUSTER,
    SWIZZLE_ATOM_BYTES,
    SWIZZLE_ATOM_ROWS,
    THREADS_PER_SM,
    TILE_EXTENTS,
    WARP,
    WARP_GROUP,
    WGMMA_ROWS,
)
from .form import Form
from .plan import FEW_TOKENS, FEW_WEIGHTS, HALF_GROUP, Plan

_FEWEST_STAGES = 2  # a stage is said to be free when the next one is under way
_REGISTERS_PER_SM, _MOST_REGISTERS = 1 << 16, 255
_OTHER_REGISTERS = 40  # of a consumer thread, besides its accumulators

# What the kernel can be asked for. What is worth asking for is in `aot.providers.likely_small_m`.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "tile_m": TILE_EXTENTS,  # tokens
    "tile_n": TILE_EXTENTS,  # rows of B; tiles need not divide N, nor be multiples of WGMMA's 64 rows
    "split_k": CLUSTER_EXTENTS,  # CTAs of a cluster that share a tile of D
    "cluster_n": CLUSTER_EXTENTS,  # tiles of D whose CTAs, in one cluster, share the loads of A
    # How many fit, by shared memory; each has a consumer warp group and a producer warp at least.
    "ctas_per_sm": tuple(range(1, THREADS_PER_SM // (WARP_GROUP + WARP) + 1)),
    # What may happen before the kernel before this one ends: nothing ("serial"), all but reading ("launch"), or
    # reading B too ("weights"), which is right only where that kernel does not write B.
    "overlap": OVERLAPS,
}


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together in a kernel of this form, or None: what the hardware and
    this kernel demand.

    What is not worth trying is for `aot.providers.likely_small_m` to say.
    """
    return rule_of_shape(options) or _rule_of_form(options, form) or _rule_of_resources(Plan.of(options, form))


def rule_of_shape(options: Mapping[str, Any]) -> str | None:
    """Why CTAs of a cluster cannot share tiles of A and slices of K so, or None."""
    tile_m, split_k, cluster_n = (options[o] for o in ("tile_m", "split_k", "cluster_n"))
    if split_k * cluster_n > PORTABLE_CLUSTER:
        return f"a cluster of {split_k * cluster_n} CTAs exceeds {PORTABLE_CLUSTER}"
    if tile_m % (cluster_n * SWIZZLE_ATOM_ROWS):
        groups = f"whole groups of {SWIZZLE_ATOM_ROWS} tokens"
        return f"each of cluster_n CTAs loads as many {groups}, and tile_m has no such share"
    if tile_m % split_k:
        return "each of split_k CTAs reduces as many tokens, and tile_m has no such share"
    return None


def _rule_of_form(options: Mapping[str, Any], form: Form) -> str | None:
    if form.scaling != "none" and form.element_bytes != 1:
        return "scales are for 8-bit inputs"
    if form.gated and form.b_major != "k":
        return "a gated epilogue takes rows of B eight by eight, which TMA cannot where N is contiguous"
    if form.gated and options["tile_n"] % (2 * HALF_GROUP):
        return f"a gated epilogue needs tile_n in multiples of {2 * HALF_GROUP}"
    if form.b_major != "k" and (form.element_bytes != 2 or options["tile_n"] % WGMMA_ROWS):
        return f"N-major B needs 16-bit elements, and tile_n in multiples of {WGMMA_ROWS}"
    if form.quantises and (options["cluster_n"] > 1 or form.batched):
        return "what quantises A shares it with no other CTA, and has no batch"
    if form.scaled_by_stage and not Plan.of(options, form).swapped:
        return f"scales of blocks need a tile of at most {FEW_TOKENS} x {FEW_WEIGHTS}"
    return None


def _rule_of_resources(plan: Plan) -> str | None:
    memory = plan.memory
    if memory.stages < _FEWEST_STAGES:
        return f"shared memory holds {memory.stages} stages, fewer than {_FEWEST_STAGES}"
    if plan.ctas_per_sm * plan.threads > THREADS_PER_SM:
        return f"{plan.ctas_per_sm} CTAs of {plan.threads} threads exceed the {THREADS_PER_SM} of an SM"
    m_rows, n_rows = plan.sides
    if -m_rows % WGMMA_ROWS * SWIZZLE_ATOM_BYTES > memory.stages * memory.n_side:
        return "WGMMA would read past the stages"
    threads = plan.consumer_threads
    accumulators = plan.mma_rows * n_rows // threads * (2 if plan.form.element_bytes == 1 else 1)
    registers = min(_MOST_REGISTERS, _REGISTERS_PER_SM // (threads + WARP_GROUP) // 8 * 8)
    if accumulators + _OTHER_REGISTERS > registers:
        return f"{accumulators} accumulators of a thread leave fewer than {_OTHER_REGISTERS} of {registers} registers"
    return None
