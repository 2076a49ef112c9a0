"""What commands print for people fits into 80 columns, on a terminal and through a pipe."""

from pathlib import Path

import pytest

import runtime

from .command_line import ROOT, Run
from .inspected import MANY, OTHER, on_a_terminal, write

LLAMA = str(ROOT / "tests" / "data" / "configs" / "llama-3.1-8b.json")
COMMANDS = [
    ["info", "x.aot"],
    ["info", runtime.universal()],
    ["ls", "x.aot"],
    ["ls", "x.aot", "--m", "700"],
    ["ls", "x.aot", "--functions"],
    ["ls", runtime.universal()],
    ["show", "x.aot", "qkv"],
    ["show", "x.aot", "qkv", "--m", "700"],
    ["show", "x.aot", MANY],
    ["show", runtime.universal(), "bf16_bf16_bf16_f32_none_n6144_k4096"],
    ["explain", "x.aot", "qkv", "--m", "700"],
    ["explain", "x.aot", "o", "--m", "16", "--gpu", "B200"],
    ["coverage", "x.aot", LLAMA],
    ["diff", "x.aot", runtime.universal(), "--gemm", "*"],
    ["history", "x.aot"],
    ["extract", "x.aot", OTHER, "--resources"],
    ["extract", "x.aot", MANY, "--resources"],
]


@pytest.fixture(autouse=True)
def inspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("x.aot"))


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: " ".join(words[:1]))
@pytest.mark.parametrize("columns", [None, 200])
def test_a_pipe_gets_lines_of_80_columns_or_as_many_as_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], columns: int | None
) -> None:
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    out = run(*arguments).out
    assert out
    assert [line for line in out.splitlines() if len(line) > (columns or 80)] == []


def test_a_wide_pipe_shortens_no_signature(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert "..." in run("ls", "x.aot").out
    monkeypatch.setenv("COLUMNS", "200")
    assert "..." not in run("ls", "x.aot").out


def test_a_terminal_gets_lines_of_its_width() -> None:
    for command, *more in (
        ["info"],
        ["ls"],
        ["explain", "qkv", "--m", 700],
        ["coverage", LLAMA],
        ["history"],
        ["show", "qkv"],
    ):
        out = on_a_terminal(command, "x.aot", *more)
        assert out
        assert [line for line in out.splitlines() if len(line) > 80] == []
