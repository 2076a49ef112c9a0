"""`aot ls`: what an archive serves, a line a layer."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from runtime.limits import MAX_EXTENT

from ..arguments import ArchivePath, Json, Layers, States, Targets, count, examples, one_m
from ..inputs import open_archive
from ..layout import print_fitted, print_wrapped
from ..streams import print_json
from ..tables import (
    built_by,
    cleaned,
    faster_with_torch,
    interval,
    machines,
    names_of_operation,
    ratio,
)

EXAMPLES = examples("aot ls model.aot", "aot ls model.aot --gemm qkv --m 700", "aot ls model.aot --functions")
_OTHERS = 10  # functions in no table that are listed unasked


def command(
    archive: ArchivePath,
    target: Targets = None,
    gemm: Layers = None,
    m: Annotated[
        list[int] | None,
        typer.Option("--m", metavar="M", min=1, max=MAX_EXTENT, help="Name the function that serves M rows."),
    ] = None,
    state: States = None,
    functions: Annotated[bool, typer.Option("--functions", help="List functions and what each is there for.")] = False,
    as_json: Json = False,
) -> None:
    """List what an archive serves, layer by layer. Of each, on each target, how its functions were chosen, and how fast
    they are beside torch's, in the mean and at the worst M; then what it serves at any N and K, and sizes."""
    from ...inspect.listing import listing
    from ...pack.filter import Filter

    rows = one_m(m)
    with open_archive(archive) as opened:
        found = listing(opened, Filter(target or (), gemm or (), state or ()), rows)
    if as_json:
        return print_json(found)
    if functions:
        return print_functions(found)
    print_listing(found, rows)


def print_listing(found: dict[str, Any], m: int | None = None) -> None:
    """What `aot ls` prints, of `m` rows where there are some."""
    by_name = ("short_names", "uses")  # of all functions; their names and digests are printable in any archive
    found = cleaned({what: of for what, of in found.items() if what not in by_name}) | {n: found[n] for n in by_name}
    for of in dict.fromkeys(entry["operation"] for entry in found["entries"]):
        _print_entries([entry for entry in found["entries"] if entry["operation"] == of], of, found, m)
        print()
    if unused := sum(entry["instead"] is not None for entry in found["entries"]):
        what = "`aot show` with --m says what serves in their place, and `aot tune` makes them serve"
        print_wrapped(f"{unused} of {len(found['entries'])} entries were never tuned and give way: {what}")
        print()
    if found["forms"]:
        header = ["any N and K", "target", "functions", "N, K by", "checked on"]
        print_fitted(header, [_form(form) for form in found["forms"]], right={2}, expendable=[2])
        print()
    if found["functions"]:
        _print_others(found)
        print()
    _print_summary(found)


def _print_entries(entries: list[dict[str, Any]], operation: str, found: dict[str, Any], m: int | None) -> None:
    """The entries of an operation, with what of them serves `m`, or how fast they are."""
    several = len({model for entry in found["entries"] for model in entry["models"]}) > 1
    header = [names_of_operation(operation), "signature", "model", "target", "gpu", "state"]
    header += ["torch faster", "mean", "worst", "gives way to"] if m is None else ["M", "us", "of torch", "digest"]
    rows = []
    for entry in entries:
        kind = entry["gpu"]["name"].removeprefix("NVIDIA ") if entry["gpu"] else ""
        models = ",".join(entry["models"]) if several else ""
        named = [",".join(entry["names"]), entry["signature"], models, entry["target"], kind, entry["state"]]
        rows.append([*named, *(_speed(entry) if m is None else _serving(entry, found["short_names"]))])
    alike = [column for column in (3, 4) if len({row[column] for row in rows}) == 1]
    print_fitted(header, rows, right={6, 7, 8}, expendable=[2, *alike, *([6] if m is None else [])])


def _speed(entry: dict[str, Any]) -> list[str]:
    """How often torch was faster, the mean and the worst ratio; or what the entry gives way to."""
    if entry["instead"]:
        return ["", "", "", "a form" if entry["instead"]["form"] else "tuned entries"]
    return [faster_with_torch(entry), ratio(entry["ratio_mean"]), ratio(entry["ratio_worst"]), ""]


def _serving(entry: dict[str, Any], short_names: dict[str, str]) -> list[str]:
    """The range of the one M that is asked for, its time and the function; nothing where the entry gives way."""
    if entry["instead"]:
        return ["", "", "", ""]
    (row,) = entry["ranges"]
    us = "" if row["us"] is None else f"{row['us']:.1f}"
    return [interval(row), us, ratio(row["ratio"]), short_names[row["function"]]]


def _form(form: dict[str, Any]) -> list[str]:
    multiples = " or ".join(f"{pair['n']}, {pair['k']}" for pair in form["multiples"])
    checked = ", ".join(form["checked_on"]) or "never run"
    return [form["form"], form["target"], str(form["functions"]), multiples, checked]


def _print_others(found: dict[str, Any]) -> None:
    """Functions in no table: each where they are few, else how many."""
    others = found["functions"]
    rows = [
        [f["target"], found["short_names"][f["name"]], f["name"], ", ".join(f["checked_on"])] for f in others[:_OTHERS]
    ]
    print_fitted(["target", "digest", "other function", "found right on"], rows)
    if len(others) > _OTHERS:
        print(f"and {len(others) - _OTHERS} others, which --functions lists")


def print_functions(found: dict[str, Any]) -> None:
    """Every function: the beginning of its digest, what it is there for, and its name."""
    rows = [[found["short_names"][name], use, name] for name, use in found["uses"].items()]
    print_fitted(["digest", "use", "function"], rows)


def _print_summary(found: dict[str, Any]) -> None:
    totals = found["totals"]
    if totals["functions"]:
        print(built_by(found["tools"]))
    for machine in machines(found["tuning"]):
        print_wrapped(machine)
    if totals["measured"]:
        print(f"torch was faster at {faster_with_torch(totals)} M values that were measured")
    print_wrapped(
        f"{count(totals['functions'], 'function')} for {', '.join(totals['targets']) or 'no target'}: "
        f"{totals['raw_bytes']:,} bytes raw, {totals['file_bytes']:,} in the file"
    )
