"""What scripts/peers/marlin*.py call of vLLM, on the CPU: its layouts are other than Marlin's, its sums the same.

Written from what vLLM's functions say of their arguments: weights as GPTQ packs them, (K / 8, N) of eight codes each,
and scales (K / group, N). Everything is filled up to multiples of 64 rows and 128 columns of K. Where a test sets
`broken`, products are off.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

E2M1, U4B8 = "float4_e2m1f", "uint4b8"
_UTILS = "vllm.model_executor.layers.quantization.utils"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = {E2M1: [*_MAGNITUDES, *(-x for x in _MAGNITUDES)], U4B8: [float(code - 8) for code in range(16)]}


class StandIn:
    """The modules, which `install` puts in place; `calls` are the names of functions, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.broken = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> StandIn:
        ops = {"gptq_marlin_repack": self.repack, "moe_wna16_marlin_gemm": self.moe_gemm}
        utils = {
            "marlin_padded_nk": lambda n, k, group: (_up(n, 64), _up(k, 128)),
            "marlin_pad_qweight": lambda q, size_n, size_k, padded_n, padded_k: _pad(q, padded_k // 8, padded_n),
            "marlin_pad_scales": self.pad_scales,
            "marlin_permute_scales": lambda s, size_k, size_n, group_size: s.flip(1).contiguous(),
            "marlin_make_workspace_new": lambda device, blocks=1: torch.zeros(blocks, dtype=torch.int32),
            "marlin_make_empty_g_idx": lambda device: torch.empty(0, dtype=torch.int32),
            "apply_gptq_marlin_linear": self.int4,
        }
        fp4 = {
            "mxfp4_marlin_process_scales": lambda s: s.to(torch.float8_e8m0fnu),
            "apply_fp4_marlin_linear": self.mxfp4,
        }
        align = {"moe_align_block_size": self.align}
        modules: dict[str, dict[str, Any]] = {
            "vllm._C_stable_libtorch": {},
            "vllm._moe_C_stable_libtorch": {},
            "vllm._custom_ops": ops,
            "vllm.scalar_type": {"scalar_types": SimpleNamespace(float4_e2m1f=E2M1, uint4b8=U4B8)},
            f"{_UTILS}.marlin_utils": utils,
            f"{_UTILS}.marlin_utils_fp4": fp4,
            "vllm.model_executor.layers.fused_moe.moe_align_block_size": align,
        }
        for name, content in modules.items():
            module = ModuleType(name)
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(marlin_gemm=None), raising=False)
        monkeypatch.setattr(torch.ops, "_moe_C", SimpleNamespace(moe_wna16_marlin_gemm=None), raising=False)
        return self

    def repack(self, q: Any, *, perm: Any, size_k: int, size_n: int, num_bits: int) -> Any:
        assert q.dtype == torch.int32
        assert q.shape == (size_k // 8, size_n)
        assert num_bits == 4
        assert not len(perm)
        self.calls.append("repack")
        return q.reshape(size_k // 16, 2 * size_n)

    def pad_scales(self, s: Any, size_n: int, size_k: int, padded_n: int, padded_k: int, group_size: int) -> Any:
        assert s.dtype == torch.bfloat16
        assert s.shape == (size_k // group_size, size_n)
        return _pad(s, padded_k // group_size, padded_n)

    def mxfp4(
        self, *, input: Any, weight: Any, weight_scale: Any, weight_global_scale: None, workspace: Any, **sizes: int
    ) -> Any:
        assert weight_scale.dtype == torch.float8_e8m0fnu
        self.calls.append(E2M1)
        return self._linear(E2M1, input, weight, weight_scale, sizes["size_n"], sizes["size_k"])

    def int4(self, *, input: Any, weight: Any, weight_scale: Any, wtype: str, is_k_full: bool, **more: Any) -> Any:
        assert (wtype, is_k_full) == (U4B8, True)
        assert not any(len(more[name]) for name in ("weight_zp", "g_idx", "g_idx_sort_indices"))
        self.calls.append(U4B8)
        n, k = more["output_size_per_partition"], more["input_size_per_partition"]
        return self._linear(U4B8, input, weight, weight_scale, n, k)

    def _linear(self, kind: str, a: Any, weight: Any, scales: Any, n: int, k: int) -> Any:
        assert a.shape[1] == k
        whole = self._numbers(kind, weight, scales)
        return (a.float() @ whole[:k, :n]).to(torch.bfloat16)

    def _numbers(self, kind: str, weight: Any, scales: Any) -> Any:
        """(K, N) in f32, each rounded to bf16 once."""
        k, n = weight.shape[0] * 16, weight.shape[1] // 2
        q = weight.reshape(k // 8, n)
        codes = torch.stack([q >> (4 * place) & 15 for place in range(8)], 1).reshape(k, n)
        spread = scales.float().flip(1).repeat_interleave(k // len(scales), 0)
        found = (torch.tensor(_NUMBERS[kind])[codes.long()] * spread).to(torch.bfloat16).float()
        return -found if self.broken else found

    def align(self, ids: Any, block: int, groups: int) -> tuple[Any, Any, Any]:
        """Rows of each group, in blocks that are filled up with the number of rows."""
        assert ids.shape[1] == 1
        assert ids.dtype == torch.int32
        self.calls.append("align")
        rows: list[int] = []
        of: list[int] = []
        for group in range(groups):
            mine = (ids[:, 0] == group).nonzero()[:, 0].tolist()
            mine += [len(ids)] * (-len(mine) % block)
            rows += mine
            of += [group] * (len(mine) // block)
        return torch.tensor(rows), torch.tensor(of), torch.tensor([len(rows)])

    def moe_gemm(self, *given: Any, moe_block_size: int, top_k: int, b_q_type: str, **more: Any) -> Any:
        a, _, weight, _, scales, *nothing, _, ids, groups, count, ones = given
        assert nothing == [None] * 5
        assert top_k == 1
        assert not more["mul_topk_weights"]
        assert len(ones) == len(a)
        assert (more["size_m"], more["size_k"]) == a.shape
        assert int(count) == len(ids)
        self.calls.append(f"moe {moe_block_size}")
        d = a.new_full((len(a), more["size_n"]), 7.0)
        for block, group in zip(ids.view(-1, moe_block_size), groups.tolist(), strict=True):
            rows = block[block < len(a)]
            d[rows] = (a[rows].float() @ self._numbers(b_q_type, weight[group], scales[group])).to(d.dtype)
        return d


def missing(monkeypatch: pytest.MonkeyPatch, names: Sequence[str]) -> None:
    """Modules that cannot be imported."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _pad(of: Any, rows: int, columns: int) -> Any:
    return torch.nn.functional.pad(of, (0, columns - of.shape[1], 0, rows - of.shape[0]))
