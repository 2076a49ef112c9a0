"""Tunes a decoder's layers where they run: between norms, attention and each other, in a CUDA graph of a decode step.

Reads an archive whose entries are tuned. At each M all choices of a block (`aot.tune.block`) are timed in one replay,
and the archive says what won: an entry that promises overlap is served by serial functions where these won, and an
entry with an activation says where the activation apart did. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.gemm.signature import Signature
from runtime.program.operation import is_operation
from runtime.tables.dispatch import Capability, Entry, preference, serves

from ..pack import build_table, ranges, tables, tuning_table
from ..pack.tables import Row
from ..pack.write import Package
from ..problem.ways import EARLY, MOST_TOKENS, SERIAL
from . import session
from .block import Block, Choice, Seen, apart, blocks, overlaps
from .options import GraphOptions, TuneError
from .timing import Timing, whole_turns

_BRIEF, _LONG = 4, 48  # repeats of all choices, and of the finalists at least
_FINALISTS = 4  # of the choices with the activation in gate_up, and of those without
_ANY_M = 1 << 31

Progress = Callable[[int, int, str], None]


class Replay(Protocol):
    """What times steps of a block's layers."""

    def times(self, m: int, choices: Mapping[str, Choice], repeats: int) -> Mapping[str, Timing]:
        """Microseconds of a layer by the name of a choice, in turns; without those that cannot be launched."""
        ...


class Site(NamedTuple):
    """The GPU to measure on: what it is, and what makes a replay of a block of the archive at a path."""

    capability: Capability
    gpu: Gpu
    environment: Callable[[], dict[str, Any]]
    replay: Callable[[Path, Block, GraphOptions], Replay]


@dataclass
class GraphReport:
    """What was found: by block, what was seen at each M, ascending."""

    environment: dict[str, Any]
    seen: list[tuple[Block, list[Seen]]] = field(default_factory=list)


def this_site() -> Site:
    """The first GPU of this machine, measured on in this process.

    Raises:
        AotError: there is none.
        ModuleNotFoundError: torch is not installed.
    """
    from .run import this_machine

    machine = this_machine()
    from . import measure, replay

    return Site(machine.capability, machine.gpu, measure.environment, replay.DecodeReplay)


def tune_in_graph(
    source: Path,
    destination: Path,
    options: GraphOptions | None = None,
    progress: Progress | None = None,
    site: Site | None = None,
) -> GraphReport:
    """Measure the blocks of the models that `source` was built for, and write `destination`, which says what won.

    Raises:
        TuneError: no block of it leaves a choice, or what does was not tuned on this kind of GPU.
        AotError: the archive cannot be read, there is no GPU, or measuring fails.
    """
    options, progress = options or GraphOptions(), progress or (lambda done, total, what: None)
    with Archive.open(source) as archive:
        models = build_table.read(archive).models
        every = [e for e in tables.operation_entries(archive) if isinstance(e.signature, Signature)]
        _require_choice(source, models, every)
        site = site or this_site()
        entries = tuned_here(every, site.capability, site.gpu)
        found = blocks(models, entries)
        if not found:
            raise TuneError(
                f"{source}: its layers were not tuned on a {site.gpu.words()}; run `aot tune` here without --in-graph, "
                "and then this"
            )
        report = GraphReport(site.environment())
        asked = [(block, _tokens(block, entries)) for block in found]
        steps = iter(range(1, sum(len(ms) for _, ms in asked) + 1))
        total = sum(len(ms) for _, ms in asked)
        for block, ms in asked:
            replay, seen = site.replay(source, block, options), list[Seen]()
            for m in ms:
                seen.append(_measured(replay, block, m))
                progress(next(steps), total, f"{block.model or 'layers'} M={m}")
            report.seen.append((block, seen))
        write(archive, rows(entries, report.seen), report.environment, destination)
    return report


def _require_choice(source: Path, models: Sequence[build_table.Model], every: Sequence[Entry]) -> None:
    """Refuse an archive that leaves nothing to choose on any GPU, before one is asked for."""
    if not blocks(models, (e.signature for e in every)):
        raise TuneError(
            f"{source}: has no model whose qkv and o, or gate_up and down, are in 16 bits and can run in more than one "
            "way; build it of a manifest that `aot manifest from-config --in-graph` writes"
        )
    if not blocks(models, (e.signature for e in every if e.state == "tuned")):
        raise TuneError(f"{source}: its layers were not tuned; run `aot tune` without --in-graph first, and then this")


def tuned_here(every: Iterable[Entry], capability: Capability, gpu: Gpu) -> dict[Signature, Entry]:
    """By signature the entries of GEMMs that were tuned on this kind of GPU."""
    mine = [
        e
        for e in every
        if isinstance(e.signature, Signature) and e.state == "tuned"
        if e.gpu is not None and e.gpu.same_kind(gpu) and serves(e.target, capability)
    ]
    return {e.signature: e for e in sorted(mine, key=lambda e: preference(e.target))}


def _tokens(block: Block, entries: Mapping[Signature, Entry]) -> list[int]:
    """The M to look at: those that were asked for and powers of two, from the least to the largest of them, as far as
    steps of decoding go."""
    asked = {m for ways in block.ways.values() for way in ways for m in session.tokens_of(entries[way])}
    least, most = min(asked), min(max(asked), MOST_TOKENS)
    powers = {1 << bit for bit in range(MOST_TOKENS.bit_length())}
    return sorted(m for m in asked | powers if least <= m <= most) or [least]


def _measured(replay: Replay, block: Block, m: int) -> Seen:
    """Of all choices, timed briefly, the best with the activation in gate_up, the best without, and the uniform ones,
    timed for longer. Only these times count: the least of many brief ones is one that noise made small."""
    brief = _us(replay, block, m, block.choices(), _BRIEF)
    fastest = sorted(brief, key=brief.__getitem__)
    words = {choice: tuple(way.parts.gated for way in choice) for choice in fastest}
    best = [c for word in dict.fromkeys(words.values()) for c in [c for c in fastest if words[c] == word][:_FINALISTS]]
    finalists = list(dict.fromkeys([*best, *(c for c in block.uniform().values() if c in brief)]))
    return Seen(m, _us(replay, block, m, finalists, whole_turns(len(finalists), _LONG)))


def _us(replay: Replay, block: Block, m: int, choices: Sequence[Choice], repeats: int) -> dict[Choice, float]:
    """Microseconds of a layer by choice, of those that can be launched."""
    found = replay.times(m, {str(i): choice for i, choice in enumerate(choices)}, repeats)
    if not found:
        raise TuneError(f"no choice of {block.model or 'the layers'} can be launched at M = {m}; run: aot verify")
    return {choices[int(name)]: t.us for name, t in found.items()}


# --- what the archive says of it ---


def rows(entries: Mapping[Signature, Entry], found: Sequence[tuple[Block, Sequence[Seen]]]) -> list[Row]:
    """The rows of the entries that change. Of a signature that two blocks have, the first decides."""
    changed: dict[Signature, Row] = {}
    for block, seen in found:
        for part, ways in block.ways.items():
            for way in ways:
                if way not in changed:
                    changed[way] = _row(entries, block, seen, part, way)
    return [row for way, row in changed.items() if row != Row.of(entries[way])]


def _row(entries: Mapping[Signature, Entry], block: Block, seen: Sequence[Seen], part: str, way: Signature) -> Row:
    row, serial = Row.of(entries[way]), replace(way, overlap=SERIAL)
    if way.overlap == EARLY and serial in entries:
        row = _spliced(row, entries[way], entries[serial], overlaps(block, seen, part, way.parts.gated))
    if way.parts.gated:
        alone = any(not other.parts.gated for other in block.ways[part])
        row = replace(row, apart=tuple(apart(block, seen)) if alone else ())
    return row


def _spliced(row: Row, early: Entry, serial: Entry, won: Sequence[tuple[int, str]]) -> Row:
    """The row of `early` with what serves the serial entry where that won, and above all M that were looked at."""
    pieces, above = list[tuple[int, int, Entry]](), 0
    for last, overlap in won:
        pieces.append((above + 1, last, early if overlap == EARLY else serial))
        above = last
    pieces.append((above + 1, _ANY_M, serial))
    best, faster, timings = list[tuple[int, str]](), list[tuple[int, int | None]](), list[dict[str, Any]]()
    for first, last, entry in pieces:
        bounds = [m for m, _ in entry.ranges if m is not None and first <= m < last]
        best += [(m, entry.best(m)) for m in (*bounds, last)]
        for begin, end in entry.torch_faster:
            low, high = max(begin, first), min(_ANY_M if end is None else end, last)
            if low <= high:
                if faster and faster[-1][1] == low - 1:
                    low = faster.pop()[0]
                faster.append((low, None if high == _ANY_M else high))
        timings += [row for row in entry.timings if first <= row["m"] <= last]
    return replace(
        row,
        ranges=ranges.ranges(best),
        torch_faster=tuple(faster),
        timings=tuple(timings),
        tuned_to=serial.tuned_to,
    )


def write(archive: Archive, changed: Sequence[Row], environment: Mapping[str, Any], destination: Path) -> None:
    """Write an archive with these rows in the place of those for the same, measured on `environment`."""
    by_key = {(row.signature, row.target, row.gpu): row for row in changed}
    every = [by_key.get((row.signature, row.target, row.gpu), row) for row in tables.operation_rows(archive)]
    package = Package()
    package.add_archive(archive)
    for name in archive.tables:
        if name != tuning_table.TABLE and not is_operation(name):
            package.set_table(name, archive.table(name))
    for name, table in tables.operation_tables(every, archive.functions.targets_by_name()).items():
        package.set_table(name, table)
    machine = {**environment, "candidates": archive.digest}
    package.set_table(tuning_table.TABLE, tuning_table.write([*tuning_table.read(archive), machine]))
    package.write(destination)
