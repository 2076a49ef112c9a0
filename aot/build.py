"""Manifests to an archive: problems, variants, a shortlist, kernels, and the tables that say what they are for.

`plan` decides what to compile and is pure; `build` compiles and writes. The archive of a build is *ranked*: which
function serves which M is an estimate, until `aot.tune` has measured its candidates. Needs no GPU.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from runtime.container import canonical
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.errors import AotError, DeviceError, RecordError
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.gemm.universal import Universal
from runtime.limits import MAX_COST_RESULTS
from runtime.program.operation import is_operation
from runtime.program.record import Record
from runtime.tables.dispatch import serves

from . import files
from .compile.cache import Cache
from .compile.compiler import BuildReport, Event, Kernel, compile_variants
from .pack import build_table, tables, tuning_table
from .pack import write as pack
from .pack.build_table import Build, Model
from .pack.fits import refusal
from .pack.forms import TABLE as FORMS
from .pack.forms import read as read_forms
from .pack.ranges import invariant, ranges
from .problem import manifest
from .problem.manifest import Manifest
from .providers.spec_file import SpecFunction
from .search import rank, universal
from .search.legal import summation
from .search.m_values import points, waves
from .search.provider import Compilable, provider, provider_names
from .search.targets import TARGETS
from .search.targets import target as target_named
from .search.unserved import variants as every_variant
from .search.unserved import why_none
from .search.variants import Variant
from .suggest import did_you_mean
from .tune.forms import names as names_of_forms
from .tune.history import TABLE as HISTORY
from .tune.times import load as load_times
from .version import own_version

CANDIDATES = 8
_NOT_ESTIMATED = (
    "no kernel family that computes it estimates its times, by which functions are chosen at any N and K; build its "
    "gemms without --universal"
)
_NOT_COMPUTED = "no kernel family computes it: "
_NOT_COMPILED = "every candidate failed to compile"


class BuildError(AotError):
    """There is nothing to build, or nothing came of it."""


class NothingCompiled(BuildError):
    """Every kernel failed to compile, which `on_event` was told of one by one."""


@dataclass(frozen=True)
class GemmCandidates:
    """What to compile for one signature on one target: variants, best first, for each M, ascending."""

    signature: Any  # of any operation
    target: str
    by_tokens: tuple[tuple[int, tuple[Variant, ...]], ...]


class Unserved(NamedTuple):
    """What an archive cannot serve on a target, and why: the key of a signature, or what a form is called.

    `place` is the manifest's line that asks for it, with the gemm's name; empty where it came from no file.
    """

    what: str
    target: str
    reason: str
    place: str

    def words(self) -> str:
        """It in a line."""
        return f"{self.place}{': ' if self.place else ''}{self.what} on {self.target}: {self.reason}"


@dataclass(frozen=True)
class Plan:
    """What a build compiles, and why: `ranking` says for each target what ordered the candidates. `unserved` are forms
    for which nothing could be chosen."""

    manifests: tuple[Manifest, ...]
    targets: tuple[str, ...]
    gemms: tuple[GemmCandidates, ...]
    functions: tuple[Compilable, ...]
    ranking: Mapping[str, str]
    limit: int
    forms: tuple[universal.Chosen, ...] = ()
    unserved: tuple[Unserved, ...] = ()

    def variants(self) -> list[Compilable]:
        """Each variant once, in a fixed order."""
        found: set[Compilable] = {v for gemm in self.gemms for _, candidates in gemm.by_tokens for v in candidates}
        found |= {v for form in self.forms for v in form.variants}
        return sorted(found | set(self.functions), key=lambda v: (v.target, v.name()))


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


def plan(
    manifests: Sequence[Manifest],
    targets: Sequence[str] = (),
    limit: int = CANDIDATES,
    functions: Sequence[str] = (),
    spec: Sequence[SpecFunction] = (),
) -> Plan:
    """Choose what to compile: for each signature, target and M the `limit` variants that rank best.

    At the M values between the manifest's where a choice may change (`m_values.points`), a quarter as many; where waves
    of tiles end (`m_values.waves`), the best.

    `targets` replaces those of the manifests. `functions` names further operations, such as "rmsnorm", of which every
    variant is compiled, and `spec` has functions of a spec. With any of these there need be no manifest.

    Raises:
        AotError: an unknown target or function, or nothing to build.
    """
    if not manifests and not functions and not spec:
        raise BuildError("there is nothing to build; name a manifest, or --function and --spec")
    if functions and not manifests and not targets:
        raise BuildError(f"{functions[0]!r} is compiled for the targets of manifests, and there is none; give --target")
    manifests = tuple(dict.fromkeys(manifests))
    for name in targets:
        target_named(name)
    wanted: dict[tuple[str, Signature], set[int]] = {}
    for m in manifests:
        for name in targets or m.targets:
            for problem in m.problems():
                wanted.setdefault((name, problem.signature), set()).update(problem.tokens)
    gemms: list[GemmCandidates] = []
    ranking: dict[str, str] = {}
    for name in dict.fromkeys(t for t, _ in wanted):
        tokens = {signature: sorted(ms) for (t, signature), ms in wanted.items() if t == name}
        variants = dict.fromkeys(v for p in provider_names() for s in tokens for v in provider(p).variants(name, s))
        limits = {s: _limits(s, ms, target_named(name).multiprocessors, limit) for s, ms in tokens.items()}
        most = {(s, m): count for s, by_tokens in limits.items() for m, count in by_tokens.items()}
        found = rank.shortlist(variants, most, name, limit, most)
        for s, by_tokens in limits.items():
            ranked = ((m, tuple(found.candidates[s, m])) for m in sorted(by_tokens))
            gemms.append(GemmCandidates(s, name, tuple(ranked)))
        ranking[name] = found.source
    gemms += _uses(manifests, targets)
    chosen = tuple(ranking) or tuple(dict.fromkeys([*targets, *(c.target for c in gemms)]))
    known = _functions(functions, chosen)
    every = tuple(dict.fromkeys([*chosen, *(f.target for f in spec)]))
    return Plan(manifests, every, tuple(gemms), (*known, *spec), ranking, limit)


def _uses(manifests: Sequence[Manifest], targets: Sequence[str]) -> list[GemmCandidates]:
    """What to compile for operations besides GEMM: every variant of the element types, in the providers' order."""
    wanted: dict[tuple[str, Any], set[int]] = {}
    for m in manifests:
        for name in targets or m.targets:
            for use in m.uses:
                wanted.setdefault((name, use.signature), set()).update(use.tokens)
    found = []
    for (name, signature), tokens in wanted.items():
        variants = tuple(every_variant(name, signature))
        found.append(GemmCandidates(signature, name, tuple((m, variants) for m in sorted(tokens))))
    return found


def _limits(signature: Signature, tokens: Sequence[int], multiprocessors: int, limit: int) -> dict[int, int]:
    """How many candidates a signature has at each M that it is ranked for."""
    found = dict.fromkeys(waves(signature.n, multiprocessors, tokens), 1)
    found |= dict.fromkeys(points(tokens), max(1, limit // 4))
    return found | dict.fromkeys(tokens, limit)


def plan_universal(
    manifests: Sequence[Manifest],
    targets: Sequence[str] = (),
    limit: int = universal.FUNCTIONS,
    times: Sequence[Path] = (),
) -> Plan:
    """Choose what to compile to serve the forms of the manifests' gemms at any N and K: `limit` functions for each.

    `times` are files of measured times (`aot.tune.times`), by which functions are chosen where they have some of a
    form.

    Raises:
        AotError: an unknown target, no manifest, no form with estimates on a target, more functions than readers take,
            or one of `times` cannot be read or has none.
    """
    if not manifests:
        raise BuildError("there is nothing to build; name a manifest")
    if limit > MAX_COST_RESULTS:
        raise BuildError(f"a form has at most {MAX_COST_RESULTS} functions, found --candidates {limit}; give fewer")
    manifests = tuple(dict.fromkeys(manifests))
    if operations := sorted({use.signature.operation for m in manifests for use in m.uses}):
        raise BuildError(
            f"manifest of {next(m.model for m in manifests if m.uses)}: forms are of gemms, and it asks for "
            f"{', '.join(operations)} too; build these without --universal, with the forms' archive as --base"
        )
    for name in targets:
        target_named(name)
    wanted = {
        name: [p.signature for m in manifests if targets or name in m.targets for p in m.problems()]
        for name in targets or dict.fromkeys(t for m in manifests for t in m.targets)
    }
    _require_estimates(wanted)
    forms: list[universal.Chosen] = []
    ranking, unserved, places = {}, list[Unserved](), _places(manifests)
    measured_on = _times(times, tuple(wanted))
    for name, signatures in wanted.items():
        measured = measured_on[name]
        chosen = universal.choose_all(signatures, name, limit, measured)
        forms += chosen
        for form in set(universal.forms(signatures)) - {c.form for c in chosen}:
            reason = _NOT_ESTIMATED if every_variant(name, form) else _NOT_COMPUTED + why_none(name, form)
            unserved.append(Unserved(universal.form_word(form), name, reason, places.get(form, "")))
        ranking[name] = "the families' own estimates" + (
            f", and times in {', '.join(path.name for path in times)}" if measured else ""
        )
    return Plan(manifests, tuple(ranking), (), (), ranking, limit, tuple(forms), tuple(sorted(unserved)))


def _times(paths: Sequence[Path], targets: Sequence[str]) -> dict[str, list[tuple[Signature, universal.Measured]]]:
    """What was measured for each target, of all files; a file that has nothing for any of them is refused."""
    found: dict[str, list[tuple[Signature, universal.Measured]]] = {name: [] for name in targets}
    for path in paths:
        of_file = {name: load_times(path, name) for name in targets}
        if not any(of_file.values()):
            raise BuildError(
                f"{path}: has no times of kernels for {', '.join(targets)}; name an archive that `aot tune` timed for "
                "it and whose history it kept, or another file of times"
            )
        for name, measured in of_file.items():
            found[name] += measured
    return found


def _require_estimates(wanted: Mapping[str, Sequence[Signature]]) -> None:
    """Refuse targets for which no function of a form can be chosen, naming those for which some can.

    `wanted` has the signatures whose forms are wanted, by target.
    """
    without = [name for name, signatures in wanted.items() if not universal.can_choose(signatures, name)]
    if not without:
        return
    every = {signature: None for signatures in wanted.values() for signature in signatures}
    rest = [name for name in wanted if name not in without] or [t for t in TARGETS if universal.can_choose(every, t)]
    fix = f"give {' '.join(f'--target {name}' for name in rest)}, or build" if rest else "build"
    raise BuildError(
        f"no kernel family that computes these gemms on {', '.join(without)} estimates its times, by which functions "
        f"are chosen at any N and K; {fix} without --universal"
    )


def _functions(names: Iterable[str], targets: Sequence[str]) -> tuple[Variant, ...]:
    known = [v for t in targets for p in provider_names() for v in provider(p).functions(t)]
    for name in names:
        if not any(v.operation == name for v in known):
            hint = did_you_mean(name, sorted({v.operation for v in known}))
            raise BuildError(f"unknown function {name!r} on {', '.join(targets)}; {hint}")
    return tuple(v for v in known if v.operation in names)


def build(
    work: Plan,
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
    if not report.kernels:
        if report.failures:
            first, reason = next((v.name(), reason) for v, reason in report.failures.items())
            others = f", nor do the {len(report.failures) - 1} others" if len(report.failures) > 1 else ""
            raise NothingCompiled(f"{first} does not compile{others}: {reason}")
        nothing, *more = _gemm_entries(work, report)[1]
        raise BuildError(nothing.words() + (f"; nor is there a kernel for the other {len(more)}" if more else ""))
    package = pack.Package()
    function_targets = {v.name(): v.target for v in report.kernels}
    entries, unserved = _gemm_entries(work, report)
    forms, without = _forms(work, report)
    unserved = [*work.unserved, *unserved, *without]
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
        gone = sum(row.state == "tuned" for row in _rows(base)) - sum(row.state == "tuned" for row in kept)
        entries = [*kept, *entries]
        origin = origin._replace(models=[*build_table.read(base).models, *origin.models])
        forms_below = None if forms else read_forms(base)
        served = 0 if forms_below is None else len(forms_below)
        tuned = any(row.state == "tuned" for row in kept) or left & set(tuning_table.checked_on(base))
        of_tuning = set() if tuned or served else {tuning_table.TABLE, HISTORY}  # which speak of nothing that is kept
        for name in {*base.tables} - {build_table.TABLE} - of_tuning:
            if not is_operation(name):
                package.set_table(name, base.table(name), alone=name == HISTORY)
    for kernel in report.kernels.values():
        package.add_function(kernel.record, kernel.cubin)
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


def _gemm_entries(work: Plan, report: BuildReport) -> tuple[list[tables.Row], list[Unserved]]:
    """The rows of the gemm table (`runtime.tables.dispatch` reads them), and what no kernel is there for."""
    entries, unserved, places = list[tables.Row](), list[Unserved](), _places(work.manifests)
    for gemm in work.gemms:
        refusals = {v: _refusal(kernel, gemm.signature) for v, kernel in report.kernels.items()}
        fit = {v for v, refusal in refusals.items() if refusal is None}
        compiled = [(m, [v.name() for v in variants if v in fit]) for m, variants in gemm.by_tokens]
        k = getattr(gemm.signature, "k", None)
        words = {v.name(): summation(v, k) for _, variants in gemm.by_tokens for v in variants}
        ranked = [(m, names) for m, names in compiled if names]
        if not ranked:
            tried = {v for _, variants in gemm.by_tokens for v in variants}
            reason = _NOT_COMPILED if tried else _NOT_COMPUTED + why_none(gemm.target, gemm.signature)
            if refused := sorted({str(refusals[v]) for v in tried & set(refusals)}):
                reason = f"no kernel takes it: {refused[0]}"
            place = places.get(gemm.signature, "")
            unserved.append(Unserved(gemm.signature.key(), gemm.target, reason, place))
            continue
        entries.append(
            tables.Row(
                gemm.signature,
                gemm.target,
                None,
                "ranked",
                ranges([(m, names[0]) for m, names in ranked]),
                invariant(ranked, {name: word for name, word in words.items() if word is not None}),
                candidates=ranked,
            )
        )
    return entries, unserved


def _refusal(kernel: Kernel, signature: Any) -> str | None:
    """Why a kernel cannot be called for a signature, or None. Of GEMM the enumeration has asked before."""
    if signature.operation != GEMM.name:
        return refusal(Record.from_json(kernel.record), signature)
    return None


def _places(manifests: Iterable[Manifest]) -> dict[Any, str]:
    """Where manifests ask first for a signature, or for one of a form; nothing of what came from no file."""
    asked: dict[Any, str] = {}
    for_form: dict[Any, str] = {}
    for m in manifests:
        for gemm in m.gemms:
            asked.setdefault(gemm.signature, gemm.place)
            for_form.setdefault(universal.form_of(gemm.signature), gemm.place)
        for use in m.uses:
            asked.setdefault(use.signature, use.place)
    return for_form | asked


def _forms(work: Plan, report: BuildReport) -> tuple[list[universal.Chosen], list[Unserved]]:
    """The forms with what was compiled of each, and those of which nothing was."""
    forms, unserved, places = list[universal.Chosen](), list[Unserved](), _places(work.manifests)
    for form in work.forms:
        compiled = tuple(v for v in form.variants if v in report.kernels)
        if compiled:
            forms.append(dataclasses.replace(form, variants=compiled))
        else:
            word, place = universal.form_word(form.form), places.get(form.form, "")
            unserved.append(Unserved(word, form.target, _NOT_COMPILED, place))
    return forms, unserved


def _rows_besides(base: Archive, entries: Iterable[tables.Row]) -> list[tables.Row]:
    """The rows of another archive but for the signatures and targets of `entries`."""
    replaced = {(row.signature, row.target) for row in entries}
    return [row for row in _rows(base) if (row.signature, row.target) not in replaced]


def _rows(archive: Archive) -> list[tables.Row]:
    return tables.operation_rows(archive)


def _named(archive: Archive) -> set[str]:
    """The functions that its entries and forms name."""
    return {name for row in _rows(archive) for name in row.names()} | names_of_forms(archive)


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


def _origin(work: Plan, report: BuildReport, unserved: Iterable[Unserved]) -> Build:
    """Where the archive comes from; nothing in it depends on when, where or by whom it was built."""
    families = sorted({(v.provider, v.family) for v in work.variants() if isinstance(v, Variant)})
    origins = {name: version for f in work.functions if isinstance(f, SpecFunction) for name, version in f.origins}
    return Build(
        models=[
            Model(
                m.model,
                m.source,
                sha256(manifest.dump(m).encode()).hexdigest(),
                [build_table.Gemm(g.name, g.signature.key(), m.calls(g)) for g in m.gemms]
                + [build_table.Gemm(use.name, use.signature.key()) for use in m.uses],
            )
            for m in work.manifests
        ],
        targets=work.targets,
        ranking=work.ranking,
        candidates=work.limit,
        tools=origins | report.tools | {"cute-aot": own_version()},
        providers={f"{name}.{family}": report.sources[name, family] for name, family in families},
        # Of a spec's functions they name its file, which is the builder's own.
        failures=[(v.name(), reason) for v, reason in report.failures.items() if isinstance(v, Variant)],
        unserved=[(u.what, u.target, u.reason) for u in unserved],  # and no place, as that is the builder's own
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
