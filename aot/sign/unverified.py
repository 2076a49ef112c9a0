"""What a signature beside an archive says of it, whoever made it: to be read, and not to be trusted.

`aot verify --key` and servers check it (`runtime.signing.check`). Needs no library of keys.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.container import canonical
from runtime.container.archive import Archive
from runtime.errors import SignatureError
from runtime.limits import MAX_ENVELOPE_BYTES
from runtime.signing import statement
from runtime.signing.check import signature_path
from runtime.signing.files import read_small
from runtime.signing.statement import Release

from .provenance import UNKNOWN_BUILDER


@dataclass(frozen=True)
class Unverified:
    """What was signed, and the identifiers of keys that the envelope names; no signature was checked."""

    release: Release
    key_ids: tuple[str, ...]

    @property
    def builder(self) -> str:
        """Who built the archive, as the signer gave it; empty where the provenance does not say."""
        found = _field(_field(self.release.provenance, "runDetails"), "builder")
        said = str(_field(found, "id") or "")
        return "" if said == UNKNOWN_BUILDER else said

    @property
    def commands(self) -> tuple[str, ...]:
        """What made it, as the signer gave it."""
        definition = _field(_field(self.release.provenance, "buildDefinition"), "externalParameters")
        found = _field(definition, "commands")
        return tuple(map(str, found)) if isinstance(found, list) else ()

    @property
    def contents(self) -> dict[str, str]:
        """The SHA-256 of what tools consist of, by name; none where it was signed without `--built-here`."""
        rows = _field(_field(self.release.provenance, "buildDefinition"), "resolvedDependencies")
        found = {}
        for row in rows if isinstance(rows, list) else []:
            name, contents = _field(row, "name"), _field(_field(row, "annotations"), "contents")
            if isinstance(name, str) and isinstance(contents, str):
                found[name] = contents
        return found


def read(path: Path) -> Unverified:
    """What the signature file at `path` says.

    Raises:
        SignatureError: it cannot be read, or is no signature of an archive.
    """
    advice = "give one that `aot sign` made"
    data = read_small(str(path), "the signature", MAX_ENVELOPE_BYTES, advice)
    try:
        obj = canonical.loads(data)
        release = statement.read(base64.b64decode(obj["payload"], validate=True))
        return Unverified(release, tuple(str(signature["keyid"]) for signature in obj["signatures"]))
    except (ValueError, LookupError, TypeError) as error:
        raise SignatureError(f"{path}: is no signature of an archive: {error}; {advice}") from None


def beside(archive: Archive) -> Unverified | None:
    """What the signature beside an archive says, if there is one, and it is of this archive.

    Raises:
        SignatureError: it is no signature.
    """
    path = signature_path(archive.path)
    if not os.path.exists(path):
        return None
    found = read(Path(path))
    return found if found.release.index_digest == archive.digest else None


def _field(obj: Any, name: str) -> Any:
    return obj.get(name) if isinstance(obj, dict) else None
