"""scripts/gpu_tests.py: which tests it gives to compute-sanitizer."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_tests  # noqa: E402

HOSTILE = re.compile(r"^def (test\w*_(?:no_(?:ends?|ids|experts|rows|indices)|none_write|outside_a)_\w*)", re.MULTILINE)


def sources(places: tuple[str, ...]) -> str:
    files = [
        file for place in places for file in ([ROOT / place] if place.endswith(".py") else (ROOT / place).glob("*.py"))
    ]
    return "\n".join(file.read_text() for file in files if "mark.gpu" in file.read_text())


@pytest.mark.parametrize("tested", [t for t in gpu_tests.ARCHIVES if t.hostile], ids=lambda t: t.name)
def test_every_word_for_hostile_tests_names_one(tested: gpu_tests.Tested) -> None:
    names = re.findall(r"^def (test_\w+)", sources(tested.tests), re.MULTILINE)
    assert all(any(word in name for name in names) for word in tested.hostile.split(" or "))


def test_every_test_that_gives_kernels_hostile_values_runs_under_memcheck() -> None:
    run = [t for t in gpu_tests.ARCHIVES if t.hostile]
    for folder in ("tests/grouped_gemm", "tests/moe", "tests/quantise"):
        for file in sorted((ROOT / folder).glob("test_gpu*.py")):
            place = str(file.relative_to(ROOT))
            words = [word for t in run if place.startswith(t.tests) for word in t.hostile.split(" or ")]
            for name in HOSTILE.findall(file.read_text()):
                assert any(word in name for word in words), (place, name)


def test_what_needs_the_gpu_for_itself_runs_behind_all_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[tuple[str, str, int]] = []

    def timed(command: list[str], log: Path | None = None) -> gpu_tests.Outcome:
        time.sleep(0.02 if "coverage" in str(command) else 0.1)
        marks, archive = command[command.index("-q") + 2], Path(command[command.index("--archive") + 1])
        ran.append((archive.stem, marks, sum(word.endswith(".py") for word in command)))
        return gpu_tests.Outcome(0.0, 0, "")

    monkeypatch.setattr(gpu_tests, "timed", timed)
    monkeypatch.setattr(gpu_tests, "path_of", lambda t, folder: folder / f"{t.name}.aot")
    monkeypatch.setattr(gpu_tests.measure, "environment", dict)
    monkeypatch.setattr(gpu_tests.report, "write", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["gpu_tests.py", "run", str(tmp_path), "--what", "tests", "--jobs", "2"])
    monkeypatch.setattr(gpu_tests, "ARCHIVES", [t for t in gpu_tests.ARCHIVES if not t.tune])
    gpu_tests.main()
    *first, (last, alone, few) = ran
    assert {name for name, _, _ in first} == {t.name for t in gpu_tests.ARCHIVES}
    assert {marks for _, marks, _ in first} == {"gpu and not alone"}
    assert (last, alone, few) == ("coverage", "alone", 1)
