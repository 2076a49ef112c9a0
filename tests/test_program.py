"""A launch program evaluates to launches, and its reader refuses what it does not know."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from runtime import native
from runtime.errors import ProgramError, RecordError
from runtime.program.program import NativeEvaluator, Program

from .parameters import with_pointers
from .samples import record

Change = Callable[[dict[str, Any]], None]


@pytest.fixture(params=["native", "python"], autouse=True)
def evaluator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every claim here is about both."""
    if request.param == "python":
        monkeypatch.setattr(native, "_native", None)
    elif native._native is None:
        pytest.skip("runtime._native was not built")
    assert isinstance(Program.from_json(program(), 1)._evaluator, NativeEvaluator) is (request.param == "native")


def program() -> dict[str, Any]:
    return dict(record()["program"])


def plan(m: int = 3, n: int = 64, ldx: int = 64, ldy: int = 64, clusters: int = 66) -> Any:
    return Program.from_json(program(), 1).plan([m, n, ldx, ldy, 0x3F800000, clusters])[0]


def test_a_launch_has_grid_block_shared_memory_and_attributes() -> None:
    launch = plan()
    assert (launch.grid, launch.block, launch.shared_bytes) == ((3, 1, 1), (128, 1, 1), 1024)
    assert launch.attributes == ((4, (2, 1, 1)),)
    assert launch.sizes == (8, 128, 8)


def test_parameters_hold_the_evaluated_words_and_zeros_elsewhere() -> None:
    launch = plan(m=3, n=64, ldy=72)
    start = launch.offsets[1]
    assert struct.unpack_from("<Q", launch.parameters, start + 8) == (144,)
    assert struct.unpack_from("<II", launch.parameters, launch.offsets[2]) == (192, 0x3F800000)
    assert launch.parameters[start + 16 : start + 128] == bytes(112)


def test_pointers_go_into_their_slots_and_nowhere_else() -> None:
    launch = plan()
    buffer = with_pointers(launch, [0x7F00_0000_1230, 0x7F00_0000_4567])
    assert struct.unpack_from("<Q", buffer, launch.offsets[0]) == (0x7F00_0000_1230,)
    assert struct.unpack_from("<Q", buffer, launch.offsets[1]) == (0x7F00_0000_4560,)  # a descriptor drops 4 bits
    for slot in launch.slots:
        buffer[slot.offset : slot.offset + 8] = bytes(8)
    assert bytes(buffer) == launch.parameters


def test_an_addend_is_added_to_the_pointer_modulo_2_to_the_57_in_a_descriptor() -> None:
    changed = program()
    changed["nodes"].append(["const", 64, (1 << 64) - (1 << 40)])
    changed["launches"][0]["parameters"][1]["slots"] = [[0, "tma", 1, 14]]
    launch = Program.from_json(changed, 1).plan([3, 64, 64, 64, 0, 66])[0]
    word = struct.unpack_from("<Q", with_pointers(launch, [0, 1 << 32]), launch.offsets[1])[0]
    assert word == ((1 << 32) - (1 << 40)) % (1 << 57)


def test_an_overflow_of_the_compiled_arithmetic_is_refused() -> None:
    with pytest.raises(ProgramError, match="overflows the 32-bit arithmetic"):
        plan(m=1 << 20, n=1 << 20)


def test_no_rows_make_no_grid() -> None:
    with pytest.raises(ProgramError, match="grid would be"):
        plan(m=0)


def test_a_value_too_wide_for_its_input_is_refused() -> None:
    with pytest.raises(ProgramError, match="m = 4294967296 does not fit the 32 bits"):
        plan(m=1 << 32)


def set_launch(name: str, value: Any) -> Change:
    return lambda p: p["launches"][0].__setitem__(name, value)


def set_parameter(index: int, name: str, value: Any) -> Change:
    return lambda p: p["launches"][0]["parameters"][index].__setitem__(name, value)


MALFORMED: dict[str, Change] = {
    "unknown field": lambda p: p.__setitem__("code", "import os"),
    "missing field": lambda p: p.__delitem__("pointers"),
    "no launches": lambda p: p.__setitem__("launches", []),
    "value named twice": lambda p: p["values"].append(["m", 32]),
    "value of an odd width": lambda p: p["values"].__setitem__(0, ["m", 33]),
    "unknown operation": lambda p: p["nodes"].append(["exec", 32, 0, 1]),
    "kernel that is not there": set_launch("kernel", 1),
    "grid of two": set_launch("grid", [6, 6]),
    "grid of the wrong width": set_launch("grid", [8, 6, 6]),
    "grid beyond the nodes": set_launch("grid", [99, 6, 6]),
    "unknown attribute": set_launch("attributes", [[5, [6]]]),
    "attribute twice": set_launch("attributes", [[6, [6]], [6, [6]]]),
    "attribute with too few words": set_launch("attributes", [[4, [6]]]),
    "parameter of no size": set_parameter(0, "size", 0),
    "parameter too large": set_parameter(0, "size", 1 << 20),
    "word past the end": set_parameter(2, "words", [[6, 4, 9]]),
    "word of three bytes": set_parameter(2, "words", [[0, 3, 9]]),
    "word of the wrong width": set_parameter(2, "words", [[0, 8, 9]]),
    "words that overlap": set_parameter(2, "words", [[0, 4, 9], [2, 4, 4]]),
    "slot on a word": set_parameter(0, "words", [[4, 4, 9]]),
    "slot past the end": set_parameter(0, "slots", [[1, "raw", 0, None]]),
    "slot at no multiple of 8": set_parameter(1, "slots", [[20, "raw", 0, None]]),
    "slot of an unknown kind": set_parameter(0, "slots", [[0, "handle", 0, None]]),
    "slot of an unknown pointer": set_parameter(0, "slots", [[0, "raw", 2, None]]),
    "addend of 32 bits": set_parameter(0, "slots", [[0, "raw", 0, 9]]),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_reader_refuses(change: Change) -> None:
    changed = program()
    change(changed)
    with pytest.raises(RecordError):
        Program.from_json(changed, 1)


def looped() -> Program:
    """Its grid is what a loop makes of all its inputs: start, the least it stops at, and what it steps to, an input."""
    loop = ["loop", 32, 8, 0, [0], [["ult", 1, 4, 1]], 5, [["const", 32, 1]], [2]]
    return Program.from_json(
        {
            "values": [["start", 32], ["end", 32], ["then", 32]],
            "pointers": [],
            "nodes": [["const", 32, 1], loop, ["const", 64, 0]],
            "launches": [
                {
                    "kernel": 0,
                    "grid": [4, 3, 3],
                    "block": [3, 3, 3],
                    "shared_bytes": 5,
                    "attributes": [],
                    "parameters": [{"size": 4, "words": [[0, 4, 0]], "slots": []}],
                }
            ],
        },
        1,
    )


def test_what_depends_on_inputs_that_differ_is_computed_again() -> None:
    one = looped()
    last = one.evaluate([1, 5, 9])
    assert last.launches[0].grid == (9, 1, 1)
    for values in ([1, 5, 7], [6, 5, 7], [6, 8, 7], [6, 7, 7], [6, 7, 8], [2, 2, 8], [1, 2, 3]):
        if values == [6, 8, 7]:  # it steps to 7 for ever
            with pytest.raises(ProgramError, match="did not end"):
                one.evaluate(values, last)
            continue
        last = one.evaluate(values, last)
        assert last.launches == looped().plan(values), values


def test_an_overflow_is_refused_where_only_what_differs_is_computed_too() -> None:
    one = Program.from_json(program(), 1)
    last = one.evaluate([3, 1 << 20, 64, 64, 0, 66])
    assert one.evaluate([5, 1 << 20, 64, 64, 0, 66], last).small
    with pytest.raises(ProgramError, match="overflows the 32-bit arithmetic"):
        one.evaluate([1 << 20, 1 << 20, 64, 64, 0, 66], last)


def test_unaffected_words_are_kept() -> None:
    first = Program.from_json(program(), 1)
    last = first.evaluate([3, 64, 64, 64, 0, 66])
    for values in ([5, 64, 64, 64, 0, 66], [5, 64, 72, 64, 0, 66], [5, 128, 72, 80, 1, 60], [3, 64, 64, 64, 0, 66]):
        last = first.evaluate(values, last)
        assert last.launches == Program.from_json(program(), 1).plan(values), values
