"""What every benchmark script writes: one JSON file with the figures and everything needed to repeat them."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
AGAIN = "stock again"  # a second engine without archives, of another setting, such as VLLM_USE_DEEP_GEMM=1
sys.path.insert(0, str(ROOT))  # scripts run from a checkout, installed or not

from runtime.errors import AotError  # noqa: E402


def geomean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def version(distribution: str) -> str:
    """The installed version of a distribution, or "not installed"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The checkout's commit, with a mark if files differ from it; "unknown" outside a checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return _copied() or "unknown"
    if dirty.stdout.strip():  # files of another commit than HEAD's, or changed
        return _copied() or head.stdout.strip() + "+changes"
    return head.stdout.strip()


def _copied() -> str:
    """What the file COMMIT says, which whoever copies a tree elsewhere may leave in it; nothing where there is none."""
    given = ROOT / "COMMIT"
    return given.read_text().strip() if given.exists() else ""


def write(path: Path | None, environment: dict[str, Any], **content: Any) -> None:
    """Write a result file; does nothing without a path."""
    if path is None:
        return
    # The file goes to benchmarks/results/ in the end, wherever this machine wrote it.
    arguments = [f"benchmarks/results/{path.name}" if a == str(path) else a for a in sys.argv[1:]]
    arguments = [Path(sys.argv[0]).name, *arguments]
    document = {
        "command": "python scripts/" + shlex.join(arguments),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit(),
        "python": platform.python_version(),
        "environment": environment,
        **content,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def ends(work: Callable[[], int | None]) -> int:
    """The exit status of a script whose work this is: what it gives, 0 for None; 2, and one line on standard error,
    where its input is wrong, or another package is missing."""
    try:
        return work() or 0
    except AotError as error:
        print(f"error: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "aot", "runtime"):
            raise
        print(f"error: this needs {missing}, which is not installed here", file=sys.stderr)
    return 2


def options_to_write(what: str | None, output: str) -> argparse.ArgumentParser:
    """The options of a script, which others may be added to: `what` it does, and the one `output` that it writes."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help=output)
    return parser


def out_argument(parser: argparse.ArgumentParser) -> None:
    """The option that every benchmark has."""
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")


def patch_argument(parser: argparse.ArgumentParser) -> None:
    """The option of those that look at an archive as it is served."""
    what = "an archive to lay over the first, whose entries take the place of those for the same problems"
    parser.add_argument("--patch", type=Path, action="append", default=[], help=what)
