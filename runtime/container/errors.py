"""Each way in which an archive can be wrong, or not be had."""

from __future__ import annotations

from ..errors import ArchiveError


class FileUnreadable(ArchiveError):
    """The file is missing, is not a regular file, or the system will not let it be read."""


class NotAnArchive(ArchiveError):
    """The file does not begin as archives do."""


class UnsupportedVersion(ArchiveError):
    """An archive of a format version that this reader does not know."""


class Truncated(ArchiveError):
    """The file ends before the header says it does."""


class TrailingData(ArchiveError):
    """The file goes on after the header says it ends."""


class DigestMismatch(ArchiveError):
    """Bytes that differ from what their SHA-256 was taken of."""


class IndexMalformed(ArchiveError):
    """The index is intact but breaks a rule of the format."""


class BlockMalformed(ArchiveError):
    """A block is intact but does not decompress to exactly what the index declares."""


class DocumentMalformed(ArchiveError):
    """A record or table is intact but is not the canonical JSON object that the index promises."""


# A block, or what is in it, that is not as it was written; a good copy of the file has it.
DAMAGE = (Truncated, DigestMismatch, BlockMalformed)


class SizeLimitExceeded(ArchiveError):
    """A declared size above what this reader will allocate."""


class UnknownEntry(ArchiveError):
    """The archive holds no function or table of the name asked for."""


class ArchiveClosed(ArchiveError):
    """The archive was closed before this read."""
