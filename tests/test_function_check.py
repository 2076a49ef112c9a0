"""Functions of a spec held against their references: the judgement with torch on the CPU, the rest with no GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from aot import build, selection
from aot.cli import commands
from aot.compile.compiler import BuildReport
from aot.pack import tables
from aot.pack.write import Package
from aot.providers import spec_file
from aot.spec import SpecError
from aot.tune import function_check, functions
from aot.tune.executor import LocalExecutor
from aot.tune.functions import TuneError, check_archive
from aot.tune.options import TuneOptions
from aot.tune.run import Machine
from aot.tune.worker import Announce, Setup
from runtime.container.archive import Archive
from runtime.errors import ArgumentError
from runtime.gemm.operation import GEMM
from runtime.program import arguments

from .command_line import Run
from .made_up_kernel import kernel
from .simulated_gpu import ENVIRONMENT, GPU, SimulatedGpu, machine

SPEC = """
from aot.spec import Clusters, Function, Scalar, Stream, Symbol, Tensor


def rows(name, **more):
    n, ldx, ldy = (Symbol(name, 8) for name in ("n", "ldx", "ldy"))
    arguments = [
        Tensor("x", "bf16", ("m", n), strides=(ldx, 1), alignment=16),
        Tensor("y", "bf16", ("m", n), strides=(ldy, 1), alignment=128, role="out"),
        Scalar("scale", "f32", value=3.0),
        Clusters("clusters", 2),
        Stream(),
    ]
    return Function(name, arguments, source="mine:rows", **{"reference": reference, **more})


def reference(x, scale):
    return x.double() * scale


functions = [rows("good"), rows("bad", variants={"a": {}}, make=print), rows("alone", reference=None)]
"""
NAMES = ["good.sm_90a", "bad.a.sm_90a", "alone.sm_90a"]


@pytest.fixture
def spec(tmp_path: Path) -> spec_file.Spec:
    (tmp_path / "spec.py").write_text(SPEC)
    return spec_file.load(tmp_path / "spec.py")


@pytest.fixture
def archive(spec: spec_file.Spec, tmp_path: Path) -> Path:
    """An archive of its functions, and of another."""
    package = Package()
    tree, symbols = spec.functions[0].record()
    described = {"arguments": arguments.to_json(tree), "symbols": arguments.symbols_to_json(symbols)}
    for i, name in enumerate([*NAMES, "other.sm_90a"]):
        record, cubin = kernel(name, "sm_90a", "spec.mine:rows", bytes([i]))
        package.add_function(record | described, cubin)
    package.set_table("gemm", tables.table([], GEMM, {}))
    package.write(tmp_path / "x.aot")
    return tmp_path / "x.aot"


# --- the judgement ---


def right(x: Any, y: Any, scale: float) -> None:
    y.copy_(x.double() * scale)


def of_another_scale(x: Any, y: Any, scale: float) -> None:
    y.copy_(x.double() * (scale * 1.01))


def leaves_a_part(x: Any, y: Any, scale: float) -> None:
    y[:-1] = x[:-1] * scale


def one_element_off(x: Any, y: Any, scale: float) -> None:
    right(x, y, scale)
    y[-1, -1] += 0.5 * scale


def writes_behind(x: Any, y: Any, scale: float) -> None:
    right(x, y, scale)
    last = y.storage_offset() + (y.shape[0] - 1) * y.stride(0) + y.shape[1]
    torch.as_strided(y, (1,), (1,), last)[0] = 0


def writes_between_rows(x: Any, y: Any, scale: float) -> None:
    right(x, y, scale)
    if y.stride(0) > y.shape[1] and y.shape[0] > 1:
        torch.as_strided(y, (1,), (1,), y.storage_offset() + y.shape[1])[0] = 0


def spoils_its_input(x: Any, y: Any, scale: float) -> None:
    right(x, y, scale)
    x[0, 0] = 0


def infinite(x: Any, y: Any, scale: float) -> None:
    right(x, y, scale)
    y[0, 0] = float("inf")


def refuses(x: Any, y: Any, scale: float) -> None:
    raise ArgumentError("x must be something else")


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (of_another_scale, r"y: relative error (1\.0|9\.)\d+e-0[23] \(limit 3\.0e-03\)"),
        (leaves_a_part, "it leaves part of y unwritten, or writes NaN"),
        (one_element_off, "y: relative error"),
        (writes_behind, "it writes outside of y"),
        (writes_between_rows, "it writes outside of y"),
        (spoils_its_input, "it writes to x, which is an input, or around it"),
        (infinite, "y is infinite where the reference is not"),
        (refuses, "ArgumentError: x must be something else"),
    ],
)
def test_what_is_wrong_is_found_and_named(spec: spec_file.Spec, launch: Callable[..., None], message: str) -> None:
    found = [function_check.check(spec, spec.functions[0], i, launch, 0, "cpu") for i in range(4)]
    assert re.match(message, found[3] or "")


@pytest.mark.parametrize("seed", range(20))
def test_what_is_right_passes_at_every_case(spec: spec_file.Spec, seed: int) -> None:
    for i, case in enumerate(spec.functions[0].checked_at()):
        shapes: list[Any] = []

        def launch(x: Any, y: Any, scale: float, shapes: list[Any] = shapes) -> None:
            shapes += [tuple(x.shape), x.stride(), y.stride(), scale]
            assert x.data_ptr() % 16 == 0
            assert torch.isnan(y).all()
            right(x, y, scale)

        assert function_check.check(spec, spec.functions[0], i, launch, seed, "cpu") is None
        padded = 24 if i % 2 else 0  # strides past the rows, a multiple of what divides them
        assert shapes == [(case["m"], case["n"]), (case["n"] + padded, 1), (case["n"] + padded, 1), 3.0]


MORE = """
from aot.spec import *
f = lambda *a, **m: Function("f", [*a, Stream()], make=print, **m)
functions = [f(
    Tensor("table", "f32", (8, 4), role="inout"),
    Tensor("at", "i64", ("m",), values=(2, 8)),
    Tensor("count", "i32", (1,), role="out"),
    reference=REFERENCE, cases=[{"m": 5}])]
"""


def more(folder: Path, reference: str) -> spec_file.Spec:
    (folder / "more.py").write_text(MORE.replace("REFERENCE", reference))
    return spec_file.load(folder / "more.py")


def test_integers_are_drawn_from_their_values_and_compared_exactly_and_inout_is_read_first(tmp_path: Path) -> None:
    found = more(tmp_path, "lambda table, at: (table.index_fill(0, at, 1.0), at.unique().numel() + at.new_zeros(1))")

    def fill(table: Any, at: Any, count: Any, off: int = 0) -> None:
        assert not torch.isnan(table).any()
        assert 2 <= int(at.min()) <= int(at.max()) < 8
        table[at] = 1.0
        count[0] = at.unique().numel() + off

    check = partial(function_check.check, found, found.functions[0], 0, seed=0, device="cpu")
    assert check(fill) is None
    assert check(partial(fill, off=1)) == "1 of 1 elements of count are wrong"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("lambda table, at: 1 / 0", "PATH:8: ZeroDivisionError: division by zero"),
        ("lambda table, at: __import__('torch').nn.functional.softmax(5)", "PATH:8: AttributeError: 'int' object"),
        ("lambda table, at: table", "PATH: function 'f': reference returns 1 tensors, the outputs are table, count"),
        (
            "lambda table, at: (table, at)",
            r"PATH: function 'f': reference: count must be a tensor of shape \(1,\), found",
        ),
        ("lambda table, at: (table, 5)", r"reference: count must be a tensor of shape \(1,\), found 5"),
    ],
)
def test_a_reference_that_fails_is_no_fault_of_the_function(tmp_path: Path, reference: str, message: str) -> None:
    found = more(tmp_path, reference)
    with pytest.raises(SpecError, match=message.replace("PATH", str(tmp_path / "more.py"))):
        function_check.check(found, found.functions[0], 0, lambda *_: None, 0, "cpu")


# --- an archive ---


def simulated(done: list[Any] | None = None, capability: tuple[int, int] = (9, 0)) -> Machine:
    """A machine whose GPU computes "bad" wrong."""
    gpu = SimulatedGpu(lambda *_: 1.0, wrong=lambda subject, name: "it is wrong" if name.startswith("bad") else None)
    return machine(gpu, done=done)._replace(capability=capability)


def test_wrong_functions_are_left_out_and_the_table_says_which_were_right_and_where(
    archive: Path, spec: spec_file.Spec, tmp_path: Path, run: Run
) -> None:
    done: list[Any] = []
    seen: list[Any] = []
    report = check_archive(archive, tmp_path / "y.aot", spec, None, lambda *of: seen.append(of), simulated(done))
    assert report.right == {"good.sm_90a": 4}
    assert report.wrong == {"bad.a.sm_90a": "bad.a.sm_90a at m = 1, n = 8: it is wrong"}
    assert (report.unchecked, report.elsewhere) == (["alone.sm_90a"], [])
    assert [job.names for job in done] == [("good.sm_90a",), ("bad.a.sm_90a",)]
    assert len(seen) == 2
    with Archive.open(tmp_path / "y.aot") as opened:
        assert sorted(opened.functions) == ["alone.sm_90a", "good.sm_90a", "other.sm_90a"]
        (row,) = opened.table("tuning")["environments"]
        assert row["right"] == {"good.sm_90a": opened.record("good.sm_90a")["cubin"]}
        assert row["gpu"] == ENVIRONMENT["gpu"]
    listed = json.loads(run("ls", tmp_path / "y.aot", "--json").out)["functions"]
    assert {f["name"]: f["checked_on"] for f in listed} == {
        "good.sm_90a": ["made up"],
        "alone.sm_90a": [],
        "other.sm_90a": [],
    }
    assert re.search(r"good\.sm_90a +made up\n", run("ls", tmp_path / "y.aot").out)
    assert "functions checked on made up" in run("ls", tmp_path / "y.aot").out
    assert "right on  made up\n" in run("show", tmp_path / "y.aot", "good.sm_90a").out
    checks = json.loads(run("verify", tmp_path / "y.aot", "--json").out)["checks"]
    assert all(check["ok"] for check in checks if check["subject"] == "tuning table")


def test_other_code_of_the_name_is_not_what_was_checked(archive: Path, spec: spec_file.Spec, run: Run) -> None:
    check_archive(archive, archive, spec, None, None, simulated())  # the output may be the input
    with Archive.open(archive) as opened:
        record, cubin = kernel("good.sm_90a", "sm_90a", "spec.mine:rows", b"other code")
        package = Package()
        package.add_function(record, cubin)
        package.set_table("tuning", opened.table("tuning"))
        package.set_table("gemm", opened.table("gemm"))
    package.write(archive)
    assert json.loads(run("ls", archive, "--json").out)["functions"][0]["checked_on"] == []


def test_what_cannot_be_checked_is_an_error_that_says_what_to_do(
    archive: Path, spec: spec_file.Spec, tmp_path: Path
) -> None:
    def fails(message: str, text: str = SPEC, capability: tuple[int, int] = (9, 0)) -> None:
        (tmp_path / "spec.py").write_text(text)
        changed = spec_file.load(tmp_path / "spec.py")
        with pytest.raises(TuneError, match=message):
            check_archive(archive, tmp_path / "y.aot", changed, None, None, simulated(None, capability))
        assert not (tmp_path / "y.aot").exists()

    fails(r"has no function of .*spec\.py \(new\); build it with --spec", SPEC + "functions = [rows('new')]\n")
    fails(
        r"good\.sm_90a takes other arguments than .*spec\.py says; build it again",
        SPEC.replace("(name, 8)", "(name, 4)"),
    )
    fails("none of its functions has a reference to check against", SPEC + "functions = functions[2:]\n")
    fails(r"functions of the spec are for sm_90a, and this GPU has compute capability 8\.0", capability=(8, 0))
    package = Package()
    with Archive.open(archive) as opened:
        package.add_archive(opened, ["bad.a.sm_90a"])
    package.write(archive)
    fails("no function of it is right, so nothing was written; the first: bad.a.sm_90a at m = 1, n = 8: it is wrong")


def test_tune_with_a_spec_warns_of_wrong_functions_with_status_1(
    archive: Path, spec: spec_file.Spec, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "this_machine", lambda backend: simulated())
    result = run("tune", archive, "-o", tmp_path / "y.aot", "--spec", spec.path)
    assert result.status == 1
    assert "warning: bad.a.sm_90a: left out: bad.a.sm_90a at m = 1, n = 8: it is wrong" in result.err
    assert "warning: alone.sm_90a: has no reference, so nothing is known of it" in result.err
    assert result.out.startswith(f"{tmp_path / 'y.aot'}: 1 function right on made up, 1 wrong; ")
    again = run("tune", tmp_path / "y.aot", "-o", tmp_path / "z.aot", "--spec", spec.path, "--json")
    assert (again.status, json.loads(again.out)["functions"]["right"]) == (0, {"good.sm_90a": 4})


@pytest.mark.parametrize("option", ["", "--no-tune"])
def test_where_a_gpu_is_a_build_goes_on_to_check_what_has_a_reference(
    archive: Path, spec: spec_file.Spec, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    (tmp_path / "mine.py").write_text("")

    def made(work: selection.Selection, destination: Path, *_: Any) -> build.Built:
        shutil.copy(archive, destination)
        kernels: Any = dict.fromkeys(work.functions)
        return build.Built(BuildReport(kernels, {}, {}, 0, 0, 0.0), (), (), 1, 0, 0, 0)

    monkeypatch.setattr(build, "build", made)
    monkeypatch.setattr(build, "tunable", bool)
    monkeypatch.setattr(commands.build, "_summary", lambda *_: {"archive": "y.aot", "checked": None, "tuning": None})
    monkeypatch.setattr(commands.build, "_tell", lambda *_, **__: None)
    monkeypatch.setattr(functions, "this_machine", lambda backend: simulated())
    arguments = [
        "build",
        "--spec",
        spec.path,
        "-o",
        tmp_path / "y.aot",
        "--target",
        "sm_90a",
        *([option] if option else []),
    ]
    result = run(*arguments)
    assert (result.status, "1 function right on made up, 1 wrong" in result.out) == (
        (0, False) if option else (1, True)
    )
    (tmp_path / "spec.py").write_text(
        SPEC.replace('**{"reference": reference, **more}', '**{**more, "reference": None}')
    )
    assert run(*arguments, "--force").status == 0  # with nothing to check


def test_without_a_gpu_tune_with_a_spec_says_so(archive: Path, spec: spec_file.Spec, tmp_path: Path, run: Run) -> None:
    if build.tunable(["sm_80", "sm_90a", "sm_100a"]):
        pytest.skip("there is a GPU")
    result = run("tune", archive, "-o", tmp_path / "y.aot", "--spec", spec.path)
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert "no CUDA GPU is available" in result.err
    assert run("tune", archive, "-o", spec.path, "--spec", spec.path).status == 2
    assert spec.path.read_text() == SPEC


# --- in processes of their own ---


class OnCpu:
    """A backend that stands in for `aot.tune.function_gpu`: launches are torch's, and "bad" takes its process along."""

    careful = False

    def __init__(self, setup: Setup, announce: Announce) -> None:
        self._spec, self._announce = spec_file.load(Path(setup.details), lasting=True), announce
        self._functions = function_check.names_of(self._spec.functions, "sm_90a")

    def environment(self) -> dict[str, Any]:
        return dict(ENVIRONMENT)

    def check(self, signature: Any, m: int, names: Sequence[str]) -> dict[str, str]:
        found = {}
        for name in names:
            self._announce(name, m)
            if name.startswith("bad") and m == 2:
                os._exit(11)
            if wrong := function_check.check(self._spec, self._functions[name], m, right, 0, "cpu"):
                found[name] = wrong
        return found

    bench: Any = None


def test_a_function_that_takes_its_process_along_is_the_one_that_is_wrong(
    archive: Path, spec: spec_file.Spec, tmp_path: Path
) -> None:
    here = Machine((9, 0), GPU, lambda setup: LocalExecutor([None], "tests.test_function_check:OnCpu", setup))
    report = check_archive(archive, tmp_path / "y.aot", spec, TuneOptions(), None, here)
    assert report.right == {"good.sm_90a": 4}
    assert report.wrong == {"bad.a.sm_90a": "bad.a.sm_90a at m = 17, n = 24: its process ended with exit status 11"}
