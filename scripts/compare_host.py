"""What this checkout and an older one cost the host, side by side and with no GPU: planned launches with and without
native code, calls with other rows, opening, preload, a rebuild that changes nothing, and bytes of an archive.

Both run on the tests' driver, which launches nothing, in processes that take turns. Times are of the processor, so that
what else a machine does matters little. Each checkout writes archives of its own, of the same made-up functions, since
older ones have older formats; its native code must have been built there: `python -c "import setuptools;
setuptools.setup()" build_ext --inplace`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from report import ROOT, ends, out_argument, write

PEERS = ROOT / "scripts" / "peers"
BUILD = ("manifests/llama-3.1-8b.yaml", "--target", "sm_90a", "--candidates", "1", "--jobs", "1", "--no-tune")


def stand_in(folder: Path) -> Path:
    """`host_stand_in.c`, compiled."""
    library = folder / "host_stand_in.so"
    include = sysconfig.get_path("include")
    subprocess.run(
        ["gcc", "-O2", "-shared", "-fPIC", f"-I{include}", PEERS / "host_stand_in.c", "-o", library], check=True
    )
    return library


def environment_of(checkout: Path) -> dict[str, str]:
    """For a process of a checkout's; it may keep what it compiles of its modules, as users' do."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(checkout)}


def built(checkout: Path, folder: Path) -> dict[str, float]:
    """A rebuild of a model that compiles nothing, in milliseconds; the first one in a folder compiles."""
    first = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "aot", "build", *BUILD]
    command += ["-o", str(folder / "built.aot"), "--cache", str(folder / "cache")]
    for _ in range(1 + first):
        before = os.times()
        subprocess.run(command, cwd=checkout, env=environment_of(checkout), check=True, capture_output=True)
        after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {"a rebuild of a model that changes nothing: ms": spent * 1e3} | measured(checkout, "file", folder)


def measured(checkout: Path, what: str, folder: Path) -> dict[str, float]:
    """What a process of its own measures of a checkout."""
    command = [sys.executable, str(PEERS / "host_calls.py"), what, str(folder)]
    done = subprocess.run(
        command, env=environment_of(checkout), check=True, capture_output=True, text=True, cwd=checkout
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> int:
    """Compare, print a line a measure, and write what was found."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("before", type=Path, help="the older checkout, with its native code built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-build", action="store_true", help="leave out what needs the DSL")
    parser.add_argument("--builds", type=Path, help="a folder that keeps what was built for another run of this")
    out_argument(parser)
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "now": ROOT}
    samples: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        stand_in(Path(scratch))
        for turn in range(options.rounds):
            for name in list(checkouts)[:: 1 if turn % 2 else -1]:
                found: dict[str, float] = {}
                for what in ("python", "native", "archives"):
                    found |= measured(checkouts[name], what, Path(scratch))
                if not options.without_build:
                    found |= built(checkouts[name], (options.builds or Path(scratch)).resolve() / name)
                for measure, value in found.items():
                    samples.setdefault(measure, {}).setdefault(name, []).append(value)
    summary: dict[str, Any] = {}
    for measure, of in samples.items():
        ratio = statistics.median(of["now"]) / statistics.median(of["before"])
        summary[measure] = {name: _spread(of[name]) for name in checkouts} | {"ratio": round(ratio, 3)}
        print(
            f"{measure:50s} {statistics.median(of['before']):10.2f} {statistics.median(of['now']):10.2f}  x{ratio:.3f}"
        )
    environment = {"machine": f"{platform.machine()}, {os.cpu_count()} cores that others share", "gpu": "none"}
    write(options.out, environment, before=_commit(checkouts["before"]), rounds=options.rounds, measures=summary)
    return 0


def _commit(checkout: Path) -> str:
    """Of a checkout, or what the file COMMIT says in a copy of one."""
    copied = checkout / "COMMIT"
    if copied.exists():
        return copied.read_text().strip()
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, check=True, capture_output=True, text=True)
    return found.stdout.strip()


def _spread(values: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 2) for name, value in found.items()}


if __name__ == "__main__":
    sys.exit(ends(main))
