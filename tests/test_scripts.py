"""What every script of `scripts/` owes who calls it wrongly."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from .command_line import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import report

SCRIPTS = [p for p in sorted((ROOT / "scripts").glob("*.py")) if "__main__" in p.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_errors_that_it_knows_are_one_line_and_status_2(script: Path) -> None:
    assert script.read_text().rstrip().endswith("ends(main))")


@pytest.mark.parametrize("name", ["launch_all", "sweep_variants", "cold_read"])
def test_where_there_is_no_gpu_it_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    archive = [] if name == "cold_read" else [str(ROOT / "runtime" / "universal.aot")]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *archive])
    assert report.ends(importlib.import_module(name).main) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_a_package_that_is_missing_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise ModuleNotFoundError("No module named 'vllm.engine'", name="vllm.engine")

    def ours() -> None:
        raise ModuleNotFoundError("No module named 'aot.none'", name="aot.none")

    assert report.ends(work) == 2
    assert capsys.readouterr().err == "error: this needs vllm, which is not installed here\n"
    with pytest.raises(ModuleNotFoundError):
        report.ends(ours)
