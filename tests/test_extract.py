"""The command extract: a function's cubin, its SASS, what it takes of an SM."""

import json
import subprocess
from pathlib import Path

import pytest

from aot.inspect import sass
from runtime.container.archive import Archive

from .command_line import COMMAND, ROOT, Run
from .inspected import FEW, write
from .recording_driver import cubin


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.aot")


def test_the_cubin_is_written_as_it_is_loaded(run: Run, path: Path) -> None:
    out = path.parent / "kernel.cubin"
    assert run("extract", path, FEW, "--cubin", "-o", out) == (0, "", "")
    assert out.read_bytes() == cubin(FEW)
    result = run("extract", path, FEW, "--cubin", "-o", out)
    assert (result.status, result.out) == (2, "")
    assert "is there; name another output, or give --force" in result.err
    assert run("extract", path, FEW, "--cubin", "-o", out, "--force").status == 0


def test_a_function_is_named_by_the_beginning_of_its_digest(run: Run, path: Path) -> None:
    short = json.loads(run("ls", path, "--json").out)["short_names"][FEW]
    found = json.loads(run("extract", path, short, "--resources", "--json").out)
    assert found["function"] == FEW
    with Archive.open(path) as archive:
        (kernel,) = archive.record(FEW)["kernels"]
    assert [launch["registers"] for launch in found["launches"]] == [kernel["registers"]]
    assert f"{kernel['registers']} a thread" in run("extract", path, short, "--resources").out


def test_a_pipe_gets_the_cubin(path: Path) -> None:
    done = subprocess.run([*COMMAND, "extract", path, FEW, "--cubin"], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, cubin(FEW), b"")


def test_sass_of_a_real_kernel_has_its_instructions(run: Run, archive: Path, tmp_path: Path) -> None:
    try:
        sass.nvdisasm()
    except sass.NoDisassembler:
        pytest.skip("nvdisasm is not installed")
    with Archive.open(archive) as opened:
        name = next(name for name in opened.functions if "small_m" in name)
    assert run("extract", archive, name, "--sass", "-o", tmp_path / "x.sass").status == 0
    assert "HGMMA" in (tmp_path / "x.sass").read_text()


def test_without_a_disassembler_the_error_says_what_to_install(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sass.shutil, "which", lambda _: None)
    monkeypatch.setattr(sass.sysconfig, "get_path", lambda _: "/nowhere")
    monkeypatch.setattr(sass, "_TOOLKIT", Path("/nowhere"))
    result = run("extract", path, FEW, "--sass")
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert "pip install nvidia-cuda-nvdisasm" in result.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing", "--cubin"], "has no function 'nothing', and no digest begins so"),
        ([FEW], "give one of --cubin, --sass and --resources"),
        ([FEW, "--cubin", "--sass"], "give one of --cubin, --sass and --resources"),
        ([FEW, "--cubin", "--json"], "--json is for --resources"),
        ([FEW, "--cubin", "-o", "x.aot"], "is an input too"),
    ],
)
def test_a_wrong_call_is_one_line(
    run: Run, path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(path.parent)
    result = run("extract", "x.aot", *arguments)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert said in result.err
