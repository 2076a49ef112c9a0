"""What the choices of a grouped GEMM come to: a persistent kernel that makes some of them always alike.

Pure arithmetic. Knows nothing of which choices are legal (`choices`), and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..persistent.form import Form
from ..persistent.plan import Plan

# What a persistent GEMM may choose besides: tiles have all of K.
FIXED = {"split_k": 1, "stream_k": False, "nonpersistent": False, "order": "rows"}


def plan_of(options: Mapping[str, Any], form: Form) -> Plan:
    """The persistent kernel that these choices come to."""
    return Plan.of(all_choices(options), form)


def all_choices(options: Mapping[str, Any]) -> dict[str, Any]:
    """These and the choices that are always alike; with gathered rows, clusters share no rows of A or B."""
    return {"cluster_n": 1, **options, "cluster_m": 2 if options.get("share_b") else 1, **FIXED}
