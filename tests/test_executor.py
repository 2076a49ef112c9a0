"""Measuring processes, real ones with a made-up GPU: what crashes, hangs or cannot begin, and what is blamed for it."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aot.tune.executor import LocalExecutor, MeasuringFailed
from aot.tune.jobs import Answer, Job
from aot.tune.options import TuneOptions
from aot.tune.run import Machine, tune_archive
from aot.tune.worker import Setup
from runtime.container.archive import Archive
from runtime.errors import AotError
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.tables.dispatch import Dispatch

from .recording_driver import entry, gemm_record, write_archive
from .simulated_gpu import GPU

ROOT = Path(__file__).resolve().parent.parent
SIGNATURES = [Signature("bf16", "bf16", "bf16", "f32", "none", n, 512) for n in (512, 1024)]
KEY = "bf16_bf16_bf16_f32_none_n512_k512"


def run(
    folder: Path, jobs: list[Job], backend: str = "crashing", workers: int = 1, timeout_s: float = 60.0
) -> dict[Job, Answer]:
    setup = Setup(folder / "none.aot", TuneOptions(), str(folder))
    made = LocalExecutor([None] * workers, f"tests.simulated_gpu:{backend}", setup, timeout_s)
    found: dict[Job, Answer] = {}
    with contextlib.closing(made) as executor:
        for job in jobs:
            executor.submit(job)
        while len(found) < len(jobs):
            found |= dict(executor.answers())
    return found


def starts(folder: Path) -> int:
    """How many measuring processes there were."""
    return len([path for path in folder.iterdir() if path.name.isdigit()])


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("dies", f"{KEY} M=1: its process ended with exit status 7"),
        ("poisons", f"{KEY} M=1: RuntimeError: CUDA error: an illegal memory access was encountered"),
    ],
)
def test_a_function_that_ends_its_process_is_rejected_and_the_rest_goes_on(
    tmp_path: Path, bad: str, reason: str
) -> None:
    job = Job(SIGNATURES[0], ("slow", bad, "quick", "wrong"), (1,), 64)
    answer = run(tmp_path, [job])[job]
    assert answer.rejected == {bad: reason, "wrong": f"{KEY} M=1: relative error 1.0"}
    assert answer.measured is not None
    assert [name for name, _ in answer.measured.times] == ["quick", "slow"]
    assert starts(tmp_path) == 2


def test_a_function_that_hangs_is_rejected_when_its_time_is_over(tmp_path: Path) -> None:
    job = Job(SIGNATURES[0], ("slow", "hangs"), (1,), 64)
    begun = time.monotonic()
    answer = run(tmp_path, [job], timeout_s=3.0)[job]
    assert answer.rejected == {"hangs": f"{KEY} M=1: no result after 3 s"}
    assert answer.measured is not None
    assert time.monotonic() - begun < 30


def test_what_fails_among_several_is_found_by_timing_each_alone(tmp_path: Path) -> None:
    job = Job(SIGNATURES[0], ("slow", "late", "quick"), (), 64)
    answer = run(tmp_path, [job], "dies_in_replays")[job]
    assert answer.rejected == {"late": f"{KEY} M=64: its process ended with exit status 9"}
    assert answer.measured is not None
    assert starts(tmp_path) == 3


def test_a_job_of_which_nothing_is_left_is_answered(tmp_path: Path) -> None:
    job = Job(SIGNATURES[0], ("dies",), (1,), 64)
    assert run(tmp_path, [job])[job] == Answer({"dies": f"{KEY} M=1: its process ended with exit status 7"})


def test_two_processes_share_the_jobs_and_give_the_same_answers(tmp_path: Path) -> None:
    jobs = [Job(s, ("slow", "quick"), (1,), m) for s in SIGNATURES for m in (16, 64)]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    assert run(tmp_path / "one", jobs) == run(tmp_path / "two", jobs, workers=2)
    assert (starts(tmp_path / "one"), starts(tmp_path / "two")) == (1, 2)


def test_a_process_that_cannot_begin_ends_the_tuning(tmp_path: Path) -> None:
    with pytest.raises(MeasuringFailed, match="failed before it began: RuntimeError: CUDA error: out of memory"):
        run(tmp_path, [Job(SIGNATURES[0], ("slow",), (1,))], "broken")


def test_a_gpu_that_no_longer_begins_is_to_blame_and_not_what_was_launched(tmp_path: Path) -> None:
    with pytest.raises(MeasuringFailed, match="failed before it began: RuntimeError: a product of ones is wrong here"):
        run(tmp_path, [Job(SIGNATURES[0], ("dies",), (1,))], "begins_once")


def test_memory_that_is_used_up_is_no_functions_fault(tmp_path: Path) -> None:
    job = Job(SIGNATURES[0], ("slow", "crowded", "quick"), (1,), 64)
    assert run(tmp_path, [job])[job].rejected == {}
    assert starts(tmp_path) == 2
    with pytest.raises(MeasuringFailed, match=r"failed twice at .* M=1: OutOfMemoryError: CUDA out of memory; look at"):
        run(tmp_path, [Job(SIGNATURES[0], ("slow", "full"), (1,))])


def test_a_device_that_multiplies_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from aot.tune.gpu import require_sound

    require_sound("cpu")
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: a * b)
    with pytest.raises(RuntimeError, match="a product of ones is wrong here"):
        require_sound("cpu")


def test_nothing_to_blame_twice_ends_the_tuning(tmp_path: Path) -> None:
    with pytest.raises(MeasuringFailed, match=r"failed twice at .* look at this GPU"):
        run(tmp_path, [Job(SIGNATURES[0], ("slow",), (), 64)], "baseline_dies")


def test_an_error_of_ours_ends_the_tuning_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(AotError, match="torch cannot compute it"):
        run(tmp_path, [Job(SIGNATURES[0], ("slow",), (), 64)], "refuses")


def test_an_archive_is_tuned_over_its_own_name_by_processes_that_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written while it runs has no place for what crashed; processes that begin later have it all the same."""
    monkeypatch.setattr("aot.tune.run._WRITE_EVERY_S", -1.0)
    names = ["slow", "dies", "quick", "poisons"]
    path = tmp_path / "model.aot"
    candidates = [[16, names], [64, names]]
    rows = [entry(s.to_json(), [(None, "dies")], candidates=candidates, state="ranked") for s in SIGNATURES]
    write_archive(path, [gemm_record(name) for name in names], rows)
    (tmp_path / "started").mkdir()

    def executor(setup: Setup) -> LocalExecutor:
        setup = dataclasses.replace(setup, details=str(tmp_path / "started"))
        return LocalExecutor([None], "tests.simulated_gpu:crashing", setup)

    report = tune_archive(path, path, machine=Machine((9, 0), GPU, executor))
    assert report.rejected.keys() == {"dies", "poisons"}
    with Archive.open(path) as archive:
        assert set(archive.functions) == {"quick"}
        assert [e.state for e in Dispatch.from_json(archive.table("gemm"), GEMM).entries] == ["tuned", "tuned"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.aot", "started"]


def test_tuning_imports_no_torch_into_the_command() -> None:
    looks = "print('torch' in sys.modules, 'multiprocessing.spawn' in sys.modules)"
    code = f"import sys; import aot.tune.run, aot.cli.commands; {looks}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "False"
