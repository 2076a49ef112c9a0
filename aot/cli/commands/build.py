"""`aot build`: what to compile for manifests and functions of the user's own, compiled, packed and, on a GPU, tuned."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from runtime.errors import AotError

from ...search.targets import target as target_named
from ...tune.options import TuneOptions
from ..arguments import Force, Json, Output, SpecPath, Targets, count, examples
from ..exit_status import INTERRUPTED, Stop
from ..inputs import open_archive, refuse_outputs
from ..output import require_replaceable
from ..progress import Progress
from ..streams import print_json, say, warn
from ..tables import extents
from . import tune

if TYPE_CHECKING:
    from ...build import Built
    from ...compile.compiler import Event
    from ...providers.spec_file import SpecFunction
    from ...selection import Selection

EXAMPLES = examples(
    "aot build model.yaml -o model.aot",
    "aot build a.yaml b.yaml -o both.aot --target sm_90a --target sm_100a --function rmsnorm",
    "aot build --function quack.rmsnorm:RMSNorm --spec SPEC -o norms.aot --target sm_90a",
    "aot build forms.yaml -o universal.aot --universal",
    "aot build model.yaml -o candidates.aot --base universal.aot",
)


def command(
    output: Output,
    manifests: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="MANIFEST", help="YAML files; docs/manifests.md says what they may hold.", show_default=False
        ),
    ] = None,
    target: Targets = None,
    function: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Add another operation, such as rmsnorm; with --spec a function of it, by name or package.module:name."
            " May be repeated.",
        ),
    ] = None,
    spec: SpecPath = None,
    universal: Annotated[
        bool, typer.Option("--universal", help="Serve the forms of MANIFESTs at any N and K, by estimated times.")
    ] = False,
    base: Annotated[
        list[Path] | None, typer.Option(metavar="BASE", help="Keep all that this archive serves too. One at most.")
    ] = None,
    times: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="With --universal: measured times to choose by. May be repeated."),
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Kernels for a problem at each M of its manifest and between them, default 8; for a form, default 40.",
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that compile. Default: usable cores.")] = None,
    cache: Annotated[
        str | None, typer.Option(metavar="DIR", help="Build cache. Default: $XDG_CACHE_HOME or ~/.cache, cute-aot.")
    ] = None,
    no_tune: Annotated[bool, typer.Option("--no-tune", help="Do not tune, though a GPU is here.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with status 1 where any candidate fails to compile.")
    ] = False,
    force: Force = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print what each kernel takes of an SM.")] = False,
    as_json: Json = False,
) -> None:
    """Compile what MANIFESTs need, and functions of your own, into an archive.

    Where there is a GPU to tune it on, tune it too.
    """
    from ... import build
    from ...compile.cache import default_directory

    begun = time.monotonic()
    if len(base or ()) > 1:
        raise AotError("--base is there more than once; load several archives as layers, runtime.load([...])")
    refuse_outputs(output, [*(manifests or ()), *(base or ()), *(times or ()), *([spec] if spec else ())])
    require_replaceable(output, force, keep_tuned=True)
    options = Wanted(target or (), candidates, function or (), spec, universal, times or ())
    work = select(manifests or (), options)
    directory = default_directory() if cache is None else _named_cache(cache)
    built = compile_selection(work, output, directory, jobs, base[0] if base else None, verbose)
    summary = _summary(output, built, time.monotonic() - begun)
    _tell(built, summary, quiet=as_json)
    if not no_tune and build.tunable(built.targets):
        summary["tuning"] = tune.tune_archive(output, output, TuneOptions(), as_json)
        summary["bytes"] = output.stat().st_size
    if spec is not None and not no_tune and build.tunable(build.checkable(built)):
        summary["checked"] = tune.check_functions(output, output, spec, TuneOptions(), as_json)
        summary["bytes"] = output.stat().st_size
    if as_json:
        print_json(summary)
    lost = [v for v in built.report.failures if v.provider == "spec"] or (summary["checked"] or {}).get("wrong")
    if built.unserved or lost or (summary["tuning"] or {}).get("unserved") or (strict and summary["failed"]):
        raise typer.Exit(1)


def compile_selection(
    work: Selection, output: Path, directory: Path | str | None, jobs: int | None, base: Path | None, verbose: bool
) -> Built:
    """Compile what is planned and write the archive, saying how far that is; `directory` is the build cache."""
    from ... import build
    from ...compile.cache import Cache
    from ...inspect.functions import resources

    total = len(work.variants())
    finished = 0
    with Progress("compiling") as progress:

        def on_event(event: Event) -> None:
            nonlocal finished
            if event.outcome == "failed" and total > 1:  # of a single one the error says it
                progress.warn(f"{event.variant.name()}: {event.detail}")
            if verbose and event.record is not None:
                progress.line(resources_line(event.variant.name(), resources(event.record)))
            finished += 1
            progress.update(finished, total)

        def on_start(missing: int, processes: int) -> None:
            progress.note(f"compiling {count(missing, 'kernel')} in {count(processes, 'process', 'processes')}")

        kept = Cache(directory, lambda message: progress.warn(f"cache: {message}"))
        try:
            with contextlib.ExitStack() as stack:
                below = stack.enter_context(open_archive(base)) if base else None
                return build.build(work, output, kept, jobs, on_event, on_start, below)
        except build.NothingCompiled:
            if total == 1:
                raise
            raise AotError(f"none of {total} kernels compiled; the warnings say why of each") from None
        except KeyboardInterrupt:
            done = f"interrupted with {finished} of {total} kernels done; the same command continues there"
            raise Stop(done, INTERRUPTED) from None


class Wanted(NamedTuple):
    """What `aot build` is told besides manifests of what to compile."""

    targets: Sequence[str]
    candidates: int | None
    functions: Sequence[str]
    spec: Path | None
    universal: bool
    times: Sequence[Path]


def select(manifests: Sequence[Path], options: Wanted) -> Selection:
    """What to compile for manifests: for their problems, with further functions; or for their forms, by times."""
    from ...pack.build_table import Asked, input_digests

    work = _select(manifests, options)
    inputs = input_digests(options.spec, options.times)
    return replace(work, asked=Asked(list(options.targets), list(options.functions), options.universal, inputs))


def _select(manifests: Sequence[Path], options: Wanted) -> Selection:
    from ... import selection
    from ...problem import manifest
    from ...search.universal import FUNCTIONS

    if options.universal and (options.functions or options.spec):
        raise AotError("--function and --spec add what no table chooses; build that without --universal")
    if options.times and not options.universal:
        raise AotError("--times is what --universal chooses by; give that too, or leave it out")
    if options.spec is None and (word := next((w for w in options.functions if ":" in w), None)):
        raise AotError(f"--function {word}: what it takes is not known; describe it in a spec and give --spec")
    read = [manifest.load(path) for path in manifests]
    if options.universal:
        return selection.select_universal(read, options.targets, options.candidates or FUNCTIONS, options.times)
    words, targets = options.functions, options.targets
    of_spec: list[SpecFunction] = []
    if options.spec is not None:
        from ...providers import spec_file

        for name in options.targets:
            target_named(name)
        spec = spec_file.load(options.spec)
        functions, words = spec_file.chosen(spec, options.functions)
        of_spec = spec_file.compilable(spec, functions, targets or [t for m in read for t in m.targets])
        if not read:
            targets = targets or [f.target for f in of_spec]
    return selection.select(read, targets, options.candidates or selection.CANDIDATES, words, of_spec)


def _tell(built: Built, summary: dict[str, Any], quiet: bool) -> None:
    """Warn of what the archive cannot serve or lost, then say what was made."""
    for unserved in built.unserved:
        warn(f"{unserved.words()}; the archive cannot serve it")
    if built.untuned:
        entries = count(built.untuned, "tuned entry", "tuned entries")
        warn(f"{entries} of the base gave way to candidates; run: aot tune")
    if quiet:
        return
    made = f"{summary['compiled']} compiled, {summary['cached']} from the cache"
    kernels, failed = count(summary["functions"], "kernel"), count(summary["failed"], "candidate")
    forms = f"serving {count(built.forms, 'form')} at any N and K, " if built.forms else ""
    size = f"{built.archive_bytes:,} bytes, {summary['seconds']:.1f} s"
    of_base = f" and {built.of_base} of the base" if built.of_base else ""
    say(f"{summary['archive']}: {kernels} ({made}){of_base}, {failed} failed, {forms}{size}")


def _summary(output: Path, built: Built, seconds: float) -> dict[str, Any]:
    """What `aot build --json` prints, before tuning."""
    from ...inspect.functions import resources

    report = built.report
    return {
        "archive": str(output),
        "bytes": built.archive_bytes,
        "functions": len(report.kernels),
        "functions_of_base": built.of_base,
        "forms": built.forms,
        "compiled": report.compiled,
        "cached": report.cached,
        "failed": len(report.failures),
        "kernels": {v.name(): resources(kernel.record) for v, kernel in report.kernels.items()},
        "failures": {v.name(): reason for v, reason in report.failures.items()},
        "unserved": [{"signature": u.what, "target": u.target, "reason": u.reason} for u in built.unserved],
        "seconds": round(seconds, 3),
        "tuning": None,
        "checked": None,
    }


def resources_line(name: str, launches: Iterable[dict[str, Any]]) -> str:
    """A kernel's name and what `aot.inspect.functions.resources` says of it."""
    said = [
        f"{extents([r['threads']])} threads, {r['registers']} registers, "
        f"{extents([r['shared_bytes']])} bytes of shared memory, {r['local_bytes']} spilled"
        for r in launches
    ]
    return f"{name}: {'; '.join(said)}"


def _named_cache(name: str) -> str:
    """The cache that a user names: a slip is worth an error, where trouble with a cache is a warning."""
    if os.path.exists(name) and not os.path.isdir(name):
        raise AotError(f"{name}: cannot be the build cache: it is no folder; name a folder")
    return name
