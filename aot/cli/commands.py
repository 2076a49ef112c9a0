"""The command `aot`: reads arguments, calls the modules that do the work, prints what they return.

`aot.cli.ending` says what the exit statuses are. Imports neither torch nor the DSL before it needs one.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from runtime.container.archive import FileUnreadable, NotAnArchive
from runtime.errors import AotError, ArchiveError
from runtime.limits import MAX_GEMM_EXTENT
from runtime.numbers.scaling import SCALINGS

from ..search.targets import TARGETS
from ..search.targets import target as target_named
from ..tune.options import MAX_SEED, TuneOptions
from ..version import own_version
from . import ending
from .console import print_checks, print_entry, print_function, print_listing, print_predicted, resources_line
from .ending import INTERRUPTED, Stop
from .inputs import open_archive, refuse_outputs
from .output import require_replaceable
from .progress import Progress
from .streams import print_json, printable, say, warn

if TYPE_CHECKING:
    from ..build import Built
    from ..compile.compiler import Event
    from ..plan import Plan
    from ..providers.spec_file import SpecFunction


def _examples(*lines: str) -> str:
    """The end of a help text; \\b keeps its lines as they are."""
    return "\n".join(("\b", "Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)))


app = typer.Typer(
    help="Compile and tune CuTe DSL kernels offline, into one file that runs with no compiler.",
    epilog=_examples("aot build model.yaml -o model.aot", "aot ls model.aot"),
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_FROM_CONFIG = _examples("aot manifest from-config config.json --tp 8 --tokens 1,16,64,1024 -o model.yaml")
_FROM_SERVER = _examples("aot manifest from-server records/ -o model.yaml")
manifest_app = typer.Typer(
    help="Write manifests; docs/manifests.md says what they may hold.",
    epilog=_FROM_CONFIG,
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(manifest_app, name="manifest")

ArchivePath = Annotated[Path, typer.Argument(metavar="ARCHIVE", help="An .aot file.")]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="The .aot file to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT, whatever it holds.")]
SpecPath = Annotated[
    Path | None,
    typer.Option(metavar="SPEC", help="A Python file that describes your own functions; docs/functions.md has one."),
]
Targets = Annotated[
    list[str] | None, typer.Option("--target", metavar="T", help=f"May be repeated: {', '.join(TARGETS)}.")
]
ManifestOutput = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default, and what - means: print it.")
]
ManifestForce = Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")]


def main() -> None:
    """Run the command line and end the process."""
    ending.run(app)


def _version(wanted: bool) -> None:
    if wanted:
        print(own_version())
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# --- building and tuning ---


@app.command(
    "build",
    epilog=_examples(
        "aot build model.yaml -o model.aot",
        "aot build a.yaml b.yaml -o both.aot --target sm_90a --target sm_100a --function rmsnorm",
        "aot build --function quack.rmsnorm:RMSNorm --spec SPEC -o norms.aot --target sm_90a",
        "aot build forms.yaml -o universal.aot --universal",
        "aot build model.yaml -o candidates.aot --base universal.aot",
    ),
)
def _build(
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
        typer.Option(min=1, help="Kernels for a problem at each M of its manifest, default 8; for a form, default 40."),
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
    from .. import build

    begun = time.monotonic()
    if len(base or ()) > 1:
        raise AotError("--base is there more than once; load several archives as layers, runtime.load([...])")
    refuse_outputs(output, [*(manifests or ()), *(base or ()), *(times or ()), *([spec] if spec else ())])
    require_replaceable(output, force, keep_tuned=True)
    options = Planning(target or (), candidates, function or (), spec, universal, times or ())
    work = _plan(manifests or (), options)
    directory = _cache_directory() if cache is None else _named_cache(cache)
    built = _compile(work, output, directory, jobs, base[0] if base else None, verbose)
    summary = _summary(output, built, time.monotonic() - begun)
    _tell(built, summary, quiet=as_json)
    if not no_tune and build.tunable(built.targets):
        summary["tuning"] = _tune(output, output, TuneOptions(), as_json)
        summary["bytes"] = output.stat().st_size
    if spec is not None and not no_tune and build.tunable(build.checkable(built)):
        summary["checked"] = _check_functions(output, output, spec, TuneOptions(), as_json)
        summary["bytes"] = output.stat().st_size
    if as_json:
        print_json(summary)
    lost = [v for v in built.report.failures if v.provider == "spec"] or (summary["checked"] or {}).get("wrong")
    if built.unserved or lost or (summary["tuning"] or {}).get("unserved") or (strict and summary["failed"]):
        raise typer.Exit(1)


def _compile(
    work: Plan, output: Path, directory: Path | str | None, jobs: int | None, base: Path | None, verbose: bool
) -> Built:
    """Compile what is planned and write the archive, saying how far that is; `directory` is the build cache."""
    from .. import build
    from ..compile.cache import Cache
    from .describe import resources

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
            progress.note(f"compiling {_count(missing, 'kernel')} in {_count(processes, 'process', 'processes')}")

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


class Planning(NamedTuple):
    """What `aot build` is told besides manifests of what to compile."""

    targets: Sequence[str]
    candidates: int | None
    functions: Sequence[str]
    spec: Path | None
    universal: bool
    times: Sequence[Path]


def _plan(manifests: Sequence[Path], options: Planning) -> Plan:
    """What to compile for manifests: for their problems, with further functions; or for their forms, by times."""
    from .. import plan
    from ..problem import manifest
    from ..search.universal import FUNCTIONS

    if options.universal and (options.functions or options.spec):
        raise AotError("--function and --spec add what no table chooses; build that without --universal")
    if options.times and not options.universal:
        raise AotError("--times is what --universal chooses by; give that too, or leave it out")
    if options.spec is None and (word := next((w for w in options.functions if ":" in w), None)):
        raise AotError(f"--function {word}: what it takes is not known; describe it in a spec and give --spec")
    read = [manifest.load(path) for path in manifests]
    if options.universal:
        return plan.plan_universal(read, options.targets, options.candidates or FUNCTIONS, options.times)
    words, targets = options.functions, options.targets
    of_spec: list[SpecFunction] = []
    if options.spec is not None:
        from ..providers import spec_file

        for name in options.targets:
            target_named(name)
        spec = spec_file.load(options.spec)
        functions, words = spec_file.chosen(spec, options.functions)
        of_spec = spec_file.compilable(spec, functions, targets or [t for m in read for t in m.targets])
        if not read:
            targets = targets or [f.target for f in of_spec]
    return plan.plan(read, targets, options.candidates or plan.CANDIDATES, words, of_spec)


def _tell(built: Built, summary: dict[str, Any], quiet: bool) -> None:
    """Warn of what the archive cannot serve or lost, then say what was made."""
    for unserved in built.unserved:
        warn(f"{unserved.words()}; the archive cannot serve it")
    if built.untuned:
        entries = _count(built.untuned, "tuned entry", "tuned entries")
        warn(f"{entries} of the base gave way to candidates; run: aot tune")
    if quiet:
        return
    made = f"{summary['compiled']} compiled, {summary['cached']} from the cache"
    kernels, failed = _count(summary["functions"], "kernel"), _count(summary["failed"], "candidate")
    forms = f"serving {_count(built.forms, 'form')} at any N and K, " if built.forms else ""
    size = f"{built.archive_bytes:,} bytes, {summary['seconds']:.1f} s"
    of_base = f" and {built.of_base} of the base" if built.of_base else ""
    say(f"{summary['archive']}: {kernels} ({made}){of_base}, {failed} failed, {forms}{size}")


def _summary(output: Path, built: Built, seconds: float) -> dict[str, Any]:
    """What `aot build --json` prints, before tuning."""
    from .describe import resources

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


@app.command(
    "tune",
    epilog=_examples(
        "aot tune candidates.aot -o model.aot",
        "aot tune candidates.aot -o model.aot --finalists 8 --repeats 9",
        "aot tune norms.aot -o checked.aot --spec SPEC",
    ),
)
def _tune_command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="An .aot file with candidates.")],
    output: Output,
    spec: Annotated[
        Path | None,
        typer.Option(
            metavar="SPEC",
            help="Check the functions of this spec against their references, and tune nothing; see docs/functions.md.",
        ),
    ] = None,
    finalists: Annotated[
        int, typer.Option(min=1, help="Functions that reach the last comparison.")
    ] = TuneOptions.finalists,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of the last comparison.")] = TuneOptions.repeats,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the random inputs.")] = TuneOptions.seed,
    sustained: Annotated[
        bool, typer.Option(help="Compare large problems at the clock that their power leaves them too.")
    ] = TuneOptions.sustained,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the best time by which a function may be slower that serves elsewhere too."
        ),
    ] = TuneOptions.tolerance,
    history: Annotated[
        bool, typer.Option(help="Keep in OUT what was measured and rejected, for people to read; servers skip it.")
    ] = TuneOptions.history,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure candidates on this machine's GPUs, all of them at a time, and keep the fastest. IN stays as it is.

    Where IN was tuned on another kind of GPU, what is fastest on this kind is added. Killed, the same command goes on.
    With --spec, check functions of your own instead.
    """
    refuse_outputs(output, [source, *([spec] if spec else ())])
    require_replaceable(output, force)
    options = TuneOptions(finalists, repeats, seed, sustained, tolerance, history)
    with open_archive(source) as opened:
        opened.check_blocks()  # before torch is imported, which takes seconds
    if spec is not None:
        checked = _check_functions(source, output, spec, options, as_json)
        if as_json:
            print_json({"archive": str(output), "functions": checked})
        if checked["wrong"]:
            raise typer.Exit(1)
        return
    report = _tune(source, output, options, as_json)
    if as_json:
        print_json({"archive": str(output), "tuning": report})
    if report["unserved"]:
        raise typer.Exit(1)


def _tune(source: Path, destination: Path, options: TuneOptions, as_json: bool) -> dict[str, Any]:
    from ..tune.run import tune_archive

    with Progress("tuning") as progress:
        try:
            report = tune_archive(source, destination, options, progress.update)
        except KeyboardInterrupt:
            raise Stop(f"interrupted; {destination} is what it was", INTERRUPTED) from None
    ratios = report.speedups
    geomean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None
    for name, reason in report.rejected.items():
        warn(f"{name}: rejected: {reason}")
    for entry in report.unserved:
        warn(f"{entry}: no candidate computes the right result; the archive cannot serve it")
    for entry in report.unknown:
        warn(f"{entry}: left as it was, unchecked: nothing here says how functions of its operation are checked")
    if report.interrupted:
        rest = f"the same command goes on, as does `aot tune {destination} -o OTHER` with the rest"
        raise Stop(f"interrupted; {destination} has what was measured; {rest}", INTERRUPTED)
    if not as_json:
        result = f", {geomean:.3f}x the baseline in the geometric mean" if geomean else ""
        done = (
            [f"tuned at {_count(len(report.measured), 'point')}{result}"] if report.measured or not report.forms else []
        )
        done += [f"checked {_count(report.forms, 'form')}"] if report.forms else []
        say(f"{destination}: {' and '.join(done)}; `aot ls {destination}` lists them")
    return {
        "points": len(report.measured),
        "geomean": geomean,
        "rejected": report.rejected,
        "unserved": report.unserved,
        "unknown": report.unknown,
        "forms": report.forms,
        "environment": report.environment,
    }


def _check_functions(
    source: Path, destination: Path, path: Path, options: TuneOptions, as_json: bool
) -> dict[str, Any]:
    from ..providers import spec_file
    from ..tune.functions import check_archive

    spec = spec_file.load(path)
    with Progress("checking") as progress:
        try:
            report = check_archive(source, destination, spec, options, progress.update)
        except KeyboardInterrupt:
            raise Stop(f"interrupted; {destination} is what it was", INTERRUPTED) from None
    for name, reason in report.wrong.items():
        warn(f"{name}: left out: {reason}")
    for name in report.unchecked:
        warn(f"{name}: has no reference, so nothing is known of it")
    if not as_json:
        say(
            f"{destination}: {_count(len(report.right), 'function')} right on {report.environment['gpu']}, "
            f"{len(report.wrong)} wrong; `aot ls {destination}` lists them"
        )
    return {
        "right": report.right,
        "wrong": report.wrong,
        "unchecked": report.unchecked,
        "elsewhere": report.elsewhere,
        "environment": report.environment,
    }


# --- looking at archives ---


@app.command("ls", epilog=_examples("aot ls model.aot", "aot ls model.aot --json"))
def _ls(archive: ArchivePath, as_json: Json = False) -> None:
    """List what an archive serves. For each signature and target the functions by range of M, then what it serves at
    any N and K, and sizes."""
    from . import describe

    with open_archive(archive) as opened:
        found = describe.listing(opened)
    if as_json:
        return print_json(found)
    print_listing(found)


@app.command(
    "show",
    epilog=_examples(
        "aot show model.aot qkv", "aot show universal.aot bf16_bf16_bf16_f32_none_n6144_k4096 --m 48 --m 3000"
    ),
)
def _show(
    archive: ArchivePath,
    entry: Annotated[
        str,
        typer.Argument(metavar="ENTRY", help="A function, a signature, or a name that a manifest has, such as qkv."),
    ],
    m: Annotated[
        list[int] | None,
        typer.Option(
            "--m", metavar="M", min=1, max=MAX_GEMM_EXTENT, help="Rows to say what serves at. May be repeated."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one function or signature of an archive in full; of a signature that no entry has what is predicted."""
    from . import describe

    with open_archive(archive) as opened:
        found = describe.show(opened, entry, m or ())
    if as_json:
        return print_json(found)
    if "function" in found:
        return print_function(found["function"])
    printed = print_predicted if "predicted" in found else print_entry
    for i, one in enumerate(found.get("predicted") or found["entries"]):
        if i:
            print()
        printed(one)


@app.command("verify", epilog=_examples("aot verify model.aot"))
def _verify(archive: ArchivePath, as_json: Json = False) -> None:
    """Check an archive: every digest, record, launch and table. Exit status 1 where a check fails."""
    from ..verify import archive as verify

    try:
        with open_archive(archive) as opened:
            checks = verify.verify(opened)
    except (FileUnreadable, NotAnArchive):
        raise
    except ArchiveError as error:
        checks = [verify.Finding("header and index", False, str(error))]
    failed = [check for check in checks if not check.ok]
    if as_json:
        print_json({"ok": not failed, "checks": [check._asdict() for check in checks]})
    else:
        print_checks(verify.causes(checks), [check for check in checks if check.warning])
        found = f"{len(failed)} of {len(checks)} checks failed" if failed else f"{len(checks)} checks, all good"
        say(f"{archive}: {found}")
    if failed:
        raise typer.Exit(1)


# --- manifests ---


@manifest_app.command("from-config", epilog=_FROM_CONFIG)
def _from_config(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A Hugging Face config.json.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks; the manifest is that of one.")],
    tokens: Annotated[str, typer.Option(metavar="M,M,...", help="The M values to tune for, such as 1,16,1024.")],
    target: Targets = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, f16 or e4m3. Default: that of the config, if it is bf16 or f16.")
    ] = None,
    scaling: Annotated[
        str | None, typer.Option(help=f"Of e4m3 layers: {', '.join(SCALINGS)}. Default: row_column.")
    ] = None,
    fuse: Annotated[
        bool, typer.Option("--fuse", help="Take the MLP's activation into gate_up, residuals into o and down.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="The model's name. Default: from --source or CONFIG.")] = None,
    source: Annotated[str | None, typer.Option(help="Where the config is from. Default: the file's name.")] = None,
    output: ManifestOutput = None,
    force: ManifestForce = False,
) -> None:
    """Write the manifest of a model's linear layers from its config.json.

    Without --target it is for every target that has kernels for all of them, which after --fuse, or where a layer has
    a bias, are those with fused epilogues.
    """
    from ..problem.manifest import dump
    from ..problem.model_config import Wanted, manifest_from_config
    from ..problem.model_families import load_config

    try:
        counts = [int(part) for part in tokens.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{tokens!r} is no list of integers such as 1,16,1024", param_hint="--tokens"
        ) from None
    if output is not None:
        refuse_outputs(output, [config])
    text = dump(
        manifest_from_config(
            load_config(config),
            Wanted(tp, counts, target or None, dtype, scaling, fuse),
            source=source or printable(config.name),
            model=model,
            named_after=source or printable(str(config.resolve())),
            on_warning=warn,
        )
    )
    _write_manifest(text, output, force)


@manifest_app.command("from-server", epilog=_FROM_SERVER)
def _from_server(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What vLLM's workers recorded; docs/vllm.md.")],
    target: Targets = None,
    model: Annotated[str | None, typer.Option(help="The model's name. Default: from vLLM's.")] = None,
    output: ManifestOutput = None,
    force: ManifestForce = False,
) -> None:
    """Write the manifest of the GEMMs that a vLLM server ran, with the M that it ran them at and how often.

    Without --target it is for the GPU that the server ran on.
    """
    from ..problem.manifest import dump
    from ..problem.recorded import manifest_from_workers

    for name in target or ():
        target_named(name)
    found = manifest_from_workers(folder, targets=target, model=model, on_warning=warn)
    _write_manifest(dump(found), output, force)


# --- what commands share ---


def _write_manifest(text: str, output: Path | None, force: bool) -> None:
    from ..problem.manifest import write

    if output is None or str(output) == "-":
        print(text, end="")
    else:
        write(text, output, replace=force)


def _cache_directory() -> Path | None:
    """Where the build cache is by default; None where this user has no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(RuntimeError):
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "cute-aot"
    return None


def _named_cache(name: str) -> str:
    """The cache that a user names: a slip is worth an error, where trouble with a cache is a warning."""
    if os.path.exists(name) and not os.path.isdir(name):
        raise AotError(f"{name}: cannot be the build cache: it is no folder; name a folder")
    return name


def _count(number: int, one: str, more: str = "") -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"
