"""scripts/first_run.py without a GPU: what is asked for, what a table says, what is packed whatever fails."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import first_run
import report

from aot.problem import manifest as manifests
from aot.search.provider import families
from aot.search.targets import TARGETS
from aot.search.unserved import variants
from aot.tune import history
from aot.tune.halving import Measured
from aot.tune.session import Tuned
from aot.tune.timing import Timing
from runtime.errors import AotError
from runtime.gemm.signature import Signature

OF = Signature("e2m1", "e2m1", "bf16", "f32", "none", 4096, 4096, scaling="nvfp4")


def test_every_format_of_blackwell_is_asked_for() -> None:
    of = {(g.signature.a, g.signature.d, g.signature.scaling) for g in first_run.asked("sm_100a").gemms}
    assert of >= {
        (a, d, s) for a, s in (("e4m3", "mxfp8"), ("e2m1", "mxfp4"), ("e2m1", "nvfp4")) for d in ("bf16", "f16")
    }


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_asked_for_is_a_manifest_that_every_family_has_a_part_in(target: str) -> None:
    asked = first_run.asked(target)
    assert manifests.loads(manifests.dump(asked)) == asked
    serving = {v.family for item in asked.items() for v in variants(target, item.signature)}
    here = {n for p in ("own", "cutlass_operators") for n, f in families(p).items() if target in f.targets}
    not_asked = {"sm90_masked", "sm90_gathered"}  # grouped GEMMs with rows that are not asked for
    for_others = {"sm80_grouped_w4", "sm80_w4"} if target == "sm_90a" else set()  # builds for it choose better ones
    assert here - serving <= not_asked | for_others


def test_a_table_has_each_problem_and_who_was_wrong() -> None:
    times = (("good", Timing(10.0, 0.01)), ("slow", Timing(12.0, 0.01)))
    measured = Measured(64, times, "torch._scaled_mm", Timing(15.0, 0.01), 2)
    tuned = Tuned(OF, ["good", "slow", "bad"], [measured], {"bad": "it hangs"})
    tunings = history.table([(history.Kind("sm_100a", "B200"), tuned)])["tunings"]
    (row,) = first_run.rows(tunings)
    assert (row["function"], row["us"], row["torch_us"], row["right"], row["wrong"]) == ("good", 10.0, 15.0, 2, 1)
    assert row["tflops"] == pytest.approx(2 * 64 * 4096 * 4096 / 10.0 / 1e6)
    said = first_run.table([row], {"bad": "it hangs"}).splitlines()
    assert said[1].split() == ["10.00", "15.00", "1.50", "215", "2", "1", "64", OF.key()]
    assert said[-2:] == ["1 functions were rejected:", "  bad: it hangs"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`main` with options, whose steps end with the status that they are given and write nothing but logs."""

    def run(*options: str, statuses: dict[str, int] | None = None) -> tuple[int, list[str]]:
        taken: list[str] = []

        def step(name: str, command: Any, folder: Path) -> int:
            taken.append(name)
            (folder / f"{name}.log").write_text("said\n")
            if name == "build":
                (folder / "candidates.aot").write_text("")
            return (statuses or {}).get(name, 0)

        monkeypatch.setattr(first_run, "step", step)
        monkeypatch.setattr(sys, "argv", ["first_run.py", "--folder", str(tmp_path), *options])
        return report.ends(first_run.main), taken

    return run


def test_what_failed_is_packed_too(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_run, "require_gpu", lambda target: None)
    assert run("--target", "sm_100a", statuses={"build": 1, "tune": 1}) == (1, ["doctor", "build", "tune"])
    out = capsys.readouterr().out
    assert "steps that failed: build, tune" in out
    assert f"send back {tmp_path / 'first-run-sm_100a.zip'}" in out
    with zipfile.ZipFile(tmp_path / "first-run-sm_100a.zip") as packed:
        names = set(packed.namelist())
        assert names == {"manifest.yaml", "report.json", "table.txt", "doctor.log", "build.log", "tune.log"}
        assert json.loads(packed.read("report.json"))["steps"] == {"doctor": 0, "build": 1, "tune": 1}


def test_an_archive_is_built_where_there_is_no_gpu(run: Any, tmp_path: Path) -> None:
    assert run("--target", "sm_103a", "--build-only") == (0, ["build"])
    assert "targets: [sm_103a]" in (tmp_path / "manifest.yaml").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--target", "sm_1000"), "unknown target 'sm_1000'"),
        (("--target", "sm_100a", "--candidates", "0"), "--candidates must be 1 or more"),
        (("--target", "sm_100a", "--archive", "nowhere.aot"), "nowhere.aot does not exist; make it with --build-only"),
    ],
)
def test_wrong_calls_are_one_line(
    run: Any, options: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_run, "require_gpu", lambda target: None)
    assert run(*options) == (2, [])
    assert words in capsys.readouterr().err


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfHopper:
        compute_capability = (9, 0)

    monkeypatch.setattr(first_run, "Driver", OfHopper)
    with pytest.raises(AotError, match=r"compute capability 9\.0, which sm_100a is not for"):
        first_run.require_gpu("sm_100a")


def test_a_step_keeps_what_was_said_and_how_it_ended(tmp_path: Path) -> None:
    assert first_run.step("try", ["aot", "ls", "nowhere.aot"], tmp_path) == 2
    said = (tmp_path / "try.log").read_text().splitlines()
    assert "nowhere.aot" in said[-2]
    assert said[-1] == "exit status 2"


def test_a_step_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run, "MOST_S", 0.2)
    assert first_run.step("hang", ["timeit", "-n", "1", "-r", "1", "import time; time.sleep(60)"], tmp_path) < 0
