"""The command `aot`: reads arguments, calls the modules that do the work, prints what they return.

Exit status: 0; 1 where a check fails or part of what was asked could not be built; 2 where the call is wrong;
130 after Ctrl-C. Imports neither torch nor the DSL before it needs one.
"""

from __future__ import annotations

import math
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from runtime.archive import Archive, Check, FileUnreadable
from runtime.errors import AotError, ArchiveError

from .console import Progress, print_function, print_gemm, print_json, print_listing, warn
from .targets import TARGETS

if TYPE_CHECKING:
    from .compiler import Event

app = typer.Typer(
    help="Compile and tune CuTe DSL kernels offline, into one file that runs with no compiler.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
manifest_app = typer.Typer(help="Write manifests.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(manifest_app, name="manifest")

ArchivePath = Annotated[Path, typer.Argument(metavar="ARCHIVE", help="An .aot file.")]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="The .aot file to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Targets = Annotated[
    list[str] | None, typer.Option("--target", metavar="T", help=f"May be repeated: {', '.join(TARGETS)}.")
]


def main() -> None:
    """Run the command line."""
    try:
        try:
            app(prog_name="aot")
        finally:
            sys.stdout.flush()
    except AotError as error:
        _quit(str(error), 2)
    except BrokenPipeError:  # the reader has seen enough, as in `aot ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            print(metadata.version("cute-aot"))
        except metadata.PackageNotFoundError:
            print("not installed; running from its source tree")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# --- building and tuning ---


@app.command("build")
def _build(
    manifests: Annotated[list[Path], typer.Argument(metavar="MANIFEST", help="YAML files, see aot/manifest.py.")],
    output: Output,
    target: Targets = None,
    function: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Add another operation, such as rmsnorm. May be repeated.")
    ] = None,
    candidates: Annotated[int, typer.Option(min=1, help="Kernels to compile for each problem and M.")] = 8,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that compile. Default: usable cores.")] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Build cache. Default: $XDG_CACHE_HOME or ~/.cache, cute-aot.")
    ] = None,
    no_tune: Annotated[bool, typer.Option("--no-tune", help="Do not tune, though a GPU is here.")] = False,
    as_json: Json = False,
) -> None:
    """Compile the kernels that MANIFESTs need and write an archive; then tune it, where there is a GPU to tune on."""
    from . import build, manifest
    from .cache import Cache

    begun = time.monotonic()
    work = build.plan([manifest.load(path) for path in manifests], target or (), candidates, function or ())
    total = len(work.variants())
    finished = 0
    with Progress("compiling") as progress:

        def on_event(event: Event) -> None:
            nonlocal finished
            if event.outcome == "damaged":
                return progress.warn(f"cache: {event.detail}")
            if event.outcome == "failed":
                progress.warn(f"{event.variant.name()}: {event.detail}")
            finished += 1
            progress.update(finished, total)

        try:
            built = build.build(work, output, Cache(cache or _cache_directory()), jobs, on_event)
        except KeyboardInterrupt:
            progress.stop()
            _quit(f"interrupted with {finished} of {total} kernels done; the same command continues there", 130)
    for signature, name, reason in built.unserved:
        warn(f"{signature.key()} on {name}: {reason}; the archive cannot serve it")
    report = built.report
    summary = {
        "archive": str(output),
        "bytes": built.archive_bytes,
        "functions": len(report.kernels),
        "compiled": report.compiled,
        "cached": report.cached,
        "failures": {v.name(): reason for v, reason in report.failures.items()},
        "unserved": [{"signature": s.key(), "target": t, "reason": reason} for s, t, reason in built.unserved],
        "seconds": round(time.monotonic() - begun, 3),
        "tuning": None,
    }
    if not as_json:
        print(
            f"{output}: {len(report.kernels)} kernels ({report.compiled} compiled, {report.cached} from the cache, "
            f"{len(report.failures)} failed), {built.archive_bytes:,} bytes, {summary['seconds']:.1f} s"
        )
    if not no_tune and build.tunable(work.targets):
        summary["tuning"] = _tune(output, output, {}, as_json)
    if as_json:
        print_json(summary)
    if built.unserved:
        raise typer.Exit(1)


@app.command("tune")
def _tune_command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="An .aot file with candidates.")],
    output: Output,
    finalists: Annotated[int | None, typer.Option(min=1, help="Functions that reach the last comparison.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Repeats of the last comparison.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random inputs.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the candidates of an archive on this machine's GPU and write an archive that uses the fastest."""
    given = {"finalists": finalists, "repeats": repeats, "seed": seed}
    report = _tune(source, output, {name: value for name, value in given.items() if value is not None}, as_json)
    if as_json:
        print_json({"archive": str(output), "tuning": report})


def _tune(source: Path, destination: Path, options: dict[str, int], as_json: bool) -> dict[str, Any]:
    from .tune import TuneOptions, tune_archive

    with Progress("tuning") as progress:
        try:
            report = tune_archive(source, destination, TuneOptions(**options), progress.update)
        except KeyboardInterrupt:
            progress.stop()
            _quit(f"interrupted; nothing of the tuning was kept, {destination} is what it was", 130)
    ratios = [found.baseline_time.us / found.times[0][1].us for _, found in report.measured if found.times]
    geomean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None
    for name, reason in report.rejected.items():
        warn(f"{name}: rejected: {reason}")
    if not as_json:
        result = f", {geomean:.3f}x the baseline in the geometric mean" if geomean else ""
        print(f"{destination}: tuned at {len(report.measured)} points{result}; `aot ls {destination}` lists them")
    return {
        "points": len(report.measured),
        "geomean": geomean,
        "rejected": report.rejected,
        "environment": report.environment,
    }


# --- looking at archives ---


@app.command("ls")
def _ls(archive: ArchivePath, as_json: Json = False) -> None:
    """List what an archive serves: for each signature and target the functions by range of M, then sizes."""
    from . import describe

    with Archive.open(archive) as opened:
        found = describe.listing(opened)
    if as_json:
        return print_json(found)
    print_listing(found)


@app.command("show")
def _show(
    archive: ArchivePath,
    entry: Annotated[str, typer.Argument(metavar="ENTRY", help="A function, a signature, or a gemm such as qkv.")],
    as_json: Json = False,
) -> None:
    """Show one function or signature of an archive in full."""
    from . import describe

    with Archive.open(archive) as opened:
        found = describe.show(opened, entry)
    if as_json:
        return print_json(found)
    if "function" in found:
        return print_function(found["function"])
    for i, gemm in enumerate(found["gemm"]):
        if i:
            print()
        print_gemm(gemm)


@app.command("verify")
def _verify(archive: ArchivePath, as_json: Json = False) -> None:
    """Check an archive: every digest, record and table. Exit status 1 where a check fails."""
    from . import describe

    try:
        with Archive.open(archive) as opened:
            checks = describe.verify(opened)
    except FileUnreadable:
        raise
    except ArchiveError as error:
        checks = [Check("header and index", False, str(error))]
    failed = [check for check in checks if not check.ok]
    if as_json:
        print_json(
            {"ok": not failed, "checks": [{"subject": c.subject, "ok": c.ok, "detail": c.detail} for c in checks]}
        )
    else:
        for check in failed:
            print(f"{check.subject}: {check.detail}")
        print(
            f"{archive}: {len(failed)} of {len(checks)} checks failed"
            if failed
            else f"{archive}: {len(checks)} checks, all good"
        )
    if failed:
        raise typer.Exit(1)


# --- manifests ---


@manifest_app.command("from-config")
def _from_config(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A Hugging Face config.json.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks; the manifest is that of one.")],
    tokens: Annotated[str, typer.Option(metavar="M,M,...", help="The M values to tune for, such as 1,16,1024.")],
    target: Targets = None,
    dtype: Annotated[str, typer.Option(help="bf16, f16 or e4m3.")] = "bf16",
    model: Annotated[str | None, typer.Option(help="The model's name. Default: from --source.")] = None,
    source: Annotated[str | None, typer.Option(help="Where the config is from. Default: its path.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: print it.")] = None,
) -> None:
    """Write the manifest of a model's linear layers from its config.json."""
    from .manifest import dump
    from .model_config import load_config, manifest_from_config

    try:
        counts = [int(part) for part in tokens.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{tokens!r} is no list of integers such as 1,16,1024", param_hint="--tokens"
        ) from None
    text = dump(
        manifest_from_config(
            load_config(config),
            tp=tp,
            tokens=counts,
            targets=target or tuple(TARGETS),
            dtype=dtype,
            source=source or str(config),
            model=model,
        )
    )
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise AotError(f"{output}: cannot be written ({error.strerror}); check the folder") from None


# --- what commands share ---


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "cute-aot"


def _quit(message: str, status: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)
