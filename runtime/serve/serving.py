"""What all calls of a library share: its device, and the generation of files that serves now."""

from __future__ import annotations

import threading

from ..container.errors import ArchiveClosed
from ..device.driver import Driver
from .counters import Counters
from .generation import Generation
from .options import Options


class Serving:
    """A library to those who call it: `_now` is what serves, until a reload or `close`."""

    def __init__(self, driver: Driver, options: Options, counters: Counters, lock: threading.RLock) -> None:
        self._driver, self._options, self._counters, self._lock = driver, options, counters, lock
        self._closed = False

    def _serve(self, now: Generation) -> None:
        """Serve what is in `now` from here on. The caller holds the lock."""
        self._now = now

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ArchiveClosed(f"{self._now.layers.path}: this library was closed; load the archive again")
