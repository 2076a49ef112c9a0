"""What a form and its options come to: the plan of a GEMM of 4-bit weights, and where groups' rows and tiles begin.

Pure arithmetic; knows nothing of which options are legal (`choices`), and imports no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...group_sizes import GROUPS_BYTES
from ..w4.plan import Plan as W4Plan


@dataclass(frozen=True)
class Plan(W4Plan):
    """All that a kernel is specialised on: `choices.OPTIONS`, and the form."""

    @property
    def shared_bytes(self) -> int:
        """Of a CTA's shared memory."""
        return self.tile_bytes + GROUPS_BYTES
