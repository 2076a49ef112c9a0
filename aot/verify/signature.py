"""Whether a signature is of an archive, all its digests included: what `aot verify --key` looks at besides the archive.

A server compares the digest of the index alone, from which the others follow.
"""

from __future__ import annotations

from runtime.container.archive import Archive
from runtime.errors import ArchiveError, SignatureError
from runtime.signing.check import Accepted
from runtime.signing.keys import TrustedKeys

from ..sign.contents_digest import contents_digest
from .archive import Finding

SUBJECT = "signature"


class NotSigned(SignatureError):
    """The archive is another than the one that was signed."""


def require_of(accepted: Accepted, path: str, digest: str) -> None:
    """Admit an archive that was signed; how `Archive.open` asks.

    Raises:
        NotSigned: another was.
    """
    if accepted.release.index_digest != digest:
        raise NotSigned(f"is of an archive with the digest {accepted.release.index_digest}, {path} has {digest}")


def finding(accepted: Accepted, archive: Archive, trusted: TrustedKeys) -> Finding:
    """What the signature of an archive that was admitted says, and whether its other digests hold."""
    release = accepted.release
    try:
        file = archive.file_digest()
    except ArchiveError as error:
        return Finding(SUBJECT, False, str(error))
    held = {"sha256": file, "aotContents": contents_digest(archive)}
    said = {"sha256": release.file_digest, "aotContents": release.contents_digest}
    for field, value in held.items():
        if said[field] != value:
            return Finding(SUBJECT, False, f"its {field} is {said[field]}, of the archive it is {value}; sign it again")
    until = "" if release.expires is None else f", until {release.expires:%Y-%m-%d %H:%M:%S} UTC"
    keys = ", ".join(f"{key_id} ({trusted.files[key_id]})" for key_id in accepted.key_ids)
    return Finding(SUBJECT, True, f"{release.name} version {release.version}{until}, by {keys}")


def finding_of_another(accepted: Accepted, archive: Archive, error: NotSigned) -> Finding:
    """What is wrong with the signature of an archive that was not admitted: whether just the bytes differ."""
    same = accepted.release.contents_digest == contents_digest(archive)
    if same and all(check.ok for check in archive.verify()):
        return Finding(
            SUBJECT,
            False,
            f"{error}; both hold the same, compressed or ordered in another way: to serve this one, sign it",
        )
    return Finding(SUBJECT, False, f"{error}; they do not hold the same: copy both files again, or sign this one")
