"""Files of times that were measured of many variants, read: what `scripts/sweep_variants.py` writes, and tuned
archives, which have them in their table "history".

What the script writes is JSON, compressed with xz if the file's name ends so. `gpu`, or that of `environment`, is the
GPU's name. Each of `results` has a `signature`, as its fields or its key, an `m`, microseconds by function in `us`, and
in `best` those of a few that were taken with more care. Where many have the same functions, `us` may be a list (null:
not timed) in the order of one of the lists in `names`, which the `names` of the result counts from 0.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.container.archive import Archive
from runtime.device.gpus import H200, KNOWN
from runtime.errors import AotError
from runtime.gemm.signature import Signature
from runtime.gemm.universal import machine_of

from ..search.costs import Machine
from ..search.operation import building
from ..search.provider import provider, provider_names
from ..search.universal import Measured, choices_of
from ..search.variants import Variant
from . import history


class TimesError(AotError):
    """A file of times cannot be read."""


def load(path: Path, target: str) -> list[tuple[Signature, Measured]]:
    """The signature and the times of each problem in a file; functions that are no variants for `target` are left out.

    Raises:
        TimesError: it cannot be read, or is something else.
    """
    try:
        if path.suffix == ".aot":
            with Archive.open(path) as archive:
                return _of_archive(archive, target)
        data = path.read_bytes()
        content = json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)
        return _measured(content, target)
    except (OSError, lzma.LZMAError, ValueError, LookupError, TypeError, AttributeError, AotError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise TimesError(
            f"{path}: no file of times ({reason:.200}); name a tuned archive, or a file such as "
            "benchmarks/variants_h200.json.xz"
        ) from None


def signature_of(obj: Any) -> Signature:
    """A signature that is written as its fields or as its key.

    Raises:
        ValueError: it is no signature.
    """
    found = Signature.of_key(obj) if isinstance(obj, str) else Signature.from_json(obj)
    if found is None:
        raise ValueError(f"{obj!r:.100} is no key of a signature")
    return found


def _of_archive(archive: Archive, target: str) -> list[tuple[Signature, Measured]]:
    """What the archive was tuned by for `target`."""
    known = _Variants(target)
    of_forms = (row for row in history.tunings(archive) if building(history.operation_of(row)).forms)
    rows = (row for row in of_forms if row["target"] == target)
    return [
        (signature, Measured(signature.n, signature.k, point["m"], times, _machine(row["gpu"])))
        for row in rows
        for signature in [signature_of(row["signature"])]
        for point in row["points"]
        if (times := known.by_choices(signature, history.measured(row["names"], point).short_us()))
    ]


def _measured(content: Any, target: str) -> list[tuple[Signature, Measured]]:
    known, found = _Variants(target), []
    machine = _machine(content.get("gpu") or content.get("environment", {}).get("gpu", ""))
    for case in content["results"]:
        signature, us = signature_of(case["signature"]), case["us"]
        if isinstance(us, list):
            us = dict(zip(content["names"][case["names"]], us, strict=True))
        us = {name: float(t) for name, t in us.items() if t is not None}
        us |= {name: float(t) for name, t in case["best"].items() if name in us}
        if times := known.by_choices(signature, us):
            found.append((signature, Measured(signature.n, signature.k, int(case["m"]), times, machine)))
    return found


def _machine(name: str) -> Machine:
    """What estimates ask of a GPU of this name; of one that is not known, what they ask of an H200."""
    return Machine(*machine_of(KNOWN.get(name, H200)))


class _Variants:
    """The variants for a target by name, for each form that is asked for."""

    def __init__(self, target: str) -> None:
        self._target, self._forms = target, dict[Signature, dict[str, Variant]]()

    def by_choices(self, signature: Signature, us: Mapping[str, float]) -> dict[Any, float]:
        """Times by a variant's choices in place of its name; of what is no variant, or took no time, there is none."""
        form = dataclasses.replace(signature, n=256, k=256)
        if form not in self._forms:
            legal = (v for p in provider_names() for v in provider(p).variants(self._target, form))
            self._forms[form] = {v.name(): v for v in legal}
        known = self._forms[form]
        return {choices_of(known[name]): t for name, t in us.items() if name in known and t > 0}
