"""The keys that a deployment trusts, and what it makes of them: a folder of public keys with an optional policy.

docs/security.md says what the folder may hold. Knows nothing of what is signed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SignatureError
from ..limits import MAX_KEY_BYTES, MAX_POLICY_BYTES
from .files import read_small
from .libraries import require_libraries
from .statement import name_of, version_of

if TYPE_CHECKING:
    from securesystemslib.signer import SSlibKey

POLICY = "policy.json"
SUFFIX = ".pub"

_KEY_ID = re.compile(r"[0-9a-f]{64}")
_KEY_ADVICE = "name a public key in PEM, as `openssl pkey -pubout` writes it, or a folder of them"


@dataclass(frozen=True)
class Policy:
    """`archives` has the names that may be served, each with its least version; None allows all. `revoked` has the
    identifiers of keys that count no more."""

    archives: Mapping[str, int] | None = None
    revoked: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TrustedKeys:
    """Keys by identifier, those that are revoked left out, each with the path of its file."""

    path: str
    keys: Mapping[str, SSlibKey]
    files: Mapping[str, str]
    policy: Policy


def read_keys(path: str | os.PathLike[str]) -> TrustedKeys:
    """The keys of a folder, with its policy, or the key of one file, without one.

    Raises:
        SignatureError: there is no key that counts, or one of these files cannot be read, or is not what it must be.
    """
    require_libraries()
    name = os.fsdecode(path)
    policy, files = Policy(), [name]
    if os.path.isdir(name):
        try:
            held = sorted(os.listdir(name))
        except OSError as error:
            raise SignatureError(f"{name}: cannot be listed ({error.strerror}); check its permissions") from None
        files = [os.path.join(name, file) for file in held if file.endswith(SUFFIX)]
        if POLICY in held:
            policy = _read_policy(os.path.join(name, POLICY))
    found = {key.keyid: (key, file) for file in files for key in (_read_key(file),)}
    kept = {key_id: both for key_id, both in found.items() if key_id not in policy.revoked}
    if not kept:
        what = f"all keys in it are revoked by its {POLICY}" if found else f"has no file named *{SUFFIX}"
        raise SignatureError(f"{name}: {what}, so nothing could be accepted; {_KEY_ADVICE}")
    return TrustedKeys(
        name, {i: key for i, (key, _) in kept.items()}, {i: file for i, (_, file) in kept.items()}, policy
    )


def _read_key(path: str) -> SSlibKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.exceptions import UnsupportedLibraryError
    from securesystemslib.signer import SSlibKey

    data = read_small(path, "the key", MAX_KEY_BYTES, _KEY_ADVICE)
    if b"PRIVATE KEY" in data:
        raise SignatureError(f"{path}: holds a private key, which belongs on no server; {_KEY_ADVICE}")
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise SignatureError(f"{path}: is no public key; {_KEY_ADVICE}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise SignatureError(f"{path}: is a public key, but not of Ed25519; {_KEY_ADVICE}")
    try:
        return SSlibKey.from_crypto(key)
    except UnsupportedLibraryError as error:
        raise SignatureError(f"signatures need another cryptography ({error}); pip install -U cryptography") from None


def _read_policy(path: str) -> Policy:
    advice = "docs/security.md has an example"
    data = read_small(path, "the policy", MAX_POLICY_BYTES, advice)
    try:
        return _policy(json.loads(data, object_pairs_hook=_once))
    except (ValueError, RecursionError) as error:
        raise SignatureError(f"{path}: {error}; {advice}") from None


def _policy(obj: Any) -> Policy:
    if not isinstance(obj, dict) or obj.keys() - {"archives", "revoked"}:
        raise ValueError(f"a policy is an object of `archives` and `revoked` alone, found {obj!r:.100}")
    archives, revoked = obj.get("archives"), obj.get("revoked", [])
    if "archives" in obj and not isinstance(archives, dict):
        raise ValueError(f"archives must be an object of names and least versions, found {archives!r:.100}")
    if not isinstance(revoked, list):
        raise ValueError(f"revoked must be a list, found {revoked!r:.100}")
    for key_id in revoked:
        if not isinstance(key_id, str) or not _KEY_ID.fullmatch(key_id):
            raise ValueError(f"revoked must have identifiers of 64 hexadecimal digits, found {key_id!r:.100}")
    least = None if archives is None else {name_of(name): version_of(value) for name, value in archives.items()}
    return Policy(least, frozenset(revoked))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is there twice")
    return found
