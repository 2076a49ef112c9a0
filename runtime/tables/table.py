"""An operation's table in an archive, read strictly and written: what serves which M of a signature, and where that is
from.

A table has about a hundred ranges for each of its entries, so it is checked a column at a time, and each function's
name is in an entry once. `docs/records.md` has its fields. Knows nothing of which entry a GPU takes.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..container.fields import fail_table, require_schema, table_fields, table_list
from ..device.gpus import Gpu
from ..errors import RecordError
from ..limits import (
    MAX_CALL_FUNCTIONS,
    MAX_GPU_MEMORY_GBPS,
    MAX_GPU_MULTIPROCESSORS,
    MAX_NAME_CHARACTERS,
    MAX_TABLE_ENTRIES,
    MAX_TABLE_RANGES,
)
from ..named_tuple import NamedTuple
from ..program.operation import Operation

SCHEMA = 1  # raised when what a field means changes
STATES = ("tuned", "ranked")
TARGET = re.compile(r"sm_([0-9]+)([0-9])([af]?)")
_TABLE_FIELDS = frozenset({"schema", "gpus", "entries"})
_TABLE_ABSENT = frozenset({"gpus"})
_GPU_FIELDS = frozenset({"name", "multiprocessors", "memory_gbps"})
# Of an entry: what may be absent is null or empty then, and is not written where it is.
_ABSENT = frozenset({"gpu", "tuned_to", "invariant", "torch_faster", "apart", "candidates", "timings"})
_FIELDS = frozenset({"signature", "target", "state", "functions", "ranges"}) | _ABSENT


class TableLimitExceeded(RecordError):
    """A table that is well formed so far, and larger than any that is read."""


class Entry(NamedTuple):
    """What the table says of one signature on one target, for one kind of GPU or, where `gpu` is None, for any.

    `names` are its functions, which the rest counts from 0: `chosen[i]` serves M up to `bounds[i]`, and the last of
    `chosen`, which has no bound, every larger M. `invariant` is the same, bounds and then functions, for callers who
    want equal bits at every M, which all of its functions give; None if there is none. `torch_faster` has the first and
    the last M (None: no last) of where torch was measured to be faster; `apart`, of where the same product without the
    activation, and the activation after it, were, among a layer's other kernels. `ranked` lists, for M values that were
    looked at, functions from best to worst. `timings` is where the choice comes from, and opaque here. `tuned_to` is
    the largest M that was measured, None where nobody knows.
    """

    signature: Any  # of the operation whose table it is
    target: str
    gpu: Gpu | None
    state: str
    names: tuple[str, ...]
    bounds: tuple[int, ...]
    chosen: tuple[int, ...]
    invariant: tuple[tuple[int, ...], tuple[int, ...]] | None
    torch_faster: tuple[tuple[int, int | None], ...]
    apart: tuple[tuple[int, int | None], ...]
    ranked: tuple[tuple[int, tuple[int, ...]], ...]
    timings: tuple[Any, ...]
    tuned_to: int | None = None

    @property
    def ranges(self) -> tuple[tuple[int | None, str], ...]:
        """The largest M of each range with its function, ascending; the last has None, every larger M."""
        return self._by_name(self.bounds, self.chosen)

    @property
    def invariant_ranges(self) -> tuple[tuple[int | None, str], ...] | None:
        """`invariant`, by name, as `ranges`."""
        return None if self.invariant is None else self._by_name(*self.invariant)

    def _by_name(self, bounds: Sequence[int], chosen: Sequence[int]) -> tuple[tuple[int | None, str], ...]:
        return tuple((bound, self.names[i]) for bound, i in zip((*bounds, None), chosen, strict=True))

    @property
    def candidates(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """`ranked`, by name."""
        return tuple((m, tuple(self.names[i] for i in indexes)) for m, indexes in self.ranked)

    def best(self, m: int) -> str:
        """The function for `m`."""
        return self.names[self.chosen[bisect_left(self.bounds, m)]]

    def functions(self, m: int) -> tuple[str, ...]:
        """The function for `m`, then what to try where the device cannot run it: best first, no name twice, not too
        many. Those ranked for the nearest M come before those of other ranges, and of these the nearest first."""
        place = bisect_left(self.bounds, m)
        found = {self.chosen[place]: None}
        if self.ranked:
            _, ranked = min(self.ranked, key=lambda row: abs(math.log(row[0] / max(m, 1))))
            found.update(dict.fromkeys(ranked))
        others = itertools.zip_longest(self.chosen[place + 1 :], reversed(self.chosen[:place]))
        found.update((index, None) for pair in others for index in pair if index is not None)
        return tuple(self.names[index] for index in itertools.islice(found, MAX_CALL_FUNCTIONS))

    def torch_is_faster(self, m: int) -> bool:
        """Whether torch's own kernel was measured to be faster at `m`, or at M values around it."""
        return any(first <= m and (last is None or m <= last) for first, last in self.torch_faster)

    def only_invariant(self) -> Entry:
        """This with what `invariant`, which must be there, has, and nothing else: no other function stands in."""
        assert self.invariant is not None
        bounds, by_place = self.invariant
        places = {place: i for i, place in enumerate(dict.fromkeys(by_place))}
        chosen = tuple(places[place] for place in by_place)
        return self._replace(
            names=tuple(self.names[place] for place in places),
            bounds=bounds,
            chosen=chosen,
            invariant=(bounds, chosen),
            torch_faster=(),
            apart=(),
            ranked=(),
        )


def read(obj: Any, of: Operation, targets: Mapping[str, str] | None = None) -> tuple[Entry, ...]:
    """Check a table of the operation `of` and read its rows; `targets`, the target of each function by name, lets it
    check the names too.

    Raises:
        RecordError: anything is missing, unknown, out of order, unused, or names a function that is not there.
        TableLimitExceeded: it has more rows than are read.
        UnsupportedSchema: it is of another schema than `SCHEMA`.
    """
    table = f"{of.name} table"
    require_schema(obj, SCHEMA, table)
    obj = table_fields(obj, _TABLE_FIELDS, table, _TABLE_ABSENT)
    rows = table_list(obj["entries"], f"{table}: entries")
    if len(rows) > MAX_TABLE_ENTRIES:
        raise TableLimitExceeded(_said(table, f"has {len(rows)} entries, at most {MAX_TABLE_ENTRIES} are read"))
    gpus = _read_gpus(table_list(obj.get("gpus", []), f"{table}: gpus"), table)
    entries = [_read_entry(row, number, gpus, targets, of) for number, row in enumerate(rows)]
    if (ranges := sum(map(_count_ranges, entries))) > MAX_TABLE_RANGES:
        raise TableLimitExceeded(_said(table, f"has {ranges} ranges of M, at most {MAX_TABLE_RANGES} are read"))
    seen = set()
    for entry in entries:
        key = entry.signature, entry.target, entry.gpu
        if key in seen:
            kind = "any GPU" if entry.gpu is None else entry.gpu.words()
            fail_table(table, f"two entries for {entry.signature.key()} on {entry.target}, {kind}")
        seen.add(key)
    if unused := set(gpus) - {entry.gpu for entry in entries}:
        fail_table(table, f"no entry is for {min(unused).words()}, which is among its gpus")
    return tuple(entries)


def write(entries: Iterable[Entry]) -> dict[str, Any]:
    """The table with these rows, as `read` takes it."""
    entries = list(entries)
    places = {gpu: i for i, gpu in enumerate(dict.fromkeys(e.gpu for e in entries if e.gpu is not None))}
    found: dict[str, Any] = {"schema": SCHEMA, "entries": [_write_entry(entry, places) for entry in entries]}
    return found | ({"gpus": [gpu._asdict() for gpu in places]} if places else {})


def _write_entry(entry: Entry, gpus: Mapping[Gpu, int]) -> dict[str, Any]:
    may_be_absent = {
        "gpu": None if entry.gpu is None else gpus[entry.gpu],
        "tuned_to": entry.tuned_to,
        "invariant": None if entry.invariant is None else _write_ranges(*entry.invariant),
        "torch_faster": [list(pair) for pair in entry.torch_faster],
        "apart": [list(pair) for pair in entry.apart],
        "candidates": [[m, list(indexes)] for m, indexes in entry.ranked],
        "timings": list(entry.timings),
    }
    return {
        "signature": entry.signature.to_json(),
        "target": entry.target,
        "state": entry.state,
        "functions": list(entry.names),
        "ranges": _write_ranges(entry.bounds, entry.chosen),
        **{name: value for name, value in may_be_absent.items() if value is not None and value != []},
    }


def _write_ranges(bounds: Sequence[int], chosen: Sequence[int]) -> list[list[int | None]]:
    return [[bound, place] for bound, place in zip((*bounds, None), chosen, strict=True)]


def _count_ranges(entry: Entry) -> int:
    return len(entry.chosen) + (0 if entry.invariant is None else len(entry.invariant[1]))


def _said(where: str, what: str) -> str:
    return f"{where}: {what}; build the archive again"


def _read_gpus(rows: list[Any], table: str) -> list[Gpu]:
    if len(rows) > MAX_TABLE_ENTRIES:
        raise TableLimitExceeded(_said(table, f"has {len(rows)} gpus, at most {MAX_TABLE_ENTRIES} are read"))
    found: dict[Gpu, None] = {}
    for number, row in enumerate(rows):
        where = f"{table}: gpus[{number}]"
        row = table_fields(row, _GPU_FIELDS, where)
        name, sms, rate = row["name"], row["multiprocessors"], row["memory_gbps"]
        if type(name) is not str or not 0 < len(name) <= MAX_NAME_CHARACTERS:
            fail_table(where, f"name must be a word of at most {MAX_NAME_CHARACTERS} characters, found {name!r:.50}")
        if type(sms) is not int or not 1 <= sms <= MAX_GPU_MULTIPROCESSORS:
            fail_table(where, f"multiprocessors must be 1 to {MAX_GPU_MULTIPROCESSORS}, found {sms!r:.50}")
        if type(rate) is not int or not 0 <= rate <= MAX_GPU_MEMORY_GBPS:
            fail_table(where, f"memory_gbps must be 0 to {MAX_GPU_MEMORY_GBPS}, found {rate!r:.50}")
        gpu = Gpu(name, sms, rate)
        if gpu in found:
            fail_table(where, f"{gpu.words()} is there twice")
        found[gpu] = None
    return list(found)


def _read_entry(obj: Any, number: int, gpus: Sequence[Gpu], targets: Mapping[str, str] | None, of: Operation) -> Entry:
    where = f"{of.name} table entry {number}"
    obj = table_fields(obj, _FIELDS, where, _ABSENT)
    signature = of.read(obj["signature"])
    target, gpu = obj["target"], obj.get("gpu")
    if not isinstance(target, str) or not TARGET.fullmatch(target):
        fail_table(where, f"unknown target {target!r:.50}")
    if obj["state"] not in STATES:
        fail_table(where, f"state must be one of {STATES}, found {obj['state']!r:.50}")
    if gpu is not None:
        _indexes([gpu], len(gpus), "gpus", f"{where} gpu")
    names = _read_names(table_list(obj["functions"], f"{where} functions"), target, targets, f"{where} functions")
    bounds, chosen = _read_ranges(obj["ranges"], len(names), f"{where} ranges")
    if obj.get("tuned_to") is not None:
        _ascending([obj["tuned_to"]], f"{where} tuned_to")
    invariant = None
    if obj.get("invariant") is not None:
        invariant = _read_ranges(obj["invariant"], len(names), f"{where} invariant")
    ranked = _read_ranked(obj.get("candidates", []), len(names), f"{where} candidates")
    used = {*chosen, *itertools.chain.from_iterable(indexes for _, indexes in ranked)}
    used.update(() if invariant is None else invariant[1])
    if unused := set(range(len(names))) - used:
        fail_table(f"{where} functions", f"{names[min(unused)]!r:.100} is used by no range and is no candidate")
    return Entry(
        signature,
        target,
        None if gpu is None else gpus[gpu],
        obj["state"],
        names,
        bounds,
        chosen,
        invariant,
        _read_intervals(obj.get("torch_faster", []), f"{where} torch_faster"),
        _read_intervals(obj.get("apart", []), f"{where} apart"),
        ranked,
        tuple(table_list(obj.get("timings", []), f"{where} timings")),
        obj.get("tuned_to"),
    )


def _read_names(rows: list[Any], target: str, targets: Mapping[str, str] | None, where: str) -> tuple[str, ...]:
    for name in rows:
        if not isinstance(name, str) or not name:
            fail_table(where, f"a function's name must be a word, found {name!r:.100}")
        if targets is not None and targets.get(name) != target:
            held = f"is for {targets[name]}" if name in targets else "is not in the archive"
            fail_table(where, f"function {name!r:.300} {held}, the entry is for {target}")
    if len(set(rows)) != len(rows):
        fail_table(where, f"{next(name for name in rows if rows.count(name) > 1)!r:.100} is there twice")
    return tuple(rows)


def _columns(rows: Any, what: str, where: str) -> list[tuple[Any, ...]]:
    """The two columns of a list of pairs; none of an empty one."""
    table_list(rows, where)
    if not (set(map(type, rows)) <= {list} and set(map(len, rows)) <= {2}):
        bad = next(row for row in rows if type(row) is not list or len(row) != 2)
        fail_table(where, f"a row is {what}, found {bad!r:.200}")
    return list(zip(*rows, strict=True))


def _ascending(values: Sequence[Any], where: str) -> None:
    """Whether these are M values that increase; a loop over each would be most of what reading a table takes."""
    above: Any = 0
    if set(map(type, values)) <= {int} and all(map(operator.lt, (0, *values), values)):
        return
    for value in values:
        if type(value) is not int or value <= above:
            fail_table(where, f"M values must be integers in ascending order, found {value!r:.50} after {above}")
        above = value


def _are_indexes(values: Sequence[Any], count: int) -> bool:
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) < count)


def _indexes(values: Sequence[Any], count: int, of: str, where: str) -> None:
    """Whether these count one of `count` things each."""
    if not _are_indexes(values, count):
        bad = next(value for value in values if type(value) is not int or not 0 <= value < count)
        fail_table(where, f"{bad!r:.50} is no index into the {count} {of}")


def _read_ranges(obj: Any, count: int, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    columns = _columns(obj, "[m_max, index of a function]", where)
    if not columns:
        fail_table(where, "there is no range")
    (*bounds, last), chosen = columns
    if last is not None or None in bounds:
        fail_table(where, "the last range, and only that, has m_max null")
    _ascending(bounds, where)
    _indexes(chosen, count, "functions", where)
    if not all(map(operator.ne, chosen, chosen[1:])):
        place = next(i for i, pair in enumerate(itertools.pairwise(chosen)) if pair[0] == pair[1])
        fail_table(where, f"those up to M = {bounds[place]} and after it have the same function, and are one range")
    return tuple(bounds), chosen


def _read_ranked(obj: Any, count: int, where: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
    columns = _columns(obj, "[m, [indexes of functions]]", where)
    if not columns:
        return ()
    tokens, ranked = columns
    _ascending(tokens, where)
    if set(map(type, ranked)) != {list} or not _are_indexes(list(itertools.chain.from_iterable(ranked)), count):
        for m, indexes in zip(tokens, ranked, strict=True):  # which of them it is
            _indexes(table_list(indexes, f"{where} at M = {m}"), count, "functions", f"{where} at M = {m}")
    return tuple(zip(tokens, map(tuple, ranked), strict=True))


def _read_intervals(obj: Any, where: str) -> tuple[tuple[int, int | None], ...]:
    columns = _columns(obj, "[m_min, m_max]", where)
    if not columns:
        return ()
    above: Any = 0
    for i, (first, last) in enumerate(zip(*columns, strict=True)):
        if type(first) is not int or first <= above:
            fail_table(where, f"M values must be integers in ascending order, found {first!r:.50} after {above}")
        if last is None and i < len(columns[0]) - 1:
            fail_table(where, "only the last range may have m_max null")
        if last is not None and (type(last) is not int or last < first):
            fail_table(where, f"a range may not end before it begins, found {last!r:.50} after {first}")
        above = last
    return tuple(zip(*columns, strict=True))
