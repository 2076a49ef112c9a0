"""Kernels of this project, `aot/kernels/`.

Importing this imports no compiler; `build` does.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from runtime.signature import Signature

from ..targets import TARGETS
from ..variants import Family, Variant, illegal, legal_functions, legal_variants
from .base import Buildable, ProviderError, digest, stand_ins

FAMILIES: dict[str, Family] = {
    # One block a row, `threads` threads a block.
    "rmsnorm_row": Family(
        "rmsnorm",
        tuple(TARGETS),
        (("bf16", "bf16", "bf16"), ("f16", "f16", "f16")),
        {"threads": (128, 256, 512)},
        batched=(False,),
    ),
}


class Own:
    """What `aot/kernels/` holds."""

    name = "own"
    families = FAMILIES

    def variants(self, target: str, signature: Signature) -> list[Variant]:
        """Every legal GEMM variant for `signature` on `target`."""
        return legal_variants(self.name, target, signature)

    def functions(self, target: str) -> list[Variant]:
        """Every legal variant for `target` that is not a GEMM."""
        return legal_functions(self.name, target)

    def source_digest(self) -> str:
        """SHA-256 over this provider and every kernel of this project."""
        kernels = resources.files("aot.kernels")
        items = [(f"kernels/{k.name}", k.read_bytes()) for k in kernels.iterdir() if k.name.endswith(".py")]
        here = Path(__file__)
        return digest([*items, *((f"provider/{n}", (here.parent / n).read_bytes()) for n in (here.name, "base.py"))])

    def build(self, variant: Variant) -> Buildable:
        """Prepare `variant` for `cute.compile`.

        Raises:
            ProviderError: the variant is illegal.
        """
        if reason := illegal(variant):
            raise ProviderError(f"cannot build {variant.name()}: {reason}")
        return _rmsnorm(variant)


def _rmsnorm(variant: Variant) -> Buildable:
    """RMSNorm over x (M, N), weight (N), y (M, N), an f32 eps and a stream; rows of x and y may lie apart."""
    from ..kernels.rmsnorm import RmsNorm

    symbols = {
        "m": {"width": 32, "divisibility": 1},
        "n": {"width": 32, "divisibility": 8},
        "ldx": {"width": 64, "divisibility": 8},
        "ldy": {"width": 64, "divisibility": 8},
    }
    tree: list[dict[str, Any]] = [
        {"kind": "tensor", "name": name, "dtype": dtype, "shape": shape, "strides": strides, "alignment": 16}
        for name, dtype, shape, strides in (
            ("x", variant.a, ["m", "n"], ["ldx", 1]),
            ("weight", variant.b, ["n"], [1]),
            ("y", variant.d, ["m", "n"], ["ldy", 1]),
        )
    ]
    tree += [{"kind": "scalar", "name": "eps", "dtype": "f32"}, {"kind": "stream", "name": "stream"}]
    return Buildable(RmsNorm(variant.integer("threads")), stand_ins(tree, symbols), tree, symbols)
