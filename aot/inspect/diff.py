"""What differs between two archives, as plain data: behind `aot diff`. Times are microseconds, sizes bytes.

Functions are the same where their digests are, so a function of one name and other code counts as a change.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from runtime.container.archive import Archive
from runtime.tables.table import Entry

from ..pack import build_table, forms, timings, tuning_table
from ..pack.tables import operation_entries
from .digests import digests
from .entries import gpu, names_of
from .variants import words

_Key = tuple[str, str, Any]  # a signature's key, a target and a kind of GPU


def diff(old: Archive, new: Archive) -> dict[str, Any]:
    """What `new` has in place of what `old` has.

    `same` is whether functions and tables are equal, byte for byte; files may differ even so, by how they were
    compressed. `entries` has those added, removed and changed; a changed one has `what`, the words of what differs,
    `choices`, the ranges of M where another function serves, by the beginning of its digest and by name, and `times`,
    how many times as fast the new functions are where both were measured. `build` has what else was asked of the
    builds, in words, and how candidates were ranked. `tables` names those that differ.
    """
    before, after = digests(old), digests(new)
    functions = {
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed": sorted(name for name in before.keys() & after.keys() if before[name] != after[name]),
    }
    tables = _tables(old, new)
    return {
        "same": not tables and not any(functions.values()),
        "old": _file(old),
        "new": _file(new),
        "functions": functions,
        "entries": _entries(old, new, before, after),
        "forms": _sets(_forms(old), _forms(new)),
        "build": _pairs(_asked(old), _asked(new)),
        "tools": _pairs(build_table.read(old).tools, build_table.read(new).tools),
        "providers": _pairs(build_table.read(old).providers, build_table.read(new).providers),
        "models": _sets(_models(old), _models(new)),
        "tuning": _sets(_environments(old), _environments(new)),
        "failures": _sets(build_table.read(old).failures, build_table.read(new).failures),
        "unserved": _sets(build_table.read(old).unserved, build_table.read(new).unserved),
        "tables": tables,
    }


def _file(archive: Archive) -> dict[str, Any]:
    return {
        "path": str(archive.path),
        "digest": archive.digest,
        "bytes": archive.file_bytes,
        "functions": len(archive.functions),
    }


def _tables(old: Archive, new: Archive) -> list[str]:
    """The tables that only one has, or whose bytes differ."""

    def contents(archive: Archive) -> dict[str, str]:
        return {name: archive.blob_entry(number).sha256 for name, number in archive.tables.items()}

    return sorted({name for name, _ in contents(old).items() ^ contents(new).items()})


def _sets(old: Iterable[Any], new: Iterable[Any]) -> dict[str, list[Any]]:
    """What only one of two lists has, in its order."""
    before, after = list(old), list(new)
    return {"added": [x for x in after if x not in before], "removed": [x for x in before if x not in after]}


def _pairs(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, list[str | None]]:
    """By name what differs, old and new; None where one has nothing of the name."""
    return {n: [old.get(n), new.get(n)] for n in sorted({*old, *new}) if old.get(n) != new.get(n)}


def _forms(archive: Archive) -> list[list[str]]:
    return [[row.name, row.form.target] for row in forms.rows(archive, forms.read(archive))]


def _asked(archive: Archive) -> dict[str, str]:
    """What a build was told besides manifests and with what it ranked, by name."""
    build = build_table.read(archive)
    found = {f"ranking {target}": by for target, by in build.ranking.items()}
    if build.candidates is not None:
        found["candidates"] = str(build.candidates)
    if build.asked is None:
        return found
    asked = build.asked
    found |= {f"input {role}": digest for role, digest in asked.inputs.items()}
    named = {"targets": asked.targets, "functions": asked.functions, "universal": ["yes"] if asked.universal else []}
    return found | {what: ", ".join(words) for what, words in named.items() if words}


def _models(archive: Archive) -> list[list[str | None]]:
    return [[model.model, model.manifest] for model in build_table.read(archive).models]


def _environments(archive: Archive) -> list[dict[str, Any]]:
    rows = tuning_table.read(archive)
    return [{k: v for k, v in row.items() if k not in ("rejected", "right")} for row in rows]


def _entries(old: Archive, new: Archive, before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, list[Any]]:
    had, has = _by_key(old), _by_key(new)
    had = {_now_for_a_kind(key, had, has): entry for key, entry in had.items()}
    of_old, of_new = names_of(old), names_of(new)
    names = of_old | of_new
    changed = []
    for key in had.keys() & has.keys():
        found = _changes(had[key], has[key], before, after)
        if found is not None:
            changed.append(_described(has[key], names) | found)
    order = {key: i for i, key in enumerate([*has, *had])}
    return {
        "added": [_described(has[key], names) for key in has if key not in had],
        "removed": [_described(had[key], of_new | of_old) for key in had if key not in has],
        "changed": sorted(changed, key=lambda row: order[row["signature"], row["target"], _kind(row["gpu"])]),
    }


def _by_key(archive: Archive) -> dict[_Key, Entry]:
    return {(e.signature.key(), e.target, _kind(gpu(e))): e for e in operation_entries(archive)}


def _now_for_a_kind(key: _Key, had: Mapping[_Key, Entry], has: Mapping[_Key, Entry]) -> _Key:
    """The key of an entry, or that of the only new one for its signature and target, where there was only one: a tuning
    makes of an entry for any GPU one for a kind."""
    before, after = ([other for other in of if other[:2] == key[:2]] for of in (had, has))
    return after[0] if key[2] is None and len(before) == len(after) == 1 else key


def _kind(of: Mapping[str, Any] | None) -> Any:
    """What makes GPUs one kind (`runtime.device.gpus.Gpu.same_kind`)."""
    return None if of is None else (of["name"], of["multiprocessors"])


def _described(entry: Entry, names: Mapping[str, list[str]]) -> dict[str, Any]:
    key = entry.signature.key()
    return {
        "signature": key,
        "operation": entry.signature.operation,
        "names": names.get(key, []),
        "target": entry.target,
        "gpu": gpu(entry),
        "state": entry.state,
    }


def _changes(old: Entry, new: Entry, before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Any] | None:
    """How an entry differs, None where it does not, what was measured included."""
    if old == new and all(before[name] == after[name] for name in old.names):
        return None
    found = {
        "was": old.state,
        "was_for": gpu(old),
        "choices": list(_choices(old.ranges, new.ranges, before, after)),
        "equal_bits": list(_choices(old.invariant_ranges or (), new.invariant_ranges or (), before, after)),
        "torch_faster": _intervals(old.torch_faster, new.torch_faster),
        "apart": _intervals(old.apart, new.apart),
        "times": _times(old, new),
    }
    differ = {
        "state": old.state != new.state,
        "GPU": old.gpu != new.gpu,
        "ranges": found["choices"],
        "equal bits": found["equal_bits"],
        "torch faster": found["torch_faster"],
        "apart": found["apart"],
        "tuned to": old.tuned_to != new.tuned_to,
        "candidates": old.candidates != new.candidates,
        "code": any(before[name] != after[name] for name in {*old.names} & {*new.names}),
        "functions": {*old.names} != {*new.names},
        "times": list(old.timings) != list(new.timings),
    }
    return found | {"what": [word for word, differs in differ.items() if differs]}


def _intervals(*both: Sequence[tuple[int, int | None]]) -> list[list[list[int | None]]] | None:
    """Intervals of M of the old and the new, None where they are the same."""
    old, new = ([list(pair) for pair in of] for of in both)
    return None if old == new else [old, new]


_Ranges = Sequence[tuple[int | None, str]]


def _choices(
    old: _Ranges, new: _Ranges, before: Mapping[str, str], after: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """The ranges of M where another function serves, or other code of its name; neighbours that change alike as one."""
    ends = sorted({m for m, _ in (*old, *new) if m is not None})
    found: list[dict[str, Any]] = []
    for above, m in itertools.pairwise([0, *ends, None]):
        had, has = (_serving(of, m) for of in (old, new))
        if had == has and (had is None or before[had] == after[str(has)]):
            continue
        if found and found[-1]["m_max"] == above and (found[-1]["old"], found[-1]["new"]) == (had, has):
            found[-1]["m_max"] = m
            continue
        digests = {"old_digest": before.get(had or ""), "new_digest": after.get(has or "")}
        said = {"new_words": None if has is None else words(has)}
        found.append({"m_min": (above or 0) + 1, "m_max": m, "old": had, "new": has, **digests, **said})
    yield from found


def _serving(ranges: _Ranges, m: int | None) -> str | None:
    """The function of the range that has `m`, or of the last one where it is None; None of none."""
    found = (name for m_max, name in ranges if m_max is None or (m is not None and m <= m_max))
    return next(found, None)


def _times(old: Entry, new: Entry) -> dict[str, Any] | None:
    """How many times as fast what serves is at the M that both were measured at: the geometric mean, and the least
    with its M; None where there is no such M."""
    had, has = ({row["m"]: row["us"] for row in timings.read(of)} for of in (old, new))
    ratios = {m: had[m] / has[m] for m in had if m in has}
    if not ratios:
        return None
    worst = min(ratios, key=ratios.__getitem__)
    mean = statistics.geometric_mean(ratios.values())
    return {"measured": len(ratios), "mean": round(mean, 4), "worst": round(ratios[worst], 4), "worst_m": worst}
