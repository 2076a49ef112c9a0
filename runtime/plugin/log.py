"""What a plugin says in its server's log: what it is called there, an error in one line, and what became of calls that
the library refused, each said once.

Knows no server, nor where its log is.
"""

from __future__ import annotations

import functools
import logging
import weakref
from pathlib import Path

from .. import __version__
from ..errors import AotError
from ..serve.library import Library

BY_TORCH = "was computed by torch, slowly"
# Where it is said what became of a library's calls; that of no server, as far as nothing else was said.
_logs: weakref.WeakKeyDictionary[Library, logging.Logger] = weakref.WeakKeyDictionary()


def own_name(lib: Library | None = None) -> str:
    """The plugin as lines of a log name it, with the archives of a library."""
    if lib is None:
        return f"cute-aot {__version__}"
    names = ", ".join(Path(archive.path).name for archive in lib.stats().archives)
    return f"cute-aot {__version__}: {names} ({lib.digest[:12]})"


def words(error: Exception) -> str:
    """In one line, what went wrong."""
    what = str(error) if isinstance(error, AotError) else f"{type(error).__name__}: {error}"
    return " ".join(what.split())


def log_to(lib: Library, log: logging.Logger) -> None:
    """Let `say_once` say in `log` what became of calls of `lib`."""
    _logs[lib] = log


def say_once(lib: Library, what: str, error: Exception, then: str = BY_TORCH) -> None:
    """Say what becomes of `what`, since `lib` refused it with this error."""
    reason = getattr(error, "reason", "its operands")
    warn_once(_logs.get(lib, logging.getLogger("cute_aot")), f"{what} {then}: {type(error).__name__}, {reason}")


@functools.lru_cache(1024)
def warn_once(log: logging.Logger, line: str) -> None:
    """Write a line, unless it was written before."""
    log.warning("%s", line)
