"""The build cache: compiled kernels and compressed blocks on disk, named by everything that decided them.

A key is the SHA-256 of labelled fields, so whatever is not among `KeyFields` and `ToolFields` must not change what is
compiled. An entry carries a digest of itself and of its key, and whoever asks for it says what else it must be: one
that was damaged, moved or made for something else is dropped and never served. Entries are written whole or not at
all, so any number of builders may share a directory; two that compile the same variant both do the work and one entry
results. Nothing here removes entries of old keys: `aot cache prune` does, by age.

A cache is a convenience. What the file system refuses, and each entry that is dropped, is a warning, and the work is
done without it. What is not promised: who may write to the directory can sign a wrong kernel so that nothing here
notices. So one that others may write to is an error, and folders are made for this user alone.

Knows nothing of compilers or processes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shlex
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.container import canonical
from runtime.errors import AotError
from runtime.limits import MAX_BLOCK_BYTES, MAX_RECORDS_BLOCK_BYTES

from .. import files

# Raised when the layout of an entry or the meaning of a field changes.
SCHEMA_VERSION = 2
MAX_ENTRY_BYTES = MAX_BLOCK_BYTES + MAX_RECORDS_BLOCK_BYTES + (1 << 20)  # a cubin and its record, or a block

_MAGIC = b"AOTCACHE"
# magic, SHA-256 of the key and all that follows, length of the record; then the record and the cubin
_HEADER = struct.Struct("<8s32sI")
_KEY_CHARACTERS = 64


class CacheError(AotError):
    """A key cannot be made, or the cache directory has no name."""


class UntrustedCache(CacheError):
    """Others may write to the cache directory, and so decide what is shipped."""


def default_directory() -> Path | None:
    """Where the build cache is unless another place is named: `cute-aot` in `$XDG_CACHE_HOME` or `~/.cache`; None where
    this user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(RuntimeError):
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "cute-aot"
    return None


@dataclass(frozen=True)
class ToolFields:
    """Every fact that all compiled kernels of a build depend on.

    `wheels` holds the version and the digest of the contents of every installed distribution that code generation lives
    in; `sources` the digest of each of this project's own files that a worker runs.
    """

    schema: int
    python: str
    wheels: dict[str, str]
    extraction: int
    options: tuple[str, ...]
    sources: dict[str, str]


@dataclass(frozen=True)
class KeyFields:
    """Every fact that one compiled kernel depends on.

    `tools` is the key of `ToolFields`; `variant` as JSON; `name` and `target` are what its record says; `sources` the
    digest of what its provider makes the variant's family of.
    """

    tools: str
    variant: dict[str, Any]
    name: str
    target: str
    sources: str


def cache_key(fields: KeyFields | ToolFields) -> str:
    """The key of a kernel, or of tools, in hexadecimal: equal for equal fields and only for them.

    Raises:
        CacheError: a field is empty or of a type that has no one canonical form.
    """
    labelled = vars(fields)
    for label, value in labelled.items():
        _require_fingerprint(label, value)
    return canonical.digest(labelled)


def _require_fingerprint(label: str, value: Any) -> None:
    """Refuse what would give different things one name: nothing, empty text, a float, an object's repr."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            if not isinstance(name, str):
                raise CacheError(f"the cache key's {label} has the name {name!r}, which is no text; use text")
            _require_fingerprint(f"{label}.{name}", item)
    elif isinstance(value, list | tuple) and value:
        for i, item in enumerate(value):
            _require_fingerprint(f"{label}[{i}]", item)
    elif type(value) not in (str, int, bool) or value == "":
        raise CacheError(f"the cache key's {label} is {value!r}, which names nothing; give text or an integer")


@dataclass(frozen=True)
class Entry:
    """A compiled kernel: its record, and its binary. Or a block of an archive: how it was compressed, and its bytes.

    `encoded` is the record as canonical JSON, where it was read from a cache, and else empty.
    """

    record: dict[str, Any]
    cubin: bytes
    encoded: bytes = field(default=b"", compare=False, repr=False)


class Cache:
    """A directory of entries; with None for a directory nothing is kept.

    Making this object touches no file; the directory appears with the first entry. `warn` hears of each entry that is
    dropped, and once of the first thing that the file system refuses. Any thread may call any method.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None, warn: Callable[[str], None] = lambda message: None
    ) -> None:
        if directory is not None and (not os.fspath(directory) or "\0" in os.fspath(directory)):
            raise CacheError(f"the cache directory has no name that can be: {directory!r:.100}; name a directory")
        self.directory = None if directory is None else Path(directory)
        self._warn = warn
        self._fit: set[Path] = set()
        self._lock = threading.Lock()
        self._has_warned = False
        self._takes_entries = True

    def path(self, key: str, kind: str = "kernel") -> Path:
        """Where the entry of `key` is, if there is one. `kind` is a word that its file's name ends in."""
        if len(key) != _KEY_CHARACTERS or not set(key) <= set("0123456789abcdef"):
            raise CacheError(f"a cache key is {_KEY_CHARACTERS} hexadecimal digits, found {key!r:.100}")
        if self.directory is None:
            raise CacheError("a cache without a directory has no entries; name a directory")
        return self.directory / key[:2] / f"{key[2:]}.{kind}"

    def get(self, key: str, check: Callable[[Entry], None] = lambda entry: None, kind: str = "kernel") -> Entry | None:
        """The entry of `key`, or None where there is none that is what was written and that `check` takes.

        `check` raises ValueError or AotError where an entry is not what was asked for.

        Raises:
            UntrustedCache: others may write to the directory.
        """
        if self.directory is None:
            self._go_without("there is no home directory to keep it in", "name a directory")
            return None
        path = self.path(key, kind)
        try:
            if self._is_there(self.directory) and self._is_there(path.parent):
                entry = _decode(key, _read(path))
                check(entry)
                return entry
        except FileNotFoundError:
            pass
        except OSError as error:
            self._refused(path, "read", error)
        except UntrustedCache:
            raise
        except (ValueError, AotError) as error:
            self._drop(path, error)
        return None

    def put(self, key: str, entry: Entry, kind: str = "kernel") -> None:
        """Store the entry of `key`, in place of what is there, if that can be.

        Raises:
            UntrustedCache: others may write to the directory.
        """
        if self.directory is None or not self._takes_entries:
            return
        path = self.path(key, kind)
        try:
            self._make(self.directory)
            self._make(path.parent)
            with files.file(self.directory) as (written, file):
                file.write(_encode(key, entry))
                file.flush()
                os.replace(written, path)
        except OSError as error:
            self._takes_entries = False
            self._refused(path, "written", error)

    def _is_there(self, folder: Path) -> bool:
        """Whether `folder`, the directory or one in it, exists; what others may write to is an error."""
        if folder in self._fit:
            return True
        is_top = folder == self.directory
        try:
            found = os.stat(folder) if is_top else os.lstat(folder)
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if others := _others_may_write(self.directory or folder, found):
            raise UntrustedCache(f"{folder}: a build cache must be this user's alone, but {others}")
        self._fit.add(folder)
        if is_top:
            files.collect(folder)
        return True

    def _make(self, folder: Path) -> None:
        """Make `folder` and those that it is in, where they do not exist, for this user alone."""
        if self._is_there(folder):
            return
        missing = [folder]
        while not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for one in reversed(missing):
            with contextlib.suppress(FileExistsError):
                one.mkdir(mode=0o700)
        self._is_there(folder)

    def _drop(self, path: Path, reason: Exception) -> None:
        try:
            path.unlink(missing_ok=True)
            done = "it was removed"
        except OSError as error:
            done = f"it cannot be removed ({error.strerror})"
        self._warn(f"{path}: {reason}; {done}, and what it was for is made again")

    def _refused(self, path: Path, verb: str, error: OSError) -> None:
        self._go_without(f"{path}: cannot be {verb} ({error.strerror})", "check that directory or name another")

    def _go_without(self, why: str, remedy: str) -> None:
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            self._warn(f"{why}, and the build goes on without a cache; {remedy}")


def _others_may_write(folder: Path, found: os.stat_result) -> str:
    """How anybody but this user and root may write to what was found, and the remedy; empty where nobody may."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}; name another cache directory"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        remedy = f"run `chmod -R go-w {shlex.quote(str(folder))}` or name another"
        return f"its mode {stat.S_IMODE(found.st_mode):03o} lets others write to it; {remedy}"
    return ""


def _read(path: Path) -> bytes:
    """The bytes of a file that may be an entry; anything else in its place is neither waited for nor followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise ValueError("is no regular file") from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("is no regular file")
        if others := _others_may_write(path, found):
            raise ValueError(others.partition(";")[0])
        if found.st_size > MAX_ENTRY_BYTES:
            raise ValueError(f"has {found.st_size} bytes, the limit is {MAX_ENTRY_BYTES}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(found.st_size)
    finally:
        os.close(descriptor)


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()


def _encode(key: str, entry: Entry) -> bytes:
    record = canonical.dumps(entry.record)
    body = record + entry.cubin
    return _HEADER.pack(_MAGIC, _digest(key, len(record).to_bytes(4, "little") + body), len(record)) + body


def _decode(key: str, data: bytes) -> Entry:
    """Read an entry; a ValueError says what is wrong with it."""
    if len(data) < _HEADER.size:
        raise ValueError(f"has {len(data)} bytes, fewer than a header")
    magic, digest, record_bytes = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if magic != _MAGIC or digest != _digest(key, record_bytes.to_bytes(4, "little") + body):
        raise ValueError("does not match its digest")
    encoded = body[:record_bytes]
    record = canonical.loads_for_serving(encoded)
    if not isinstance(record, dict):
        raise ValueError(f"its record is a JSON {type(record).__name__}, not an object")
    return Entry(record, body[record_bytes:], encoded)
