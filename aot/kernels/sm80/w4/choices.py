"""Which choices the GEMM of 4-bit weights by mma.sync has, and which go together for a form, as pure arithmetic.

Knows nothing of how a kernel is made (`plan` says what choices come to), and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...w4.form import BLOCK_K, SLAB_ROWS, Form
from ..sizes import MMA_COLUMNS, MOST_REGISTERS, MOST_THREADS, REGISTERS_PER_SM, SHARED_BYTES_PER_CTA, WARP
from .plan import Plan

# Of a thread, besides its sums, twice half a block of its tokens and the address of each access to memory: for each
# slab's codes, scales and bf16, and for all else. With these few kernels spill, which are not shipped.
_REGISTERS_OF_SLAB, _OTHER_REGISTERS = 16, 72
_MOST_WARP_BLOCKS = 4  # of a stage: all instructions for them are written out

# What the kernel can be asked for. What is worth asking for is in `aot.providers.likely_sm80_w4`.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "tile_m": tuple(range(MMA_COLUMNS, 65, MMA_COLUMNS)),  # tokens
    "tile_n": tuple(range(SLAB_ROWS, 513, SLAB_ROWS)),  # rows of B
    "tile_k": tuple(range(BLOCK_K, 1025, BLOCK_K)),  # columns of a stage
    "warp_n": (SLAB_ROWS, 2 * SLAB_ROWS),  # rows of B of a warp
    "sliced_k": tuple(range(1, 17)),  # warps that have the same rows, and of each stage their share of columns
    "stages": tuple(range(2, 9)),
}


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together in a kernel of this form, or None: what the hardware and
    this kernel demand."""
    return rule_of_warps(options) or rule_of_form(options, form) or rule_of_resources(Plan.of(options, form))


def hopeless(options: Mapping[str, Any]) -> bool:
    """Whether no form admits these choices, which are the first of `OPTIONS`, whatever the others are."""
    *_, last = options
    return last == "sliced_k" and rule_of_warps(options) is not None


def rule_of_warps(options: Mapping[str, Any]) -> str | None:
    """Why a tile cannot be shared among warps so, or None."""
    tile_n, tile_k, warp_n, sliced_k = (options[o] for o in ("tile_n", "tile_k", "warp_n", "sliced_k"))
    if tile_n % warp_n:
        return f"{tile_n} rows are no whole warps of {warp_n}"
    if tile_k % (BLOCK_K * sliced_k):
        return f"{tile_k} columns are no whole blocks of {BLOCK_K} for each of {sliced_k} slices"
    if tile_k // (BLOCK_K * sliced_k) > _MOST_WARP_BLOCKS:
        return f"a slice of a stage has more than {_MOST_WARP_BLOCKS} blocks of {BLOCK_K} columns"
    threads = tile_n // warp_n * sliced_k * WARP
    if threads > MOST_THREADS:
        return f"{threads} threads exceed {MOST_THREADS} of a CTA"
    return None


def rule_of_form(options: Mapping[str, Any], form: Form) -> str | None:
    """Why a stage has no whole words of scales, or None."""
    if options["tile_k"] % form.format.multiple:
        return f"tile_k must be a multiple of {form.format.multiple}, the columns that words of scales are for"
    return None


def rule_of_resources(plan: Plan, more: int = 0) -> str | None:
    """Why an SM has too little shared memory for a plan, or too few registers for it and so many `more`, or None."""
    if plan.shared_bytes > SHARED_BYTES_PER_CTA:
        return f"{plan.shared_bytes} bytes of shared memory exceed {SHARED_BYTES_PER_CTA} of a CTA"
    registers = min(MOST_REGISTERS, REGISTERS_PER_SM // plan.threads // 8 * 8)
    needed = plan.accumulators + 2 * (4 * plan.token_tiles) + plan.accesses
    needed += _REGISTERS_OF_SLAB * plan.warp_slabs + _OTHER_REGISTERS + more
    if needed > registers:
        return f"a thread needs about {needed} registers and has {registers}"
    return None
