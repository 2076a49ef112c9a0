"""An archive that must be signed is opened only if a trusted key signed it, as it is, and the policy allows it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("securesystemslib", reason="the extra `sign` is not installed")

from securesystemslib.dsse import Envelope

from aot.sign.keys import read_signer
from aot.sign.sign import signed
from runtime import ArchiveError, SignatureError
from runtime.container import archive as container
from runtime.container import canonical
from runtime.container.archive import Archive
from runtime.signing import envelope, statement
from runtime.signing.check import Accepted, check
from runtime.signing.keys import read_keys

from .archive_samples import path as path
from .signed_archives import NOW, make_key, release, sign


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A private key, whose public one is in the folder `keys` beside it."""
    make_key(tmp_path / "release.key", tmp_path / "keys" / "release.pub")
    return tmp_path / "release.key"


def accept(path: Path, now: datetime = NOW) -> Accepted:
    """What `runtime.load` does of an archive, up to its tables, and what it reads of it later."""
    found: list[Accepted] = []
    trusted = read_keys(path.parent / "keys")

    def admit(name: str, digest: str) -> None:
        found.append(check(name, digest, trusted, now=now))

    with Archive.open(path, admit) as archive:
        archive.check_blocks()
    return found[0]


def refused(path: Path, match: str, now: datetime = NOW) -> None:
    with pytest.raises(SignatureError, match=match) as caught:
        accept(path, now)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value), "and it says what to do"


def policy(path: Path, **fields: Any) -> None:
    (path.parent / "keys" / "policy.json").write_text(json.dumps(fields))


def test_signed_archive_is_accepted(path: Path, key: Path) -> None:
    sign(path, key)
    found = accept(path)
    assert (found.release.name, found.release.version) == ("model", 7)
    assert found.key_ids == (read_signer(key).public_key.keyid,)


def test_statement_says_what_it_was_made_of(path: Path) -> None:
    made = release(path, expires=NOW + timedelta(days=1))
    assert statement.read(made.to_bytes()) == made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_byte_anywhere_is_refused(path: Path, key: Path, data: st.DataObject) -> None:
    signature = sign(path, key)
    of = data.draw(st.sampled_from([path, signature]))
    before = of.read_bytes()
    at, bits = data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(1, 255))
    of.write_bytes(before[:at] + bytes([before[at] ^ bits]) + before[at + 1 :])
    try:
        with pytest.raises((SignatureError, ArchiveError)):
            accept(path)
    finally:
        of.write_bytes(before)


def test_every_flipped_bit_of_an_envelope_is_refused(path: Path, key: Path) -> None:
    signature = sign(path, key)
    before, digest, trusted = signature.read_bytes(), Archive.open(path).digest, read_keys(path.parent / "keys")
    for at in range(len(before)):
        signature.write_bytes(before[:at] + bytes([before[at] ^ 1 << at % 8]) + before[at + 1 :])
        with pytest.raises(SignatureError):
            check(str(path), digest, trusted, now=NOW)


def test_index_is_not_decompressed_before_its_signature_holds(
    path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decompressed(*_: object) -> None:
        raise AssertionError("zstd saw bytes that nobody signed")

    monkeypatch.setattr(container, "_decompress", decompressed)
    monkeypatch.setattr(container, "_declared_bytes", decompressed)
    refused(path, "cannot be read")


def test_what_was_verified_is_what_is_read_while_another_writes(path: Path, key: Path) -> None:
    sign(path, key)
    trusted = read_keys(path.parent / "keys")
    archive = Archive.open(path, lambda name, digest: check(name, digest, trusted, now=NOW))
    before = archive.cubin("alpha")
    archive.forget_blocks()
    data = bytearray(path.read_bytes())
    first = archive.blocks[0].offset
    data[first:] = bytes(len(data) - first)
    path.write_bytes(data)  # in place, the file that is open
    with pytest.raises(container.DigestMismatch):
        archive.cubin("alpha")
    assert before == b"A" * 100


def test_missing_signature_is_refused(path: Path, key: Path) -> None:
    refused(path, r"model\.aot\.sig: the signature cannot be read")


def test_signature_by_another_key_is_refused(path: Path, key: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "other.key")
    sign(path, tmp_path / "other.key")
    refused(path, "no key in .*keys has signed this")


def test_signature_under_the_name_of_a_trusted_key_is_refused(path: Path, key: Path, tmp_path: Path) -> None:
    known = read_signer(key).public_key.keyid
    other = make_key(tmp_path / "other.key")
    signature = sign(path, tmp_path / "other.key")
    signature.write_bytes(signature.read_bytes().replace(other.encode(), known.encode()))
    refused(path, "no key in .*keys has signed this")


def test_one_known_key_of_several_is_enough(path: Path, key: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "other.key")
    sign(path, tmp_path / "other.key", key)
    assert accept(path).key_ids == (read_signer(key).public_key.keyid,)


def test_revoked_key_counts_no_more(path: Path, key: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "next.key", tmp_path / "keys" / "next.pub")
    sign(path, key)
    accept(path)
    policy(path, revoked=[read_signer(key).public_key.keyid])
    refused(path, "revoked; sign the archive with one that is trusted")
    sign(path, key, tmp_path / "next.key")
    accept(path)


def test_nothing_is_accepted_once_all_keys_are_revoked(path: Path, key: Path) -> None:
    sign(path, key)
    policy(path, revoked=[read_signer(key).public_key.keyid])
    refused(path, "all keys in it are revoked")


def test_expired_signature_is_refused(path: Path, key: Path) -> None:
    ends = NOW + timedelta(days=1)
    sign(path, key, expires=ends)
    accept(path, ends - timedelta(seconds=1))
    refused(path, "expired on 2027-01-02", now=ends)


def test_version_below_the_least_is_refused(path: Path, key: Path) -> None:
    sign(path, key, version=7)
    policy(path, archives={"model": 7})
    accept(path)
    policy(path, archives={"model": 8})
    refused(path, "version 7 of 'model', .* at least 8")


def test_name_that_the_policy_lacks_is_refused(path: Path, key: Path) -> None:
    sign(path, key)
    policy(path, archives={"another": 1})
    refused(path, "'model', which the policy in .* does not name")


def test_signature_of_another_archive_is_refused(path: Path, key: Path) -> None:
    other = path.with_name("other.aot")
    path.rename(other)
    signature = sign(other, key)
    signature.rename(f"{path}.sig")
    package = container.Archive.open(other)
    from aot.pack.write import Package

    fewer = Package()
    fewer.set_table("gemm", package.table("gemm"))
    fewer.write(path)
    refused(path, "is of an archive with the digest")


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s.update(predicateType="https://slsa.dev/provenance/v1"), "its predicateType is"),
        (lambda s: s.update(_type="https://in-toto.io/Statement/v0.1"), "its _type is"),
        (lambda s: s.update(subject=s["subject"] * 2), "a list of one archive"),
        (lambda s: s["subject"][0].update(name="another"), "is named 'another'"),
        (lambda s: s["subject"][0]["digest"].pop("aotIndex"), "digest of its subject needs exactly"),
        (lambda s: s["subject"][0]["digest"].update(aotIndex="A" * 64), "its aotIndex must be a SHA-256"),
        (lambda s: s["predicate"].update(version=True), "a version must be an integer"),
        (lambda s: s["predicate"].update(version=0), "a version must be an integer"),
        (lambda s: s["predicate"].update(expires=None), "its expires must be a time"),
        (lambda s: s["predicate"].update(expires="2027-6-30T00:00:00Z"), "its expires must be a time"),
        (lambda s: s["predicate"].update(expired="2027-06-30T00:00:00Z"), "its predicate needs exactly"),
        (lambda s: s["predicate"].update(provenance=[]), "its provenance must be an object"),
    ],
)
def test_other_statements_by_a_trusted_key_are_refused(path: Path, key: Path, change: Change, match: str) -> None:
    obj = canonical.loads(release(path).to_bytes())
    change(obj)
    made = Envelope(canonical.dumps(obj), statement.PAYLOAD_TYPE, {})
    made.sign(read_signer(key))
    Path(f"{path}.sig").write_bytes(envelope.to_bytes(made))
    refused(path, f"is no statement on an archive: .*{match}")


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.update(payloadType="text/plain"),
        lambda e: e.update(signatures=[]),
        lambda e: e.update(signatures=e["signatures"] * 2),
        lambda e: e.update(signatures=[{**e["signatures"][0], "keyid": str(i)} for i in range(17)]),
        lambda e: e.update(signatures=[{"sig": e["signatures"][0]["sig"]}]),
        lambda e: e.update(payload=e["payload"] + "="),
        lambda e: e.update(more=1),
    ],
)
def test_envelopes_of_another_form_are_refused(path: Path, key: Path, change: Change) -> None:
    obj = canonical.loads(signed(release(path), [read_signer(key)]))
    change(obj)
    Path(f"{path}.sig").write_bytes(canonical.dumps(obj))
    refused(path, "is no signature of an archive")


def test_same_signature_in_another_base64_is_refused(path: Path, key: Path) -> None:
    signature = sign(path, key)
    obj = canonical.loads(signature.read_bytes())
    sig = obj["signatures"][0]["sig"]  # 64 bytes, so that four bits of its last digit mean nothing
    assert sig.endswith("==")
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    obj["signatures"][0]["sig"] = f"{sig[:-3]}{digits[digits.index(sig[-3]) | 1]}=="
    signature.write_bytes(canonical.dumps(obj))
    refused(path, "its base64 is not as standard base64 is written")


@given(st.binary(max_size=200))
def test_what_is_no_envelope_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        envelope.read(data)


def test_envelope_that_is_too_large_is_not_read(path: Path, key: Path) -> None:
    Path(f"{path}.sig").write_bytes(bytes((1 << 20) + 1))
    refused(path, "has more than 1048576 bytes")


@pytest.mark.parametrize("library", ["securesystemslib.dsse", "cryptography.hazmat.primitives.serialization"])
def test_missing_library_accepts_nothing(path: Path, key: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    sign(path, key)
    monkeypatch.setitem(sys.modules, library, None)
    refused(path, "pip install 'securesystemslib")
