"""Functions with their PTX, compiled once between the workers of a test session, for tests that launch them themselves.

As a program it compiles them: a process can do so for one target only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aot.compile.lower import Lowered, lower
from aot.providers.spec_file import compilable, load
from aot.search.legal import of_name

from ..command_line import ROOT
from ..shared import made_once
from .launcher import launcher

_MULTIPROCESSORS = 4


def functions_once(
    request: pytest.FixtureRequest,
    name: str,
    functions: Iterable[str],
    target: str = "sm_90a",
    constants: Mapping[str, int] | None = None,
) -> dict[str, Lowered]:
    """Functions by name: of own kernels, or PATH.py:FUNCTION of a spec. `constants` are those of modules, by
    MODULE:NAME, that are to have other values than in an archive. Skips where the DSL is not installed."""
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    wanted = list(functions)
    words = [f"--set={where}={value}" for where, value in (constants or {}).items()]

    def make(folder: Path) -> None:
        command = [sys.executable, "-m", __name__, target, str(folder), *words, *wanted]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    folder = made_once(request, f"ptx-{name}", make)
    return {of: _read(folder, number) for number, of in enumerate(wanted)}


def run(lowered: Lowered, arguments: Iterable[Any], outputs: Iterable[Any], seed: int = 0) -> None:
    """Launch a function once, as `launcher` has it; arguments that are None are left out."""
    with launcher(lowered, _MULTIPROCESSORS, seed) as launch:
        launch([x for x in arguments if x is not None], [x for x in outputs if x is not None])


def _read(folder: Path, number: int) -> Lowered:
    record = json.loads((folder / f"{number}.json").read_text())
    ptx = (folder / f"{number}.ptx").read_text()
    return Lowered(record, (folder / f"{number}.cubin").read_bytes(), None, "", ptx)


def _compilable(name: str, target: str) -> Any:
    path, colon, function = name.partition(":")
    if not colon:
        return of_name(name)
    spec = load(Path(path))
    return next(each for each in compilable(spec, spec.functions, [target]) if each.name() == f"{function}.{target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("functions", nargs="+")
    parser.add_argument("--set", action="append", default=[], help="MODULE:NAME=VALUE; may be repeated")
    options = parser.parse_args()
    os.environ |= {"CUTE_DSL_ARCH": options.target, "CUDA_VISIBLE_DEVICES": ""}
    for word in options.set:
        where, value = word.split("=")
        module, name = where.split(":")
        found = importlib.import_module(module)
        assert hasattr(found, name), where
        setattr(found, name, int(value))
    for number, name in enumerate(options.functions):
        lowered = lower(_compilable(name, options.target), keep_ptx=True)
        (options.folder / f"{number}.json").write_text(json.dumps(lowered.record))
        (options.folder / f"{number}.cubin").write_bytes(lowered.cubin)
        (options.folder / f"{number}.ptx").write_text(lowered.ptx)


if __name__ == "__main__":
    main()
