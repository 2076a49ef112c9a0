"""Whether a function's launches can work: its program evaluated for several shapes, as a server evaluates it.

A record may be well formed and its digests right, and still ask for what no GPU does or what cannot compute what its
arguments promise. Knows nothing of archives, tables or cubins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from runtime import native
from runtime.arithmetic import NodeReader
from runtime.errors import ArgumentError, ProgramError, RecordError
from runtime.evaluator import PythonEvaluator
from runtime.launch import CLUSTER_DIMENSION, PREFERRED_CLUSTER_DIMENSION, Launch, Slot
from runtime.record import DeviceArgument, Record, TensorArgument, TensorView, WorkspaceArgument
from runtime.signature import Signature
from runtime.tensor import span_bytes

from . import shapes

MULTIPROCESSORS = 132  # of the GPU that programs are evaluated for: an H200
ROWS = (1, 77, 8192)  # one, some that fill no tile, many
# CTAs of a cluster: CUDA allows 8 on every GPU that has clusters; Hopper and later data-centre GPUs allow 16 to kernels
# that opt in to a non-portable size (CUDA C++ programming guide, thread block clusters).
MAX_CLUSTER_CTAS = 16
# CuTe's TMA stores of variable length move a tensor's base by -2^30 strides, and its coordinates by as much the other
# way; a TMA descriptor keeps 57 bits of an address.
_TMA_SHIFT_STRIDES, _TMA_ADDRESS_BITS = 1 << 30, 57
# Addresses that the driver gives out lie above 4 GB and have at most 57 bits.
_DEVICE_ADDRESSES = range(1 << 32, 1 << 57)


class Case(NamedTuple):
    """One shape to evaluate for: what it is in words, and the free extents."""

    what: str
    extents: dict[str, int]


Group = tuple[str, list[Case]]  # shapes of which at least one must be served, and what they are of


def groups(record: Record, uses: Mapping[Signature, Iterable[int]]) -> list[Group]:
    """The shapes to evaluate for: of each GEMM that it serves, `ROWS` and those given; else any legal extents."""
    if not uses:
        return [("any extents", [Case(f"extents of about {m}", shapes.near(record, m)) for m in ROWS])]
    return [
        (
            signature.key(),
            [Case(f"{m} rows", shapes.extents_of(record, signature, m)) for m in sorted({*ROWS, *rows})],
        )
        for signature, rows in uses.items()
    ]


def check(obj: dict[str, Any], record: Record, uses: Mapping[Signature, Iterable[int]]) -> int:
    """Check the launches of a record, and evaluate them for all that it serves; how many shapes could be launched.

    `obj` is the record as JSON, `uses` the GEMMs that it serves with M values of interest.

    Raises:
        RecordError: a tensor reaches no kernel, a symbol is bound to nothing, clusters or addresses are out of range,
            no shape can be launched, or native code and Python do not agree.
    """
    check_inputs(obj, record)
    evaluator = _Evaluator(obj, record)
    launched = 0
    for what, cases in groups(record, uses):
        refused = []
        for case in cases:
            reason = evaluator.launch(case)
            if reason is not None:
                refused.append(reason)
        if len(refused) == len(cases):
            raise RecordError(f"function {record.name}: it refuses every shape of {what}, first {refused[0]}")
        launched += len(cases) - len(refused)
    return launched


def check_inputs(obj: dict[str, Any], record: Record) -> None:
    """Raise RecordError unless every pointer reaches a kernel, and a tensor's extent or stride binds each symbol."""
    seen = {slot[2] for launch in obj["program"]["launches"] for p in launch["parameters"] for slot in p["slots"]}
    for number, name in enumerate(record.program.pointers):
        if number not in seen:
            raise RecordError(
                f"function {record.name}: no launch is given the tensor or workspace {name!r}, so it cannot compute "
                "what its arguments say; build it again"
            )
    tensors = [a for a in record.leaves() if isinstance(a, TensorArgument)]
    bound = {x for tensor in tensors for x in (*tensor.shape, *tensor.strides)}
    for name in record.symbols:
        if name not in bound:
            raise RecordError(
                f"function {record.name}: the symbol {name!r} is no extent or stride of a tensor, so no call can give "
                "it a value; build it again"
            )


def suspicious_constants(obj: dict[str, Any]) -> list[str]:
    """Parameters that hold, where a pointer may be, a constant that looks like a device address.

    A compiled kernel's addresses come in through slots; one that is built in would be that of another process. The
    constants of TMA descriptors are no addresses, and stand in parameters that have a slot for the descriptor's.
    """
    constants, found = _Constants(obj["program"]), []
    for launch in obj["program"]["launches"]:
        for number, parameter in enumerate(launch["parameters"]):
            descriptors = [offset for offset, kind, *_ in parameter["slots"] if kind == "tma"]
            for offset, size, ref in parameter["words"]:
                if size < 8 or offset % 8 or any(start < offset < start + 128 for start in descriptors):
                    continue
                value = constants.find(ref)
                if value in _DEVICE_ADDRESSES:
                    found.append(f"parameter {number} holds {value:#x} at byte {offset}")
    return found


class _Constants:
    """The values of a program that no input enters."""

    def __init__(self, program: dict[str, Any]) -> None:
        self._nodes, self._widths = program["nodes"], [width for _, width in program["values"]]
        self._found: list[Any] = []

    def find(self, ref: int) -> int:
        """The value with this number, or 0 where an input enters it or it is undefined."""
        node = self._nodes[ref - len(self._widths)] if ref >= len(self._widths) else None
        if node is None or node[0] == "const":
            return 0 if node is None else int(node[2])
        if not self._found:
            reader = NodeReader(list(self._widths))
            steps = reader.nodes(self._nodes, "node")
            self._found = [0] * len(self._widths)
            for depends, step in zip(reader.inputs[len(self._widths) :], steps, strict=True):
                self._found.append(0 if depends else step(self._found))
        found = self._found[ref]
        return found if isinstance(found, int) else 0


class _Evaluator:
    """A record's program, in native code where that is there, and in Python."""

    def __init__(self, obj: dict[str, Any], record: Record) -> None:
        self._record = record
        self._evaluators: list[Any] = [record.program]
        if native._native is not None:
            nodes, launches, read = obj["program"]["nodes"], obj["program"]["launches"], record.program
            inputs = read.values, nodes, launches, len(read.pointers), read.kernels
            self._evaluators.append(PythonEvaluator.from_json(*inputs))
        devices = (a for a in record.leaves() if isinstance(a, DeviceArgument))
        self._clusters = {a.name: max(MULTIPROCESSORS // a.cluster_size, 1) for a in devices}

    def launch(self, case: Case) -> str | None:
        """Check the launches for one shape; why there are none, if there are none.

        Raises:
            RecordError: they cannot work.
        """
        record = self._record
        arguments = shapes.arguments(record, case.extents)
        try:
            values = record.bind(arguments, self._clusters).values
        except ArgumentError as error:
            return f"{case.what}: {error}"
        first, *others = (_outcome(evaluator, values) for evaluator in self._evaluators)
        if any(other != first for other in others):
            raise RecordError(
                f"function {record.name}: native code and Python disagree on its launches for {case.what}; report this"
            )
        if isinstance(first, str):
            return f"{case.what}: {first}"
        room = [span_bytes(view) for view in _views(arguments)] + self._workspaces()
        strides = [_stride_bytes(view) for view in _views(arguments)]
        for number, launch in enumerate(first):
            problem = _cluster_problem(launch) or _slot_problem(launch.slots, record.program.pointers, room, strides)
            if problem:
                raise RecordError(f"function {record.name}: launch {number} for {case.what} {problem}; build it again")
        return None

    def _workspaces(self) -> list[int]:
        spaces = (a for a in self._record.leaves() if isinstance(a, WorkspaceArgument))
        return [a.bytes * (1 if a.each is None else self._clusters[a.each]) for a in spaces]


def _outcome(evaluator: Any, values: tuple[int, ...]) -> tuple[Launch, ...] | str:
    """The launches, or why there are none."""
    try:
        launches: tuple[Launch, ...] = evaluator.evaluate(values, None).launches
    except ProgramError as error:
        return str(error)
    return launches


def _views(arguments: Sequence[Any]) -> Iterator[TensorView]:
    """The tensors among a call's arguments, in the order of a program's pointers."""
    for argument in arguments:
        if isinstance(argument, TensorView):
            yield argument
        elif isinstance(argument, list):
            yield from _views(argument)


def _stride_bytes(view: TensorView) -> list[int]:
    one = span_bytes(view._replace(shape=(1,), strides=(1,)))
    return [stride * one for stride in view.strides]


def _cluster_problem(launch: Launch) -> str | None:
    """Why no GPU takes its clusters, as the end of a sentence; None where one does."""
    attributes = dict(launch.attributes)
    cluster = attributes.get(CLUSTER_DIMENSION, (1, 1, 1))
    for what, extents in (("", cluster), ("preferred ", attributes.get(PREFERRED_CLUSTER_DIMENSION, cluster))):
        x, y, z = extents
        if min(extents) < 1 or x * y * z > MAX_CLUSTER_CTAS:
            return f"has {what}clusters of {x} x {y} x {z} CTAs; a cluster has 1 to {MAX_CLUSTER_CTAS}"
        if any(n % extent for n, extent in zip(launch.grid, extents, strict=True)):
            return f"has a grid of {launch.grid}, which {what}clusters of {x} x {y} x {z} CTAs do not divide"
        if any(n % extent for n, extent in zip(extents, cluster, strict=True)):
            return f"has preferred clusters of {x} x {y} x {z} CTAs, which those of {cluster} do not divide"
    return None


def _slot_problem(
    slots: Sequence[Slot], names: Sequence[str], room: Sequence[int], strides: Sequence[list[int]]
) -> str | None:
    """Why a slot's address is none of its tensor's, as the end of a sentence; `room` is the bytes behind a pointer."""
    for slot in slots:
        if slot.addend == 0 or 0 < slot.addend < room[slot.pointer]:
            continue
        shifted = strides[slot.pointer] if slot.tma and slot.pointer < len(strides) else []
        if any((slot.addend + _TMA_SHIFT_STRIDES * s) % (1 << _TMA_ADDRESS_BITS) < room[slot.pointer] for s in shifted):
            continue
        return (
            f"gives a kernel the address of {names[slot.pointer]!r} plus {slot.addend}, where that has "
            f"{room[slot.pointer]} bytes"
        )
    return None
