"""Legal variants drawn at random, likely or not: there are too many to enumerate."""

from __future__ import annotations

import random
from dataclasses import replace

from aot.search.legal import illegal, legal_variants, of_name
from aot.search.provider import families
from aot.search.variants import Variant, choices
from runtime.program.operation import Signature


def drawn(signature: Signature, family: str, draws: int = 8000) -> list[Variant]:
    """Different variants of a family of our own for sm_90a and the form of `signature`: likely ones, some with up to
    three of their choices changed to any that the family has. The same for the same arguments."""
    rng, options = random.Random(0), families("own")[family].options
    likely = [v for v in legal_variants("own", "sm_90a", signature) if v.family == family]
    found: dict[Variant, None] = {}
    for _ in range(draws):
        v = rng.choice(likely)
        changed = {name: rng.choice(options[name]) for name in rng.sample(list(options), rng.randint(0, 3))}
        v = replace(v, config=choices(**{**v.options, **changed}))
        if illegal(v) is None:
            found[v] = None
    return list(found)


def legal_values(name: str, option: str) -> set[int]:
    """What the integer `option` of the variant of this name may be, where its other choices stay."""
    variant = of_name(name)
    assert variant is not None
    twins = {value: replace(variant, config=choices(**{**variant.options, option: value})) for value in range(1, 1100)}
    return {value for value, twin in twins.items() if illegal(twin) is None}
