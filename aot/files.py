"""Where a file may be written; files and folders that end with the process that makes them; and what killed processes
left of theirs.

Names of the latter end in 16 hexadecimal digits, eight for this boot of this machine and eight at random, and ".tmp".
The maker keeps each locked (flock) while it lives, so `collect` knows what nobody uses any more. Where a lock proves
nothing, as that of another machine or on a file system without locks, it takes only what nobody changed for a day.

Knows nothing of what the files are for.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from runtime.errors import AotError

_LONGEST_NAME_BYTES = 255 - 22  # what Linux file systems take, less what a temporary file beside it has more
PROBE_BYTES = 4 << 20  # what `refusal` asks of a folder: many times what the files of one kernel take

_UNPROVEN_AFTER_S = 24 * 3600.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class OutputError(AotError):
    """Nothing can be written where the caller asks for it."""


def destination(path: str | os.PathLike[str]) -> Path:
    """The file that an archive written to `path` makes or replaces: the one behind symbolic links, if it is one.

    Raises:
        OutputError: there is something that is no regular file, such as a folder or a device, or no folder to write to.
    """
    name = os.fspath(path)
    if not name:
        raise OutputError("the output has no name; name a file")
    try:
        found = Path(os.path.realpath(name))
        kind = stat.S_IFMT(os.stat(name).st_mode) if os.path.lexists(found) else None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{name}: cannot be written ({reason}); name another output") from None
    if kind == stat.S_IFDIR or name.endswith(os.sep):
        raise OutputError(f"{name}: cannot be written: it is a folder; name a file in it")
    if kind not in (None, stat.S_IFREG):
        raise OutputError(f"{name}: cannot be written: it is there and no regular file; name another output")
    if not found.parent.is_dir():
        raise OutputError(f"{name}: cannot be written: its folder does not exist; make it, or name another output")
    if len(os.fsencode(found.name)) > _LONGEST_NAME_BYTES:
        raise OutputError(f"{name}: cannot be written: its name is too long; name another output")
    if not os.access(found.parent, os.W_OK):
        raise OutputError(f"{name}: cannot be written: its folder is read-only; name another output")
    return found


@contextlib.contextmanager
def file(folder: Path, prefix: str = "", mode: int = 0o600) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file in `folder`, open for writing, with `mode` less the umask. What is not renamed is removed at the end.

    Raises:
        OSError: the file system refuses.
    """
    path, descriptor = _make(folder, prefix, partial(Path.touch, mode=mode, exist_ok=False), os.O_WRONLY)
    try:
        with open(descriptor, "wb") as opened:
            yield path, opened
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def folder(parent: Path, prefix: str = "") -> Iterator[Path]:
    """A new folder in `parent` that only this user may look into. It is removed at the end, with all that it holds.

    Raises:
        OSError: the file system refuses.
    """

    path, descriptor = _make(parent, prefix, partial(Path.mkdir, mode=0o700), os.O_RDONLY)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def collect(parent: Path, prefix: str = "") -> None:
    """Remove what `file` and `folder` made in `parent` with this `prefix`, once its maker is dead.

    Other users' files stay, and so does what the file system keeps: it is nobody's loss.
    """
    form = re.compile(re.escape(prefix) + r"([0-9a-f]{8})[0-9a-f]{8}\.tmp")
    names: list[re.Match[str]] = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        names = [found for entry in entries if (found := form.fullmatch(entry.name))]
    for name in names:
        with contextlib.suppress(OSError):
            _collect(parent / name[0], made_here=name[1] == _boot())


def refusal(folder: Path, prefix: str = "") -> str | None:
    """Why `folder` cannot take a file of `PROBE_BYTES`; None where it can."""
    try:
        with file(folder, prefix) as (_, opened):
            opened.write(os.urandom(PROBE_BYTES))  # which no file system stores in less
            opened.flush()
            os.fsync(opened.fileno())  # some file systems refuse no earlier
    except OSError as error:
        return error.strerror or str(error)
    return None


def _make(parent: Path, prefix: str, create: Callable[[Path], None], flags: int) -> tuple[Path, int]:
    """Create something under a new name, open it with `flags`, and lock it."""
    while True:
        path = parent / f"{prefix}{_boot()}{secrets.token_hex(4)}.tmp"
        create(path)
        with contextlib.suppress(FileNotFoundError):  # another process collected it before it was locked
            descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.lstat(path)
            except BaseException:
                os.close(descriptor)
                raise
            return path, descriptor


def _collect(path: Path, made_here: bool) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or stat.S_IFMT(found.st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its maker lives
            return
        except OSError:
            made_here = False
        if not made_here and time.time() - found.st_mtime < _UNPROVEN_AFTER_S:
            return
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    finally:
        os.close(descriptor)


def _boot() -> str:
    """Eight digits for this machine since it was started, all of whose processes see each other's locks."""
    try:
        name = _BOOT_ID.read_bytes()
    except OSError:
        name = os.uname().nodename.encode()
    return hashlib.sha256(name).hexdigest()[:8]
