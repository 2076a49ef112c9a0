"""The norms between a decoder's layers, as operations: what the plugin for vLLM takes from an archive that has
them, since GEMMs that overlap begin while they run (`runtime/vllm/norms.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.quantise import Signature as Quantise
from runtime.rmsnorm import Signature

from ..search.unserved import variants
from .manifest import Use
from .unquantised import FEW

_TYPES = ("bf16", "f16")


def of_norms(
    dtype: str, extents: Iterable[int], tokens: Sequence[int], targets: Sequence[str], quantised: Iterable[Use] = ()
) -> list[Use]:
    """For each N of `extents` RMSNorm with a residual and, as a model's first layer has it, without one; and of more
    tokens than GEMMs quantise themselves one that quantises, for each scaling that a quantise of such rows among
    `quantised` has. None in other types than 16 bits, or where no target has kernels for it."""
    extents = list(dict.fromkeys(extents)) if dtype in _TYPES else []
    rows = [use.signature for use in quantised if isinstance(use.signature, Quantise)]
    found = list[Use]()
    for number, n in enumerate(extents):
        wanted = {
            "norm": (Signature(dtype, dtype, dtype, n, dtype), tokens),
            "first_norm": (Signature(dtype, dtype, dtype, n), tokens),
            **{
                f"norm_{of.scaling}": (
                    Signature(dtype, dtype, of.y, n, dtype, of.scaling),
                    [m for m in tokens if m > FEW[of.scaling]],
                )
                for of in rows
                if (of.x, of.k) == (dtype, n)
            },
        }
        for name, (of, ms) in wanted.items():
            if ms and any(variants(target, of) for target in targets):
                found.append(Use(f"{name}_n{n}" if number else name, of, tuple(ms)))
    return found
