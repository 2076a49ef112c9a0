"""The norms between a decoder's layers, as operations: what servers' plugins take from an archive that has them, since
GEMMs that overlap begin while they run (`runtime/plugin/norms.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.rmsnorm import Signature

from ..search.unserved import variants
from .manifest import Use

_TYPES = ("bf16", "f16")


def of_norms(dtype: str, extents: Iterable[int], tokens: Sequence[int], targets: Sequence[str]) -> list[Use]:
    """For each N of `extents` RMSNorm with a residual and, as a model's first layer has it, without one; none in other
    types than 16 bits, or where no target has kernels for it."""
    found = list[Use]()
    for number, n in enumerate(dict.fromkeys(extents) if dtype in _TYPES else ()):
        more = f"_n{n}" if number else ""
        for name, residual in (("norm", dtype), ("first_norm", "none")):
            of = Signature(dtype, dtype, dtype, n, residual)
            if any(variants(target, of) for target in targets):
                found.append(Use(f"{name}{more}", of, tuple(tokens)))
    return found
