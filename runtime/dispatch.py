"""The gemm table of an archive: signature and M in, the name of the best function out.

Also the rules of which GPUs run which targets, and of which records can be what an entry says. Knows nothing of the
tensors of a call, cubins or the driver.
"""

from __future__ import annotations

import functools
import math
import re
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NoReturn

from .errors import KernelMiss, RecordError
from .limits import MAX_GEMM_ENTRIES, MAX_GEMM_FUNCTIONS, MAX_GEMM_RANGES
from .record import Record, SuppliedArgument, TensorArgument
from .signature import Operand, Signature
from .tuples import NamedTuple

STATES = ("tuned", "ranked")
_TARGET = re.compile(r"sm_([0-9]+)([0-9])([af]?)")
_NEAREST = 3
_IN_PLACE = {"a": "A", "b": "B", "d": "D"}  # operands told by their place; what follows them is told by name
Capability = tuple[int, int]


@functools.lru_cache(1024)
def serves(target: str, capability: Capability) -> bool:
    """Whether a cubin compiled for `target` runs on a GPU of compute capability `capability`.

    CUDA C++ programming guide, binary compatibility: a plain target serves its own major version from its own minor
    version up (sm_80: 8.0, 8.6, 8.9); with suffix "a" exactly its own; "f" is taken as "a" here.
    """
    match = _TARGET.fullmatch(target)
    if match is None:
        return False
    major, minor = int(match[1]), int(match[2])
    if match[3]:
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def preference(target: str) -> tuple[int, bool]:
    """Sorts targets that serve one GPU, best last: the nearest minor version, then the architecture-specific one."""
    match = _TARGET.fullmatch(target)
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


class Entry(NamedTuple):
    """What the table says of one signature on one target.

    `ranges` pairs the largest M of a range with its function, ascending; the last has None, every larger M.
    `candidates` lists, for M values that were looked at, functions from best to worst. `timings` is where the
    choice comes from, and opaque here.
    """

    signature: Signature
    target: str
    state: str
    ranges: tuple[tuple[int | None, str], ...]
    candidates: tuple[tuple[int, tuple[str, ...]], ...]
    timings: tuple[Any, ...]

    def best(self, m: int) -> str:
        """The function for `m`."""
        return self.ranges[bisect_left(self.ranges, m, hi=len(self.ranges) - 1, key=_bound)][1]

    def functions(self, m: int) -> tuple[str, ...]:
        """The function for `m`, then what to try where the device cannot run it: best first, no name twice, not too
        many."""
        names = {self.best(m): None}
        if self.candidates:
            _, ranked = min(self.candidates, key=lambda c: abs(math.log(c[0] / max(m, 1))))
            names.update(dict.fromkeys(ranked))
        names.update(dict.fromkeys(name for _, name in self.ranges))
        return tuple(names)[:MAX_GEMM_FUNCTIONS]


def _bound(row: tuple[int | None, str]) -> int:
    """The largest M of a range but the last."""
    assert row[0] is not None
    return row[0]


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
        obj = _fields(obj, {"entries"}, "gemm table")
        if len(_list(obj["entries"], "gemm table")) > MAX_GEMM_ENTRIES:
            _fail("gemm table", f"has {len(obj['entries'])} entries, at most {MAX_GEMM_ENTRIES} are read")
        entries = [_read_entry(e, i, targets) for i, e in enumerate(obj["entries"])]
        if (ranges := sum(len(entry.ranges) for entry in entries)) > MAX_GEMM_RANGES:
            _fail("gemm table", f"has {ranges} ranges of M, at most {MAX_GEMM_RANGES} are read")
        seen = set()
        for entry in entries:
            if (entry.signature, entry.target) in seen:
                _fail("gemm table", f"two entries for {entry.signature.key()} on {entry.target}")
            seen.add((entry.signature, entry.target))
        return cls(tuple(entries))

    def entries_for(self, capability: Capability) -> tuple[Entry, ...]:
        """For each signature the entry that a GPU of `capability` uses, of those it can run."""
        found = (self._choose(s, capability) for s in self._by_signature)
        return tuple(entry for entry in found if entry is not None)

    def lookup(self, signature: Signature, capability: Capability) -> Entry:
        """The entry for `signature` on the target that suits `capability` best.

        Raises:
            KernelMiss: there is none; the message names the nearest entries and why each was rejected.
        """
        entry = self._choose(signature, capability)
        if entry is None:
            raise KernelMiss(self._explain(signature, capability))
        return entry

    def find(self, signature: Signature, capability: Capability, m: int) -> str:
        """The name of the function that is best for `signature` at `m` rows; raises as `lookup` does."""
        return self.lookup(signature, capability).best(m)

    def _choose(self, signature: Signature, capability: Capability) -> Entry | None:
        entries = [e for e in self._by_signature.get(signature, ()) if serves(e.target, capability)]
        return max(entries, key=lambda e: preference(e.target), default=None)

    def _explain(self, signature: Signature, capability: Capability) -> str:
        gpu = f"compute capability {capability[0]}.{capability[1]}"
        lines = [f"no kernel for {signature.key()} on {gpu}"]
        near = sorted(self.entries, key=lambda e: _distance(e, signature, capability))[:_NEAREST]
        if near:
            lines.append(f"the nearest of {len(self.entries)} entries:")
            lines += [
                f"  {e.signature.key()} for {e.target}: {', '.join(_differences(e, signature, capability))}"
                for e in near
            ]
        else:
            lines.append("the archive's gemm table has no entries")
        lines.append("add the problem to the manifest and build the archive again")
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


# --- reading ---


def _fail(where: str, what: str) -> NoReturn:
    raise RecordError(f"{where}: {what}; build the archive again")


def _fields(obj: Any, names: set[str], where: str) -> dict[str, Any]:
    if not isinstance(obj, dict) or set(obj) != names:
        _fail(where, f"needs exactly the fields {sorted(names)}, found {obj!r:.200}")
    return obj


def _list(obj: Any, where: str) -> list[Any]:
    if not isinstance(obj, list):
        _fail(where, f"must be a list, found {obj!r:.200}")
    return obj


def _extent(obj: Any, above: int, where: str) -> int:
    if type(obj) is not int or obj <= above:
        _fail(where, f"M values must be integers in ascending order, found {obj!r:.50} after {above}")
    return obj


def _read_entry(obj: Any, number: int, targets: Mapping[str, str] | None) -> Entry:
    where = f"gemm table entry {number}"
    obj = _fields(obj, {"signature", "target", "state", "ranges", "candidates", "timings"}, where)
    signature = Signature.from_json(obj["signature"])
    target = obj["target"]
    if not isinstance(target, str) or not _TARGET.fullmatch(target):
        _fail(where, f"unknown target {target!r:.50}")
    if obj["state"] not in STATES:
        _fail(where, f"state must be one of {STATES}, found {obj['state']!r:.50}")

    def function(name: Any) -> str:
        if not isinstance(name, str) or not name:
            _fail(where, f"a function's name must be a word, found {name!r:.100}")
        if targets is not None and targets.get(name) != target:
            held = f"is for {targets[name]}" if name in targets else "is not in the archive"
            _fail(where, f"function {name!r} {held}, the entry is for {target}")
        return name

    rows = _list(obj["ranges"], where)
    if not rows:
        _fail(where, "there is no range")
    ranges: list[tuple[int | None, str]] = []
    above = 0
    for i, row in enumerate(rows):
        row = _fields(row, {"m_max", "function"}, f"{where} range {i}")
        bound = row["m_max"]
        if (bound is None) != (i == len(rows) - 1):
            _fail(where, "the last range, and only that, has m_max null")
        if bound is not None:
            above = _extent(bound, above, where)
        ranges.append((bound, function(row["function"])))
    candidates = []
    above = 0
    for row in _list(obj["candidates"], where):
        if not isinstance(row, list) or len(row) != 2:
            _fail(where, f"a row of candidates is [m, [names]], found {row!r:.200}")
        above = _extent(row[0], above, where)
        candidates.append((above, tuple(function(name) for name in _list(row[1], where))))
    timings = tuple(_list(obj["timings"], where))
    return Entry(signature, target, obj["state"], tuple(ranges), tuple(candidates), timings)
