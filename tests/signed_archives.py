"""Keys, and archives that were signed with them."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from aot.sign.keys import read_signer
from aot.sign.sign import Naming, release_of, signed
from runtime.container.archive import Archive
from runtime.signing.statement import Release

NOW = datetime(2027, 1, 1, tzinfo=timezone.utc)


def make_key(private: Path, public: Path | None = None) -> str:
    """A key pair, its public half in `public` if that is given; its identifier."""
    key = Ed25519PrivateKey.generate()
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    if public is not None:
        public.parent.mkdir(exist_ok=True)
        public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return read_signer(private).public_key.keyid


def release(archive: Path, version: int = 7, expires: datetime | None = None) -> Release:
    with Archive.open(archive) as opened:
        return release_of(opened, Naming("model", version, NOW, expires), {"builder": "a test"})


def sign(archive: Path, *keys: Path, **more: Any) -> Path:
    """The signature of an archive, beside it."""
    path = Path(f"{archive}.sig")
    path.write_bytes(signed(release(archive, **more), [read_signer(key) for key in keys]))
    return path
