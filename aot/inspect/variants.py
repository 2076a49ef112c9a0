"""The choices of a function's kernel in words, by its name. Knows nothing of archives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..search.legal import of_name
from ..search.variants import TILES, Option, Variant

# What choices mean that a name abbreviates, where they are on, or of each value; nothing of what is usual, as is a
# raster along M. docs/kernels has all of them.
_ON = {
    "swap": "swap-AB",
    "stream_k": "stream-K",
    "swizzle": "raster along M, swizzled",
    "two_cta": "2-CTA MMA",
    "tma_store": "TMA store",
}
_VALUES: Mapping[str, Mapping[Option, str]] = {
    "overlap": {"serial": "", "launch": "PDL (launch)", "weights": "PDL (weights)"},
    "split_k": {1: ""},
    "ctas_per_sm": {1: "", 2: "2 CTAs an SM"},
    "order": {
        "rows": "",
        "two_rows": "raster along M, swizzle 2",
        "quads": "raster along M, swizzle 8",
        "columns": "raster along N",
    },
}
_NAMES = {"split_k": "split-K", "order": "raster", "ctas_per_sm": "CTAs an SM", "cluster_n": "cluster along N"}


def described(name: str) -> dict[str, Any] | None:
    """What a function was compiled from, where a provider here knows it: provider, family, element types, choices by
    name, and all choices in `words`. None of others."""
    variant = of_name(name)
    if variant is None:
        return None
    return {
        "provider": variant.provider,
        "family": variant.family,
        "elements": list(variant.elements),
        "choices": dict(variant.options),
        "words": _words(variant),
    }


def words(name: str) -> str | None:
    """What `described` says of a function in words, None where no provider here knows it."""
    variant = of_name(name)
    return None if variant is None else _words(variant)


def _words(variant: Variant) -> str:
    """Such as "tile 88x192, cluster 2x1, pingpong, swap-AB"."""
    options, found = dict(variant.options), []
    for prefix in TILES:
        if f"{prefix}_m" in options:
            extents = [options.pop(f"{prefix}_{mode}", None) for mode in "mnk"]
            found.append(f"{prefix} {'x'.join(str(e) for e in extents if e is not None)}")
    found += [_word(option, value) for option, value in options.items()]
    return ", ".join(filter(None, found))


def _word(option: str, value: Option) -> str:
    if isinstance(value, bool):
        return _ON.get(option, option.replace("_", " ")) if value else ""
    if value in (said := _VALUES.get(option, {})):
        return said[value]
    return value if isinstance(value, str) and option not in _NAMES else f"{_NAMES.get(option, option)} {value}"
