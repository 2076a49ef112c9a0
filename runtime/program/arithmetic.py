"""The integer arithmetic of launch programs: for each operation that a node may name, the step that computes it.

Values are unsigned integers modulo 2^width, and operations have the semantics of their LLVM namesakes, or MLIR's
(ceildivsi and floordivsi, which come as eight operations of LLVM). Where LLVM says *poison* or undefined behaviour (a
flagged overflow, a division by zero, a loop past its bound), the value is a `Poison`, which spreads through arithmetic
and raises `ProgramError` once somebody needs it.

Knows nothing of how programs are read (`runtime.program.nodes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ProgramError
from .poison import signed, why

Values = list[Any]
Step = Callable[[Values], Any]


class Poison:
    """A value LLVM leaves undefined. Arithmetic on it gives it again; using it raises."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def _again(self, _other: object) -> Poison:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _again
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _again
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _again
    __lt__ = __le__ = __gt__ = __ge__ = _again
    __eq__ = __ne__ = _again  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ProgramError(self.reason)

    def __index__(self) -> int:
        raise ProgramError(self.reason)


# Each of these builds a step (a function of the value list) from a width and operand numbers.


def _add(w: int, a: int, b: int) -> Step:
    mask = (1 << w) - 1
    return lambda v: (v[a] + v[b]) & mask


def _sub(w: int, a: int, b: int) -> Step:
    mask = (1 << w) - 1
    return lambda v: (v[a] - v[b]) & mask


def _mul(w: int, a: int, b: int) -> Step:
    mask = (1 << w) - 1
    return lambda v: (v[a] * v[b]) & mask


def _and(w: int, a: int, b: int) -> Step:
    return lambda v: v[a] & v[b]


def _or(w: int, a: int, b: int) -> Step:
    return lambda v: v[a] | v[b]


def _xor(w: int, a: int, b: int) -> Step:
    return lambda v: v[a] ^ v[b]


def _checked(compute: Callable[[int, int, int], Any]) -> Callable[[int, int, int], Step]:
    """An operation defined only on some operands: `compute(width, x, y)` returns a value or a `Poison`."""

    def build(w: int, a: int, b: int) -> Step:
        def step(v: Values) -> Any:
            x, y = v[a], v[b]
            if type(x) is Poison:
                return x
            if type(y) is Poison:
                return y
            return compute(w, x, y)

        return step

    return build


def poisoned(reason: str, op: str, width: int, x: int, y: int) -> Poison:
    """What an operation gives where LLVM leaves its value undefined."""
    return Poison(why(reason, op, width, x, y))


def _udiv(w: int, x: int, y: int) -> Any:
    return x // y if y else poisoned("zero", "udiv", w, x, y)


def _urem(w: int, x: int, y: int) -> Any:
    return x % y if y else poisoned("zero", "urem", w, x, y)


def _truncated_quotient(w: int, x: int, y: int) -> Any:
    sx, sy = signed(x, w), signed(y, w)
    if sy == 0:
        return poisoned("zero", "sdiv", w, x, y)
    quotient = abs(sx) // abs(sy)
    quotient = -quotient if (sx < 0) != (sy < 0) else quotient
    if quotient >> (w - 1) == 1:
        return poisoned("quotient", "sdiv", w, x, y)
    return quotient


def _sdiv(w: int, x: int, y: int) -> Any:
    quotient = _truncated_quotient(w, x, y)
    return quotient if type(quotient) is Poison else quotient & ((1 << w) - 1)


def _srem(w: int, x: int, y: int) -> Any:
    quotient = _truncated_quotient(w, x, y)
    if type(quotient) is Poison:
        return quotient
    return (signed(x, w) - quotient * signed(y, w)) & ((1 << w) - 1)


def _rounded_quotient(up: bool) -> Callable[[int, int, int], Any]:
    """Signed division that rounds towards positive or negative infinity."""

    def compute(w: int, x: int, y: int) -> Any:
        sx, sy = signed(x, w), signed(y, w)
        if sy == 0:
            return poisoned("zero", "sdiv", w, x, y)
        quotient = -(-sx // sy) if up else sx // sy
        if quotient >> (w - 1) == 1:
            return poisoned("quotient", "sdiv", w, x, y)
        return quotient & ((1 << w) - 1)

    return compute


def _shl(w: int, x: int, y: int) -> Any:
    return (x << y) & ((1 << w) - 1) if y < w else poisoned("shift", "shl", w, x, y)


def _lshr(w: int, x: int, y: int) -> Any:
    return x >> y if y < w else poisoned("shift", "lshr", w, x, y)


def _ashr(w: int, x: int, y: int) -> Any:
    return (signed(x, w) >> y) & ((1 << w) - 1) if y < w else poisoned("shift", "ashr", w, x, y)


def _compare(test: Callable[[Any, Any], Any], is_signed: bool) -> Callable[[int, int, int], Step]:
    def build(w: int, a: int, b: int) -> Step:
        sign = (1 << (w - 1)) if is_signed else 0
        return lambda v: test(v[a] ^ sign, v[b] ^ sign) & 1

    return build


def select(w: int, c: int, a: int, b: int) -> Step:
    """The step of a choice: value `a` where value `c` is 1, else value `b`."""
    return lambda v: v[a] if v[c] else v[b]


def _trunc(w: int, a: int, _source: int) -> Step:
    mask = (1 << w) - 1
    return lambda v: v[a] & mask


def _zext(w: int, a: int, _source: int) -> Step:
    return lambda v: v[a]


def _sext(w: int, a: int, source: int) -> Step:
    sign, mask = 1 << (source - 1), (1 << w) - 1
    return lambda v: ((v[a] ^ sign) - sign) & mask


def _ctlz(w: int, x: int, zero_is_poison: int) -> Any:
    if x == 0 and zero_is_poison:
        return poisoned("ctlz", "ctlz", w, x, 1)
    return w - x.bit_length()


def _abs(w: int, x: int, minimum_is_poison: int) -> Any:
    value = abs(signed(x, w))
    if value >> (w - 1) and minimum_is_poison:
        return poisoned("abs", "abs", w, x, 1)
    return value & ((1 << w) - 1)


def _extreme(pick: Callable[[int, int], int], is_signed: bool) -> Callable[[int, int, int], Step]:
    def compute(w: int, x: int, y: int) -> Any:
        return pick(signed(x, w), signed(y, w)) & ((1 << w) - 1) if is_signed else pick(x, y)

    return _checked(compute)


BINARY: dict[str, Callable[[int, int, int], Step]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "udiv": _checked(_udiv),
    "sdiv": _checked(_sdiv),
    "urem": _checked(_urem),
    "srem": _checked(_srem),
    "ceildivsi": _checked(_rounded_quotient(True)),
    "floordivsi": _checked(_rounded_quotient(False)),
    "shl": _checked(_shl),
    "lshr": _checked(_lshr),
    "ashr": _checked(_ashr),
    "umin": _extreme(min, False),
    "umax": _extreme(max, False),
    "smin": _extreme(min, True),
    "smax": _extreme(max, True),
}
COMPARE: dict[str, Callable[[int, int, int], Step]] = {
    "eq": _compare(lambda x, y: x == y, False),
    "ne": _compare(lambda x, y: x != y, False),
    "ult": _compare(lambda x, y: x < y, False),
    "ule": _compare(lambda x, y: x <= y, False),
    "ugt": _compare(lambda x, y: x > y, False),
    "uge": _compare(lambda x, y: x >= y, False),
    "slt": _compare(lambda x, y: x < y, True),
    "sle": _compare(lambda x, y: x <= y, True),
    "sgt": _compare(lambda x, y: x > y, True),
    "sge": _compare(lambda x, y: x >= y, True),
}
CAST: dict[str, Callable[[int, int, int], Step]] = {"trunc": _trunc, "zext": _zext, "sext": _sext}
UNARY_FLAGGED: dict[str, Callable[[int, int, int], Any]] = {"ctlz": _ctlz, "abs": _abs}
FLAGS = {
    "disjoint": ("or",),
    "nsw": ("add", "sub", "mul", "shl"),
    "nuw": ("add", "sub", "mul", "shl"),
    "exact": ("udiv", "sdiv", "lshr", "ashr"),
}

# The operands each kind of node takes after its name and width; `host_ir` writes them in this order.
OPERATIONS = (
    frozenset(BINARY)
    | frozenset(COMPARE)
    | frozenset(CAST)
    | frozenset(UNARY_FLAGGED)
    | {
        "const",
        "select",
        "loop",
    }
)


def with_flags(op: str, w: int, a: int, b: int, flags: Sequence[str], step: Step) -> Step:
    """`step`, or poison where one of LLVM's overflow flags says the result is undefined."""
    exact_integer = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "shl": lambda x, y: x << y,
    }

    def checked(v: Values) -> Any:
        result = step(v)
        if type(result) is Poison:
            return result
        x, y = v[a], v[b]
        for flag in flags:
            if flag == "nsw":
                sx, sy = signed(x, w), y if op == "shl" else signed(y, w)
                if exact_integer[op](sx, sy) != signed(result, w):
                    return poisoned(flag, op, w, x, y)
            elif flag == "nuw":
                if exact_integer[op](x, y) != result:
                    return poisoned(flag, op, w, x, y)
            elif flag == "disjoint":
                if x & y:
                    return poisoned(flag, op, w, x, y)
            elif op.endswith("div"):
                if signed(x, w) % signed(y, w) if op == "sdiv" else x % y:
                    return poisoned("multiple", op, w, x, y)
            elif x & ((1 << y) - 1):
                return poisoned("power", op, w, x, y)
        return result

    return checked
