"""Try all that a target has on a GPU that this project never ran on, in one command, and pack what to send back:

    python scripts/first_run.py --target sm_100a

It builds an archive with a GEMM of every kind that kernels of the target have, and other operations; `aot tune` checks
each function of it against a reference, in a process that may die or hang, and times it beside torch; tests try those
that were right at other extents. A table says what was right and how fast. A step that fails, or that Ctrl-C ends, does
not end the run: that is worth sending too. Needs the extras build, tune and test, and about half an hour of a GPU that
nothing else uses. `--build-only` makes the archive on a machine without one, and `--archive` takes it. Exit status 1
where something is wrong, 2 where the call is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import report

from aot.problem import manifest as manifests
from aot.problem.manifest import Gemm, Manifest, Use, signature_problem, use
from aot.search.provider import families, provider_names
from aot.search.targets import target as known_target
from aot.search.unserved import variants
from aot.tune import history
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.errors import AotError
from runtime.gemm.signature import Signature
from runtime.program.operation import is_operation
from runtime.tables.dispatch import serves

TOKENS = (1, 64, 333, 4096)
EXTENT, BATCH = 4096, 4  # N and K of every GEMM, and how many there are in a batched one
_GROUPS = {"a": "bf16", "d": "bf16", "groups": 16, "n": EXTENT, "k": EXTENT}
OPERATIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (  # name, operation and fields
    ("rmsnorm", "rmsnorm", {"x": "bf16", "weight": "bf16", "y": "bf16", "n": EXTENT}),
    ("grouped_gemm", "grouped_gemm", {**_GROUPS, "b": "bf16"}),
    ("grouped_gemm_w4", "grouped_gemm", {**_GROUPS, "b": "e2m1", "scaling": "mxfp4_weight"}),
    ("quantise", "quantise", {"x": "bf16", "y": "e4m3", "k": EXTENT, "scaling": "row_column"}),
    ("moe_permute", "moe_permute", {"x": "bf16", "experts": 16, "top_k": 2, "k": EXTENT}),
    ("moe_combine", "moe_combine", {"rows": "bf16", "y": "bf16", "top_k": 2, "n": EXTENT}),
)
MOST_S = 7200.0  # that a step may take; a function that hangs `aot tune` gives up after minutes
_TESTS = ("tests/test_gpu_kernels.py", "tests/test_gpu_runtime.py")
_SENT = ("manifest.yaml", "tuned.aot", "report.json", "table.txt", "*.log")


# --- what is asked for ---


def asked(target: str) -> Manifest:
    """Every kind of GEMM that a family has for the target, and other operations, each at the same extents.

    Of epilogues it is none, and that of the most parts; a batch is tried of plain GEMMs alone.
    """
    found: dict[Signature, str] = {}
    for provider in provider_names():
        for family in families(provider).values():
            if family.operation == "gemm" and target in family.targets:
                found |= {s: s.key() for s in _kinds(family) if signature_problem(s) is None and variants(target, s)}
    gemms = tuple(Gemm(_name(s), s, 1, TOKENS) for s in sorted(found, key=Signature.key))
    uses = tuple(_uses(target))
    return Manifest("first-run", "every kind of GEMM that kernels have", TOKENS, (target,), gemms, uses=uses)


def _kinds(family: Any) -> Iterator[Signature]:
    longest = max(family.epilogues, key=lambda word: (word.count("+"), word))
    for a, b, d in family.elements:
        for scaling in family.scalings:
            for epilogue in dict.fromkeys(("none", longest)):
                yield Signature(a, b, d, "f32", epilogue, EXTENT, EXTENT, 1, scaling)
        yield from [Signature(a, b, d, "f32", "none", EXTENT, EXTENT, BATCH)] if True in family.batched else []


def _name(s: Signature) -> str:
    words = [
        s.a,
        *([s.b] if s.b != s.a and s.scaling == "none" else []),  # a scaling of B alone says its type
        s.d,
        *([s.scaling] if s.scaling != "none" else []),
        *([f"batch{s.batch}"] if s.batch > 1 else []),
    ]
    return "-".join([*words, *([s.epilogue.replace("+", "-")] if s.epilogue != "none" else [])])


def _uses(target: str) -> Iterator[Use]:
    for name, operation, fields in OPERATIONS:
        if not is_operation(operation):
            continue
        made = use(name, operation, fields, TOKENS, None)
        if variants(target, made.signature):
            yield made


# --- steps ---


def step(name: str, command: Sequence[str], folder: Path) -> int:
    """Run a module of this checkout, show what it says, and keep that as a log; its exit status. What hangs is killed,
    and Ctrl-C ends it."""
    print(f"\n== {name}: {' '.join(command)}", flush=True)
    with (folder / f"{name}.log").open("w") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=report.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        limit = threading.Timer(MOST_S, running.kill)
        limit.start()
        try:
            assert running.stdout is not None
            for line in running.stdout:
                log.write(line)
                print(f"   {line}", end="", flush=True)
            status = running.wait()
        except KeyboardInterrupt:  # which the module was given too
            status = running.wait() or 1
        finally:
            limit.cancel()
        log.write(f"exit status {status}\n")
    return status


def build(target: str, folder: Path, candidates: int) -> int:
    """The manifest, and an archive of the best `candidates` functions, by estimates, of each problem."""
    made = folder / "manifest.yaml"
    made.write_text(manifests.dump(asked(target)))
    words = ("--target", target, "--candidates", str(candidates), "--no-tune", "--force")
    return step("build", ["aot", "build", str(made), "-o", str(folder / "candidates.aot"), *words], folder)


def require_gpu(target: str) -> None:
    """Raise unless this machine's GPU runs what is compiled for the target."""
    capability = Driver().compute_capability
    if not serves(target, capability):
        found = ".".join(map(str, capability))
        raise AotError(f"this machine's GPU has compute capability {found}, which {target} is not for; see README.md")


# --- what was found ---


def rows(tunings: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a tuning's history says, one row for each problem and M; times in microseconds."""
    found = []
    for tuning in tunings:
        names, gemm = tuning["names"], Signature.of_key(tuning["signature"])
        for point in tuning["points"]:
            seen = history.measured(names, point)
            best = min(seen.times, key=lambda pair: pair[1].us, default=None)
            flops = gemm.flops(seen.m) if gemm is not None else 0
            found.append(
                {
                    "signature": tuning["signature"],
                    "m": seen.m,
                    "right": seen.candidates,
                    "wrong": len(tuning["rejected"]),
                    "function": best[0] if best else None,
                    "us": best[1].us if best else None,
                    "torch": seen.baseline,
                    "torch_us": seen.baseline_time.us,
                    "tflops": flops / best[1].us / 1e6 if best else 0.0,
                }
            )
    return found


def table(found: Sequence[Mapping[str, Any]], rejected: Mapping[str, str]) -> str:
    """These rows for people, and which functions were wrong, and how."""
    lines = [f"{'us':>9} {'torch us':>9} {'times':>6} {'TFLOP/s':>8} {'right':>6} {'wrong':>6} {'M':>6}  signature"]
    for row in found:
        us, torch_us = row["us"], row["torch_us"]
        times = f"{us:9.2f} {torch_us:9.2f} {torch_us / us:6.2f} {row['tflops']:8.0f}" if us else f"{'none':>9}{'':26}"
        lines.append(f"{times} {row['right']:6d} {row['wrong']:6d} {row['m']:6d}  {row['signature']}")
    named = {row["signature"]: row["torch"] for row in found}
    lines += ["", "what torch ran:", *(f"  {signature}: {name}" for signature, name in named.items())]
    lines += ["", f"{len(rejected)} functions were rejected" + (":" if rejected else "")]
    lines += [f"  {name}: {reason}" for name, reason in rejected.items()]
    return "\n".join(lines) + "\n"


def pack(folder: Path, target: str) -> Path:
    """One file of what there is to send: no candidates, and nothing of the machine but what logs say."""
    path = folder / f"first-run-{target}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(file for pattern in _SENT for file in folder.glob(pattern)):
            packed.write(file, file.name)
    return path


def finish(folder: Path, target: str, statuses: Mapping[str, int]) -> int:
    """Write report and table, pack them, and say what to send."""
    found: list[dict[str, Any]] = []
    rejected: dict[str, str] = {}
    if (folder / "tuned.aot").exists():
        with Archive.open(folder / "tuned.aot") as archive:
            tunings = history.tunings(archive)
        found = rows(tunings)
        rejected = {t["names"][place]: reason for t in tunings for place, reason in t["rejected"]}
    (folder / "table.txt").write_text(table(found, rejected))
    report.write(folder / "report.json", {"target": target}, steps=statuses, rows=found, rejected=rejected)
    print(f"\n{(folder / 'table.txt').read_text()}")
    failed = [name for name, status in statuses.items() if status]
    print(f"steps that failed: {', '.join(failed) or 'none'}")
    print(f"send back {pack(folder, target)}, in an issue of this project, whatever it says")
    return 1 if failed or rejected or not found else 0


def main() -> int:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="such as sm_100a for a B200, sm_103a for a B300")
    parser.add_argument("--folder", type=Path, help="where everything is written (build/first-run-TARGET)")
    parser.add_argument("--candidates", type=int, default=8, help="functions of each problem and M (8)")
    parser.add_argument("--archive", type=Path, help="an archive of --build-only, in place of building one")
    parser.add_argument("--build-only", action="store_true", help="build the archive, with no GPU, and end")
    options = parser.parse_args()
    target = known_target(options.target).name
    if options.candidates < 1:
        raise AotError(f"--candidates must be 1 or more, found {options.candidates}")
    folder = (options.folder or report.ROOT / "build" / f"first-run-{target}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.build_only:
        status = build(target, folder, options.candidates)
        print(f"take {folder / 'candidates.aot'} along, and give it as --archive")
        return min(status, 1)
    require_gpu(target)
    if options.archive is not None and not options.archive.exists():
        raise AotError(f"{options.archive} does not exist; make it with --build-only")
    statuses = {"doctor": step("doctor", ["aot", "doctor"], folder)}
    candidates, tuned = options.archive or folder / "candidates.aot", folder / "tuned.aot"
    if options.archive is None:
        statuses["build"] = build(target, folder, options.candidates)
    if candidates.exists():
        words = ["aot", "tune", str(candidates.resolve()), "-o", str(tuned), "--force"]
        statuses["tune"] = step("tune", words, folder)
    if tuned.exists():
        words = ["pytest", "-m", "gpu", *_TESTS, "--archive", str(tuned), "-q", "-rs", "--tb=short"]
        statuses["test"] = step("test", words, folder)
    return finish(folder, target, statuses)


if __name__ == "__main__":
    sys.exit(report.ends(main))
