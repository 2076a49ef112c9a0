"""Why nothing computes a signature on a target, in words, and which targets have something that does.

Asks the families, as `aot.search.legal` does; knows nothing of manifests or archives.
"""

from __future__ import annotations

from typing import Any

from .form import lacks
from .legal import refusal, unsuited
from .operation import building
from .provider import families, provider_names
from .targets import TARGETS
from .variants import Variant


def variants(target: str, signature: Any) -> list[Variant]:
    """The variants of all providers for a signature, of any operation, on a target, that are worth compiling."""
    return building(signature.operation).variants(target, signature)


def computing(signature: Any) -> list[str]:
    """The targets that have variants for a signature."""
    return [name for name in TARGETS if variants(name, signature)]


def why_none(target: str, signature: Any) -> str:
    """Why there is no variant for `signature` on `target`: what no family there has of it, or else the nearest family.

    Ends with the targets that have some.
    """
    others = computing(signature)
    fix = f"{', '.join(others)} can" if others else "no target can"
    return f"{_lacking(target, signature)}; {fix}"


def _lacking(target: str, signature: Any) -> str:
    form = building(signature.operation).form(signature)
    lacking = {
        (p, name): lacks(family, form)
        for p in provider_names()
        for name, family in families(p).items()
        if family.operation == signature.operation and target in family.targets
    }
    if not lacking:
        return f"none is for {target}"
    (of, nearest), least = min(lacking.items(), key=lambda item: len(item[1]))
    if shared := [part for part in least if all(part in parts for parts in lacking.values())]:
        return f"none for {target} has {' and '.join(shared)}"
    if least:
        return f"{nearest}, the nearest for {target}, lacks {' and '.join(least)}"
    roomy = building(signature.operation).roomy(signature)
    reasons = [reason for v in variants(target, roomy) if (reason := unsuited(v, signature))]
    if reasons:
        return reasons[0]
    of_all = refusal(of, nearest, families(of)[nearest], target, form)
    return of_all or f"no choices of {nearest} go together for it"
