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

from ..container.archive import Archive
from ..device.driver import Driver
from ..device.workspace import Workspaces
from .counters import Counters
from .entries import Entries
from .layers import Layers
from .options import Options
from .plans import Plans
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
        self.entries = Entries(self.layers, driver, lock, options)
        self.plans = Plans(self.entries, driver, counters)
        self.preloader = Preloader(self.layers, self.entries, self.plans, driver, lock, options)

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
        self.entries.check()

    def retire(self) -> bool:
        """Forget all plans and make no more; whether a call under way still holds one. The caller holds the lock."""
        self.plans.clear()
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
