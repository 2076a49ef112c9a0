"""Marlin's GEMM of a mixture's experts, as vLLM has it: bf16 rows by groups, each by 4-bit weights of its own.

Blocks of rows are of one group. Which rows these are, vLLM's moe_align_block_size says, once for an operand set: no
measurement contains that, nor what lays weights out or fills up K.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from aot.tune.grouped_gemm.measures import OperandSet, Weights
from aot.tune.measure import Launch
from runtime.grouped_gemm import Signature
from runtime.numbers.weights import FORMATS

from .base import Allocating, Settings, versions_of
from .marlin import Laid, Vllm, import_vllm, lay_out, must_be_right, must_not_capture, refusal

_EXTENSION = "vllm._moe_C_stable_libtorch"
_ALIGN = "vllm.model_executor.layers.fused_moe.moe_align_block_size"
_BLOCKS = (8, 16, 32, 48, 64)  # the sizes that its kernels have; vLLM takes one by the mean rows of an expert
_BLOCKS_PER_SM = 4  # at most, which its workspace is for
_TRIED = 4, 256, 256, 9  # groups, N, K and M of the product that says whether it runs at all


class GroupedMarlin:
    """The peer, as `base.Peer` but for grouped GEMMs."""

    name = "marlin"
    search = f"moe_wna16_marlin_gemm with blocks of {', '.join(map(str, _BLOCKS))} rows"

    def __init__(self, settings: Settings) -> None:
        self._vllm = import_vllm("_moe_C", "moe_wna16_marlin_gemm", _EXTENSION)
        self._align = importlib.import_module(_ALIGN).moe_align_block_size
        groups, n, k, m = _TRIED
        s = Signature("bf16", "e2m1", "bf16", groups, n, k, scaling="mxfp4_weight")
        launch = next(iter(self.launches(s, m).values()))
        must_be_right(Weights, s, m, launch, settings.device)

    def versions(self) -> dict[str, str]:
        """The versions of its packages."""
        return versions_of("vllm")

    def refuse(self, signature: Signature) -> str | None:
        """Why it cannot compute `signature`; None if it can."""
        return refusal(signature)

    def launches(self, signature: Signature, m: int) -> Mapping[str, Launch]:
        """Its candidates for `signature` at `m` rows. Launch one on every operand set before it is captured."""
        shared: dict[int, tuple[OperandSet, _Experts]] = {}
        return {
            f"blocks of {block}": Allocating(_Product(self._vllm, self._align, signature, block, shared, {}), {})
            for block in _BLOCKS
        }


@dataclass(frozen=True)
class _Experts:
    """The weights of all groups, and A as wide as they are."""

    a: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int
    workspace: torch.Tensor


@dataclass(frozen=True)
class _Rows:
    """Which rows a block has, and of which group they are."""

    of: OperandSet  # kept, so that its addresses stay its own
    sorted_ids: torch.Tensor
    groups: torch.Tensor
    count: torch.Tensor
    ones: torch.Tensor  # a weight of each row, which is not multiplied by


@dataclass(frozen=True)
class _Product:
    """The rows of A, each by its group's B."""

    vllm: Vllm
    align: Any
    signature: Signature
    block: int
    shared: dict[int, tuple[OperandSet, _Experts]]  # by the address of A, for candidates of all sizes of blocks
    rows: dict[int, _Rows]  # likewise, for this size

    def __call__(self, o: OperandSet) -> torch.Tensor:
        """The products, in memory of their own."""
        experts, rows = self._experts(o), self._rows(o)
        made: torch.Tensor = self.vllm.ops.moe_wna16_marlin_gemm(
            *(experts.a, None, experts.weight, None, experts.scales, None, None, None, None, None, experts.workspace),
            *(rows.sorted_ids, rows.groups, rows.count, rows.ones),
            moe_block_size=self.block,
            top_k=1,
            mul_topk_weights=False,
            b_q_type=self.vllm.types[self.signature.scaling],
            size_m=len(o.a),
            size_n=experts.n,
            size_k=experts.k,
            is_k_full=True,
            use_atomic_add=False,
            use_fp32_reduce=True,
            is_zp_float=False,
        )
        return made[:, : self.signature.n]

    def _experts(self, o: OperandSet) -> _Experts:
        found = self.shared.get(o.a.data_ptr())
        if found is None or found[0].a is not o.a:
            must_not_capture()
            found = self.shared[o.a.data_ptr()] = o, self._laid_out(o)
        return found[1]

    def _laid_out(self, o: OperandSet) -> _Experts:
        """One group after the other, so that no more than one's codes are spread out at a time."""
        form, scales = FORMATS[self.signature.scaling], o.extras["scale_b"]
        laid: list[Laid] = [lay_out(self.vllm, form, b, scale) for b, scale in zip(o.b, scales, strict=True)]
        workspace = self.vllm.utils.marlin_make_workspace_new(o.a.device, _BLOCKS_PER_SM)
        weight, scale = (torch.stack([getattr(of, name) for of in laid]) for name in ("weight", "scales"))
        wide = torch.nn.functional.pad(o.a, (0, laid[0].k - self.signature.k))
        return _Experts(wide, weight, scale, laid[0].n, laid[0].k, workspace)

    def _rows(self, o: OperandSet) -> _Rows:
        found = self.rows.get(o.a.data_ptr())
        if found is None or found.of.a is not o.a:
            must_not_capture()
            group = torch.searchsorted(o.ends, torch.arange(len(o.a), device=o.a.device), right=True)
            ids, groups, count = self.align(group.to(torch.int32).view(-1, 1), self.block, self.signature.groups)
            ones = torch.ones((len(o.a), 1), device=o.a.device)
            found = self.rows[o.a.data_ptr()] = _Rows(o, ids, groups, count, ones)
        return found
