"""Calls of `aot` that are wrong: status 2, and one line that names what and the fix."""

import sys
from pathlib import Path

import pytest

from .command_line import MANIFEST, Run


@pytest.mark.parametrize("what", ["missing", "text", "damaged"])
def test_tune_says_what_is_wrong_with_its_input_before_it_imports_torch(
    run: Run, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setitem(sys.modules, "aot.tune.run", None)
    source = tmp_path / "in.aot"
    if what == "text":
        source.write_text("not an archive, but long enough to be read as one\n" * 9)
    elif what == "damaged":
        data = bytearray(archive.read_bytes())
        data[100] ^= 1
        source.write_bytes(data)
    result = run("tune", source, "-o", tmp_path / "tuned.aot")
    assert (result.status, result.out) == (2, "")
    said = {"missing": "cannot be opened", "text": "begins with ", "damaged": "block 0 "}[what]
    assert result.err.startswith(f"error: {source}: {said}")
    assert not (tmp_path / "tuned.aot").exists()


def test_a_mistake_in_a_manifest_is_named_by_file_and_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(MANIFEST.replace("n: 1024, k: 512", "n: 1023, k: 512"))
    result = run("build", path, "-o", tmp_path / "x.aot")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {path}:9: field 'gemms[0].n'")
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["ls"],
        ["ls", "--nonsense", "x.aot"],
        ["build", "-o", "x.aot"],
        ["build", "m.yaml"],
        ["build", "m.yaml", "-o", "x.aot", "--jobs", "0"],
        ["build", "m.yaml", "-o", "x.aot", "--candidates", "many"],
        ["ls", "x.aot", "two\nlines"],
        ["manifest", "from-config", "c.json", "--tp", "1", "--tokens", "1;2"],
    ],
)
def test_a_wrong_call_has_status_2(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.status == 2
    assert "Traceback" not in result.err
    if arguments:
        assert result.err.startswith("error: ")
        assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "x.aot", "qkv", "--m", "16", "--m", "0"], "'--m' must be at least 1, found '0'"),
        (["show", "x.aot", "qkv", "--m", "3000000000"], "'--m' must be at most 2147483647, found '3000000000'"),
        (["show", "x.aot", "qkv", "--m", "1,16"], "'--m' must be an integer, found '1,16'"),
        (["tune", "x.aot", "-o", "y.aot", "--tolerance", "1%"], "'--tolerance' must be a number, found '1%'"),
    ],
)
def test_a_number_that_cannot_be_is_named_with_what_it_may_be(run: Run, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    shown = f"error: {message}; `aot {arguments[0]} --help` shows how to call it\n"
    assert result == (2, "", shown)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--finalists", "0", "'--finalists'"),
        ("--repeats", "0", "'--repeats'"),
        ("--seed", "-1", "'--seed'"),
        ("--seed", "99999999999999999999", "'--seed'"),
        ("--tolerance", "1.5", "'--tolerance'"),
        ("--tolerance", "nan", "tolerance"),
    ],
)
def test_an_option_of_tune_that_makes_no_sense_is_named(
    run: Run, archive: Path, tmp_path: Path, option: str, value: str, message: str
) -> None:
    result = run("tune", archive, "-o", tmp_path / "x.aot", option, value)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "sm_90"], "unknown target 'sm_90'; did you mean 'sm_90a'? known: sm_80, "),
        (["--target", "SM90A"], "unknown target 'SM90A'; did you mean 'sm_90a'? known: sm_80, "),
        (["--target", "gfx942"], "unknown target 'gfx942'; known: sm_80, "),
        (["-o", "no/such/folder/x.aot"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_built_has_status_2(build_again: Run, options: list[str], message: str) -> None:
    result = build_again(*options)
    assert (result.status, result.out) == (2, "")
    assert message in result.err


def test_manifest_and_base_are_told_apart(build_again: Run, folder: Path, tmp_path: Path, archive: Path) -> None:
    result = build_again("--base", folder / "tiny.yaml")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {folder / 'tiny.yaml'}: is a manifest, not an archive; ")
    result = build_again(archive)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {archive}: is an archive, not a manifest; give it to `aot build --base`")


def test_a_build_that_can_serve_nothing_names_what_and_where(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "fused.yaml").write_text(MANIFEST.replace("defaults:\n", "defaults:\n  epilogue: swiglu\n"))
    arguments = ["-o", tmp_path / "x.aot", "--target", "sm_80", "--cache", folder / "cache"]
    result = run("build", tmp_path / "fused.yaml", *arguments)
    assert (result.status, result.out) == (2, "")
    assert f"error: {tmp_path / 'fused.yaml'}:10: up: bf16_bf16_bf16_f32_swiglu_" in result.err
    assert "on sm_80: no kernel family computes it: none for sm_80 has the epilogue swiglu; sm_90a can" in result.err
    assert result.err.endswith("; nor is there a kernel for the other 1\n")
