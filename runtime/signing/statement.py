"""What a signer says of an archive: an in-toto Statement v1, whose fields docs/security.md lists.

Knows neither keys nor envelopes, and of the provenance only that it is there: it is for people and their tools.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ..container import canonical

TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:cute-aot:release:v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"  # of the envelope around it
MAX_VERSION = 2**63 - 1

_SHA256 = re.compile(r"[0-9a-f]{64}")
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_DIGESTS = {"sha256", "aotIndex", "aotContents"}


@dataclass(frozen=True)
class Release:
    """One version of an archive, as its signer names it.

    `file_digest` is the SHA-256 of the file, `index_digest` the digest that names the archive and covers all of it, and
    `contents_digest` what `aot.sign.contents_digest.contents_digest` makes of what it holds; all are hexadecimal. Times
    are in UTC, to the second.
    """

    name: str
    version: int
    file_digest: str
    index_digest: str
    contents_digest: str
    signed_on: datetime
    expires: datetime | None
    provenance: dict[str, Any]

    def to_bytes(self) -> bytes:
        """The statement, as `read` takes it: canonical JSON."""
        predicate: dict[str, Any] = {
            "name": self.name,
            "version": self.version,
            "signedOn": self.signed_on.strftime(_TIME),
            "provenance": self.provenance,
        }
        if self.expires is not None:
            predicate["expires"] = self.expires.strftime(_TIME)
        digests = {
            "sha256": self.file_digest,
            "aotIndex": self.index_digest,
            "aotContents": self.contents_digest,
        }
        return canonical.dumps(
            {
                "_type": TYPE,
                "subject": [{"name": self.name, "digest": digests}],
                "predicateType": PREDICATE_TYPE,
                "predicate": predicate,
            }
        )


def read(payload: bytes) -> Release:
    """What a statement says.

    Raises:
        ValueError: it is no statement on a release of an archive; the message names the field.
    """
    obj = _fields(canonical.loads(payload), {"_type", "subject", "predicateType", "predicate"}, "the statement")
    for field, known in (("_type", TYPE), ("predicateType", PREDICATE_TYPE)):
        if obj[field] != known:
            raise ValueError(f"its {field} is {obj[field]!r:.100}, not {known!r}")
    subjects = obj["subject"]
    if not isinstance(subjects, list) or len(subjects) != 1:
        raise ValueError("its subject must be a list of one archive")
    subject = _fields(subjects[0], {"name", "digest"}, "its subject")
    digests = _fields(subject["digest"], _DIGESTS, "the digest of its subject")
    for field, value in digests.items():
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise ValueError(f"its {field} must be a SHA-256 in hexadecimal, found {value!r:.100}")
    predicate = obj["predicate"]
    required = {"name", "version", "signedOn", "provenance"}
    optional = {"expires"} if isinstance(predicate, dict) and "expires" in predicate else set()
    predicate = _fields(predicate, required | optional, "its predicate")
    if subject["name"] != predicate["name"]:
        raise ValueError(f"its subject is named {subject['name']!r:.100}, its predicate {predicate['name']!r:.100}")
    if not isinstance(predicate["provenance"], dict):
        raise ValueError(f"its provenance must be an object, found {predicate['provenance']!r:.100}")
    return Release(
        name_of(predicate["name"]),
        version_of(predicate["version"]),
        digests["sha256"],
        digests["aotIndex"],
        digests["aotContents"],
        _time(predicate["signedOn"], "signedOn"),
        _time(predicate["expires"], "expires") if optional else None,
        predicate["provenance"],
    )


def name_of(value: Any) -> str:
    """`value`, if it can name an archive in statements and policies: printable, 1 to 255 characters.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(value, str) or not 0 < len(value) <= 255 or not value.isprintable():
        raise ValueError(f"a name must be 1 to 255 printable characters, found {value!r:.100}")
    return value


def version_of(value: Any) -> int:
    """`value`, if it can be the version of an archive.

    Raises:
        ValueError: it cannot.
    """
    if type(value) is not int or not 1 <= value <= MAX_VERSION:
        raise ValueError(f"a version must be an integer from 1 to {MAX_VERSION}, found {value!r:.100}")
    return value


def _time(value: Any, field: str) -> datetime:
    try:
        found = datetime.strptime(value, _TIME).replace(tzinfo=timezone.utc)
    except (TypeError, ValueError):
        found = None
    if found is None or found.strftime(_TIME) != value:
        raise ValueError(f"its {field} must be a time such as 2027-06-30T00:00:00Z, found {value!r:.100}")
    return found


def _fields(obj: Any, names: set[str], what: str) -> dict[str, Any]:
    if not isinstance(obj, dict) or obj.keys() != names:
        raise ValueError(f"{what} needs exactly the fields {sorted(names)}, found {obj!r:.100}")
    return obj
