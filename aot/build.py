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
from types import MappingProxyType
from typing import Any, NamedTuple

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
    _require_some(report)
    made = _made(work, report)
    kept = _Kept() if base is None else _kept(base, made, report)
    compiled = {v.name(): v.target for v in report.kernels}
    of_base = [name for name in kept.functions if name not in compiled]
    package, function_targets = pack.Package(), {**kept.functions, **compiled}
    if base is not None:
        package.add_archive(base, of_base)
        for name in kept.tables:
            package.set_table(name, base.table(name))
    for kernel in report.kernels.values():
        package.add_function(kernel.record, kernel.cubin, kernel.encoded)
    for name, table in tables.operation_tables([*kept.rows, *made.rows], function_targets).items():
        package.set_table(name, table)
    package.set_table(build_table.TABLE, _origin(work, report, made.unserved, base).to_json())
    forms = kept.forms
    if made.forms:
        table = universal.table(made.forms)
        forms = _require_readable(table, function_targets)
        package.set_table(FORMS, table)
    package.write(destination, cache=cache)
    archive_bytes = os.stat(destination).st_size
    return Built(report, made.targets(), tuple(made.unserved), archive_bytes, forms, len(of_base), kept.untuned)


def _require_some(report: BuildReport) -> None:
    """Refuse to go on with nothing where something failed."""
    if report.failures and not report.kernels:
        first, reason = next((v.name(), reason) for v, reason in report.failures.items())
        others = f", nor do the {len(report.failures) - 1} others" if len(report.failures) > 1 else ""
        raise NothingCompiled(f"{first} does not compile{others}: {reason}")


class _Made(NamedTuple):
    """What a selection serves with what was compiled of it: rows of operations' tables, and forms; and what no kernel
    is there for."""

    rows: list[tables.Row]
    forms: list[universal.Chosen]
    unserved: list[Unserved]

    def targets(self) -> tuple[str, ...]:
        """Those for which it serves something."""
        return tuple(dict.fromkeys([*(row.target for row in self.rows), *(form.target for form in self.forms)]))


def _made(work: Selection, report: BuildReport) -> _Made:
    """See `_Made`; refuses to make an archive of nothing."""
    rows, unserved = _entries(work, report)
    forms, without = _forms(work, report)
    unserved = [*work.unserved, *unserved, *without]
    if unserved and not rows and not forms and not any(f in report.kernels for f in work.functions):
        nothing, *more = unserved
        raise BuildError(nothing.words() + (f"; nor is there a kernel for the other {len(more)}" if more else ""))
    return _Made(rows, forms, unserved)


class _Kept(NamedTuple):
    """What an archive keeps of its base: rows of operations' tables, the target of each function, which may be compiled
    anew, and other tables, by name. `forms` counts those of its universal table, `untuned` tuned rows that it loses."""

    rows: Sequence[tables.Row] = ()
    functions: Mapping[str, str] = MappingProxyType({})
    tables: Sequence[str] = ()
    forms: int = 0
    untuned: int = 0


def _kept(base: Archive, made: _Made, report: BuildReport) -> _Kept:
    """What stays of a base beside what was made, which takes the place of rows for the same signature and target, and
    of all forms if it has any. Functions that no row and no form named stay too."""
    replaced, rows, gone = {(row.signature, row.target) for row in made.rows}, list[tables.Row](), list[tables.Row]()
    for row in tables.operation_rows(base):
        (gone if (row.signature, row.target) in replaced else rows).append(row)
    of_forms = names_of_forms(base)
    serving = _names(rows) | (set() if made.forms else of_forms)
    _require_same_code(base, serving, report)
    unnamed = (_names(gone) | of_forms) - serving
    functions = {name: target for name, target in base.functions.targets_by_name().items() if name not in unnamed}
    compiled = {v.name() for v in report.kernels}
    _require_records(base, [name for name in functions if name not in compiled])
    forms = 0 if made.forms else len(read_forms(base) or ())
    tuned = any(row.state == "tuned" for row in rows) or functions.keys() & set(tuning_table.checked_on(base))
    left_out = {build_table.TABLE, *([FORMS] if made.forms else [])}
    if not tuned and not forms:
        left_out |= {tuning_table.TABLE, tuning_table.HISTORY}  # which speak of nothing that is kept
    others = [name for name in base.tables if name not in left_out and not is_operation(name)]
    return _Kept(rows, functions, others, forms, sum(row.state == "tuned" for row in gone))


def _names(rows: Iterable[tables.Row]) -> set[str]:
    return {name for row in rows for name in row.names()}


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


def _model(m: manifest.Manifest) -> Model:
    return Model(m.model, m.source, manifest.digest(m), [_problem(item, m) for item in m.items()])


def _problem(item: manifest.Gemm | manifest.Use, of: manifest.Manifest) -> build_table.Problem:
    traffic = [list(pair) for pair in getattr(item, "traffic", ())] or None
    return build_table.Problem(item.name, item.signature.key(), of.calls(item), traffic)


def _origin(work: Selection, report: BuildReport, unserved: Iterable[Unserved], base: Archive | None) -> Build:
    """Where the archive comes from; nothing in it depends on when, where or by whom it was built."""
    models, asked = [_model(m) for m in work.manifests], work.asked
    if base is not None:
        models = [*_models_of_entries(base), *models]
        asked = asked and asked._replace(inputs={**asked.inputs, **build_table.input_digests(base=base)})
    origins = {name: version for f in work.functions if isinstance(f, SpecFunction) for name, version in f.origins}
    return Build(
        models=models,
        targets=work.targets,
        ranking=work.ranking,
        candidates=work.limit,
        tools=origins | report.tools | {"cute-aot": own_version()},
        providers={f"{name}.{family}": digest for (name, family), digest in sorted(report.sources.items())},
        # Of a spec's functions they name its file, which is the builder's own.
        failures=[(v.name(), reason) for v, reason in report.failures.items() if isinstance(v, Variant)],
        unserved=[(u.what, u.target, u.reason) for u in unserved],  # and no place, as that is the builder's own
        asked=asked,
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
