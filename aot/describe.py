"""What an archive holds, as plain data: behind `aot ls`, `aot show` and `aot verify`, which only print it.

Every result is a JSON object or made of such; times are microseconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from runtime import canonical
from runtime.archive import RECORDS, TABLES, Archive, Check
from runtime.dispatch import Dispatch, Entry
from runtime.errors import AotError, RecordError
from runtime.program import (
    CLUSTER_DIMENSION,
    COOPERATIVE,
    PREFERRED_CLUSTER_DIMENSION,
    PROGRAMMATIC_STREAM_SERIALIZATION,
)
from runtime.record import Record

from .manifest import did_you_mean

_ATTRIBUTES = {
    COOPERATIVE: "cooperative",
    CLUSTER_DIMENSION: "cluster",
    PROGRAMMATIC_STREAM_SERIALIZATION: "programmatic stream serialization",
    PREFERRED_CLUSTER_DIMENSION: "preferred cluster",
}


class UnknownName(AotError):
    """The archive has nothing of the name asked for."""


def listing(archive: Archive) -> dict[str, Any]:
    """Every entry of the gemm table with its ranges, the functions outside it, and sizes in total.

    A range's `us` and `ratio` (baseline time / its own; above 1 is faster) are those at the largest M it was measured
    at, None where it was not; `measured` counts such M.
    """
    names = _gemm_names(archive)
    entries = []
    used: set[str] = set()
    for entry in _dispatch(archive).entries:
        used |= _functions_of(entry)
        key = entry.signature.key()
        entries.append(
            {
                "signature": key,
                "gemms": names.get(key, []),
                "target": entry.target,
                "state": entry.state,
                "ranges": _ranges(entry),
                "candidates": sum(len(ranked) for _, ranked in entry.candidates),
            }
        )
    others = [{"name": e.name, "target": e.target} for e in archive.functions.values() if e.name not in used]
    return {"entries": entries, "functions": others, "totals": _totals(archive)}


def show(archive: Archive, name: str) -> dict[str, Any]:
    """What the archive says of `name`: a function, a signature, or a gemm of the models it was built for.

    Raises:
        UnknownName: it is none of these.
    """
    if name in archive.functions:
        return {"function": _function(archive, name)}
    gemms = _gemm_names(archive)
    entries = _dispatch(archive).entries
    chosen = [e for e in entries if e.signature.key() == name or name in gemms.get(e.signature.key(), ())]
    if not chosen:
        known = [*{e.signature.key(): None for e in entries}, *{g: None for gs in gemms.values() for g in gs}]
        near = did_you_mean(name, [*known, *archive.functions]).split("known:")[0]
        raise UnknownName(
            f"{archive.path}: has no function, signature or gemm {name!r}; {near}`aot ls {archive.path}` lists them"
        )
    return {"gemm": [_entry(e, gemms) for e in chosen]}


def verify(archive: Archive) -> list[Check]:
    """Check everything: each digest, each record as a server reads it, each table, and that their names agree."""
    checks = archive.verify()
    checks += [_check(f"function {name}", partial(_read, archive, name)) for name in archive.functions]
    return [*checks, _check("gemm table", lambda: f"{len(listing(archive)['entries'])} entries")]


def _check(subject: str, look: Callable[[], str]) -> Check:
    try:
        return Check(subject, True, look())
    except AotError as error:
        return Check(subject, False, str(error))


def _read(archive: Archive, name: str) -> str:
    record = Record.from_json(archive.record(name))
    return f"{len(record.kernels)} kernels, {len(record.program.launches)} launches"


# --- the gemm table ---


def _dispatch(archive: Archive) -> Dispatch:
    if "gemm" not in archive.tables:
        return Dispatch(())
    return Dispatch.from_json(archive.table("gemm"), {name: e.target for name, e in archive.functions.items()})


def _gemm_names(archive: Archive) -> dict[str, list[str]]:
    """The gemms of the models that the archive was built for, by signature; an archive need not say."""
    names: dict[str, list[str]] = {}
    table = archive.table("build") if "build" in archive.tables else {"models": []}
    try:
        gemms = [(gemm["signature"], gemm["name"]) for model in table["models"] for gemm in model["gemms"]]
        for signature, name in dict.fromkeys(gemms):
            names.setdefault(signature, []).append(name)
    except (KeyError, TypeError) as error:
        raise RecordError(
            f"{archive.path}: table build: no list of models ({error!r}); build the archive again"
        ) from None
    return names


def _functions_of(entry: Entry) -> set[str]:
    return {name for _, name in entry.ranges} | {name for _, ranked in entry.candidates for name in ranked}


def _ranges(entry: Entry) -> list[dict[str, Any]]:
    rows = []
    above = 0
    timings = _timings(entry)
    for m_max, function in entry.ranges:
        measured = [t for t in timings if t["m"] > above and (m_max is None or t["m"] <= m_max)]
        last = measured[-1] if measured else {"us": None, "ratio": None}
        row = {"m_min": above + 1, "m_max": m_max, "function": function}
        rows.append(row | {"us": last["us"], "ratio": last["ratio"], "measured": len(measured)})
        above = m_max or above
    return rows


def _timings(entry: Entry) -> list[dict[str, Any]]:
    """The rows that `aot.tune` wrote, as they are, each with its `ratio`."""
    rows = []
    for row in entry.timings:
        try:
            m, us, baseline_us, function = (row[name] for name in ("m", "us", "baseline_us", "function"))
            if type(m) is not int or not isinstance(function, str) or not us > 0:
                raise TypeError("wrong types")
            rows.append(row | {"ratio": round(baseline_us / us, 3)})
        except (KeyError, TypeError) as error:
            where = f"gemm table, {entry.signature.key()} on {entry.target}"
            raise RecordError(f"{where}: unreadable timings ({error!r}); tune the archive again") from None
    return rows


def _entry(entry: Entry, gemms: Mapping[str, list[str]]) -> dict[str, Any]:
    return {
        "signature": entry.signature.to_json(),
        "key": entry.signature.key(),
        "gemms": gemms.get(entry.signature.key(), []),
        "target": entry.target,
        "state": entry.state,
        "ranges": _ranges(entry),
        "timings": _timings(entry),
        "candidates": [{"m": m, "functions": list(ranked)} for m, ranked in entry.candidates],
    }


# --- functions ---


def _function(archive: Archive, name: str) -> dict[str, Any]:
    obj = archive.record(name)
    record = Record.from_json(obj)
    program = obj["program"]
    return {
        "name": name,
        "target": record.target,
        "family": record.family,
        "arguments": obj["arguments"],
        "symbols": obj["symbols"],
        "kernels": obj["kernels"],
        "launches": [_launch(launch, program) for launch in program["launches"]],
        "program": {"nodes": len(program["nodes"]), "bytes": len(canonical.dumps(program))},
        "cubin": {"sha256": record.cubin, "bytes": len(archive.cubin(name))},
    }


def _launch(launch: dict[str, Any], program: dict[str, Any]) -> dict[str, Any]:
    """A launch with None in place of every number that depends on the arguments."""

    def constants(references: Iterable[int]) -> list[int | None]:
        nodes = (program["nodes"][r - inputs] if r >= inputs else [None] for r in references)
        return [node[2] if node[0] == "const" else None for node in nodes]

    inputs = len(program["values"])
    parameters = launch["parameters"]
    return {
        "kernel": launch["kernel"],
        "grid": constants(launch["grid"]),
        "block": constants(launch["block"]),
        "shared_bytes": constants([launch["shared_bytes"]])[0],
        "attributes": {_ATTRIBUTES[number]: constants(words) for number, words in launch["attributes"]},
        "parameter_bytes": [p["size"] for p in parameters],
        "tma_descriptors": sum(slot[1] == "tma" for p in parameters for slot in p["slots"]),
    }


def _totals(archive: Archive) -> dict[str, Any]:
    sizes = archive.sizes()
    count = len(archive.functions)
    return {
        "functions": count,
        "targets": list(archive.targets),
        "cubins": sum(size.blobs for kind, size in sizes.items() if kind not in (RECORDS, TABLES)),
        "raw_bytes": sum(size.raw for size in sizes.values()),
        "file_bytes": archive.file_bytes,
        "bytes_per_function": round(archive.file_bytes / count) if count else None,
        "by_kind": {kind: asdict(size) for kind, size in sizes.items()},
    }
