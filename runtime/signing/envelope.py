"""The DSSE envelope: which keys signed a payload. Knows nothing of what the payload says.

The envelope is canonical JSON with standard base64, and read in no other spelling, so that no byte of it may change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..container import canonical
from ..limits import MAX_SIGNATURES
from .statement import PAYLOAD_TYPE

if TYPE_CHECKING:
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import SSlibKey


@dataclass(frozen=True)
class Signed:
    """A payload, and the identifiers of the keys that signed it and were asked about."""

    payload: bytes
    key_ids: tuple[str, ...]


def to_bytes(envelope: Envelope) -> bytes:
    """The envelope as `read` takes it."""
    return canonical.dumps(envelope.to_dict())


def read(data: bytes) -> Envelope:
    """An envelope around a statement; no signature is looked at.

    Raises:
        ValueError: it is none, or written in another way.
    """
    from securesystemslib.dsse import Envelope

    obj = canonical.loads(data)
    if not isinstance(obj, dict) or obj.keys() != {"payload", "payloadType", "signatures"}:
        raise ValueError("an envelope has exactly the fields payload, payloadType and signatures")
    if obj["payloadType"] != PAYLOAD_TYPE or not isinstance(obj["payload"], str):
        raise ValueError(f"its payloadType is {obj['payloadType']!r:.100}, not {PAYLOAD_TYPE!r}")
    signatures = obj["signatures"]
    if not isinstance(signatures, list) or not 1 <= len(signatures) <= MAX_SIGNATURES:
        raise ValueError(f"its signatures must be a list of 1 to {MAX_SIGNATURES}")
    if not all(_is_signature(signature) for signature in signatures):
        raise ValueError("each of its signatures has exactly the fields keyid and sig, both text")
    envelope = Envelope.from_dict(obj)
    if to_bytes(envelope) != data:
        raise ValueError("its base64 is not as standard base64 is written")
    return envelope


def verified(envelope: Envelope, keys: Iterable[SSlibKey]) -> Signed:
    """The payload, with those of `keys` that signed it.

    Raises:
        ValueError: none did.
    """
    from securesystemslib.exceptions import UnverifiedSignatureError

    signed: list[str] = []
    for key in keys:
        try:
            signed += envelope.verify([key], threshold=1)
        except UnverifiedSignatureError:
            continue
    if not signed:
        raise ValueError("no key that counts has signed it")
    return Signed(envelope.payload, tuple(signed))


def _is_signature(obj: Any) -> bool:
    return isinstance(obj, dict) and obj.keys() == {"keyid", "sig"} and all(isinstance(v, str) for v in obj.values())
