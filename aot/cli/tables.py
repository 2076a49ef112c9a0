"""How plain data is said for people: ranges of M, shares, kinds of GPU, the machine that times are from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from runtime.device.gpus import Gpu

from ..version import UNKNOWN
from .streams import printable


def cleaned(obj: Any) -> Any:
    """A JSON object with every text of it as `printable` has it."""
    if isinstance(obj, str):
        return printable(obj)
    if isinstance(obj, list):
        return [cleaned(item) for item in obj]
    if isinstance(obj, dict):
        return {cleaned(name): cleaned(item) for name, item in obj.items()}
    return obj


def interval(row: dict[str, Any]) -> str:
    """A range of M, such as "65-96" or "4097-"."""
    low, high = row["m_min"], row["m_max"]
    return f"{low}-" if high is None else str(low) if low == high else f"{low}-{high}"


def extents(values: Iterable[int | None]) -> str:
    """Numbers with an x between them; a question mark for what depends on the arguments."""
    return "x".join("?" if value is None else str(value) for value in values)


def percent(share: float | None) -> str:
    """A share, such as "1.5%"; nothing of None."""
    return "" if share is None else f"{100 * share:.1f}%"


def ratio(times: float | None) -> str:
    """How many times as fast, such as "1.05x"; nothing of None."""
    return "" if times is None else f"{times:.2f}x"


def kind(gpu: dict[str, Any] | None) -> str:
    """A kind of GPU, such as "NVIDIA H200 (132 SMs, 4800 GB/s)"; empty for any."""
    return "" if gpu is None else Gpu(**gpu).words()


def names_of_operation(operation: str) -> str:
    """What manifests' names of an operation's problems are of, in a word."""
    from ..search.operation import building  # which takes long to import

    return printable(building(operation).plural)


def faster_with_torch(counts: dict[str, Any]) -> str:
    """At how many of the M values that were measured torch was faster; nothing where none was."""
    return f"{counts['faster_with_torch']} of {counts['measured']}" if counts["measured"] else ""


def instead_words(instead: dict[str, Any]) -> str:
    """What an entry that serves nothing gives way to."""
    return "the entries that were tuned" if instead["form"] is None else f"what {instead['form']} predicts"


def built_by(tools: dict[str, str]) -> str:
    """What compiled the functions, in a line."""
    own, compiler = (tools.get(name, UNKNOWN) for name in ("cute-aot", "nvidia-cutlass-dsl"))
    by = "a cute-aot whose version it does not say" if own == UNKNOWN else f"cute-aot {own}"
    return f"built by {by}" + ("" if compiler == UNKNOWN else f" with nvidia-cutlass-dsl {compiler}")


def environment_words(environment: dict[str, Any]) -> str:
    """Where timings are from, in a line that leaves out what is not known."""
    labels = {
        "driver": "driver",
        "cuda": "CUDA",
        "torch": "torch",
        "cublas": "cuBLAS",
        "cute_aot": "cute-aot",
    }
    versions = [
        f"{label} {environment[name]}" for name, label in labels.items() if environment.get(name) not in (None, UNKNOWN)
    ]
    done = "functions checked" if "right" in environment else "tuned"
    return ", ".join([f"{done} on {environment['gpu']}", *versions])


def machines(environments: Iterable[dict[str, Any]]) -> list[str]:
    """`environment_words` of each, the same once: what was tuned and then tuned in graphs has one machine twice."""
    return list(dict.fromkeys(map(environment_words, environments)))


def tuning_words(environment: dict[str, Any]) -> str:
    """The same with the archive of candidates that was tuned, by the beginning of its digest."""
    candidates = str(environment.get("candidates") or "")
    return environment_words(environment) + (f", of candidates {candidates[:8]}" if candidates else "")
