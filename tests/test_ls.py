"""The command ls: a line a layer, and filters."""

import json
from pathlib import Path

import pytest

from .command_line import Run
from .inspected import FEW, MANY, OUT, QKV, WIDE, WRONG, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.aot")


def test_a_layer_is_one_line_with_its_mean_and_worst_ratio(run: Run, path: Path) -> None:
    lines = run("ls", path).out.splitlines()
    (qkv,) = [line.split() for line in lines if line.startswith("qkv ")]
    assert (qkv[1], qkv[-2:]) == (QKV, ["1.05x", "0.95x"])
    assert [line.split()[1] for line in lines if line.startswith("o ")] == [OUT]


@pytest.mark.parametrize(
    ("option", "value", "kept"),
    [
        ("--gemm", "qkv", [QKV]),
        ("--gemm", "q*", [QKV]),
        ("--gemm", OUT, [OUT]),
        ("--state", "ranked", [OUT]),
        ("--target", "sm_90a", [QKV, OUT]),
    ],
)
def test_a_filter_keeps_what_it_names(run: Run, path: Path, option: str, value: str, kept: list[str]) -> None:
    entries = json.loads(run("ls", path, option, value, "--json").out)["entries"]
    assert [entry["signature"] for entry in entries] == kept


@pytest.mark.parametrize(("m", "function", "range_"), [(1, FEW, "1-64"), (700, MANY, "65-700"), (701, WIDE, "701-")])
def test_m_names_the_function_that_serves_it(run: Run, path: Path, m: int, function: str, range_: str) -> None:
    found = json.loads(run("ls", path, "--m", m, "--gemm", "qkv", "--json").out)
    ((row,),) = (entry["ranges"] for entry in found["entries"])
    assert row["function"] == function
    (line,) = [line for line in run("ls", path, "--m", m).out.splitlines() if line.startswith("qkv ")]
    assert range_ in line.split()
    assert line.split()[-1] == found["short_names"][function]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gemm", "qvk"], "has nothing of the layer 'qvk'; did you mean 'qkv'? known: qkv, o"),
        (["--gemm", "q*", "--gemm", "oo"], "has nothing of the layer 'oo'; did you mean 'o'? known: qkv, o"),
        (["--state", "tund"], "has nothing of the state 'tund'; did you mean 'tuned'?"),
        (["--target", "sm_80"], "has nothing of the target 'sm_80'; did you mean 'sm_90a'?"),
        (["--m", "1", "--m", "2"], "--m is there twice, 1 and 2; ask for one M at a time"),
        (["--gemm", "qkv", "--state", "ranked"], "has nothing that is all of what was asked; leave out a filter"),
    ],
)
def test_a_filter_that_nothing_passes_is_an_error(run: Run, path: Path, arguments: list[str], said: str) -> None:
    result = run("ls", path, *arguments)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert said in result.err


def test_functions_are_listed_with_what_they_are_there_for(run: Run, path: Path) -> None:
    lines = [line.split() for line in run("ls", path, "--functions").out.splitlines()[1:]]
    assert sorted(word for _, word, *_ in lines) == ["by", "candidate", "serves", "serves", "serves"]


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        (["--gemm", "qkv"], {FEW: "serves", MANY: "serves", WIDE: "serves"}),
        (["--gemm", "o"], {WIDE: "serves", WRONG: "candidate"}),
        (["--state", "ranked"], {WIDE: "serves", WRONG: "candidate"}),
        (["--m", 1], {FEW: "serves", WIDE: "serves"}),
        (["--gemm", "qkv", "--m", 100], {MANY: "serves", WIDE: "equal bits"}),
        (["--target", "sm_90a", "--state", "tuned", "--m", 1000], {WIDE: "serves"}),
    ],
)
def test_functions_of_what_passes_a_filter_are_listed(
    run: Run, path: Path, arguments: list[object], listed: dict[str, str]
) -> None:
    assert json.loads(run("ls", path, "--functions", *arguments, "--json").out)["uses"] == listed
    lines = run("ls", path, "--functions", *arguments).out.splitlines()[1:]
    assert len(lines) == len(listed)
