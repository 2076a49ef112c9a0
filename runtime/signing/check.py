"""Whether an archive may be served: its detached signature, held against the keys and the policy of a deployment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime, timezone

from ..errors import SignatureError
from ..limits import MAX_ENVELOPE_BYTES
from . import envelope, statement
from .files import read_small
from .keys import TrustedKeys
from .statement import Release

SUFFIX = ".sig"
_ADVICE = "sign the archive (`aot sign`), and put the signature beside it"


@dataclass(frozen=True)
class Accepted:
    """What was signed, and the identifiers of the trusted keys that signed it."""

    release: Release
    key_ids: tuple[str, ...]


def signature_path(archive: str | os.PathLike[str]) -> str:
    """Where the signature of an archive lies: model.aot.sig beside model.aot."""
    return os.fsdecode(archive) + SUFFIX


def check(archive: str, digest: str, trusted: TrustedKeys, now: datetime | None = None) -> Accepted:
    """Accept the archive at the path `archive`, which `digest` names, as `Archive.digest` does, by the signature beside
    it. `now` is the time, by default the clock's.

    Raises:
        SignatureError: as `accepted` has it, or the signature is of another archive.
    """
    path = signature_path(archive)
    found = accepted(path, trusted, now)
    if found.release.index_digest != digest:
        raise SignatureError(
            f"{path}: is of an archive with the digest {found.release.index_digest}, {archive} has {digest}; copy both "
            "files again, or sign this one"
        )
    return found


def accepted(path: str, trusted: TrustedKeys, now: datetime | None = None) -> Accepted:
    """What the signature at `path` says, whatever archive it is of.

    Raises:
        SignatureError: there is none, it is malformed, no trusted key made it, it has expired, or the policy refuses
            the archive's name or version.
    """
    data = read_small(path, "the signature", MAX_ENVELOPE_BYTES, _ADVICE)
    try:
        read = envelope.read(data)
    except ValueError as error:
        raise SignatureError(f"{path}: is no signature of an archive: {error}; {_ADVICE}") from None
    try:
        signed = envelope.verified(read, trusted.keys.values())
    except ValueError:
        by = ", ".join(
            f"{key_id!r:.70}{', revoked' if key_id in trusted.policy.revoked else ''}" for key_id in read.signatures
        )
        raise SignatureError(
            f"{path}: no key in {trusted.path} has signed this, keys that it names are {by}; sign the archive with one "
            "that is trusted there"
        ) from None
    try:
        release = statement.read(signed.payload)
    except ValueError as error:
        raise SignatureError(f"{path}: is no statement on an archive: {error}; {_ADVICE}") from None
    _require_allowed(release, path, trusted, now or datetime.now(timezone.utc))
    return Accepted(release, signed.key_ids)


def _require_allowed(release: Release, path: str, trusted: TrustedKeys, now: datetime) -> None:
    """Refuse what has expired, or what the policy does not allow."""
    if release.expires is not None and now >= release.expires:
        raise SignatureError(f"{path}: expired on {release.expires:%Y-%m-%d %H:%M:%S} UTC; sign the archive again")
    least = trusted.policy.archives
    if least is None:
        return
    if release.name not in least:
        raise SignatureError(
            f"{path}: is of {release.name!r}, which the policy in {trusted.path} does not name; add it there"
        )
    if release.version < least[release.name]:
        raise SignatureError(
            f"{path}: is of version {release.version} of {release.name!r}, the policy in {trusted.path} asks for at "
            f"least {least[release.name]}; deploy a later one"
        )
