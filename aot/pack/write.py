"""Write an archive: `docs/format.md` gives the layout, `runtime.container.archive` reads it.

Knows of a record only its name, target, cubin digest and family, and of tables which is in a block of its own; what
functions and tables mean is not its subject.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from runtime.container import canonical
from runtime.container.archive import FORMAT_VERSION, HEADER, MAGIC, Archive
from runtime.container.errors import SizeLimitExceeded
from runtime.container.index import RECORDS, TABLES, TARGET, generation, is_name
from runtime.errors import AotError, ArchiveError
from runtime.limits import MAX_BLOCK_BYTES, MAX_INDEX_BYTES, MAX_RECORDS_BLOCK_BYTES

from .. import files
from ..compile.cache import Cache
from ..compile.cache import Entry as CacheEntry
from .tuning_table import HISTORY

SOLID_BLOCK_BYTES = 8 << 20
# Records are alike enough to lose 2% by smaller blocks, and a first launch reads one block of each kind.
RECORDS_BLOCK_BYTES = MAX_RECORDS_BLOCK_BYTES
COMPRESSION_LEVEL = 19
MAX_THREADS = 8  # each may take 100 MB at this level
_ALONE = HISTORY  # the table in a block of its own: it may be large, and no server reads it
_BLOCK_SCHEMA = 1  # raised when the way from blobs to a compressed block changes


class PackError(AotError):
    """What was given cannot go into an archive, or the archive cannot be written."""


class _Function(NamedTuple):
    target: str
    family: str
    record: bytes
    cubin: str


class _Blob(NamedTuple):
    kind: str
    sha256: str
    data: bytes
    alone: bool = False


class Package:
    """The functions and tables of an archive to be.

    The same content gives the same bytes, in whatever order it was added, with the same version of zstd.
    """

    def __init__(self) -> None:
        self._functions: dict[str, _Function] = {}
        self._cubins: dict[str, bytes] = {}
        self._tables: dict[str, bytes] = {}

    def add_function(self, record: dict[str, Any], cubin: bytes, encoded: bytes = b"") -> None:
        """Add a function; the same one again changes nothing.

        `record` is any JSON object with "name", "target" and "cubin", the SHA-256 of `cubin` in hexadecimal, and
        perhaps "family", a string that puts similar cubins next to each other. `encoded` is the record as canonical
        JSON, of a caller who has that and vouches for it.

        Raises:
            PackError: the record does not fit this description or its cubin, or its name is taken.
        """
        data = encoded or _encode("a function's record", record, MAX_RECORDS_BLOCK_BYTES)
        _require_size("a function's record", data, MAX_RECORDS_BLOCK_BYTES)
        name, target, family = record.get("name"), record.get("target"), record.get("family", "")
        if not isinstance(name, str) or not is_name(name):
            raise PackError(f"a function's name must be 1 to 255 printable ASCII characters, found {name!r}")
        if not isinstance(target, str) or not TARGET.fullmatch(target):
            raise PackError(f"function {name}: its target must be like 'sm_90a', found {target!r}")
        if not isinstance(family, str):
            raise PackError(f"function {name}: its family must be a string, found {family!r}")
        _require_size(f"function {name}: its cubin", cubin)
        digest = hashlib.sha256(cubin).hexdigest()
        if record.get("cubin") != digest:
            raise PackError(
                f"function {name}: its record names cubin {record.get('cubin')!r}, "
                f"but the cubin given has SHA-256 {digest}"
            )
        function = _Function(target, family, data, digest)
        if self._functions.setdefault(name, function) != function:
            raise PackError(f"function {name}: a different one of this name was added before; rename one")
        self._cubins[digest] = bytes(cubin)

    def set_table(self, name: str, obj: dict[str, Any]) -> None:
        """Set table `name`, replacing what it was.

        Raises:
            PackError: it cannot have that name, is no JSON object, or is larger than readers accept.
        """
        if not is_name(name):
            raise PackError(f"a table's name must be 1 to 255 printable ASCII characters, found {name!r}")
        self._tables[name] = _encode(f"table {name}", obj)

    def add_archive(self, archive: Archive, names: Iterable[str] | None = None) -> None:
        """Add the functions `names` of an open archive, or all of them.

        Tables stay behind: they speak of functions, and only their owner knows how to merge or prune them.
        """
        entries = [archive.entry(name) for name in (archive.functions if names is None else names)]
        for entry in sorted(entries, key=lambda entry: entry.cubin):
            self.add_function(archive.record(entry.name), archive.cubin(entry.name))

    def write(self, path: str | os.PathLike[str], level: int = COMPRESSION_LEVEL, cache: Cache | None = None) -> None:
        """Write the archive to `path`, whole or not at all; a file that is already there is replaced.

        With a build cache, blocks that were compressed before are taken from it, and others kept there.

        Raises:
            OutputError: nothing can be written to `path`.
            PackError: the file system refuses, or the index is larger than readers accept.
            UntrustedCache: others may write to the cache directory.
        """
        target = files.destination(path)
        blocks, index = self._encode(level, cache)
        try:
            _write_atomically(target, [_header(index, sum(map(len, blocks))), *blocks, index[1]])
        except OSError as error:
            raise PackError(f"{path}: cannot be written ({error.strerror}); check the folder and its space") from None

    def _encode(self, level: int, cache: Cache | None) -> tuple[list[bytes], tuple[int, bytes]]:
        """The compressed blocks, and the index as its raw length and its compressed bytes."""
        functions = sorted(self._functions.items(), key=lambda item: (item[1].target, item[0]))
        cubins = {(generation(f.target), f.cubin): None for _, f in sorted(functions, key=_order)}
        blobs = [
            *(_blob(RECORDS, function.record) for _, function in functions),
            *(_Blob(kind, digest, self._cubins[digest]) for kind, digest in cubins),
            *(_blob(TABLES, data, name == _ALONE) for name, data in sorted(self._tables.items())),
        ]
        groups = list(_solid_blocks(blobs))
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
            blocks = list(pool.map(partial(_compress_blobs, level=level, cache=cache), groups))
        head = {
            "blocks": [
                {"blobs": len(group), "kind": group[0].kind, "length": len(block)}
                for group, block in zip(groups, blocks, strict=True)
            ],
            "functions": Counter(function.target for _, function in functions),
            "tables": sorted(self._tables),
        }
        number = {cubin: i for i, cubin in enumerate(cubins, start=len(functions))}
        columns = [
            *(len(blob.data) for blob in blobs),
            *(number[generation(function.target), function.cubin] for _, function in functions),
        ]
        digests = [*map(_sha256, blocks), *(blob.sha256 for blob in blobs)]
        index = b"".join(
            [
                canonical.dumps(head) + b"\n",
                " ".join(name for name, _ in functions).encode() + b"\n",
                struct.pack(f"<{len(columns)}I", *columns),
                bytes.fromhex("".join(digests)),
            ]
        )
        if len(index) > MAX_INDEX_BYTES:
            raise PackError(
                f"the index of {len(functions)} functions has {len(index)} bytes, the limit is "
                f"{MAX_INDEX_BYTES}; split the archive"
            )
        return blocks, (len(index), _compress(index, level))


def _order(item: tuple[str, _Function]) -> tuple[str, str, str]:
    """Similar cubins next to each other: a name ends in its target, so that twins for two targets are neighbours."""
    name, function = item
    return generation(function.target), function.family, name


def _encode(subject: str, obj: dict[str, Any], most: int = MAX_BLOCK_BYTES) -> bytes:
    if not isinstance(obj, dict):
        raise PackError(f"{subject} must be a dict, found {type(obj).__name__}")
    try:
        data = canonical.dumps(obj)
    except (TypeError, ValueError) as error:
        raise PackError(f"{subject} is not JSON: {error}") from None
    _require_size(subject, data, most)
    return data


def _require_size(subject: str, data: bytes, most: int = MAX_BLOCK_BYTES) -> None:
    if not 0 < len(data) <= most:
        raise PackError(f"{subject} has {len(data)} bytes; it must have 1 to {most}")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _blob(kind: str, data: bytes, alone: bool = False) -> _Blob:
    return _Blob(kind, _sha256(data), data, alone)


def _solid_blocks(blobs: list[_Blob]) -> Iterator[list[_Blob]]:
    """Cut `blobs` into runs of one kind, of bounded size; a larger blob, or one that is `alone`, is one by itself."""
    group: list[_Blob] = []
    size = 0
    for blob in blobs:
        most = RECORDS_BLOCK_BYTES if blob.kind == RECORDS else SOLID_BLOCK_BYTES
        apart = blob.alone or (group and group[-1].alone)
        if group and (apart or blob.kind != group[0].kind or size + len(blob.data) > most):
            yield group
            group, size = [], 0
        group.append(blob)
        size += len(blob.data)
    if group:
        yield group


def _compress_blobs(blobs: list[_Blob], level: int, cache: Cache | None) -> bytes:
    """The block of `blobs`, from the cache or made here; it decompresses to exactly these."""
    raw = b"".join(blob.data for blob in blobs)
    fields = {"block": _BLOCK_SCHEMA, "zstd": list(zstandard.ZSTD_VERSION), "level": level}

    def check(entry: CacheEntry) -> None:
        if entry.record != fields or not _holds(entry.cubin, raw):
            raise ValueError("does not hold the block that its name stands for")

    key = canonical.digest(fields | {"blobs": [blob.sha256 for blob in blobs]})
    if cache is not None and (found := cache.get(key, check)):
        return found.cubin
    compressed = _compress(raw, level)
    if not _holds(compressed, raw):
        raise PackError("a block does not decompress to what was compressed; check this machine's memory and its zstd")
    if cache is not None:
        cache.put(key, CacheEntry(fields, compressed))
    return compressed


def _holds(block: bytes, raw: bytes) -> bool:
    """Whether `block` is one zstd frame that says how long `raw` is, and decompresses to it."""
    try:
        frame = zstandard.get_frame_parameters(block)
        if frame.content_size != len(raw) or frame.dict_id:
            return False
        return zstandard.ZstdDecompressor().decompress(block, allow_extra_data=False) == raw
    except zstandard.ZstdError:
        return False


def _compress(data: bytes, level: int) -> bytes:
    """One zstd frame whose window is all of `data`, so that the last blob can refer to the first.

    As a stream of known length, not at once: zstd then splits it otherwise, and real cubins take 3% less.
    """
    window_log = max(10, (len(data) - 1).bit_length())
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, source_size=len(data), window_log=window_log, write_content_size=True
    )
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=len(data))
    return stream.compress(data) + stream.flush()


def _header(index: tuple[int, bytes], blocks_bytes: int) -> bytes:
    raw_length, data = index
    digest = hashlib.sha256(data).digest()
    return HEADER.pack(MAGIC, FORMAT_VERSION, raw_length, HEADER.size + blocks_bytes, len(data), digest)


def _write_atomically(destination: Path, parts: list[bytes]) -> None:
    prefix = f".{destination.name}."
    files.collect(destination.parent, prefix)
    with files.file(destination.parent, prefix, mode=0o666) as (written, file):
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
        try:
            with Archive.open(written) as archive:  # nothing that the reader refuses takes the place of a good file
                archive.check_blocks()
        except ArchiveError as error:
            reason = str(error).removeprefix(f"{written}: ").partition(";")[0]
            remedy = "split the archive" if isinstance(error, SizeLimitExceeded) else "check the disk"
            raise PackError(f"{destination}: what was written cannot be read back ({reason}); {remedy}") from None
        os.replace(written, destination)
    _sync_directory(destination.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what file systems answer that cannot sync a directory
            raise
    finally:
        os.close(descriptor)
