"""Native code under AddressSanitizer and UndefinedBehaviorSanitizer: the tests that reach it; any report is a failure.

Runs in a copy of the package, whose native code is compiled for it; the one that serves other tests is left alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "costs",
    "native",
    "pointers",
    "evaluators",
    "program",
    "driver",
    "function",
    "rows",
    "library",
    "library_operands",
)
FLAGS = "-shared -fPIC -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",  # the interpreter keeps what it never frees
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "PYTHONMALLOC": "malloc",  # so that the edges of Python's own objects are guarded too
}
REPORT = re.compile(r"AddressSanitizer|runtime error:|UndefinedBehaviorSanitizer")

# What is put before, and into, the function that makes the module, to see that it is reported.
PLANTED = {
    "a read behind an allocation": "volatile char *p = malloc(8); volatile int at = 8; (void)p[at]; free((void *)p);",
    "a write after a free": "volatile char *p = malloc(8); free((void *)p); p[0] = 1;",
    "an overflow of a signed number": "volatile int most = 2147483647; most = most + 1;",
}


def _library() -> str:
    """The path of gcc's libasan, or why there is none."""
    gcc = shutil.which("gcc")
    if gcc is None:
        return ""
    found = subprocess.run([gcc, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    path = os.path.realpath(found.stdout.strip())
    return path if os.path.isabs(found.stdout.strip()) and os.path.exists(path) else ""


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not _library(), reason="there is no gcc, or it has no libasan"),
    pytest.mark.skipif(not (Path(sysconfig.get_path("include")) / "Python.h").exists(), reason="there is no Python.h"),
]


def _copy(folder: Path) -> Path:
    """The packages without what was compiled, in a folder of their own."""
    for package in ("runtime", "aot", "tests"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def _compile(folder: Path) -> None:
    native = folder / "runtime" / "native"
    command = ["gcc", *FLAGS.split(), f"-I{sysconfig.get_path('include')}", "-o", str(native / "_native.abi3.so")]
    subprocess.run([*command, *map(str, sorted(native.glob("*.c")))], check=True)


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | OPTIONS | {"LD_PRELOAD": _library()}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = _copy(tmp_path_factory.mktemp("sanitized"))
    _compile(folder)
    return folder


def test_sanitizers_report_nothing_where_native_code_is_tested(package: Path) -> None:
    tests = [f"tests/test_{name}.py" for name in TESTS]
    done = _run(package, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *tests)
    said = done.stdout + done.stderr
    assert not REPORT.search(said), said[-6000:]
    assert done.returncode == 0, said[-6000:]
    assert "was not built" not in said, "the native code of the copy was not used"


@pytest.mark.parametrize("what", PLANTED)
def test_sanitizers_report_what_is_planted(tmp_path: Path, what: str) -> None:
    folder = _copy(tmp_path)
    source = folder / "runtime" / "native" / "_native.c"
    text, count = re.subn(
        r"PyInit__native\(void\) \{", lambda found: f"{found[0]}{{{PLANTED[what]}}}", source.read_text()
    )
    assert count == 1
    source.write_text(text)
    _compile(folder)
    done = _run(folder, "-c", "import runtime.native")
    assert done.returncode != 0
    assert REPORT.search(done.stderr), done.stderr
