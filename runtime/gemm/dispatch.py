"""The gemm table of an archive: signature, GPU and M in, the name of the best function out.

Also the rules of which GPUs run which targets, which of several entries a GPU takes, and which records can be what an
entry says. Knows nothing of the tensors of a call, cubins or the driver.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..device.gpus import Gpu, distance
from ..errors import KernelMiss
from ..program.record import Record, SuppliedArgument, TensorArgument, WorkspaceArgument
from .signature import Operand, Signature
from .table import TARGET, Entry, read

_NEAREST = 3
_IN_PLACE = {"a": "A", "b": "B", "d": "D"}  # operands told by their place; what follows them is told by name
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


def gemm_mismatch(signature: Signature, record: Record) -> str | None:
    """Why the function of `record` cannot compute `signature`, as the end of a sentence; None where it can.

    It must take exactly `signature.operands()` in this order, of their element types and, after D, by their names.
    Their innermost strides are 1, but for B where that is N-major (then the stride of N is) and for the scales of
    blocks of A (both free). M is a symbol, the other extents are symbols or what the signature makes of them; what is
    one extent in the signature, and only that, is one symbol. What a record does not show (accumulator, epilogue, the
    arithmetic itself) is not looked at. Functions of equal `Record.tensors` have equal answers.
    """
    operands = signature.operands()
    tensors = [a for a in record.arguments if not isinstance(a, SuppliedArgument)]
    if len(tensors) != len(operands) or not all(isinstance(a, TensorArgument) for a in tensors):
        wanted, found = (", ".join(x.name for x in xs) for xs in (operands, tensors))
        return f"does not take the tensors of this GEMM ({wanted}) but ({found})"
    extents: dict[str, int | str] = {}
    for operand, tensor in zip(operands, tensors, strict=True):
        assert isinstance(tensor, TensorArgument)
        if problem := _operand_mismatch(signature, operand, tensor, extents):
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
    signature: Signature, operand: Operand, tensor: TensorArgument, extents: dict[str, int | str]
) -> str | None:
    """Why `tensor` cannot be `operand`; collects the extent of each axis."""
    which = _IN_PLACE.get(operand.name, operand.name)
    if operand.name not in _IN_PLACE and tensor.name != operand.name:
        return f"takes {tensor.name} where {operand.name} belongs"
    if tensor.dtype != operand.dtype:
        return f"takes {which} as {tensor.dtype}, not {operand.dtype}"
    if len(tensor.shape) != len(operand.axes):
        return _other_shape(operand, tensor)
    if operand.name == "b" and signature.b_major == "n":
        if tensor.strides[-2] != 1:
            return f"takes B with stride {tensor.strides[-2]} of N, not 1"
    elif tensor.strides[-1] != 1 and not (operand.name == "scale_a" and len(operand.axes) == 2):
        return f"takes {which} with innermost stride {tensor.strides[-1]}, not 1"
    for axis, extent in zip(operand.axes, tensor.shape, strict=True):
        if axis == "1":
            if extent != 1:
                return _other_shape(operand, tensor)
        elif extents.setdefault(axis, extent) != extent:
            return f"{_other_shape(operand, tensor)}: {axis} is {extents[axis]}"
    return None


def _other_shape(operand: Operand, tensor: TensorArgument) -> str:
    which, shape = _IN_PLACE.get(operand.name, operand.name), ", ".join(map(str, tensor.shape))
    return f"takes {which} of shape ({shape}), not ({', '.join(operand.axes)})"


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
    """The gemm table of an archive, checked."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        self._by_signature: dict[Signature, list[Entry]] = {}
        for entry in entries:
            self._by_signature.setdefault(entry.signature, []).append(entry)

    @classmethod
    def from_json(cls, obj: Any, targets: Mapping[str, str] | None = None) -> Dispatch:
        """Check and read a table; `targets`, the target of each function by name, lets it check the names too.

        Raises:
            RecordError: anything is missing, unknown, out of order, or names a function that is not there.
        """
        return cls(read(obj, targets))

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
        near = sorted(apart, key=lambda e: _distance(e, signature, capability))[:_NEAREST]
        if near:
            lines.append(f"the nearest of {len(self.entries)} entries:")
            lines += [
                f"  {e.signature.key()} for {e.target}: {', '.join(_differences(e, signature, capability))}"
                for e in near
            ]
        else:
            lines.append("the archive's gemm table has no entries")
        lines += [*more, "add the problem to the manifest and build the archive again"]
        return "\n".join(lines)


def _differences(entry: Entry, wanted: Signature, capability: Capability) -> list[str]:
    have = entry.signature
    reasons = [
        f"{label} is {getattr(have, field)}, wanted {getattr(wanted, field)}"
        for field, label in (
            ("a", "A"),
            ("b", "B"),
            ("d", "D"),
            ("accumulator", "accumulator"),
            ("epilogue", "epilogue"),
            ("scaling", "scaling"),
            ("b_major", "major of B"),
            ("n", "N"),
            ("k", "K"),
            ("batch", "batch"),
            ("overlap", "overlap"),
        )
        if getattr(have, field) != getattr(wanted, field)
    ]
    if not serves(entry.target, capability):
        reasons.append(f"{entry.target} does not run on compute capability {capability[0]}.{capability[1]}")
    return reasons


def _distance(entry: Entry, wanted: Signature, capability: Capability) -> tuple[float, str, str]:
    """How far an entry is from what was wanted: types and words before batch, overlap and extents; ties by name."""
    have = entry.signature
    words = ("a", "b", "d", "accumulator", "epilogue", "scaling", "b_major")
    types = sum(getattr(have, f) != getattr(wanted, f) for f in words)
    extents = abs(math.log2(have.n / wanted.n)) + abs(math.log2(have.k / wanted.k))
    batch, overlap = have.batch != wanted.batch, have.overlap != wanted.overlap
    target = not serves(entry.target, capability)
    return 1000.0 * types + 100.0 * batch + 10.0 * (target + overlap) + extents, have.key(), entry.target
