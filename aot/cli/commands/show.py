"""`aot show`: one function or signature of an archive, in full."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

import typer

from runtime.limits import MAX_EXTENT

from ..arguments import ArchivePath, Json, OneTarget, examples
from ..inputs import open_archive
from ..layout import print_fields, print_fitted, print_wrapped
from ..streams import print_json
from ..tables import (
    cleaned,
    extents,
    faster_with_torch,
    instead_words,
    interval,
    kind,
    machines,
    names_of_operation,
    percent,
)

EXAMPLES = examples(
    "aot show model.aot qkv", "aot show universal.aot bf16_bf16_bf16_f32_none_n6144_k4096 --m 48 --m 3000"
)

_EQUAL_BITS = "of those that give equal bits at every M"


def command(
    archive: ArchivePath,
    entry: Annotated[
        str,
        typer.Argument(
            metavar="ENTRY",
            help="A function, or the beginning of its digest; a signature, or a name that a manifest has, such as qkv.",
        ),
    ],
    m: Annotated[
        list[int] | None,
        typer.Option("--m", metavar="M", min=1, max=MAX_EXTENT, help="Rows to say what serves at. May be repeated."),
    ] = None,
    target: OneTarget = None,
    candidates: Annotated[
        bool, typer.Option("--candidates", help="Print the functions that aot tune would try, too, by M, best first.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show one function or signature of an archive in full; of a signature that no entry has what is predicted."""
    from ...inspect.show import show

    with open_archive(archive) as opened:
        found = show(opened, entry, m or (), target)
    if as_json:
        return print_json(found)
    if "function" in found:
        return print_function(found["function"])
    printed = print_predicted if "predicted" in found else partial(print_entry, candidates=candidates)
    for i, one in enumerate(found.get("predicted") or found["entries"]):
        if i:
            print()
        printed(one, found["short_names"])


def print_entry(entry: dict[str, Any], short_names: dict[str, str], candidates: bool = False) -> None:
    """What `aot show` prints for an entry of an operation's table, or for what serves of it at some M."""
    entry = cleaned(entry)
    of = f", {kind(entry['gpu'])}" if entry["gpu"] else ""
    state = f"{entry['state']}{', unused' if entry['instead'] else ''}"
    print_wrapped(f"{entry['key']} on {entry['target']}{of}: {state}")
    _print_operands(entry)
    serves = entry["serves"]
    if entry["instead"]:
        on = f", here for {kind(serves['gpu'])}, not measured" if serves else ""
        print_wrapped(f"gives way to {instead_words(entry['instead'])}{on}", rest="  ")
    if serves:
        _print_serving(serves, short_names)
    if (begins := entry["predicted_from"]) is not None:
        print(f"from M = {begins} on, twice what it was tuned to, the archive's form for any N and K serves")
    if "ranges" not in entry:
        return
    if entry["torch_faster"]:
        ranges = ", ".join(interval(row) for row in entry["torch_faster"])
        print_wrapped(f"torch was faster at M = {ranges}: {faster_with_torch(entry)} that were measured", rest="  ")
    if entry["apart"]:
        ranges = ", ".join(interval(row) for row in entry["apart"])
        print_wrapped(f"faster with the activation in a kernel of its own at M = {ranges}", rest="  ")
    for machine in machines(entry["tuning"]):
        print_wrapped(machine, rest="  ")
    print("\nof the entry itself, which serves nothing:" if entry["instead"] else "")
    for ranges, title in ((entry["ranges"], "function"), (entry["invariant"], f"function, {_EQUAL_BITS}")):
        if ranges:
            rows = [[interval(row), short_names.get(row["function"], ""), row["function"]] for row in ranges]
            print_fitted(["M", "digest", title], rows, right={0})
            print()
    if entry["timings"]:
        header = ["M", "us", "spread", "baseline us", "spread", "ratio", "sustained", "other us"]
        header += ["digest", "function", "best other"]
        rows = [_timing(row, short_names) for row in entry["timings"]]
        print_fitted(header, rows, right=range(8), expendable=[10, 9])
    if entry["candidates"] and not candidates:
        most = max(len(row["functions"]) for row in entry["candidates"])
        print_wrapped(f"up to {most} candidates at each M that aot tune would time; --candidates prints them")
    for row in entry["candidates"] if candidates else ():
        digests = " ".join(short_names.get(name, name) for name in row["functions"])
        print_wrapped(digests, first=f"candidates at M = {row['m']}, best first: ", rest="  ")


def print_predicted(entry: dict[str, Any], short_names: dict[str, str]) -> None:
    """What `aot show` prints for a signature that a form computes."""
    entry = cleaned(entry)
    print_wrapped(f"{entry['key']} on {entry['target']}: {entry['state']} for {kind(entry['gpu'])}, not measured")
    _print_operands(entry)
    _print_serving(entry, short_names)


def _print_serving(serves: dict[str, Any], short_names: dict[str, str]) -> None:
    """What serves at some M: by prediction, for a kind of GPU, or of an entry, with the times that were measured."""
    us = "us"
    if serves["state"] == "predicted":
        us, checked = "predicted us", ", ".join(serves["checked_on"])
        count = serves["functions"]
        print_wrapped(f"functions that can compute it: {count}, {f'checked on {checked}' if checked else 'never run'}")
    titles = {"choices": "function", "invariant": f"function, {_EQUAL_BITS}"}
    for choices, title in titles.items():
        if serves[choices]:
            print()
            rows = [
                [str(c["m"]), "" if c["us"] is None else f"{c['us']:.1f}", short_names[c["function"]], c["function"]]
                for c in serves[choices]
            ]
            print_fitted(["M", us, "digest", title], rows, right={0, 1})


def print_function(function: dict[str, Any]) -> None:
    """What `aot show` prints for a function."""
    function = cleaned(function)
    cubin, program = function["cubin"], function["program"]
    print_wrapped(function["name"])
    fields = [("family", function["family"]), ("target", function["target"])]
    if function["checked_on"]:
        fields.append(("right on", ", ".join(function["checked_on"])))
    fields += [("digest", function["digest"]), ("cubin", f"{cubin['bytes']:,} bytes"), ("sha256", cubin["sha256"])]
    print_fields([*fields, ("program", f"{program['nodes']} nodes, {program['bytes']:,} bytes of JSON")])
    print()
    print_fitted(["argument", "kind", "type", "shape", "strides", "must be"], list(_arguments(function["arguments"])))
    if function["symbols"]:
        print()
        rows = [[n, f"i{s['width']}", f"a multiple of {s['divisibility']}"] for n, s in function["symbols"].items()]
        print_fitted(["symbol", "type", "must be"], rows)
    for launch in function["launches"]:
        kernel = function["kernels"][launch["kernel"]]
        registers, static, local = (kernel[what] for what in ("registers", "shared_bytes", "local_bytes"))
        dynamic = extents([launch["shared_bytes"]])
        sizes = launch["parameter_bytes"]
        print()
        print_wrapped(kernel["symbol"], first="launches ", rest="  ")
        print(f"  {registers} registers a thread, {local} bytes of local memory")
        print(f"  grid {extents(launch['grid'])}, block {extents(launch['block'])}")
        print(f"  {static} bytes of static shared memory, {dynamic} dynamic")
        print(f"  {len(sizes)} parameters of {sum(sizes)} bytes, {launch['tma_descriptors']} TMA descriptors")
        for name, words in launch["attributes"].items():
            print(f"  {name} {extents(words)}")


def _operand(operand: dict[str, Any]) -> str:
    """A tensor, such as "bias bf16 (4096)"."""
    shape = ", ".join(map(str, operand["shape"]))
    return f"{operand['name']} {operand['dtype']} ({shape}){' transposed' if operand['transposed'] else ''}"


def _print_operands(entry: dict[str, Any]) -> None:
    """What manifests call a signature, and what it takes."""
    if entry["names"]:
        print_wrapped(f"{names_of_operation(entry['operation'])}: {', '.join(entry['names'])}", rest="  ")
    print_wrapped(f"takes: {', '.join(_operand(o) for o in entry['operands'])}", rest="  ")
    words = "epilogue", "activation", "scaling", "overlap"
    said = {name: word for name, word in entry["signature"].items() if name in words}
    if unusual := [f"{name} {word}" for name, word in said.items() if word not in ("none", "serial")]:
        print_wrapped(f"with: {', '.join(unusual)}", rest="  ")


def _timing(row: dict[str, Any], short_names: dict[str, str]) -> list[str]:
    return [
        str(row["m"]),
        f"{row['us']:.1f}",
        percent(row.get("spread")),
        f"{row['baseline_us']:.1f}",
        percent(row.get("baseline_spread")),
        f"{row['ratio']:.2f}x",
        "" if row["sustained_ratio"] is None else f"{row['sustained_ratio']:.2f}x",
        "" if row.get("runner_up_us") is None else f"{row['runner_up_us']:.1f}",
        short_names.get(row["function"], ""),
        row["function"],
        row.get("runner_up") or "",
    ]


def _arguments(arguments: Iterable[dict[str, Any]], prefix: str = "") -> Iterable[list[str]]:
    """The rows of an argument table, tuples followed by their items."""
    for a in arguments:
        name = prefix + a["name"]
        shape, strides = (f"({', '.join(map(str, a[part]))})" if part in a else "" for part in ("shape", "strides"))
        owed = {
            "tensor": f"aligned to {a.get('alignment')} bytes",
            "device": f"{a.get('property')} for clusters of {a.get('cluster_size')}, which the runtime asks the device",
            "workspace": f"{a.get('bytes')} bytes{_each(a)}, which the runtime provides",
            "none": "None",
        }
        yield [name, a["kind"], a.get("dtype", ""), shape, strides, owed.get(a["kind"], "")]
        yield from _arguments(a.get("items", ()), f"{name}.")


def _each(workspace: dict[str, Any]) -> str:
    zeros = " of zeros" if workspace.get("zeroed") else ""
    return zeros if workspace.get("each") is None else f"{zeros} for each of {workspace['each']}"
