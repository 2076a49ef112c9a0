"""The arguments of a compiled function as a record has them: what they are, and how they are read and written.

Knows nothing of how arguments are bound, of launch programs, GEMMs or archives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from ..container.fields import exact_fields, exact_list, fail, is_int
from ..limits import MAX_ARGUMENT_DEPTH, MAX_RANK, MAX_SYMBOLS, MAX_WORKSPACE_BYTES
from ..named_tuple import NamedTuple
from ..numbers.dtypes import DTYPES

SCALAR_DTYPES = ("i32", "i64", "f32")
DEVICE_PROPERTIES = ("max_active_clusters",)


class TensorArgument(NamedTuple):
    """A tensor parameter; an extent or stride is a fixed integer or the name of a symbol. `alignment` in bytes."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    alignment: int


class ScalarArgument(NamedTuple):
    """A number the caller passes."""

    name: str
    dtype: str


class DeviceArgument(NamedTuple):
    """A number the runtime asks the device for: how many clusters of `cluster_size` CTAs can be resident at once."""

    name: str
    property: str
    cluster_size: int


class WorkspaceArgument(NamedTuple):
    """Device memory that the runtime provides and nobody else touches while the launches run: `bytes` of it, for each
    of the count that the device argument `each` is, or in all where that is None.

    `zeroed`: it is zero before the launches and they leave it zero; else it may hold anything.
    """

    name: str
    bytes: int
    each: str | None
    zeroed: bool


class StreamArgument(NamedTuple):
    """The stream; it reaches the launch and no arithmetic."""

    name: str


class NoneArgument(NamedTuple):
    """An argument that was None when the function was compiled, and must be again."""

    name: str


class TupleArgument(NamedTuple):
    """Several arguments passed as one."""

    name: str
    items: tuple[Argument, ...]


SuppliedArgument = DeviceArgument | WorkspaceArgument | StreamArgument  # by the runtime, not the caller
Argument = TensorArgument | ScalarArgument | SuppliedArgument | NoneArgument | TupleArgument


class Symbol(NamedTuple):
    """An extent or stride fixed at launch: its width in bits and what it must be a multiple of."""

    width: int
    divisibility: int


_KINDS: dict[type, str] = {
    TensorArgument: "tensor",
    ScalarArgument: "scalar",
    DeviceArgument: "device",
    WorkspaceArgument: "workspace",
    StreamArgument: "stream",
    NoneArgument: "none",
}


def to_json(arguments: Iterable[Argument]) -> list[dict[str, Any]]:
    """Arguments as `read` takes them."""
    return [_write_one(a) for a in arguments]


def symbols_to_json(symbols: Mapping[str, Symbol]) -> dict[str, Any]:
    """Symbols as `read` takes them."""
    return {name: symbol._asdict() for name, symbol in symbols.items()}


def _write_one(a: Argument) -> dict[str, Any]:
    if isinstance(a, TupleArgument):
        return {"kind": "tuple", "name": a.name, "items": to_json(a.items)}
    fields = a._asdict()
    if isinstance(a, TensorArgument):
        fields |= {"shape": list(a.shape), "strides": list(a.strides)}
    return {"kind": _KINDS[type(a)], **fields}


_known: dict[bytes, tuple[Mapping[str, Symbol], tuple[Argument, ...]]] = {}  # what `read` has read
_MOST_KNOWN, _MOST_KNOWN_BYTES = 256, 8192  # and of each; those of GEMMs have up to 1,500


def read(symbols: Any, arguments: Any, where: str) -> tuple[Mapping[str, Symbol], tuple[Argument, ...]]:
    """The symbols and arguments of a record. Those of functions that compute the same are alike, and read once."""
    try:
        key = orjson.dumps([symbols, arguments])
    except orjson.JSONEncodeError:  # nothing that was read from JSON
        key = b""
    found = _known.get(key)
    if found is None:
        read = _read_symbols(symbols, where)
        found = read, tuple([_read_one(a, read, where, 0) for a in exact_list(arguments, where)])
        if 0 < len(key) <= _MOST_KNOWN_BYTES and len(_known) < _MOST_KNOWN:
            _known[key] = found
    return found


def _read_symbols(obj: Any, where: str) -> dict[str, Symbol]:
    if not isinstance(obj, dict):
        fail(where, f"'symbols' must be a dictionary, found {obj!r:.200}")
    if len(obj) > MAX_SYMBOLS:
        fail(where, f"has {len(obj)} symbols, at most {MAX_SYMBOLS} are read")
    symbols = {}
    for name, entry in obj.items():
        entry = exact_fields(entry, {"width", "divisibility"}, f"{where} symbol {name!r}")
        if not is_int(entry["width"], 32, 64) or entry["width"] % 32 or not is_int(entry["divisibility"], 1, 1 << 20):
            fail(where, f"symbol {name!r} is malformed: {entry!r:.200}")
        symbols[name] = Symbol(entry["width"], entry["divisibility"])
    return symbols


def _read_one(obj: Any, symbols: Mapping[str, Symbol], where: str, depth: int) -> Argument:
    if not isinstance(obj, dict) or not isinstance(obj.get("name"), str) or not obj["name"]:
        fail(where, f"an argument needs a kind and a name, found {obj!r:.200}")
    name, kind = obj["name"], obj.get("kind")
    here = f"{where} argument {name!r}"
    if kind == "tensor":
        exact_fields(obj, {"kind", "name", "dtype", "shape", "strides", "alignment"}, here)
        if not isinstance(obj["dtype"], str) or obj["dtype"] not in DTYPES:
            fail(here, f"unknown element type {obj['dtype']!r:.50}")
        shape, strides = exact_list(obj["shape"], here), exact_list(obj["strides"], here)
        if len(shape) != len(strides) or len(shape) > MAX_RANK:
            fail(here, f"shape {shape!r:.100} and strides {strides!r:.100} do not fit together")
        for x in shape + strides:
            if not is_int(x, 0, (1 << 63) - 1) and not (isinstance(x, str) and x in symbols):
                fail(here, f"{x!r:.50} is neither an integer nor a symbol")
        alignment = obj["alignment"]
        if not is_int(alignment, 1, 4096) or alignment & (alignment - 1):
            fail(here, f"alignment {alignment!r:.50} is no power of two up to 4096")
        return TensorArgument(name, obj["dtype"], tuple(shape), tuple(strides), alignment)
    if kind == "scalar":
        exact_fields(obj, {"kind", "name", "dtype"}, here)
        if obj["dtype"] not in SCALAR_DTYPES:
            fail(here, f"a scalar is one of {SCALAR_DTYPES}, found {obj['dtype']!r:.50}")
        return ScalarArgument(name, obj["dtype"])
    if kind == "device":
        exact_fields(obj, {"kind", "name", "property", "cluster_size"}, here)
        if obj["property"] not in DEVICE_PROPERTIES or not is_int(obj["cluster_size"], 1, 64):
            fail(here, f"unknown device property {obj!r:.200}")
        return DeviceArgument(name, obj["property"], obj["cluster_size"])
    if kind == "workspace":
        exact_fields(obj, {"kind", "name", "bytes", "each", "zeroed"}, here)
        if not is_int(obj["bytes"], 1, MAX_WORKSPACE_BYTES) or type(obj["zeroed"]) is not bool:
            fail(here, f"a workspace of {obj['bytes']!r:.50} bytes, zeroed {obj['zeroed']!r:.50}")
        if obj["each"] is not None and not isinstance(obj["each"], str):
            fail(here, f"a workspace is for each of a device argument or null, found {obj['each']!r:.50}")
        return WorkspaceArgument(name, obj["bytes"], obj["each"], obj["zeroed"])
    if kind == "stream":
        exact_fields(obj, {"kind", "name"}, here)
        return StreamArgument(name)
    if kind == "none":
        exact_fields(obj, {"kind", "name"}, here)
        return NoneArgument(name)
    if kind == "tuple" and depth < MAX_ARGUMENT_DEPTH:
        exact_fields(obj, {"kind", "name", "items"}, here)
        items = exact_list(obj["items"], here)
        return TupleArgument(name, tuple(_read_one(i, symbols, here, depth + 1) for i in items))
    fail(here, f"unknown kind {kind!r:.50}")
