"""Archives on one device, one over the other: what a later one has takes the place of the same in those before it.

Knows functions by name, and nothing of what tables say of them.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..container.archive import Admit, Archive
from ..container.errors import UnknownEntry
from ..device.driver import Driver
from ..device.workspace import Workspaces
from ..errors import ArgumentError, DeviceError
from ..tables.dispatch import serves
from .counters import Counters
from .function import Function

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Open = Callable[[Sequence[str | os.PathLike[str]]], list[Archive]]  # all of the archives at these paths, or none


class Layer:
    """One archive, and those of its functions that were asked for: an archive may have thousands."""

    def __init__(self, archive: Archive, make: Callable[[Archive, str], Function], lock: threading.RLock) -> None:
        self.archive, self._make, self._lock = archive, make, lock
        self.made: dict[str, Function] = {}

    def function(self, name: str) -> Function:
        """The function `name` of this archive; the same object each time."""
        found = self.made.get(name)
        if found is None:
            with self._lock:  # so that `Layers.retire` finds it, or was before it
                found = self.made.get(name) or self.made.setdefault(name, self._make(self.archive, name))
        return found


class Functions(Mapping[str, Function]):
    """Functions by name, those of the last archive first; an unknown name is an `UnknownEntry`, which says what to run.

    Of functions with one name it has that of the last archive.
    """

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        self._last_first = layers[::-1]

    def __getitem__(self, name: str) -> Function:
        for layer in self._last_first:
            if name in layer.archive.functions:
                return layer.function(name)
        if len(self._last_first) == 1:
            self._last_first[0].archive.entry(name)
        paths = ", ".join(layer.archive.path for layer in self._last_first)
        raise UnknownEntry(f"{paths}: have no function {name!r} among their {len(self)}; `aot ls` lists them")

    def __contains__(self, name: object) -> bool:
        return any(name in layer.archive.functions for layer in self._last_first)

    def get(self, name: str, default: Any = None) -> Any:
        """The function `name`, or `default`."""
        return self[name] if name in self else default  # noqa: SIM401

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for layer in self._last_first for name in layer.archive.functions))

    def __len__(self) -> int:
        if len(self._last_first) == 1:
            return len(self._last_first[0].archive.functions)
        return sum(1 for _ in self)


class Layers:
    """The archives of a library, the base first, and their functions. The lock is the library's."""

    def __init__(
        self,
        archives: Sequence[Archive],
        driver: Driver,
        workspaces: Workspaces,
        counters: Counters,
        lock: threading.RLock,
    ) -> None:
        self.archives = tuple(archives)
        self._driver, self._lock = driver, lock
        self._retired = False  # changed by holders of the lock

        def make(archive: Archive, name: str) -> Function:
            function = Function(archive, driver, lock, archive.entry(name), workspaces, counters)
            if self._retired:
                function.retire()
            return function

        self.all = tuple(Layer(archive, make, lock) for archive in self.archives)
        self.functions = Functions(self.all)

    @property
    def path(self) -> str:
        """The archives' paths."""
        return ", ".join(archive.path for archive in self.archives)

    @property
    def digest(self) -> str:
        """The SHA-256 that names the archive, or of the names of several, in their order."""
        digests = [archive.digest for archive in self.archives]
        return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()

    def damaged(self) -> set[str]:
        """The functions that were found damaged, where the library goes on without them."""
        return {function.name for function in self.made() if function.damage}

    def made(self) -> list[Function]:
        """The functions that were asked for so far, of every layer."""
        return [function for layer in self.all for function in list(layer.made.values())]

    def check_device(self) -> None:
        """Raise DeviceError if no function is for this GPU."""
        capability = self._driver.compute_capability
        targets = sorted({target for archive in self.archives for target in archive.targets})
        if not any(serves(target, capability) for target in targets):
            raise DeviceError(
                f"{self.path} has kernels for {', '.join(targets) or 'no target'}; this GPU "
                f"has compute capability {capability[0]}.{capability[1]}; build the archive for it too"
            )

    def retire(self) -> bool:
        """Have every function make no more plans, those that are first asked for later too, for which nothing would
        wait; whether a call under way still holds one. The caller holds the lock."""
        self._retired = True
        functions = self.made()
        for function in functions:
            function.retire()
        return any(function.busy for function in functions)

    def unload(self) -> None:
        """Unload the kernels, which no call or graph may use any more, and close the files.

        All of them; then what the driver said of the first that failed is raised, and another call tries those again.
        """
        failure: DeviceError | None = None
        try:
            for function in self.made():
                try:
                    function.unload()
                except DeviceError as error:
                    failure = failure or error
        finally:
            for archive in self.archives:
                archive.close()
        if failure is not None:
            raise failure


def paths_of(path: Paths) -> tuple[str | os.PathLike[str], ...]:
    """The paths of a library's archives, as `load` and `reload` are given them.

    Raises:
        ArgumentError: there is none.
    """
    if not isinstance(path, str | bytes | os.PathLike | Iterable):
        raise ArgumentError(f"a path must be given, or several, found {path!r:.80}")
    paths = (path,) if isinstance(path, str | bytes | os.PathLike) else tuple(path)
    if not paths:
        raise ArgumentError("no path was given; give that of an archive, or of a base and those layered on it")
    return paths


def open_archives(paths: Sequence[str | os.PathLike[str]], admit: Admit | None = None) -> list[Archive]:
    """Open them all, or none; each only if `admit` lets it, as `Archive.open` has it.

    Raises:
        ArchiveError: a file is not an archive that can be trusted.
    """
    archives: list[Archive] = []
    try:
        for path in paths:
            archives.append(Archive.open(path, admit))
    except BaseException:
        for archive in archives:
            archive.close()
        raise
    return archives


def opener(require_signed: str | os.PathLike[str] | None) -> Open:
    """What opens the archives of a library, at first and at each reload: signed ones alone, by keys that are read from
    `require_signed` each time, or any where that is None.

    Raises:
        ArgumentError: `require_signed` is no path.
    """
    if require_signed is None:
        return open_archives
    if not isinstance(require_signed, str | os.PathLike) or not os.fspath(require_signed):
        what = "must be the path of a folder of keys, or of one key"
        raise ArgumentError(f"require_signed {what}, found {require_signed!r:.80}")
    keys = os.path.abspath(require_signed)

    def open_signed(paths: Sequence[str | os.PathLike[str]]) -> list[Archive]:
        from ..signing.check import check  # which most servers do without
        from ..signing.keys import read_keys

        return open_archives(paths, partial(check, trusted=read_keys(keys)))

    return open_signed
