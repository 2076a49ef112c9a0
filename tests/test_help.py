"""The help of each command, and what a shell completes."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from aot.tune.options import TuneOptions

from .command_line import COMMAND, ROOT, Run, read_as_aot_does

COMMANDS = [
    "",
    "build",
    "tune",
    "info",
    "ls",
    "show",
    "explain",
    "coverage",
    "diff",
    "history",
    "report",
    "extract",
    "prune",
    "merge",
    "verify",
    "sign",
    "rebuild",
    "doctor",
    "manifest",
    "manifest from-config",
    "manifest from-server",
    "cache",
    "cache info",
    "cache prune",
]


def _examples(text: str) -> list[str]:
    return [line.strip() for line in text[re.search("Examples?:\n", text).end() :].splitlines()]  # type: ignore[union-attr]


@pytest.mark.parametrize("command", COMMANDS)
def test_h_is_help(run: Run, command: str) -> None:
    short, long = (run(*command.split(), option) for option in ("-h", "--help"))
    assert short == long
    assert (short.status, short.err) == (0, "")
    assert short.out.startswith(f"Usage: {' '.join(['aot', *command.split()])} ")


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_examples_that_can_be_called(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERMINAL_WIDTH", columns)
    examples = _examples(run(*command.split(), "--help").out)
    assert examples
    for example in examples:
        program, *words = shlex.split(example)
        assert program == "aot"
        assert words[: len(command.split())] == command.split()
        read_as_aot_does(words)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_documents_and_no_source_file(run: Run, command: str) -> None:
    out = run(*command.split(), "--help").out
    assert ".py" not in out
    for name in re.findall(r"docs/[\w.]+", out):
        assert (ROOT / name.rstrip(".")).is_file()


def test_help_of_build_says_where_manifests_are_explained(run: Run) -> None:
    assert "docs/manifests.md" in run("build", "--help").out


@pytest.mark.parametrize("option", ["finalists", "repeats", "seed", "tolerance"])
def test_help_of_tune_states_the_defaults_that_it_has(run: Run, option: str) -> None:
    out = re.sub(r"\s+", " ", run("tune", "--help").out)
    said = re.search(rf"--{option} .*?\[default: ([^;\]]+)", out)
    assert said
    assert said[1] == str(getattr(TuneOptions(), option))


def test_help_of_tune_imports_no_torch() -> None:
    absent = "import sys; sys.modules['torch'] = None; sys.argv = ['aot', 'tune', '-h']"
    program = f"{absent}; from aot.cli.commands import main; main()"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


def test_a_shell_completes_commands() -> None:
    asked = {"_AOT_COMPLETE": "complete_bash", "COMP_WORDS": "aot ve", "COMP_CWORD": "1"}
    done = subprocess.run(COMMAND, cwd=ROOT, env=os.environ | asked, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["verify"], "")
