"""Which choices a grouped GEMM has, and which go together for a form, as pure arithmetic.

Knows nothing of how a kernel is made (`plan` says what choices come to), and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..persistent import choices as persistent
from ..persistent.form import Form
from .plan import FIXED, MOST_GROUPS

OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "schedule": ("cooperative", "pingpong"),
    "swap": (False, True),  # rows of B on WGMMA's M side, and tokens on its N side, where a tile of 8 wastes nothing
    "tile_m": (8, 16, 32, 64, 128, 192, 256),  # rows of A
    "tile_n": (64, 128, 192, 256),  # rows of B
    "cluster_n": (1, 2),  # tiles of the same rows of A, whose CTAs load a share of them each and multicast it
    # What may happen before the kernel before this one ends: nothing, or all but reading and writing ("launch").
    "overlap": ("serial", "launch"),
}


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together in a kernel of this form, or None: what the hardware and
    this kernel demand."""
    if form.scaling != "none":
        return "scales are not taken by groups"
    return persistent.rule({**options, **FIXED}, form)


def limit(groups: int) -> str | None:
    """Why so many groups are not served, or None."""
    return f"the scheduler has room for {MOST_GROUPS} groups" if groups > MOST_GROUPS else None


def hopeless(options: Mapping[str, Any]) -> bool:
    """Whether no form admits these choices, which are the first of `OPTIONS`, whatever the others are."""
    return persistent.hopeless(options)
