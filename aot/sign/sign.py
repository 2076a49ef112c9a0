"""A signature of an archive: the statement on it, in an envelope that one or several keys sign."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.container.archive import Archive
from runtime.errors import ArchiveError, SignatureError
from runtime.limits import MAX_ENVELOPE_BYTES, MAX_SIGNATURES
from runtime.signing import envelope
from runtime.signing.statement import PAYLOAD_TYPE, Release, name_of, version_of

from .. import files
from .contents_digest import contents_digest

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner


@dataclass(frozen=True)
class Naming:
    """What the signer says of an archive: its `name` and `version`, and in UTC when it is signed and until when that
    holds; None is for ever."""

    name: str
    version: int
    signed_on: datetime
    expires: datetime | None = None


def release_of(archive: Archive, naming: Naming, provenance: dict[str, Any]) -> Release:
    """The statement on an archive, all of which is held against its digests first.

    Raises:
        ArchiveError: the archive is damaged.
        SignatureError: the name or the version is none, or it would have expired when it is signed.
    """
    file = archive.file_digest()
    for check in archive.verify():
        if not check.ok:
            raise ArchiveError(check.detail)
    try:
        name, version = name_of(naming.name), version_of(naming.version)
    except ValueError as error:
        raise SignatureError(f"{archive.path}: {error}") from None
    if naming.expires is not None and naming.expires <= naming.signed_on:
        raise SignatureError(
            f"{archive.path}: would expire on {naming.expires:%Y-%m-%d %H:%M:%S} UTC, which is over; give a later date"
        )
    contents = contents_digest(archive)
    return Release(name, version, file, archive.digest, contents, naming.signed_on, naming.expires, provenance)


def signed(release: Release, signers: Sequence[CryptoSigner]) -> bytes:
    """The signature file: an envelope with a signature by each key.

    Raises:
        SignatureError: there are too many keys, or it would be larger than a server reads.
    """
    from securesystemslib.dsse import Envelope

    if len(signers) > MAX_SIGNATURES:
        raise SignatureError(f"{len(signers)} keys were given; at most {MAX_SIGNATURES} sign an archive")
    made = Envelope(release.to_bytes(), PAYLOAD_TYPE, {})
    for signer in signers:
        made.sign(signer)
    data = envelope.to_bytes(made)
    if len(data) > MAX_ENVELOPE_BYTES:
        raise SignatureError(
            f"the signature would have {len(data)} bytes, and servers read {MAX_ENVELOPE_BYTES}; give shorter commands"
        )
    return data


def write(path: Path, data: bytes) -> None:
    """Write a signature file, whole or not at all.

    Raises:
        OutputError: there is no such place, or the file system refuses.
    """
    found = files.destination(path)
    try:
        with files.file(found.parent, f"{found.name}.", 0o666) as (temporary, opened):
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
            os.replace(temporary, found)
    except OSError as error:
        raise files.OutputError(f"{path}: cannot be written ({error.strerror}); name another output") from None
