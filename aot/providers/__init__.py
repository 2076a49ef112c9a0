"""The providers of kernels, by name.

Importing this imports none of them: `provider` does, when asked for one.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from runtime.errors import AotError

from ..variants import Family
from .base import Buildable, Provider, ProviderError

__all__ = ["PROVIDERS", "Buildable", "Provider", "ProviderError", "families", "provider"]

PROVIDERS = {
    "cutlass_operators": "CutlassOperators",
    "own": "Own",
}


def provider(name: str) -> Provider:
    """The provider called `name`.

    Raises:
        AotError: there is none.
    """
    if name not in PROVIDERS:
        raise AotError(f"unknown provider {name!r}; the providers are {', '.join(PROVIDERS)}")
    made: Provider = getattr(importlib.import_module(f"{__name__}.{name}"), PROVIDERS[name])()
    return made


def families(name: str) -> Mapping[str, Family]:
    """The families of the provider called `name`; none where there is no such provider."""
    return provider(name).families if name in PROVIDERS else {}
