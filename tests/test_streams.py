"""What reaches standard output and standard error, whatever a file is called and whatever a terminal can show."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aot.cli import commands, streams
from aot.pack.write import Package
from runtime.container.archive import Archive

from .command_line import COMMAND, MANIFEST, ROOT, UP, Result, Run


@pytest.mark.parametrize("command", [["ls"], ["ls", "--json"], ["verify"]])
def test_a_full_disk_behind_standard_output_is_one_line(archive: Path, command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        arguments = [*COMMAND, command[0], str(archive), *command[1:]]
        done = subprocess.run(arguments, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: standard output cannot be written (No space left on device); redirect it elsewhere\n"
    )


def test_a_closed_standard_output_is_one_line(archive: Path) -> None:
    command = f"{sys.executable} -m aot ls {archive} >&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: standard output is closed")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [["ls"], ["ls", "--json"], ["info"], ["verify"], ["--help"]])
def test_a_reader_that_has_seen_enough_ends_it_by_sigpipe(archive: Path, command: list[str], unbuffered: str) -> None:
    read, write = os.pipe()
    os.close(read)
    arguments = [*COMMAND, command[0], *([] if command == ["--help"] else [str(archive)]), *command[1:]]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_a_closed_standard_error_keeps_errors_out_of_the_output(tmp_path: Path) -> None:
    command = f"{sys.executable} -m aot ls {tmp_path}/none.aot 2>&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


# --- what no terminal can show, or might obey ---

# No ASCII, and a terminal would obey some of it: colour, a line's end, text from right to left; the last is no UTF-8.
NAME = b"\xc3\xa4\xe6\xa8\xa1\x1b[31m\n\xe2\x80\xae\xff"
# Python then takes every byte of a file name above 127 for no text.
C_LOCALE = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


class _Stream(io.TextIOWrapper):
    """What a terminal of some encoding was sent."""

    def __init__(self, encoding: str) -> None:
        self.sent = io.BytesIO()
        super().__init__(self.sent, encoding=encoding, errors="strict", write_through=True)

    def text(self) -> str:
        return self.sent.getvalue().decode(self.encoding)


@pytest.fixture(params=["ascii", "utf-8"])
def run_odd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process, with `NAME` for ODD, on a terminal of an encoding."""

    def call(*arguments: object) -> Result:
        out, err = _Stream(request.param), _Stream(request.param)
        odd = os.fsdecode(NAME)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["aot", *(str(word).replace("ODD", odd) for word in arguments)])
            patched.setattr(sys, "stdout", out)
            patched.setattr(sys, "stderr", err)
            with pytest.raises(SystemExit) as exit:
                commands.main()
        return Result(int(exit.value.code or 0), out.text(), err.text())

    return call


@pytest.fixture
def odd(archive: Path, tmp_path: Path) -> Path:
    """A copy of an archive with an odd name, and odd names in it; its path, ODD for the name."""
    with Archive.open(archive) as opened:
        package = Package()
        package.add_archive(opened)
        package.set_table("gemm", opened.table("gemm"))
        table = opened.table("build")
    table["models"][0]["gemms"][0]["name"] = "\u6a21\x1b[31m\n\u202e\x7f"
    package.set_table("build", table)
    package.write(tmp_path / "odd.aot")
    os.rename(tmp_path / "odd.aot", os.fsencode(tmp_path) + b"/" + NAME + b".aot")
    return tmp_path / "ODD.aot"


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_odd_names_are_listed_on_any_terminal(run_odd: Run, odd: Path, command: str) -> None:
    entry = [UP] if command == "show" else []
    result = run_odd(command, odd, *entry)
    assert (result.status, result.err) == (0, "")
    assert all(c.isprintable() or c == "\n" for c in result.out)
    assert json.loads(run_odd(command, odd, *entry, "--json").out)
    assert "\\x1b[31m\\n\\u202e" in result.out
    if command == "verify":
        assert result.out.endswith("\\udcff.aot: 57 checks, all good\n")
        assert result.out.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "ODD"],
        ["show", "ODD", "up"],
        ["verify", "ODD"],
        ["build", "ODD", "-o", "x.aot"],
        ["build", "manifests/llama-3.1-8b.yaml", "-o", "ODD/x.aot"],
        ["build", "manifests/llama-3.1-8b.yaml", "-o", "x.aot", "--target", "ODD"],
        ["tune", "ODD", "-o", "x.aot"],
        ["manifest", "from-config", "ODD", "--tp", "1", "--tokens", "1"],
        ["manifest", "from-config", "c.json", "--tp", "ODD", "--tokens", "1"],
        ["ls", "--ODD"],
        ["ODD"],
    ],
)
def test_an_error_with_an_odd_name_is_one_line_on_any_terminal(
    run_odd: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(ROOT)
    result = run_odd(*arguments)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.endswith("\n")
    assert result.err[:-1].isprintable()


def test_a_build_of_odd_names_is_reported_on_any_terminal(run_odd: Run, folder: Path, tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/" + NAME + b".yaml", "w", encoding="utf-8") as file:
        file.write(MANIFEST.replace("model: tiny", 'model: "\u6a21"').replace("source: made up", "source: \u6a21"))
    options = ["--candidates", "1", "--cache", folder / "cache", "--no-tune"]
    result = run_odd("build", tmp_path / "ODD.yaml", "-o", tmp_path / "ODD.aot", *options)
    assert (result.status, result.err) == (0, "")
    assert result.out[:-1].isprintable()
    again = run_odd("build", tmp_path / "ODD.yaml", "-o", tmp_path / "ODD.aot", "--json", *options)
    assert json.loads(again.out)["archive"] == str(tmp_path / os.fsdecode(NAME + b".aot"))


def test_odd_names_are_listed_in_the_c_locale(odd: Path) -> None:
    path = os.fsencode(odd).replace(b"ODD", NAME)
    done = subprocess.run([*COMMAND, "verify", path], cwd=ROOT, env=os.environ | C_LOCALE, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(
        b"\\udcc3\\udca4\\udce6\\udca8\\udca1\\x1b[31m\\n\\udce2\\udc80\\udcae\\udcff.aot: 57 checks, all good\n"
    )


def test_what_is_printable_stays_as_it_is() -> None:
    assert streams.printable("a \u6a21.aot") == "a \u6a21.aot"
    assert streams.printable("a\tb\r\n\x9b\udcff\u2028") == "a\\tb\\r\\n\\x9b\\udcff\\u2028"


def test_json_has_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    streams.print_json({"\x1b\x7f": "\x00\x7f\x9b"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"\x1b\x7f": "\x00\x7f\x9b"}
    assert all(c.isprintable() or c == "\n" for c in out)


@pytest.mark.parametrize("command", ["ls none.aot", "nonsense", ""])
def test_a_full_disk_behind_standard_error_changes_no_exit_status(command: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *command.split()], cwd=ROOT, stdout=subprocess.PIPE, stderr=full, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
