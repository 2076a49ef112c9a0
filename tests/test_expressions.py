"""What the builder makes of expressions before it writes them: fewer nodes, and the same values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot.compile.host.expressions import Graph, Node, Writer
from runtime.program.arithmetic import Poison
from runtime.program.nodes import NodeReader

EDGES = (0, 1, 2, 127, 128, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


def rounded(graph: Graph, x: Node, divisor: int, up: bool, one: int | None = None, exact: bool = False) -> Node:
    """x / divisor as MLIR writes it; `one` is added in place of 1 or -1, `exact` flags the division."""
    d, zero = graph.const(32, divisor), graph.const(32, 0)
    quotient = graph.op("sdiv", 32, x, d, flags=("exact",) if exact else ())
    inexact = graph.op("ne", 1, x, graph.op("mul", 32, quotient, d))
    sign = graph.op("slt", 1, x, zero)
    if up:
        sign = graph.op("eq", 1, sign, graph.const(1, 0))
    step = (1 if up else -1) if one is None else one
    adjusted = graph.op("add", 32, quotient, graph.const(32, step))
    return graph.op("select", 32, graph.op("and", 1, inexact, sign), adjusted, quotient)


def written(node: Node) -> list[list[Any]]:
    writer = Writer([("x", 32)])
    writer.number(node)
    return writer.nodes


def value(nodes: list[list[Any]], x: int) -> Any:
    values = [x]
    for step in NodeReader([32]).nodes(nodes, "test"):
        values.append(step(values))
    return values[-1]


@given(st.integers(0, (1 << 32) - 1) | st.sampled_from(EDGES), st.integers(2, (1 << 31) - 1), st.booleans())
def test_division_that_rounds_is_one_node_with_the_same_value(x: int, divisor: int, up: bool) -> None:
    graph = Graph()
    nodes = written(rounded(graph, graph.input("x", 32), divisor, up))
    assert [node[0] for node in nodes] == ["const", "ceildivsi" if up else "floordivsi"]
    signed = x - ((x >> 31) << 32)
    expected = -(-signed // divisor) if up else signed // divisor
    assert value(nodes, x) == expected & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("divisor", "up", "more"),
    [
        (7, True, {"one": 2}),
        (7, True, {"one": -1}),
        (7, False, {"one": 1}),
        (7, True, {"exact": True}),
        (-7, True, {}),
        (-7, False, {}),
        (1 << 31, True, {}),
    ],
)
def test_what_only_looks_like_it_is_left_as_it_is(divisor: int, up: bool, more: dict[str, Any]) -> None:
    graph = Graph()
    nodes = written(rounded(graph, graph.input("x", 32), divisor, up, **more))
    assert {"sdiv", "select"} <= {node[0] for node in nodes}


@pytest.mark.parametrize("x", EDGES)
def test_a_constant_is_folded(x: int) -> None:
    graph = Graph()
    node = rounded(graph, graph.const(32, x), 5, up=True)
    signed = x - ((x >> 31) << 32)
    assert node.constant == -(-signed // 5) & 0xFFFFFFFF
    assert not isinstance(node.constant, Poison)
