"""Whether a function's launches can work: what reaches its kernels, and its program evaluated for several shapes.

A record may be well formed and its digests right, and still ask for what no GPU does or what cannot compute what its
arguments promise. Knows nothing of archives, tables or cubins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from runtime.errors import RecordError
from runtime.gemm.signature import Signature
from runtime.program.nodes import NodeReader
from runtime.program.record import Record, TensorArgument

from . import shapes
from .evaluation import Budget, Case, Evaluator

ROWS = (1, 77, 8192)  # one, some that fill no tile, many
# Addresses that the driver gives out lie above 4 GB and have at most 57 bits.
_DEVICE_ADDRESSES = range(1 << 32, 1 << 57)


class Launches(NamedTuple):
    """What was found: how many shapes could be launched, how many the budget left out, and what to look into."""

    launched: int
    left_out: int
    warnings: tuple[str, ...]


class _Group(NamedTuple):
    """Shapes of which at least one must be served: of a signature of any operation, or of none in particular."""

    signature: Any
    rows: tuple[int, ...]
    form: str | None = None  # of which the signature is a sample

    @property
    def what(self) -> str:
        if self.signature is None:
            return "any extents"
        return self.signature.key() + ("" if self.form is None else f", of the form {self.form}")

    def cases(self, record: Record) -> Iterator[Case]:
        for m in self.rows:
            if self.signature is None:
                yield Case(f"extents of about {m}", shapes.near(record, m))
            else:
                yield Case(f"{m} rows", shapes.extents_of(record, self.signature, m))


def check(
    obj: dict[str, Any],
    record: Record,
    uses: Mapping[Any, Iterable[int]],
    budget: Budget,
    samples: Mapping[Signature, str] = MappingProxyType({}),
) -> Launches:
    """Check the launches of a record, and evaluate them for all that it serves, as far as the budget goes.

    `obj` is the record as JSON, `uses` the signatures that it serves with M values of interest: each is evaluated for
    these and `ROWS`. `samples` are GEMMs of forms that it serves, with the form's name, and are evaluated for `ROWS`. A
    function that serves none of either is evaluated for any legal extents.

    Raises:
        RecordError: what must reach a kernel does not, a symbol is bound to nothing, clusters or addresses are out of
            range, no shape of a signature can be launched, or native code and Python do not agree.
    """
    unseen = check_inputs(obj, record, every_tensor=bool(uses or samples))
    warnings = [f"no launch is given {_named(unseen)}; is that meant?"] if unseen else []
    groups = [_Group(signature, tuple(sorted({*ROWS, *rows}))) for signature, rows in uses.items()]
    groups += [_Group(signature, ROWS, form) for signature, form in samples.items() if signature not in uses]
    groups = groups or [_Group(None, ROWS)]
    evaluator, left = Evaluator(obj, record), sum(len(group.rows) for group in groups)
    if not budget.take(evaluator.steps_to_read):
        return Launches(0, left, tuple(warnings))
    if constants := suspicious_constants(obj):
        warnings.append(f"{', '.join(constants)}, which looks like a device address that was compiled in")
    launched = 0
    for group in groups:
        refused = []
        for case in group.cases(record):
            if not budget.take(evaluator.steps):
                return Launches(launched, left, tuple(warnings))
            left -= 1
            reason = evaluator.launch(case)
            if reason is None:
                launched += 1
            else:
                refused.append(reason)
        if len(refused) == len(group.rows):
            raise RecordError(f"function {record.name}: it refuses every shape of {group.what}, first {refused[0]}")
    return Launches(launched, left, tuple(warnings))


def check_inputs(obj: dict[str, Any], record: Record, every_tensor: bool) -> list[str]:
    """The tensors that no launch is given, of a function that may take some for their extents alone.

    Raises:
        RecordError: a workspace, a tensor where `every_tensor` must be read or written, or all of them reach no kernel;
            or a symbol is the extent or stride of no tensor.
    """
    tensors = [a for a in record.leaves() if isinstance(a, TensorArgument)]
    given = {slot[2] for launch in obj["program"]["launches"] for p in launch["parameters"] for slot in p["slots"]}
    pointers = list(enumerate(record.program.pointers))  # of the tensors, and then of the workspaces
    unseen = [name for number, name in pointers[: len(tensors)] if number not in given]
    needed = [name for number, name in pointers[len(tensors) :] if number not in given]
    if every_tensor or len(unseen) == len(tensors):
        needed = unseen + needed
    if needed:
        raise RecordError(
            f"function {record.name}: no launch is given {_named(needed)}, so it cannot compute what its arguments "
            "say; build it again"
        )
    bound = {x for tensor in tensors for x in (*tensor.shape, *tensor.strides)}
    for name in record.symbols:
        if name not in bound:
            raise RecordError(
                f"function {record.name}: the symbol {name!r} is no extent or stride of a tensor, so no call can give "
                "it a value; build it again"
            )
    return unseen


def _named(names: list[str]) -> str:
    return f"the tensor or workspace {names[0]!r}" if len(names) == 1 else f"the tensors or workspaces {names}"


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
