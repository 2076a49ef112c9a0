"""Functions of a spec through the command line, with the real compiler and no GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot.compile import cubin
from runtime import Library
from runtime.container.archive import Archive

from .command_line import ALONE, ROOT, Result, Run
from .recording_driver import FakeTensor, FakeTorch, RecordingDriver

KERNEL = '''
import cutlass
from cutlass import cute


class Scale:
    """y = factor * x, a thread an element; `spill` keeps what it needs in local memory."""

    def __init__(self, threads=128, spill=False):
        self.threads, self.spill = threads, spill

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, bias, factor: cutlass.Float32, stream):
        assert bias is None
        if cutlass.const_expr(self.threads == 1000):
            raise ValueError("a thousand threads are too many")
        blocks = cute.ceil_div(cute.size(x), self.threads)
        self.kernel(x, y, factor).launch(grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        i = block * self.threads + thread
        if i < cute.size(x):
            value = x[i] * factor
            if cutlass.const_expr(self.spill):
                values = cute.make_rmem_tensor((64,), cutlass.Float32)
                values.fill(0.0)
                for j in range(i):
                    at = cutlass.Int32(x[j])
                    values[at] = values[at] + value
                value = values[cutlass.Int32(x[0])]
            y[i] = value
'''
SPEC = """
from aot.spec import Constant, Function, Options, Scalar, Stream, Symbol, Tensor


def make(**choices):
    from mykernels import Scale

    return Scale(**choices)


def scale(name="scale", extra=(), **more):
    given = {"source": "mykernels:Scale", "make": make, "targets": ("sm_90a",), **more}
    arguments = [
        Tensor("x", "f32", ("n",)),
        Tensor("y", "f32", ("n",), role="out"),
        Constant("bias", None),
        Scalar("factor", "f32", value=3.0),
        Stream(),
        *extra,
    ]
    return Function(name, arguments, **given)


functions = [FUNCTIONS]
"""
Build = Callable[..., Result]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spec") / "cache"


@pytest.fixture
def build(run: Run, tmp_path: Path, cache: Path) -> Build:
    """Build functions of a spec, by default its `scale()`, into tmp_path / "x.aot"."""
    (tmp_path / "mykernels.py").write_text(KERNEL)

    def call(functions: str = "scale()", *options: object, text: str = SPEC) -> Result:
        (tmp_path / "spec.py").write_text(text.replace("FUNCTIONS", functions))
        arguments = ["-o", tmp_path / "x.aot", "--spec", tmp_path / "spec.py", "--cache", cache, "--no-tune", *ALONE]
        return run("build", *arguments, "--force", *options)

    return call


def test_a_function_is_built_by_its_source_and_shown_and_verified(build: Build, run: Run, tmp_path: Path) -> None:
    result = build(
        "scale(), scale('other', source='', variants={'a': {}, 'b': {'threads': 256}})", "--function", "mykernels:Scale"
    )
    assert (result.status, result.err.count("failed")) == (0, 0), result.err
    out = tmp_path / "x.aot"
    assert [f["name"] for f in json.loads(run("ls", out, "--json").out)["functions"]] == ["scale.sm_90a"]
    shown = json.loads(run("show", out, "scale.sm_90a", "--json").out)["function"]
    assert [(a["name"], a["kind"]) for a in shown["arguments"]] == [
        ("x", "tensor"),
        ("y", "tensor"),
        ("factor", "scalar"),
        ("stream", "stream"),
    ]
    assert shown["family"] == "spec.mykernels:Scale"
    assert run("verify", out).status == 0
    with Archive.open(out) as archive:
        tables = json.dumps([archive.table(name) for name in archive.tables] + [archive.record("scale.sm_90a")])
    assert str(tmp_path) not in tables
    assert "spec.py" not in tables


def test_every_variant_is_a_function_of_the_archive_and_a_rebuild_compiles_nothing(
    build: Build, run: Run, tmp_path: Path
) -> None:
    functions = "scale(variants={'a': {}, 'b': {'threads': 256}})"
    assert build(functions).status == 0
    before = (tmp_path / "x.aot").read_bytes()
    with Archive.open(tmp_path / "x.aot") as archive:
        assert list(archive.functions) == ["scale.a.sm_90a", "scale.b.sm_90a"]
        cubins = {archive.record(name)["cubin"] for name in archive.functions}
        assert len(cubins) == 2
    found = json.loads(build(functions, "--json").out)
    assert (found["compiled"], found["cached"]) == (0, 2)
    assert (tmp_path / "x.aot").read_bytes() == before
    (tmp_path / "mykernels.py").write_text(KERNEL.replace("x[i] * factor", "x[i] + factor"))
    assert json.loads(build(functions, "--json").out)["compiled"] == 2


def test_it_is_built_again_from_its_spec_and_another_kernel_is_named(
    build: Build, run: Run, tmp_path: Path, cache: Path
) -> None:
    assert build().status == 0
    again = ["rebuild", tmp_path / "x.aot", "--check", "--spec", tmp_path / "spec.py", "--cache", cache, *ALONE]
    done = run(*again)
    assert (done.status, "the same bytes were built, 1 function" in done.out) == (0, True), done
    (tmp_path / "mykernels.py").write_text(KERNEL.replace("x[i] * factor", "x[i] + factor"))
    done = run(*again)
    assert (done.status, "scale.sm_90a: has another record" in done.out) == (1, True), done
    (tmp_path / "spec.py").write_text(SPEC.replace("FUNCTIONS", "scale('other')"))
    done = run(*again)
    assert (done.status, "was built with --spec of the digest" in done.err) == (2, True), done


def test_a_function_is_called_by_its_name(build: Build, tmp_path: Path, torch: FakeTorch) -> None:
    assert build().status == 0
    with Archive.open(tmp_path / "x.aot") as archive:
        binary = archive.cubin("scale.sm_90a")
        sizes = {name: kernel.parameter_sizes for name, kernel in cubin.kernels(binary).items()}
        driver = RecordingDriver(kernels={binary: sizes})
        x, y = (FakeTensor((1000,), "float32", pointer=pointer) for pointer in (0x7000, 0x9000))
        Library(archive, driver).functions["scale.sm_90a"](x, y, 2.5, stream=5)
    (launch,) = driver.launches
    assert (launch.grid, launch.block, launch.stream) == ((8, 1, 1), (128, 1, 1), 5)


@pytest.mark.usefixtures("row_scale")
def test_words_of_providers_work_beside_a_spec_and_without_a_manifest(build: Build, run: Run, tmp_path: Path) -> None:
    assert build("scale()", "--function", "scale", "--function", "row_scale", "--target", "sm_90a").status == 0
    names = [f["name"] for f in json.loads(run("ls", tmp_path / "x.aot", "--json").out)["functions"]]
    assert "scale.sm_90a" in names
    assert sum(name.startswith("row_scales.row.") for name in names) == len(names) - 1 > 0


RAISES = 1 + KERNEL[: KERNEL.index("raise ValueError")].count("\n")  # in which line


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ("scale(make=lambda: 1 / 0)", "SPEC:FLINE: ZeroDivisionError: division by zero"),
        ("scale(make=lambda: 5)", "SPEC: function 'scale': make returned 5; return what cute.compile takes"),
        ("scale(make=None, source='mykernels:Scal')", "SPEC: mykernels has no 'Scal'; did you mean 'Scale'?"),
        (
            "scale(variants={'a': {'size': 1}})",
            "SPEC:8: TypeError: Scale.__init__() got an unexpected keyword argument",
        ),
        (
            "scale(variants={'a': {'threads': 1000}})",
            f"SPEC: function 'scale': at FOLDER/mykernels.py:{RAISES}: ValueError: a thousand threads",
        ),
        ("scale(variants={'a': {'spill': True}})", "bytes a thread in local memory"),
        ("scale(make=lambda: print)", "SPEC: function 'scale': "),
        (
            "scale(extra=[Scalar('more', 'i32'), Scalar('most', 'i32')])",
            "SPEC: function 'scale': the spec gives 7 arguments, and the function takes 5; describe each of these",
        ),
        (
            "scale(make=lambda: lambda x, y, bias, factor, stream, more, most=0: None)",
            "SPEC: function 'scale': the spec gives 5 arguments, and the function takes 6 to 7; ",
        ),
    ],
)
def test_what_fails_in_the_users_code_is_one_line_with_file_and_line(
    build: Build, tmp_path: Path, functions: str, message: str
) -> None:
    result = build(functions)
    assert (result.status, result.out) == (2, "")
    assert "Traceback" not in result.err
    message = message.replace("SPEC", str(tmp_path / "spec.py")).replace("FOLDER", str(tmp_path))
    message = message.replace("FLINE", str(1 + SPEC[: SPEC.index("functions = ")].count("\n")))
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "warning: " not in result.err, "one error says it"
    assert not (tmp_path / "x.aot").exists()


def test_where_all_functions_fail_each_reason_is_told_once(build: Build) -> None:
    result = build("scale(make=lambda: 1 / 0), scale('wrong', make=lambda: 5)")
    assert (result.status, result.out) == (2, "")
    assert result.err.count("ZeroDivisionError") == result.err.count("make returned 5") == 1
    assert result.err.endswith("error: none of 2 kernels compiled; the warnings say why of each\n")


def test_kernels_that_spill_are_shipped_where_the_spec_says_so(build: Build, run: Run, tmp_path: Path) -> None:
    options = "options=Options(opt_level=2, ptxas='--maxrregcount=64', local_memory=True)"
    assert build(f"scale(variants={{'a': {{'spill': True}}}}, {options})").status == 0
    shown = json.loads(run("show", tmp_path / "x.aot", "scale.a.sm_90a", "--json").out)["function"]
    assert shown["kernels"][0]["local_bytes"] > 0
    assert run("verify", tmp_path / "x.aot").status == 0


def test_an_option_for_ptxas_reaches_it(build: Build) -> None:
    result = build("scale(options=Options(ptxas='--no-such-option'))")
    assert result.status == 2
    assert "no-such-option" in result.err


def test_where_some_functions_fail_the_rest_is_built_and_the_status_is_1(build: Build, tmp_path: Path) -> None:
    result = build("scale(), scale('wrong', make=lambda: 1 / 0)")
    assert result.status == 1
    assert re.search(r"warning: wrong\.sm_90a: .*ZeroDivisionError", result.err)
    with Archive.open(tmp_path / "x.aot") as archive:
        assert list(archive.functions) == ["scale.sm_90a"]
        assert archive.table("build")["failures"] == []  # which would tell where the spec lies


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--function", "mykernels:Scales"], "has no function 'mykernels:Scales'; did you mean 'mykernels:Scale'?"),
        (["--function", "scales"], "has no function 'scales'; did you mean 'scale'?"),
        (["--function", "scale", "--function", "scales"], "unknown function 'scales' on sm_90a; "),
        (["--target", "sm_80"], "function 'scale': not for sm_80: its targets are sm_90a"),
        (["--target", "sm_90"], "unknown target 'sm_90'; did you mean 'sm_90a'"),
        (["--universal"], "--function and --spec add what no table chooses; build that without --universal"),
    ],
)
def test_what_the_spec_cannot_give_has_status_2(build: Build, options: list[str], message: str) -> None:
    result = build("scale()", *options)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


def test_a_source_without_a_spec_says_what_to_give(run: Run, tmp_path: Path) -> None:
    out = ["-o", tmp_path / "x.aot"]
    for arguments, message in (
        ([*out, "--function", "quack.rmsnorm:RMSNorm"], "--function quack.rmsnorm:RMSNorm: what it takes is not known"),
        (out, "there is nothing to build; name a manifest, or --function and --spec"),
        (
            [*out, "--function", "softmax"],
            "'softmax' is compiled for the targets of manifests, and there is none; give",
        ),
    ):
        result = run("build", *arguments)
        assert (result.status, result.err.count("\n")) == (2, 1)
        assert message in result.err


def test_a_spec_is_not_written_over(build: Build, run: Run, tmp_path: Path) -> None:
    (tmp_path / "spec.py").write_text(SPEC)
    result = run("build", "--spec", tmp_path / "spec.py", "-o", tmp_path / "spec.py")
    assert result.status == 2
    assert "is an input too" in result.err


def test_the_command_imports_no_dsl_for_a_spec(build: Build, tmp_path: Path, cache: Path) -> None:
    assert build().status == 0
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'cutlass'])); from aot.cli.commands import main; "
        f"sys.argv = ['aot', 'build', '--spec', {str(tmp_path / 'spec.py')!r}, '-o', {str(tmp_path / 'y.aot')!r}, "
        f"'--cache', {str(cache)!r}, '--no-tune']; main()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "y.aot").read_bytes() == (tmp_path / "x.aot").read_bytes()


def test_launch_programs_of_a_spec_equal_the_compilers_host_code(tmp_path: Path) -> None:
    (tmp_path / "mykernels.py").write_text(KERNEL)
    (tmp_path / "spec.py").write_text(SPEC.replace("FUNCTIONS", "scale()"))
    oracle: Any = [sys.executable, "-m", "tests.oracle", "sm_90a", "--spec", tmp_path / "spec.py", "--cases", "50"]
    done = subprocess.run(oracle, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.startswith("ok      50 cases  scale.sm_90a")
