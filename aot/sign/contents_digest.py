"""The digest of what an archive holds, whatever it was compressed with.

Knows nothing of signatures.
"""

from __future__ import annotations

import hashlib

from runtime.container import canonical
from runtime.container.archive import Archive


def contents_digest(archive: Archive) -> str:
    """The SHA-256, hexadecimal, of the canonical JSON of two objects: "functions" has for each name its target and the
    SHA-256 of its record and of its cubin, "tables" the SHA-256 of each by name.

    Two archives have the same if they hold the same, in whatever blocks and by whatever version of zstd. It is taken of
    the index alone: no block is read.
    """
    records = archive.record_digests()
    functions = {
        name: [entry.target, records[name], archive.blob_entry(entry.cubin).sha256]
        for name, entry in archive.functions.items()
    }
    tables = {name: archive.blob_entry(number).sha256 for name, number in archive.tables.items()}
    return hashlib.sha256(canonical.dumps({"functions": functions, "tables": tables})).hexdigest()
