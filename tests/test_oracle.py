"""Every family on every target: the launch program says what the compiler's own host code says."""

import subprocess
import sys
from pathlib import Path

import pytest

from aot.search.targets import TARGETS

from .compilers import needed

ROOT = Path(__file__).parent.parent


def oracle(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.oracle", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


MANY = "sm_90a", "sm_100a", "sm_103a"  # those with many families


@pytest.mark.parametrize(
    ("target", "more"),
    [
        ("sm_80", ["--family", "sm80_tensorop"]),
        ("sm_80", ["--family", "sm80_w4"]),
        ("sm_80", ["--family", "sm80_grouped_w4"]),
        *(pytest.param(t, [], marks=[pytest.mark.long, *needed(t)]) for t in TARGETS),
    ],
    ids=["sm_80's own", "weights of 4 bits", "groups of these", *TARGETS],
)
def test_launch_programs_equal_the_compilers_host_code(target: str, more: list[str]) -> None:
    run = oracle(target, "--cases", "200", *more)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert run.stdout.count("ok") >= 3


@pytest.mark.parametrize("target", [pytest.param(t, marks=[pytest.mark.long] * (t != "sm_90a")) for t in MANY])
def test_the_oracle_takes_a_program_of_each_family_and_notices_a_changed_one(target: str) -> None:
    run = oracle(target, "--mutate")
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert "changed constants noticed" in run.stdout
