"""What is wrong with an archive, or may be: from the data of `aot report`, with what to do about each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..uses import BY_NAME, CANDIDATE
from .layers import MISSING

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
SEVERITIES = (PROBLEM, WARNING, NOTE)
UNSTEADY = 0.05  # a spread of samples over their median that says that a time may be another next time
_OCTAVE = 2.0  # `aot tune` looks at every power of two
_SHOWN = 3  # names in a sentence

Traffic = Mapping[str, Mapping[int, int]]


class Finding(NamedTuple):
    """What is wrong (`rule`, one of `RULES`), how much it matters, of which layer or functions, on which kind of GPU
    (empty: any), in a sentence, and what to do."""

    rule: str
    severity: str
    subject: str
    gpu: str
    says: str
    advice: str


def lint(
    about: dict[str, Any], places: Sequence[dict[str, Any]], functions: Sequence[dict[str, Any]], traffic: Traffic
) -> list[dict[str, Any]]:
    """What is found, problems before warnings and these before notes. `traffic` is how many calls a server made, by
    signature and M."""
    found = [*_of_file(about), *_of_functions(functions)]
    told = {key for key, _, _ in about["unserved"]}
    for place in places:
        for layer in place["layers"]:
            if layer["state"] == MISSING and layer["signature"] in told:
                continue
            if layer["elsewhere"]:
                found.append(_elsewhere(layer, _kind(place)))
                continue
            found += (finding for rule in _OF_LAYERS for finding in rule(layer, _kind(place), traffic))
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))  # keeps the order of those alike
    return [finding._asdict() for finding in found]


def _kind(place: dict[str, Any]) -> str:
    return str(place["gpu"]["name"]).removeprefix("NVIDIA ")


def _elsewhere(layer: dict[str, Any], gpu: str) -> Finding:
    says = f"was tuned on {layer['tuned_on']['name']} alone, whose functions serve here too"
    return Finding("untuned", WARNING, layer["label"], gpu, says, "run aot tune on such a GPU")


def _slower(layer: dict[str, Any], gpu: str, _: Traffic) -> Iterator[Finding]:
    if not layer["torch_faster"]:
        return
    where = ", ".join(_span(row["m_min"], row["m_max"]) for row in layer["torch_faster"])
    slow = [p for p in layer["points"] if p["ratio"] < 1]
    worst = min(slow, key=lambda p: p["ratio"], default=None)
    least = f"; the least measured is {worst['ratio']:.2f}x at M = {worst['m']}" if worst else ""
    advice = 'load with on_slower="torch"; or build with more --candidates and tune again'
    yield Finding("slower than torch", WARNING, layer["label"], gpu, f"torch is faster at M = {where}{least}", advice)


def _untuned(layer: dict[str, Any], gpu: str, _: Traffic) -> Iterator[Finding]:
    if layer["state"] == MISSING and layer["names"]:
        says = "a model asks for it and nothing serves it"
        advice = "add it by a manifest of it alone: aot build MANIFEST --base ARCHIVE -o OUT"
        yield Finding("missing", PROBLEM, layer["label"], gpu, says, advice)
    elif layer["state"] == "ranked":
        says = "its functions were chosen by estimates, and nothing was timed or checked"
        yield Finding("untuned", WARNING, layer["label"], gpu, says, "run aot tune on such a GPU")


def _gaps(layer: dict[str, Any], gpu: str, _: Traffic) -> Iterator[Finding]:
    ms = [point["m"] for point in layer["points"]]
    wide = [f"{low} and {high}" for low, high in itertools.pairwise(ms) if high > _OCTAVE * low]
    if wide:
        says = f"nothing was measured between M = {'; '.join(wide)}"
        yield Finding(
            "gap in M", NOTE, layer["label"], gpu, says, "add M between to the manifest's tokens and tune again"
        )


def _beyond(layer: dict[str, Any], gpu: str, traffic: Traffic) -> Iterator[Finding]:
    calls = traffic.get(layer["signature"], {})
    last = layer["points"][-1]["m"] if layer["points"] else None
    above = {m: count for m, count in calls.items() if last is not None and m > last}
    if above:
        says = f"{sum(above.values())} calls of its traffic have an M above {last}, the largest that was measured"
        yield Finding("gap in M", WARNING, layer["label"], gpu, says, f"tune up to M = {max(above)}")


def _unsteady(layer: dict[str, Any], gpu: str, _: Traffic) -> Iterator[Finding]:
    ms = [p["m"] for p in layer["points"] if p["bimodal"] or (p["spread"] or 0) > UNSTEADY]
    if ms:
        says = f"times spread by more than {UNSTEADY:.0%}, or have two speeds, at M = {_some(map(str, ms))}"
        yield Finding("unsteady time", NOTE, layer["label"], gpu, says, "tune again on an idle GPU to be sure of these")


_OF_LAYERS: tuple[Callable[[dict[str, Any], str, Traffic], Iterator[Finding]], ...] = (
    _slower,
    _untuned,
    _gaps,
    _beyond,
    _unsteady,
)


def _of_file(about: dict[str, Any]) -> Iterator[Finding]:
    """What the archive says of its build and its tuning."""
    if not about["tools"] or not about["models"]:
        says = "it does not say what it was built from, or with what"
        yield Finding("provenance", WARNING, "archive", "", says, "ask who made it, or build it again")
    for what, target, reason in about["unserved"]:
        says = f"was asked for and is not served on {target}: {reason}"
        yield Finding("missing", PROBLEM, what, "", says, "change the manifest, or pad N and K")
    for name, reason in about["failures"]:
        yield Finding("failed to compile", WARNING, name, "", reason, "aot build --strict stops at such a function")
    for name, reason in about["rejected"]:
        yield Finding(
            "wrong result", NOTE, name, "", f"aot tune found it wrong and left it out: {reason}", "none needed"
        )
    if about["entries"]["give_way"]:
        says = f"{about['entries']['give_way']} were never tuned and give way to what was"
        yield Finding("gives way", NOTE, "entries", "", says, "aot prune --state tuned leaves them out")
    unchecked = [t["target"] for t in about["targets"] if t["forms"] and t["target"] not in about["checked_on"]]
    if unchecked:
        says = f"their functions for {', '.join(unchecked)} ran on no GPU"
        yield Finding("untuned", WARNING, "forms", "", says, "run aot tune on such a GPU")


def _of_functions(functions: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    def some(rows: list[dict[str, Any]]) -> str:
        return f"{len(rows)} of {len(functions)} functions ({_some(row['digest'] for row in rows)})"

    if waiting := [row for row in functions if row["use"] == CANDIDATE]:
        yield Finding("unused", NOTE, some(waiting), "", "are candidates that serve nothing", "run aot tune")
    if others := [row for row in functions if row["use"] == BY_NAME]:
        says = "are in no table: only callers who name them use them"
        yield Finding("unused", NOTE, some(others), "", says, "none, if somebody does")
    if spilling := [row for row in functions if row["local_bytes"]]:
        most = max(row["local_bytes"] for row in spilling)
        says = f"spill registers to local memory, up to {most} bytes a thread"
        yield Finding("spills", WARNING, some(spilling), "", says, "look at aot extract FUNCTION --sass")


def _some(names: Iterator[str] | Sequence[str]) -> str:
    """The first of several names."""
    every = list(names)
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")


def _span(first: int, last: int | None) -> str:
    """A range of M in words, such as "513-984"."""
    return f"{first} and above" if last is None else str(first) if first == last else f"{first}-{last}"
