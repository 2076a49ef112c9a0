"""The command `aot`: reads arguments, calls the modules that do the work, prints what they return.

Exit status: 0; 1 where a check fails or part of what was asked could not be built; 2 where the call is wrong or its
output cannot be written; 130 after Ctrl-C, 143 after SIGTERM. Imports neither torch nor the DSL before it needs one.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from runtime.archive import Archive, Check, FileUnreadable
from runtime.errors import AotError, ArchiveError

from .console import (
    Progress,
    print_checks,
    print_function,
    print_gemm,
    print_json,
    print_listing,
    printable,
    resources_line,
    warn,
)
from .pack import destination
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
_INTERRUPTED = 128 + signal.SIGINT
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

Targets = Annotated[
    list[str] | None, typer.Option("--target", metavar="T", help=f"May be repeated: {', '.join(TARGETS)}.")
]


_UsageError = cast(type[Exception], typer.BadParameter.__base__)  # click's, or that of typer's own copy of click


class _Stop(AotError):
    """The end of a command, with an exit status of its own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def main() -> None:
    """Run the command line and end the process."""
    terminated = []

    def terminate(*_: object) -> None:
        terminated.append(True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)  # so that workers end, and nothing stays in /tmp
    try:
        status, message = _run()
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError as error:
            status, message = _output_failed(error)
    except KeyboardInterrupt:
        status, message = _INTERRUPTED, ""
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    if message:
        print(printable(f"error: {message}"), file=sys.stderr)
    sys.exit(128 + signal.SIGTERM if terminated and status == _INTERRUPTED else status)


def _run() -> tuple[int, str]:
    """Run the command; the exit status, and what there is to say on standard error."""
    if sys.stdout is None:
        return 2, "standard output is closed; redirect it to a file or /dev/null"
    try:
        return app(prog_name="aot", standalone_mode=False) or 0, ""
    except _Stop as stop:
        return stop.status, str(stop)
    except AotError as error:
        return 2, str(error)
    except _UsageError as error:
        return 2, _usage(error)
    except typer.Abort:
        return _INTERRUPTED, ""
    except OSError as error:
        return _output_failed(error)


def _usage(error: Any) -> str:
    """A wrong call in a line; the help where there was no command at all."""
    said = str(error.format_message())
    if "\n" in said:
        print(said, file=sys.stderr)
        return ""
    command = error.ctx.command_path if error.ctx else "aot"
    return f"{said.rstrip('.')}{'' if said.endswith('?') else ';'} `{command} --help` shows how to call it"


def _output_failed(error: OSError) -> tuple[int, str]:
    """What an OSError means that no module expected: a file, where it names one, or else standard output."""
    if error.filename is not None:
        return 2, f"{error.filename}: {error.strerror}; check the path and its permissions"
    if error.errno not in _OUTPUT_ERRORS:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes there
    if error.errno == errno.EPIPE:  # the reader has seen enough, as in `aot ls | head`
        return 1, ""
    return 2, f"standard output cannot be written ({error.strerror}); redirect it elsewhere"


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
    candidates: Annotated[
        int, typer.Option(min=1, help="Kernels to compile for a problem at each M of its manifest.")
    ] = 8,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that compile. Default: usable cores.")] = None,
    cache: Annotated[
        str | None, typer.Option(metavar="DIR", help="Build cache. Default: $XDG_CACHE_HOME or ~/.cache, cute-aot.")
    ] = None,
    no_tune: Annotated[bool, typer.Option("--no-tune", help="Do not tune, though a GPU is here.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print what each kernel takes of an SM.")] = False,
    as_json: Json = False,
) -> None:
    """Compile the kernels that MANIFESTs need and write an archive; then tune it, where there is a GPU to tune on."""
    from . import build, manifest
    from .cache import Cache
    from .describe import resources

    begun = time.monotonic()
    _refuse_inputs(output, manifests)
    compiled = Cache(_cache_directory() if cache is None else cache)
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
            if verbose and event.record is not None:
                progress.line(resources_line(event.variant.name(), resources(event.record)))
            finished += 1
            progress.update(finished, total)

        def on_start(missing: int, processes: int) -> None:
            progress.note(f"compiling {_count(missing, 'kernel')} in {_count(processes, 'process', 'processes')}")

        try:
            built = build.build(work, output, compiled, jobs, on_event, on_start)
        except KeyboardInterrupt:
            done = f"interrupted with {finished} of {total} kernels done; the same command continues there"
            raise _Stop(done, _INTERRUPTED) from None
    for signature, name, reason in built.unserved:
        warn(f"{signature.key()} on {name}: {reason}; the archive cannot serve it")
    report = built.report
    summary: dict[str, Any] = {
        "archive": str(output),
        "bytes": built.archive_bytes,
        "functions": len(report.kernels),
        "compiled": report.compiled,
        "cached": report.cached,
        "kernels": {v.name(): resources(kernel.record) for v, kernel in report.kernels.items()},
        "failures": {v.name(): reason for v, reason in report.failures.items()},
        "unserved": [{"signature": s.key(), "target": t, "reason": reason} for s, t, reason in built.unserved],
        "seconds": round(time.monotonic() - begun, 3),
        "tuning": None,
    }
    if not as_json:
        made = (
            f"{_count(len(report.kernels), 'kernel')} ({report.compiled} compiled, {report.cached} from the cache, "
            f"{len(report.failures)} failed)"
        )
        print(f"{output}: {made}, {built.archive_bytes:,} bytes, {summary['seconds']:.1f} s")
    if not no_tune and build.tunable(work.targets):
        summary["tuning"] = _tune(output, output, {}, as_json)
    if as_json:
        print_json(summary)
    if built.unserved or (summary["tuning"] or {}).get("unserved"):
        raise typer.Exit(1)


@app.command("tune")
def _tune_command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="An .aot file with candidates.")],
    output: Output,
    finalists: Annotated[int | None, typer.Option(min=1, help="Functions that reach the last comparison.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Repeats of the last comparison.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random inputs.")] = None,
    sustained: Annotated[
        bool, typer.Option(help="Compare large problems at the clock that their power leaves them too.")
    ] = True,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Share by which a function that serves elsewhere may be slower; 0.01 if not given."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the candidates of an archive on this machine's GPU and write an archive that uses the fastest."""
    _refuse_inputs(output, [source])
    destination(output)  # before the work, not after it
    given = {"finalists": finalists, "repeats": repeats, "seed": seed, "sustained": sustained, "tolerance": tolerance}
    report = _tune(source, output, {name: value for name, value in given.items() if value is not None}, as_json)
    if as_json:
        print_json({"archive": str(output), "tuning": report})
    if report["unserved"]:
        raise typer.Exit(1)


def _tune(source: Path, destination: Path, options: dict[str, Any], as_json: bool) -> dict[str, Any]:
    from .tune import TuneOptions, tune_archive

    with Progress("tuning") as progress:
        try:
            report = tune_archive(source, destination, TuneOptions(**options), progress.update)
        except KeyboardInterrupt:
            raise _Stop(f"interrupted; {destination} is what it was", _INTERRUPTED) from None
    ratios = report.speedups
    geomean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None
    for name, reason in report.rejected.items():
        warn(f"{name}: rejected: {reason}")
    for entry in report.unserved:
        warn(f"{entry}: no candidate computes the right result; the archive cannot serve it")
    if report.interrupted:
        done = f"interrupted; {destination} has what was measured, and tuning it goes on with the rest"
        raise _Stop(done, _INTERRUPTED)
    if not as_json:
        result = f", {geomean:.3f}x the baseline in the geometric mean" if geomean else ""
        print(f"{destination}: tuned at {len(report.measured)} points{result}; `aot ls {destination}` lists them")
    return {
        "points": len(report.measured),
        "geomean": geomean,
        "rejected": report.rejected,
        "unserved": report.unserved,
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
        print_checks(describe.causes(checks))
        found = f"{len(failed)} of {len(checks)} checks failed" if failed else f"{len(checks)} checks, all good"
        print(f"{archive}: {found}")
    if failed:
        raise typer.Exit(1)


# --- manifests ---


@manifest_app.command("from-config")
def _from_config(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A Hugging Face config.json.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks; the manifest is that of one.")],
    tokens: Annotated[str, typer.Option(metavar="M,M,...", help="The M values to tune for, such as 1,16,1024.")],
    target: Targets = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, f16 or e4m3. Default: that of the config, if it is bf16 or f16.")
    ] = None,
    scaling: Annotated[
        str | None, typer.Option(help="Of e4m3 layers: none, tensor, row_column or block. Default: row_column.")
    ] = None,
    fuse: Annotated[
        bool, typer.Option("--fuse", help="Take the MLP's activation into gate_up, residuals into o and down.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="The model's name. Default: from --source or CONFIG.")] = None,
    source: Annotated[str | None, typer.Option(help="Where the config is from. Default: the file's name.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default, and what - means: print it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")] = False,
) -> None:
    """Write the manifest of a model's linear layers from its config.json.

    Without --target it is for every target that has kernels for all of them, which after --fuse, or where a layer has
    a bias, are those with fused epilogues.
    """
    from .manifest import dump, write
    from .model_config import Wanted, manifest_from_config
    from .model_families import load_config

    try:
        counts = [int(part) for part in tokens.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{tokens!r} is no list of integers such as 1,16,1024", param_hint="--tokens"
        ) from None
    if output is not None:
        _refuse_inputs(output, [config])
    text = dump(
        manifest_from_config(
            load_config(config),
            Wanted(tp, counts, target or None, dtype, scaling, fuse),
            source=source or config.name,
            model=model,
            named_after=source or str(config.resolve()),
            on_warning=warn,
        )
    )
    if output is None or str(output) == "-":
        print(text, end="")
    else:
        write(text, output, replace=force)


# --- what commands share ---


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "cute-aot"


def _refuse_inputs(output: Path, inputs: Iterable[Path]) -> None:
    """Keep a command from writing over what it reads."""
    for path in inputs:
        with contextlib.suppress(OSError):
            if output.samefile(path):
                raise AotError(f"{output}: is an input too, which would be lost; name another output")


def _count(number: int, one: str, more: str = "") -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"
