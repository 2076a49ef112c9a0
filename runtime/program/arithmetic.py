"""Integer arithmetic as data: the nodes of a launch program, checked and compiled into Python steps.

Nothing here executes anything that came from a file: a node is looked up in fixed tables and checked when it is
read. Values are unsigned integers modulo 2^width, and operations have the semantics of their LLVM namesakes, or MLIR's
(ceildivsi and floordivsi, which come as eight operations of LLVM). Where LLVM says *poison* or undefined behaviour (a
flagged overflow, a division by zero, a loop past its bound), the value is a `Poison`, which spreads through arithmetic
and raises `ProgramError` once somebody needs it.

Knows nothing of launches, pointers or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..container.fields import WIDTHS, exact_list, fail, is_int
from ..errors import ProgramError
from ..limits import MAX_LOOP_ROUNDS, MAX_LOOP_STEPS, MAX_LOOP_VARIABLES, MAX_LOOPS, MAX_NODES
from ..named_tuple import NamedTuple
from .poison import signed, why

_MAX_SHARED_STEPS = 8_192
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


# --- operations: each entry builds a step (a function of the value list) from a width and operand numbers ---


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


def _poison(reason: str, op: str, width: int, x: int, y: int) -> Poison:
    return Poison(why(reason, op, width, x, y))


def _udiv(w: int, x: int, y: int) -> Any:
    return x // y if y else _poison("zero", "udiv", w, x, y)


def _urem(w: int, x: int, y: int) -> Any:
    return x % y if y else _poison("zero", "urem", w, x, y)


def _truncated_quotient(w: int, x: int, y: int) -> Any:
    sx, sy = signed(x, w), signed(y, w)
    if sy == 0:
        return _poison("zero", "sdiv", w, x, y)
    quotient = abs(sx) // abs(sy)
    quotient = -quotient if (sx < 0) != (sy < 0) else quotient
    if quotient >> (w - 1) == 1:
        return _poison("quotient", "sdiv", w, x, y)
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
            return _poison("zero", "sdiv", w, x, y)
        quotient = -(-sx // sy) if up else sx // sy
        if quotient >> (w - 1) == 1:
            return _poison("quotient", "sdiv", w, x, y)
        return quotient & ((1 << w) - 1)

    return compute


def _shl(w: int, x: int, y: int) -> Any:
    return (x << y) & ((1 << w) - 1) if y < w else _poison("shift", "shl", w, x, y)


def _lshr(w: int, x: int, y: int) -> Any:
    return x >> y if y < w else _poison("shift", "lshr", w, x, y)


def _ashr(w: int, x: int, y: int) -> Any:
    return (signed(x, w) >> y) & ((1 << w) - 1) if y < w else _poison("shift", "ashr", w, x, y)


def _compare(test: Callable[[Any, Any], Any], is_signed: bool) -> Callable[[int, int, int], Step]:
    def build(w: int, a: int, b: int) -> Step:
        sign = (1 << (w - 1)) if is_signed else 0
        return lambda v: test(v[a] ^ sign, v[b] ^ sign) & 1

    return build


def _select(w: int, c: int, a: int, b: int) -> Step:
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
        return _poison("ctlz", "ctlz", w, x, 1)
    return w - x.bit_length()


def _abs(w: int, x: int, minimum_is_poison: int) -> Any:
    value = abs(signed(x, w))
    if value >> (w - 1) and minimum_is_poison:
        return _poison("abs", "abs", w, x, 1)
    return value & ((1 << w) - 1)


def _extreme(pick: Callable[[int, int], int], is_signed: bool) -> Callable[[int, int, int], Step]:
    def compute(w: int, x: int, y: int) -> Any:
        return pick(signed(x, w), signed(y, w)) & ((1 << w) - 1) if is_signed else pick(x, y)

    return _checked(compute)


_BINARY: dict[str, Callable[[int, int, int], Step]] = {
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
_COMPARE: dict[str, Callable[[int, int, int], Step]] = {
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
_CAST: dict[str, Callable[[int, int, int], Step]] = {"trunc": _trunc, "zext": _zext, "sext": _sext}
_UNARY_FLAGGED: dict[str, Callable[[int, int, int], Any]] = {"ctlz": _ctlz, "abs": _abs}
_FLAGS = {
    "disjoint": ("or",),
    "nsw": ("add", "sub", "mul", "shl"),
    "nuw": ("add", "sub", "mul", "shl"),
    "exact": ("udiv", "sdiv", "lshr", "ashr"),
}

# The operands each kind of node takes after its name and width; `host_ir` writes them in this order.
OPERATIONS = (
    frozenset(_BINARY)
    | frozenset(_COMPARE)
    | frozenset(_CAST)
    | frozenset(_UNARY_FLAGGED)
    | {
        "const",
        "select",
        "loop",
    }
)


def _with_flags(op: str, w: int, a: int, b: int, flags: Sequence[str], step: Step) -> Step:
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
                    return _poison(flag, op, w, x, y)
            elif flag == "nuw":
                if exact_integer[op](x, y) != result:
                    return _poison(flag, op, w, x, y)
            elif flag == "disjoint":
                if x & y:
                    return _poison(flag, op, w, x, y)
            elif op.endswith("div"):
                if signed(x, w) % signed(y, w) if op == "sdiv" else x % y:
                    return _poison("multiple", op, w, x, y)
            elif x & ((1 << y) - 1):
                return _poison("power", op, w, x, y)
        return result

    return checked


# --- reading a program ---


class _Read(NamedTuple):
    """A node that was found right, where the values that it refers to have these widths."""

    step: Step
    width: int
    operands: tuple[tuple[int, int], ...]  # number and width


# Steps by node and the types in it (True equals 1): programs have most of theirs in common, and share the steps.
_shared: dict[tuple[Any, ...], _Read] = {}


class NodeReader:
    """Checks nodes one after the other and compiles each into a step; `widths[i]` is the width of value i.

    `inputs[i]` has a bit for each of the values given in the beginning that value i depends on.
    """

    def __init__(self, widths: list[int], inputs: list[int] | None = None) -> None:
        self.widths = widths
        self.inputs = [1 << i for i in range(len(widths))] if inputs is None else inputs
        self.count = self.loops = self.loop_steps = 0  # nodes, loops, and the most steps that these take
        self._touched = 0  # what the node at hand depends on
        self._operands: list[tuple[int, int]] = []  # the values it refers to, and their widths

    def reference(self, ref: Any, where: str, width: int | None = None) -> int:
        """A value number defined so far, of `width` bits if that is given."""
        if type(ref) is not int or not 0 <= ref < len(self.widths):
            fail(where, f"refers to value {ref!r:.50}, but only {len(self.widths)} are defined before it")
        found = self.widths[ref]
        if width is not None and found != width:
            fail(where, f"needs a {width}-bit value, value {ref} has {found} bits")
        self._touched |= self.inputs[ref]
        self._operands.append((ref, found))
        return ref

    def nodes(self, nodes: Any, where: str, in_loop: bool = False) -> list[Step]:
        """Check a list of nodes, number their values, and return the steps that compute them."""
        self.count += len(exact_list(nodes, where))
        if self.count > MAX_NODES:
            fail(where, f"more than {MAX_NODES} nodes")
        widths, inputs, steps = self.widths, self.inputs, []
        for number, node in enumerate(nodes):
            try:
                key = (*node, *map(type, node))
                read = _shared.get(key)
            except TypeError:  # a list inside, or no list at all
                key, read = None, None
            if read is not None:
                touched, defined = 0, len(widths)
                for ref, width in read.operands:
                    if ref >= defined or widths[ref] != width:
                        break
                    touched |= inputs[ref]
                else:
                    widths.append(read.width)
                    inputs.append(touched)
                    steps.append(read.step)
                    continue
            step = self.node(node, f"{where} {number}", in_loop)
            steps.append(step)
            if key is not None and len(_shared) < _MAX_SHARED_STEPS:
                _shared[key] = _Read(step, widths[-1], tuple(self._operands))
        return steps

    def node(self, node: Any, where: str, in_loop: bool = False) -> Step:
        """Check the next node, number its value, and return the step that computes it."""
        if type(node) is not list or len(node) < 3 or type(node[0]) is not str or node[0] not in OPERATIONS:
            fail(where, f"unknown operation {node!r:.200}")
        op, width = node[0], node[1]
        if type(width) is not int or width not in WIDTHS:
            fail(where, f"width must be one of {WIDTHS}, found {width!r:.50}")
        self._touched, self._operands = 0, []
        if op in _BINARY:  # what most are
            step = self._binary(op, width, node, where)
        elif op == "loop":
            if in_loop:
                fail(where, "a loop inside a loop")
            step = self._loop(node, width, where)
        else:
            step = self._simple(op, width, node, where)
        self.widths.append(width)
        self.inputs.append(self._touched)
        return step

    def _binary(self, op: str, width: int, node: list[Any], where: str) -> Step:
        """[op, width, a, b] or, with LLVM's flags, [op, width, a, b, [flags...]]."""
        if not 4 <= len(node) <= 5:
            exact_list(node, where, 4)
        a, b = self.reference(node[2], where, width), self.reference(node[3], where, width)
        step = _BINARY[op](width, a, b)
        if len(node) == 4:
            return step
        flags = exact_list(node[4], where)
        if len(flags) > len(_FLAGS) or any(type(f) is not str or op not in _FLAGS.get(f, ()) for f in flags):
            fail(where, f"{op} does not take the flags {flags!r:.200}")
        return _with_flags(op, width, a, b, flags, step) if flags else step

    def _simple(self, op: str, width: int, node: list[Any], where: str) -> Step:
        if op == "const":
            exact_list(node, where, 3)
            if not is_int(node[2], 0, (1 << width) - 1):
                fail(where, f"constant {node[2]!r:.50} does not fit {width} bits")
            constant = node[2]
            return lambda v: constant
        if op == "select":
            exact_list(node, where, 5)
            condition = self.reference(node[2], where, 1)
            return _select(width, condition, *(self.reference(r, where, width) for r in node[3:]))
        if op in _COMPARE:
            exact_list(node, where, 4)
            if width != 1:
                fail(where, "a comparison gives 1 bit")
            a = self.reference(node[2], where)
            b = self.reference(node[3], where, self.widths[a])
            return _COMPARE[op](self.widths[a], a, b)
        if op in _CAST:
            exact_list(node, where, 3)
            a = self.reference(node[2], where)
            source = self.widths[a]
            if (width >= source) if op == "trunc" else (width <= source):
                fail(where, f"{op} from {source} to {width} bits")
            return _CAST[op](width, a, source)
        exact_list(node, where, 4)
        a = self.reference(node[2], where, width)
        if not is_int(node[3], 0, 1):
            fail(where, f"the flag of {op} must be 0 or 1, found {node[3]!r:.50}")
        compute, flag = _UNARY_FLAGGED[op], node[3]
        return lambda v: v[a] if type(v[a]) is Poison else compute(width, v[a], flag)

    def _loop(self, node: list[Any], width: int, where: str) -> Step:
        """["loop", width, limit, result, [initial...], [head nodes...], test, [body nodes...], [next...]]."""
        exact_list(node, where, 9)
        _, _, limit, result, initial, head, test, body, following = node
        if not is_int(limit, 1, MAX_LOOP_ROUNDS):
            fail(where, f"a loop's bound must be 1 to {MAX_LOOP_ROUNDS}, found {limit!r:.50}")
        if not 1 <= len(exact_list(initial, where)) <= MAX_LOOP_VARIABLES:
            fail(where, f"a loop has 1 to {MAX_LOOP_VARIABLES} variables, found {len(initial)}")
        self.loops += 1
        if self.loops > MAX_LOOPS:
            fail(where, f"more than {MAX_LOOPS} loops")
        inits = [self.reference(r, where) for r in initial]
        base = len(self.widths)
        inner = NodeReader(self.widths + [self.widths[i] for i in inits], self.inputs + [0] * len(inits))
        inner.count = self.count
        head_steps = inner.nodes(head, f"{where} head", in_loop=True)
        test_ref = inner.reference(test, where, 1)
        body_steps = inner.nodes(body, f"{where} body", in_loop=True)
        exact_list(following, where, len(inits))
        nexts = [inner.reference(r, where, self.widths[i]) for r, i in zip(following, inits, strict=True)]
        self.count = inner.count
        self.loop_steps += limit * (1 + len(inits) + len(head) + len(body))
        if self.loop_steps > MAX_LOOP_STEPS:
            fail(where, f"its loops may take {self.loop_steps} steps, at most {MAX_LOOP_STEPS} are read")
        for ref in (test_ref, *nexts, *range(base, len(inner.inputs))):  # the variables' own are counted above
            self._touched |= inner.inputs[ref]
        if not is_int(result, 0, len(inits) - 1) or self.widths[inits[result]] != width:
            fail(where, f"result {result!r:.50} is not one of the loop's {len(inits)} variables of {width} bits")

        def step(v: Values) -> Any:
            state, inside = [v[i] for i in inits], v[:base]
            for _ in range(limit):
                inside[base:] = state
                for s in head_steps:
                    inside.append(s(inside))
                going = inside[test_ref]
                if type(going) is Poison:
                    return going
                if not going:
                    return state[result]
                for s in body_steps:
                    inside.append(s(inside))
                state = [inside[r] for r in nexts]
            return _poison("loop", "loop", width, limit, 0)

        return step
