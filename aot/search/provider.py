"""What a provider of kernels is, and the providers that there are, by name: this project's, and those that installed
distributions have under the entry point group `GROUP`.

Importing this imports none of them: `provider` does, when asked for one. Imports no compiler: a provider's `build`
alone may, and runs in a worker process.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, distributions
from typing import Any, Protocol

from runtime.errors import AotError
from runtime.gemm.signature import Signature
from runtime.program.arguments import Argument, Symbol

from .variants import Family, Variant

PROVIDERS = {  # module and class of each
    "cutlass_operators": "aot.providers.cutlass_operators:CutlassOperators",
    "own": "aot.providers.own:Own",
}
GROUP = "cute_aot.providers"  # of entry points: a word for each, and its module and class as in `PROVIDERS`
_PARTS = "name", "families", "variants", "functions", "source_digest", "build"  # of a provider


class Compilable(Protocol):
    """What a worker compiles, as data that is compared, hashed and pickled: a `Variant`, or what
    has `build` and `source_digest` itself, for which it needs no provider."""

    @property
    def provider(self) -> str:
        """Where it comes from, in a word."""

    @property
    def family(self) -> str:
        """What it is one of."""

    @property
    def target(self) -> str:
        """What it is compiled for."""

    def name(self) -> str:
        """Its name in an archive."""

    def to_json(self) -> dict[str, Any]:
        """Equal for equal ones and only for them, but for what `source_digest` covers."""


class ProviderError(AotError):
    """A provider cannot make what a variant asks for, or the package it draws on is not the expected one."""


class CodeFailed(AotError):
    """Somebody's own code failed while it was compiled, so that nobody knows what state that left the compiler in."""


@dataclass(frozen=True)
class Buildable:
    """What `cute.compile` needs for one variant, and the description of the arguments that the compiled function takes.

    `function` is a `cute.jit` function and `arguments` the stand-ins to compile it with, in order. `tree` describes
    each argument as a function record does, `symbols` each free extent and stride that the tree names. `options` are
    further ones for `cute.compile`; with `local_memory` kernels may spill; `explain` says of what was raised while it
    was compiled what to tell of it.
    """

    function: Callable[..., None]
    arguments: list[Any]
    tree: list[Argument]
    symbols: dict[str, Symbol]
    options: tuple[Any, ...] = ()
    local_memory: bool = False
    explain: Callable[[Exception], AotError] | None = None


class Provider(Protocol):
    """A source of kernels."""

    name: str

    @property
    def families(self) -> Mapping[str, Family]:
        """What `legal` and `rank` must know of its variants, by family, in the order that breaks ties."""
        ...

    def variants(self, target: str, signature: Signature) -> list[Variant]:
        """The variants that compute `signature` on `target` and are worth compiling, of operations that have too many
        to enumerate them all, such as GEMM; cheap, and compiles nothing."""
        ...

    def functions(self, target: str) -> list[Variant]:
        """The variants for `target` of all other operations that are worth compiling; cheap, and compiles nothing."""
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


def provider_names() -> tuple[str, ...]:
    """The providers that there are: this project's, then those of other distributions.

    Raises:
        ProviderError: two distributions have one of the same name.
    """
    return (*PROVIDERS, *_of_others(tuple(sys.path)))


def provider(name: str) -> Provider:
    """The provider called `name`.

    Raises:
        AotError: there is none.
        ProviderError: that of a distribution is broken; the message names the distribution.
    """
    if name in PROVIDERS:
        module, _, of = PROVIDERS[name].partition(":")
        made: Provider = getattr(importlib.import_module(module), of)()
        return made
    found = _of_others(tuple(sys.path)).get(name)
    if found is None:
        raise AotError(f"unknown provider {name!r}; the providers are {', '.join(provider_names())}")
    return _loaded(*found)


def families(name: str) -> Mapping[str, Family]:
    """The families of the provider called `name`; none where there is no such provider."""
    return provider(name).families if name in PROVIDERS or name in provider_names() else {}


def family_of(variant: Variant) -> Family | None:
    """What its provider says of a variant's family, or None if there is no such provider or family here."""
    return families(variant.provider).get(variant.family)


def buildable(item: Compilable) -> Buildable:
    """Prepare it for `cute.compile`, in a worker process.

    Raises:
        AotError: it cannot be made.
    """
    if isinstance(item, Variant):
        return provider(item.provider).build(item)
    itself: Any = item
    made: Buildable = itself.build()
    return made


def source_digest(item: Compilable) -> str:
    """SHA-256 over the sources that decide what code it compiles to, but for the DSL's."""
    if isinstance(item, Variant):
        return provider(item.provider).source_digest(item.family)
    itself: Any = item
    found: str = itself.source_digest()
    return found


def home(item: Compilable) -> str:
    """What may share a process of the compiler: this project's variants, or others of one source; their code may change
    the compiler for all that comes after it."""
    if item.provider in PROVIDERS:
        return ""
    return item.provider if isinstance(item, Variant) else f"{item.provider}.{item.family}"


@cache
def _of_others(path: tuple[str, ...]) -> dict[str, tuple[str, EntryPoint]]:
    """The entry points of other distributions on `path`, by name, with what the distribution is called."""
    found: dict[str, tuple[str, EntryPoint]] = {}
    seen = set[str]()
    for distribution in distributions(path=list(path)):
        entries = distribution.entry_points.select(group=GROUP)
        if not entries or (named := distribution.metadata["Name"]) in seen:  # the first on the path is what is imported
            continue
        seen.add(named)
        of = f"distribution {named} {distribution.version}"
        for entry in entries:
            if taken := "this project" if entry.name in PROVIDERS else found.get(entry.name, ("",))[0]:
                raise ProviderError(
                    f"{of}: its provider {entry.name!r} has the name of one of {taken}; uninstall one of them"
                )
            found[entry.name] = of, entry
    return dict(sorted(found.items()))


def _loaded(of: str, entry: EntryPoint) -> Provider:
    """The provider of another distribution."""
    where = f"{of}: its provider {entry.name!r} ({entry.value})"
    remedy = "mend that distribution, or uninstall it"
    try:
        made = entry.load()()
    except Exception as error:
        text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
        raise ProviderError(f"{where} cannot be loaded: {type(error).__name__}: {text}; {remedy}") from None
    if missing := [part for part in _PARTS if not hasattr(made, part)]:
        raise ProviderError(f"{where} has no {', '.join(missing)}; {remedy}")
    if made.name != entry.name:
        raise ProviderError(f"{where} calls itself {made.name!r}, which its variants then say; {remedy}")
    whole: Provider = made
    return whole
