"""A record binds a call's arguments only if they are what the function was compiled for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runtime.errors import ArgumentError, LayoutError, RecordError
from runtime.program.record import Record, TensorView, WorkspaceArgument

from .samples import record

X = TensorView(0x1000, "bf16", (3, 64), (64, 1), 0)
Y = TensorView(0x2000, "bf16", (3, 64), (72, 1), 0)


def bind(x: Any = X, y: Any = Y, scale: Any = 1.0, bias: Any = None) -> Any:
    return Record.from_json(record()).bind([x, y, scale, bias], {"clusters": 66})


def test_arguments_come_out_in_the_programs_order() -> None:
    bound = bind()
    assert bound.pointers == (0x1000, 0x2000)
    assert bound.values == (3, 64, 64, 72, 0x3F800000, 66)


def test_the_stride_of_a_single_row_is_free() -> None:
    x = X._replace(shape=(1, 64), strides=(1, 1))
    y = Y._replace(shape=(1, 64), strides=(7, 1))
    assert bind(x, y).values[:2] == (1, 64)


@pytest.mark.parametrize("stride", [0, -64])
def test_a_stride_that_is_never_used_becomes_one_that_can_be(stride: int) -> None:
    x, y = X._replace(shape=(1, 64), strides=(stride, 1)), Y._replace(shape=(1, 64))
    assert bind(x, y).values[2] == 8


def test_tensors_without_elements_need_no_memory() -> None:
    assert bind(X._replace(shape=(0, 64), pointer=0), Y._replace(shape=(0, 64), pointer=0)).pointers == (0, 0)


@pytest.mark.parametrize(("value", "bits"), [(float("inf"), 0x7F800000), (float("nan"), 0x7FC00000)])
def test_scalars_may_be_infinite_or_nan(value: float, bits: int) -> None:
    assert bind(scale=value).values[4] == bits


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (X._replace(pointer=0x1008), "address of x"),
        (X._replace(strides=(68, 1)), "strides of x"),
        (X._replace(strides=(64, 3)), "strides of x"),
        (X._replace(strides=(0, 1)), "strides of x"),
    ],
)
def test_what_a_copy_would_mend_is_a_layout_error(x: TensorView, reason: str) -> None:
    with pytest.raises(LayoutError) as error:
        bind(x)
    assert error.value.reason == reason


def test_what_no_copy_would_mend_is_no_layout_error() -> None:
    for x in (X._replace(pointer=0), X._replace(dtype="f16"), X._replace(shape=(3, 60))):
        with pytest.raises(ArgumentError) as error:
            bind(x)
        assert type(error.value) is ArgumentError


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": X._replace(dtype="f16")}, "x must have element type bf16, found f16"),
        ({"x": X._replace(shape=(3, 64, 1), strides=(64, 1, 1))}, "x must have 2 dimensions"),
        ({"x": X._replace(pointer=0x1008)}, "x must start at a multiple of 16 bytes"),
        ({"y": Y._replace(pointer=0x2010)}, "y must start at a multiple of 128 bytes"),
        ({"y": Y._replace(shape=(4, 64))}, "y.extent\\[0\\] must equal x.extent\\[0\\] = 3, found 4"),
        ({"x": X._replace(shape=(3, 60)), "y": Y._replace(shape=(3, 60))}, "must be a multiple of 8, found 60"),
        ({"x": X._replace(strides=(68, 1))}, "x.stride\\[0\\] must be a multiple of 8, found 68"),
        ({"x": X._replace(strides=(64, 3))}, "x.stride\\[1\\] must be 1, found 3"),
        ({"x": X._replace(strides=(-64, 1))}, "must be from 0 to"),
        ({"x": X._replace(shape=(1 << 31, 64))}, "must be from 0 to 2\\^31 - 1"),
        ({"x": None}, "x must be a tensor, found NoneType"),
        ({"scale": "1"}, "scale must be a number"),
        ({"scale": True}, "scale must be a number"),
        ({"bias": X}, "bias must be None"),
        ({"x": X._replace(strides=(0, 1))}, "x.stride\\[0\\] is 0.*make it contiguous"),
        ({"x": X._replace(pointer=0)}, "x of shape \\(3, 64\\) has no memory behind it"),
        ({"scale": 1e300}, "scale must fit a 32-bit float, found 1e\\+300"),
        ({"scale": 10**400}, "scale must fit a 32-bit float"),
    ],
)
def test_bind_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        bind(**changed)


def test_bind_refuses_another_number_of_arguments() -> None:
    with pytest.raises(ArgumentError, match="takes 4 arguments \\(x, y, scale, bias\\), found 1"):
        Record.from_json(record()).bind([X], {"clusters": 66})


def workspace(**changed: Any) -> dict[str, Any]:
    return {"kind": "workspace", "name": "sums", "bytes": 64, "each": "clusters", "zeroed": False} | changed


def test_workspaces_follow_the_tensors_and_are_no_callers_to_pass() -> None:
    changed = record()
    changed["arguments"].insert(2, workspace())
    changed["program"]["pointers"].append("sums")
    read = Record.from_json(changed)
    assert read.workspace_arguments == (WorkspaceArgument("sums", 64, "clusters", False),)
    assert read.bind([X, Y, 1.0, None], {"clusters": 66}).pointers == (0x1000, 0x2000)


Change = Callable[[dict[str, Any]], None]
MALFORMED: dict[str, Change] = {
    "unknown field": lambda r: r.__setitem__("hook", "x"),
    "missing field": lambda r: r.__delitem__("symbols"),
    "name of a number": lambda r: r.__setitem__("name", 3),
    "unknown argument kind": lambda r: r["arguments"][0].__setitem__("kind", "callback"),
    "unknown element type": lambda r: r["arguments"][0].__setitem__("dtype", "object"),
    "symbol that is not there": lambda r: r["arguments"][0].__setitem__("shape", ["q", "n"]),
    "shape and strides that differ": lambda r: r["arguments"][0].__setitem__("strides", [1]),
    "alignment of no power of two": lambda r: r["arguments"][0].__setitem__("alignment", 24),
    "two arguments of one name": lambda r: r["arguments"][1].__setitem__("name", "x"),
    "pointers that are not the tensors": lambda r: r["program"].__setitem__("pointers", ["y", "x"]),
    "input that no argument gives": lambda r: r["program"]["values"].__setitem__(0, ["q", 32]),
    "input of another width": lambda r: r["symbols"]["m"].__setitem__("width", 64),
    "no kernels": lambda r: r.__setitem__("kernels", []),
    "kernel symbol of bytes": lambda r: r["kernels"][0].__setitem__("symbol", "caf\u00e9"),
    "negative registers": lambda r: r["kernels"][0].__setitem__("registers", -1),
    "workspace of no bytes": lambda r: r["arguments"].append(workspace(bytes=0)),
    "workspace for each of what is no device argument": lambda r: r["arguments"].append(workspace(each="scale")),
    "workspace that may be zero": lambda r: r["arguments"].append(workspace(zeroed=1)),
    "workspace that the program does not take": lambda r: r["arguments"].append(workspace()),
    "unknown device property": lambda r: r["arguments"][3].__setitem__("property", "serial_number"),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_reader_refuses(change: Change) -> None:
    changed = record()
    change(changed)
    with pytest.raises(RecordError):
        Record.from_json(changed)


def test_nesting_without_end_is_an_error_of_the_record() -> None:
    changed, deep = record(), list[object]()
    for _ in range(2000):
        deep = [deep]
    changed["program"]["nodes"][0] = deep
    with pytest.raises(RecordError):
        Record.from_json(changed)
