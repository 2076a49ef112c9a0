"""`aot ls`: what an archive serves, listed."""

from __future__ import annotations

from typing import Any

from ..arguments import ArchivePath, Json, examples
from ..inputs import open_archive
from ..streams import print_json
from ..tables import (
    built_by,
    cleaned,
    environment_words,
    faster_with_torch,
    instead_words,
    interval,
    kind,
    names_of_operation,
    print_table,
)

EXAMPLES = examples("aot ls model.aot", "aot ls model.aot --json")


def command(archive: ArchivePath, as_json: Json = False) -> None:
    """List what an archive serves. For each signature and target the functions by range of M, then what it serves at
    any N and K, and sizes."""
    from ...inspect.listing import listing

    with open_archive(archive) as opened:
        found = listing(opened)
    if as_json:
        return print_json(found)
    print_listing(found)


def print_listing(found: dict[str, Any]) -> None:
    """What `aot ls` prints."""
    found = cleaned(found)
    for of in dict.fromkeys(entry["operation"] for entry in found["entries"]):
        rows = [
            row for entry in found["entries"] if entry["operation"] == of for row in _entry(entry, found["short_names"])
        ]
        header = [
            "signature",
            names_of_operation(of),
            "target",
            "gpu",
            "state",
            "torch faster",
            "M",
            "us",
            "ratio",
            "digest",
            "function",
        ]
        print_table(header, rows, right={6, 7, 8})
        print()
    if unused := sum(entry["instead"] is not None for entry in found["entries"]):
        what = "`aot show` with --m says what serves in their place, and `aot tune` makes them serve"
        print(f"{unused} of {len(found['entries'])} entries were never tuned and give way: {what}\n")
    if found["forms"]:
        header = ["any N and K", "target", "functions", "multiples of N, K", "checked on"]
        print_table(header, [_form(form) for form in found["forms"]], right={2})
        print()
    if found["functions"]:
        short_names = found["short_names"]
        rows = [
            [f["target"], short_names[f["name"]], f["name"], ", ".join(f["checked_on"])] for f in found["functions"]
        ]
        print_table(["target", "digest", "other function", "found right on"], rows)
        print()
    totals = found["totals"]
    if totals["functions"]:
        print(built_by(found["tools"]))
    for environment in found["tuning"]:
        print(environment_words(environment))
    if totals["measured"]:
        print(f"torch was faster at {faster_with_torch(totals)} M values that were measured")
    each = f", {totals['bytes_per_function']:,} a function" if totals["functions"] else ""
    print(
        f"{totals['functions']} functions for {', '.join(totals['targets']) or 'no target'}: "
        f"{totals['raw_bytes']:,} bytes raw, {totals['file_bytes']:,} in the file{each}"
    )


def _entry(entry: dict[str, Any], short_names: dict[str, str]) -> list[list[str]]:
    """The rows of an entry: one for each range, or one that says what it gives way to. Functions have the beginnings of
    their digests, by which `aot show` knows them."""
    named = [entry["signature"], ",".join(entry["names"]), entry["target"], kind(entry["gpu"])]
    if entry["instead"] is not None:
        return [
            [
                *named,
                f"{entry['state']}, unused",
                "",
                "1-",
                "",
                "",
                "",
                f"gives way to {instead_words(entry['instead'])}",
            ]
        ]
    return [
        [
            *named,
            entry["state"],
            faster_with_torch(entry) if row is entry["ranges"][0] else "",
            interval(row),
            "" if row["us"] is None else f"{row['us']:.1f}",
            "" if row["ratio"] is None else f"{row['ratio']:.2f}x",
            short_names[row["function"]],
            row["function"],
        ]
        for row in entry["ranges"]
    ]


def _form(form: dict[str, Any]) -> list[str]:
    multiples = " or ".join(f"{pair['n']}, {pair['k']}" for pair in form["multiples"])
    checked = ", ".join(form["checked_on"]) or "never run"
    return [form["form"], form["target"], str(form["functions"]), multiples, checked]
