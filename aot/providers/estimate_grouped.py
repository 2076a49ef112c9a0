"""How long a grouped GEMM of our own takes: a guess from its tiles, for putting the choices for a problem in order.

Rows are taken to be spread over groups at random, each as likely as any other, as a router's load is at best. Rates are
those of an H200's persistent GEMM; nothing here was fitted to grouped GEMMs. Imports no compiler.
"""

from __future__ import annotations

import math

from runtime.grouped_gemm import Signature
from runtime.numbers.dtypes import DTYPES

from ..kernels.sm90.grouped.plan import plan_of
from ..kernels.sm90.persistent.form import Form
from ..search.grouped_gemm import active_groups
from ..search.variants import Variant

_PROCESSORS = 132
_READ_BYTES_PER_US = 4.3e6  # of weights that no cache has
_FLOPS_PER_US = 720e6  # bf16, at the clock that power leaves
_LAUNCH_US, _TILE_US = 3.0, 0.6  # to begin and end a kernel, and a tile's epilogue that nothing hides
_HIDDEN = 0.1  # of the shorter of two, which does not quite hide behind the longer
_LOADED_BYTES_PER_US = 0.055e6  # into an SM's shared memory, from L2


def estimate_us(variant: Variant, form: Form, signature: Signature, m: int) -> float:
    """Microseconds on an H200 at `m` rows of `signature`, weights not in L2."""
    plan, element = plan_of(variant.options, form), DTYPES[signature.a].bytes
    active = active_groups(signature.groups, m)
    rows = m / active
    tile_n = plan.rows if plan.swap else plan.columns
    tiles = active * max(1.0, math.ceil(rows / plan.tokens - 0.5)) * math.ceil(signature.n / tile_n)
    waves = math.ceil(tiles / _PROCESSORS)
    per_tile_bytes = (plan.tokens / plan.cluster_along_n + tile_n) * signature.k * element
    products = 2.0 * plan.tokens * tile_n * signature.k * _PROCESSORS / _FLOPS_PER_US
    by_tile = max(products, per_tile_bytes / _LOADED_BYTES_PER_US) + _TILE_US * (0.5 if plan.pingpong else 1.0)
    moved = (active * signature.n + m) * signature.k * element + m * signature.columns * DTYPES[signature.d].bytes
    computed, read = waves * by_tile, moved / _READ_BYTES_PER_US
    return _LAUNCH_US + max(computed, read) + _HIDDEN * min(computed, read)
