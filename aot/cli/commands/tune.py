"""`aot tune`: an archive's candidates checked and timed on this machine's GPUs; `aot build` ends with it too."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ...tune.options import MAX_CONTEXT, MAX_SEED, GraphOptions, TuneError, TuneOptions
from ..arguments import Force, Json, Output, count, examples
from ..exit_status import INTERRUPTED, Stop
from ..inputs import open_archive, refuse_outputs
from ..layout import print_fitted
from ..output import require_replaceable
from ..progress import Progress
from ..streams import print_json, say, warn

EXAMPLES = examples(
    "aot tune candidates.aot -o model.aot",
    "aot tune candidates.aot -o model.aot --finalists 8 --repeats 9",
    "aot tune model.aot -o served.aot --in-graph",
    "aot tune norms.aot -o checked.aot --spec SPEC",
)


def command(
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
    in_graph: Annotated[
        bool,
        typer.Option(
            "--in-graph",
            help="Choose where layers of an IN that was tuned overlap and fuse, in a replay of decode steps.",
        ),
    ] = False,
    context: Annotated[
        int, typer.Option(min=1, max=MAX_CONTEXT, help="With --in-graph: tokens in the cache of each sequence.")
    ] = GraphOptions.context,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure candidates on this machine's GPUs, all of them at a time, and keep the fastest. IN stays as it is.

    Where IN was tuned on another kind of GPU, what is fastest on this kind is added. Killed, the same command goes on.
    With --spec, check functions of your own instead; with --in-graph, measure whole layers.
    """
    refuse_outputs(output, [source, *([spec] if spec else ())])
    require_replaceable(output, force)
    options = TuneOptions(finalists, repeats, seed, sustained, tolerance, history)
    with open_archive(source) as opened:
        opened.check_blocks()  # before torch is imported, which takes seconds
    if in_graph:
        if spec is not None:
            raise TuneError("--in-graph and --spec do not go together; leave one of them out")
        found = tune_in_graph(source, output, GraphOptions(context, seed=seed), as_json)
        if as_json:
            print_json({"archive": str(output), "in_graph": found})
        return
    if spec is not None:
        checked = check_functions(source, output, spec, options, as_json)
        if as_json:
            print_json({"archive": str(output), "functions": checked})
        if checked["wrong"]:
            raise typer.Exit(1)
        return
    report = tune_archive(source, output, options, as_json)
    if as_json:
        print_json({"archive": str(output), "tuning": report})
    if report["unserved"]:
        raise typer.Exit(1)


def tune_archive(source: Path, destination: Path, options: TuneOptions, as_json: bool) -> dict[str, Any]:
    """Tune an archive into another file, saying how far that is; what `--json` prints of it."""
    from ...tune import run

    began = time.monotonic()
    with Progress("tuning") as progress:
        try:
            report = run.tune_archive(source, destination, options, progress.update)
        except KeyboardInterrupt:
            raise Stop(f"interrupted; {destination} is what it was", INTERRUPTED) from None
    ratios, seconds = report.speedups, time.monotonic() - began
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
            [f"tuned at {count(len(report.measured), 'point')}{result}"] if report.measured or not report.forms else []
        )
        done += [f"checked {count(report.forms, 'form')}"] if report.forms else []
        say(f"{destination}: {' and '.join(done)}, in {seconds:.0f} s; `aot ls {destination}` lists them")
        if report.forms_left:
            left = f"{count(report.forms_left, 'form')} checked only on another kind of GPU"
            say(f"{destination}: has {left}; once all entries are tuned, `aot tune` checks them on this one")
    return {
        "seconds": round(seconds, 1),
        "points": len(report.measured),
        "geomean": geomean,
        "rejected": report.rejected,
        "unserved": report.unserved,
        "unknown": report.unknown,
        "forms": report.forms,
        "forms_left": report.forms_left,
        "environment": report.environment,
    }


def tune_in_graph(source: Path, destination: Path, options: GraphOptions, as_json: bool) -> list[dict[str, Any]]:
    """Choose in a replay of decode steps where layers overlap and fuse; what `--json` prints of it."""
    from ...problem.ways import PARTS
    from ...tune import in_graph
    from ...tune.block import described

    with Progress("tuning") as progress:
        try:
            report = in_graph.tune_in_graph(source, destination, options, progress.update)
        except KeyboardInterrupt:
            raise Stop(f"interrupted; {destination} is what it was", INTERRUPTED) from None
    found: list[dict[str, Any]] = [
        {"model": block.model, "steps": [described(block, at) for at in seen], "environment": report.environment}
        for block, seen in report.seen
    ]
    if not as_json:
        for of in found:
            uniform = list(dict.fromkeys(name for at in of["steps"] for name in at["uniform"]))
            rows = [
                [str(at["m"]), f"{at['us']:.1f}", *(at["parts"].get(part, "") for part in PARTS)]
                + [f"{us / at['us']:.3f}" if (us := at["uniform"].get(name)) else "" for name in uniform]
                for at in of["steps"]
            ]
            say(f"{of['model'] or 'layers'}: what won in decode steps; times of what is uniform are over its own")
            print_fitted(["M", "us a layer", *PARTS, *uniform], rows, right=[0, 1, *range(6, 6 + len(uniform))])
        say(f"{destination}: says where layers overlap and fuse; servers' plugins call it so")
    return found


def check_functions(source: Path, destination: Path, path: Path, options: TuneOptions, as_json: bool) -> dict[str, Any]:
    """Hold functions against the references of the spec at `path`; what `--json` prints of it."""
    from ...providers import spec_file
    from ...tune.functions import check_archive

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
            f"{destination}: {count(len(report.right), 'function')} right on {report.environment['gpu']}, "
            f"{len(report.wrong)} wrong; `aot ls {destination}` lists them"
        )
    return {
        "right": report.right,
        "wrong": report.wrong,
        "unchecked": report.unchecked,
        "elsewhere": report.elsewhere,
        "environment": report.environment,
    }
