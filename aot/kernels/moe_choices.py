"""Which choices the kernels around grouped GEMMs have, which go together, and what these kernels cannot serve.

Imports no compiler, and no kernel imports it.
"""

from __future__ import annotations

from .moe_sizes import MOST_EXPERTS, MOST_TOP_K

# Rows that a thread may have in flight: of numbers between, the compiler keeps some (20, 30) in local memory.
AT_ONCE = (1, 2, 4, 8, 16, 32)
_REGISTERS_PER_SM, _MOST_REGISTERS, _REGISTERS_TOGETHER = 1 << 16, 256, 8  # threads get them by so many
_REGISTERS_OF_ROW = 4  # the 16 bytes of it that a thread has loaded
_OTHER_REGISTERS = 36  # of a thread that adds rows up


def limit(top_k: int, experts: int = 1) -> str | None:
    """Why the kernels cannot serve so many experts, or so many of each token; None where they can."""
    if top_k > MOST_TOP_K:
        return f"there is room for {MOST_TOP_K} experts of each token"
    return f"there is room for {MOST_EXPERTS} experts" if experts > MOST_EXPERTS else None


def rule_of_combine(threads: int, at_once: int) -> str | None:
    """Why threads of blocks of so many cannot have so many rows in flight, or None: the compiler spills where these
    take more than half of a thread's registers, or leave too few."""
    each = _REGISTERS_PER_SM // threads
    registers = min(each - each % _REGISTERS_TOGETHER, _MOST_REGISTERS)
    of_rows = at_once * _REGISTERS_OF_ROW
    if of_rows > registers // 2 or of_rows + _OTHER_REGISTERS > registers:
        return f"{at_once} rows at once take {of_rows} of the {registers} registers that {threads} threads have each"
    return None
