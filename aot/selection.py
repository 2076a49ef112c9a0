"""What a build compiles, and why: the problems of manifests, or their forms, with the variants that are worth it.

Pure, but for files of times. What of this is of one operation `aot.search.operation` knows; times alone are of GEMM, as
it alone has forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from runtime.errors import AotError
from runtime.gemm.signature import Signature
from runtime.limits import MAX_COST_RESULTS

from .pack.build_table import Asked
from .problem.manifest import Manifest
from .providers.spec_file import SpecFunction
from .search import universal
from .search.estimates import OWN_ESTIMATES
from .search.operation import building, names
from .search.provider import Compilable, provider, provider_names
from .search.targets import TARGETS
from .search.targets import target as target_named
from .search.unserved import variants as every_variant
from .search.unserved import why_none
from .search.variants import Variant
from .suggest import did_you_mean
from .tune.times import load as load_times

CANDIDATES = 8
NOT_COMPUTED = "no kernel family computes it: "
_NOT_ESTIMATED = (
    "no kernel family that computes it estimates its times, by which functions are chosen at any N and K; build its "
    "gemms without --universal"
)


class BuildError(AotError):
    """There is nothing to build, or nothing came of it."""


@dataclass(frozen=True)
class Candidates:
    """What to compile for one signature, of any operation, on one target: variants, best first, for each M,
    ascending."""

    signature: Any
    target: str
    by_tokens: tuple[tuple[int, tuple[Variant, ...]], ...]

    def variants(self) -> set[Variant]:
        """Those at any M."""
        return {v for _, variants in self.by_tokens for v in variants}


class Unserved(NamedTuple):
    """What an archive cannot serve on a target, and why: the key of a signature, or what a form is called.

    `place` is the manifest's line that asks for it, with the name there; empty where it came from no file.
    """

    what: str
    target: str
    reason: str
    place: str

    def words(self) -> str:
        """It in a line."""
        return f"{self.place}{': ' if self.place else ''}{self.what} on {self.target}: {self.reason}"


@dataclass(frozen=True)
class Selection:
    """What a build compiles, and why: `ranking` says for each target what ordered the candidates. `unserved` are forms
    for which nothing could be chosen. `asked` is for the archive to say, so that it can be built again."""

    manifests: tuple[Manifest, ...]
    targets: tuple[str, ...]
    problems: tuple[Candidates, ...]
    functions: tuple[Compilable, ...]
    ranking: Mapping[str, str]
    limit: int
    forms: tuple[universal.Chosen, ...] = ()
    unserved: tuple[Unserved, ...] = ()
    asked: Asked | None = None

    def variants(self) -> list[Compilable]:
        """Each variant once, in a fixed order."""
        found: set[Compilable] = {v for problem in self.problems for v in problem.variants()}
        found |= {v for form in self.forms for v in form.variants}
        return sorted(found | set(self.functions), key=lambda v: (v.target, v.name()))


def select(
    manifests: Sequence[Manifest],
    targets: Sequence[str] = (),
    limit: int = CANDIDATES,
    functions: Sequence[str] = (),
    spec: Sequence[SpecFunction] = (),
) -> Selection:
    """Choose what to compile for each signature and target: what its operation has of variants at which M, `limit` at
    each where they are put in order (`aot.search.operation.Building.shortlist`).

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
    problems: list[Candidates] = []
    ranking: dict[str, str] = {}
    for of, name, tokens in _wanted(manifests, targets):
        found = building(of).shortlist(tokens, name, limit)
        problems += [Candidates(signature, name, by_tokens) for signature, by_tokens in found.by_signature.items()]
        if found.source:
            ranking[name] = "; ".join(dict.fromkeys([*filter(None, [ranking.get(name)]), found.source]))
    chosen = tuple(dict.fromkeys([*targets, *(problem.target for problem in problems)]))
    known = _functions(functions, chosen)
    every = tuple(dict.fromkeys([*chosen, *(f.target for f in spec)]))
    return Selection(manifests, every, tuple(problems), (*known, *spec), ranking, limit)


def _wanted(
    manifests: Iterable[Manifest], targets: Sequence[str]
) -> list[tuple[str, str, Mapping[Any, Sequence[int]]]]:
    """The signatures that are asked of each operation on each target, with M values, which ascend."""
    wanted: dict[tuple[str, str], dict[Any, set[int]]] = {}
    for m in manifests:
        for name in targets or m.targets:
            for problem in m.problems():
                of = wanted.setdefault((problem.signature.operation, name), {})
                of.setdefault(problem.signature, set()).update(problem.tokens)
    order = {name: place for place, name in enumerate(names())}
    return [
        (of, name, {signature: sorted(tokens) for signature, tokens in wanted[of, name].items()})
        for of, name in sorted(wanted, key=lambda key: order.get(key[0], len(order)))
    ]


def select_universal(
    manifests: Sequence[Manifest],
    targets: Sequence[str] = (),
    limit: int = universal.FUNCTIONS,
    times: Sequence[Path] = (),
) -> Selection:
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
    _require_forms(manifests)
    for name in targets:
        target_named(name)
    wanted = {
        name: [p.signature for m in manifests if targets or name in m.targets for p in m.problems()]
        for name in targets or dict.fromkeys(t for m in manifests for t in m.targets)
    }
    _require_estimates(wanted)
    forms: list[universal.Chosen] = []
    ranking, unserved, asked_at = {}, list[Unserved](), places(manifests)
    measured_on = _times(times, tuple(wanted))
    for name, signatures in wanted.items():
        measured = measured_on[name]
        chosen = universal.choose_all(signatures, name, limit, measured)
        forms += chosen
        for form in set(universal.forms(signatures)) - {c.form for c in chosen}:
            reason = _NOT_ESTIMATED if every_variant(name, form) else NOT_COMPUTED + why_none(name, form)
            unserved.append(Unserved(universal.form_word(form), name, reason, asked_at.get(form, "")))
        ranking[name] = OWN_ESTIMATES + (f", and times in {', '.join(path.name for path in times)}" if measured else "")
    return Selection(manifests, tuple(ranking), (), (), ranking, limit, tuple(forms), tuple(sorted(unserved)))


def _require_forms(manifests: Iterable[Manifest]) -> None:
    """Refuse a manifest that asks for an operation without forms."""
    for m in manifests:
        asked = {problem.signature.operation for problem in m.problems()}
        if without := sorted(name for name in asked if not building(name).forms):
            have = [of.plural for of in map(building, names()) if of.forms]
            raise BuildError(
                f"manifest of {m.model}: forms are of {' and '.join(have)}, and it asks for {', '.join(without)} too; "
                "build these without --universal, with the forms' archive as --base"
            )


def places(manifests: Iterable[Manifest]) -> dict[Any, str]:
    """Where manifests ask first for a signature, or for one of a form; nothing of what came from no file."""
    asked: dict[Any, str] = {}
    for_form: dict[Any, str] = {}
    for m in manifests:
        for item in m.items():
            asked.setdefault(item.signature, item.place)
            if building(item.signature.operation).forms:
                for_form.setdefault(universal.form_of(item.signature), item.place)
    return for_form | asked


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
