"""The wheel of a release, built as a release is, and installed where there is no compiler and only what it asks for."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from .command_line import ROOT
from .distributions import brought_by, project

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="needs Linux on x86-64"),
]
_TESTS = ("__init__", "launch_natively", "native_stand_in", "parameters", "recording_driver")
Call = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("ziglang", "auditwheel"):
        pytest.importorskip(package, reason=f"{package} is not installed; the extra `wheels` brings it")
    folder = tmp_path_factory.mktemp("wheels")
    command: list[str | Path] = [sys.executable, ROOT / "scripts/build_wheels.py", "--machine", "x86_64", "-o", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Call:
    """Runs a program of a fresh environment that has the wheel and what it needs, with nothing else on the path."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"

    def call(program: str, *arguments: object) -> str:
        environment = {"PATH": str(programs), "PYTHONPATH": str(folder), "HOME": str(folder)}
        command: list[str | Path] = [programs / program, *map(str, arguments)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.strip()

    _lay_dependencies(Path(call("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")))
    call("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", wheel)
    (folder / "tests").mkdir()
    for name in _TESTS:
        shutil.copy(ROOT / "tests" / f"{name}.py", folder / "tests")
    return call


def _lay_dependencies(site: Path) -> None:
    """Put links to what the project needs and is installed here into a folder of packages: pip would download it."""
    for name in brought_by(project()["dependencies"]):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(os.path.abspath(str(distribution.locate_file(top))))


def test_one_wheel_is_for_every_python_from_the_oldest_and_every_glibc_from_2_17(wheel: Path) -> None:
    assert re.fullmatch(r"cute_aot-[\d.]+-cp310-abi3-manylinux_2_17_x86_64\.whl", wheel.name)


def test_it_asks_for_all_that_it_needs(installed: Call) -> None:
    assert installed("python", "-m", "pip", "check") == "No broken requirements found."


def test_it_lists_the_archive_in_the_package(installed: Call) -> None:
    path = installed("python", "-c", "import runtime; print(runtime.universal())")
    assert not path.startswith(str(ROOT))
    assert "sm_90a" in installed("aot", "ls", path)


def test_it_launches_by_native_code_that_was_not_built_there(installed: Call, wheel: Path, tmp_path: Path) -> None:
    program, launches = installed("python", "-m", "tests.launch_natively", tmp_path / "made-up.aot").split()
    assert "site-packages" in program
    assert int(launches) == 2


def test_its_doctor_finds_native_code_no_torch_and_nothing_broken(installed: Call) -> None:
    found = {row["part"]: row["state"] for row in json.loads(installed("aot", "doctor", "--json"))["findings"]}
    assert (found["native code"], found["torch"], found["extra tune"]) == ("ok", "missing", "missing")
    assert "broken" not in found.values()
