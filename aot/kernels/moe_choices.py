"""What the kernels around grouped GEMMs have room for. Imports no compiler."""

from __future__ import annotations

MOST_EXPERTS = 512  # counts of each in shared memory, for each warp
MOST_TOP_K = 32


def limit(top_k: int, experts: int = 1) -> str | None:
    """Why the kernels cannot serve so many experts, or so many of each token; None where they can."""
    if top_k > MOST_TOP_K:
        return f"there is room for {MOST_TOP_K} experts of each token"
    return f"there is room for {MOST_EXPERTS} experts" if experts > MOST_EXPERTS else None
