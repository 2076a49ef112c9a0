"""A file of times that `scripts/keep_times.py` writes says what the archive's history does."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import pytest

from aot.search.costs import Machine
from aot.tune import times
from runtime.device.gpus import H200
from runtime.gemm.universal import machine_of

from .command_line import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import keep_times
import report

PACKAGED = ROOT / "runtime" / "universal.aot"


def keep(monkeypatch: pytest.MonkeyPatch, gpu: str, output: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["keep_times.py", str(PACKAGED), "--gpu", gpu, "-o", str(output)])
    return report.ends(keep_times.main)


def test_times_read_as_those_of_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "kept.json.xz"
    assert keep(monkeypatch, "NVIDIA H200", output) == 0
    of_archive, kept = (times.load(path, "sm_90a") for path in (PACKAGED, output))
    of_archive = [(signature, at) for signature, at in of_archive if at.machine == Machine(*machine_of(H200))]
    assert len(kept) == len(of_archive) == 304
    by_problem = {(signature, at.m): at.us for signature, at in of_archive}
    for signature, at in kept:
        assert at.us == pytest.approx(by_problem[signature, at.m], rel=5e-4)
    assert json.loads(lzma.decompress(output.read_bytes()))["gpu"] == "NVIDIA H200"


def test_a_gpu_that_it_was_not_tuned_on_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keep(monkeypatch, "NVIDIA H20", tmp_path / "kept.json.xz") == 2
    assert "has no times of NVIDIA H20" in capsys.readouterr().err
