"""What an archive says of one function or signature, as plain data: behind `aot show`. Times are microseconds."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runtime.container.archive import Archive
from runtime.errors import AotError
from runtime.gemm.universal import Universal
from runtime.tables.dispatch import serves
from runtime.tables.table import Entry

from ..pack import forms, timings, tuning_table
from ..suggest import did_you_mean
from . import predictions
from .digests import function_named, short_names
from .entries import described, gpu, intervals, measured, names_of, ranges, serving
from .functions import function
from .precedence import Precedence


class UnknownName(AotError):
    """The archive has nothing of the name asked for."""


class NoEntry(AotError):
    """What serves at M values was asked of a function."""


def show(archive: Archive, name: str, tokens: Sequence[int] = (), target: str | None = None) -> dict[str, Any]:
    """What the archive says of `name`: a function, by its name or the beginning of its digest, a signature, or what a
    manifest that it was built for calls one. A manifest's name comes before a digest.

    A signature that has no entry, and that a form can compute, is shown with what is predicted for it: at `tokens`
    rows, or at `aot.inspect.predictions.ROWS` where there are none. An entry is shown with what `serves` at these rows,
    in its place if there is something `instead`, and where there are `tokens` with nothing else. Where there is a
    `target`, what is for others is left out. `short_names` has the beginnings of digests of the functions that are
    shown.

    Raises:
        UnknownName: it is none of these.
        AmbiguousDigest: several functions' digests begin so.
        NoEntry: there are `tokens` or a `target`, and it is a function; or all of the signature is for other targets.
    """
    names, precedence = names_of(archive), Precedence(archive)
    entries = precedence.entries
    chosen = [e for e in entries if e.signature.key() == name or name in names.get(e.signature.key(), ())]
    named = name if name in archive.functions else None if chosen else function_named(archive, name)
    if named is not None:
        if tokens:
            raise NoEntry(f"{archive.path}: {name!r} is a function, and --m is for signatures; leave it out")
        if target is not None:
            raise NoEntry(f"{archive.path}: {name!r} is a function, and --target is for signatures; leave it out")
        return {"function": function(archive, named)}
    if chosen:
        chosen = _of_target([(e.target, e) for e in chosen], target, f"{archive.path}: {name!r}")
        environments = tuning_table.read(archive)
        found = [_entry(archive, e, names, precedence, environments, tokens) for e in chosen]
        return {"entries": found, "short_names": _short_names(archive, found)}
    predicted = _predicted(archive, precedence.universal, name, names, tokens or predictions.ROWS)
    if not predicted:
        of_forms = [row.name for row in forms.rows(archive, precedence.universal)]
        if name in of_forms:
            raise UnknownName(f"{archive.path}: {name!r} is a form; put an N and a K in place of its stars")
        known = [*{e.signature.key(): None for e in entries}, *{n: None for of in names.values() for n in of}]
        near = did_you_mean(name, [*known, *archive.functions, *_with_extents(of_forms, name)]).split("known:")[0]
        near += f"`aot ls {shlex.quote(str(archive.path))}` lists them"
        if reason := _why_not_predicted(precedence.universal, name, near):
            raise UnknownName(f"{archive.path}: {name!r} has no entry, and {reason}")
        raise UnknownName(f"{archive.path}: has no function or signature {name!r}, and no manifest's name; {near}")
    predicted = _of_target([(each["target"], each) for each in predicted], target, f"{archive.path}: {name!r}")
    return {"predicted": predicted, "short_names": _short_names(archive, predicted)}


def _of_target(found: Sequence[tuple[str, Any]], target: str | None, what: str) -> list[Any]:
    """What is for `target`, of some by theirs; everything where it is None."""
    kept = [each for of, each in found if target in (None, of)]
    if not kept:
        raise NoEntry(f"{what} is there for {', '.join(dict.fromkeys(of for of, _ in found))}, not for {target}")
    return kept


def _short_names(archive: Archive, shown: Any) -> dict[str, str]:
    """The beginnings of the digests of functions that are shown, by name."""
    every, found, stack = short_names(archive), dict[str, str](), [shown]
    while stack:
        of = stack.pop()
        if isinstance(of, str) and of in every:
            found[of] = every[of]
        elif isinstance(of, dict | list):
            stack.extend(of.values() if isinstance(of, dict) else of)
    return dict(sorted(found.items()))


def _with_extents(of_forms: Iterable[str], name: str) -> list[str]:
    """The names of forms with the extents that a name has in place of their stars, as far as it has some."""
    extents = {word[0]: word for word in name.split("_") if re.fullmatch("[nkb][0-9]+", word)}
    return [re.sub(r"(?<=_)([nkb])\*", lambda star: extents.get(star[1], star[0]), form) for form in of_forms]


def _why_not_predicted(table: Universal | None, name: str, near: str) -> str:
    """Why no form computes a signature, and what is `near` where no form is like it; nothing where the name is no
    signature's, or the archive has no forms."""
    signature = forms.signature_of(name)
    if signature is None or table is None:
        return ""
    alike = [form for _, form in table.forms if form.signature(signature.n, signature.k) == signature]
    if not alike:
        return f"no form has its types and words; {near}"
    multiples = [(f.n_multiple, f.k_multiple) for f in alike[0].functions]
    n, k = (min(extents) for extents in zip(*multiples, strict=True))
    return f"the functions of its form take an N that is a multiple of {n} and a K of {k}; pad both"


def _predicted(
    archive: Archive, table: Universal | None, name: str, names: Mapping[str, list[str]], tokens: Sequence[int]
) -> list[Any]:
    """What the universal table predicts for a signature, by key, or for those that manifests call so."""
    if table is None:
        return []
    keys = [key for key, of in names.items() if name in of] or [name]
    found = []
    for signature in filter(None, map(forms.signature_of, keys)):
        of = described(signature, names)
        found += [of | more for more in predictions.choices(archive, table, signature, tokens)]
    return found


def _predict_beyond(entry: Entry, precedence: Precedence, begins: int, choices: list[dict[str, Any]]) -> None:
    """Put in what is predicted where a tuned entry gives way to that; no time of it was measured."""
    predicted = precedence.predicted_for(entry)
    for choice in choices:
        if choice["m"] >= begins:
            choice.update(function=predicted.best(choice["m"]), us=None)


def _entry(
    archive: Archive,
    entry: Entry,
    names: Mapping[str, list[str]],
    precedence: Precedence,
    environments: list[dict[str, Any]],
    tokens: Sequence[int],
) -> dict[str, Any]:
    """An entry in full, or, where there are `tokens`, what serves at these."""
    instead, begins = precedence.instead_of(entry), precedence.predicted_from(entry)
    found = described(entry.signature, names) | {
        "target": entry.target,
        "gpu": gpu(entry),
        "state": entry.state,
        "instead": instead,
        "predicted_from": begins,
        "serves": None,
    }
    if instead is None:
        found["serves"] = serving(entry, tokens) if tokens else None
        if tokens and begins is not None and max(tokens) >= begins:
            _predict_beyond(entry, precedence, begins, found["serves"]["choices"])
    elif instead["form"] is not None:
        assert precedence.universal is not None  # which has the form
        (found["serves"],) = predictions.choices(
            archive, precedence.universal, entry.signature, tokens or predictions.ROWS, entry.target
        )
    if tokens:
        return found
    return found | {
        "ranges": ranges(entry),
        "invariant": None if entry.invariant is None else intervals(entry.invariant_ranges or ()),
        "torch_faster": [{"m_min": first, "m_max": last} for first, last in entry.torch_faster],
        "apart": [{"m_min": first, "m_max": last} for first, last in entry.apart],
        **measured(entry),
        "timings": timings.read(entry),
        "tuning": [e for e in environments if entry.timings and _is_of(entry, e)],
        "candidates": [{"m": m, "functions": list(ranked)} for m, ranked in entry.candidates],
    }


def _is_of(entry: Entry, environment: dict[str, Any]) -> bool:
    """Whether an entry may have been tuned on such a machine."""
    if entry.gpu is not None and entry.gpu.name != environment["gpu"]:
        return False
    return serves(entry.target, tuning_table.capability(environment))
