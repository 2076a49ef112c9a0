"""Options and fixtures that several test files share."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from runtime import native

from .command_line import MANIFEST, Result, Run
from .distributions import install_row_scale
from .native_stand_in import exchange_capsule
from .recording_driver import FakeTensor, FakeTorch
from .shared import built_once

# Inductor compiles a file for each vector extension of the CPU to see whether it works, in every process whose cache is
# empty: 8 s. With none of them it generates scalar code.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# How long an example takes says nothing on a machine that others share.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--archive", metavar="PATH", help="an archive tuned for this machine's GPU, for tests marked gpu")
    parser.addoption("--functions", metavar="PATH", help="an archive of examples/quack/spec.py, for tests marked gpu")
    parser.addoption("--vllm", metavar="FOLDER", help="the package `vllm` of an unpacked wheel, for test_vllm_hooks.py")
    parser.addoption("--sglang", metavar="FOLDER", help="the package `sglang` of an unpacked wheel")


def _missing_gpu() -> str:
    """Why tests that need a GPU cannot run here; empty if they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "there is no CUDA GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _missing_gpu() if marked else ""
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tuned_archive(request: pytest.FixtureRequest) -> Path:
    """The archive that `--archive` names."""
    path = request.config.getoption("--archive")
    if path is None:
        pytest.skip("needs --archive PATH, an archive tuned for this GPU")
    return Path(path)


@pytest.fixture(scope="session")
def functions_archive(request: pytest.FixtureRequest) -> Path:
    """The archive that `--functions` names."""
    path = request.config.getoption("--functions")
    if path is None:
        pytest.skip("needs --functions PATH, an archive of examples/quack/spec.py")
    return Path(path)


@pytest.fixture(params=["python", "native"])
def torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """What the runtime finds where it looks for torch; "native" code can read its tensors where it was built."""
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    if request.param == "native":
        if native._native is None:
            pytest.skip("runtime._native was not built")
        capsule = exchange_capsule(lambda device: fake.stream)
        monkeypatch.setattr(FakeTensor, "__dlpack_c_exchange_api__", capsule, raising=False)
    return fake


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process, its output 80 columns wide."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: object) -> Result:
        from aot.cli import commands

        monkeypatch.setattr(sys, "argv", ["aot", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            commands.main()
        return Result(int(exit.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest) -> Path:
    """A folder with tiny.yaml, the archive tiny.aot built from it, and the cache of that build."""

    folder = built_once(request, "tiny", MANIFEST, "--candidates", "1")
    said = (folder / "said.txt").read_text()
    assert re.fullmatch(r"compiling \d+ kernels? in \d+ process(es)?\n(compiling: .*\n)*", said)
    return folder


@pytest.fixture
def build_again(run: Run, folder: Path, tmp_path: Path) -> Run:
    """Build tiny.yaml into tmp_path, from the cache."""

    def call(*options: object) -> Result:
        arguments = ["build", folder / "tiny.yaml", "-o", tmp_path / "again.aot", "--candidates", 1]
        return run(*arguments, "--cache", folder / "cache", *options)

    return call


@pytest.fixture
def archive(folder: Path) -> Path:
    return folder / "tiny.aot"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path` that `tests.distributions` can install to; what was found there is forgotten again."""
    from aot.search.operation import building
    from aot.tune import operation as tuning
    from runtime.program import operation as operations

    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    for known in (operations._found, building, tuning._found):
        known.cache_clear()
    before = set(sys.modules)
    yield tmp_path / "site"
    for known in (operations._found, building, tuning._found):
        known.cache_clear()
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{tmp_path / 'site'}{os.sep}"):
            del sys.modules[name]


@pytest.fixture
def row_scale(site: Path) -> None:
    """The operation of `tests.row_scale` and its kernels are installed."""
    install_row_scale(site)


@pytest.fixture
def tuned_row_scale(site: Path) -> None:
    """The same, and what tuning knows of it."""
    install_row_scale(site, tuned=True)


@pytest.fixture(scope="session")
def scales_folder(request: pytest.FixtureRequest) -> Path:
    """A folder with scales.aot, which was built from the manifest of `tests.row_scale`, and the cache of that build."""
    from .row_scale.archives import MANIFEST

    return built_once(request, "scales", MANIFEST, install=install_row_scale)


@pytest.fixture
def scales(scales_folder: Path) -> Path:
    return scales_folder / "scales.aot"
