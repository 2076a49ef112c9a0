"""Kinds of GPU that questions may name without having one: those of an archive's entries, and common ones."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.errors import AotError
from runtime.tables.dispatch import serves
from runtime.tables.table import Entry

from ..search.targets import target_for
from ..suggest import did_you_mean
from .kinds import COMMON, Kind, capability


class UnknownGpu(AotError):
    """A name that is no kind of GPU known here."""


class OtherTarget(AotError):
    """A kind of GPU that does not run the target that is asked for."""


def kinds_of(entries: Iterable[Entry]) -> list[Kind]:
    """The kinds that entries are for, each once."""
    return list(dict.fromkeys(Kind(e.gpu, capability(e.target)) for e in entries if e.gpu is not None))


def named(word: str, entries: Iterable[Entry]) -> Kind:
    """The kind that `word` is, or whose name has it, such as "H200": of the entries, else a common one.

    Raises:
        UnknownGpu: there is none.
    """
    kinds = [*kinds_of(entries), *COMMON]
    parts = word.lower().split()
    for kind in kinds:
        if word.lower() in (kind.gpu.name.lower(), *kind.gpu.name.lower().split()):
            return kind
    for kind in kinds:
        if parts and all(part in kind.gpu.name.lower() for part in parts):
            return kind
    names = dict.fromkeys(kind.gpu.name.removeprefix("NVIDIA ") for kind in kinds)
    raise UnknownGpu(f"unknown GPU {word!r:.80}; {did_you_mean(word, names)}; or give --target")


def require_runs(kind: Kind, target: str) -> None:
    """Refuse a target whose code a kind of GPU does not run.

    Raises:
        OtherTarget: it does not.
    """
    if serves(target, kind.capability):
        return
    runs = target_for(kind.capability)
    instead = "" if runs is None else f", or give --target {runs}"
    raise OtherTarget(f"{kind.gpu.name} does not run {target}; leave out --target or --gpu{instead}")
