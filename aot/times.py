"""Files of times that were measured of many variants, read: what `scripts/sweep_variants.py` writes.

A file is JSON, compressed with xz if its name ends so. Each of `results` has a `signature`, as its fields or its key,
an `m`, microseconds by function in `us`, and in `best` those of a few that were taken with more care. Where many have
the same functions, `us` may be a list (null: not timed) in the order of one of the lists in `names`, which the `names`
of the result counts from 0.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
from pathlib import Path
from typing import Any

from runtime.errors import AotError
from runtime.signature import Signature

from .providers import PROVIDERS, provider
from .universal import Measured, choices_of
from .variants import Variant


class TimesError(AotError):
    """A file of times cannot be read."""


def load(path: Path, target: str) -> list[tuple[Signature, Measured]]:
    """The signature and the times of each problem in a file; functions that are no variants for `target` are left out.

    Raises:
        TimesError: it cannot be read, or is something else.
    """
    try:
        data = path.read_bytes()
        content = json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)
        return _measured(content, target)
    except (OSError, lzma.LZMAError, ValueError, LookupError, TypeError, AttributeError, AotError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise TimesError(
            f"{path}: no file of times ({reason:.200}); name one such as benchmarks/results/variants_h200.json.xz"
        ) from None


def _signature(obj: Any) -> Signature:
    found = Signature.of_key(obj) if isinstance(obj, str) else Signature.from_json(obj)
    if found is None:
        raise ValueError(f"{obj!r:.100} is no key of a signature")
    return found


def _measured(content: Any, target: str) -> list[tuple[Signature, Measured]]:
    variants: dict[Signature, dict[str, Variant]] = {}
    found = []
    for case in content["results"]:
        signature, us = _signature(case["signature"]), case["us"]
        form = dataclasses.replace(signature, n=256, k=256)
        if form not in variants:
            legal = (v for p in PROVIDERS for v in provider(p).variants(target, form))
            variants[form] = {v.name(): v for v in legal}
        known = variants[form]
        if isinstance(us, list):
            us = dict(zip(content["names"][case["names"]], us, strict=True))
        us = {name: float(t) for name, t in us.items() if t is not None}
        us |= {name: float(t) for name, t in case["best"].items() if name in us}
        times = {choices_of(known[name]): t for name, t in us.items() if name in known and t > 0}
        if times:
            found.append((signature, Measured(signature.n, signature.k, int(case["m"]), times)))
    return found
