"""A selection to an archive: its variants compiled, and the tables that say what they are for.

`aot.selection` says what to compile. The archive of a build is *ranked*: which function serves which M is an estimate,
until `aot.tune` has measured its candidates. Needs no GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.container import canonical
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.errors import DeviceError, RecordError
from runtime.gemm.universal import Universal
from runtime.program.operation import is_operation
from runtime.program.record import Record
from runtime.tables.dispatch import serves

from . import files
from .compile.cache import Cache
from .compile.compiler import BuildReport, Event, compile_variants
from .pack import build_table, tables, tuning_table
from .pack import write as pack
from .pack.build_table import Build, Model
from .pack.compatibility import refusal
from .pack.forms import TABLE as FORMS
from .pack.forms import names as names_of_forms
from .pack.forms import read as read_forms
from .pack.ranges import invariant, ranges
from .problem import manifest
from .providers.spec_file import SpecFunction
from .search import universal
from .search.legal import summation
from .search.unserved import why_none
from .search.variants import Variant
from .selection import NOT_COMPUTED, BuildError, Candidates, Selection, Unserved, places
from .version import own_version

_NOT_COMPILED = "every candidate failed to compile"


class NothingCompiled(BuildError):
    """Every kernel failed to compile, which `on_event` was told of one by one."""


@dataclass(frozen=True)
class Built:
    """What a build did. `targets` are those for which the archive serves something; `forms` counts what it serves at
    any N and K, those of a base too. `of_base` counts functions that are the base's alone, `untuned` the base's tuned
    entries that gave way to new candidates."""

    report: BuildReport
    targets: tuple[str, ...]
    unserved: tuple[Unserved, ...]
    archive_bytes: int
    forms: int
    of_base: int
    untuned: int


def build(
    work: Selection,
    destination: str | os.PathLike[str],
    cache: Cache,
    jobs: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    on_start: Callable[[int, int], None] = lambda kernels, processes: None,
    base: Archive | None = None,
) -> Built:
    """Compile what `work` says and write the archive. What fails is left out, and reported.

    With a `base` the archive has all that it has too; entries of `work` take the place of those for the same signature
    and target, and its forms, if it has any, that of all of the base's.

    `on_event` and `on_start` are those of `aot.compile.compiler.compile_variants`.

    Raises:
        AotError: nothing could be compiled, readers would refuse the table of forms, the archive cannot be written,
            others may write to the cache, or the base is damaged, or serves with functions of which this build has
            other code.
    """
    files.destination(destination)  # before the work, not after it
    if base is not None:
        base.check_blocks()  # those of which nothing is kept too
    report = compile_variants(work.variants(), cache, jobs, on_event, on_start=on_start)
    if report.failures and not report.kernels:
        first, reason = next((v.name(), reason) for v, reason in report.failures.items())
        others = f", nor do the {len(report.failures) - 1} others" if len(report.failures) > 1 else ""
        raise NothingCompiled(f"{first} does not compile{others}: {reason}")
    package = pack.Package()
    function_targets = {v.name(): v.target for v in report.kernels}
    entries, unserved = _entries(work, report)
    forms, without = _forms(work, report)
    unserved = [*work.unserved, *unserved, *without]
    if unserved and not entries and not forms and not any(f in report.kernels for f in work.functions):
        nothing, *more = unserved
        raise BuildError(nothing.words() + (f"; nor is there a kernel for the other {len(more)}" if more else ""))
    targets = tuple(dict.fromkeys([*(row.target for row in entries), *(form.target for form in forms)]))
    origin = _origin(work, report, unserved)
    served = of_base = gone = 0
    if base is not None:
        kept = _rows_besides(base, entries)
        serving = {name for row in kept for name in row.names()} | (set() if forms else names_of_forms(base))
        _require_same_code(base, serving, report)
        left = (set(base.functions) - _named(base)) | serving
        below = [name for name in base.functions if name in left and name not in function_targets]
        _require_records(base, below)
        package.add_archive(base, below)
        function_targets = {n: t for n, t in base.functions.targets_by_name().items() if n in left} | function_targets
        of_base = len(left - {v.name() for v in report.kernels})
        tuned_before = sum(row.state == "tuned" for row in tables.operation_rows(base))
        gone = tuned_before - sum(row.state == "tuned" for row in kept)
        entries = [*kept, *entries]
        below_models = [*_models_of_entries(base), *origin.models]
        asked = (
            None
            if work.asked is None
            else work.asked._replace(inputs={**work.asked.inputs, **build_table.input_digests(base=base)})
        )
        origin = origin._replace(models=below_models, asked=asked)
        forms_below = None if forms else read_forms(base)
        served = 0 if forms_below is None else len(forms_below)
        tuned = any(row.state == "tuned" for row in kept) or left & set(tuning_table.checked_on(base))
        # Which speak of nothing that is kept.
        of_tuning = set() if tuned or served else {tuning_table.TABLE, tuning_table.HISTORY}
        for name in {*base.tables} - {build_table.TABLE} - of_tuning:
            if not is_operation(name):
                package.set_table(name, base.table(name))
    for kernel in report.kernels.values():
        package.add_function(kernel.record, kernel.cubin, kernel.encoded)
    for name, table in tables.operation_tables(entries, function_targets).items():
        package.set_table(name, table)
    package.set_table(build_table.TABLE, origin.to_json())
    if forms:
        table = universal.table(forms)
        served = _require_readable(table, function_targets)
        package.set_table(FORMS, table)
    package.write(destination, cache=cache)
    return Built(report, targets, tuple(unserved), os.stat(destination).st_size, served, of_base, gone)


def _require_readable(table: dict[str, Any], function_targets: Mapping[str, str]) -> int:
    """The number of forms of a universal table that readers take."""
    try:
        return len(Universal.from_json(table, function_targets))
    except RecordError as error:
        reason = str(error).partition(";")[0]
        raise BuildError(f"{reason}; split the manifests over several archives, or give --candidates fewer") from None


def _entries(work: Selection, report: BuildReport) -> tuple[list[tables.Row], list[Unserved]]:
    """The rows of operations' tables (`runtime.tables.dispatch` reads them), and what no kernel is there for."""

    @functools.cache
    def record(variant: Variant) -> Record:
        return Record.from_json(report.kernels[variant].record)

    entries, unserved, asked_at = list[tables.Row](), list[Unserved](), places(work.manifests)
    for problem in work.problems:
        tried = problem.variants()
        refusals = {v: refusal(record(v), problem.signature) for v in tried if v in report.kernels}
        fit = {v: v.name() for v in refusals if refusals[v] is None}  # most are candidates at many M
        ranked = [(m, [fit[v] for v in variants if v in fit]) for m, variants in problem.by_tokens]
        ranked = [(m, names) for m, names in ranked if names]
        if ranked:
            entries.append(_row(problem, ranked))
            continue
        reason = _NOT_COMPILED if tried else NOT_COMPUTED + why_none(problem.target, problem.signature)
        if refused := sorted(filter(None, refusals.values())):
            reason = f"no kernel takes it: {refused[0]}"
        place = asked_at.get(problem.signature, "")
        unserved.append(Unserved(problem.signature.key(), problem.target, reason, place))
    return entries, unserved


def _row(problem: Candidates, ranked: Sequence[tuple[int, Sequence[str]]]) -> tables.Row:
    """The row of a signature with what was compiled of its candidates, by name, best first, at each M."""
    k = getattr(problem.signature, "k", None)
    words = {v.name(): word for v in problem.variants() if (word := summation(v, k)) is not None}
    best = ranges([(m, names[0]) for m, names in ranked])
    return tables.Row(
        problem.signature, problem.target, None, "ranked", best, invariant(ranked, words), candidates=ranked
    )


def _forms(work: Selection, report: BuildReport) -> tuple[list[universal.Chosen], list[Unserved]]:
    """The forms with what was compiled of each, and those of which nothing was."""
    forms, unserved, asked_at = list[universal.Chosen](), list[Unserved](), places(work.manifests)
    for form in work.forms:
        compiled = tuple(v for v in form.variants if v in report.kernels)
        if compiled:
            forms.append(dataclasses.replace(form, variants=compiled))
        else:
            word, place = universal.form_word(form.form), asked_at.get(form.form, "")
            unserved.append(Unserved(word, form.target, _NOT_COMPILED, place))
    return forms, unserved


def _rows_besides(base: Archive, entries: Iterable[tables.Row]) -> list[tables.Row]:
    """The rows of another archive but for the signatures and targets of `entries`."""
    replaced = {(row.signature, row.target) for row in entries}
    return [row for row in tables.operation_rows(base) if (row.signature, row.target) not in replaced]


def _named(archive: Archive) -> set[str]:
    """The functions that its entries and forms name."""
    return {name for row in tables.operation_rows(archive) for name in row.names()} | names_of_forms(archive)


def _require_records(base: Archive, names: Iterable[str]) -> None:
    """Refuse a base with records that this version does not read, which would be kept as they are."""
    for name in names:
        try:
            Record.from_json(base.record(name))
        except RecordError as error:
            raise type(error)(f"{base.path}: {error}") from None


def _require_same_code(base: Archive, serving: Collection[str], report: BuildReport) -> None:
    """Refuse a base whose entries or forms would get code that they were not tuned with."""
    for kernel in report.kernels.values():
        name = kernel.record["name"]
        if name in serving and canonical.dumps(base.record(name)) != canonical.dumps(kernel.record):
            raise BuildError(
                f"{base.path}: serves with {name}, and this build has other code of that name, which was not tuned or "
                "checked there; build the base again with this version and tune it, or load both "
                "archives as layers"
            )


def _models_of_entries(base: Archive) -> list[Model]:
    """The models that it was built for, with the problems that it has entries for: the N and K of a form's say nothing,
    and an entry that comes over it may have the same."""
    keys = {row.signature.key() for row in tables.operation_rows(base)}
    models = build_table.read(base).models
    return [model._replace(problems=[p for p in model.problems if p.signature in keys]) for model in models]


def _problem(item: manifest.Gemm | manifest.Use, of: manifest.Manifest) -> build_table.Problem:
    traffic = [list(pair) for pair in getattr(item, "traffic", ())] or None
    return build_table.Problem(item.name, item.signature.key(), of.calls(item), traffic)


def _origin(work: Selection, report: BuildReport, unserved: Iterable[Unserved]) -> Build:
    """Where the archive comes from; nothing in it depends on when, where or by whom it was built."""
    origins = {name: version for f in work.functions if isinstance(f, SpecFunction) for name, version in f.origins}
    return Build(
        models=[
            Model(
                m.model,
                m.source,
                manifest.digest(m),
                [_problem(item, m) for item in m.items()],
            )
            for m in work.manifests
        ],
        targets=work.targets,
        ranking=work.ranking,
        candidates=work.limit,
        tools=origins | report.tools | {"cute-aot": own_version()},
        providers={f"{name}.{family}": digest for (name, family), digest in sorted(report.sources.items())},
        # Of a spec's functions they name its file, which is the builder's own.
        failures=[(v.name(), reason) for v, reason in report.failures.items() if isinstance(v, Variant)],
        unserved=[(u.what, u.target, u.reason) for u in unserved],  # and no place, as that is the builder's own
        asked=work.asked,
    )


def checkable(built: Built) -> set[str]:
    """The targets for which a build has functions of a spec that have a reference."""
    return {v.target for v in built.report.kernels if isinstance(v, SpecFunction) and v.checkable}


def tunable(targets: Iterable[str]) -> bool:
    """Whether this machine has a GPU that runs one of `targets`; without a driver it has none."""
    try:
        capability = Driver().compute_capability
    except (DeviceError, ImportError):
        return False
    return any(serves(name, capability) for name in targets)
