"""Which weights there are kernels for, as pure arithmetic: of these decides no choice; and what a form asks of tiles.

Imports no compiler.
"""

from __future__ import annotations

from ..group_sizes import MOST_GROUPS
from .form import SLAB_ROWS, Form


def limit(form: Form, n: int, k: int) -> str | None:
    """Why no kernel of this form takes weights of N rows and K columns, or None."""
    if n % SLAB_ROWS:
        return f"N must be a multiple of {SLAB_ROWS}, found {n}"
    if k % form.format.multiple:
        return f"K must be a multiple of {form.format.multiple}, found {k}"
    return None


def limit_of_groups(form: Form, groups: int, n: int, k: int) -> str | None:
    """Why no kernel of this form computes so many groups, each with weights of N rows and K columns, or None."""
    if groups > MOST_GROUPS:
        return f"the scheduler has room for {MOST_GROUPS} groups"
    if form.halves and n % (2 * SLAB_ROWS):
        return f"half of the rows of B are gates, so N must be a multiple of {2 * SLAB_ROWS}, found {n}"
    return limit(form, n, k)


def rule_of_halves(form: Form, tile_n: int) -> str | None:
    """Why a tile of so many rows of B cannot have whole slabs of gates and as many of ups, or None."""
    if form.halves and tile_n % (2 * SLAB_ROWS):
        return f"half of a tile's rows of B are gates, so tile_n comes in multiples of {2 * SLAB_ROWS}"
    return None
