"""How fuzzers of libFuzzer's kind, atheris among them, are run, and what a run came to."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INPUT_SECONDS, MEMORY_MB = 1, 512  # that one input may take
_LONGEST = 4096  # bytes of an input
_DONE = re.compile(r"^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)
_KINDS = ("crash-", "timeout-", "oom-", "leak-", "slow-unit-")  # of files that libFuzzer writes


@dataclass(frozen=True)
class Run:
    """What is asked: executions, the seed of the first, and a folder for inputs that are findings."""

    executions: int
    seed: int
    keep: Path | None = None


@dataclass(frozen=True)
class Ran:
    """What a run came to; `corpus` counts the inputs in its folder at the end: those that it began with, and those that
    reached something new."""

    executions: int
    seconds: float
    findings: tuple[str, ...]
    corpus: int

    def report(self, what: str, output: Path | None) -> None:
        """Print it, and write it where it is to be kept."""
        commit = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        found = {
            "what": what,
            "executions": self.executions,
            "seconds": round(self.seconds),
            "findings": list(self.findings),
            "corpus": self.corpus,
            "most_seconds": INPUT_SECONDS,
            "most_mb": MEMORY_MB,
            "commit": commit,
        }
        print(json.dumps(found, indent=1))
        if output is not None:
            output.write_text(json.dumps(found, indent=1) + "\n")


def run(fuzzer: Sequence[str], corpus: Path, asked: Run, memory_mb: int = MEMORY_MB) -> Ran:
    """Run a fuzzer until it has done what is asked, or has found something; `corpus` gets what reaches what is new."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        found = Path(name)
        limits = [f"-timeout={INPUT_SECONDS}", f"-rss_limit_mb={memory_mb}", f"-max_len={_LONGEST}"]
        asks = [f"-runs={asked.executions}", f"-seed={asked.seed}", "-print_final_stats=1", "-verbosity=1"]
        command = [*fuzzer, *limits, *asks, "-detect_leaks=0", f"-artifact_prefix={found}/", str(corpus)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
        findings = sorted(file.name for file in found.iterdir() if file.name.startswith(_KINDS))
        if asked.keep is not None:
            asked.keep.mkdir(parents=True, exist_ok=True)
            for file in found.iterdir():
                (asked.keep / file.name).write_bytes(file.read_bytes())
    if done.returncode or findings:
        print(done.stderr[-6000:], file=sys.stderr)
    if done.returncode and not findings:
        findings = [f"it ended with status {done.returncode}"]
    count = _DONE.search(done.stderr)
    seconds = time.monotonic() - began
    return Ran(int(count[1]) if count else 0, seconds, tuple(findings), len(list(corpus.iterdir())))
