"""The example of docs/functions.md is built as the page says, with the real compiler."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from aot.providers import spec_file

from .command_line import ROOT, Run

PAGE = (ROOT / "docs" / "functions.md").read_text()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the page, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        Path(name).write_text(code)


@pytest.mark.usefixtures("files")
def test_the_example_builds_by_the_command_on_the_page(run: Run) -> None:
    commands = re.findall(r"^aot (.*?)(?: *#.*)?$", PAGE, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["build", "tune", "ls"]
    assert run(*shlex.split(commands[0]), "--no-tune", "--cache", "cache").status == 0
    listed = json.loads(run("ls", "x.aot", "--json").out)["functions"]
    assert [f["name"] for f in listed] == re.findall(r'functions\["([^"]+)"\]', PAGE)
    assert run("verify", "x.aot").status == 0


@pytest.mark.usefixtures("files")
def test_the_example_with_choices_builds_what_the_page_says(run: Run) -> None:
    assert run("build", "--spec", "choices.py", "-o", "y.aot", "--no-tune", "--cache", "cache").status == 0
    listed = json.loads(run("ls", "y.aot", "--json").out)["functions"]
    assert {f["name"] for f in listed} == set(re.findall(r"`(scale_by\.[^`]+)`", PAGE))
    (function,) = spec_file.load(Path("choices.py")).functions
    assert function.checked_at() == [{"n": 4}, {"n": 100_000}]


def test_the_page_is_short() -> None:
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 500
