"""Which part of an archive is wanted: rows of some targets, layers and states. Knows no table."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from runtime.errors import AotError

from ..suggest import did_you_mean


class NothingLike(AotError):
    """An archive has nothing of what a filter asks for."""


class Filter(NamedTuple):
    """Which rows are wanted: of these targets and states, and of layers by manifest's name, by signature or by the name
    of a form, each of which may have stars; everything where a list is empty."""

    targets: Sequence[str] = ()
    layers: Sequence[str] = ()
    states: Sequence[str] = ()

    def takes(self, target: str, state: str, names: Iterable[str]) -> bool:
        """Whether a row is wanted."""
        return (
            (not self.targets or target in self.targets)
            and (not self.states or state in self.states)
            and (not self.layers or any(fnmatch.fnmatchcase(n, pattern) for n in names for pattern in self.layers))
        )

    def takes_functions(self, target: str) -> bool:
        """Whether functions in no table are wanted of a target: they are of no layer and have no state."""
        return not self.layers and not self.states and self.takes(target, "", ())

    def require_known(
        self, path: str, targets: Iterable[str], states: Iterable[str], names: Iterable[str], keys: Iterable[str]
    ) -> None:
        """Refuse words that nothing of an archive passes: of layers `names` are what manifests call them, and `keys`
        their signatures and the names of forms, which are many and long.

        Raises:
            NothingLike: of the first such word, what it may have meant.
        """
        there = {"target": (self.targets, targets, ()), "state": (self.states, states, ())}
        for what, (asked, of, others) in {**there, "layer": (self.layers, names, keys)}.items():
            known = list(dict.fromkeys(of))
            if unknown := [word for word in asked if not fnmatch.filter([*known, *others], word)]:
                near = did_you_mean(unknown[0], known) if known else f"it names no {what}"
                raise NothingLike(f"{path}: has nothing of the {what} {unknown[0]!r}; {near}")

    def nothing(self, path: str) -> NothingLike:
        """What to raise where each word passes something and all together nothing."""
        return NothingLike(f"{path}: has nothing that is all of what was asked; leave out a filter")


def by_names(names: Mapping[str, Sequence[str]], key: str) -> list[str]:
    """What a layer may be called: its signature's key, and its names by it."""
    return [key, *names.get(key, ())]
