"""What `aot verify` looks at: each digest, each record as a server reads it and as its cubin has it, its launches,
each table. Only finds; how that is printed is not its subject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

from runtime.container.archive import Archive
from runtime.container.index import FunctionEntry
from runtime.errors import AotError, RecordError
from runtime.gemm.signature import Signature
from runtime.program.operation import operation
from runtime.program.record import Record
from runtime.tables.dispatch import Dispatch, Entry, record_mismatch, workspaces_of

from ..compile import cubin
from ..pack import build_table, forms, timings, tuning_table
from ..pack.tables import operations_of
from ..search.legal import of_name
from ..search.variants import Variant
from ..tune import history
from . import form_checks, launch_checks
from .equal_bits import require_equal_bits
from .evaluation import Budget

Samples = dict[str, dict[Signature, str]]  # by function, GEMMs of forms that it serves, and the form's name
Uses = dict[str, dict[Any, tuple[int, ...]]]  # by function, signatures that it serves, and M values in its ranges

Kernels = dict[str, cubin.CubinKernel]  # of a cubin, by symbol
Key = TypeVar("Key")
Value = TypeVar("Value")


class Finding(NamedTuple):
    """What was looked at, whether it holds, and what was found; `warning` is what to look into though it holds."""

    subject: str
    ok: bool
    detail: str
    warning: str = ""


def verify(archive: Archive) -> list[Finding]:
    """Check everything; a failed check stops none of the others."""

    def read_record(name: str) -> Record:
        return Record.from_json(archive.record(name))

    def read_cubin(blob: int) -> Kernels:
        return cubin.kernels(archive.blob(blob))

    record, kernels, variant = _Once(read_record), _Once(read_cubin), cache(of_name)
    findings = [Finding(*check) for check in archive.verify()]
    findings += [
        _check(f"function {name}", partial(_compare, archive.entry(name), record, kernels))
        for name in archive.functions
    ]
    table: list[Entry] = []
    tables = [_check(f"{name} table", partial(_read_table, archive, name, table)) for name in operations_of(archive)]
    uses: Uses = {}
    entries = [
        _check(
            f"{entry.signature.operation} {entry.signature.key()} on {_place(entry)}",
            partial(_compare_entry, entry, record, variant, uses),
        )
        for entry in table
    ]
    budget = Budget(archive.file_bytes)
    rows: list[forms.FormRow] = []
    samples: Samples = {}
    in_forms: list[Finding] = []
    if forms.TABLE in archive.tables:
        in_forms.append(_check("universal table", partial(_read_forms, archive, rows)))
        in_forms += [
            _check(f"form {_form(row)}", partial(_compare_form, row, record, variant, samples)) for row in rows
        ]
        in_forms += _check_costs(archive, rows, budget)
    findings += _check_launches(archive, record, uses, samples, budget)
    findings.append(_check("build table", partial(_read_build, archive)))
    findings.append(_check("tuning table", lambda: f"{len(tuning_table.read(archive))} environments"))
    if tuning_table.HISTORY in archive.tables:
        findings.append(_check("history table", lambda: f"{len(history.tunings(archive))} tunings"))
    return [*findings, *tables, *entries, *in_forms]


class _Once(Generic[Key, Value]):
    """Reads things each once, whether they can be read or not: functions may share a cubin, and entries functions."""

    def __init__(self, read: Callable[[Key], Value]) -> None:
        self._read, self._known = read, dict[Key, Value | AotError]()

    def __call__(self, key: Key) -> Value:
        found = self._known.get(key)
        if found is None:
            try:
                found = self._read(key)
            except AotError as error:
                found = error.with_traceback(None)  # which would keep alive what was read
            self._known[key] = found
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


def _compare(of: FunctionEntry, read: Callable[[str], Record], kernels: Callable[[int], Kernels]) -> str:
    """Hold a function's record against its cubin."""
    name = of.name
    record, found = read(name), kernels(of.cubin)
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


def _check_launches(
    archive: Archive, read: Callable[[str], Record], uses: Uses, samples: Samples, budget: Budget
) -> list[Finding]:
    """Look at the launches of each function, and say what the budget left out."""
    findings, left_out = list[Finding](), dict[str, int]()
    for name in archive.functions:
        subject = f"launches of {name}"
        try:
            record = read(name)
            found = launch_checks.check(archive.record(name), record, uses.get(name, {}), budget, samples.get(name, {}))
        except AotError as error:
            findings.append(Finding(subject, False, str(error)))
            continue
        detail = f"{found.launched} shapes"
        if found.left_out:
            detail += f", {found.left_out} left out"
            left_out[name] = found.left_out
        findings.append(Finding(subject, True, detail, "; ".join(found.warnings)))
    if left_out:
        warning = (
            f"{sum(left_out.values())} shapes of {len(left_out)} functions, first {next(iter(left_out))}, were not "
            f"evaluated, so their launches may not work: verify takes {budget.most_steps} steps for a file of "
            f"{archive.file_bytes} bytes; an archive of fewer functions or GEMMs is evaluated for all"
        )
        findings.append(Finding("launches left out", True, f"of {len(left_out)} functions", warning))
    return findings


def _read_build(archive: Archive) -> str:
    found = build_table.read(archive)
    return f"{sum(len(model.problems) for model in found.models)} problems of models, {len(found.tools)} tools"


# --- the tables of operations ---


def _read_table(archive: Archive, name: str, into: list[Entry]) -> str:
    targets = archive.functions.targets_by_name()
    found = Dispatch.from_json(archive.table(name), operation(name), targets).entries
    into += found
    return f"{len(found)} entries"


def _compare_entry(
    entry: Entry, read: Callable[[str], Record], variant: Callable[[str], Variant | None], uses: Uses
) -> str:
    """Hold an entry against the records of its functions, and what is known of the variants of those that are to give
    equal bits, and read its timings; what they serve goes into `uses`."""
    rows, failed = _rows_by_function(entry), list[AotError]()
    equal_bits = {name for _, name in entry.invariant_ranges or ()}
    # The tensors of functions that can compute it, or the name of one that takes more: `record_mismatch` looks at
    # nothing else.
    suited = set[Any]()
    for name, of_interest in rows.items():
        try:
            record = read(name)
            known_by = record.tensors or name
            if known_by not in suited:
                if mismatch := record_mismatch(entry.signature, record):
                    raise RecordError(f"function {name} {mismatch}; build the archive again")
                suited.add(known_by)
            if name in equal_bits and (spaces := workspaces_of(record)):
                raise RecordError(
                    f"function {name} is to give equal bits at every M, but takes the workspace {spaces[0]}, so CTAs "
                    "share tiles; build the archive again"
                )
            uses.setdefault(name, {})[entry.signature] = of_interest
        except AotError as error:
            failed.append(error)
    if failed:
        raise failed[0]
    require_equal_bits(dict.fromkeys(equal_bits, 1), variant, getattr(entry.signature, "k", None))
    return f"{len(rows)} functions, {len(timings.read(entry))} timings"


def _place(entry: Entry) -> str:
    return entry.target if entry.gpu is None else f"{entry.target}, {entry.gpu.words()}"


def _rows_by_function(entry: Entry) -> dict[str, tuple[int, ...]]:
    """The functions that an entry names, each with the first and the last M at which a range of it ends."""
    ends: dict[str, list[int]] = {name: [] for name in sorted(entry.names)}
    for m, name in (*entry.ranges, *(entry.invariant_ranges or ())):
        ends[name] += [] if m is None else [m]
    return {name: (min(of), max(of)) if of else () for name, of in ends.items()}


# --- the universal table ---


def _form(row: forms.FormRow) -> str:
    return f"{row.name} on {row.form.target}"


def _read_forms(archive: Archive, into: list[forms.FormRow]) -> str:
    into += forms.rows(archive, forms.read(archive))
    return f"{len(into)} forms, {len(archive.table(forms.TABLE)['programs'])} cost programs"


def _compare_form(
    row: forms.FormRow, read: Callable[[str], Record], variant: Callable[[str], Variant | None], samples: Samples
) -> str:
    """Hold a form against the records and variants of its functions; GEMMs to launch each for go into `samples`."""
    failed = list[AotError]()
    suiting = form_checks.Suiting(row)
    for function in row.form.functions:
        try:
            suiting.require_suited(function, read(function.name))
        except AotError as error:
            failed.append(error)
            continue
        for signature in suiting.samples(function):
            samples.setdefault(function.name, {}).setdefault(form_checks.serial(signature), _form(row))
    try:
        require_equal_bits({function.name: function.equal_bits for function in row.form.functions}, variant)
    except AotError as error:
        failed.append(error)
    if failed:
        raise failed[0]
    return f"{len(row.form.functions)} functions"


def _check_costs(archive: Archive, rows: Iterable[forms.FormRow], budget: Budget) -> list[Finding]:
    """Evaluate the cost program of each form, and say what the budget left out."""
    if not rows:
        return []
    findings, left_out = list[Finding](), list[str]()
    costs = form_checks.Costs(archive.table(forms.TABLE)["programs"], budget)
    for row in rows:
        subject = f"costs of form {_form(row)}"
        try:
            evaluated, missing = costs.check(row)
        except RecordError as error:
            findings.append(Finding(subject, False, str(error)))
            continue
        detail = f"{evaluated} problems"
        if missing:
            detail += f", {missing} left out"
            left_out.append(_form(row))
        findings.append(Finding(subject, True, detail))
    if left_out:
        warning = (
            f"the times of {len(left_out)} forms, first {left_out[0]}, were not evaluated for every problem, so a "
            f"choice may rest on none: verify takes {budget.most_steps} steps for a file of {archive.file_bytes} bytes"
        )
        findings.append(Finding("costs left out", True, f"of {len(left_out)} forms", warning))
    return findings
