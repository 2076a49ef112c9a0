"""The nodes of a launch program: checked, and compiled into Python steps.

Nothing here executes anything that came from a file: a node is looked up in the tables of `runtime.program.arithmetic`
and checked when it is read. Knows nothing of launches, pointers or kernels.
"""

from __future__ import annotations

from typing import Any

from ..container.fields import WIDTHS, exact_list, fail, is_int
from ..limits import MAX_LOOP_ROUNDS, MAX_LOOP_STEPS, MAX_LOOP_VARIABLES, MAX_LOOPS, MAX_NODES
from ..named_tuple import NamedTuple
from .arithmetic import (
    BINARY,
    CAST,
    COMPARE,
    FLAGS,
    OPERATIONS,
    UNARY_FLAGGED,
    Poison,
    Step,
    Values,
    poisoned,
    select,
    with_flags,
)

_MAX_SHARED_STEPS = 8_192


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
        if op in BINARY:  # what most are
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
        step = BINARY[op](width, a, b)
        if len(node) == 4:
            return step
        flags = exact_list(node[4], where)
        if len(flags) > len(FLAGS) or any(type(f) is not str or op not in FLAGS.get(f, ()) for f in flags):
            fail(where, f"{op} does not take the flags {flags!r:.200}")
        return with_flags(op, width, a, b, flags, step) if flags else step

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
            return select(width, condition, *(self.reference(r, where, width) for r in node[3:]))
        if op in COMPARE:
            exact_list(node, where, 4)
            if width != 1:
                fail(where, "a comparison gives 1 bit")
            a = self.reference(node[2], where)
            b = self.reference(node[3], where, self.widths[a])
            return COMPARE[op](self.widths[a], a, b)
        if op in CAST:
            exact_list(node, where, 3)
            a = self.reference(node[2], where)
            source = self.widths[a]
            if (width >= source) if op == "trunc" else (width <= source):
                fail(where, f"{op} from {source} to {width} bits")
            return CAST[op](width, a, source)
        exact_list(node, where, 4)
        a = self.reference(node[2], where, width)
        if not is_int(node[3], 0, 1):
            fail(where, f"the flag of {op} must be 0 or 1, found {node[3]!r:.50}")
        compute, flag = UNARY_FLAGGED[op], node[3]
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
            return poisoned("loop", "loop", width, limit, 0)

        return step
