"""`aot explain`: why a layer is as fast as it is at one M."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from runtime.limits import MAX_EXTENT

from ..arguments import ArchivePath, Json, OneGpu, OneTarget, examples, one_m
from ..inputs import open_archive
from ..layout import print_command, print_fields, print_fitted, print_wrapped
from ..streams import print_json
from ..tables import cleaned, interval, kind, percent, ratio

EXAMPLES = examples("aot explain model.aot qkv --m 700", "aot explain model.aot --n 6144 --k 4096 --m 700 --gpu H200")


def command(
    archive: ArchivePath,
    m: Annotated[
        list[int], typer.Option("--m", metavar="M", min=1, max=MAX_EXTENT, help="Rows of A, such as tokens; one M.")
    ],
    layer: Annotated[
        str | None,
        typer.Argument(metavar="LAYER", help="A name that a manifest has, such as qkv; a signature; or a function."),
    ] = None,
    n: Annotated[int | None, typer.Option("--n", metavar="N", min=1, max=MAX_EXTENT, help="Of a GEMM.")] = None,
    k: Annotated[int | None, typer.Option("--k", metavar="K", min=1, max=MAX_EXTENT, help="Of a GEMM.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of A and B of a GEMM, such as bf16.")] = None,
    target: OneTarget = None,
    gpu: OneGpu = None,
    as_json: Json = False,
) -> None:
    """Explain what serves a layer at M rows. The function and why it was chosen, its time beside the floor of the GPU
    and beside torch, and the functions behind it. Of what nothing serves, the nearest entries and what to do, with exit
    status 1."""
    from ...inspect.explain import Where, explain
    from ...inspect.serving import Serving
    from ...inspect.signatures import Extents, signatures

    rows = one_m(m) or 1
    with open_archive(archive) as opened:
        serving = Serving(opened)
        asked = signatures(opened, serving, layer, Extents(n, k, dtype), rows)
        found = explain(opened, serving, asked, rows, Where(target, gpu))
    if as_json:
        print_json({"archive": str(archive), "digest": opened.digest, "answers": found})
    else:
        for i, answer in enumerate(found):
            if i:
                print()
            print_answer(answer)
    if any(answer["state"] is None for answer in found):
        raise typer.Exit(1)


def print_answer(answer: dict[str, Any]) -> None:
    """What `aot explain` prints of one signature on one GPU."""
    answer = cleaned(answer)
    names = ",".join(answer["names"]) or answer["operation"]
    of = f" of {', '.join(answer['models'])}" if answer["models"] else ""
    print_wrapped(
        f"{names}{of} at M = {answer['m']} on {kind(answer['gpu'])}: {answer['state'] or 'nothing serves it'}"
    )
    print(answer["key"])
    if answer["assumed_gpu"]:
        print_wrapped("this kind of GPU is assumed, as none is named and no entry is for one")
    if answer.get("of_another_kind"):
        print_wrapped(f"tuned on {kind(answer['tuned_on'])}, the nearest kind: times and floor are of that one")
    print()
    if answer["state"] is None:
        return _print_missing(answer)
    print_fields([*_serves(answer), *_time(answer), *_floor(answer), *_torch(answer), *_why(answer)])
    if answer["near"]:
        print()
        rows = [_measured(row) for row in answer["near"]]
        print_fitted(
            ["measured at M", "us", "spread", "torch us", "of torch", "digest", "choices"], rows, range(5), [6]
        )
    if answer["runners_up"]:
        print()
        rows = [_runner_up(row) for row in answer["runners_up"]]
        print_fitted(["slower by", "us", "digest", "choices"], rows, right={0, 1})
    if answer["rejected"]:
        print()
        print_fields([("rejected", f"{row['name']}: {row['reason']}") for row in answer["rejected"]])


def _serves(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    function = answer["function"]
    at = f" at M = {interval(answer['range'])}" if answer["range"] else ""
    yield "serves", f"function {function['short_name']}{at}"
    yield "", function["name"]
    if function["variant"]:
        yield "", function["variant"]["words"]


def _time(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    time = answer["time"]
    if time is None:
        yield "time", "not known: nothing was timed near this M" if answer["state"] == "tuned" else "not known"
        return
    said = f"{time['us']:.1f} us, {time['how']}"
    if time["off_by"] is not None:
        most = answer["measured_at"][-1]
        beyond = f", the largest of which is {most}" if answer["m"] > most else ""
        said += f" from what was measured at other M{beyond}; may be off by {percent(time['off_by'])}"
    if time["spread"] is not None:
        said += f", spread {percent(time['spread'])}"
    if time["sustained_us"] is not None:
        said += f"; {time['sustained_us']:.1f} us under sustained load"
    yield "time", said


def _floor(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    floor = answer["floor"]
    if floor is None:
        yield "floor", "not known for this GPU or operation"
        return
    if floor["bound"] == "memory":
        amount = f"{floor['bytes'] / 1e6:,.1f} MB at {floor['rate'] / 1e6:.2f} TB/s of memory"
    else:
        amount = f"{floor['flops'] / 1e9:,.1f} GFLOP at {floor['rate'] / 1e6:,.0f} TFLOP/s of the tensor cores"
    of = "" if answer["time"] is None else f"; the time is {answer['time']['us'] / floor['us']:.2f} times that"
    yield "floor", f"{floor['us']:.1f} us: {amount}{of}"


def _torch(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    torch = answer["torch"]
    if torch is None:
        yield "torch", "not timed at or around this M"
        return
    where = "" if torch["between"] is None else ", interpolated between M = {} and {}".format(*torch["between"])
    of = "" if torch["ratio"] is None else f"; the function is {torch['ratio']:.2f} times as fast"
    yield "torch", f"{torch['us']:.1f} us, {torch['baseline']}{where}{of}"
    if torch["is_faster"]:
        faster = interval(torch["faster_at"])
        yield "", f'torch was faster at M = {faster}: a library loaded with on_slower="torch" leaves these to it'


def _why(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What the function was chosen by."""
    time, behind = answer["time"], answer["behind_fastest"]
    if answer["state"] == "predicted":
        checked = ", ".join(answer["checked_on"])
        where = f"checked on {checked}" if checked else "which have run nowhere"
        yield (
            "why",
            f"the least predicted time of the form's {answer['functions']} functions, {where}; none was timed here",
        )
    elif answer["state"] == "ranked":
        yield "why", "ranked first by estimates when it was built; nothing was timed: run aot tune"
    elif time is None:
        yield "why", "the tuned table has it for this range of M; the archive kept no history of what was timed"
    else:
        by = "measured here" if time["how"] == "measured" else f"timed at {len(answer['measured_at'])} M"
        if behind:
            yield (
                "why",
                f"{percent(behind)} behind the fastest of {answer['functions']} functions {by}: tuning keeps few "
                "functions and changes them rarely",
            )
        else:
            yield "why", f"the fastest of {answer['functions']} functions {by}"


def _measured(row: dict[str, Any]) -> list[str]:
    numbers = [str(row["m"]), f"{row['us']:.1f}", percent(row.get("spread")), f"{row['baseline_us']:.1f}"]
    return [*numbers, ratio(row["ratio"]), row["short_name"] or "not kept", row["words"] or row["function"]]


def _runner_up(row: dict[str, Any]) -> list[str]:
    longer_by = "" if row["longer_by"] is None else f"{100 * row['longer_by']:+.1f}%"
    us = "" if row["us"] is None else f"{row['us']:.1f}"
    return [longer_by, us, row["short_name"] or "not kept", row["words"] or row["name"]]


def _print_missing(answer: dict[str, Any]) -> None:
    near: list[tuple[str, str]] = []
    for i, found in enumerate(answer["nearest"]):
        of = f"{', '.join(found['names'])}: " if found["names"] else ""
        near.append(("" if i else "nearest", f"{of}{found['signature']} on {found['target']}"))
        near.append(("", f"but {', '.join(found['differs'])}"))
    if near:
        print_fields(near)
        print()
    print_fields([("" if i else "to do", line) for i, line in enumerate(answer["advice"])])
    for words in answer["commands"]:
        print_command(words, first="  ")
