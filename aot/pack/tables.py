"""Reads what an archive's tables say besides dispatch (`build`, `tuning`, and the timings of the gemm table), and makes
the gemm table of its rows.

An archive need not have the first two; what one has is read strictly, but for fields that this version does not know:
they are left as they are. Knows nothing of how any of it is shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.errors import AotError, RecordError
from runtime.gemm.dispatch import Capability, Entry
from runtime.gemm.signature import Signature
from runtime.gemm.table import TableLimitExceeded, read

MAX_US = 1e12  # eleven days
MAX_SPREAD = 1e6
MAX_TOKENS = 2**31

Test = Callable[[Any], bool]


class TableTooLarge(AotError):
    """A table that readers would refuse."""


@dataclass(frozen=True)
class GemmRow:
    """A row of the gemm table, with functions by name: what serves `signature` on `target`.

    `gpu` is the kind of GPU that it is for, None any of the target's; `state` is "tuned" or "ranked". `ranges` pairs
    the largest M of a range with its function, ascending, neighbours with different ones; the last has None, every
    larger M. `invariant` is the same for callers who want equal bits at every M, which all of its functions give, or
    None. `torch_faster` has the first and the last M (None: no last) of where torch was faster, ascending and disjoint.
    `candidates` pairs M values with functions, best first. `timings` is what was measured, as `timings` reads it.
    """

    signature: Signature
    target: str
    gpu: Gpu | None
    state: str
    ranges: Sequence[tuple[int | None, str]]
    invariant: Sequence[tuple[int | None, str]] | None = None
    torch_faster: Sequence[tuple[int, int | None]] = ()
    candidates: Sequence[tuple[int, Sequence[str]]] = ()
    timings: Sequence[dict[str, Any]] = ()

    @classmethod
    def of(cls, entry: Entry) -> GemmRow:
        """A row as it was read."""
        return cls(
            entry.signature,
            entry.target,
            entry.gpu,
            entry.state,
            entry.ranges,
            entry.invariant_ranges,
            entry.torch_faster,
            entry.candidates,
            entry.timings,
        )

    def names(self) -> set[str]:
        """The functions that it names."""
        return set(self._names_in_order())

    def _names_in_order(self) -> list[str]:
        """Each once: those that serve, by M, then the rest."""
        ranked = itertools.chain.from_iterable(names for _, names in self.candidates)
        serving = (name for _, name in (*self.ranges, *(self.invariant or ())))
        return list(dict.fromkeys([*serving, *ranked]))

    def to_json(self, gpus: Mapping[Gpu, int]) -> dict[str, Any]:
        """It as readers take it; `gpus` has the place of each kind in the table."""
        names = self._names_in_order()
        index = {name: i for i, name in enumerate(names)}
        return {
            "signature": self.signature.to_json(),
            "target": self.target,
            "gpu": None if self.gpu is None else gpus[self.gpu],
            "state": self.state,
            "functions": names,
            "ranges": [[m_max, index[name]] for m_max, name in self.ranges],
            "invariant": None if self.invariant is None else [[m_max, index[name]] for m_max, name in self.invariant],
            "torch_faster": [[first, last] for first, last in self.torch_faster],
            "candidates": [[m, [index[name] for name in ranked]] for m, ranked in self.candidates],
            "timings": list(self.timings),
        }


def gemm_table(rows: Iterable[GemmRow], targets: Mapping[str, str]) -> dict[str, Any]:
    """The gemm table with these rows, as readers take it; `targets` has the target of each function.

    Raises:
        TableTooLarge: readers would refuse it for its size.
        RecordError: they would refuse it for a row, which is named.
    """
    rows = list(rows)
    kinds = list(dict.fromkeys(row.gpu for row in rows if row.gpu is not None))
    places = {gpu: i for i, gpu in enumerate(kinds)}
    table = {"gpus": [gpu._asdict() for gpu in kinds], "entries": [row.to_json(places) for row in rows]}
    try:
        read(table, targets)
    except TableLimitExceeded as error:
        raise TableTooLarge(f"{str(error).partition(';')[0]}; split the manifests over several archives") from None
    return table


def models(archive: Archive) -> list[dict[str, Any]]:
    """The rows of the models that the archive was built for, as the table `build` has them; none where it has none.

    Raises:
        RecordError: they are no list of objects.
    """
    if "build" not in archive.tables:
        return []
    where = f"{archive.path}: table build"
    rows = _list(archive.table("build"), "models", where)
    for i, row in enumerate(rows):
        _require(row, {}, {}, f"{where}: models[{i}]")
    return rows


def gemms(archive: Archive) -> list[tuple[str, str]]:
    """The (signature key, name) pairs of the gemms of the models that the archive was built for, in order.

    Raises:
        RecordError: the table `build` has no such list.
    """
    if "build" not in archive.tables:
        return []
    where = f"{archive.path}: table build"
    pairs = []
    for i, model in enumerate(_list(archive.table("build"), "models", where)):
        for j, gemm in enumerate(_list(model, "gemms", f"{where}: models[{i}]")):
            here = f"{where}: models[{i}].gemms[{j}]"
            _require(gemm, {"signature": _is_text, "name": _is_text}, {}, here)
            pairs.append((gemm["signature"], gemm["name"]))
    return pairs


def tools(archive: Archive) -> dict[str, str]:
    """The versions of what built the archive, by name.

    Raises:
        RecordError: the table `build` has something else in their place.
    """
    found = archive.table("build").get("tools", {}) if "build" in archive.tables else {}
    if not isinstance(found, dict) or not all(_is_text(version) for version in found.values()):
        _fail(f"{archive.path}: table build: tools", f"must map names to versions, found {found!r:.100}")
    return found


def environments(archive: Archive) -> list[dict[str, Any]]:
    """The machines that the archive was tuned on, one after the other; see `aot.tune.measure.environment`.

    Raises:
        RecordError: the table `tuning` does not say.
    """
    if "tuning" not in archive.tables:
        return []
    where = f"{archive.path}: table tuning"
    rows = _list(archive.table("tuning"), "environments", where)
    names = ("driver", "cuda_driver", "cuda", "torch", "cublas", "cute_aot")
    optional: dict[str, Test] = {
        **dict.fromkeys(names, _is_text_or_none),
        "rejected": _is_names_to_texts,
        "right": _is_names_to_texts,
    }
    for i, row in enumerate(rows):
        _require(row, {"gpu": _is_text, "compute_capability": _is_capability}, optional, f"{where}: environments[{i}]")
    return rows


def checked_on(archive: Archive) -> dict[str, list[str]]:
    """The kinds of GPU on which functions were found right by their references, by function; as they are now."""
    found: dict[str, list[str]] = {}
    for row in environments(archive):
        for name, cubin in row.get("right", {}).items():
            if name in archive.functions and archive.record(name)["cubin"] == cubin:
                found.setdefault(name, []).append(row["gpu"])
    return {name: list(dict.fromkeys(gpus)) for name, gpus in found.items()}


def capability(environment: dict[str, Any]) -> Capability:
    """The compute capability of the GPU of one of `environments`."""
    major, minor = environment["compute_capability"].split(".")
    return int(major), int(minor)


def timings(entry: Entry) -> list[dict[str, Any]]:
    """The rows that `aot.tune` wrote for an entry, each with its `ratio`, the baseline's time over its own, and
    `sustained_ratio`, that under sustained load or None where it was not measured.

    Raises:
        RecordError: a row lacks a time or has an absurd one, or they are out of order.
    """
    rows = []
    above = 0
    for i, row in enumerate(entry.timings):
        where = f"gemm table: {entry.signature.key()} on {entry.target}: unreadable timings[{i}]"
        _require(row, _TIMING, _OPTIONAL_TIMING, where)
        if row["m"] <= above:
            _fail(where, f"m must increase, found {row['m']} after {above}")
        above = row["m"]
        ratio, sustained = row["baseline_us"] / row["us"], None
        if "sustained_us" in row and "baseline_sustained_us" in row:
            sustained = round(row["baseline_sustained_us"] / row["sustained_us"], 3)
        rows.append(row | {"ratio": round(ratio, 3), "sustained_ratio": sustained})
    return rows


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_text_or_none(value: Any) -> bool:
    return value is None or _is_text(value)


def _is_capability(value: Any) -> bool:
    parts = value.split(".") if isinstance(value, str) else []
    return len(parts) == 2 and all(p.isascii() and p.isdigit() and len(p) < 4 for p in parts)


def _is_names_to_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _is_us(value: Any) -> bool:
    return type(value) in (int, float) and 1e-6 <= value <= MAX_US


def _is_us_or_none(value: Any) -> bool:
    return value is None or _is_us(value)


def _is_spread(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_SPREAD


def _is_tokens(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_TOKENS


_TIMING: dict[str, Test] = {"m": _is_tokens, "function": _is_text, "us": _is_us, "baseline_us": _is_us}
_OPTIONAL_TIMING: dict[str, Test] = {
    "spread": _is_spread,
    "baseline": _is_text,
    "baseline_spread": _is_spread,
    "runner_up": _is_text_or_none,
    "runner_up_us": _is_us_or_none,
    "sustained_us": _is_us,
    "baseline_sustained_us": _is_us,
}


def _require(obj: Any, fields: dict[str, Test], optional: dict[str, Test], where: str) -> None:
    """Check the types and ranges of fields, those of `optional` where they are there."""
    if not isinstance(obj, dict):
        _fail(where, f"must be an object, found {obj!r:.100}")
    for name, test in (optional | fields).items():
        if name not in obj and name in fields:
            _fail(where, f"has no {name!r}")
        if name in obj and not test(obj[name]):
            _fail(where, f"{name!r} cannot be {_short(obj[name])}")


def _list(obj: Any, name: str, where: str) -> list[Any]:
    found = obj.get(name) if isinstance(obj, dict) else None
    if not isinstance(found, list):
        _fail(where, f"{name!r} must be a list, found {_short(found)}")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fail(where: str, what: str) -> NoReturn:
    raise RecordError(f"{where}: {what}; build the archive again")
