"""Experts of models, random operands for them, and what they must make: what `bench_moe` times.

Needs torch and a GPU. Knows nothing of who computes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from aot.search.h200 import FLOOR
from aot.tune.gemm.operands import MAX_ERROR_FP8_PROMOTED
from aot.tune.quantise.measures import error_behind, quantised
from runtime.gemm.fallback import apply_activation
from runtime.grouped_gemm import OVERLAP_OF_EXPERTS
from runtime.grouped_gemm import Signature as Grouped
from runtime.moe.combine import Signature as Combine
from runtime.moe.permute import Signature as Permute
from runtime.numbers.epilogue import EPILOGUES
from runtime.numbers.quantised import NARROW, scale_shape
from runtime.numbers.scaling import SCALE_BLOCK
from runtime.quantise import Signature as Quantise

# Relative, in the norm: two roundings to bf16 between launches, and one behind them; and where rows are quantised, what
# becomes of the error that a grouped GEMM may have.
MAX_ERROR = {"bf16": 6e-3, NARROW: error_behind(MAX_ERROR_FP8_PROMOTED, NARROW)}
_MOST_SETS = 16


@dataclass(frozen=True)
class Model:
    """Experts of a model that are on one GPU: gate_up (experts, 2 * inner, hidden), down (experts, hidden, inner), in
    bf16, or in e4m3 with a scale for each block of 128 x 128; with a bias for each row of both where `biased`."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    global_experts: int = 0
    gate: str = "swiglu"
    biased: bool = False
    dtype: str = "bf16"

    @property
    def scaled(self) -> bool:
        """Whether weights have scales."""
        return self.dtype == NARROW

    @property
    def share(self) -> float:
        """The part of all assignments that falls to experts here."""
        return self.experts / self.global_experts if self.global_experts else 1.0

    def active_bytes(self, tokens: int) -> float:
        """Bytes of weights that so many tokens read, on average: each token's experts are distinct."""
        every = self.experts / self.share
        active = self.experts * (1 - (1 - self.top_k / every) ** tokens)
        return active * 3 * self.inner * self.hidden * (1 if self.scaled else 2)

    def floor_us(self, tokens: int) -> float:
        """The least that all takes on an H200: each active expert's weights read once, or the products."""
        flops = 6 * tokens * self.top_k * self.share * self.inner * self.hidden
        flops_per_us = FLOOR.flops_per_us[8 if self.scaled else 16]
        return max(self.active_bytes(tokens) / FLOOR.memory_bytes_per_us, flops / flops_per_us)

    def signatures(self) -> dict[str, Any]:
        """What of an archive each launch is looked up by, in their order; "fused" is what may take the place of gate_up
        and quantise."""
        e, k, n, scaling = self.experts, self.hidden, self.inner, "block" if self.scaled else "none"
        gate, down = (EPILOGUES[word]._replace(bias=self.biased).word() for word in (self.gate, "none"))
        types = self.dtype, self.dtype, "bf16"
        found: dict[str, Any] = {
            "permute": Permute("bf16", e, self.top_k, k, self.global_experts, scaling),
            "gate_up": Grouped(*types, e, 2 * n, k, gate, OVERLAP_OF_EXPERTS, scaling),
            "fused": Grouped(NARROW, NARROW, NARROW, e, 2 * n, k, gate, OVERLAP_OF_EXPERTS, "block"),
            "quantise": Quantise("bf16", NARROW, n, scaling, e),
            "down": Grouped(*types, e, k, n, down, OVERLAP_OF_EXPERTS, scaling),
            "combine": Combine("bf16", "bf16", self.top_k, k),
        }
        if not self.scaled:
            del found["quantise"], found["fused"]
        return found


MODELS = (
    Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Model("GPT-OSS-120B", 128, 4, 2880, 2880, gate="swiglu_clamped_interleaved", biased=True),
    Model("Mixtral-8x22B-TP4", 8, 2, 6144, 4096),
    Model("DeepSeek-V3-EP32", 8, 8, 7168, 2048, 256),
    Model("FP8-Qwen3-30B-A3B", 128, 8, 2048, 768, dtype=NARROW),
    Model("FP8-Qwen3-235B-A22B-TP2", 128, 8, 4096, 768, dtype=NARROW),
    Model("FP8-DeepSeek-V3-EP32", 8, 8, 7168, 2048, 256, dtype=NARROW),
)


@dataclass(frozen=True)
class Set:
    """Weights of a model: w13 and w2; their biases, or none; their scales, or none; and, where they have scales, both
    weights in bf16, for who multiplies no others."""

    w13: torch.Tensor
    w2: torch.Tensor
    biases: tuple[torch.Tensor, ...] = ()
    scales: tuple[torch.Tensor, ...] = ()
    widened: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    @property
    def wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both weights in bf16."""
        return (self.widened[0], self.widened[1]) if self.widened else (self.w13, self.w2)


@dataclass(frozen=True)
class Block:
    """What one launch of all experts works on, and what is between the launches of ours: `permuted` is rows, ends,
    positions, and perhaps scales; `narrow` is what `inner` is quantised to, or nothing."""

    hidden: torch.Tensor
    weights: Set
    ids: torch.Tensor
    router: torch.Tensor
    expert_map: torch.Tensor | None
    out: torch.Tensor
    permuted: tuple[torch.Tensor, ...]
    inner: torch.Tensor
    narrow: tuple[torch.Tensor, ...]
    made: torch.Tensor

    @classmethod
    def of(cls, model: Model, tokens: int, weights: Set, generator: Any) -> Block:
        """Random tokens and experts for these weights."""
        every, rows = model.global_experts or model.experts, tokens * model.top_k
        random: dict[str, Any] = {"device": "cuda", "generator": generator}
        hidden = torch.randn((tokens, model.hidden), dtype=torch.bfloat16, **random)
        ids = torch.rand((tokens, every), **random).topk(model.top_k).indices.to(torch.int32)
        of_map = None
        if model.global_experts:
            of_map = torch.full((every,), -1, dtype=torch.int32, device="cuda")
            of_map[: model.experts] = torch.arange(model.experts, dtype=torch.int32, device="cuda")
        ends, positions = (
            torch.empty(shape, dtype=torch.int32, device="cuda") for shape in ((model.experts,), ids.shape)
        )
        to, *scale = _narrow(rows, model.hidden) if model.scaled else (hidden.new_empty((rows, model.hidden)),)
        return cls(
            hidden,
            weights,
            ids,
            torch.randn(ids.shape, **random).softmax(-1),
            of_map,
            torch.empty_like(hidden),
            (to, ends, positions, *scale),
            hidden.new_empty((rows, model.inner)),
            _narrow(rows, model.inner) if model.scaled else (),
            hidden.new_empty((rows, model.hidden)),
        )

    def local(self) -> torch.Tensor:
        """The expert here of each assignment, or -1."""
        return self.ids if self.expert_map is None else self.expert_map[self.ids]


def _narrow(rows: int, width: int) -> tuple[torch.Tensor, ...]:
    """Room for rows in e4m3, and their scales."""
    scale = torch.empty(scale_shape("block", rows, width), device="cuda")
    return torch.empty((rows, width), dtype=torch.float8_e4m3fn, device="cuda"), scale


class Weights:
    """Weights of a model, as many as its memory allows and cold reads need at one token."""

    def __init__(self, model: Model, l2_bytes: int) -> None:
        self.model, self.generator = model, torch.Generator(device="cuda").manual_seed(0)
        count = max(2, math.ceil(3 * l2_bytes / model.active_bytes(1)))
        self.sets = [self._one() for _ in range(min(count, 3))]
        self.count = min(count, _MOST_SETS)

    def blocks(self, tokens: int) -> list[Block]:
        """Sets to use in turn, each with experts of its own."""
        each = [self.sets[i % len(self.sets)] for i in range(self.count)]
        return [Block.of(self.model, tokens, weights, self.generator) for weights in each]

    def _one(self) -> Set:
        m = self.model
        wide13, wide2 = (
            self._normal(e, n, k).mul_(k**-0.5)
            for e, n, k in ((m.experts, 2 * m.inner, m.hidden), (m.experts, m.hidden, m.inner))
        )
        biases = tuple(self._normal(*w.shape[:2]) for w in (wide13, wide2)) if m.biased else ()
        if not m.scaled:
            return Set(wide13, wide2, biases)
        (w13, of_w13), (w2, of_w2) = _by_blocks(wide13), _by_blocks(wide2)
        return Set(w13, w2, biases, (of_w13, of_w2), (_widened(w13, of_w13), _widened(w2, of_w2)))

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=self.generator, dtype=torch.bfloat16)


def _by_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (experts, N, K) in e4m3, and the scales of its blocks, whose extents divide it."""
    experts, n, k = weight.shape
    tiles = weight.view(experts, n // SCALE_BLOCK, SCALE_BLOCK, k // SCALE_BLOCK, SCALE_BLOCK)
    scale = tiles.abs().amax((2, 4)).float() / 448.0
    narrow = (tiles.float() / scale[:, :, None, :, None]).to(torch.float8_e4m3fn)
    return narrow.view(weight.shape), scale


def _widened(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A weight times its scales, in bf16."""
    experts, n, k = weight.shape
    tiles = weight.float().view(experts, n // SCALE_BLOCK, SCALE_BLOCK, k // SCALE_BLOCK, SCALE_BLOCK)
    return (tiles * scale[:, :, None, :, None]).to(torch.bfloat16).view(weight.shape)


def reference(b: Block, gate: str) -> torch.Tensor:
    """In float32, expert by expert, rounded to bf16 where ours is between launches, and quantised where ours is."""
    out, local, epilogue = torch.zeros(b.hidden.shape, device="cuda"), b.local(), EPILOGUES[gate]
    w = b.weights
    for expert in local.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = torch.where(local == expert)
        of_w13, of_w2 = (bias[expert].float() for bias in w.biases) if w.biases else (0.0, 0.0)
        first, second = (_number(w, i, expert) for i in range(2))
        sums = _rows(b.hidden[tokens], w) @ first.t() + of_w13
        inner = apply_activation(torch, epilogue, sums).to(b.hidden.dtype)
        made = (_rows(inner, w) @ second.t() + of_w2).to(b.hidden.dtype)
        out.index_add_(0, tokens, made.float() * b.router[tokens, slots, None])
    return out


def _number(w: Set, which: int, expert: int) -> torch.Tensor:
    """One of both weights of an expert, times its scales, f32."""
    weight = (w.w13, w.w2)[which][expert].float()
    if not w.scales:
        return weight
    rows, columns = (torch.arange(extent, device=weight.device) // SCALE_BLOCK for extent in weight.shape)
    return weight * w.scales[which][expert][rows[:, None], columns[None, :]]


def _rows(x: torch.Tensor, w: Set) -> torch.Tensor:
    """Rows as they are multiplied, f32."""
    if not w.scales:
        return x.float()
    over, scale = quantised(x, NARROW, "block")
    return over.to(torch.float8_e4m3fn).float() * scale.repeat_interleave(SCALE_BLOCK, 1)


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in the norm; of what must be zero, the norm itself."""
    return float((found.float() - wanted).norm() / (wanted.norm() or 1.0))
