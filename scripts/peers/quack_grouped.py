"""quack's grouped GEMM (its varlen_m) in bf16 or f16: its tuning space for Hopper, each configuration pinned in turn.

Its tuner leaves SM90's dynamic scheduler to the caller, so each configuration is tried with and without it. Its counter
is set to zero in front of each launch, which a measurement contains. Where groups begin and end (cu_seqlens_m, groups +
1) is made of our ends once for an operand set, which no measurement contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from aot.tune.grouped_gemm.measures import OperandSet, Weights
from aot.tune.measure import Launch
from runtime.grouped_gemm import Signature

from .base import Settings
from .quack_kernels import NAME, import_quack, named, quack_versions

_ELEMENTS = "bf16", "f16"
_ALIGNMENT = 8  # of these fill 16 bytes, of which its kernels take rows of A, B and D to be multiples
_SMALL_M = 64


class GroupedQuack:
    """The peer, as `base.Peer` but for grouped GEMMs."""

    name = NAME
    search = "all its sm90 configurations for varlen_m (22), each with its static and its dynamic scheduler"

    def __init__(self, settings: Settings) -> None:
        self._device, self._modules = settings.device, import_quack(settings)
        self._compiled: set[Signature] = set()  # small ones, which stand for all of their element types

    def versions(self) -> dict[str, str]:
        """The versions of its packages."""
        return quack_versions()

    def refuse(self, signature: Signature) -> str | None:
        """Why it cannot compute `signature`; None if it can."""
        plain = (signature.scaling, signature.epilogue, signature.rows) == ("none", "none", "contiguous")
        if not plain or signature.a not in _ELEMENTS:
            return "it is compared on plain products in 16 bits, of rows that lie together"
        if signature.n % _ALIGNMENT or signature.k % _ALIGNMENT:
            return f"N and K must be multiples of {_ALIGNMENT}"
        return None

    def launches(self, signature: Signature, m: int) -> Mapping[str, Launch]:
        """Its candidates for `signature` at `m` rows, all compiled. Launch one on every operand set before it is
        captured."""
        kept: dict[int, _Begins] = {}  # by the address of A, which an operand set holds; candidates share them
        configs = [c for c in self._modules.space(None) if self._modules.configs.config_supports(c, varlen_m=True)]
        launches = {
            f"{named(config)} {'dynamic' if dynamic else 'static'}": _Launched(self._modules, config, dynamic, kept)
            for config in configs
            for dynamic in (False, True)
        }
        self._compile(signature, launches)
        return launches

    def _compile(self, signature: Signature, launches: Mapping[str, Launch]) -> None:
        """In worker processes, once for all signatures of the same element types: kernels serve all shapes."""
        small = replace(signature, groups=2, n=512, k=1024, overlap="serial")
        if small not in self._compiled:
            self._compiled.add(small)
            operands = Weights(small, _SMALL_M, 0, seed=0, device=self._device).operands(_SMALL_M)[0]
            self._modules.compile_ahead(((launch, operands) for launch in launches.values()), lambda: False)


@dataclass(frozen=True)
class _Begins:
    """Where groups of an operand set begin, and behind them where the last ends: (groups + 1), i32."""

    of: OperandSet  # kept, so that its addresses stay its own
    rows: torch.Tensor


@dataclass(frozen=True)
class _Launched:
    """A launch of one configuration."""

    modules: Any
    config: Any
    dynamic: bool
    kept: dict[int, _Begins]

    def __call__(self, o: OperandSet) -> None:
        """Launch; it takes B as (groups, K, N), of any strides."""
        self.modules.interface.gemm_tuned.fn(
            o.a, o.b.mT, o.d, cu_seqlens_m=self._begins(o), dynamic_scheduler=self.dynamic, config=self.config
        )

    def _begins(self, o: OperandSet) -> torch.Tensor:
        found = self.kept.get(o.a.data_ptr())
        if found is None or found.of.a is not o.a:
            rows = torch.cat((o.ends.new_zeros(1), o.ends))
            found = self.kept[o.a.data_ptr()] = _Begins(o, rows)
        return found.rows
