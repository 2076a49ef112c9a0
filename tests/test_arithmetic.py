"""Launch-program arithmetic has LLVM's semantics, and its reader takes nothing it does not know."""

from __future__ import annotations

import ctypes
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ProgramError, RecordError
from runtime.program.arithmetic import Poison
from runtime.program.nodes import NodeReader

SIGNED = {8: ctypes.c_int8, 16: ctypes.c_int16, 32: ctypes.c_int32, 64: ctypes.c_int64}


def evaluate(node: list[Any], operands: list[int], widths: list[int]) -> Any:
    return NodeReader(list(widths)).node(node, "test")(list(operands))


def unsigned(value: int, width: int) -> int:
    return value & ((1 << width) - 1)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[int, int, int]:
    width = draw(st.sampled_from([8, 16, 32, 64]))
    edge = st.sampled_from([0, 1, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1])
    number = st.one_of(edge, st.integers(0, (1 << width) - 1))
    return width, draw(number), draw(number)


@given(pairs())
def test_wrapping_operations_match_fixed_width_integers(case: tuple[int, int, int]) -> None:
    width, x, y = case
    sx, sy = SIGNED[width](x).value, SIGNED[width](y).value
    expected = {"add": sx + sy, "sub": sx - sy, "mul": sx * sy, "and": x & y, "or": x | y, "xor": x ^ y}
    for op, value in expected.items():
        assert evaluate([op, width, 0, 1], [x, y], [width, width]) == unsigned(value, width), op


@given(pairs())
def test_comparisons_match_fixed_width_integers(case: tuple[int, int, int]) -> None:
    width, x, y = case
    sx, sy = SIGNED[width](x).value, SIGNED[width](y).value
    expected = {"eq": x == y, "ne": x != y, "ult": x < y, "ule": x <= y, "ugt": x > y, "uge": x >= y}
    expected |= {"slt": sx < sy, "sle": sx <= sy, "sgt": sx > sy, "sge": sx >= sy}
    for op, value in expected.items():
        assert evaluate([op, 1, 0, 1], [x, y], [width, width]) == int(value), op


@given(pairs())
def test_division_truncates_and_is_undefined_where_llvm_says_so(case: tuple[int, int, int]) -> None:
    width, x, y = case
    sx, sy = SIGNED[width](x).value, SIGNED[width](y).value
    signed_undefined = sy == 0 or (sx == -(1 << (width - 1)) and sy == -1)
    quotient = 0 if sy == 0 else int(abs(sx) // abs(sy)) * (1 if (sx < 0) == (sy < 0) else -1)
    for op, undefined, value in (
        ("udiv", y == 0, 0 if y == 0 else x // y),
        ("urem", y == 0, 0 if y == 0 else x % y),
        ("sdiv", signed_undefined, quotient),
        ("srem", signed_undefined, sx - quotient * sy),
    ):
        result = evaluate([op, width, 0, 1], [x, y], [width, width])
        assert isinstance(result, Poison) if undefined else result == unsigned(value, width), op


@given(pairs())
def test_division_that_rounds_up_or_down_does_so_and_is_undefined_where_the_quotient_is(
    case: tuple[int, int, int],
) -> None:
    width, x, y = case
    sx, sy = SIGNED[width](x).value, SIGNED[width](y).value
    for op, rounded in (("ceildivsi", math.ceil), ("floordivsi", math.floor)):
        result = evaluate([op, width, 0, 1], [x, y], [width, width])
        if sy == 0 or (sx == -(1 << (width - 1)) and sy == -1):
            assert isinstance(result, Poison), op
        else:
            assert result == unsigned(rounded(Fraction(sx, sy)), width), op


@given(pairs())
def test_a_flagged_overflow_is_undefined(case: tuple[int, int, int]) -> None:
    width, x, y = case
    sx, sy = SIGNED[width](x).value, SIGNED[width](y).value
    result = evaluate(["mul", width, 0, 1, ["nsw"]], [x, y], [width, width])
    fits = -(1 << (width - 1)) <= sx * sy < 1 << (width - 1)
    assert result == unsigned(sx * sy, width) if fits else isinstance(result, Poison)


@given(st.integers(0, 255), st.integers(0, 255))
def test_shifts_past_the_width_are_undefined(x: int, by: int) -> None:
    for op, value in (("shl", x << by), ("lshr", x >> by), ("ashr", SIGNED[8](x).value >> by)):
        result = evaluate([op, 8, 0, 1], [x, by], [8, 8])
        assert result == unsigned(value, 8) if by < 8 else isinstance(result, Poison), op


@given(st.integers(0, 255))
def test_casts(x: int) -> None:
    assert evaluate(["sext", 32, 0], [x], [8]) == unsigned(SIGNED[8](x).value, 32)
    assert evaluate(["zext", 32, 0], [x], [8]) == x
    assert evaluate(["trunc", 1, 0], [x], [8]) == x & 1
    assert evaluate(["ctlz", 8, 0, 0], [x], [8]) == 8 - x.bit_length()


def log2_loop(limit: int = 64) -> list[Any]:
    """Variables (power, log) from (1, 0): while power < x, power *= 2 and log += 1; the result is log."""
    # values: 0 x, 1 one, 2 zero; in the loop 3 power, 4 log, 5 test, 6 two, 7 power * 2, 8 log + 1
    body = [["const", 32, 2], ["mul", 32, 3, 6], ["add", 32, 4, 1]]
    return ["loop", 32, limit, 1, [1, 2], [["ult", 1, 3, 0]], 5, body, [7, 8]]


@given(st.integers(1, 1 << 31))
def test_a_loop_computes_the_ceiling_of_log2(x: int) -> None:
    assert evaluate(log2_loop(), [x, 1, 0], [32, 32, 32]) == (x - 1).bit_length()


def test_a_loop_that_does_not_end_is_undefined() -> None:
    result = evaluate(log2_loop(), [(1 << 31) + 1, 1, 0], [32, 32, 32])
    assert isinstance(result, Poison)
    assert "did not end within 64 rounds" in result.reason


def test_poison_spreads_and_raises_when_used() -> None:
    poison = Poison("division by zero")
    for op in ("add", "mul", "and", "udiv", "shl", "smin"):
        assert evaluate([op, 32, 0, 1], [poison, 3], [32, 32]) is poison  # type: ignore[list-item]
    with pytest.raises(ProgramError, match="division by zero"):
        evaluate(["select", 32, 0, 1, 2], [poison, 1, 2], [1, 32, 32])  # type: ignore[list-item]


def test_poison_on_the_side_not_selected_does_no_harm() -> None:
    assert evaluate(["select", 32, 0, 1, 2], [0, Poison("x"), 7], [1, 32, 32]) == 7  # type: ignore[list-item]


@pytest.mark.parametrize(
    "node",
    [
        ["eval", 32, 0, 1],
        ["__class__", 32, 0],
        ["add", 32, 0],
        ["add", 32, 0, 1, 1],
        ["add", 32, 0, 2],
        ["add", 32, 0, -1],
        ["add", 32, 0, True],
        ["add", 64, 0, 1],
        ["add", 7, 0, 1],
        ["add", 32, 0, 1, ["fast"]],
        ["and", 32, 0, 1, ["nsw"]],
        ["const", 8, 256],
        ["const", 8, -1],
        ["const", 8, 1.0],
        ["select", 32, 0, 0, 1],
        ["eq", 32, 0, 1],
        ["trunc", 64, 0],
        ["zext", 32, 0],
        ["ctlz", 32, 0, 2],
        ["loop", 32, 1000, 0, [0], [], 0, [], [0]],
        ["loop", 32, 4, 1, [0], [["eq", 1, 0, 1]], 3, [], [0]],
        ["loop", 32, 4, 0, [0], [log2_loop()], 3, [], [0]],
        [],
        None,
        {"op": "add"},
    ],
)
def test_reader_refuses_a_malformed_node(node: Any) -> None:
    with pytest.raises(RecordError):
        NodeReader([32, 32]).node(node, "test")


def test_nodes_that_were_read_before_are_held_against_the_program_at_hand() -> None:
    """Steps are shared between programs, but only where the values they refer to are of the same widths."""
    nodes = [["const", 32, 1], ["eq", 1, 0, 1], ["select", 32, 2, 0, 1]]
    for _ in range(2):
        values: list[Any] = [7]
        reader = NodeReader([32])
        for step in reader.nodes(nodes, "test"):
            values.append(step(values))
        assert (values, reader.widths, reader.inputs) == ([7, 1, 0, 1], [32, 32, 1, 32], [1, 0, 1, 1])
    shared = NodeReader([32]).nodes(nodes[:1], "test"), NodeReader([32]).nodes(nodes[:1], "test")
    assert shared[0][0] is shared[1][0]
    with pytest.raises(RecordError, match="needs a 64-bit value"):
        NodeReader([64]).nodes(nodes, "test")
    with pytest.raises(RecordError, match="only 0 are defined"):
        NodeReader([]).nodes(nodes[1:], "test")
    for equal in (["const", 32, True], ["const", 32, 1.0], ["eq", True, 0, 1]):
        with pytest.raises(RecordError):
            NodeReader([32, 32]).nodes([equal], "test")
