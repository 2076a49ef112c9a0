"""What an archive holds, as plain data: behind `aot ls` and `aot show`, which only print it.

Every result is a JSON object or made of such; times are microseconds, sizes bytes.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runtime.container import canonical
from runtime.container.archive import RECORDS, TABLES, Archive
from runtime.device.launch import (
    CLUSTER_DIMENSION,
    COOPERATIVE,
    PREFERRED_CLUSTER_DIMENSION,
    PROGRAMMATIC_STREAM_SERIALIZATION,
)
from runtime.errors import AotError
from runtime.program.operation import Operand, Signature
from runtime.program.record import Record
from runtime.tables.dispatch import serves
from runtime.tables.table import Entry

from ..pack import build_table, forms, timings, tuning_table
from ..pack.precedence import Precedence
from ..suggest import did_you_mean

_ATTRIBUTES = {
    COOPERATIVE: "cooperative",
    CLUSTER_DIMENSION: "cluster",
    PROGRAMMATIC_STREAM_SERIALIZATION: "programmatic stream serialization",
    PREFERRED_CLUSTER_DIMENSION: "preferred cluster",
}


class UnknownName(AotError):
    """The archive has nothing of the name asked for."""


class NoEntry(AotError):
    """What serves at M values was asked of a function."""


def listing(archive: Archive) -> dict[str, Any]:
    """Every entry of operations' tables with its ranges, every form of the universal table (`aot.pack.forms.listing`),
    the functions outside both, sizes in total, where it was tuned.

    `names` are what manifests call an entry. `gpu` is the kind of GPU that it was tuned on, None where it is for any of
    its target. `measured` counts the M values that an entry was measured at, and `faster_with_torch` those of them
    where torch was faster by more than the tolerance; `totals` has both of all entries. `instead` is what an entry
    gives way to, if it serves nothing (`aot.pack.precedence`).
    A range's `us` and `ratio` (baseline time / its own; above 1 is faster) are those at the largest M it was measured
    at, None where it was not; `measured` counts such M.
    """
    names = _names(archive)
    entries: list[dict[str, Any]] = []
    used: set[str] = set()
    precedence = Precedence(archive)
    for entry in precedence.entries:
        used |= _functions_of(entry)
        key = entry.signature.key()
        entries.append(
            {
                "signature": key,
                "operation": entry.signature.operation,
                "names": names.get(key, []),
                "target": entry.target,
                "gpu": _gpu(entry),
                "state": entry.state,
                "instead": precedence.instead_of(entry),
                "ranges": _ranges(entry),
                **_measured(entry),
                "candidates": sum(len(ranked) for _, ranked in entry.candidates),
            }
        )
    universal = precedence.universal
    rows = forms.rows(archive, universal)
    used.update(f.name for row in rows for f in row.form.functions)
    checked = tuning_table.checked_on(archive)
    others = [
        {"name": e.name, "target": e.target, "checked_on": checked.get(e.name, [])}
        for e in archive.functions.values()
        if e.name not in used
    ]
    return {
        "entries": entries,
        "forms": forms.listing(rows, universal.checked_on if universal else {}),
        "functions": others,
        "totals": _totals(archive)
        | {name: sum(entry[name] for entry in entries) for name in ("measured", "faster_with_torch")},
        "tools": dict(build_table.read(archive).tools),
        "tuning": tuning_table.read(archive),
    }


def show(archive: Archive, name: str, tokens: Sequence[int] = ()) -> dict[str, Any]:
    """What the archive says of `name`: a function, a signature, or what a manifest that it was built for calls one.

    A signature that has no entry, and that a form can compute, is shown with what is predicted for it: at `tokens`
    rows, or at `aot.pack.forms.ROWS` where there are none. An entry is shown with what `serves` at these rows, in its
    place if there is something `instead`, and where there are `tokens` with nothing else.

    Raises:
        UnknownName: it is none of these.
        NoEntry: there are `tokens`, and it is a function.
    """
    if name in archive.functions:
        if tokens:
            raise NoEntry(f"{archive.path}: {name!r} is a function, and --m is for signatures; leave it out")
        return {"function": _function(archive, name)}
    names, precedence = _names(archive), Precedence(archive)
    entries = precedence.entries
    chosen = [e for e in entries if e.signature.key() == name or name in names.get(e.signature.key(), ())]
    if chosen:
        environments = tuning_table.read(archive)
        return {"entries": [_entry(archive, e, names, precedence, environments, tokens) for e in chosen]}
    predicted = _predicted(archive, name, names, tokens or forms.ROWS)
    if not predicted:
        of_forms = [row.name for row in forms.rows(archive, precedence.universal)]
        if name in of_forms:
            raise UnknownName(f"{archive.path}: {name!r} is a form; put an N and a K in place of its stars")
        known = [*{e.signature.key(): None for e in entries}, *{n: None for of in names.values() for n in of}]
        near = did_you_mean(name, [*known, *archive.functions, *_with_extents(of_forms, name)]).split("known:")[0]
        near += f"`aot ls {archive.path}` lists them"
        if reason := _why_not_predicted(archive, name, near):
            raise UnknownName(f"{archive.path}: {name!r} has no entry, and {reason}")
        raise UnknownName(f"{archive.path}: has no function or signature {name!r}, and no manifest's name; {near}")
    return {"predicted": predicted}


def _with_extents(of_forms: Iterable[str], name: str) -> list[str]:
    """The names of forms with the extents that a name has in place of their stars, as far as it has some."""
    extents = {word[0]: word for word in name.split("_") if re.fullmatch("[nkb][0-9]+", word)}
    return [re.sub(r"(?<=_)([nkb])\*", lambda star: extents.get(star[1], star[0]), form) for form in of_forms]


def _why_not_predicted(archive: Archive, name: str, near: str) -> str:
    """Why no form computes a signature, and what is `near` where no form is like it; nothing where the name is no
    signature's, or the archive has no forms."""
    signature, table = forms.signature_of(name), forms.read(archive)
    if signature is None or table is None:
        return ""
    alike = [form for _, form in table.forms if form.signature(signature.n, signature.k) == signature]
    if not alike:
        return f"no form has its types and words; {near}"
    multiples = [(f.n_multiple, f.k_multiple) for f in alike[0].functions]
    n, k = (min(extents) for extents in zip(*multiples, strict=True))
    return f"the functions of its form take an N that is a multiple of {n} and a K of {k}; pad both"


def _predicted(archive: Archive, name: str, names: Mapping[str, list[str]], tokens: Sequence[int]) -> list[Any]:
    """What the universal table predicts for a signature, by key, or for those that manifests call so."""
    table = forms.read(archive)
    if table is None:
        return []
    keys = [key for key, of in names.items() if name in of] or [name]
    found = []
    for signature in filter(None, map(forms.signature_of, keys)):
        of = _described(signature, names)
        found += [of | more for more in forms.predicted(archive, table, signature, tokens)]
    return found


# --- the tables of operations ---


def _names(archive: Archive) -> dict[str, list[str]]:
    """What manifests that the archive was built for call their problems, by signature; an archive need not say."""
    found: dict[str, list[str]] = {}
    for signature, name in dict.fromkeys(
        (g.signature, g.name) for model in build_table.read(archive).models for g in model.gemms
    ):
        found.setdefault(signature, []).append(name)
    return found


def _functions_of(entry: Entry) -> set[str]:
    return set(entry.names)


def _ranges(entry: Entry) -> list[dict[str, Any]]:
    rows = []
    of_all = timings.read(entry)  # by M, which ascends
    at = [t["m"] for t in of_all]
    for row in _intervals(entry.ranges):
        first = bisect_right(at, row["m_min"] - 1)
        measured = of_all[first : None if row["m_max"] is None else bisect_right(at, row["m_max"])]
        last = measured[-1] if measured else {"us": None, "ratio": None}
        rows.append(row | {"us": last["us"], "ratio": last["ratio"], "measured": len(measured)})
    return rows


def _intervals(ranges: Iterable[tuple[int | None, str]]) -> list[dict[str, Any]]:
    """Each range with its first and its last M, None for every larger one, and its function."""
    rows, above = list[dict[str, Any]](), 0
    for m_max, function in ranges:
        rows.append({"m_min": above + 1, "m_max": m_max, "function": function})
        above = m_max or above
    return rows


def _entry(
    archive: Archive,
    entry: Entry,
    names: Mapping[str, list[str]],
    precedence: Precedence,
    environments: list[dict[str, Any]],
    tokens: Sequence[int],
) -> dict[str, Any]:
    """An entry in full, or, where there are `tokens`, what serves at these."""
    instead = precedence.instead_of(entry)
    found = _described(entry.signature, names) | {
        "target": entry.target,
        "gpu": _gpu(entry),
        "state": entry.state,
        "instead": instead,
        "serves": None,
    }
    if instead is None:
        found["serves"] = _serves(entry, tokens) if tokens else None
    elif instead["form"] is not None:
        assert precedence.universal is not None  # which has the form
        (found["serves"],) = forms.predicted(
            archive, precedence.universal, entry.signature, tokens or forms.ROWS, entry.target
        )
    if tokens:
        return found
    return found | {
        "ranges": _ranges(entry),
        "invariant": None if entry.invariant is None else _intervals(entry.invariant_ranges or ()),
        "torch_faster": [{"m_min": first, "m_max": last} for first, last in entry.torch_faster],
        **_measured(entry),
        "timings": timings.read(entry),
        "tuning": [e for e in environments if entry.timings and _is_of(entry, e)],
        "candidates": [{"m": m, "functions": list(ranked)} for m, ranked in entry.candidates],
    }


def _serves(entry: Entry, tokens: Sequence[int]) -> dict[str, Any]:
    """What an entry chooses at each of `tokens` rows, as `aot.pack.forms.predicted` says it, with the times that were
    measured at the very M."""
    us = {(timing["m"], timing["function"]): timing["us"] for timing in timings.read(entry)}

    def choices(of: Entry) -> list[dict[str, Any]]:
        return [{"m": m, "function": of.best(m), "us": us.get((m, of.best(m)))} for m in dict.fromkeys(tokens)]

    return {
        "state": entry.state,
        "choices": choices(entry),
        "invariant": None if entry.invariant is None else choices(entry.only_invariant()),
    }


def _described(signature: Signature, names: Mapping[str, list[str]]) -> dict[str, Any]:
    """What is shown of a signature, whoever serves it."""
    return {
        "signature": signature.to_json(),
        "operation": signature.operation,
        "key": signature.key(),
        "operands": [_operand(o, signature) for o in signature.operands()],
        "names": names.get(signature.key(), []),
    }


def _gpu(entry: Entry) -> dict[str, Any] | None:
    return None if entry.gpu is None else entry.gpu._asdict()


def _measured(entry: Entry) -> dict[str, int]:
    tokens = [timing["m"] for timing in timings.read(entry)]
    return {"measured": len(tokens), "faster_with_torch": sum(map(entry.torch_is_faster, tokens))}


def _is_of(entry: Entry, environment: dict[str, Any]) -> bool:
    """Whether an entry may have been tuned on such a machine."""
    if entry.gpu is not None and entry.gpu.name != environment["gpu"]:
        return False
    return serves(entry.target, tuning_table.capability(environment))


def _operand(operand: Operand, signature: Signature) -> dict[str, Any]:
    """A tensor of the call; M stays a word, and blocks of it are "ceil(M/128)"."""
    extents = signature.extents()
    shape = [extents.get(axis, f"ceil({axis})" if "/" in axis else axis) for axis in operand.axes]
    return {"name": operand.name, "dtype": operand.dtype, "shape": shape, "transposed": operand.layout == "columns"}


# --- functions ---


def _function(archive: Archive, name: str) -> dict[str, Any]:
    obj = archive.record(name)
    record = Record.from_json(obj)
    program = obj["program"]
    return {
        "name": name,
        "target": record.target,
        "family": record.family,
        "checked_on": tuning_table.checked_on(archive).get(name, []),
        "arguments": obj["arguments"],
        "symbols": obj["symbols"],
        "kernels": obj["kernels"],
        "launches": [_launch(launch, program) for launch in program["launches"]],
        "program": {"nodes": len(program["nodes"]), "bytes": len(canonical.dumps(program))},
        "cubin": {"sha256": record.cubin, "bytes": len(archive.cubin(name))},
    }


def resources(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What each launch of a function record takes of an SM: threads, registers a thread, bytes of memory.

    `shared_bytes` is what its CTA has of shared memory, static and dynamic, `local_bytes` what each thread spills;
    None where it depends on the arguments.
    """
    found = []
    for launch in record["program"]["launches"]:
        kernel, what = record["kernels"][launch["kernel"]], _launch(launch, record["program"])
        threads = None if None in what["block"] else math.prod(what["block"])
        dynamic = what["shared_bytes"]
        shared = None if dynamic is None else kernel["shared_bytes"] + dynamic
        found.append(
            {
                "threads": threads,
                "registers": kernel["registers"],
                "shared_bytes": shared,
                "local_bytes": kernel["local_bytes"],
            }
        )
    return found


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
        "by_kind": {kind: size._asdict() for kind, size in sizes.items()},
    }
