"""Importing `runtime` costs a server nothing: proved in fresh processes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest

import runtime
from runtime import native

ROOT = Path(__file__).resolve().parent.parent

PROLOGUE = """
import builtins, os, sys, threading

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise AssertionError("import of " + name)

BLOCKED = {"torch", "cutlass", "aot", "numpy", "cupy", "tvm_ffi", "triton", "nvMatmulHeuristics"}
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, ROOT)
"""

QUIET = """
# What the standard library, zstandard and orjson do on import is not runtime's doing.
import zstandard, orjson
import ctypes, json, logging, hashlib, dataclasses, contextlib, concurrent.futures, struct, re, typing

def refuse(what):
    def call(*args, **kwargs):
        raise AssertionError(what + repr(args))
    return call

real = os.environ
class Watched(dict):
    __getitem__ = get = __contains__ = __iter__ = refuse("environment read: ")

os.environ = Watched()
os.getenv = refuse("environment read: ")
os.mkdir = os.makedirs = refuse("directory made: ")
threading.Thread.start = refuse("thread started: ")
before = set(sys.modules)
import runtime
assert not any(name.startswith("runtime.serve") for name in sys.modules), "what only looks at archives needs none of it"
runtime.load, runtime.Library, runtime.Function, runtime.Stats
os.environ = real
loaded = set(sys.modules) - before
assert not any(name == "cuda" or name.startswith("cuda.") for name in loaded), loaded
assert threading.active_count() == 1
assert "libcuda" not in open("/proc/self/maps").read() if os.path.exists("/proc/self/maps") else True
"""

WORKS = """
import runtime
from runtime import Library, load
try:
    load("/nonexistent.aot")
except runtime.ArchiveError:
    pass
else:
    raise AssertionError("opened a file that is not there")
assert sys.modules.keys().isdisjoint(BLOCKED)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    source = f"ROOT = {str(ROOT)!r}\n{PROLOGUE}\n{code}"
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)


def test_import_needs_no_framework_and_no_compiler() -> None:
    result = run(WORKS)
    assert result.returncode == 0, result.stderr


def test_import_has_no_side_effects() -> None:
    result = run(QUIET)
    assert result.returncode == 0, result.stderr


def test_blocked_imports_are_noticed() -> None:
    result = run("import torch")
    assert result.returncode != 0
    assert "import of torch" in result.stderr


VERSION = """
import runtime
assert "importlib.metadata" not in sys.modules
from importlib import metadata
metadata.version = lambda name: name + " 1.2"
assert runtime.__version__ == "cute-aot 1.2"
"""


def test_version_is_found_out_only_when_it_is_asked_for() -> None:
    result = run(VERSION)
    assert result.returncode == 0, result.stderr


def test_version_of_the_source_tree_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert runtime.__version__ == "0+unknown"


def test_other_names_are_no_attributes_of_the_package() -> None:
    with pytest.raises(AttributeError, match="module 'runtime' has no attribute 'versoin'"):
        runtime.versoin  # type: ignore[attr-defined]  # noqa: B018


def test_native_code_and_python_agree_on_their_interface() -> None:
    found = re.search(r"enum \{ INTERFACE = (\d+) \}", (ROOT / "runtime" / "native" / "_native.c").read_text())
    assert found is not None
    assert int(found[1]) == native._INTERFACE


def test_native_code_that_adds_floats_rounds_as_python_does() -> None:
    """Where compilers may fuse a product and a sum, as for aarch64, results would be others."""
    sources = {path.name: path.read_text() for path in (ROOT / "runtime" / "native").glob("*.c")}
    of_floats = {name for name, text in sources.items() if re.search(r"\bdouble\b", text)}
    exact = {name for name, text in sources.items() if '#include "rounding.h"' in text}
    assert of_floats - exact == {"_native.c"}, "which reads them and adds nothing"
    pragmas = (ROOT / "runtime" / "native" / "rounding.h").read_text()
    assert re.search(r"^#pragma STDC FP_CONTRACT OFF$", pragmas, re.M)
    assert re.search(r'^#pragma GCC optimize\("fp-contract=off"\)$', pragmas, re.M)


@pytest.mark.parametrize(
    ("interface", "used"), [(native._INTERFACE, True), (native._INTERFACE - 1, False), (None, False)]
)
def test_native_code_of_another_version_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, interface: int | None, used: bool
) -> None:
    built = types.ModuleType("built elsewhere")
    built.__file__ = "old.so"
    if interface is not None:
        built.INTERFACE = interface  # type: ignore[attr-defined]
    name = "runtime.native_again"
    spec = importlib.util.spec_from_file_location(name, native.__file__, submodule_search_locations=[])
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, again)
    monkeypatch.setitem(sys.modules, f"{name}._native", built)
    spec.loader.exec_module(again)
    assert again._native is (built if used else None)
    assert again.loaded is used
    assert ("old.so is of another version" in caplog.text) != used
