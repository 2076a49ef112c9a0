"""`aot diff`: what changed between two archives."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import Json, Layers, count, examples
from ..inputs import open_archive
from ..layout import print_fields, print_fitted, print_wrapped
from ..streams import print_json
from ..tables import cleaned, environment_words, interval, ratio

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
    if unknown := [pattern for pattern in wanted.layers if not fnmatch.filter(layers, pattern)]:
        raise Filter(layers=unknown).why_nothing(f"{old}, {new}", (), (), layers)
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
        header = ["entry", "signature", "is", "state", "M ranges", "speed", "worst", "at M"]
        print_fitted(header, rows, right={4, 5, 6, 7}, expendable=[7, 6])
        if any(row["times"] for row in found["entries"]["changed"]):
            print()
            print_wrapped(
                "speed: how many times as fast the new functions are, in the mean of all M that both measured; "
                "--gemm NAME lists every range"
            )
    for row in found["entries"]["changed"] if ranges else ():
        print()
        print(",".join(row["names"]) or row["signature"])
        choices = [
            [interval(c), *(_digest(c[f"{of}_digest"]) for of in ("old", "new")), c["new_words"] or c["new"] or ""]
            for c in row["choices"]
        ]
        print_fitted(["M", "old", "new", "choices of the new"], choices, right={0})


def _totals(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    old, new, functions = found["old"], found["new"], found["functions"]
    yield "bytes", f"{old['bytes']:,} -> {new['bytes']:,} ({new['bytes'] - old['bytes']:+,})"
    added, removed, changed = (len(functions[how]) for how in ("added", "removed", "changed"))
    counts = f"{added} added, {removed} removed, {changed} with other code"
    yield "functions", f"{old['functions']} -> {new['functions']}: {counts}"
    if others := [name for name in found["tables"] if name in ("history", "universal")]:
        yield "tables", f"{' and '.join(others)} {'differ' if len(others) > 1 else 'differs'}"


def _pairs(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Tools, and families by the digests of their sources."""
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
            rows = found[what][how]
            for row in rows[:_SHOWN]:
                yield how, said(row)
            if len(rows) > _SHOWN:
                yield how, f"and {count(len(rows) - _SHOWN, 'other')} of {what}"


def _machine(environment: dict[str, Any]) -> str:
    """Where something was tuned, with what tells GPUs of a kind apart."""
    said = environment_words(environment)
    return f"{said}, GPU {environment['gpu_id']}" if environment.get("gpu_id") else said


def _entry(how: str, row: dict[str, Any]) -> list[str]:
    named = [",".join(row["names"]), row["signature"], how]
    if how != "changed":
        return [*named, row["state"], "", "", "", ""]
    state = row["state"] if row["was"] == row["state"] else f"{row['was']} -> {row['state']}"
    times = row["times"]
    speeds = ["", "", ""] if times is None else [ratio(times["mean"]), ratio(times["worst"]), str(times["worst_m"])]
    return [*named, state, str(len(row["choices"])), *speeds]


def _digest(whole: str | None) -> str:
    return (whole or "")[:_DIGITS]
