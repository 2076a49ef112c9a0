"""What a launch must not do, watched by an audit hook: read a file, import, compile, start a process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

# What a compiler, a loader or a file would need, as CPython reports it to audit hooks.
FORBIDDEN = {
    *("open", "import", "compile", "exec", "mmap.__new__", "ctypes.dlopen", "subprocess.Popen", "socket.connect"),
    *(
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.exec",
        "os.system",
        "os.listdir",
        "os.scandir",
        "tempfile.mkstemp",
    ),
}


class Forbid:
    """Fails and keeps what is tried of `FORBIDDEN`, and reads of archives, by threads that are in `guarded`."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self._guarded: set[int] = set()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        self._guarded.add(threading.get_ident())
        try:
            yield
        finally:
            self._guarded.discard(threading.get_ident())

    def refuse(self, what: str, arguments: tuple[Any, ...]) -> None:
        if threading.get_ident() in self._guarded:
            self.tried.append(f"{what}{arguments!r:.200}")
            raise AssertionError(self.tried[-1])

    def instead_of(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.refuse(what, arguments)
            return function(*arguments)

        return call


forbidding: list[Forbid] = []  # a hook stays for as long as the process


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in FORBIDDEN and forbidding:
        forbidding[-1].refuse(event, arguments)
