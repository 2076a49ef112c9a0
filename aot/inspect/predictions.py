"""What forms of the table "universal" serve, and what they predict for a signature, as plain data.

Behind `aot ls`, `show` and `report`. Times are microseconds. Knows nothing of how any of it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.gemm.signature import Signature
from runtime.gemm.universal import PredictedEntry, Universal, UniversalForm, machine_of

from ..pack.forms import FormRow
from ..pack.tables import operation_entries
from .kinds import capability, usual

ROWS = (1, 16, 64, 256, 1024, 4096)  # for which a choice is shown, unless told otherwise


def listing(found: Iterable[FormRow]) -> list[dict[str, Any]]:
    """What `aot ls` says of forms.

    `functions` counts them. `multiples` has the N and K of which a signature's must be multiples, several pairs where
    functions differ; `most_n` is the largest N. `checked_on` names the GPUs on which its functions were found right.
    """
    return [
        {
            "form": row.name,
            "words": row.to_json(),
            "target": row.form.target,
            "functions": len(row.form.functions),
            "multiples": _multiples(row.form),
            "most_n": max(f.most_n for f in row.form.functions),
            "checked_on": list(row.form.checked_on),
        }
        for row in found
    ]


def checked_on(table: Universal | None) -> dict[str, tuple[str, ...]]:
    """By target the kinds of GPU on which forms were found right, any of them."""
    found: dict[str, dict[str, None]] = {}
    for _, form in () if table is None else table.forms:
        if form.checked_on:
            found.setdefault(form.target, {}).update(dict.fromkeys(form.checked_on))
    return {target: tuple(names) for target, names in found.items()}


def choices(
    archive: Archive, table: Universal, signature: Signature, tokens: Sequence[int] = ROWS, where: str | None = None
) -> list[dict[str, Any]]:
    """What is chosen for a signature at each of `tokens` rows, on each target that has a form for it, or on GPUs of the
    target `where` alone; none of none.

    Times depend on the GPU: they are those of a kind that the form's `checked_on` names and this archive knows, else of
    what is assumed of the target (`aot.inspect.kinds`).

    Raises:
        RecordError: a cost program is malformed.
    """
    found: dict[str, dict[str, Any]] = {}
    for target in dict.fromkeys(form.target for _, form in table.forms) if where is None else (where,):
        form = table.form(signature, capability(target))
        if form is not None and form.target not in found:
            gpu = _gpu(archive, form.checked_on, target)
            entry = PredictedEntry(signature, form, machine_of(gpu))
            found[entry.target] = {
                "target": entry.target,
                "gpu": gpu._asdict(),
                "state": entry.state,
                "checked_on": list(entry.checked_on),
                "functions": len(entry.names),
                "choices": [_choice(entry, m) for m in dict.fromkeys(tokens)],
                "invariant": _invariant(entry, tokens),
            }
    return list(found.values())


def _choice(entry: PredictedEntry, m: int) -> dict[str, Any]:
    name = entry.best(m)
    us = entry.us(m)[name]
    return {"m": m, "function": name, "us": round(us, 3) if math.isfinite(us) else None}


def _invariant(entry: PredictedEntry, tokens: Sequence[int]) -> list[dict[str, Any]] | None:
    """What is chosen for callers who want equal bits at every M."""
    return None if entry.invariant is None else [_choice(entry.only_invariant(), m) for m in dict.fromkeys(tokens)]


def _multiples(form: UniversalForm) -> list[dict[str, int]]:
    """The multiples of N and K, without those that are multiples of others."""
    pairs = sorted({(f.n_multiple, f.k_multiple) for f in form.functions})
    least: list[tuple[int, int]] = []
    for n, k in pairs:
        if all(n % other_n or k % other_k for other_n, other_k in least):
            least.append((n, k))
    return [{"n": n, "k": k} for n, k in least]


def _gpu(archive: Archive, checked_on: Sequence[str], target: str) -> Gpu:
    """The kind to predict for."""
    kinds = [entry.gpu for entry in operation_entries(archive) if entry.gpu is not None and entry.target == target]
    assumed = usual(capability(target))
    return next((gpu for name in checked_on for gpu in (*kinds, assumed) if gpu.name == name), assumed)
