"""What a library serves between two reloads: its archives, what their tables say, and the plans made so far.

A reload makes another generation, checks it, and swaps. Knows nothing of the calls that ask for plans.

Workspaces, counters and the numbers by which the native table knows words belong to the library, since they mean the
same before a swap and after it; a plan that was being made during one serves its own call and is not kept. A replaced
generation is given up in this order: it loses its plans under the lock (`retire`); one whose launches a call still
holds, which weak references show, is left for another time; the device is waited for; then the rest is unloaded
(`close`). Replays of CUDA graphs cannot be seen, and are the caller's to end.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from ..container.archive import Archive
from ..device.driver import Driver
from ..device.workspace import Workspaces
from ..program.operation import is_operation, operation
from .counters import Counters
from .entries import Entries
from .gemm.plans import Plans
from .layers import Layers
from .native_plans import NativePlans
from .options import Options
from .planned_call import PlannedCalls
from .preload import Preloader


class Generation:
    """Archives on one device, the base first. The lock is the library's."""

    def __init__(
        self,
        archives: Sequence[Archive],
        driver: Driver,
        workspaces: Workspaces,
        counters: Counters,
        lock: threading.RLock,
        options: Options,
    ) -> None:
        self._lock = lock
        self.layers = Layers(archives, driver, workspaces, counters, lock)
        self._by_operation: dict[str, Entries] = {}
        self._entries = partial(Entries, layers=self.layers, driver=driver, lock=lock, options=options)
        self.entries = self.entries_of(Plans.of.name)
        self.plans = Plans(self.entries, driver, counters)
        self.calls = PlannedCalls(driver)  # of other operations
        self.packed = NativePlans(driver)  # of any, by what holds their operands
        self.preloader = Preloader(self.layers, self.all_entries, self.plans, driver, lock, options, workspaces)

    def entries_of(self, name: str) -> Entries:
        """What the tables have of an operation.

        Raises:
            ArgumentError: there is no such operation.
        """
        found = self._by_operation.get(name)
        if found is None:
            of = operation(name)
            with self._lock:
                found = self._by_operation.setdefault(name, self._by_operation.get(name) or self._entries(of))
        return found

    def all_entries(self) -> list[Entries]:
        """The same of every operation that there is a table of; of that of `plans` where there is none, to say so."""
        tables = dict.fromkeys(name for archive in self.layers.archives for name in archive.tables)
        found = [self.entries_of(name) for name in tables if is_operation(name)]
        return found or [self.entries]

    def check_files(self) -> None:
        """Read all of the files, and their tables; it leaves the interpreter to other threads but for these.

        Raises:
            ArchiveError: something is damaged; the message names the file.
            RecordError: a table is malformed.
        """
        for archive in self.layers.archives:
            archive.check_blocks()
            if "tuning" in archive.tables:
                archive.table("tuning")
        for entries in self.all_entries():
            entries.check()

    def retire(self) -> bool:
        """Forget all plans and make no more; whether a call under way still holds one. The caller holds the lock."""
        self.plans.clear()
        self.calls.clear()
        self.packed.clear()
        return self.layers.retire()

    def close(self) -> None:
        """Unload the kernels, which no call or graph may use any more, and close the files.

        All of them; then what the driver said of the first that failed is raised, and another call tries those again.
        """
        try:
            with self._lock:
                self.retire()
        finally:
            self.layers.unload()
