"""Function records: what an archive says of one compiled CuTe DSL function, and how arguments are bound to it.

A record is generic: a tree of arguments with the checks a caller owes (rank, element type, alignment,
divisibility, static extents, extents shared between tensors), the kernels of its cubin, and a launch program.
`docs/records.md` has its fields. Knows nothing of GEMMs, frameworks, archives or the driver.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..container.fields import exact_fields, exact_list, fail, is_int, require_schema
from ..device.launch import PROGRAMMATIC_STREAM_SERIALIZATION, Launch
from ..errors import ArgumentError, LayoutError, RecordError
from ..limits import MAX_ARGUMENTS, MAX_KERNELS
from ..named_tuple import NamedTuple
from ..numbers.dtypes import DTYPES
from . import arguments as codec
from .arguments import (
    Argument,
    DeviceArgument,
    ScalarArgument,
    SuppliedArgument,
    Symbol,
    TensorArgument,
    TupleArgument,
    WorkspaceArgument,
)
from .program import Program, ProgramSource

SCHEMA = 1  # of a record and its launch program; raised when what a field means changes
_FIELDS = {"schema", "name", "target", "family", "arguments", "symbols", "kernels", "program", "cubin"}
_SEQUENCES = (tuple, list, Sequence)  # the first two, since the last alone takes six times as long to ask


class TensorView(NamedTuple):
    """A tensor as the runtime sees it: device address, element type by short name, extents and strides in elements."""

    pointer: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int


_Place = tuple[str, str, int]  # a tensor, "extent" or "stride", and which


class Kernel(NamedTuple):
    """A kernel in the function's cubin: registers per thread, static shared and local memory in bytes."""

    symbol: str
    registers: int
    shared_bytes: int
    local_bytes: int


class Bound(NamedTuple):
    """A function's inputs for one call, in its program's order: addresses, and integers."""

    pointers: tuple[int, ...]  # but for those of workspaces
    values: tuple[int, ...]


class RecordSource(NamedTuple):
    """What a record is written from: its words, what the function takes and launches, and its kernels."""

    name: str
    target: str
    family: str
    cubin: str
    arguments: Sequence[Argument]
    symbols: Mapping[str, Symbol]
    kernels: Sequence[Kernel]
    program: ProgramSource

    def to_json(self) -> dict[str, Any]:
        """The record, as `Record.from_json` reads it."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "target": self.target,
            "family": self.family,
            "cubin": self.cubin,
            "arguments": codec.to_json(self.arguments),
            "symbols": codec.symbols_to_json(self.symbols),
            "kernels": [kernel._asdict() for kernel in self.kernels],
            "program": self.program.to_json(),
        }


class Record:
    """One compiled function: its name, target and family, what it takes and launches, and its kernels.

    `cubin` is the SHA-256 of its binary, in hexadecimal.
    """

    def __init__(
        self,
        words: tuple[str, str, str, str],  # name, target, family, cubin
        arguments: tuple[Argument, ...],
        symbols: Mapping[str, Symbol],
        kernels: tuple[Kernel, ...],
        program: Program,
    ) -> None:
        self.name, self.target, self.family, self.cubin = words
        self.arguments, self.symbols, self.kernels, self.program = arguments, symbols, kernels, program

    @classmethod
    def from_json(cls, obj: Any) -> Record:
        """Check and read a record.

        Raises:
            RecordError: anything is missing, unknown, out of range or inconsistent.
            UnsupportedSchema: it is of another schema than `SCHEMA`.
        """
        try:
            return cls._read(obj)
        except RecursionError:
            raise RecordError("launch program: it nests too deeply") from None

    @classmethod
    def _read(cls, obj: Any) -> Record:
        require_schema(obj, SCHEMA, "record")
        obj = exact_fields(obj, _FIELDS, "record")
        for field in ("name", "target", "family", "cubin"):
            if not isinstance(obj[field], str) or not obj[field]:
                fail("record", f"{field!r} must be a word, found {obj[field]!r:.200}")
        where = f"function {obj['name']}"
        symbols, arguments = codec.read(obj["symbols"], obj["arguments"], where)
        if len(exact_list(obj["kernels"], where)) > MAX_KERNELS:
            fail(where, f"has {len(obj['kernels'])} kernels, at most {MAX_KERNELS} are read")
        kernels = tuple(_read_kernel(k, where) for k in obj["kernels"])
        if not kernels or len({k.symbol for k in kernels}) != len(kernels):
            fail(where, "needs one or more kernels with distinct symbols")
        program = Program.from_json(obj["program"], len(kernels))
        words = (obj["name"], obj["target"], obj["family"], obj["cubin"])
        record = cls(words, arguments, symbols, kernels, program)
        record._check_inputs()
        return record

    def leaves(self) -> Iterator[Argument]:
        """The arguments in order, tuples flattened."""

        def walk(arguments: tuple[Argument, ...]) -> Iterator[Argument]:
            for argument in arguments:
                if isinstance(argument, TupleArgument):
                    yield from walk(argument.items)
                else:
                    yield argument

        return walk(self.arguments)

    @functools.cached_property
    def tensors(self) -> tuple[TensorArgument, ...] | None:
        """What the caller passes, where that is tensors alone."""
        passed = [a for a in self.arguments if not isinstance(a, SuppliedArgument)]
        tensors = tuple([a for a in passed if isinstance(a, TensorArgument)])
        return tensors if len(tensors) == len(passed) else None

    @functools.cached_property
    def device_arguments(self) -> tuple[DeviceArgument, ...]:
        """What the runtime must ask the device before it binds."""
        return tuple(a for a in self.leaves() if isinstance(a, DeviceArgument))

    @functools.cached_property
    def device_places(self) -> tuple[tuple[str, int], ...]:
        """The name of each device argument that the program reads, and its place among the program's values."""
        names = [name for name, _ in self.program.values]
        return tuple((a.name, names.index(a.name)) for a in self.device_arguments if a.name in names)

    @functools.cached_property
    def workspace_arguments(self) -> tuple[WorkspaceArgument, ...]:
        """What the runtime must provide at each launch; their pointers follow the tensors' in the program's order."""
        return tuple(a for a in self.leaves() if isinstance(a, WorkspaceArgument))

    def _check_inputs(self) -> None:
        """The program's inputs are the arguments' pointers, and values that the arguments define, each at its width."""
        where = f"function {self.name}"
        leaves = list(self.leaves())
        names = [a.name for a in leaves]
        if len(names) > MAX_ARGUMENTS:
            fail(where, f"has {len(names)} arguments, at most {MAX_ARGUMENTS} are read")
        if len(set(names)) != len(names):
            fail(where, f"two arguments share a name in {names!r:.200}")
        kinds = TensorArgument, WorkspaceArgument
        pointers = tuple(a.name for kind in kinds for a in leaves if isinstance(a, kind))
        if self.program.pointers != pointers:
            found = self.program.pointers
            fail(where, f"the program's pointers are {found!r:.200}, the tensors and workspaces {pointers!r:.200}")
        devices = {a.name for a in leaves if isinstance(a, DeviceArgument)}
        for a in leaves:
            if isinstance(a, WorkspaceArgument) and a.each is not None and a.each not in devices:
                fail(where, f"the workspace {a.name!r} is for each of {a.each!r:.50}, which is no device argument")
        overlapping = any(PROGRAMMATIC_STREAM_SERIALIZATION in x.attributes for x in self.program.launches)
        if overlapping and self.workspace_arguments:
            fail(where, "it has a workspace, and its launches may overlap those before them, which use the same")
        bound = {x for a in leaves if isinstance(a, TensorArgument) for x in (*a.shape, *a.strides)}
        defined = {name: s.width for name, s in self.symbols.items()}
        for a in leaves:
            if isinstance(a, ScalarArgument | DeviceArgument):
                if a.name in defined:
                    fail(where, f"{a.name!r} names both a symbol and a scalar")
                defined[a.name] = DTYPES[a.dtype].bits if isinstance(a, ScalarArgument) else 32
        for name, width in self.program.values:
            if name in self.symbols and name not in bound:
                fail(where, f"the program's input {name!r:.50} is the extent or stride of no tensor")
            if defined.get(name) != width:
                fail(where, f"the program's {width}-bit input {name!r} is no argument of that width")

    def bind(self, arguments: Sequence[Any], device_values: Mapping[str, int]) -> Bound:
        """Check a call's arguments against the description and put them in the program's order.

        `arguments` holds what the caller passes, in order, without streams, workspaces and device numbers: a
        `TensorView` for a tensor, a number for a scalar, None, or a sequence for a tuple. `device_values` has each
        device argument.

        Raises:
            LayoutError: a tensor's address or strides are not what the function was compiled for.
            ArgumentError: an argument does not fit; the message names it, what it must be and what was found.
        """
        pointers: list[int] = []
        values: dict[str, int] = dict(device_values)
        owners: dict[str, _Place] = {}
        self._bind_all(self.arguments, arguments, self.name, pointers, values, owners)
        return Bound(tuple(pointers), tuple([values[name] for name, _ in self.program.values]))

    def _bind_all(
        self,
        described: tuple[Argument, ...],
        given: Sequence[Any],
        where: str,
        pointers: list[int],
        values: dict[str, int],
        owners: dict[str, _Place],
    ) -> None:
        expected = [a for a in described if not isinstance(a, SuppliedArgument)]
        if not isinstance(given, _SEQUENCES) or len(given) != len(expected):
            found = len(given) if isinstance(given, Sequence) else repr(given)
            raise ArgumentError(
                f"{where} takes {len(expected)} arguments ({', '.join(a.name for a in expected)}), found {found}"
            )
        for argument, value in zip(expected, given, strict=True):
            if isinstance(argument, TensorArgument):
                pointers.append(self._bind_tensor(argument, value, values, owners))
            elif isinstance(argument, ScalarArgument):
                values[argument.name] = _scalar_bits(argument, value)
            elif isinstance(argument, TupleArgument):
                self._bind_all(argument.items, value, f"{where} argument {argument.name!r}", pointers, values, owners)
            elif value is not None:
                raise ArgumentError(f"{argument.name} must be None: it was None when this function was compiled")

    def _bind_tensor(self, a: TensorArgument, t: TensorView, values: dict[str, int], owners: dict[str, _Place]) -> int:
        if not isinstance(t, TensorView):
            raise ArgumentError(f"{a.name} must be a tensor, found {type(t).__name__}")
        if t.dtype != a.dtype:
            raise ArgumentError(f"{a.name} must have element type {a.dtype}, found {t.dtype}")
        if len(t.shape) != len(a.shape):
            raise ArgumentError(f"{a.name} must have {len(a.shape)} dimensions, found shape {t.shape}")
        for i, (want, have) in enumerate(zip(a.shape, t.shape, strict=True)):
            self._bind_number(a.name, "extent", i, want, have, values, owners)
        for i, (want, have) in enumerate(zip(a.strides, t.strides, strict=True)):
            if t.shape[i] == 1 and want != have:
                # The stride of an extent of 1 is never used; take one that satisfies the description.
                step = 1 if isinstance(want, int) else self.symbols[want].divisibility
                have = want if isinstance(want, int) else max(-(-have // step), 1) * step
            elif have == 0 != want and t.shape[i]:
                raise LayoutError(
                    f"{a.name}.stride[{i}] is 0: all {t.shape[i]} indices name one element, which this function was "
                    "not compiled for; make it contiguous (for a torch tensor: .contiguous())",
                    f"strides of {a.name}",
                )
            self._bind_number(a.name, "stride", i, want, have, values, owners)
        check_address(a.name, t)
        if t.pointer % a.alignment:
            raise LayoutError(
                f"{a.name} must start at a multiple of {a.alignment} bytes, found address {t.pointer:#x}; "
                "copy it to a fresh allocation (for a torch tensor: .clone())",
                f"address of {a.name}",
            )
        return t.pointer

    def _bind_number(
        self,
        name: str,
        what: str,
        i: int,
        want: int | str,
        have: int,
        values: dict[str, int],
        owners: dict[str, _Place],
    ) -> None:
        """Hold one extent or stride against its description; a symbol takes the first number it meets."""
        if isinstance(want, int):
            if have == want:
                return
            wanted = f"be {want}"
        elif want in owners:
            if have == values[want]:
                return
            wanted = "equal {}.{}[{}] = {}".format(*owners[want], values[want])
        else:
            symbol = self.symbols[want]
            if have % symbol.divisibility:
                wanted = f"be a multiple of {symbol.divisibility}"
            elif not 0 <= have < 1 << (symbol.width - 1):
                wanted = f"be from 0 to 2^{symbol.width - 1} - 1"
            else:
                values[want] = have
                owners[want] = (name, what, i)
                return
        message = f"{name}.{what}[{i}] must {wanted}, found {have}"
        raise LayoutError(message, f"strides of {name}") if what == "stride" else ArgumentError(message)

    def plan(self, values: Sequence[int]) -> tuple[Launch, ...]:
        """The launches for one shape; see `Program.plan`."""
        return self.program.plan(values)

    @functools.cached_property
    def rows(self) -> str | None:
        """The symbol that is the first extent of the first tensor, if it has two and that is one: M of a GEMM."""
        first = self.arguments[0]
        if isinstance(first, TensorArgument) and len(first.shape) == 2 and isinstance(first.shape[0], str):
            return first.shape[0]
        return None

    def with_rows(self, values: Sequence[int], rows: int) -> tuple[int, ...] | None:
        """`values` of other arguments for arguments with `rows` in place of their `self.rows`, all else being equal.

        None where `bind` has to look, which also says what is wrong: where extents of 1 let strides be ignored, and
        where the number is not one that this was compiled for.
        """
        if self._place_of_rows is None:
            return None
        place, step, limit = self._place_of_rows
        if rows < 2 or values[place] < 2 or rows % step or rows >= limit:
            return None
        return (*values[:place], rows, *values[place + 1 :])

    @functools.cached_property
    def _place_of_rows(self) -> tuple[int, int, int] | None:
        """Where `rows` is among the program's values, what divides it, and what it must be below."""
        names = [name for name, _ in self.program.values]
        if self.rows is None or self.rows not in names:
            return None
        symbol = self.symbols[self.rows]
        return names.index(self.rows), symbol.divisibility, 1 << (symbol.width - 1)


def check_address(name: str, t: TensorView) -> None:
    """Raise ArgumentError if `t` has elements but no memory, as a torch tensor whose storage was freed."""
    if not t.pointer and 0 not in t.shape:
        raise ArgumentError(f"{name} of shape {t.shape} has no memory behind it (its address is 0); allocate it first")


def _scalar_bits(a: ScalarArgument, value: Any) -> int:
    """A scalar as the unsigned integer its bits make."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"{a.name} must be a number, found {type(value).__name__}")
    if a.dtype == "f32":
        try:
            return int(struct.unpack("<I", struct.pack("<f", value))[0])
        except (OverflowError, struct.error):
            raise ArgumentError(f"{a.name} must fit a 32-bit float, found {value!r:.50}") from None
    bits = DTYPES[a.dtype].bits
    if not isinstance(value, int) or not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise ArgumentError(f"{a.name} must be a {bits}-bit integer, found {value!r}")
    return value & ((1 << bits) - 1)


def _read_kernel(obj: Any, where: str) -> Kernel:
    obj = exact_fields(obj, {"symbol", "registers", "shared_bytes", "local_bytes"}, f"{where} kernel")
    if not isinstance(obj["symbol"], str) or not obj["symbol"] or not obj["symbol"].isascii():
        fail(where, f"kernel symbol {obj['symbol']!r:.200} is malformed")
    for field in ("registers", "shared_bytes", "local_bytes"):
        if not is_int(obj[field], 0, 1 << 30):
            fail(where, f"kernel {field} {obj[field]!r:.50} is out of range")
    return Kernel(**obj)
