"""Archives made of archives: one without a part of itself, or two in one. Compiles nothing and measures nothing.

`contents` takes an archive apart into what its tables say, `pruned`, `beside` and `merged` choose among that, and
`write` makes a file of it with the functions that are named. Tables that this version does not know are kept where
nothing is taken away, since nobody knows what they speak of.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from runtime.container.archive import Archive
from runtime.errors import AotError
from runtime.gemm.universal import PREDICTED, FormSource
from runtime.gemm.universal import write as write_forms
from runtime.program.operation import is_operation

from .pack import build_table, forms, tables, tuning_table
from .pack.build_table import Build, Model
from .pack.fields import naming
from .pack.filter import Filter, by_names
from .pack.write import Package
from .search.universal import form_word
from .tune import history


class RepackError(AotError):
    """Archives that cannot be one."""


class NamedForm(NamedTuple):
    """A form of the universal table: its name, as `aot ls` has it, and what a table is written from."""

    name: str
    source: FormSource

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells forms of a table apart."""
        return (*self.source.words, self.source.batched, self.source.target)


@dataclass(frozen=True)
class Contents:
    """What the tables of an archive say, and its functions that are in none, by target.

    `tunings` and `environments` are rows of the tables "history" and "tuning", `unknown` tables that this version does
    not know, by name.
    """

    rows: Sequence[tables.Row]
    forms: Sequence[NamedForm]
    others: Mapping[str, str]
    build: Build
    environments: Sequence[dict[str, Any]]
    tunings: Sequence[dict[str, Any]]
    unknown: Mapping[str, dict[str, Any]]

    def functions(self) -> set[str]:
        """All that it names."""
        of_rows = {name for row in self.rows for name in row.names()}
        return of_rows | {f.name for form in self.forms for f in form.source.functions} | set(self.others)


_KNOWN = (build_table.TABLE, tuning_table.TABLE, tuning_table.HISTORY, forms.TABLE)


def contents(archive: Archive) -> Contents:
    """What an archive holds.

    Raises:
        AotError: it is damaged, or a table is malformed.
    """
    archive.check_blocks()
    universal, rows = forms.read(archive), tables.operation_rows(archive)
    with naming(archive):
        of_forms = [NamedForm(row.name, row.form.source()) for row in forms.rows(archive, universal)]
    found = Contents(
        rows,
        of_forms,
        {},
        build_table.read(archive),
        tuning_table.read(archive),
        history.tunings(archive),
        {name: archive.table(name) for name in archive.tables if name not in _KNOWN and not is_operation(name)},
    )
    named = found.functions()
    by_name = archive.functions.targets_by_name()
    return replace(found, others={name: target for name, target in by_name.items() if name not in named})


def pruned(path: str, of: Contents, wanted: Filter) -> Contents:
    """What is `wanted` of the archive at `path`. The build table keeps the models of layers that stay, the tuning table
    every machine, the history the tunings of signatures that stay.

    Raises:
        NothingLike: nothing is wanted of what there is.
    """
    keys = {row.signature.key() for row in of.rows}
    names: dict[str, list[str]] = {}
    for problem in (problem for model in of.build.models for problem in model.problems):
        if problem.signature in keys:
            names.setdefault(problem.signature, []).append(problem.name)
    states = [*(row.state for row in of.rows), *(PREDICTED for _ in of.forms)]
    there = [*(row.target for row in of.rows), *(form.source.target for form in of.forms), *of.others.values()]
    wanted.require_known(path, there, states, chain(*names.values()), {*keys, *(f.name for f in of.forms)})
    rows = [r for r in of.rows if wanted.takes(r.target, r.state, by_names(names, r.signature.key()))]
    kept_forms = [form for form in of.forms if wanted.takes(form.source.target, PREDICTED, [form.name])]
    others = {name: target for name, target in of.others.items() if wanted.takes_functions(target)}
    if not rows and not kept_forms and not others:
        raise wanted.nothing(path)
    targets = {row.target for row in rows} | {form.source.target for form in kept_forms} | set(others.values())
    served = {(row.signature.key(), row.target) for row in rows}
    served |= {(form.name, form.source.target) for form in kept_forms}
    kept = Contents(
        rows,
        kept_forms,
        others,
        _pruned_build(of.build, {key for key, _ in served}, wanted, targets),
        of.environments,
        [t for t in of.tunings if not served.isdisjoint(_served(t))],
        {},
    )
    return replace(kept, environments=_without(of.environments, kept.functions()))


def _served(tuning: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What may serve by a tuning: an entry or a form, by name and target."""
    return [(word, tuning["target"]) for word in _words(tuning["signature"])]


def _words(key: str) -> list[str]:
    """What may serve a signature: an entry, which has its key, or its form, by name."""
    signature = forms.signature_of(key)
    return [key] if signature is None else [key, form_word(signature)]


def _pruned_build(of: Build, served: set[str], wanted: Filter, targets: set[str]) -> Build:
    """The build table of what stays: problems of signatures that are served, where layers or states were chosen, and
    what failed or is not served on targets that stay."""
    models = list(of.models)
    if wanted.layers or wanted.states:
        of_model = [[p for p in m.problems if served.intersection(_words(p.signature))] for m in models]
        models = [m._replace(problems=found) for m, found in zip(models, of_model, strict=True) if found]
    return of._replace(
        models=models,
        targets=[target for target in of.targets if target in targets],
        ranking={target: by for target, by in of.ranking.items() if target in targets},
        failures=[row for row in of.failures if row[0].rpartition(".")[2] in targets],
        unserved=[row for row in of.unserved if row[1] in targets],
    )


def _without(environments: Iterable[dict[str, Any]], functions: set[str]) -> list[dict[str, Any]]:
    """Machines, with what they found right of the functions that stay."""
    return [
        row | {"right": {n: digest for n, digest in row["right"].items() if n in functions}} if "right" in row else row
        for row in environments
    ]


def beside(one: Contents, other: Contents) -> Contents:
    """What stays of `one` where it is merged with the `other`: entries for another signature, target or kind of GPU,
    other forms, and what these were tuned by."""
    taken, new = {_key(row) for row in other.rows}, {form.key for form in other.forms}
    rows = [row for row in one.rows if _key(row) not in taken]
    served = {(row.signature.key(), row.target) for row in (*rows, *other.rows)}
    gone = {(form.name, form.source.target) for form in one.forms if form.key in new}
    tunings = [t for t in one.tunings if (t["signature"], t["target"]) in served or not gone.intersection(_served(t))]
    return replace(one, rows=rows, forms=[form for form in one.forms if form.key not in new], tunings=tunings)


def merged(one: Contents, other: Contents) -> Contents:
    """What both hold, where `one` is what stays of it `beside` the other; the build table has the tools of the `other`,
    the models of both, and nothing that `aot build` was asked."""
    rows = [*one.rows, *other.rows]
    found = Contents(
        rows,
        [*one.forms, *other.forms],
        {**one.others, **other.others},
        _merged_build(one.build, other.build, {(row.signature.key(), row.target) for row in rows}),
        [*one.environments, *(row for row in other.environments if row not in one.environments)],
        [*(t for t in one.tunings if t not in other.tunings), *other.tunings],
        {**one.unknown, **other.unknown},
    )
    in_tables = replace(found, others={}).functions()
    return replace(found, others={name: t for name, t in found.others.items() if name not in in_tables})


def _key(row: tables.Row) -> tuple[Any, ...]:
    gpu = None if row.gpu is None else (row.gpu.name, row.gpu.multiprocessors)
    return row.signature, row.target, gpu


def _merged_build(one: Build, other: Build, served: set[tuple[str, str]]) -> Build:
    unserved = dict.fromkeys(row for of in (one, other) for row in map(tuple, of.unserved) if row[:2] not in served)
    models: list[Model] = [*(model for model in one.models if model not in other.models), *other.models]
    return other._replace(
        models=models,
        targets=list(dict.fromkeys([*one.targets, *other.targets])),
        ranking={**one.ranking, **other.ranking},
        tools={**one.tools, **other.tools},
        providers={**one.providers, **other.providers},
        failures=list(dict.fromkeys((name, why) for of in (one, other) for name, why in of.failures)),
        unserved=[(what, target, why) for what, target, why in unserved],
        candidates=one.candidates if other.candidates is None else other.candidates,
        asked=None,  # of one of both alone, and no build makes the two
    )


def write(path: str | os.PathLike[str], parts: Sequence[tuple[Archive, Contents]], of: Contents) -> None:
    """Write an archive of `of`, whose functions are those that each part names, of its archive.

    Raises:
        RepackError: two parts have other code of one name.
        AotError: the file cannot be written, or readers would refuse a table.
    """
    _require_same_code(parts)
    package, targets = Package(), dict[str, str]()
    for archive, part in parts:
        named = part.functions()
        names = [name for name in archive.functions if name in named]
        package.add_archive(archive, names)
        targets |= {name: archive.entry(name).target for name in names}
    for name, obj in of.unknown.items():
        package.set_table(name, obj)
    for name, table in tables.operation_tables(of.rows, targets).items():
        package.set_table(name, table)
    if of.forms:
        package.set_table(forms.TABLE, write_forms([form.source for form in of.forms]))
    package.set_table(build_table.TABLE, of.build.to_json())
    if of.environments:
        package.set_table(tuning_table.TABLE, tuning_table.write(of.environments))
    if of.tunings:
        package.set_table(tuning_table.HISTORY, history.table([], of.tunings))
    package.write(path)


def _require_same_code(parts: Iterable[tuple[Archive, Contents]]) -> None:
    """Refuse archives of which two have functions of one name and other code, where both are named."""
    first: dict[str, Archive] = {}
    for archive, part in parts:
        for name in part.functions() & set(archive.functions):
            other = first.setdefault(name, archive)
            have, wanted = (a.blob_entry(a.entry(name).record).sha256 for a in (archive, other))
            if have != wanted:
                raise RepackError(
                    f"{archive.path}: has other code of {name} than {other.path}; build one of them again with the "
                    "other's versions, or load both archives as layers: runtime.load([...])"
                )
