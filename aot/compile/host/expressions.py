"""Expressions of a launch program under construction: a graph with equal nodes shared and constants folded.

Folding runs the very steps that the runtime will run (`runtime.program.arithmetic`), so both agree by construction.
Knows nothing of the IR the expressions come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.program.arithmetic import Poison
from runtime.program.nodes import NodeReader

from .types import HostIRError

LOOP_LIMIT = 64  # rounds; the loops seen are integer log2 of 32-bit values


@dataclass(frozen=True, eq=False)
class Node:
    """One value. `op` is an operation of `runtime.program.arithmetic`, or "input", "variable" or "undefined".

    Nodes are made by a `Graph`, which keeps one object for equal nodes: identity is equality.
    """

    op: str
    width: int
    operands: tuple[Any, ...]
    in_loop: Loop | None = None

    @property
    def constant(self) -> int | None:
        """The value of a constant, else None."""
        return self.operands[0] if self.op == "const" else None


@dataclass(eq=False)
class Loop:
    """A loop: while `test`, each variable takes its `following` value. The variables are nodes of op "variable"."""

    initial: tuple[Node, ...]
    variables: tuple[Node, ...] = ()
    test: Node | None = None
    following: tuple[Node, ...] = ()


class Graph:
    """Makes nodes and writes those that are needed as a launch program's node list."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[Any, ...], Node] = {}

    def _make(self, op: str, width: int, operands: tuple[Any, ...]) -> Node:
        key = (op, width, tuple(id(x) if isinstance(x, Node | Loop) else x for x in operands))
        node = self._nodes.get(key)
        if node is None:
            loop = next((x.in_loop for x in operands if isinstance(x, Node) and x.in_loop), None)
            node = self._nodes[key] = Node(op, width, operands, loop)
        return node

    def const(self, width: int, value: int) -> Node:
        """The constant `value`, modulo 2^width."""
        return self._make("const", width, (value & ((1 << width) - 1),))

    def input(self, name: str, width: int) -> Node:
        """An input of the program."""
        return self._make("input", width, (name,))

    def loop(self, initial: tuple[Node, ...]) -> Loop:
        """A new loop with fresh variables; the caller sets `test` and `following`."""
        if any(n.in_loop for n in initial):
            raise HostIRError("a loop inside a loop")
        loop = Loop(initial)
        loop.variables = tuple(Node("variable", n.width, (i,), loop) for i, n in enumerate(initial))
        return loop

    def loop_result(self, loop: Loop, index: int) -> Node:
        """What variable `index` holds when the loop has ended."""
        return self._make("loop", loop.initial[index].width, (loop, index))

    def op(self, op: str, width: int, *operands: Any, flags: tuple[str, ...] = ()) -> Node:
        """An operation on nodes (the last operand of ctlz and abs is a plain flag), folded where possible."""
        nodes = [x for x in operands if isinstance(x, Node)]
        if all(n.op == "const" for n in nodes):
            folded = self._fold(op, width, operands, flags)
            if folded is not None:
                return folded
        simple = self._simplify(op, width, operands)
        return simple if simple is not None else self._make(op, width, (*operands, *((flags,) if flags else ())))

    def _fold(self, op: str, width: int, operands: tuple[Any, ...], flags: tuple[str, ...]) -> Node | None:
        nodes = [x for x in operands if isinstance(x, Node)]
        reader = NodeReader([n.width for n in nodes])
        numbered = iter(range(len(nodes)))
        encoded = [op, width, *(next(numbered) if isinstance(x, Node) else x for x in operands)]
        value = reader.node(encoded + ([list(flags)] if flags else []), "folding")([n.constant for n in nodes])
        return None if type(value) is Poison else self.const(width, value)

    def _simplify(self, op: str, width: int, operands: tuple[Any, ...]) -> Node | None:
        if op == "select":
            condition, a, b = operands
            if condition.constant is not None:
                return a if condition.constant else b
            return a if a is b else self._rounded_division(condition, a, b)
        if op in ("zext", "sext", "trunc", "ctlz", "abs"):
            return None
        a, b = operands
        if op in ("add", "or", "xor", "sub", "shl", "lshr", "ashr") and b.constant == 0:
            return a
        if op in ("add", "or", "xor") and a.constant == 0:
            return b
        if op in ("mul", "udiv", "sdiv") and b.constant == 1 and width > 1:
            return a
        if op == "mul" and a.constant == 1:
            return b
        if op in ("mul", "and") and 0 in (a.constant, b.constant):
            return self.const(width, 0)
        return None

    def _rounded_division(self, condition: Node, adjusted: Node, quotient: Node) -> Node | None:
        """x / d rounded up or down, for a constant d > 0, if that is what `condition ? adjusted : quotient` comes to.

        MLIR writes it as q = x sdiv d; (x != q * d and x >= 0) ? q + 1 : q, and as (x != q * d and x < 0) ? q - 1 : q.
        """
        if quotient.op != "sdiv" or len(quotient.operands) != 2:
            return None
        x, d = quotient.operands
        if d.constant is None or not 0 < d.constant < 1 << (d.width - 1):
            return None
        product, zero = self._make("mul", x.width, (quotient, d)), self.const(x.width, 0)
        inexact, negative = self._make("ne", 1, (x, product)), self._make("slt", 1, (x, zero))
        not_negative = self._make("eq", 1, (negative, self.const(1, 0)))
        for op, one, sign in (("ceildivsi", 1, not_negative), ("floordivsi", -1, negative)):
            next_one = self._make("add", x.width, (quotient, self.const(x.width, one)))
            if adjusted is next_one and condition is self._make("and", 1, (inexact, sign)):
                return self._make(op, x.width, (x, d))
        return None


class Writer:
    """Numbers nodes in the order they are needed, after the program's inputs, and collects the node list."""

    def __init__(self, inputs: list[tuple[str, int]]) -> None:
        self._numbers: dict[int, int] = {}
        self._inputs = {name: i for i, (name, _) in enumerate(inputs)}
        self._count = len(inputs)
        self.nodes: list[list[Any]] = []

    def number(self, node: Node) -> int:
        """The value number of `node`, which is written first if it has not been."""
        if node.op == "input":
            return self._inputs[node.operands[0]]
        if node.op == "undefined":
            raise HostIRError("a launch depends on an undefined value")
        known = self._numbers.get(id(node))
        if known is not None:
            return known
        if node.op == "loop":
            encoded = self._loop(node)
        else:
            encoded = [node.op, node.width, *(self._operand(x) for x in node.operands)]
        self.nodes.append(encoded)
        self._numbers[id(node)] = self._count
        self._count += 1
        return self._numbers[id(node)]

    def _operand(self, x: Any) -> Any:
        return self.number(x) if isinstance(x, Node) else list(x) if isinstance(x, tuple) else x

    def _loop(self, node: Node) -> list[Any]:
        loop, index = node.operands
        assert loop.test is not None
        for outer in self._outside(loop):
            self.number(outer)
        initial = [self.number(n) for n in loop.initial]
        inner = Writer([])
        inner._inputs, inner._numbers = self._inputs, dict(self._numbers)
        for i, variable in enumerate(loop.variables):
            inner._numbers[id(variable)] = self._count + i
        inner._count = self._count + len(loop.variables)
        test = inner.number(loop.test)
        head, inner.nodes = inner.nodes, []
        following = [inner.number(n) for n in loop.following]
        return ["loop", node.width, LOOP_LIMIT, index, initial, head, test, inner.nodes, following]

    def _outside(self, loop: Loop) -> list[Node]:
        """The nodes a loop's body needs from outside it, so that they are written before the loop."""
        found: list[Node] = []
        seen: set[int] = set()

        def walk(node: Node) -> None:
            if id(node) in seen:
                return
            seen.add(id(node))
            if node.in_loop is not loop:
                if node.op != "input":
                    found.append(node)
                return
            for x in node.operands:
                if isinstance(x, Node):
                    walk(x)

        for node in (loop.test, *loop.following):
            if node is not None:
                walk(node)
        return found
