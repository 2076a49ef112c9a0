"""The archive file, reading side: named blobs in compressed blocks, trusted only after they are checked.

`docs/format.md` gives the layout and what it promises. Nothing here knows what a record, a cubin or a table means,
and nothing that a file holds is ever executed. Digests prove integrity, not origin: whoever can write a file can
also write them. Who opens an archive may have it admitted by the digest of its index, before that is decompressed.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any

import zstandard

from ..errors import ArchiveError
from ..limits import (
    EXPANSION_ALLOWANCE_BYTES,
    INDEX_ALLOWANCE_BYTES,
    MAX_BLOCK_BYTES,
    MAX_EXPANSION,
    MAX_INDEX_BYTES,
    MAX_INDEX_EXPANSION,
    MAX_RECORDS_BLOCK_BYTES,
)
from ..named_tuple import NamedTuple
from . import canonical
from .errors import (
    ArchiveClosed,
    BlockMalformed,
    DigestMismatch,
    DocumentMalformed,
    FileUnreadable,
    IndexMalformed,
    NotAnArchive,
    SizeLimitExceeded,
    TrailingData,
    Truncated,
    UnknownEntry,
    UnsupportedVersion,
)
from .index import RECORDS, TABLES, Blob, Block, FunctionEntry, Index, generation, is_name  # noqa: F401

MAGIC = b"CUTEAOT\0"
FORMAT_VERSION = 1
# magic, format version, index raw length, index offset, index length, SHA-256 of the index as stored
HEADER = struct.Struct("<8sIIQQ32s")
CACHE_BYTES = (
    MAX_BLOCK_BYTES  # of blocks that were decompressed: any one, or four of the size that `aot.pack.write` writes
)


Admit = Callable[[str, str], object]  # of a path and `Archive.digest`; raises for an archive that is not to be read


class Size(NamedTuple):
    """What the blocks of one kind hold: `raw` bytes before compression, `stored` bytes in the file."""

    blobs: int
    raw: int
    stored: int


class Check(NamedTuple):
    """One finding of `Archive.verify`: what was looked at, whether it holds, and what was found."""

    subject: str
    ok: bool
    detail: str


class Archive:
    """An open archive. All methods may be called from any thread.

    Opening reads the header and the index alone; a block is read, checked and decompressed when one of its blobs is
    first asked for. A file replaced by rename stays readable here as it was; one cut short in place gives
    `Truncated`, never a signal.
    """

    def __init__(self, file: io.FileIO, path: str, admit: Admit | None = None) -> None:
        """Read the header and index of `file`; `Archive.open` is the way in."""
        self.path = path
        self._admit = admit
        self._file = file
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._cached_bytes = 0
        self.file_bytes = os.fstat(file.fileno()).st_size
        self.digest, offset, raw_length, data = self._read_header()
        try:
            self._index = Index(_decompress(data, raw_length), HEADER.size)
        except ValueError as error:
            raise IndexMalformed(f"{path}: the index: {error}; build the archive again") from None
        self.blocks, self.functions, self.tables = self._index.blocks, self._index.functions, self._index.tables
        if self._index.end != offset:
            raise IndexMalformed(
                f"{path}: the index: its blocks end at byte {self._index.end}, but it begins at byte {offset}; "
                "build the archive again"
            )
        self._check_sizes()

    @classmethod
    def open(cls, path: str | os.PathLike[str], admit: Admit | None = None) -> Archive:
        """Open the archive at `path`, if `admit` raises nothing when it is called with the path and the digest.

        Raises:
            ArchiveError: one of the subclasses in this module, which names the file and what is wrong with it.
        """
        name = os.fspath(path)
        try:
            file = open(name, "rb", buffering=0, opener=_open_without_waiting)  # noqa: SIM115
        except IsADirectoryError:
            raise FileUnreadable(f"{name}: is a folder; name an .aot file in it") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FileUnreadable(f"{name}: cannot be opened ({reason}); check the path and its permissions") from None
        try:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileUnreadable(f"{name}: is not a regular file; name an .aot file")
            return cls(file, name, admit)
        except BaseException:
            file.close()
            raise

    def _check_sizes(self) -> None:
        """Refuse blocks that would take more memory or time than a file of this size may."""
        for number, block in enumerate(self.blocks):
            most = MAX_RECORDS_BLOCK_BYTES if block.kind == RECORDS else MAX_BLOCK_BYTES
            if (declared := max(block.raw_length, block.length)) > most:
                raise SizeLimitExceeded(
                    f"{self.path}: block {number} of {block.kind} declares {declared} bytes, the limit is {most}; "
                    "build the archive again"
                )
        raw, most = sum(block.raw_length for block in self.blocks), MAX_EXPANSION * self.file_bytes
        if raw > most + EXPANSION_ALLOWANCE_BYTES:
            raise SizeLimitExceeded(
                f"{self.path}: its blocks decompress to {raw} bytes, more than {MAX_EXPANSION} times the file's "
                f"{self.file_bytes}; build the archive again"
            )

    def close(self) -> None:
        """Close the file; what was read stays valid, the next read raises `ArchiveClosed`."""
        with self._lock:
            self._file.close()
            self._cache.clear()
            self._cached_bytes = 0

    def forget_blocks(self) -> None:
        """Give back the memory of blocks that were decompressed; what is read again is decompressed again."""
        with self._lock:
            self._cache.clear()
            self._cached_bytes = 0

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets that have functions here, sorted."""
        return self.functions.targets

    def sizes(self) -> dict[str, Size]:
        """Sizes by kind of block: "records", "tables" and each generation, sorted."""
        sizes = {}
        for kind in sorted({block.kind for block in self.blocks}):
            blocks = [block for block in self.blocks if block.kind == kind]
            columns = ((len(block.blobs), block.raw_length, block.length) for block in blocks)
            sizes[kind] = Size(*map(sum, zip(*columns, strict=True)))
        return sizes

    def entry(self, name: str) -> FunctionEntry:
        """The index entry of function `name`.

        Raises:
            UnknownEntry: there is none.
        """
        try:
            return self.functions[name]
        except KeyError:
            raise UnknownEntry(
                f"{self.path}: has no function {name!r} among its {len(self.functions)}; `aot ls` lists them"
            ) from None

    def blob_entry(self, number: int) -> Blob:
        """Where blob `number` is, and its digest."""
        return self._index.blob(number)

    def blob_lengths(self) -> list[int]:
        """The bytes of each blob, by number."""
        return self._index.lengths()

    def record_digests(self) -> dict[str, str]:
        """The SHA-256 of each function's record, hexadecimal, by name: of thousands sooner than one by one."""
        return self._index.record_digests()

    def record_bytes(self, name: str) -> bytes:
        """The record of function `name` as stored, its digest checked; `record` also checks what it says."""
        return self.blob(self.entry(name).record)

    def record(self, name: str) -> dict[str, Any]:
        """The record of function `name`: a JSON object whose name, target and cubin agree with the index."""
        entry = self.entry(name)
        return self._parse_record(entry, self.blob(entry.record), canonical.loads_for_serving)

    def cubin(self, name: str) -> bytes:
        """The cubin of function `name`, its digest checked."""
        return self.blob(self.entry(name).cubin)

    def table(self, name: str) -> dict[str, Any]:
        """The table `name`, a JSON object.

        Raises:
            UnknownEntry: there is none.
        """
        if name not in self.tables:
            held = ", ".join(self.tables) or "no table at all"
            raise UnknownEntry(f"{self.path}: has no table {name!r}; it holds {held}")
        return self._parse_object(f"table {name}", self.blob(self.tables[name]), canonical.loads_for_serving)

    def blob(self, number: int) -> bytes:
        """Blob `number`, its digest checked."""
        blob = self.blob_entry(number)
        with self._lock:
            raw = self._cache.get(blob.block)
            if raw is None:
                raw = self._read_block(blob.block)
                self._remember(blob.block, raw)
            else:
                self._cache.move_to_end(blob.block)
        return self._extract(number, blob, raw)

    def check_blocks(self) -> None:
        """Hold every block, as it is stored, against its digest: all that damage to a file can do shows here.

        `verify` also looks into the blocks, for what a wrong builder could do; that takes a hundred times as long.

        Raises:
            ArchiveError: one of the subclasses in this module, of the first block that is wrong.
        """
        for index in range(len(self.blocks)):
            with self._lock:
                self._read_stored(index)

    def file_digest(self) -> str:
        """The SHA-256 of the whole file, hexadecimal, each part of which is held against its own digest on the way.

        Raises:
            ArchiveError: one of the subclasses in this module, of the first part that is wrong.
        """
        found = hashlib.sha256(self._header)
        for index in range(len(self.blocks)):
            with self._lock:
                found.update(self._read_stored(index))
        *_, offset, length, digest = HEADER.unpack(self._header)
        with self._lock:
            data = self._read(offset, length)
        if hashlib.sha256(data).digest() != digest:
            raise DigestMismatch(f"{self.path}: the index does not match its SHA-256 any more; copy the file again")
        found.update(data)
        return found.hexdigest()

    def verify(self) -> list[Check]:
        """Read and check everything: each block, each blob, each function's record, each table."""
        checks: list[Check] = []
        documents: dict[int, FunctionEntry | str] = {entry.record: entry for entry in self.functions.values()}
        documents |= {number: name for name, number in self.tables.items()}
        for index, block in enumerate(self.blocks):
            subject = f"block {index} ({block.kind})"
            try:
                with self._lock:
                    raw = self._read_block(index)
                checks.append(Check(subject, True, f"{block.length} bytes, {block.raw_length} decompressed"))
            except ArchiveClosed:
                raise
            except ArchiveError as error:
                checks.append(Check(subject, False, str(error)))
                raw = None
            for number in block.blobs:
                data = self._verify_blob(number, raw, checks)
                if number in documents:
                    self._verify_document(documents[number], data, checks)
        return checks

    def _verify_blob(self, number: int, raw: bytes | None, checks: list[Check]) -> bytes | None:
        blob = self.blob_entry(number)
        subject = f"blob {number} ({self.blocks[blob.block].kind})"
        if raw is None:
            checks.append(Check(subject, False, f"block {blob.block} cannot be read"))
            return None
        try:
            data = self._extract(number, blob, raw)
        except ArchiveError as error:
            checks.append(Check(subject, False, str(error)))
            return None
        checks.append(Check(subject, True, f"{blob.length} bytes, sha256 {blob.sha256}"))
        return data

    def _verify_document(self, of: FunctionEntry | str, data: bytes | None, checks: list[Check]) -> None:
        subject = f"table {of}" if isinstance(of, str) else f"record {of.name}"
        if data is None:
            checks.append(Check(subject, False, "its blob cannot be read"))
            return
        try:
            if isinstance(of, str):
                obj = self._parse_object(subject, data, canonical.loads)
            else:
                obj = self._parse_record(of, data, canonical.loads)
        except ArchiveError as error:
            checks.append(Check(subject, False, str(error)))
        else:
            checks.append(Check(subject, True, f"a JSON object of {len(obj)} fields"))

    def _parse_object(self, subject: str, data: bytes, loads: Callable[[bytes], Any]) -> dict[str, Any]:
        try:
            obj = loads(data)
        except ValueError as error:
            raise DocumentMalformed(f"{self.path}: {subject}: {error}; build the archive again") from None
        if not isinstance(obj, dict):
            raise DocumentMalformed(
                f"{self.path}: {subject} is a JSON {type(obj).__name__}, not an object; build the archive again"
            )
        return obj

    def _parse_record(self, entry: FunctionEntry, data: bytes, loads: Callable[[bytes], Any]) -> dict[str, Any]:
        obj = self._parse_object(f"record {entry.name}", data, loads)
        expected = {"name": entry.name, "target": entry.target, "cubin": self.blob_entry(entry.cubin).sha256}
        for key, value in expected.items():
            if obj.get(key) != value:
                raise DocumentMalformed(
                    f"{self.path}: record {entry.name}: its {key} is {obj.get(key)!r:.100} where the index has "
                    f"{value!r}; build the archive again"
                )
        return obj

    def _extract(self, number: int, blob: Blob, raw: bytes) -> bytes:
        data = raw[blob.offset : blob.offset + blob.length]
        found = hashlib.sha256(data).hexdigest()
        if found != blob.sha256:
            raise DigestMismatch(
                f"{self.path}: blob {number} has SHA-256 {found}, the index has {blob.sha256}; build the archive again"
            )
        return data

    def _read_block(self, index: int) -> bytes:
        """Read, check and decompress one block; the caller holds the lock."""
        try:
            return _decompress(self._read_stored(index), self.blocks[index].raw_length)
        except ValueError as error:
            raise BlockMalformed(f"{self.path}: block {index}: {error}; build the archive again") from None

    def _read_stored(self, index: int) -> bytes:
        """Read and check one block, compressed as it is; the caller holds the lock."""
        block = self.blocks[index]
        data = self._read(block.offset, block.length)
        found = hashlib.sha256(data).hexdigest()
        if found != block.sha256:
            raise DigestMismatch(
                f"{self.path}: block {index} has SHA-256 {found}, the index has {block.sha256}; copy the file again"
            )
        return data

    def _remember(self, index: int, raw: bytes) -> None:
        self._cache[index] = raw
        self._cached_bytes += len(raw)
        while self._cached_bytes > CACHE_BYTES:
            self._cached_bytes -= len(self._cache.popitem(last=False)[1])

    def _read(self, offset: int, length: int) -> bytes:
        """Read by position, not by memory map: a file cut short in place must not kill the process."""
        if self._file.closed:
            raise ArchiveClosed(f"{self.path}: was closed; open it again")
        parts, end = [], offset + length
        try:
            while offset < end:
                part = os.pread(self._file.fileno(), end - offset, offset)
                if not part:
                    raise Truncated(f"{self.path}: was cut short after it was opened, before byte {end}; copy it again")
                parts.append(part)
                offset += len(part)
        except OSError as error:
            raise FileUnreadable(f"{self.path}: cannot be read ({error.strerror}); check the file system") from None
        return b"".join(parts)

    def _read_header(self) -> tuple[str, int, int, bytes]:
        """The digest, offset, raw length and stored bytes of the index."""
        path, size = self.path, self.file_bytes
        head = self._read(0, min(size, HEADER.size))
        if not MAGIC.startswith(head[: len(MAGIC)]):
            raise NotAnArchive(
                f"{path}: begins with {head[: len(MAGIC)]!r}, not {MAGIC!r}, so it is no archive; name an .aot file"
            )
        if size < HEADER.size:
            raise Truncated(f"{path}: has {size} bytes, less than a header of {HEADER.size}; copy it again")
        self._header = head
        _, version, raw_length, offset, length, digest = HEADER.unpack(head)
        if version != FORMAT_VERSION:
            raise UnsupportedVersion(
                f"{path}: has format version {version}, this cute-aot reads {FORMAT_VERSION}; "
                "install the cute-aot that wrote it, or build the archive again"
            )
        if size < offset + length:
            raise Truncated(f"{path}: has {size} bytes, its header promises {offset + length}; copy it again")
        if size > offset + length:
            raise TrailingData(f"{path}: has {size} bytes, its header promises {offset + length}; copy it again")
        self._check_index_size(length)
        data = self._read(offset, length)
        if hashlib.sha256(data).digest() != digest:
            raise DigestMismatch(f"{path}: the index does not match its SHA-256; copy the file again")
        if self._admit is not None:
            self._admit(path, digest.hex())
        if (declared := _declared_bytes(data)) not in (None, raw_length):  # no digest covers the header
            raise IndexMalformed(
                f"{path}: the index: its zstd frame declares {declared} bytes, the header {raw_length}; "
                "copy the file again"
            )
        self._check_index_size(raw_length)
        if raw_length > MAX_INDEX_EXPANSION * length + INDEX_ALLOWANCE_BYTES:
            raise SizeLimitExceeded(
                f"{path}: declares an index that decompresses from {length} to {raw_length} bytes, more than "
                f"{MAX_INDEX_EXPANSION} times as many; build the archive again"
            )
        return digest.hex(), offset, raw_length, data

    def _check_index_size(self, length: int) -> None:
        if length > MAX_INDEX_BYTES:
            raise SizeLimitExceeded(
                f"{self.path}: declares an index of {length} bytes, the limit is {MAX_INDEX_BYTES}; split the archive"
            )


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a named pipe would wait for a writer


def _declared_bytes(frame: bytes) -> int | None:
    """How many bytes a zstd frame says it holds; None of what is no frame."""
    try:
        return zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError:
        return None


def _decompress(data: bytes, raw_length: int) -> bytes:
    """Decompress one zstd frame that says it holds `raw_length` bytes and does; anything else is a ValueError."""
    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size != raw_length or frame.dict_id:
            raise ValueError(f"its zstd frame declares {frame.content_size} bytes, the archive {raw_length}")
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=raw_length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"it does not decompress ({error})") from None
    if len(raw) != raw_length:
        raise ValueError(f"it decompresses to {len(raw)} bytes, not {raw_length}")
    return raw
