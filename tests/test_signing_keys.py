"""A folder of keys is read strictly: what cannot be understood accepts nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("securesystemslib", reason="the extra `sign` is not installed")

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from runtime import SignatureError
from runtime.signing.keys import Policy, read_keys

from .signed_archives import make_key


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_key(tmp_path / "release.key", tmp_path / "keys" / "release.pub")
    return tmp_path / "keys"


def refused(path: Path, match: str) -> None:
    with pytest.raises(SignatureError, match=match) as caught:
        read_keys(path)
    assert "\n" not in str(caught.value)


def test_keys_of_a_folder_are_those_named_pub(keys: Path, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other.key", keys / "other.pub")
    (keys / "README").write_text("not a key")
    found = read_keys(keys)
    assert len(found.keys) == 2
    assert found.files[other] == str(keys / "other.pub")
    assert found.policy == Policy()


def test_file_of_one_key_will_do(keys: Path) -> None:
    assert read_keys(keys / "release.pub").keys.keys() == read_keys(keys).keys.keys()


def test_folder_without_keys_is_refused(keys: Path) -> None:
    (keys / "release.pub").unlink()
    refused(keys, r"has no file named \*\.pub")


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "cannot be read")


def test_private_key_is_refused(keys: Path, tmp_path: Path) -> None:
    (keys / "mistake.pub").write_bytes((tmp_path / "release.key").read_bytes())
    refused(keys, "holds a private key")


def test_key_of_another_algorithm_is_refused(keys: Path) -> None:
    key = generate_private_key(SECP256R1()).public_key()
    (keys / "ec.pub").write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    refused(keys, "not of Ed25519")


def test_damaged_key_is_refused(keys: Path) -> None:
    (keys / "release.pub").write_bytes(b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    refused(keys, "is no public key")


def test_named_pipe_is_refused_without_waiting(keys: Path) -> None:
    os.mkfifo(keys / "pipe.pub")
    refused(keys, "is not a regular file")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "Expecting value"),
        ("[]", "a policy is an object"),
        ('{"revoke": []}', "a policy is an object of `archives` and `revoked` alone"),
        ('{"revoked": [], "revoked": []}', "a field is there twice"),
        ('{"revoked": ["2f6d"]}', "identifiers of 64 hexadecimal digits"),
        ('{"revoked": "none"}', "revoked must be a list"),
        ('{"archives": ["model"]}', "archives must be an object"),
        ('{"archives": null}', "archives must be an object"),
        ('{"archives": {"model": "7"}}', "a version must be an integer"),
        ("[" * 100_000, "policy"),
    ],
)
def test_policies_of_another_form_are_refused(keys: Path, text: str, match: str) -> None:
    (keys / "policy.json").write_text(text)
    refused(keys, match)
