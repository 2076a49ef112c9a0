"""What an archive says of an entry of an operation's table, as plain data.

Times are microseconds. Knows nothing of which entries give way to others (`aot.inspect.precedence`).
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runtime.container.archive import Archive
from runtime.program.operation import Operand, Signature
from runtime.tables.table import Entry

from ..pack import build_table, timings
from ..pack.filter import by_names
from ..pack.tables import operation_entries


def names_of(archive: Archive) -> dict[str, list[str]]:
    """What manifests that the archive was built for call their problems, by signature; an archive need not say."""
    found: dict[str, list[str]] = {}
    for signature, name in dict.fromkeys(
        (g.signature, g.name) for model in build_table.read(archive).models for g in model.problems
    ):
        found.setdefault(signature, []).append(name)
    return found


def layers_of(archive: Archive) -> list[str]:
    """Every word that a layer of an archive goes by: keys of signatures, and manifests' names for them."""
    names = names_of(archive)
    return [word for entry in operation_entries(archive) for word in by_names(names, entry.signature.key())]


def models_of(archive: Archive) -> dict[str, list[str]]:
    """The models that ask for each signature, by name; those without a name are left out."""
    found: dict[str, dict[str, None]] = {}
    for model in build_table.read(archive).models:
        for problem in model.problems if model.model else ():
            found.setdefault(problem.signature, {})[str(model.model)] = None
    return {signature: list(models) for signature, models in found.items()}


def described(signature: Signature, names: Mapping[str, list[str]]) -> dict[str, Any]:
    """What is shown of a signature, whoever serves it."""
    return {
        "signature": signature.to_json(),
        "operation": signature.operation,
        "key": signature.key(),
        "operands": [operand_of(o, signature) for o in signature.operands()],
        "names": names.get(signature.key(), []),
    }


def operand_of(operand: Operand, signature: Signature) -> dict[str, Any]:
    """A tensor of the call; M stays a word, and blocks of it are "ceil(M/128)"."""
    extents = signature.extents()
    shape = [extents.get(axis, f"ceil({axis})" if "/" in axis else axis) for axis in operand.axes]
    return {"name": operand.name, "dtype": operand.dtype, "shape": shape, "transposed": operand.layout == "columns"}


def gpu(entry: Entry) -> dict[str, Any] | None:
    """The kind of GPU that an entry was tuned on; None where it is for any of its target."""
    return None if entry.gpu is None else entry.gpu._asdict()


def ranges(entry: Entry) -> list[dict[str, Any]]:
    """The ranges of M of an entry, each with the times at the largest M that it was measured at."""
    rows = []
    of_all = timings.read(entry)  # by M, which ascends
    at = [t["m"] for t in of_all]
    for row in intervals(entry.ranges):
        first = bisect_right(at, row["m_min"] - 1)
        measured = of_all[first : None if row["m_max"] is None else bisect_right(at, row["m_max"])]
        last = measured[-1] if measured else {"us": None, "ratio": None}
        rows.append(row | {"us": last["us"], "ratio": last["ratio"], "measured": len(measured)})
    return rows


def intervals(ranges: Iterable[tuple[int | None, str]]) -> list[dict[str, Any]]:
    """Each range with its first and its last M, None for every larger one, and its function."""
    rows, above = list[dict[str, Any]](), 0
    for m_max, function in ranges:
        rows.append({"m_min": above + 1, "m_max": m_max, "function": function})
        above = m_max or above
    return rows


def is_in(row: Mapping[str, Any], m: int) -> bool:
    """Whether a range, as `intervals` gives it, has `m`."""
    return bool(row["m_min"] <= m and (row["m_max"] is None or m <= row["m_max"]))


def measured(entry: Entry) -> dict[str, Any]:
    """How many M values were measured, at how many of them torch was faster by more than the tolerance, and how many
    times as fast as torch its functions were there: the geometric mean and the least, None where none was measured."""
    rows = timings.read(entry)
    ratios = [row["ratio"] for row in rows if row["ratio"] > 0]
    return {
        "measured": len(rows),
        "faster_with_torch": sum(entry.torch_is_faster(row["m"]) for row in rows),
        "ratio_mean": round(statistics.geometric_mean(ratios), 3) if ratios else None,
        "ratio_worst": min(ratios, default=None),
    }


def serving(entry: Entry, tokens: Sequence[int]) -> dict[str, Any]:
    """What an entry chooses at each of `tokens` rows, as `aot.inspect.predictions.choices` says it, with the times that
    were measured at the very M."""
    us = {(timing["m"], timing["function"]): timing["us"] for timing in timings.read(entry)}

    def choices(of: Entry) -> list[dict[str, Any]]:
        return [{"m": m, "function": of.best(m), "us": us.get((m, of.best(m)))} for m in dict.fromkeys(tokens)]

    return {
        "state": entry.state,
        "choices": choices(entry),
        "invariant": None if entry.invariant is None else choices(entry.only_invariant()),
    }
