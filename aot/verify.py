"""What `aot verify` looks at: each digest, each record as a server reads it and as its cubin has it, its launches,
each table. Only finds; how that is printed is not its subject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from runtime.archive import Archive
from runtime.dispatch import Dispatch, Entry, gemm_mismatch
from runtime.errors import AotError, RecordError
from runtime.record import Record
from runtime.signature import Signature

from . import cubin, launch_checks, tables

Uses = dict[str, dict[Signature, tuple[int, ...]]]  # by function, GEMMs that it serves, and M values in its ranges
MAX_GEMMS = 32  # of a function, that it is evaluated for; in an archive of eight models one has 28


class Finding(NamedTuple):
    """What was looked at, whether it holds, and what was found; `warning` is what to look into though it holds."""

    subject: str
    ok: bool
    detail: str
    warning: str = ""


def verify(archive: Archive) -> list[Finding]:
    """Check everything; a failed check stops none of the others."""

    record = _Records(archive)
    findings = [Finding(*check) for check in archive.verify()]
    findings += [_check(f"function {name}", partial(_compare, archive, name, record)) for name in archive.functions]
    table: list[Entry] = []
    gemm_table = _check("gemm table", partial(_read_table, archive, table))
    uses = _uses(table, record)
    for name in archive.functions:
        findings.append(_check_launches(archive, name, record, uses))
    findings.append(
        _check("build table", lambda: f"{len(tables.gemms(archive))} gemms, {len(tables.tools(archive))} tools")
    )
    findings.append(_check("tuning table", lambda: f"{len(tables.environments(archive))} environments"))
    findings.append(gemm_table)
    for entry in table:
        subject = f"gemm {entry.signature.key()} on {entry.target}"
        findings.append(_check(subject, partial(_compare_entry, entry, record)))
    return findings


class _Records:
    """Reads the records of an archive, each once, whether it can be read or not."""

    def __init__(self, archive: Archive) -> None:
        self._archive, self._known = archive, dict[str, Record | AotError]()

    def __call__(self, name: str) -> Record:
        found = self._known.get(name)
        if found is None:
            try:
                found = Record.from_json(self._archive.record(name))
            except AotError as error:
                found = error
            self._known[name] = found
        if isinstance(found, AotError):
            raise found.with_traceback(None)
        return found


def causes(findings: Iterable[Finding]) -> list[tuple[Finding, int]]:
    """The failed checks that are no mere consequence of another, each with how many others failed because of it.

    A consequence says so, or says the same: what needs a damaged block repeats what is wrong with the block.
    """
    found: dict[str, tuple[Finding, int]] = {}
    cause = ""
    for finding in findings:
        if finding.ok:
            continue
        if finding.detail not in found and not (cause and finding.detail.endswith(" cannot be read")):
            found[finding.detail] = finding, 0
            cause = finding.detail
            continue
        of = finding.detail if finding.detail in found else cause
        found[of] = found[of][0], found[of][1] + 1
    return list(found.values())


def _check(subject: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, True, look())
    except AotError as error:
        return Finding(subject, False, str(error))


# --- functions ---


def _compare(archive: Archive, name: str, read: Callable[[str], Record]) -> str:
    """Hold a function's record against its cubin."""
    record = read(name)
    found = cubin.kernels(archive.cubin(name))
    if set(found) != {kernel.symbol for kernel in record.kernels}:
        stated = ", ".join(kernel.symbol for kernel in record.kernels)
        raise RecordError(f"function {name}: its record has the kernels {stated}, its cubin {', '.join(found)}")
    for kernel in record.kernels:
        for field in ("registers", "shared_bytes", "local_bytes"):
            _require_same(
                name, f"{kernel.symbol}: {field}", getattr(kernel, field), getattr(found[kernel.symbol], field)
            )
    for launch in record.program.launches:
        symbol = record.kernels[launch.kernel].symbol
        _require_same(name, f"{symbol}: sizes of parameters", launch.sizes, found[symbol].parameter_sizes)
    return f"{len(record.kernels)} kernels, {len(record.program.launches)} launches"


def _require_same(name: str, what: str, stated: Any, held: Any) -> None:
    if stated != held:
        raise RecordError(f"function {name}: {what}: {stated} in its record, {held} in its cubin; build it again")


def _check_launches(archive: Archive, name: str, read: Callable[[str], Record], uses: Uses) -> Finding:
    """Evaluate a function's launches, and look for addresses that were compiled in."""
    subject, suspicious = f"launches of {name}", list[str]()

    def look() -> str:
        record, obj = read(name), archive.record(name)
        count = launch_checks.check(obj, record, uses.get(name, {}))
        suspicious.extend(launch_checks.suspicious_constants(obj))
        return f"{count} shapes"

    found = _check(subject, look)
    if not suspicious:
        return found
    return found._replace(warning=f"{', '.join(suspicious)}, which looks like a device address that was compiled in")


# --- the gemm table ---


def _read_table(archive: Archive, into: list[Entry]) -> str:
    if "gemm" in archive.tables:
        into += Dispatch.from_json(archive.table("gemm"), archive.functions.targets_by_name()).entries
    return f"{len(into)} entries"


def _uses(table: Iterable[Entry], read: Callable[[str], Record]) -> Uses:
    """What each function that can be read serves, up to `MAX_GEMMS`, with the first and the last M of its ranges.

    What a function cannot compute is told by the check of the entry that names it.
    """
    found: Uses = {}
    for entry in table:
        bounds: dict[str, tuple[int, ...]] = dict.fromkeys(_functions_of(entry), ())
        for m, name in entry.ranges:
            bounds[name] = bounds[name] if m is None else (*bounds[name][:1], m)
        for name, rows in bounds.items():
            served = found.setdefault(name, {})
            if len(served) < MAX_GEMMS and _fits(entry.signature, name, read):
                served[entry.signature] = rows
    return found


def _fits(signature: Signature, name: str, read: Callable[[str], Record]) -> bool:
    try:
        return gemm_mismatch(signature, read(name)) is None
    except AotError:
        return False


def _functions_of(entry: Entry) -> list[str]:
    names = {name for _, name in entry.ranges} | {name for _, ranked in entry.candidates for name in ranked}
    return sorted(names)


def _compare_entry(entry: Entry, read: Callable[[str], Record]) -> str:
    """Hold an entry against the records of its functions, and read its timings."""
    names = _functions_of(entry)
    for name in names:
        if mismatch := gemm_mismatch(entry.signature, read(name)):
            raise RecordError(f"function {name} {mismatch}; build the archive again")
    return f"{len(names)} functions, {len(tables.timings(entry))} timings"
