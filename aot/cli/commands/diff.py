"""`aot diff`: what changed between two archives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import Json, Layers, count, examples
from ..inputs import open_archive
from ..layout import print_fields, print_fitted, print_wrapped
from ..streams import print_json
from ..tables import cleaned, interval, ratio, tuning_words

EXAMPLES = examples("aot diff old.aot new.aot", "aot diff old.aot new.aot --gemm qkv")
_DIGITS = 8  # of a digest
_SHOWN = 5  # of a list that may be long


def command(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="An .aot file.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Another.")],
    gemm: Layers = None,
    as_json: Json = False,
) -> None:
    """Say what changed from OLD to NEW. Layers, which function serves which M, times, tools, functions and bytes; with
    --gemm each range of M of a layer. Exit status 0 where functions and tables are the same, 1 where they differ."""
    from ...inspect.diff import diff
    from ...inspect.entries import layers_of
    from ...pack.filter import Filter

    wanted = Filter(layers=gemm or ())
    with open_archive(old) as before, open_archive(new) as after:
        found = diff(before, after)
        layers = [*layers_of(before), *layers_of(after)]
    wanted.require_known(f"{old}, {new}", (), (), layers, ())
    if gemm:
        entries = found["entries"]
        for of, rows in entries.items():
            entries[of] = [row for row in rows if wanted.takes("", "", (*row["names"], row["signature"]))]
    if as_json:
        print_json(found)
    else:
        print_diff(found, ranges=bool(gemm))
    if not found["same"]:
        raise typer.Exit(1)


def print_diff(found: dict[str, Any], ranges: bool = False) -> None:
    """What `aot diff` prints, with every range of M that changed if `ranges`."""
    found = cleaned(found)
    print_fields([("old", f"{found['old']['path']}, {found['old']['digest']}")])
    print_fields([("new", f"{found['new']['path']}, {found['new']['digest']}")])
    print()
    if found["same"]:
        what = "no function and no table differs"
        print(what if found["old"]["digest"] == found["new"]["digest"] else f"{what}; blocks are compressed otherwise")
        return
    print_fields([*_totals(found), *_pairs(found), *_lists(found)])
    rows = [_entry(how, row) for how, rows in found["entries"].items() for row in rows]
    if rows:
        print()
        _print_entries(rows)
        if said := [*_legend(found["entries"]["changed"])]:
            print()
            print_wrapped("; ".join([*said, "--gemm NAME lists every range"]))
    for row in found["entries"]["changed"] if ranges else ():
        _print_ranges(row)


def _print_entries(rows: list[list[str]]) -> None:
    """What `_entry` gives of each; the target and the kind of GPU above, where all have the same."""
    places = {(row[2], row[3]) for row in rows}
    if len(places) == 1:
        print_wrapped(f"entries for {', '.join(filter(None, places.pop()))}:")
        rows = [[*row[:2], "", "", *row[4:]] for row in rows]
    header = ["entry", "signature", "target", "gpu", "is", "state", "ranges", "differs in", "speed", "worst", "at M"]
    print_fitted(header, rows, right={6, 8, 9, 10}, expendable=[10, 9])


def _legend(changed: list[dict[str, Any]]) -> Iterator[str]:
    """What the columns of entries that changed mean, as far as they say something."""
    what = {word for row in changed for word in row["what"]}
    if any(row["times"] for row in changed):
        yield "speed: how many times as fast the new functions are, in the mean of all M that both measured"
    if "equal bits" in what:
        yield "bits: what serves callers who want equal bits"
    if "torch faster" in what:
        yield "torch: where it is faster"
    if "apart" in what:
        yield "apart: where the activation is faster in a kernel of its own"


def _print_ranges(row: dict[str, Any]) -> None:
    """The ranges of M in which an entry changed; nothing of one that changed in none."""
    tables = [(["M", "old", "new", "choices of the new"], row["choices"])]
    tables.append((["equal bits at M", "old", "new", "choices of the new"], row["equal_bits"]))
    intervals = {"torch is": row["torch_faster"], "the activation apart is": row["apart"]}
    if not any(choices for _, choices in tables) and not any(intervals.values()):
        return
    print()
    print_wrapped(", ".join(filter(None, [",".join(row["names"]) or row["signature"], row["target"], _kind(row)])))
    for header, choices in tables:
        if choices:
            print_fitted(header, [_choice(choice) for choice in choices], right={0})
    for what, both in intervals.items():
        if both is not None:
            old, new = (", ".join(interval({"m_min": a, "m_max": b}) for a, b in of) for of in both)
            print_wrapped(f"{what} faster at M = {old or 'none'} -> {new or 'none'}")


def _choice(choice: dict[str, Any]) -> list[str]:
    digests = [_digest(choice[f"{of}_digest"]) for of in ("old", "new")]
    return [interval(choice), *digests, choice["new_words"] or choice["new"] or ""]


def _totals(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    old, new, functions = found["old"], found["new"], found["functions"]
    yield "bytes", f"{old['bytes']:,} -> {new['bytes']:,} ({new['bytes'] - old['bytes']:+,})"
    added, removed, changed = (len(functions[how]) for how in ("added", "removed", "changed"))
    counts = f"{added} added, {removed} removed, {changed} with other code"
    yield "functions", f"{old['functions']} -> {new['functions']}: {counts}"
    yield from _some("other code", functions["changed"], "such functions")
    if found["tables"]:
        yield "tables", f"{', '.join(found['tables'])} {'differ' if len(found['tables']) > 1 else 'differs'}"


def _pairs(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What was asked of the builds, tools, and families by the digests of their sources."""
    for name, (old, new) in found["build"].items():
        yield "build", f"{name} {old or 'not given'} -> {new or 'not given'}"
    for name, (old, new) in found["tools"].items():
        yield "tool", f"{name} {old or 'none'} -> {new or 'none'}"
    for name, (old, new) in found["providers"].items():
        yield "sources", f"{name} {_digest(old) or 'none'} -> {_digest(new) or 'none'}"


def _lists(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What only one of the archives says of models, machines, forms, failures, and what is not served."""
    words = {
        "models": lambda row: f"model {row[0] or 'without a name'}, manifest {_digest(row[1])}",
        "tuning": _machine,
        "forms": lambda row: f"form {row[0]} on {row[1]}",
        "failures": lambda row: f"did not compile: {row[0]}: {row[1]}",
        "unserved": lambda row: f"not served: {row[0]} on {row[1]}: {row[2]}",
    }
    for what, said in words.items():
        for how in ("added", "removed"):
            yield from _some(how, [said(row) for row in found[what][how]], what)


def _some(title: str, rows: Sequence[str], what: str) -> Iterator[tuple[str, str]]:
    """The first of some rows, and how many more there are."""
    yield from ((title, row) for row in rows[:_SHOWN])
    if len(rows) > _SHOWN:
        yield title, f"and {count(len(rows) - _SHOWN, 'other')} of {what}"


def _machine(environment: dict[str, Any]) -> str:
    """Where something was tuned, of what candidates, and what else tells two tunings apart."""
    said = tuning_words(environment)
    said += f", GPU {environment['gpu_id']}" if environment.get("gpu_id") else ""
    return said + (f", tolerance {environment['tolerance']}" if environment.get("tolerance") is not None else "")


def _entry(how: str, row: dict[str, Any]) -> list[str]:
    named = [",".join(row["names"]), row["signature"], row["target"], _kind(row), how]
    if how != "changed":
        return [*named, row["state"], "", "", "", "", ""]
    state = row["state"] if row["was"] == row["state"] else f"{row['was']} -> {row['state']}"
    times = row["times"]
    speeds = ["", "", ""] if times is None else [ratio(times["mean"]), ratio(times["worst"]), str(times["worst_m"])]
    return [*named, state, str(len(row["choices"])), _differs_in(row["what"]), *speeds]


def _differs_in(what: Sequence[str]) -> str:
    """What else than ranges and the state; times and functions, which follow from most other changes, if alone."""
    short = {"equal bits": "bits", "torch faster": "torch"}
    others = [short.get(word, word) for word in what if word not in ("state", "ranges", "functions", "times")]
    alone = [] if "ranges" in what else [word for word in what if word != "state"]
    return ", ".join(others or alone)


def _kind(row: dict[str, Any]) -> str:
    return row["gpu"]["name"].removeprefix("NVIDIA ") if row["gpu"] else ""


def _digest(whole: str | None) -> str:
    return (whole or "")[:_DIGITS]
