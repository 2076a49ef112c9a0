"""The build cache: compiled kernels and compressed blocks on disk, named by everything that decided them.

A key is the SHA-256 of labelled fields, so whatever is not among `KeyFields` must not change what is compiled. An entry
carries a digest of itself and of its key: a damaged or misplaced one is dropped and never served. Entries are written
whole or not at all, so any number of builders may share a directory; two that compile the same variant both do the work
and one entry results. Nothing here removes entries of old keys: delete the directory to reclaim its space.

Knows nothing of compilers or processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from runtime import canonical
from runtime.errors import AotError

# Raised when the layout of an entry or the meaning of a field changes.
SCHEMA_VERSION = 1

_MAGIC = b"AOTCACHE"
# magic, SHA-256 of the key and all that follows, length of the record; then the record and the cubin
_HEADER = struct.Struct("<8s32sI")
_KEY_CHARACTERS = 64


class CacheError(AotError):
    """The cache directory cannot be read or written, or a key cannot be made."""


class DamagedEntry(CacheError):
    """An entry was not what was written; it has been removed."""


@dataclass(frozen=True)
class KeyFields:
    """Every fact that a compiled kernel depends on.

    `variant` as JSON; `name` and `family` are what its record says; `wheels` holds the version of every installed
    distribution that code generation lives in; `provider` the digest of the provider's sources; `sources` the digest of
    each of this project's own files that a worker runs.
    """

    schema: int
    variant: dict[str, Any]
    name: str
    target: str
    python: str
    wheels: dict[str, str]
    provider: str
    extraction: int
    options: tuple[str, ...]
    sources: dict[str, str]


def cache_key(fields: KeyFields) -> str:
    """The key of a kernel, in hexadecimal: equal for equal fields and only for them.

    Raises:
        CacheError: a field is empty or of a type that has no one canonical form.
    """
    labelled = asdict(fields)
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


class Entry(NamedTuple):
    """A compiled kernel: its record, and its binary. Or a block of an archive: how it was compressed, and its bytes."""

    record: dict[str, Any]
    cubin: bytes


class Cache:
    """A directory of entries. Making this object touches no file; the directory appears with the first entry."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        if not os.fspath(directory):
            raise CacheError("the cache directory has no name; name a directory")
        self.directory = Path(directory)

    def path(self, key: str) -> Path:
        """Where the entry of `key` is, if there is one."""
        if len(key) != _KEY_CHARACTERS or not set(key) <= set("0123456789abcdef"):
            raise CacheError(f"a cache key is {_KEY_CHARACTERS} hexadecimal digits, found {key!r:.100}")
        return self.directory / key[:2] / f"{key[2:]}.kernel"

    def get(self, key: str) -> Entry | None:
        """The entry of `key`, or None where there is none.

        Raises:
            DamagedEntry: there was one, and it was damaged; the next call gives None.
            CacheError: the file system refuses.
        """
        path = self.path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refused(path, "read", error) from None
        try:
            return _decode(key, data)
        except ValueError as error:
            try:
                path.unlink(missing_ok=True)
            except OSError as refusal:
                raise self._refused(path, "removed", refusal) from None
            raise DamagedEntry(f"{path}: {error}; it was removed") from None

    def put(self, key: str, entry: Entry) -> None:
        """Store the entry of `key`, in place of what is there.

        Raises:
            CacheError: the file system refuses.
        """
        path = self.path(key)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(_encode(key, entry))
            os.replace(temporary, path)
        except OSError as error:
            raise self._refused(path, "written", error) from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _refused(self, path: Path, verb: str, error: OSError) -> CacheError:
        return CacheError(f"{path}: cannot be {verb} ({error.strerror}); check the cache directory or name another")


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
    return Entry(json.loads(body[:record_bytes]), body[record_bytes:])
