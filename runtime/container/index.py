"""The index of an archive: what the file holds and where, believed only after every rule is checked.

`docs/format.md` has the rules. Knows neither the file nor what a record, a cubin or a table means. Every server reads
an index when it starts, so it is checked and kept a column at a time: an object for each of thousands of blobs and
functions would take longer to make than all the rest, and would set off the server's garbage collector.
"""

from __future__ import annotations

import itertools
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate, chain, islice
from operator import lt
from types import MappingProxyType
from typing import Any

from ..limits import MAX_INDEX_HEAD_BYTES, MAX_NAME_CHARACTERS
from ..named_tuple import NamedTuple
from . import canonical

RECORDS, TABLES = "records", "tables"
DIGEST_BYTES = 32
TARGET = re.compile(r"(sm_[0-9]{1,2})[0-9][af]?")

_KIND = re.compile(rf"{RECORDS}|sm_[0-9]{{1,2}}x|{TABLES}")
_HEAD_KEYS = {"blocks", "functions", "tables"}
_BLOCK_KEYS = {"blobs", "kind", "length"}
_PRINTABLE = bytes(range(0x20, 0x7F))


class FunctionEntry(NamedTuple):
    """A function's place in the index; `record` and `cubin` are numbers of blobs."""

    name: str
    target: str
    record: int
    cubin: int


class Block(NamedTuple):
    """A compressed block: `kind` is "records", "tables" or the generation of its cubins; sizes in bytes."""

    kind: str
    offset: int
    length: int
    raw_length: int
    sha256: str
    blobs: range


class Blob(NamedTuple):
    """A blob: `offset` counts from the start of its decompressed block; sizes in bytes."""

    sha256: str
    length: int
    block: int
    offset: int


def is_name(text: str) -> bool:
    """Whether `text` can name a function or a table: printable ASCII without spaces, 1 to 255 characters."""
    return 0 < len(text) <= MAX_NAME_CHARACTERS and text.isascii() and text.isprintable() and " " not in text


def generation(target: str) -> str:
    """The architecture generation of a target, the kind of block that its cubins go to: "sm_10x" of "sm_103a".

    Raises:
        ValueError: `target` is not like "sm_90a".
    """
    match = TARGET.fullmatch(target)
    if match is None:
        raise ValueError(f"{target!r:.50} is not a target like 'sm_90a'")
    return f"{match[1]}x"


class Functions(Mapping[str, FunctionEntry]):
    """The functions by name, in the order of their names; an entry is made when it is asked for."""

    def __init__(self, names: list[str], cubins: tuple[int, ...], counts: dict[str, int]) -> None:
        """`names` and `cubins` are by number of function, which is that of its record; `counts` is by target."""
        self._records = dict(zip(names, range(len(names)), strict=True))
        self._cubins = cubins
        self._ends = list(accumulate(counts.values()))
        self.targets = tuple(counts)

    def places(self) -> list[tuple[str, int]]:
        """The names, sorted, each with the number of its record."""
        return sorted(self._records.items())

    def targets_by_name(self) -> dict[str, str]:
        """The target of each function."""
        names, start, found = list(self._records), 0, {}
        for target, end in zip(self.targets, self._ends, strict=True):
            found.update(dict.fromkeys(names[start:end], target))
            start = end
        return found

    def __getitem__(self, name: str) -> FunctionEntry:
        record = self._records[name]
        return FunctionEntry(name, self.targets[bisect_right(self._ends, record)], record, self._cubins[record])

    def __contains__(self, name: object) -> bool:
        return name in self._records

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._records))

    def __len__(self) -> int:
        return len(self._records)


class Index:
    """What an archive holds: `blocks`, `functions` and `tables`; its blocks lie between bytes `begin` and `end`."""

    def __init__(self, raw: bytes, begin: int) -> None:
        """Read the decompressed index.

        Raises:
            ValueError: a rule is broken; the message says which.
        """
        if raw.find(b"\n", 0, MAX_INDEX_HEAD_BYTES + 1) < 0 < len(raw) - MAX_INDEX_HEAD_BYTES:
            raise ValueError(f"its head has more than {MAX_INDEX_HEAD_BYTES} bytes")
        parts = raw.split(b"\n", 2)
        obj = canonical.loads_for_serving(parts[0])
        if type(obj) is not dict or obj.keys() != _HEAD_KEYS:
            raise ValueError(f"it must begin with an object with exactly the keys {sorted(_HEAD_KEYS)}")
        if len(parts) != 3:
            raise ValueError("it must have a line for its head, a line of names, and columns")
        _, text, columns = parts
        rows, counts = _check_blocks(obj["blocks"]), _check_counts(obj["functions"])
        self._firsts = list(accumulate((row["blobs"] for row in rows), initial=0))
        blobs, functions = self._firsts[-1], sum(counts.values())
        expected = 4 * (blobs + functions) + DIGEST_BYTES * (len(rows) + blobs)
        if len(columns) != expected:
            raise ValueError(f"its columns have {len(columns)} bytes, those of its blobs and functions {expected}")
        lengths = struct.unpack_from(f"<{blobs}I", columns)
        cubins = struct.unpack_from(f"<{functions}I", columns, 4 * blobs)
        self._digests = columns[4 * (blobs + functions) :]
        if 0 in lengths:
            raise ValueError(f"blob {lengths.index(0)} has no bytes")
        # Blob n lies between places n and n + 1 of all decompressed blocks, one after another.
        self._places = list(accumulate(lengths, initial=0))
        self.blocks = tuple(self._make_blocks(rows, begin))
        self.end = begin + sum(row["length"] for row in rows)
        kinds: dict[str, range] = {}
        for block in self.blocks:
            kinds[block.kind] = range(kinds.get(block.kind, block.blobs).start, block.blobs.stop)
        records, tables = kinds.pop(RECORDS, range(0)), kinds.pop(TABLES, range(0))
        self.functions = Functions(_split_names(text, counts), cubins, counts)
        if len(self.functions) != functions:
            raise ValueError("two of its functions have one name")
        if len(records) != functions:
            raise ValueError(f"it has {functions} functions and {len(records)} records")
        self._check_cubins(cubins, counts, kinds)
        self.tables: Mapping[str, int] = MappingProxyType(_parse_tables(obj["tables"], tables))

    def blob(self, number: int) -> Blob:
        """Where blob `number` is, and its digest."""
        block = bisect_right(self._firsts, number) - 1
        start, end = self._places[number], self._places[number + 1]
        digest = self._digest(len(self.blocks) + number).hex()
        return Blob(digest, end - start, block, start - self._places[self._firsts[block]])

    def lengths(self) -> list[int]:
        """The bytes of each blob, by number: of thousands sooner than one by one."""
        return [end - start for start, end in itertools.pairwise(self._places)]

    def record_digests(self) -> dict[str, str]:
        """The digest of each function's record, hexadecimal, by name in the order of names."""
        first = next(block.blobs.start for block in self.blocks if block.kind == RECORDS) if self.functions else 0
        text, at = self._digests.hex(), 2 * DIGEST_BYTES * (len(self.blocks) + first)
        width = 2 * DIGEST_BYTES
        return {name: text[at + width * place : at + width * (place + 1)] for name, place in self.functions.places()}

    def _digest(self, number: int) -> bytes:
        """The digest of a block, or, counted on from the last block, of a blob."""
        return self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    def _make_blocks(self, rows: list[dict[str, Any]], offset: int) -> Iterator[Block]:
        for number, row in enumerate(rows):
            first, end = self._firsts[number : number + 2]
            raw_length = self._places[end] - self._places[first]
            yield Block(row["kind"], offset, row["length"], raw_length, self._digest(number).hex(), range(first, end))
            offset += row["length"]

    def _check_cubins(self, cubins: tuple[int, ...], counts: dict[str, int], kinds: dict[str, range]) -> None:
        first = 0
        for target, count in counts.items():
            held, own = kinds.get(generation(target), range(0)), cubins[first : first + count]
            for number in (min(own), max(own)):
                if number not in held:
                    raise ValueError(f"a function for {target} has blob {number} as its cubin, which holds none for it")
            first += count
        if len(set(cubins)) != sum(map(len, kinds.values())):
            unused = set(chain.from_iterable(kinds.values())).difference(cubins)
            raise ValueError(f"no function uses blob {min(unused)}")
        for kind, held in kinds.items():  # records and tables need no such look: each belongs to one name
            of_kind = struct.Struct(f"{DIGEST_BYTES}s" * len(held))  # not struct.unpack_from, which would keep this
            digests = of_kind.unpack_from(self._digests, DIGEST_BYTES * (len(self.blocks) + held.start))
            if len(set(digests)) != len(held):
                raise ValueError(f"two of its cubins of kind {kind} are the same")


def _check_blocks(rows: Any) -> list[dict[str, Any]]:
    if type(rows) is not list:
        raise ValueError("its blocks must be a list")
    before = ""
    for number, row in enumerate(rows):
        if type(row) is not dict or row.keys() != _BLOCK_KEYS:
            raise ValueError(f"block {number} must be an object with exactly the keys {sorted(_BLOCK_KEYS)}")
        kind = row["kind"]
        if type(kind) is not str or not _KIND.fullmatch(kind):
            raise ValueError(f"block {number} has kind {kind!r:.50}")
        if kind < before:
            raise ValueError(f"block {number} of kind {kind!r} comes after one of kind {before!r}")
        for key in ("blobs", "length"):
            if not _is_positive(row[key]):
                raise ValueError(f"block {number} has {key} {row[key]!r:.50}")
        before = kind
    return rows


def _check_counts(counts: Any) -> dict[str, int]:
    if type(counts) is not dict:
        raise ValueError("its functions must be an object")
    for target, count in counts.items():
        generation(target)
        if not _is_positive(count):
            raise ValueError(f"it has {count!r:.50} functions for {target}")
    return counts


def _split_names(text: bytes, counts: dict[str, int]) -> list[str]:
    if text.translate(None, _PRINTABLE):
        raise ValueError("the names of its functions must be printable ASCII")
    found, functions = text.count(b" ") + 1 if text else 0, sum(counts.values())
    if found != functions:  # counted first: each space could become an object
        raise ValueError(f"it has {found} names for {functions} functions")
    names = text.decode("ascii").split(" ") if text else []
    if names and not 0 < min(map(len, names)) <= max(map(len, names)) <= MAX_NAME_CHARACTERS:
        raise ValueError(f"the name of each of its functions must have 1 to {MAX_NAME_CHARACTERS} characters")
    first = 0
    for target, count in counts.items():
        if not _are_sorted(names[first : first + count]):
            raise ValueError(f"the names of its functions for {target} are not sorted, or one is there twice")
        first += count
    return names


def _parse_tables(names: Any, numbers: range) -> dict[str, int]:
    if type(names) is not list or set(map(type, names)) - {str}:
        raise ValueError("its tables must be a list of names")
    for name in names:
        if not is_name(name):
            raise ValueError(f"{name!r:.50} cannot name a table")
    if not _are_sorted(names):
        raise ValueError("the names of its tables are not sorted, or one is there twice")
    if len(names) != len(numbers):
        raise ValueError(f"it names {len(names)} tables and has {len(numbers)}")
    return dict(zip(names, numbers, strict=True))


def _is_positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _are_sorted(names: list[str]) -> bool:
    return all(map(lt, names, islice(names, 1, None)))
