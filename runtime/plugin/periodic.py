"""A function that is called now and then in a thread of its own, beside a worker that serves; and how trouble with it
is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from .log import own_name, words

SECONDS = 5.0  # as often as Prometheus usually asks, and all that a worker that is killed can lose


class Periodic:
    """Calls `act` every so many seconds until the process ends. The first time that it raises, that is one line of
    `log`, which begins with `trouble`; the next time it may do."""

    def __init__(self, act: Callable[[], None], log: logging.Logger, trouble: str, seconds: float = SECONDS) -> None:
        self._act, self._log, self._trouble, self._seconds, self._told = act, log, trouble, seconds, False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cute-aot", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Call it a last time, and no more; returns when that is done."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            self._try()
        self._try()

    def _try(self) -> None:
        try:
            self._act()
        except Exception as error:  # such as a disk that is full
            if not self._told:
                self._log.warning("%s %s: %s", own_name(), self._trouble, words(error))
            self._told = True
