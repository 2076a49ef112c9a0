"""A compile worker: takes variants from a connection, one at a time, and answers each with a kernel or a reason.

`aot.compile.compiler` starts it as a process of its own, with one architecture in its environment and a log file for
output. Knows nothing of caches, and imports no compiler before the first variant.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from runtime.errors import AotError

from ..search.provider import CodeFailed, Compilable

_MAX_REASON_CHARACTERS = 400
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True)
class Compiled:
    """A kernel: its record, and its binary."""

    record: dict[str, Any]
    cubin: bytes


@dataclass(frozen=True)
class Failed:
    """Why there is no kernel. `reusable`: whether this process can be trusted with another variant. `killed`: somebody
    ended it, such as a system short of memory, so that the variant need not be what failed."""

    reason: str
    reusable: bool
    killed: bool = False


def serve(descriptor: int, module: str, parent: int) -> None:
    """Answer each variant that arrives over the socket `descriptor` with what `module.lower` makes of it.

    Ends where nobody sends any more, and with the process `parent` even in the middle of a compilation.
    """
    end_with(parent)
    lower = importlib.import_module(module).lower
    with Connection(descriptor) as connection:
        while True:
            try:
                variant = connection.recv()
            except EOFError:  # the parent has no more, or is gone
                return
            connection.send(_answer(lower, variant))


def end_with(parent: int) -> None:
    """Have the kernel end this process when `parent` dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit()


def _answer(lower: Callable[[Compilable], Any], variant: Compilable) -> Compiled | Failed:
    try:
        lowered = lower(variant)
        return Compiled(lowered.record, lowered.cubin)
    except AotError as error:
        return Failed(last_line(str(error)), reusable=not isinstance(error, CodeFailed))
    except (Exception, SystemExit) as error:
        # The DSL keeps state for the process (MLIR contexts, the module being built); nobody promises that it survives.
        return Failed(f"{type(error).__name__}: {last_line(str(error)) or 'no message'}", reusable=False)


def last_line(text: str) -> str:
    """The last line of `text` that says something, cut to a length that suits a list."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_MAX_REASON_CHARACTERS] if lines else ""
