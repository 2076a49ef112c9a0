"""`aot sign` and `aot verify --key`: what they write, what they find, and how they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

pytest.importorskip("securesystemslib", reason="the extra `sign` is not installed")

from aot.compile.toolchain import Toolchain
from aot.sign import tools
from aot.sign.contents_digest import contents_digest
from aot.sign.provenance import provenance
from runtime import load, universal
from runtime.container.archive import Archive
from runtime.signing.check import accepted
from runtime.signing.keys import read_keys

from .command_line import Run
from .recording_driver import entry, gemm_record, signature, write_archive
from .signed_archives import make_key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    _write(tmp_path / "model.aot", 1024)
    make_key(tmp_path / "release.key", tmp_path / "keys" / "release.pub")
    return tmp_path / "model.aot"


def _write(path: Path, n: int) -> None:
    write_archive(path, [gemm_record("v0")], [entry(signature(n, 512), [(None, "v0")])])


def _signature_finding(run: Run, path: Path, status: int, *more: object) -> dict[str, Any]:
    done = run("verify", path, "--key", path.with_name("keys"), "--json", *more)
    assert done.status == status, done
    found: dict[str, Any] = json.loads(done.out)["checks"][0]
    assert found["subject"] == "signature"
    return found


def test_what_was_signed_is_served_and_found_good(run: Run, path: Path) -> None:
    key, until = path.with_name("release.key"), "2127-06-30"
    done = run("sign", path, "--key", key, "--version", 7, "--expires", until, "--name", "llama")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(f"{path}.sig: llama version 7, until 2127-06-30 00:00:00 UTC\n")
    load(path, require_signed=path.with_name("keys")).close()
    found = _signature_finding(run, path, 1)  # the cubins are made up, which other checks find
    assert found["ok"]
    assert found["detail"].startswith("llama version 7, until 2127-06-30 00:00:00 UTC, by ")


def test_later_signature_has_a_higher_version_by_default(run: Run, path: Path) -> None:
    run("sign", path, "--key", path.with_name("release.key"))
    release = accepted(f"{path}.sig", read_keys(path.with_name("keys"))).release
    assert (release.name, release.version) == ("model", int(release.signed_on.timestamp()))


def test_several_keys_sign_at_once(run: Run, path: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "next.key", tmp_path / "keys" / "next.pub")
    run("sign", path, "--key", tmp_path / "release.key", "--key", tmp_path / "next.key")
    assert len(accepted(f"{path}.sig", read_keys(tmp_path / "keys")).key_ids) == 2


def test_provenance_has_what_the_signer_says(run: Run, path: Path) -> None:
    words = ("--command", "aot build a.yaml -o a.aot", "--command", "aot tune a.aot", "--builder", "https://ci.example")
    run("sign", path, "--key", path.with_name("release.key"), *words)
    found = accepted(f"{path}.sig", read_keys(path.with_name("keys"))).release.provenance
    assert found["buildDefinition"]["externalParameters"]["commands"] == ["aot build a.yaml -o a.aot", "aot tune a.aot"]
    assert found["runDetails"]["builder"] == {"id": "https://ci.example"}


def test_builder_that_was_not_given_is_unknown(run: Run, path: Path) -> None:
    run("sign", path, "--key", path.with_name("release.key"))
    found = accepted(f"{path}.sig", read_keys(path.with_name("keys"))).release.provenance
    assert found["runDetails"]["builder"] == {"id": "urn:cute-aot:builder:unknown"}


def test_provenance_has_what_the_archive_says() -> None:
    with Archive.open(universal()) as archive:
        found = provenance(archive, [], "https://ci.example", {"nvidia-cutlass-dsl": "ab" * 32})
        digests = archive.table("build")["providers"]
    materials = {each["name"]: each for each in found["buildDefinition"]["resolvedDependencies"]}
    assert materials["manifest universal"]["digest"].keys() == {"sha256"}
    assert materials["own.sm90_small_m"]["digest"]["sha256"] == digests["own.sm90_small_m"]
    assert materials["nvidia-cutlass-dsl"]["annotations"]["contents"] == "ab" * 32
    assert materials["zstd"]["annotations"].keys() == {"version"}
    assert found["runDetails"]["byproducts"][0]["annotations"]["gpu"] == "NVIDIA H200"


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is said to be installed; may be changed."""
    found = {"nvidia-cutlass-dsl": f"4.8.1 {'ab' * 32}"}
    monkeypatch.setattr(tools, "toolchain", lambda cache: Toolchain({}, found))
    return found


def test_compiler_that_built_it_here_is_told_by_its_contents(wheels: dict[str, str]) -> None:
    with Archive.open(universal()) as archive:
        assert tools.installed_contents(archive) == {"nvidia-cutlass-dsl": "ab" * 32}


def test_another_compiler_than_built_it_is_refused(run: Run, path: Path, wheels: dict[str, str]) -> None:
    wheels["nvidia-cutlass-dsl"] = f"4.9.0 {'ab' * 32}"
    key, output = path.with_name("release.key"), path.with_name("x.sig")
    done = run("sign", universal(), "--key", key, "--built-here", "-o", output)
    assert (done.status, done.out, output.exists()) == (2, "", False)
    assert "was built with nvidia-cutlass-dsl 4.8.1, 4.9.0 is installed here" in done.err


def test_changed_archive_fails_the_check(run: Run, path: Path) -> None:
    run("sign", path, "--key", path.with_name("release.key"))
    _write(path, 2048)
    found = _signature_finding(run, path, 1)
    assert not found["ok"]
    assert "they do not hold the same" in found["detail"]


def test_damaged_block_fails_the_check(run: Run, path: Path) -> None:
    run("sign", path, "--key", path.with_name("release.key"))
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    found = _signature_finding(run, path, 1)
    assert not found["ok"]
    assert "block 0 has SHA-256" in found["detail"]


def test_same_contents_compressed_otherwise_are_told(run: Run, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("sign", path, "--key", path.with_name("release.key"))
    before = Archive.open(path)
    compressor = zstandard.ZstdCompressor
    monkeypatch.setattr(zstandard, "ZstdCompressor", lambda *_, **__: compressor(level=1, write_checksum=True))
    _write(path, 1024)
    after = Archive.open(path)
    assert after.digest != before.digest
    assert contents_digest(after) == contents_digest(before)
    found = _signature_finding(run, path, 1)
    assert not found["ok"]
    assert "both hold the same" in found["detail"]


def test_verify_takes_a_signature_elsewhere(run: Run, path: Path) -> None:
    elsewhere = path.with_name("elsewhere.sig")
    run("sign", path, "--key", path.with_name("release.key"), "-o", elsewhere)
    assert not _signature_finding(run, path, 1)["ok"]
    assert _signature_finding(run, path, 1, "--signature", elsewhere)["ok"]


def test_signature_is_replaced_only_by_force(run: Run, path: Path) -> None:
    arguments = ("sign", path, "--key", path.with_name("release.key"))
    run(*arguments)
    done = run(*arguments)
    assert done.status == 2
    assert "is there; name another output, or give --force" in done.err
    assert run(*arguments, "--force").status == 0


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--key", "keys/release.pub"], "is no private key"),
        (["--key", "nothing"], "the key cannot be read"),
        (["--key", "release.key", "--expires", "2020-01-01"], "which is over; give a later date"),
        (["--key", "release.key", "--expires", "soon"], "--expires"),
        (["--key", "release.key", "--version", "0"], "must be at least 1"),
        (["--key", "release.key", "--name", "a\nb"], "a name must be 1 to 255 printable characters"),
        (["--key", "release.key", "-o", "model.aot"], "is an input too"),
        (["--key", "release.key", "-o", "nowhere/model.sig"], "its folder does not exist"),
        (["--key", "release.key", "--command", "x" * (1 << 20)], "give shorter commands"),
    ],
)
def test_wrong_calls_of_sign_are_one_line(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], match: str
) -> None:
    monkeypatch.chdir(path.parent)
    done = run("sign", "model.aot", *words)
    assert (done.status, done.out) == (2, "")
    assert match in done.err
    assert done.err.count("\n") == 1
    assert not path.with_name("model.aot.sig").exists()


@pytest.mark.parametrize(
    ("words", "match"),
    [(["--signature", "x.sig"], "--signature is for --key"), (["--key", "release.key"], "holds a private key")],
)
def test_wrong_calls_of_verify_are_one_line(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], match: str
) -> None:
    monkeypatch.chdir(path.parent)
    done = run("verify", "model.aot", *words)
    assert (done.status, done.out) == (2, "")
    assert match in done.err
    assert done.err.count("\n") == 1


def test_info_says_who_signed_it_and_what_made_it(run: Run, path: Path) -> None:
    assert "signed      no: there is no signature of it beside the file\n" in run("info", path).out
    made = "aot build model.yaml -o model.aot"
    run("sign", path, "--key", path.with_name("release.key"), "--version", 7, "--builder", "urn:me", "--command", made)
    out = run("info", path).out
    assert "signed      as model version 7 on 20" in out
    assert "  by        key " in out
    assert "`aot verify --key KEYS`" in out
    assert "  built by  urn:me, as the signer says\n" in out
    assert f"  command   {made}\n" in out
    found = json.loads(run("info", path, "--json").out)["signature"]
    assert (found["name"], found["version"], found["commands"], len(found["keys"])) == ("model", 7, [made], 1)


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"payload":"e30=","payloadType":"x","signatures":[]}'])
def test_info_says_what_is_wrong_with_a_signature(run: Run, path: Path, damage: str) -> None:
    Path(f"{path}.sig").write_text(damage)
    done = run("info", path)
    assert (done.status, "is no signature of an" in done.out) == (0, True)


def test_info_does_not_take_the_signature_of_another_archive(run: Run, path: Path) -> None:
    run("sign", path, "--key", path.with_name("release.key"))
    _write(path, 2048)
    assert json.loads(run("info", path, "--json").out)["signature"] is None
