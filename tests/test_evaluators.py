"""Native code gives what Python gives, reason for reason, and accepts nothing that Python does not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import native
from runtime.container.fields import WIDTHS
from runtime.device.launch import Evaluation, Launch
from runtime.errors import ProgramError, RecordError
from runtime.program.arithmetic import BINARY, CAST, COMPARE, FLAGS, OPERATIONS, UNARY_FLAGGED
from runtime.program.evaluator import PythonEvaluator
from runtime.program.program import NativeEvaluator

from .examples import few_or_many, run_examples

pytestmark = pytest.mark.skipif(native._native is None, reason="runtime._native was not built")
INPUTS = tuple((f"x{i}", width) for i, width in enumerate((32, 32, 64, 64, 8, 16, 1)))
POINTERS = 2
CONSTANTS = [(32, 1), (64, 1024), (32, 128), (64, 0)]  # the grid, shared memory and block of programs that need any


def numbers(width: int) -> st.SearchStrategy[int]:
    top = (1 << width) - 1
    edges = st.sampled_from([0, 1, min(2, top), min(7, top), top >> 1, min((top >> 1) + 1, top), top])
    return edges | st.integers(0, top)


class Nodes:
    """Nodes that are drawn one by one, and the widths of all values so far."""

    def __init__(self, draw: st.DrawFn, widths: list[int]) -> None:
        self.draw, self.widths = draw, widths
        self.made: list[list[Any]] = []

    def any_of(self, width: int | None = None) -> int | None:
        fitting = [i for i, w in enumerate(self.widths) if width in (None, w)]
        return self.draw(st.sampled_from(fitting)) if fitting else None

    def add(self, in_loop: bool = False) -> None:
        op = self.draw(st.sampled_from(sorted(OPERATIONS - ({"loop"} if in_loop else set()))))
        width = self.draw(st.sampled_from(WIDTHS))
        node = [op, 1 if op in COMPARE else width, *self.operands(op, width, in_loop)]
        if None not in node:
            self.made.append(node)
            self.widths.append(node[1])

    def operands(self, op: str, width: int, in_loop: bool) -> Iterator[Any]:
        draw = self.draw
        if op == "const":
            yield draw(numbers(width))
        elif op in BINARY:
            yield from (self.any_of(width), self.any_of(width))
            flags = [flag for flag, ops in FLAGS.items() if op in ops]
            if draw(st.booleans()):
                yield draw(st.lists(st.sampled_from(flags or [""]), unique=True, max_size=2 if flags else 0))
        elif op in COMPARE:
            yield from (self.any_of(width), self.any_of(width))
        elif op in CAST:
            sources = [w for w in WIDTHS if (w > width if op == "trunc" else w < width)]
            yield self.any_of(draw(st.sampled_from(sources))) if sources else None
        elif op in UNARY_FLAGGED:
            yield from (self.any_of(width), draw(st.integers(0, 1)))
        elif op == "select":
            yield from (self.any_of(1), self.any_of(width), self.any_of(width))
        else:
            yield from self.loop(width)

    def loop(self, width: int) -> Iterator[Any]:
        draw = self.draw
        first = [self.any_of(width), *(self.any_of() for _ in range(draw(st.integers(0, 2))))]
        if None in first:
            yield None
            return
        inside = Nodes(draw, self.widths + [self.widths[i] for i in first if i is not None])
        for _ in range(draw(st.integers(0, 3))):
            inside.add(in_loop=True)
        head, inside.made, test = inside.made, [], inside.any_of(1)
        for _ in range(draw(st.integers(0, 3))):
            inside.add(in_loop=True)
        following = [inside.any_of(self.widths[i]) for i in first if i is not None]
        yield from (draw(st.integers(1, 5)), 0, first, head, test, inside.made, following)


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    """Nodes and launches, of which most can be evaluated."""
    nodes = Nodes(draw, [width for _, width in INPUTS])
    for width, value in CONSTANTS:
        nodes.made.append(["const", width, value])
        nodes.widths.append(width)
    one, bytes_, threads = (len(INPUTS) + i for i in range(3))
    for _ in range(draw(st.integers(1, 24))):
        nodes.add()
    launches = []
    for kernel in range(draw(st.integers(1, 2))):
        words, slots = [], []
        for place in range(draw(st.integers(0, 6))):
            ref = nodes.any_of()
            assert ref is not None
            words.append([8 * place, max(nodes.widths[ref] // 8, 1), ref])
        for place in range(draw(st.integers(0, 2))):
            addend = nodes.any_of(64) if draw(st.booleans()) else None
            slots.append([64 + 8 * place, draw(st.sampled_from(["raw", "tma"])), draw(st.integers(0, 1)), addend])
        grid = [draw(st.sampled_from([one, one, nodes.any_of(32)])), one, one]
        attributes = [[4, [one, one, nodes.any_of(32)]], [6, [one]]][: draw(st.integers(0, 2))]
        block = [threads, one, draw(st.sampled_from([one, one, one, nodes.any_of(32)]))]
        parameters = [{"size": 81, "words": words, "slots": slots}, {"size": 3, "words": [], "slots": []}]
        launches.append(
            {
                "kernel": kernel,
                "grid": grid,
                "block": block,
                "shared_bytes": draw(st.sampled_from([bytes_, bytes_, nodes.any_of(64)])),
                "attributes": attributes,
                "parameters": parameters[: draw(st.integers(0, 2))],
            }
        )
    return {"nodes": nodes.made, "launches": launches}


def python(program: dict[str, Any]) -> PythonEvaluator:
    return PythonEvaluator.from_json(INPUTS, program["nodes"], program["launches"], POINTERS, 2)


def compiled(program: dict[str, Any]) -> NativeEvaluator | None:
    widths = [width for _, width in INPUTS]
    found = native._native.Program.read(widths, program["nodes"], program["launches"], POINTERS, 2)
    return None if found is None else NativeEvaluator(INPUTS, found)


def every_node(nodes: list[Any]) -> Iterator[list[Any]]:
    """Those of loops too."""
    for node in nodes:
        yield node
        if node[0] == "loop":
            yield from (*every_node(node[5]), *every_node(node[7]))


def launches_of(
    evaluator: NativeEvaluator | PythonEvaluator, values: tuple[int, ...], last: Evaluation | None = None
) -> tuple[Launch, ...] | str:
    try:
        return evaluator.evaluate(values, last).launches
    except ProgramError as error:
        return str(error)


def all_inputs() -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*(numbers(width) for _, width in INPUTS))


@few_or_many(100, 400)
def test_native_code_launches_what_python_does(examples: int) -> None:
    inputs = st.lists(all_inputs(), min_size=1, max_size=4)
    run_examples(examples, launches_alike, program=programs(), inputs=inputs)


def launches_alike(program: dict[str, Any], inputs: list[tuple[int, ...]]) -> None:
    ours, theirs = compiled(program), python(program)
    if ours is None:  # it leaves to Python which of two flags that fail was first
        assert any(node[4:] == [["nuw", "nsw"]] for node in every_node(program["nodes"]))
        return
    assert ours.launches == theirs.launches
    assert ours.steps == theirs.steps
    last = None
    for values in inputs:
        found = launches_of(ours, values)
        assert found == launches_of(theirs, values)
        assert found == launches_of(theirs, values, last)
        if not isinstance(found, str):
            last = theirs.evaluate(values, last)


@settings(max_examples=100, deadline=None)
@given(programs(), all_inputs(), all_inputs())
def test_an_evaluation_that_is_said_to_differ_little_does(
    program: dict[str, Any], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    ours = compiled(program)
    if ours is None:
        return
    try:
        last = ours.evaluate(first, None)
        now = ours.evaluate(second, last)
    except ProgramError:
        return
    rest = [[(x.block, x.shared_bytes, x.attributes, x.slots) for x in e.launches] for e in (last, now)]
    assert now.small is (rest[0] == rest[1])


WORDS = ["", "add", "add\0", "const\0x", "const", "nsw", "nsw\0", "tma", "tma\0", "\ud800"]
JUNK: list[Any] = [*WORDS, None, True, -1, 0, 1, 3, 33, 64, 1 << 64, 2.0, [], [0], [[]], {}, {"a": 1}]


def places(obj: Any) -> Iterator[tuple[Any, Any]]:
    """Every list and dictionary, with each of its indices."""
    items = enumerate(obj) if isinstance(obj, list) else obj.items() if isinstance(obj, dict) else ()
    for key, value in items:
        yield obj, key
        yield from places(value)


@few_or_many(150, 600)
def test_native_code_accepts_nothing_that_python_does_not(examples: int) -> None:
    run_examples(examples, refuses_alike, program=programs(), data=st.data())


def refuses_alike(program: dict[str, Any], data: st.DataObject) -> None:
    damaged = copy.deepcopy(program)
    where, key = data.draw(st.sampled_from([*places(damaged["nodes"]), *places(damaged["launches"])]))
    how = data.draw(st.sampled_from(["junk", "number", "gone", "twice"]))
    if how == "gone":
        del where[key]
    elif how == "twice" and isinstance(where, list):
        where.insert(key, where[key])
    elif how == "number" and type(where[key]) is int:
        where[key] += data.draw(st.sampled_from([-64, -8, -1, 1, 8, 64, 1 << 32]))
    else:
        where[key] = data.draw(st.sampled_from(JUNK))
    ours = compiled(damaged)
    if ours is None:
        return
    try:
        theirs = python(damaged)
    except RecordError as error:
        pytest.fail(f"native code accepted {damaged}: {error}")
    values = data.draw(all_inputs())
    assert ours.launches == theirs.launches
    assert launches_of(ours, values) == launches_of(theirs, values)


def test_each_poison_keeps_its_own_reason() -> None:
    """However many there are: of values, and of the rounds of loops, where nobody needs them."""
    many = [["udiv", 32, 0, 1]] * 400
    loop = ["loop", 32, 256, 0, [0, 1], [["udiv", 32, 0, 1], ["uge", 1, 0, 1]], 410, [], [407, 408]]
    last: list[list[Any]] = [["shl", 32, 0, 0], ["const", 32, 1], ["const", 64, 0]]
    first = len(INPUTS) + len(many)
    for nodes in ([*many, *last], [*many, loop, *last]):
        where = first + len(nodes) - len(many) - 3
        parts = {"grid": [where, where + 1, where + 1], "block": [where + 1] * 3, "shared_bytes": where + 2}
        program = {"nodes": nodes, "launches": [launch(**parts)]}
        ours = compiled(program)
        assert ours is not None
        values = (77, 0, 0, 0, 0, 0, 0)
        assert launches_of(ours, values) == launches_of(python(program), values) == "shift by 77 of a 32-bit value"


def test_an_exact_division_is_one_of_signed_numbers() -> None:
    nodes = [["const", 32, 1], ["const", 64, 0], ["sdiv", 32, 0, 1, ["exact"]]]
    words = [[0, 4, len(INPUTS) + 2]]
    program = {"nodes": nodes, "launches": [launch(parameters=[{"size": 4, "words": words, "slots": []}])]}
    ours = compiled(program)
    assert ours is not None
    for x, y, quotient in ((-6, 3, -2), (6, -3, -2), (-4, 3, None)):
        values = (x, y, 0, 0, 0, 0, 0)
        found = launches_of(ours, values)
        assert found == launches_of(python(program), values)
        if quotient is None:
            assert isinstance(found, str)
            assert "is not a multiple" in found
        else:
            assert not isinstance(found, str)
            assert int.from_bytes(found[0].parameters[:4], "little", signed=True) == quotient


@pytest.mark.parametrize("number", [-1 << 31, -1, 0, (1 << 32) - 1, 1 << 32, (-1 << 31) - 1, 1 << 64, -1 << 64])
def test_inputs_are_held_against_their_widths(number: int) -> None:
    program = {"nodes": [["const", 32, 1], ["const", 64, 0]], "launches": [launch()]}
    ours = compiled(program)
    assert ours is not None
    for place in range(len(INPUTS)):
        values = tuple(number if i == place else 0 for i in range(len(INPUTS)))
        assert launches_of(ours, values) == launches_of(python(program), values)


def launch(**changed: Any) -> dict[str, Any]:
    first = len(INPUTS)
    words = [[8 * i, max(width // 8, 1), i] for i, (_, width) in enumerate(INPUTS)]
    return {
        "kernel": 0,
        "grid": [first] * 3,
        "block": [first] * 3,
        "shared_bytes": first + 1,
        "attributes": [],
        "parameters": [{"size": 64, "words": words, "slots": []}],
    } | changed


@pytest.mark.parametrize(
    "beyond",
    [
        {"nodes": [["const", 32, 1]] * 20_001},
        {"launches": [launch()] * 17},
        {"launches": [launch(parameters=[{"size": 32_000, "words": [], "slots": []}] * 2)]},
        {"nodes": [["loop", 32, 1, 0, [0] * 17, [], 6, [], [0] * 17], ["const", 64, 0]]},
    ],
)
def test_what_there_is_no_room_for_is_left_to_python(beyond: dict[str, Any]) -> None:
    assert compiled({"nodes": [["const", 32, 1], ["const", 64, 0]], "launches": [launch()]} | beyond) is None
