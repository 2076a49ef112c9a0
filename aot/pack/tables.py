"""Makes tables of operations of rows that have functions by name; `runtime.tables.table` writes and reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.errors import AotError
from runtime.program.operation import Operation, is_operation, operation
from runtime.tables.dispatch import Entry
from runtime.tables.table import TableLimitExceeded, read, write

from ..search.operation import building, names
from .fields import naming


class TableTooLarge(AotError):
    """A table that readers would refuse."""


@dataclass(frozen=True)
class Row:
    """A row of an operation's table, with functions by name: what serves `signature` on `target`.

    `gpu` is the kind of GPU that it is for, None any of the target's; `state` is "tuned" or "ranked". `ranges` pairs
    the largest M of a range with its function, ascending, neighbours with different ones; the last has None, every
    larger M. `invariant` is the same for callers who want equal bits at every M, which all of its functions give, or
    None. `torch_faster` has the first and the last M (None: no last) of where torch was faster, ascending and disjoint,
    `apart` of where a product without its activation, and the activation after it, were.
    `candidates` pairs M values with functions, best first. `timings` is what was measured (`aot.pack.timings`),
    `tuned_to` the largest M that was.
    """

    signature: Any
    target: str
    gpu: Gpu | None
    state: str
    ranges: Sequence[tuple[int | None, str]]
    invariant: Sequence[tuple[int | None, str]] | None = None
    torch_faster: Sequence[tuple[int, int | None]] = ()
    apart: Sequence[tuple[int, int | None]] = ()
    candidates: Sequence[tuple[int, Sequence[str]]] = ()
    timings: Sequence[dict[str, Any]] = ()
    tuned_to: int | None = None

    @classmethod
    def of(cls, entry: Entry) -> Row:
        """A row as it was read."""
        return cls(
            entry.signature,
            entry.target,
            entry.gpu,
            entry.state,
            entry.ranges,
            entry.invariant_ranges,
            entry.torch_faster,
            entry.apart,
            entry.candidates,
            entry.timings,
            entry.tuned_to,
        )

    def names(self) -> set[str]:
        """The functions that it names."""
        return set(self._names_in_order())

    def _names_in_order(self) -> list[str]:
        """Each once: those that serve, by M, then the rest."""
        ranked = itertools.chain.from_iterable(names for _, names in self.candidates)
        serving = (name for _, name in (*self.ranges, *(self.invariant or ())))
        return list(dict.fromkeys([*serving, *ranked]))

    def entry(self) -> Entry:
        """It as a table has it, functions by their place among its names."""
        names = self._names_in_order()
        index = {name: i for i, name in enumerate(names)}

        def by_place(ranges: Sequence[tuple[int | None, str]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
            bounds = tuple(bound for bound, _ in ranges if bound is not None)
            return bounds, tuple(index[name] for _, name in ranges)

        bounds, chosen = by_place(self.ranges)
        return Entry(
            self.signature,
            self.target,
            self.gpu,
            self.state,
            tuple(names),
            bounds,
            chosen,
            None if self.invariant is None else by_place(self.invariant),
            tuple(self.torch_faster),
            tuple(self.apart),
            tuple((m, tuple(index[name] for name in ranked)) for m, ranked in self.candidates),
            tuple(self.timings),
            self.tuned_to,
        )


def operation_tables(rows: Iterable[Row], targets: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The table of each operation that has rows, or may have forms, which readers look up after it; raises as `table`
    does."""
    by_operation: dict[str, list[Row]] = {name: [] for name in names() if building(name).forms}
    for row in rows:
        by_operation.setdefault(row.signature.operation, []).append(row)
    return {name: table(of, operation(name), targets) for name, of in by_operation.items()}


def operations_of(archive: Archive) -> list[str]:
    """The operations that an archive has tables of, in the order of `aot.search.operation.names`."""
    there = [name for name in archive.tables if is_operation(name)]
    return there if len(there) < 2 else sorted(there, key=names().index)


def operation_entries(archive: Archive) -> tuple[Entry, ...]:
    """The entries of all tables of operations that an archive has, in the order of `operations_of`.

    Raises:
        RecordError: one is malformed.
    """
    targets = archive.functions.targets_by_name()
    with naming(archive):
        return tuple(e for name in operations_of(archive) for e in read(archive.table(name), operation(name), targets))


def operation_rows(archive: Archive) -> list[Row]:
    """The rows of all tables of operations that an archive has; raises as `operation_entries` does."""
    return [Row.of(entry) for entry in operation_entries(archive)]


def table(rows: Iterable[Row], of: Operation, targets: Mapping[str, str]) -> dict[str, Any]:
    """The table of the operation `of` with these rows, as readers take it; `targets` has the target of each function.

    Raises:
        TableTooLarge: readers would refuse it for its size.
        RecordError: they would refuse it for a row, which is named.
    """
    found = write(row.entry() for row in rows)
    try:
        read(found, of, targets)
    except TableLimitExceeded as error:
        raise TableTooLarge(f"{str(error).partition(';')[0]}; split the manifests over several archives") from None
    return found
