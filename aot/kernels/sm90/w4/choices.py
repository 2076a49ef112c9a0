"""Which choices the GEMM of 4-bit weights has, and which go together for a form, as pure arithmetic.

Knows nothing of how a kernel is made (`plan` says what choices come to), and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.program.operation import OVERLAPS

from ..sizes import WARP_GROUP
from ..small_m.choices import rule_of_shape
from .form import Form
from .plan import BLOCK_K, SLAB_ROWS, Plan

_FEWEST_STAGES = 3  # of each slice of K: a stage is said to be free when the next one is under way
_MOST_THREADS = 1024
_REGISTERS_PER_SM, _MOST_REGISTERS = 1 << 16, 255
_OTHER_REGISTERS = 62  # of a consumer thread, besides its accumulators: two blocks of weights as bf16, and codes

OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "tile_m": (8, 16, 32, 64, 128),  # tokens
    "tile_n": (48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256, 320),  # rows of B
    "tile_k": (128, 256),  # columns of a stage
    "split_k": (1, 2, 4, 8),  # CTAs of a cluster that share a tile of D
    "cluster_n": (1, 2, 4),  # tiles of D whose CTAs, in one cluster, share the loads of A
    "sliced_k": (1, 2, 3, 4, 6),  # groups of warp groups of a CTA that take its stages in turn
    "ctas_per_sm": (1, 2),  # how many fit, by shared memory and registers
    "overlap": OVERLAPS,  # as `small_m.choices` has it
}


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together in a kernel of this form, or None: what the hardware and
    this kernel demand."""
    return rule_of_shape(options) or _rule_of_resources(Plan.of(options, form))


def limit(form: Form, n: int, k: int) -> str | None:
    """Why no kernel of this form takes weights of N rows and K columns, or None."""
    if n % SLAB_ROWS:
        return f"N must be a multiple of {SLAB_ROWS}, found {n}"
    columns = max(BLOCK_K, form.format.group)
    if k % columns:
        return f"K must be a multiple of {columns}, found {k}"
    return None


def _rule_of_resources(plan: Plan) -> str | None:
    if plan.threads > _MOST_THREADS:
        return f"{plan.threads} threads exceed {_MOST_THREADS} of a CTA"
    fewest = _FEWEST_STAGES * plan.sliced_k
    if plan.stages < fewest:
        return f"shared memory holds {plan.stages} stages, fewer than {fewest}"
    accumulators = plan.tile_m // 2  # of a thread: 64 rows by the tokens, over 128 threads
    threads = (plan.consumer_threads + WARP_GROUP) * plan.ctas_per_sm
    registers = min(_MOST_REGISTERS, _REGISTERS_PER_SM // threads // 8 * 8)
    if accumulators + _OTHER_REGISTERS > registers:
        return f"{accumulators} accumulators of a thread leave fewer than {_OTHER_REGISTERS} of {registers} registers"
    return None
