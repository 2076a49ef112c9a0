"""What `aot build` and `aot tune` may write over, and what they refuse to before any work."""

import os
from pathlib import Path

import pytest

from aot import build, selection
from aot.cli import commands

from . import recording_driver
from .command_line import MANIFEST, ROOT, Run
from .universal_archives import write


def _archive(path: Path, tuned: int) -> Path:
    """An archive with this many tuned entries, and one that is ranked."""
    of = [recording_driver.signature(512 * (i + 1), 256) for i in range(tuned + 1)]
    states = [*["tuned"] * tuned, "ranked"]
    rows = [recording_driver.entry(s, [(None, "f")], state=state) for s, state in zip(of, states, strict=True)]
    recording_driver.write_archive(path, [recording_driver.operands_record("f", of[0])], rows)
    return path


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither selecting nor compiling nor measuring is reached."""

    def reached(*_: object, **__: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(selection, "select", reached)
    monkeypatch.setattr(build, "compile_variants", reached)
    monkeypatch.setattr(commands.tune, "tune_archive", reached)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("command", ["build", "tune"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "is a folder"),
        ("", "is a folder"),
        ("/", "is a folder"),
        ("pipe", "no regular file"),
        ("none/x.aot", "its folder does not exist"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_the_work(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    source = folder / ("tiny.yaml" if command == "build" else "tiny.aot")
    result = run(command, source, "-o", name)
    assert (result.status, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.usefixtures("no_work")
def test_an_output_that_is_an_input_is_refused(run: Run, archive: Path, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(MANIFEST)
    (tmp_path / "link.yaml").symlink_to("m.yaml")
    (tmp_path / "link.aot").symlink_to(archive)
    (tmp_path / "config.json").write_bytes((ROOT / "tests/data/configs/llama-3.1-8b.json").read_bytes())
    before = archive.read_bytes(), (tmp_path / "config.json").read_bytes()
    for arguments in (
        ["build", tmp_path / "m.yaml", "-o", tmp_path / "m.yaml"],
        ["build", tmp_path / "m.yaml", "-o", tmp_path / "link.yaml"],
        ["tune", archive, "-o", archive],
        ["tune", archive, "-o", tmp_path / "link.aot"],
        ["manifest", "from-config", tmp_path / "config.json", "--tp", 1, "--tokens", 1, "-o", tmp_path / "config.json"],
    ):
        result = run(*arguments)
        assert (result.status, result.out) == (2, "")
        assert "is an input too" in result.err
    assert (tmp_path / "m.yaml").read_text() == MANIFEST
    assert (archive.read_bytes(), (tmp_path / "config.json").read_bytes()) == before


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(("tuned", "said"), [(1, "1 tuned entry,"), (2, "2 tuned entries,")])
def test_a_build_does_not_replace_a_tuned_archive(
    run: Run, folder: Path, tmp_path: Path, tuned: int, said: str
) -> None:
    out = _archive(tmp_path / "model.aot", tuned)
    before = out.read_bytes()
    result = run("build", folder / "tiny.yaml", "-o", out)
    assert (result.status, result.out) == (2, "")
    assert result.err == (
        f"error: {out}: holds {said} which a build would replace; name another output, or give --force to lose them\n"
    )
    assert out.read_bytes() == before


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("tuned", [0, 1])
def test_a_build_does_not_replace_forms_that_were_checked(run: Run, folder: Path, tmp_path: Path, tuned: int) -> None:
    rows = [recording_driver.entry(recording_driver.signature(512, 512), [(None, "few")], state="tuned")] * tuned
    out = tmp_path / "universal.aot"
    write(out, rows)
    before = out.read_bytes()
    result = run("build", folder / "tiny.yaml", "-o", out)
    assert (result.status, result.out) == (2, "")
    held = "1 tuned entry and " * tuned + "1 form whose functions were checked on NVIDIA H200"
    assert result.err == (
        f"error: {out}: holds {held}, which a build would replace; name another output, or give --force to lose them\n"
    )
    assert out.read_bytes() == before


@pytest.mark.usefixtures("no_work")
def test_a_link_to_a_tuned_archive_is_not_replaced(run: Run, folder: Path, tmp_path: Path) -> None:
    _archive(tmp_path / "model.aot", 1)
    (tmp_path / "link.aot").symlink_to("model.aot")
    result = run("build", folder / "tiny.yaml", "-o", tmp_path / "link.aot")
    assert result.status == 2
    assert "holds 1 tuned entry" in result.err


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("command", ["build", "tune"])
@pytest.mark.parametrize("name", ["notes.txt", "other.yaml", "damaged.aot", "odd.aot"])
def test_a_file_that_is_no_archive_is_not_replaced(
    run: Run, folder: Path, tmp_path: Path, command: str, name: str
) -> None:
    out = tmp_path / name
    if name == "damaged.aot":
        data = bytearray(_archive(out, 0).read_bytes())
        data[100] ^= 1
        out.write_bytes(data)
    elif name == "odd.aot":
        recording_driver.write_archive(out, [], [{"signature": "none"}])
    else:
        out.write_text(MANIFEST)
    before = out.read_bytes()
    result = run(command, folder / ("tiny.yaml" if command == "build" else "tiny.aot"), "-o", out)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {out}: is there and is no archive that can be read (")
    assert result.err.endswith("); name another output, or give --force to replace it\n")
    assert out.read_bytes() == before


def test_a_build_replaces_what_it_is_forced_to(run: Run, folder: Path, tmp_path: Path) -> None:
    arguments = ["build", folder / "tiny.yaml", "--candidates", 1, "--cache", folder / "cache", "--no-tune", "--force"]
    (tmp_path / "notes.txt").write_text("mine")
    for out in (_archive(tmp_path / "model.aot", 2), tmp_path / "notes.txt"):
        assert run(*arguments, "-o", out).status == 0
        assert out.read_bytes() == (folder / "tiny.aot").read_bytes()


def test_a_build_replaces_a_ranked_archive_and_an_empty_file(run: Run, folder: Path, tmp_path: Path) -> None:
    arguments = ["build", folder / "tiny.yaml", "--candidates", 1, "--cache", folder / "cache", "--no-tune"]
    (tmp_path / "empty.aot").touch()
    for out in (_archive(tmp_path / "model.aot", 0), tmp_path / "empty.aot"):
        assert run(*arguments, "-o", out).status == 0
        assert out.read_bytes() == (folder / "tiny.aot").read_bytes()


@pytest.mark.parametrize(("name", "options"), [("tuned.aot", []), ("notes.txt", ["--force"])])
def test_tune_replaces_an_archive_and_what_it_is_forced_to(
    run: Run, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: list[str]
) -> None:
    tuned: list[Path] = []

    def tune(source: Path, destination: Path, *_: object) -> dict[str, object]:
        tuned.append(destination)
        return {"unserved": []}

    monkeypatch.setattr(commands.tune, "tune_archive", tune)
    (tmp_path / "notes.txt").write_text("mine")
    _archive(tmp_path / "tuned.aot", 1)
    assert run("tune", archive, "-o", tmp_path / name, *options).status == 0
    assert tuned == [tmp_path / name]


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
@pytest.mark.parametrize("options", [[], ["--force"]])
def test_an_archive_is_not_written_to_standard_output(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["build", folder / "tiny.yaml"], ["tune", folder / "tiny.aot"]):
        result = run(*arguments, "-o", name, *options)
        assert (result.status, result.out) == (2, "")
        assert result.err == f"error: {name}: an archive is not written to standard output; name a file\n"
    assert not os.listdir(tmp_path)


def test_make_demo_can_be_run_again_where_the_first_was_tuned() -> None:
    assert "aot build manifests/llama-3.1-8b.yaml -o $(OUT) --force\n" in (ROOT / "Makefile").read_text()
