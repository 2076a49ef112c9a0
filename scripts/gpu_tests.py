"""Every test marked gpu, and compute-sanitizer, on archives of all operations. In two steps, as the GPU's machine needs
no compiler:

python scripts/gpu_tests.py build build/gpu       # needs no GPU; for the GPUs of sm_90a
python scripts/gpu_tests.py run build/gpu --out build/tests_h100.json

A test skips what the archive that it is given lacks; so each runs with every archive here, and counts as passed if it
passed with one and failed with none. Exit status 1: a test failed, or passed with no archive, but for those that need
two GPUs where there is one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import report
from report import ROOT

from aot.tune import measure
from runtime.errors import AotError
from runtime.program.operation import is_operation

TARGET = "sm_90a"


@dataclass(frozen=True)
class Tested:
    """An archive that tests run with: the arguments of `aot build` (none: the archive in the package), or of another
    `builder` that is a module; of `aot tune` where tests want a tuned one, the files of tests that it serves (none: all
    that have GPU tests), arguments of scripts/launch_all.py under compute-sanitizer, one list a run, and words of the
    names of tests that give kernels hostile values, which run under its memcheck too."""

    name: str
    build: tuple[str, ...] = ()
    tune: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    memcheck: tuple[tuple[str, ...], ...] = ()
    racecheck: tuple[tuple[str, ...], ...] = ()
    hostile: str = ""
    builder: tuple[str, ...] = ("aot", "build")


# Operations of which an archive has every variant, where they are there.
_WHOLE = tuple(word for name in ("rmsnorm",) if is_operation(name) for word in ("--function", name))
ARCHIVES = (
    Tested(
        "coverage",
        ("tests/data/coverage.yaml", *_WHOLE, "--candidates", "2"),
        racecheck=(("--schedules", "--deep"),),
        memcheck=(("--schedules",),),
    ),
    Tested(
        *("grouped", ("tests/data/grouped.yaml", "--candidates", "4")),
        tests=("tests/grouped_gemm/test_gpu.py",),
        memcheck=((),),
        hostile="no_ends or counts_that_are_none",
        racecheck=(("--schedules",),),
    ),
    Tested(
        *("gathered", ("tests/data/gathered.yaml", "--candidates", "4")),
        tests=("tests/grouped_gemm/test_gpu.py", "tests/grouped_gemm/test_gpu_gathered.py"),
        memcheck=((),),
        hostile="no_ends or indices_outside",
        racecheck=(("--schedules",),),
    ),
    Tested(
        *("experts", ("tests/data/experts.yaml", "--candidates", "4")),
        tests=("tests/moe", "tests/test_gpu_operations.py"),
        memcheck=((),),
        hostile="no_ids or no_experts or no_rows",
        racecheck=(("--schedules",),),
    ),
    Tested(
        *("torch", ("tests/data/torch.yaml", "--candidates", "4")),
        tune=("--finalists", "2", "--repeats", "2"),
        tests=("tests/test_gpu_torch.py", "tests/test_gpu_preload.py", "tests/test_gpu_options.py"),
    ),
    Tested(
        *("experts_fp8", ("tests/data/experts_fp8.yaml", "--candidates", "4")),
        tests=("tests/moe", "tests/quantise", "tests/grouped_gemm/test_gpu.py"),
        memcheck=((),),
        hostile="no_end or counts_that_are_none or no_ids",
        racecheck=(("--schedules",),),
    ),
    Tested(
        *("fp8_layers", ("tests/data/fp8_layers.yaml", "--candidates", "2")),
        tune=("--finalists", "2", "--repeats", "2"),
        tests=("tests/test_gpu_packed_tokens.py", "tests/quantise", "tests/rmsnorm"),
    ),
    Tested(
        *("w4", ("tests/data/w4.yaml", "--candidates", "4")),
        tests=("tests/test_gpu_w4.py", "tests/test_gpu_kernels.py"),
        memcheck=((),),
        racecheck=(("--schedules",),),
    ),
    Tested(
        *("experts_w4", ("tests/data/experts_w4.yaml", "--candidates", "4")),
        tests=("tests/moe", "tests/grouped_gemm"),
        memcheck=((),),
        racecheck=(("--schedules",),),
    ),
    Tested(
        *("sm80_w4", ("sm80_w4", "sm80_grouped_w4")),
        tests=("tests/test_gpu_sm80_w4.py", "tests/grouped_gemm/test_gpu_sm80_w4.py"),
        builder=("tests.sm80_w4_samples",),  # as `aot build` chooses other families for Hopper
    ),
    Tested("universal", tests=("tests/test_gpu_universal.py",)),
)
FUNCTIONS = ("--spec", "examples/quack/spec.py")  # needs quack-kernels and triton where it is built
SANITIZER = ("compute-sanitizer", "--report-api-errors", "no", "--tool")


@dataclass(frozen=True)
class Outcome:
    """How a command ended: seconds, exit status, its last line."""

    seconds: float
    status: int
    last: str


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    build = steps.add_parser("build", help="build the archives")
    run = steps.add_parser("run", help="run the tests with them")
    for step in (build, run):
        step.add_argument("folder", type=Path, help="where the archives are")
        step.add_argument("--only", action="append", choices=[t.name for t in ARCHIVES], help="of these archives alone")
    report.out_argument(run)
    run.add_argument("--jobs", type=int, default=6, help="processes at a time")
    run.add_argument("--what", choices=("all", "tests", "sanitizer"), default="all", help="tests or sanitizers alone")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    chosen = [t for t in ARCHIVES if args.only is None or t.name in args.only]
    return build(args.folder, chosen) if args.step == "build" else run(args, chosen)


def build(folder: Path, chosen: Sequence[Tested]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {t.name: (*t.builder, *t.build) for t in chosen if t.build}
    if len(chosen) == len(ARCHIVES):
        wanted["functions"] = ("aot", "build", *FUNCTIONS)
    return max(module(*words, "--target", TARGET, "-o", str(folder / f"{name}.aot")) for name, words in wanted.items())


def module(*words: str) -> int:
    """The exit status of a module with these words."""
    return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environment(), check=False).returncode


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def run(args: argparse.Namespace, chosen: Sequence[Tested]) -> int:
    machine = measure.environment()
    passed: dict[str, str] = {}  # a test, and the archive that it passed with
    failed: dict[str, list[str]] = {}
    skipped: dict[str, str] = {}  # a test, and why it was skipped last
    with ThreadPoolExecutor(args.jobs) as pool:
        asked = [] if args.what == "sanitizer" else chosen
        for t, found in [
            *zip(asked, pool.map(tested, asked, repeat(args.folder), repeat("gpu")), strict=True),
            *alone(asked, args.folder),
        ]:
            for name, (state, why) in found.items():
                if state == "passed":
                    passed.setdefault(name, t.name)
                elif state == "failed":
                    failed.setdefault(name, []).append(f"{t.name}: {why}")
                else:
                    skipped[name] = why
        sanitizers = {} if args.what == "tests" else sanitize(pool, chosen, args.folder)
    never = {name: why for name, why in sorted(skipped.items()) if name not in passed and name not in failed}
    damaged = [command for command, outcome in sanitizers.items() if outcome.status]
    print(f"{len(passed)} tests passed, {len(failed)} failed, {len(never)} never ran; {len(damaged)} of ", end="")
    print(f"{len(sanitizers)} runs of compute-sanitizer found something")
    for name, whys in failed.items():
        print(f"failed: {name}: {'; '.join(whys)}")
    for name, why in never.items():
        print(f"never ran: {name}: {why}")
    for command in damaged:
        print(f"sanitizer: {command}: {sanitizers[command].last}")
    report.write(
        args.out,
        machine,
        archives={t.name: " ".join((*t.builder, *t.build)) if t.build else "runtime.universal()" for t in chosen},
        passed=passed_with(passed),
        failed=failed,
        never_ran=never,
        sanitizer={command: [round(o.seconds, 1), o.status, o.last] for command, o in sanitizers.items()},
    )
    absent = [name for name, why in never.items() if "needs two GPUs" not in why]
    return 1 if failed or absent or damaged else 0


def passed_with(passed: dict[str, str]) -> dict[str, dict[str, int]]:
    """By archive, then by file, how many tests passed."""
    counts: dict[str, dict[str, int]] = {}
    for name, archive in sorted(passed.items()):
        by_file = counts.setdefault(archive, {})
        file = name.partition("::")[0]
        by_file[file] = by_file.get(file, 0) + 1
    return counts


def alone(asked: Sequence[Tested], folder: Path) -> Iterator[tuple[Tested, dict[str, tuple[str, str]]]]:
    """Run what needs the GPU for itself, which is for the archives that are for all tests, one after the other."""
    for t in asked:
        if not t.tests:
            yield t, tested(t, folder, "alone")


def marked(mark: str) -> list[str]:
    """The files of tests that have this mark."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(p.relative_to(ROOT)) for p in files if f"mark.{mark}" in p.read_text())


def tested(t: Tested, folder: Path, mark: str) -> dict[str, tuple[str, str]]:
    """For each test with this mark that this archive is for: passed, failed or skipped, and why."""
    archive = path_of(t, folder)
    if t.tune:
        archive = folder / f"{t.name}_tuned.aot"
        if status := module("aot", "tune", str(path_of(t, folder)), "-o", str(archive), *t.tune):
            return {f"aot tune of {t.name}": ("failed", f"exit status {status}")}
    chosen = [f for f in marked(mark) if not t.tests or f.startswith(t.tests)]
    found = folder / f"{t.name}_{mark}.xml"
    command = pytest_with(archive, mark)
    functions = ["--functions", str(folder / "functions.aot")] if (folder / "functions.aot").exists() else []
    outcome = timed([*command, *functions, f"--junitxml={found}", *chosen])
    print(f"{t.name}: {outcome.last}", flush=True)
    if not found.exists():
        return {f"pytest with {t.name}": ("failed", outcome.last)}
    return dict(outcomes(found))


def pytest_with(archive: Path, mark: str = "gpu") -> list[str]:
    """The words that run tests with an archive: those with this mark, and not those that are to be alone but for it."""
    marks = {"gpu": "gpu and not alone"}.get(mark, mark)
    return [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", "--archive", str(archive)]


def path_of(t: Tested, folder: Path) -> Path:
    path = folder / f"{t.name}.aot" if t.build else ROOT / "runtime" / "universal.aot"
    if not path.exists():
        raise AotError(f"{path}: no such file; run: python scripts/gpu_tests.py build {folder}")
    return path


def outcomes(found: Path) -> list[tuple[str, tuple[str, str]]]:
    """What pytest wrote of each test that is marked gpu."""
    every = []
    for case in ElementTree.parse(found).iter("testcase"):
        name = case.get("classname", "").replace(".", "/") + f".py::{case.get('name')}"
        ended = [(state, case.find(state)) for state in ("failure", "error", "skipped")]
        state, why = next(((s, e.get("message", "")) for s, e in ended if e is not None), ("passed", ""))
        word = {"failure": "failed", "error": "failed"}.get(state, state)
        every.append((name, (word, why.split("\n")[0][:200])))
    return every


def sanitize(pool: ThreadPoolExecutor, chosen: Sequence[Tested], folder: Path) -> dict[str, Outcome]:
    """How compute-sanitizer ended, by command; what it said is in files of `folder`."""
    if shutil.which(SANITIZER[0]) is None:
        raise AotError("compute-sanitizer is not on PATH; it comes with CUDA, or say --what tests")
    commands = {}
    for t in chosen:
        for tool, runs in (("memcheck", t.memcheck), ("racecheck", t.racecheck)):
            for words in runs:
                script = [sys.executable, str(ROOT / "scripts" / "launch_all.py"), *words, str(path_of(t, folder))]
                commands[f"{tool} {' '.join((*words, t.name))}"] = [*SANITIZER, tool, "--error-exitcode", "3", *script]
        if t.hostile:
            script = [*pytest_with(path_of(t, folder)), "-k", t.hostile, *t.tests]
            commands[f"memcheck hostile {t.name}"] = [*SANITIZER, "memcheck", "--error-exitcode", "3", *script]
    logs = [folder / f"{words.replace(' ', '_')}.txt" for words in commands]
    ended = pool.map(timed, commands.values(), logs)
    return dict(zip(commands, ended, strict=True))


def timed(command: Sequence[str], log: Path | None = None) -> Outcome:
    """Run it in the checkout; what it says goes to `log` too."""
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if log is not None:
        log.write_text(done.stdout)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return Outcome(time.monotonic() - start, done.returncode, lines[-1][:200] if lines else "")


if __name__ == "__main__":
    sys.exit(report.ends(main))
