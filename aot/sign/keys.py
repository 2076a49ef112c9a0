"""Private keys in files: PKCS #8 in PEM, as `openssl genpkey -algorithm ed25519` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runtime.errors import SignatureError
from runtime.limits import MAX_KEY_BYTES
from runtime.signing.files import read_small
from runtime.signing.libraries import require_libraries

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

_ADVICE = "`openssl genpkey -algorithm ed25519 -out FILE` makes one"


def read_signer(path: Path) -> CryptoSigner:
    """What signs with the private key at `path`.

    Raises:
        SignatureError: the file cannot be read, is encrypted, or is no private key of Ed25519; or a library is missing.
    """
    require_libraries()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    data = read_small(str(path), "the key", MAX_KEY_BYTES, _ADVICE)
    try:
        key = load_pem_private_key(data, None)
    except TypeError:
        raise SignatureError(f"{path}: is encrypted; decrypt it first, with `openssl pkey -in {path}`") from None
    except (ValueError, UnsupportedAlgorithm):
        raise SignatureError(f"{path}: is no private key in PEM; {_ADVICE}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureError(f"{path}: is a private key, but not of Ed25519; {_ADVICE}")
    return CryptoSigner(key)
