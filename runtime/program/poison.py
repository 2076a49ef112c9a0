"""Why a value of a launch program is not defined, in words.

The reasons are LLVM's: `runtime.program.arithmetic` and native code find the same ones.
"""

from __future__ import annotations

from collections.abc import Callable


def signed(value: int, width: int) -> int:
    """The two's complement reading of an unsigned `width`-bit value."""
    sign = 1 << (width - 1)
    return (value ^ sign) - sign


def why(reason: str, op: str, width: int, x: int, y: int) -> str:
    """What `reason` means for the operation `op` on `width` bits and its operands, unsigned."""
    return _WORDS[reason](op, width, x, y)


def _overflow(op: str, width: int, x: int, y: int) -> str:
    return f"{x} {op} {y} overflows the {width}-bit arithmetic this kernel was compiled with"


_WORDS: dict[str, Callable[[str, int, int, int], str]] = {
    "zero": lambda op, w, x, y: "division by zero",
    "quotient": lambda op, w, x, y: f"signed division overflows {w} bits",
    "shift": lambda op, w, x, y: f"shift by {y} of a {w}-bit value",
    "nsw": lambda op, w, x, y: _overflow(op, w, signed(x, w), y if op == "shl" else signed(y, w)),
    "nuw": _overflow,
    "disjoint": lambda op, w, x, y: f"{x} and {y} share bits",
    "multiple": lambda op, w, x, y: f"{x} is not a multiple of {y}",
    "power": lambda op, w, x, y: f"{x} is not a multiple of 2^{y}",
    "ctlz": lambda op, w, x, y: "count of leading zeros of zero",
    "abs": lambda op, w, x, y: f"absolute value overflows {w} bits",
    "loop": lambda op, w, x, y: f"a loop did not end within {x} rounds: the extents are out of range",
}
