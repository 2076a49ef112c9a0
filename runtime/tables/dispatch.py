"""An operation's table in an archive: signature, GPU and M in, the name of the best function out.

Also the rules of which GPUs run which targets, which of several entries a GPU takes, and which records can be what an
entry says. Knows nothing of the tensors of a call, cubins or the driver.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..device.gpus import Gpu, distance
from ..errors import KernelMiss
from ..program.operation import Operand, Operation, Signature, operation
from ..program.record import Record, SuppliedArgument, TensorArgument, WorkspaceArgument
from .table import TARGET, Entry, read

_NEAREST = 3
Capability = tuple[int, int]


@functools.lru_cache(1024)
def serves(target: str, capability: Capability) -> bool:
    """Whether a cubin compiled for `target` runs on a GPU of compute capability `capability`.

    CUDA C++ programming guide, binary compatibility: a plain target serves its own major version from its own minor
    version up (sm_80: 8.0, 8.6, 8.9); with suffix "a" exactly its own; "f" is taken as "a" here.
    """
    match = TARGET.fullmatch(target)
    if match is None:
        return False
    major, minor = int(match[1]), int(match[2])
    if match[3]:
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def preference(target: str) -> tuple[int, bool]:
    """Sorts targets that serve one GPU, best last: the nearest minor version, then the architecture-specific one."""
    match = TARGET.fullmatch(target)
    return (int(match[2]), bool(match[3])) if match else (-1, False)


def record_mismatch(signature: Signature, record: Record) -> str | None:
    """Why the function of `record` cannot compute `signature`, as the end of a sentence; None where it can.

    It must take exactly `signature.operands()` in this order, of their element types and layouts and by their names, or
    by place those that its operation says. M is a symbol, the other extents are symbols or what the signature makes of
    them; what is one extent in the signature, and only that, is one symbol. What a record does not show (accumulator,
    epilogue, the arithmetic itself) is not looked at. Functions of equal `Record.tensors` have equal answers.
    """
    operands, by_place = signature.operands(), operation(signature.operation).by_place
    taken = [a for a in record.arguments if not isinstance(a, SuppliedArgument)]
    tensors, numbers = taken[: len(operands)], taken[len(operands) :]
    fits = len(tensors) == len(operands) and all(isinstance(a, TensorArgument) for a in tensors)
    if not fits or [(a.name, getattr(a, "dtype", None)) for a in numbers] != list(signature.numbers()):
        wanted = ", ".join([*(x.name for x in operands), *(name for name, _ in signature.numbers())])
        found = ", ".join(x.name for x in taken)
        return f"does not take the arguments of this {signature.operation} ({wanted}) but ({found})"
    extents: dict[str, int | str] = {}
    for operand, tensor in zip(operands, tensors, strict=True):
        assert isinstance(tensor, TensorArgument)
        if problem := _operand_mismatch(by_place, operand, tensor, extents):
            return problem
    known = signature.extents()
    for axis, extent in extents.items():
        if isinstance(extent, int) and extent != known.get(axis):
            return f"has {axis} fixed at {extent}, not {known.get(axis, 'any number of rows')}"
    symbols = [extent for extent in extents.values() if isinstance(extent, str)]
    if len(set(symbols)) != len(symbols):
        return "has one symbol for two of " + ", ".join(f"{axis} ({extent})" for axis, extent in extents.items())
    return None


def workspaces_of(record: Record) -> list[str]:
    """The workspaces that a function takes, by name: where it has one, CTAs share tiles through memory, and which
    parts of K they add up in which order may depend on M."""
    return [argument.name for argument in record.leaves() if isinstance(argument, WorkspaceArgument)]


def _operand_mismatch(
    by_place: Mapping[str, str], operand: Operand, tensor: TensorArgument, extents: dict[str, int | str]
) -> str | None:
    """Why `tensor` cannot be `operand`; collects the extent of each axis."""
    which = by_place.get(operand.name, operand.name)
    if operand.name not in by_place and tensor.name != operand.name:
        return f"takes {tensor.name} where {operand.name} belongs"
    if tensor.dtype != operand.dtype:
        return f"takes {which} as {tensor.dtype}, not {operand.dtype}"
    if len(tensor.shape) != len(operand.axes):
        return _other_shape(which, operand, tensor)
    if operand.layout == "columns" and tensor.strides[-2] != 1:
        return f"takes {which} with stride {tensor.strides[-2]} of {operand.axes[-2]}, not 1"
    if operand.layout == "rows" and tensor.strides[-1] != 1:
        return f"takes {which} with innermost stride {tensor.strides[-1]}, not 1"
    if operand.layout == "tiles" and tensor.strides[-2:] != (tensor.shape[-1], 1):
        return f"takes {which} with strides {tensor.strides}, and not without gaps, ({tensor.shape[-1]}, 1)"
    for axis, extent in zip(operand.axes, tensor.shape, strict=True):
        if axis.isdigit():
            if extent != int(axis):
                return _other_shape(which, operand, tensor)
        elif extents.setdefault(axis, extent) != extent:
            return f"{_other_shape(which, operand, tensor)}: {axis} is {extents[axis]}"
    return None


def _other_shape(which: str, operand: Operand, tensor: TensorArgument) -> str:
    return f"takes {which} of shape ({', '.join(map(str, tensor.shape))}), not ({', '.join(operand.axes)})"


def nearest_kind(entries: Iterable[Entry], gpu: Gpu | None) -> Entry | None:
    """Of entries for one signature and target that which `gpu` takes; None of none.

    The one for this kind of GPU; else the tuned one whose kind is nearest (`runtime.device.gpus.distance`); else the
    tuned one for any kind; and where nothing was tuned, the nearest kind's before that for any. Where `gpu` is None, no
    kind is this one or nearer than another, and the first name goes first.
    """

    def order(entry: Entry) -> tuple[Any, ...]:
        kind, tuned = entry.gpu, entry.state == "tuned"
        if kind is None:
            return True, not tuned, True
        if gpu is None:
            return True, not tuned, False, kind
        return not kind.same_kind(gpu), not tuned, False, distance(kind, gpu)

    return min(entries, key=order, default=None)


class Dispatch:
    """The table of an operation, checked."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        self._by_signature: dict[Signature, list[Entry]] = {}
        for entry in entries:
            self._by_signature.setdefault(entry.signature, []).append(entry)

    @classmethod
    def from_json(cls, obj: Any, of: Operation, targets: Mapping[str, str] | None = None) -> Dispatch:
        """Check and read a table of the operation `of`; `targets`, the target of each function by name, lets it check
        the names too.

        Raises:
            RecordError: anything is missing, unknown, out of order, or names a function that is not there.
        """
        return cls(read(obj, of, targets))

    def entries_for(self, capability: Capability, gpu: Gpu | None = None) -> tuple[Entry, ...]:
        """For each signature the entry that a GPU of `capability`, and of the kind `gpu`, uses, of those it can run."""
        found = (self.choose(s, capability, gpu) for s in self._by_signature)
        return tuple(entry for entry in found if entry is not None)

    def lookup(self, signature: Signature, capability: Capability, gpu: Gpu | None = None) -> Entry:
        """The entry for `signature` on the target that suits `capability` best, and there that of `nearest_kind`.

        Raises:
            KernelMiss: there is none; the message names the nearest entries and why each was rejected.
        """
        entry = self.choose(signature, capability, gpu)
        if entry is None:
            raise KernelMiss(self.explain(signature, capability))
        return entry

    def find(self, signature: Signature, capability: Capability, m: int, gpu: Gpu | None = None) -> str:
        """The name of the function that is best for `signature` at `m` rows; raises as `lookup` does."""
        return self.lookup(signature, capability, gpu).best(m)

    def choose(self, signature: Signature, capability: Capability, gpu: Gpu | None = None) -> Entry | None:
        """What `lookup` finds, or None."""
        entries = [e for e in self._by_signature.get(signature, ()) if serves(e.target, capability)]
        target = max((e.target for e in entries), key=preference, default=None)
        return nearest_kind((e for e in entries if e.target == target), gpu)

    def explain(self, signature: Signature, capability: Capability, more: Sequence[str] = ()) -> str:
        """Why there is no entry for `signature`: the nearest ones, and how they differ; then `more`, and what to do."""
        gpu = f"compute capability {capability[0]}.{capability[1]}"
        lines = [f"no kernel for {signature.key()} on {gpu}"]
        apart = {(e.signature, e.target): e for e in self.entries}.values()
        of = operation(signature.operation)

        def distance_of(entry: Entry) -> tuple[float, str, str]:
            elsewhere = 10.0 * (not serves(entry.target, capability))
            return of.distance(entry.signature, signature) + elsewhere, entry.signature.key(), entry.target

        near = sorted(apart, key=distance_of)[:_NEAREST]
        if near:
            lines.append(f"the nearest of {len(self.entries)} entries:")
            lines += [
                f"  {e.signature.key()} for {e.target}: {', '.join(_reasons(of, e, signature, capability))}"
                for e in near
            ]
        else:
            lines.append(f"the archive's {of.name} table has no entries")
        lines += [*more, "add the problem to the manifest and build the archive again"]
        return "\n".join(lines)


def _reasons(of: Operation, entry: Entry, wanted: Signature, capability: Capability) -> list[str]:
    """Why an entry does not serve what is wanted."""
    reasons = of.differences(entry.signature, wanted)
    if not serves(entry.target, capability):
        reasons.append(f"{entry.target} does not run on compute capability {capability[0]}.{capability[1]}")
    return reasons
