"""What a provider of kernels is, and the providers that there are, by name.

Importing this imports none of them: `provider` does, when asked for one. Imports no compiler: a provider's `build`
alone may, and runs in a worker process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.errors import AotError
from runtime.gemm.signature import Signature
from runtime.program.arguments import Argument, Symbol

from .variants import Family, Variant

PROVIDERS = {  # module and class of each
    "cutlass_operators": "aot.providers.cutlass_operators:CutlassOperators",
    "own": "aot.providers.own:Own",
}


class ProviderError(AotError):
    """A provider cannot make what a variant asks for, or the package it draws on is not the expected one."""


@dataclass(frozen=True)
class Buildable:
    """What `cute.compile` needs for one variant, and the description of the arguments that the compiled function takes.

    `function` is a `cute.jit` function and `arguments` the stand-ins to compile it with, in order. `tree` describes
    each argument as a function record does, `symbols` each free extent and stride that the tree names.
    """

    function: Callable[..., None]
    arguments: list[Any]
    tree: list[Argument]
    symbols: dict[str, Symbol]

    @property
    def argument_names(self) -> list[str]:
        """The arguments' names, in order."""
        return [argument.name for argument in self.tree]


class Provider(Protocol):
    """A source of kernels."""

    name: str

    @property
    def families(self) -> Mapping[str, Family]:
        """What `legal` and `rank` must know of its variants, by family, in the order that breaks ties."""
        ...

    def variants(self, target: str, signature: Signature) -> list[Variant]:
        """Every legal GEMM variant for `signature` on `target`; cheap, and compiles nothing."""
        ...

    def functions(self, target: str) -> list[Variant]:
        """Every legal variant for `target` that is not a GEMM; cheap, and compiles nothing."""
        ...

    def source_digest(self, family: str) -> str:
        """SHA-256 over the sources and versions that decide what code a variant of `family` compiles to.

        Covers neither the DSL nor its compiler: their versions are the compiler's to record. Nor what decides whether a
        variant is worth compiling, or how long it takes.

        Raises:
            ProviderError: there is no such family, or its sources cannot be told.
        """
        ...

    def build(self, variant: Variant) -> Buildable:
        """Prepare `variant` for `cute.compile`. Called in a worker process that was told its architecture beforehand.

        Raises:
            ProviderError: the variant is illegal, or its kernel cannot be found.
        """
        ...


def provider(name: str) -> Provider:
    """The provider called `name`.

    Raises:
        AotError: there is none.
    """
    if name not in PROVIDERS:
        raise AotError(f"unknown provider {name!r}; the providers are {', '.join(PROVIDERS)}")
    module, _, of = PROVIDERS[name].partition(":")
    made: Provider = getattr(importlib.import_module(module), of)()
    return made


def families(name: str) -> Mapping[str, Family]:
    """The families of the provider called `name`; none where there is no such provider."""
    return provider(name).families if name in PROVIDERS else {}
