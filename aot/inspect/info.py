"""What an archive is as a whole, as plain data: behind `aot info`. Sizes are bytes, before compression unless said.

Who built it and from what comes from the tables `build` and `tuning`, which no server reads; an archive need not have
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runtime.container.archive import FORMAT_VERSION, Archive
from runtime.errors import SignatureError
from runtime.tables.table import STATES, Entry

from ..pack import build_table, tuning_table
from ..pack.build_table import Build
from ..sign import unverified
from . import predictions
from .listing import totals
from .precedence import Precedence
from .uses import USES, uses


def info(archive: Archive, precedence: Precedence | None = None) -> dict[str, Any]:
    """All that an archive says of itself, but for single layers and functions.

    `digest` is what `lib.digest` and metrics report: the SHA-256 of the index, hexadecimal. `entries` counts those of
    operations' tables by state and how many give way to something else; `uses` counts functions by `aot.inspect.uses`,
    and `unused` names those that serve nothing. `families` has functions and bytes by provider and family. `rejected`
    has functions that tuning found wrong, with reasons. `signature` is None where there is none beside the archive.
    `precedence` is of its tables, where they were read before.
    """
    build, precedence = build_table.read(archive), precedence or Precedence(archive)
    used = uses(archive, precedence)
    counts = Counter(used.values())
    environments = tuning_table.read(archive)
    return {
        "path": str(archive.path),
        "digest": archive.digest,
        "format": FORMAT_VERSION,
        "models": [_model(model) for model in build.models],
        "targets": _targets(archive, precedence),
        "entries": _states(precedence, precedence.entries),
        "forms": 0 if precedence.universal is None else len(precedence.universal),
        "checked_on": predictions.checked_on(precedence.universal),
        "uses": {use: counts[use] for use in USES if counts[use]},
        "unused": [name for name, use in used.items() if use in USES[3:]],
        "families": _families(archive, build),
        "tuning": [_environment(e) for e in environments],
        "rejected": [[name, why] for e in environments for name, why in e.get("rejected", {}).items()],
        "tools": dict(build.tools),
        "providers": dict(build.providers),
        "ranking": dict(build.ranking),
        "candidates": build.candidates,
        "failures": [list(row) for row in build.failures],
        "unserved": [list(row) for row in build.unserved],
        "totals": totals(archive),
        "signature": signature(archive),
    }


def signature(archive: Archive) -> dict[str, Any] | None:
    """What the signature beside an archive says of it, which nobody checked here; None where there is none of it,
    and the `problem` with one that cannot be read."""
    try:
        found = unverified.beside(archive)
    except SignatureError as error:
        return {"problem": str(error)}
    if found is None:
        return None
    release = found.release
    return {
        "name": release.name,
        "version": release.version,
        "signed_on": release.signed_on.isoformat(),
        "expires": None if release.expires is None else release.expires.isoformat(),
        "builder": found.builder,
        "commands": list(found.commands),
        "contents": found.contents,
        "keys": list(found.key_ids),
    }


def _environment(found: Mapping[str, Any]) -> dict[str, Any]:
    """Where functions were measured or checked: of those that were found right how many, and without those rejected."""
    return {k: len(v) if k == "right" else v for k, v in found.items() if k != "rejected"}


def _model(model: build_table.Model) -> dict[str, Any]:
    traffic = any(problem.traffic for problem in model.problems)
    return {
        "model": model.model,
        "source": model.source,
        "manifest": model.manifest,
        "layers": [problem.name for problem in model.problems],
        "traffic": traffic,
    }


def _states(precedence: Precedence, entries: Iterable[Entry]) -> dict[str, int]:
    entries = list(entries)
    found = {state: sum(entry.state == state for entry in entries) for state in STATES}
    return found | {"give_way": sum(precedence.instead_of(entry) is not None for entry in entries)}


def _targets(archive: Archive, precedence: Precedence) -> list[dict[str, Any]]:
    """Of each target its functions, bytes, entries by state, forms, and the GPUs on which entries were tuned
    or forms checked."""
    universal = precedence.universal
    of_targets = Counter(form.target for _, form in universal.forms) if universal else Counter[str]()
    checked = predictions.checked_on(universal)
    by_name, sizes = archive.functions.targets_by_name(), archive.blob_lengths()
    found = []
    for target in archive.targets:
        entries = [entry for entry in precedence.entries if entry.target == target]
        names = [name for name, of in by_name.items() if of == target]
        found.append(
            {
                "target": target,
                "functions": len(names),
                "bytes": _bytes(archive, names, sizes),
                "entries": _states(precedence, entries),
                "forms": of_targets[target],
                "gpus": list(
                    dict.fromkeys([*(e.gpu.name for e in entries if e.gpu is not None), *checked.get(target, ())])
                ),
            }
        )
    return found


def _families(archive: Archive, build: Build) -> list[dict[str, Any]]:
    """Functions, cubins and bytes of each family, the largest first; a cubin of several functions counts once."""
    of: dict[str, list[str]] = {}
    for name in archive.functions:
        of.setdefault(family_of(archive, name, build.providers), []).append(name)
    sizes = archive.blob_lengths()
    rows = [
        {
            "family": family,
            "functions": len(names),
            "cubins": len({archive.entry(name).cubin for name in names}),
            "bytes": _bytes(archive, names, sizes),
        }
        for family, names in of.items()
    ]
    return sorted(rows, key=lambda row: (-row["bytes"], row["family"]))


def family_of(archive: Archive, name: str, providers: Mapping[str, str]) -> str:
    """The provider and family of a function: by the name, where its beginning is one that the build used, as reading
    the records of thousands takes seconds; else by the record."""
    word = ".".join(name.split(".")[:2])
    if word in providers:
        return word
    family = archive.record(name).get("family")
    return family if isinstance(family, str) and family else "?"


def _bytes(archive: Archive, names: Iterable[str], sizes: Sequence[int]) -> int:
    """Of the records and cubins of functions, each cubin once."""
    entries = [archive.entry(name) for name in names]
    blobs = {entry.record for entry in entries} | {entry.cubin for entry in entries}
    return sum(map(sizes.__getitem__, blobs))
