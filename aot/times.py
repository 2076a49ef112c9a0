"""Files of times that were measured of many variants, read: what `scripts/sweep_variants.py --times` takes too.

A file is JSON, compressed with xz if its name ends so. `names` has lists of functions; each of `results` has a
`signature`, an `m`, which of the lists its times are of, `us` in the order of that list (null: not timed), and `best`
with times of a few that were taken with more care.
"""

from __future__ import annotations

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
    except (OSError, lzma.LZMAError, ValueError, LookupError, TypeError, AotError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise TimesError(
            f"{path}: no file of times ({reason:.200}); name one such as benchmarks/results/variants_h200.json.xz"
        ) from None


def _measured(content: Any, target: str) -> list[tuple[Signature, Measured]]:
    variants: dict[int, dict[str, Variant]] = {}
    found = []
    for case in content["results"]:
        signature, names = Signature.from_json(case["signature"]), content["names"][case["names"]]
        if case["names"] not in variants:
            legal = (v for p in PROVIDERS for v in provider(p).variants(target, signature))
            variants[case["names"]] = {v.name(): v for v in legal}
        known = variants[case["names"]]
        us = {name: float(t) for name, t in zip(names, case["us"], strict=True) if t is not None}
        us |= {name: float(t) for name, t in case["best"].items() if name in us}
        times = {choices_of(known[name]): t for name, t in us.items() if name in known and t > 0}
        if times:
            found.append((signature, Measured(signature.n, signature.k, int(case["m"]), times)))
    return found
