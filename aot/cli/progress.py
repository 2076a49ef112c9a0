"""How far work that lasts has come, on standard error: a bar on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from .streams import printable, tell

_BAR_AFTER_S = 2.0
_LINE_EVERY_S = 10.0


class Progress:
    """A bar where standard error is a terminal, after two seconds; else a line for every ten seconds that pass.

    A thread sees to the lines, so that one comes while nothing is finished too. `clock` gives seconds.
    """

    def __init__(self, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._clock = clock
        self._begun = clock()
        self._terminal = sys.stderr.isatty()
        self._due = self._begun + (_BAR_AFTER_S if self._terminal else _LINE_EVERY_S)
        self._said = "", ""  # what `update` told last: how much is done, and what comes next
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if not self._terminal:
            threading.Thread(target=self._keep_saying, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def update(self, done: int, total: int, detail: str = "") -> None:
        """Say that `done` of `total` steps are behind us, and what comes next."""
        if not self._terminal:
            self._said = f"{done} of {total}", detail
            self.say_if_due()
        elif not self._stopped.is_set() and self._clock() >= self._due:
            self._draw(done, total, detail)

    def say_if_due(self) -> None:
        """Print how far the work has come, if the last line is long ago."""
        with self._lock:
            now = self._clock()
            if self._stopped.is_set() or now < self._due:
                return
            self._due = now + _LINE_EVERY_S
            done, detail = self._said
            tell(f"{self._title}: {done}{done and ' '}after {now - self._begun:.0f} s{detail and ', now '}{detail}")

    def _keep_saying(self) -> None:
        while not self._stopped.wait(_LINE_EVERY_S):
            self.say_if_due()

    def _draw(self, done: int, total: int, detail: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            title = TextColumn("{task.description}", markup=False)
            columns = title, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._title, total=total)
            self._bar.start()
        description = printable(f"{self._title} {detail}".strip())
        self._bar.update(self._task, completed=done, total=total, description=description)

    def note(self, message: str) -> None:
        """Print a line on standard error, where no bar will show."""
        if not self._terminal:
            tell(message)

    def line(self, message: str) -> None:
        """Print a line on standard error, above the bar if there is one."""
        if self._bar is None:
            tell(message)
        else:
            self._bar.console.print(printable(message), markup=False, highlight=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        """Print a warning above the bar."""
        self.line(f"warning: {message}")

    def stop(self) -> None:
        """Take the bar away, for good."""
        self._stopped.set()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
