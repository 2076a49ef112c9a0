"""What tuning knows of GEMM. Imports no torch, but where it is asked for what needs it."""

from __future__ import annotations

from collections.abc import Hashable

from runtime.gemm.fallback import torch_runs
from runtime.gemm.signature import Signature

from ..operation import Measures, Tuning, Work


class GemmTuning(Tuning):
    """See `aot.tune.operation.Tuning`."""

    looks_between = True  # points that were measured: see `aot.tune.session.Tuned.is_looked_at`

    def work(self, signature: Signature, m: int) -> Work:
        """2 M N K operations for each batch; A, B and residual read once, D written once."""
        return Work(signature.flops(m), signature.bytes(m))

    def form(self, s: Signature) -> Hashable:
        """All but N, K and how many there are in a batch."""
        return s.a, s.b, s.d, s.accumulator, s.epilogue, s.scaling, s.b_major, s.batch > 1, s.overlap

    def torch_serves(self, signature: Signature) -> bool:
        """Where one call of torch computes it, which `Library.gemm` knows to make."""
        return torch_runs(signature)

    def measures(self) -> Measures:
        """What needs torch."""
        from .measures import GemmMeasures

        return GemmMeasures()


GEMM = GemmTuning()
