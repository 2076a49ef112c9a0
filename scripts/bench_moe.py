"""Time the experts of mixtures, whole and launch by launch, against torch and vLLM, on one GPU, with cold L2.

An archive of benchmarks/moe.yaml has what is timed: `runtime.torch.moe` of four models, T tokens each, whose experts
are drawn anew for each of several sets of weights, all alike likely. Against it, in turns, run torch's own operations
(sort, gather, torch._grouped_mm, a compiled gate, torch._grouped_mm, a compiled gather and sum) and, where vLLM can
be imported, its Triton `fused_experts`, with the configurations that it was tuned to for this GPU where it has them
("tuned"). Every contender is a CUDA graph of launches over the sets in turn. The result is checked against float32.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import ends, geomean, out_argument, patch_argument, version, write

import runtime
import runtime.torch as binding
from aot.tune import measure
from runtime.errors import ArgumentError
from runtime.gemm.fallback import apply_activation
from runtime.grouped_gemm import Signature as Grouped
from runtime.moe.combine import Signature as Combine
from runtime.moe.permute import Signature as Permute
from runtime.numbers.epilogue import EPILOGUES

TOKENS = 1, 8, 32, 128, 512, 2048
PIECES = "permute", "gate_up", "down", "combine"
OVERLAP = "launch"  # as runtime.torch.moe has it; what archives have for less serves where they have nothing for it
MAX_ERROR = 6e-3  # relative, in the norm: two roundings to bf16 between launches, and one behind them
# What an H200 does at most: bytes read from memory, and bf16 products, in a microsecond.
_BYTES_PER_US, _FLOPS_PER_US = 4.3e6, 720e6
_MOST_SETS = 16
_VLLM_GATES = {"swiglu": "SILU", "swiglu_clamped_interleaved": "SWIGLUOAI"}  # by the gate of grouped_gemm
_VLLM_DTYPE = None  # how vLLM names the element type of its tuned configurations for bf16


@dataclass(frozen=True)
class Model:
    """Experts of a model that are on one GPU: gate_up (experts, 2 * inner, hidden), down (experts, hidden, inner), with
    a bias for each row of both where `biased`."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    global_experts: int = 0
    gate: str = "swiglu"
    biased: bool = False

    @property
    def share(self) -> float:
        """The part of all assignments that falls to experts here."""
        return self.experts / self.global_experts if self.global_experts else 1.0

    def active_bytes(self, tokens: int) -> float:
        """Bytes of weights that so many tokens read, on average: each token's experts are distinct."""
        every = self.experts / self.share
        active = self.experts * (1 - (1 - self.top_k / every) ** tokens)
        return active * 3 * self.inner * self.hidden * 2

    def floor_us(self, tokens: int) -> float:
        """The least that all takes: each active expert's weights read once, or the products."""
        flops = 6 * tokens * self.top_k * self.share * self.inner * self.hidden
        return max(self.active_bytes(tokens) / _BYTES_PER_US, flops / _FLOPS_PER_US)

    def signatures(self) -> dict[str, Any]:
        """What of an archive each launch is looked up by."""
        e, k, n = self.experts, self.hidden, self.inner
        gate, down = (EPILOGUES[word]._replace(bias=self.biased).word() for word in (self.gate, "none"))
        return {
            "permute": Permute("bf16", e, self.top_k, k, self.global_experts),
            "gate_up": Grouped("bf16", "bf16", "bf16", e, 2 * n, k, gate, OVERLAP),
            "down": Grouped("bf16", "bf16", "bf16", e, k, n, down, OVERLAP),
            "combine": Combine("bf16", "bf16", self.top_k, k),
        }


MODELS = (
    Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Model("GPT-OSS-120B", 128, 4, 2880, 2880, gate="swiglu_clamped_interleaved", biased=True),
    Model("Mixtral-8x22B-TP4", 8, 2, 6144, 4096),
    Model("DeepSeek-V3-EP32", 8, 8, 7168, 2048, 256),
)


_Set = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]  # w13, w2, and their biases or none


@dataclass(frozen=True)
class Block:
    """What one launch of all experts works on, and what is between the four launches of ours. `biases` are those of w13
    and w2, or none."""

    hidden: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    biases: tuple[torch.Tensor, ...]
    ids: torch.Tensor
    weights: torch.Tensor
    expert_map: torch.Tensor | None
    out: torch.Tensor
    permuted: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    inner: torch.Tensor
    made: torch.Tensor

    @classmethod
    def of(cls, model: Model, tokens: int, weights: _Set, generator: Any) -> Block:
        """Random tokens and experts for these weights."""
        every, rows = model.global_experts or model.experts, tokens * model.top_k
        random: dict[str, Any] = {"device": "cuda", "generator": generator}
        hidden = torch.randn((tokens, model.hidden), dtype=torch.bfloat16, **random)
        ids = torch.rand((tokens, every), **random).topk(model.top_k).indices.to(torch.int32)
        of_map = None
        if model.global_experts:
            of_map = torch.full((every,), -1, dtype=torch.int32, device="cuda")
            of_map[: model.experts] = torch.arange(model.experts, dtype=torch.int32, device="cuda")
        integers = [torch.empty(shape, dtype=torch.int32, device="cuda") for shape in ((model.experts,), ids.shape)]
        return cls(
            hidden,
            *weights,
            ids,
            torch.randn(ids.shape, **random).softmax(-1),
            of_map,
            torch.empty_like(hidden),
            (hidden.new_empty((rows, model.hidden)), integers[0], integers[1]),
            hidden.new_empty((rows, model.inner)),
            hidden.new_empty((rows, model.hidden)),
        )

    def local(self) -> torch.Tensor:
        """The expert here of each assignment, or -1."""
        return self.ids if self.expert_map is None else self.expert_map[self.ids]


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

    def _one(self) -> _Set:
        m = self.model
        w13, w2 = (
            self._normal(e, n, k).mul_(k**-0.5)
            for e, n, k in ((m.experts, 2 * m.inner, m.hidden), (m.experts, m.hidden, m.inner))
        )
        return w13, w2, tuple(self._normal(*w.shape[:2]) for w in (w13, w2)) if m.biased else ()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=self.generator, dtype=torch.bfloat16)


# --- contenders ---


def ours(library: runtime.Library, model: Model) -> dict[str, Callable[[Block], Any]]:
    """The whole block, and each of its launches."""

    def whole(b: Block) -> None:
        more = dict(zip(("w13_bias", "w2_bias"), b.biases, strict=False))
        given = b.hidden, b.w13, b.w2, b.ids, b.weights
        binding.moe(library, *given, expert_map=b.expert_map, out=b.out, activation=model.gate, **more)

    def permute(b: Block) -> None:
        library.call("moe_permute", b.hidden, b.ids, experts=model.experts, expert_map=b.expert_map, out=b.permuted)

    def gate_up(b: Block) -> None:
        rows, ends, _ = b.permuted
        bias = b.biases[0] if b.biases else None
        library.grouped_gemm(rows, b.w13, ends, epilogue=model.gate, bias=bias, overlap=OVERLAP, out=b.inner)

    def down(b: Block) -> None:
        bias = b.biases[1] if b.biases else None
        library.grouped_gemm(b.inner, b.w2, b.permuted[1], bias=bias, overlap=OVERLAP, out=b.made)

    def combine(b: Block) -> None:
        library.call("moe_combine", b.made, b.permuted[2], b.weights, out=b.out)

    return {"ours": whole, **dict(zip(PIECES, (permute, gate_up, down, combine), strict=True))}


@functools.cache
def compiled(gate: str) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """The gate of sums, and the sum of each token's rows by their weights, as torch compiles them, with biases where
    there are any."""

    def gated(sums: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
        values = sums.float() if bias is None else sums.float() + bias[ids.clamp_max(len(bias) - 1)]
        found: torch.Tensor = apply_activation(torch, EPILOGUES[gate], values).to(sums.dtype)
        return found

    def combine(
        made: torch.Tensor,
        places: torch.Tensor,
        weights: torch.Tensor,
        end: torch.Tensor,
        bias: torch.Tensor | None,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        there, rows = (places < end)[..., None], made[places].float()
        if bias is not None:
            rows = rows + bias[ids.clamp_min(0)]
        return torch.where(there, rows * weights[..., None], 0.0).sum(1).to(made.dtype)

    return torch.compile(gated, dynamic=True), torch.compile(combine, dynamic=True)


def of_torch(model: Model) -> Callable[[Block], torch.Tensor]:
    """The same by torch's operations; what is elementwise, or a gather and a sum, is compiled."""
    experts, (gated, combine) = torch.arange(model.experts, dtype=torch.int32, device="cuda"), compiled(model.gate)

    def block(b: Block) -> torch.Tensor:
        local, (of_w13, of_w2) = b.local().flatten(), b.biases or (None, None)
        if b.expert_map is not None:
            local = torch.where(local < 0, model.experts, local)
        ids, order = local.sort(stable=True)
        rows = b.hidden.index_select(0, order // model.top_k)
        ends_of = torch.searchsorted(ids, experts, right=True, out_int32=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device="cuda"))
        sums = torch._grouped_mm(rows, b.w13.transpose(-2, -1), offs=ends_of)
        made = torch._grouped_mm(gated(sums, of_w13, ids), b.w2.transpose(-2, -1), offs=ends_of)
        found: torch.Tensor = combine(made, places.view(b.ids.shape), b.weights, ends_of[-1], of_w2, b.local())
        return found

    return block


def of_vllm(model: Model) -> tuple[Callable[[Block], torch.Tensor] | None, str]:
    """vLLM's Triton experts, and whether it has configurations for them here; or None, and why there are none."""
    try:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts, get_moe_configs
    except Exception as error:  # whatever an import of it raises here, it is absent
        return None, f"absent ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    config, activation = VllmConfig(), MoEActivation[_VLLM_GATES[model.gate]]
    tuned = get_moe_configs(model.experts, model.inner, _VLLM_DTYPE) is not None

    def block(b: Block) -> torch.Tensor:
        with set_current_vllm_config(config):
            found: torch.Tensor = fused_experts(
                *(b.hidden, b.w13, b.w2, b.weights, b.ids, activation),
                global_num_experts=model.global_experts or model.experts,
                expert_map=b.expert_map,
                quant_config=biased_moe_quant_config(*b.biases) if b.biases else None,
            )
        return found

    return block, f"vllm {version('vllm')}, {'tuned' if tuned else 'untuned'}"


# --- measuring ---


def reference(b: Block, gate: str) -> torch.Tensor:
    """In float32, expert by expert, rounded to bf16 where ours is between launches."""
    out, local, epilogue = torch.zeros(b.hidden.shape, device="cuda"), b.local(), EPILOGUES[gate]
    for expert in local.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = torch.where(local == expert)
        of_w13, of_w2 = (bias[expert].float() for bias in b.biases) if b.biases else (0.0, 0.0)
        sums = b.hidden[tokens].float() @ b.w13[expert].float().t() + of_w13
        inner = apply_activation(torch, epilogue, sums).to(b.hidden.dtype)
        made = (inner.float() @ b.w2[expert].float().t() + of_w2).to(b.hidden.dtype)
        out.index_add_(0, tokens, made.float() * b.weights[tokens, slots, None])
    return out


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in the norm; of what must be zero, the norm itself."""
    return float((found.float() - wanted).norm() / (wanted.norm() or 1.0))


def run(library: runtime.Library, weights: Weights, tokens: int, repeats: int) -> dict[str, Any]:
    """Check and time one model at so many tokens.

    Raises:
        KernelMiss: the archive lacks a launch of it.
    """
    model, blocks = weights.model, weights.blocks(tokens)
    of_vllm_here, said = of_vllm(model)
    pieces = ours(library, model)
    contenders: dict[str, Callable[[Block], Any]] = {**pieces, "torch": of_torch(model)}
    if of_vllm_here is not None:
        contenders["vllm"] = of_vllm_here
    for b in blocks:
        for name in (*PIECES, "ours"):
            pieces[name](b)
    wanted = reference(blocks[0], model.gate)
    errors = {"ours": error_of(blocks[0].out, wanted)}
    errors |= {n: error_of(contenders[n](blocks[0]), wanted) for n in ("torch", "vllm") if n in contenders}
    turns: Any = blocks  # which are no operands of one operation
    times = measure.time_interleaved(contenders, turns, model.floor_us(tokens), repeats, graph_us=1000.0)
    m = {name: tokens * (model.top_k if name in ("gate_up", "down") else 1) for name in PIECES}
    best = {name: library.entry(s).best(m[name]) for name, s in model.signatures().items()}
    found: dict[str, Any] = {
        "model": model.name,
        "tokens": tokens,
        "sets": len(blocks),
        "floor_us": round(model.floor_us(tokens), 2),
        "vllm": said,
        "functions": best,
        "errors": {name: round(error, 6) for name, error in errors.items()},
        "us": {name: round(timing.us, 3) for name, timing in times.items()},
        "spread": {name: round(timing.spread, 4) for name, timing in times.items()},
    }
    for peer in ("torch", "vllm"):
        if peer in times:
            found[f"x_{peer}"] = round(times[peer].us / times["ours"].us, 4)
    return found


def line(found: dict[str, Any]) -> str:
    """One case, aligned."""
    us = found["us"]
    peers = " ".join(f"{us.get(p, math.nan):9.2f} {found.get(f'x_{p}', math.nan):7.3f}" for p in ("torch", "vllm"))
    parts = " ".join(f"{us[piece]:8.2f}" for piece in PIECES)
    over = us["ours"] / found["floor_us"]
    return (
        f"{found['model']:20s} {found['tokens']:5d} {us['ours']:9.2f} {over:7.2f} {peers} {parts} "
        f"{found['errors']['ours']:9.2e}"
    )


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    patch_argument(parser)
    parser.add_argument("--models", default=",".join(m.name for m in MODELS), help="names, or beginnings of them")
    parser.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=list(TOKENS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after this time")
    out_argument(parser)
    options = parser.parse_args()
    models = [m for m in MODELS if m.name.lower().startswith(tuple(options.models.lower().split(",")))]
    if not models:
        raise ArgumentError(f"no model begins with {options.models}; there are {', '.join(m.name for m in MODELS)}")
    end = time.monotonic() + 60 * options.minutes
    environment = measure.environment()
    library = runtime.load([options.archive, *options.patch])
    environment["archive_sha256"] = library.digest
    print(" ".join(f"{k}={v}" for k, v in environment.items()))
    print(f"vLLM: {of_vllm(models[0])[1].split(',')[0]}")
    columns = "us", "x floor", "torch us", "x torch", "vllm us", "x vllm", *PIECES, "error"
    widths = 9, 7, 9, 7, 9, 7, 8, 8, 8, 8, 9
    print(f"{'model':20s} {'T':>5s} " + " ".join(f"{c:>{w}s}" for c, w in zip(columns, widths, strict=True)))
    results: list[dict[str, Any]] = []
    left_out = []
    for model in models:
        weights = Weights(model, environment["l2_bytes"])
        for tokens in options.tokens:
            if time.monotonic() > end:
                left_out.append({"model": model.name, "tokens": tokens})
                continue
            try:
                results.append(run(library, weights, tokens, options.repeats))
                print(line(results[-1]), flush=True)
            except runtime.KernelMiss as miss:
                print(f"{model.name:20s} {tokens:5d} {str(miss).splitlines()[0]}", flush=True)
                results.append({"model": model.name, "tokens": tokens, "miss": str(miss)})
            write(options.out, environment, left_out=left_out, results=results)
        del weights
        torch.cuda.empty_cache()
    for peer in ("torch", "vllm"):
        ratios = [r[f"x_{peer}"] for r in results if f"x_{peer}" in r]
        if ratios:
            print(f"x {peer}: geomean {geomean(ratios):.3f}, worst {min(ratios):.3f}, of {len(ratios)} cases")
    write(options.out, environment, left_out=left_out, results=results)
    wrong = [r for r in results if r.get("errors", {}).get("ours", 0.0) > MAX_ERROR or "miss" in r]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(ends(main))
