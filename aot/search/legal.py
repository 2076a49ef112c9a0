"""Which variants there are: legal ones, by what providers say of their families, and those that suit a signature.

`illegal` and `unsuited` are the only source of truth about a variant for enumerators, tuners and tests. Pure: asks no
device and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from runtime.program.operation import OVERLAPS

from .form import VariantForm, lacks, relies_on_more
from .operation import building
from .provider import families, family_of
from .variants import TILES, Family, Option, Variant, choices


def of_name(name: str) -> Variant | None:
    """The legal variant of that name; None where there is none here."""
    parts = name.split(".")
    if len(parts) < 4:
        return None
    provider, of, types, *words, target = parts
    family, (*elements, accumulator) = families(provider).get(of), types.split("_")
    if family is None or not elements:
        return None

    def taken(word: str) -> bool:
        """Whether this is the next word; it is gone then."""
        return words[:1] == [word] and bool(words.pop(0))

    variant = Variant(
        provider,
        of,
        target,
        (),
        tuple(elements),
        accumulator,
        epilogue=next((e for e in family.epilogues if taken(e)), "none"),
        scaling=next((s for s in family.scalings if taken(f"{s}_scaled")), "none"),
        b_major=next((b for b in family.b_majors if taken(f"b_{b}_major")), "k"),
        batched=taken("batched"),
        operation=family.operation,
    )
    options: dict[str, Option] = {option: False for option, values in family.options.items() if False in values}
    for word in words:
        options |= _choices_in(word, family)
    found = replace(variant, config=choices(**options))
    return found if illegal(found) is None and found.name() == name else None


def _choices_in(word: str, family: Family) -> dict[str, Option]:
    """What a word of a name says of a family's choices; nothing where it is none."""
    for prefix in TILES:
        if f"{prefix}_m" in family.options and word.startswith(prefix):
            names = [f"{prefix}_{mode}" for mode in "mnk" if f"{prefix}_{mode}" in family.options]
            values = word.removeprefix(prefix).split("x")
            if len(names) == len(values) and all(map(_is_number, values)):
                return dict(zip(names, map(int, values), strict=True))
    if word in family.options:
        return {word: True}
    for option, allowed in family.options.items():
        if word in allowed:
            return {option: word}
        if word.startswith(option) and _is_number(word.removeprefix(option)):
            return {option: int(word.removeprefix(option))}
    return {}


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 10


def illegal(variant: Variant) -> str | None:
    """Why `variant` cannot be compiled, or None if it can. Pure: asks no device and imports no compiler."""
    family = family_of(variant)
    if family is None or family.operation != variant.operation:
        return f"no family {variant.family!r} of {variant.operation!r} in provider {variant.provider!r}"
    if variant.target not in family.targets:
        return f"{variant.family} is not made for {variant.target}, only for {', '.join(family.targets)}"
    if variant.accumulator != family.accumulator:
        return f"{variant.family} does not compute in {variant.accumulator}, only in {family.accumulator}"
    words = variant.scaling, variant.b_major, variant.epilogue
    form = VariantForm(variant.elements, variant.batched, *words, rows=family.rows)
    if lacking := lacks(family, form):
        return f"{variant.family} lacks {' and '.join(lacking)}"
    options = variant.options
    if set(options) != set(family.options):
        return f"{variant.family} needs exactly the choices {sorted(family.options)}, found {sorted(options)}"
    for name, value in options.items():
        if not any(type(value) is type(allowed) and value == allowed for allowed in family.options[name]):
            return f"{variant.family}: {name} must be one of {family.options[name]}, found {value!r}"
    return family.rule(variant)


def unsuited(variant: Variant, signature: Any) -> str | None:
    """Why `variant` cannot compute `signature`, or None if it can, at every M from 1 up.

    What of a form and of extents is asked the operation says (`aot.search.operation.Building`). A family unknown here
    has the limits that are common; that it cannot be compiled is for `illegal` to say.
    """
    if variant.operation != signature.operation:
        return f"{variant.family} computes {variant.operation}, not {signature.operation}"
    of = building(signature.operation)
    return of.unlike(variant, signature) or of.limit(variant, family_of(variant), signature)


def summation(variant: Variant, k: int | None = None) -> str | None:
    """A word for how a GEMM's sums along K are made: two functions that compute a signature and have the same one give
    equal bits, and a row of D has the same bits whatever M is.

    None where a row's bits may depend on M, or where nobody promises otherwise. `k` is the signature's; without it,
    words are the same only where they are for every K. Only what was measured, or follows from code that functions
    share, has the same word; other functions have a word each.
    """
    family = family_of(variant)
    return None if family is None else family.summation(variant, k)


def overlaps_less(variants: Sequence[Variant]) -> list[bool]:
    """Whether each variant has a twin among `variants` that differs in overlapping more, and only in that.

    It would take the place of another tile among the candidates. Which tiles may overlap how much is a family's rule.
    """
    words = (v.options.get("overlap") for v in variants)
    overlaps = [OVERLAPS.index(str(word)) if word in OVERLAPS else 0 for word in words]
    alike = [(v.provider, v.family, *(c for c in v.config if c[0] != "overlap")) for v in variants]
    most: dict[Any, int] = {}
    for key, overlap in zip(alike, overlaps, strict=True):
        most[key] = max(overlap, most.get(key, 0))
    return [overlap < most[key] for key, overlap in zip(alike, overlaps, strict=True)]


def legal_variants(provider: str, target: str, signature: Any) -> list[Variant]:
    """The variants of `provider` that compute `signature` on `target` and are worth compiling, in a fixed order. All
    that are legal would be thousands of times as many."""
    of = building(signature.operation)
    wanted = of.form(signature)
    return [
        v
        for name, family in families(provider).items()
        if family.operation == signature.operation
        for v in _legal(provider, name, family, target, wanted)
        if of.limit(v, family, signature) is None
    ]


def legal_functions(provider: str, target: str) -> list[Variant]:
    """The variants of `provider` for `target` that are worth compiling, in a fixed order, of operations that have few
    enough to be enumerated for no signature."""
    return [
        v
        for name, family in families(provider).items()
        if not building(family.operation).by_signature
        for elements in family.elements
        for batched in family.batched
        for scaling in family.scalings
        for epilogue in sorted(family.epilogues)
        for v in _legal(provider, name, family, target, VariantForm(elements, batched, scaling, epilogue=epilogue))
    ]


@cache
def _configs(family: Family, promised: str) -> tuple[tuple[tuple[str, Option], ...], ...]:
    """Every combination of a family's choices that are worth trying one by one, but those that are hopeless or rely on
    more overlap than is promised; in the order of the choices' values. Forms share them."""
    refuse = [asked for asked in (family.hopeless, family.likely.hopeless) if asked is not None]
    found: Iterable[dict[str, Option]] = [{}]
    for option, every in family.options.items():
        values = family.likely.options.get(option, every)
        if option == "overlap":
            values = tuple(value for value in values if not relies_on_more(value, promised))
        found = _longer(found, option, values, refuse)
    return tuple(choices(**combination) for combination in found)


def _longer(
    combinations: Iterable[dict[str, Option]],
    option: str,
    values: Iterable[Option],
    refuse: Sequence[Callable[[Mapping[str, Option]], bool]],
) -> Iterator[dict[str, Option]]:
    """Combinations with one choice more, but those that one of `refuse` does."""
    for known in combinations:
        for value in values:
            longer = known | {option: value}
            for asked in refuse:
                if asked(longer):
                    break
            else:
                yield longer


@cache
def _legal(provider: str, name: str, family: Family, target: str, form: VariantForm) -> tuple[Variant, ...]:
    """The variants of a family of the given form that are worth compiling; see `legal_variants`."""
    if target not in family.targets or form.accumulator not in (None, family.accumulator) or lacks(family, form):
        return ()
    # Their choices are the family's own, and worth trying one by one, so there is nothing else to ask.
    tried = _tried(provider, name, family, target, form)
    return tuple(v for v in tried if family.likely.opinion(v) is None and family.rule(v) is None)


def refusal(provider: str, name: str, family: Family, target: str, form: VariantForm) -> str | None:
    """What the family's rule has against every combination of choices for a form that it has, or None if it is not the
    same against all."""
    reasons = {family.rule(variant) for variant in _tried(provider, name, family, target, form)}
    return reasons.pop() if len(reasons) == 1 else None


def _tried(provider: str, name: str, family: Family, target: str, form: VariantForm) -> Iterator[Variant]:
    """Every combination of a family's choices that are worth trying one by one, legal or not."""
    for config in _configs(family, form.overlap):
        yield Variant(
            provider,
            name,
            target,
            config,
            form.elements,
            accumulator=family.accumulator,
            epilogue=form.epilogue,
            batched=form.batched,
            operation=family.operation,
            scaling=form.scaling,
            b_major=form.b_major,
        )
