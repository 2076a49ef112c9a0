"""scripts/compile_sample.py: what it draws, and what it takes for a refusal. A few variants are compiled with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aot.search.legal import illegal
from aot.search.targets import TARGETS

from .command_line import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import compile_sample

ALL = list(TARGETS)


def test_it_draws_different_legal_variants_of_every_family_and_target() -> None:
    drawn = compile_sample.draw(200, 0, ALL)
    assert len(set(drawn)) == len(drawn) == 200
    assert [illegal(v) for v in drawn] == [None] * 200
    assert {(v.provider, v.family, v.target) for v in drawn} == set(compile_sample.strata(ALL))


def test_a_seed_draws_the_same_and_another_others() -> None:
    first, again, other = (compile_sample.draw(100, seed, ALL) for seed in (1, 1, 2))
    assert first == again
    assert len(set(first) & set(other)) < 30


def test_of_a_family_that_has_fewer_it_draws_all() -> None:
    drawn = compile_sample.draw(400, 0, ["sm_80"])
    assert {v.target for v in drawn} == {"sm_80"}
    assert sum(v.family == "sm80_tensorop" for v in drawn) == 8, "two types, two tiles, batched or not"


@pytest.mark.parametrize(
    ("reason", "by_name"),
    [
        ("kernel_f keeps 16 bytes a thread in local memory beside its 255 registers", True),
        ("ValueError: Not enough SMEM or TMEM capacity for selected tile size", False),
        ("DSLRuntimeError: The compiler hit an internal DSL problem", False),
        ("its worker was killed by SIGSEGV", False),
        ("no result after 300 s", False),
    ],
)
def test_what_the_compiler_says_itself_is_no_refusal_by_name(reason: str, by_name: bool) -> None:
    assert compile_sample.expected(reason) == by_name


@pytest.mark.long
def test_a_sample_of_every_family_compiles() -> None:
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    command = [sys.executable, "scripts/compile_sample.py", "--count", "60", "--seed", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
