"""The example of docs/functions.md is built as the page says, with the real compiler."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from .command_line import ROOT, Run

PAGE = (ROOT / "docs" / "functions.md").read_text()


def test_the_example_builds_by_the_command_on_the_page(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        Path(name).write_text(code)
    commands = re.findall(r"^aot (.*?)(?: *#.*)?$", PAGE, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["build", "tune", "ls"]
    assert run(*shlex.split(commands[0]), "--no-tune", "--cache", "cache").status == 0
    listed = json.loads(run("ls", "x.aot", "--json").out)["functions"]
    assert [f["name"] for f in listed] == re.findall(r'functions\["([^"]+)"\]', PAGE)
    assert run("verify", "x.aot").status == 0


def test_the_page_is_short() -> None:
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 500
