"""`aot info`: what an archive is as a whole, who built it, and from what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..arguments import ArchivePath, Json, count, examples
from ..inputs import open_archive
from ..layout import print_fields, print_fitted
from ..streams import print_json
from ..tables import cleaned, tuning_words

EXAMPLES = examples("aot info model.aot", "aot info model.aot --json")
_SHOWN = 5  # of a list that may be long; --json has all


def command(archive: ArchivePath, as_json: Json = False) -> None:
    """Say what an archive is and who made it. Its digest, the models that it was built for, tools, GPUs, sizes, and
    what it lacks."""
    from ...inspect.info import info

    with open_archive(archive) as opened:
        found = info(opened)
    if as_json:
        return print_json(found)
    print_info(found)


def print_info(found: dict[str, Any]) -> None:
    """What `aot info` prints."""
    found = cleaned(found)
    totals = found["totals"]
    print_fields([("digest", found["digest"]), *_models(found), *_made(found)])
    if found["targets"]:
        print()
        rows = [_target(row) for row in found["targets"]]
        print_fitted(["target", "functions", "KiB raw", "tuned", "ranked", "forms", "GPUs"], rows, right=range(1, 6))
    if found["families"]:
        print()
        rows = [[f["family"], str(f["functions"]), str(f["cubins"]), _kib(f["bytes"])] for f in found["families"]]
        print_fitted(["family", "functions", "cubins", "KiB raw"], rows, right=range(1, 4))
    if totals["by_kind"]:
        print()
        rows = [[k, str(s["blobs"]), _kib(s["raw"]), _kib(s["stored"])] for k, s in totals["by_kind"].items()]
        print_fitted(["kind", "blobs", "KiB raw", "KiB in the file"], rows, right=range(1, 4))
    print()
    print_fields([*_functions(found), *_lacks(found)])


def _models(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for model in found["models"]:
        layers = count(len(model["layers"]), "layer")
        yield "model", f"{model['model'] or 'without a name'}, {layers}{', with traffic' if model['traffic'] else ''}"
        if model["source"]:
            yield "  from", model["source"]
        if model["manifest"]:
            yield "  sha256", model["manifest"]  # of its manifest
    if not found["models"]:
        yield "model", "the archive does not say"


def _made(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "built with", _tools(found["tools"]) or "the archive does not say"
    for target, by in found["ranking"].items():
        limit = "" if found["candidates"] is None else f", up to {found['candidates']} for each M"
        yield "ranked", f"{target} by {by}{limit}"
    for environment in found["tuning"]:
        kind, _, rest = tuning_words(environment).partition(" on ")
        yield ("tuned" if kind == "tuned" else "checked"), f"on {rest}"
    if not found["tuning"]:
        yield "tuned", "never"
    yield from signature_fields(found["signature"])


def signature_fields(found: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    """What a signature beside the archive says, in words; unchecked."""
    if found is None:
        yield "signed", "no: there is no signature of it beside the file"
        return
    if "problem" in found:
        yield "signed", found["problem"]
        return
    until = f", until {found['expires']}" if found["expires"] else ""
    yield "signed", f"as {found['name']} version {found['version']} on {found['signed_on']}{until}"
    yield (
        "  by",
        f"key {', '.join(key[:16] for key in found['keys'])}; `aot verify --key KEYS` checks whether that holds",
    )
    if found["builder"]:
        yield "  built by", f"{found['builder']}, as the signer says"
    for line in found["commands"]:
        yield "  command", line


def _tools(tools: dict[str, str]) -> str:
    """Names and versions; a package of another's name and version, such as nvidia-cutlass-dsl-libs-base, goes with
    it."""
    apart = [n for n, v in tools.items() if not any(n != o and n.startswith(f"{o}-") and v == tools[o] for o in tools)]
    return ", ".join(f"{name} {tools[name]}" for name in apart)


def _target(row: dict[str, Any]) -> list[str]:
    entries = row["entries"]
    numbers = (row["functions"], entries["tuned"], entries["ranked"], row["forms"])
    functions, tuned, ranked, forms = map(str, numbers)
    return [row["target"], functions, _kib(row["bytes"]), tuned, ranked, forms, ", ".join(row["gpus"])]


def _functions(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    totals = found["totals"]
    yield "size", f"{totals['file_bytes']:,} bytes in the file, {totals['raw_bytes']:,} raw"
    words = {
        "serves": ("serves an entry", "serve an entry"),
        "equal bits": ("serves only callers who want equal bits", "serve only callers who want equal bits"),
        "form": ("serves forms", "serve forms"),
        "candidate": ("is a candidate that serves nothing", "are candidates that serve nothing"),
        "by name": ("is in no table, called by name", "are in no table, called by name"),
    }
    said = [count(number, *words[use]) for use, number in found["uses"].items()]
    yield "functions", f"{totals['functions']}: {', '.join(said)}" if said else "none"
    if found["entries"]["give_way"]:
        given = count(found["entries"]["give_way"], "entry was", "entries were")
        yield "gives way", f"{given} never tuned and give way to what was tuned or checked"


def _lacks(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What did not compile, what was asked and is not served, and what tuning rejected."""
    lists = {
        "failed": [f"{name}: {reason}" for name, reason in found["failures"]],
        "not served": [f"{what} on {target}: {reason}" for what, target, reason in found["unserved"]],
        "rejected": [f"{name}: {reason}" for name, reason in found["rejected"]],
    }
    for title, rows in lists.items():
        for row in rows[:_SHOWN]:
            yield title, row
        if len(rows) > _SHOWN:
            yield title, f"and {len(rows) - _SHOWN} more; --json has all"


def _kib(number: int) -> str:
    return f"{number / 1024:,.0f}"
