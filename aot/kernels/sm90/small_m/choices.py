"""Which choices the GEMM for few tokens has, and which go together for a form, as pure arithmetic.

Knows nothing of how a kernel is made (`plan` says what choices come to), and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.program.operation import OVERLAPS

from ..sizes import SWIZZLE_ATOM_BYTES, SWIZZLE_ATOM_ROWS, WARP_GROUP, WGMMA_ROWS
from .form import Form
from .plan import FEW_TOKENS, FEW_WEIGHTS, HALF_GROUP, Plan

_FEWEST_STAGES = 2  # a stage is said to be free when the next one is under way
_PORTABLE_CLUSTER = 8
_REGISTERS_PER_SM, _MOST_REGISTERS = 1 << 16, 255
_OTHER_REGISTERS = 40  # of a consumer thread, besides its accumulators

OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "tile_m": (8, 16, 32, 64, 96, 128, 192, 256),  # tokens
    # Rows of B. Tiles need not divide N, nor be multiples of WGMMA's 64 rows.
    "tile_n": (48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 144, 176, 224),
    "split_k": (1, 2, 4, 8),  # CTAs of a cluster that share a tile of D
    "cluster_n": (1, 2, 4),  # tiles of D whose CTAs, in one cluster, share the loads of A
    "ctas_per_sm": (1, 2),  # how many fit, by shared memory
    # What may happen before the kernel before this one ends: nothing ("serial"), all but reading ("launch"), or
    # reading B too ("weights"), which is right only where that kernel does not write B.
    "overlap": OVERLAPS,
}


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together in a kernel of this form, or None: what the hardware and
    this kernel demand.

    What is not worth trying is for `aot.providers.likely_small_m` to say.
    """
    return _rule_of_shape(options) or _rule_of_form(options, form) or _rule_of_resources(Plan.of(options, form))


def _rule_of_shape(options: Mapping[str, Any]) -> str | None:
    tile_m, split_k, cluster_n = (options[o] for o in ("tile_m", "split_k", "cluster_n"))
    if split_k * cluster_n > _PORTABLE_CLUSTER:
        return f"a cluster of {split_k * cluster_n} CTAs exceeds {_PORTABLE_CLUSTER}"
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
    if form.scaling == "block" and not Plan.of(options, form).swapped:
        return f"scales of blocks need a tile of at most {FEW_TOKENS} x {FEW_WEIGHTS}"
    return None


def _rule_of_resources(plan: Plan) -> str | None:
    memory = plan.memory
    if memory.stages < _FEWEST_STAGES:
        return f"shared memory holds {memory.stages} stages, fewer than {_FEWEST_STAGES}"
    m_rows, n_rows = plan.sides
    if -m_rows % WGMMA_ROWS * SWIZZLE_ATOM_BYTES > memory.stages * memory.n_side:
        return "WGMMA would read past the stages"
    threads = plan.consumer_threads
    accumulators = plan.mma_rows * n_rows // threads * (2 if plan.form.element_bytes == 1 else 1)
    registers = min(_MOST_REGISTERS, _REGISTERS_PER_SM // (threads + WARP_GROUP) // 8 * 8)
    if accumulators + _OTHER_REGISTERS > registers:
        return f"{accumulators} accumulators of a thread leave fewer than {_OTHER_REGISTERS} of {registers} registers"
    return None
