"""Time the experts of mixtures, whole and launch by launch, against torch and vLLM, on one GPU, with cold L2.

An archive of benchmarks/moe.yaml has what is timed: `runtime.torch.moe` of four models in bf16, T tokens each, whose
experts are drawn anew for each of several sets of weights, all alike likely; one of benchmarks/moe_fp8.yaml has three
with weights in e4m3, with scales of blocks (`scripts/moe_blocks.py`). Against it, in turns, run torch's own operations
(sort, gather, torch._grouped_mm, a compiled gate, torch._grouped_mm, a compiled gather and sum; torch multiplies
nothing with scales of blocks, so its weights are widened to bf16 before) and, where vLLM can be imported, its Triton
`fused_experts`, with the configurations that it was tuned to for this GPU where it has them ("tuned"), on the same
weights. Every contender is a CUDA graph of launches over the sets in turn. The result is checked against float32.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from moe_blocks import MAX_ERROR, MODELS, Block, Model, Weights, error_of, reference
from report import ends, geomean, out_argument, patch_argument, version, write

import runtime
import runtime.torch as binding
from aot.tune import measure
from runtime.errors import ArgumentError
from runtime.gemm.fallback import apply_activation
from runtime.grouped_gemm import OVERLAP_OF_EXPERTS
from runtime.numbers.epilogue import EPILOGUES
from runtime.numbers.scaling import SCALE_BLOCK
from runtime.torch.experts import expected_rows

TOKENS = 1, 8, 32, 128, 512, 2048
PIECES = "permute", "gate_up", "quantise", "fused", "down", "combine"
_VLLM_GATES = {"swiglu": "SILU", "swiglu_clamped_interleaved": "SWIGLUOAI"}  # by the gate of grouped_gemm
_VLLM_DTYPES = {"bf16": None, "e4m3": "fp8_w8a8"}  # how vLLM names the types of its tuned configurations


# --- contenders ---


def ours(library: runtime.Library, model: Model) -> dict[str, Callable[[Block], Any]]:
    """The whole block, and each of its launches."""
    scaling = {"scaling": "block"} if model.scaled else {}

    def scales(b: Block, which: int, of_rows: torch.Tensor | None) -> dict[str, Any]:
        return {"scale_a": of_rows, "scale_b": b.weights.scales[which]} if model.scaled else {}

    def expected(b: Block) -> int:
        return expected_rows(b.ids, b.weights.w13, b.expert_map)

    def whole(b: Block) -> None:
        w = b.weights
        more = dict(zip(("w13_bias", "w2_bias"), w.biases, strict=False))
        more |= dict(zip(("w13_scale", "w2_scale"), w.scales, strict=False))
        given = b.hidden, w.w13, w.w2, b.ids, b.router
        binding.moe(library, *given, expert_map=b.expert_map, out=b.out, activation=model.gate, **more)

    def permute(b: Block) -> None:
        more = {"experts": model.experts, "expert_map": b.expert_map, "out": b.permuted, **scaling}
        library.call("moe_permute", b.hidden, b.ids, **more)

    def gate_up(b: Block) -> None:
        rows, ends, _, *scale = b.permuted
        more = {"bias": b.weights.biases[0] if b.weights.biases else None, **scales(b, 0, next(iter(scale), None))}
        more["expected_rows"] = expected(b)
        library.grouped_gemm(
            rows, b.weights.w13, ends, epilogue=model.gate, overlap=OVERLAP_OF_EXPERTS, out=b.inner, **more
        )

    def quantise(b: Block) -> None:
        library.call("quantise", b.inner, b.permuted[1], out=b.narrow, **scaling)

    def fused(b: Block) -> None:
        rows, ends, _, scale = b.permuted
        more = {
            "scale_a": scale,
            "scale_b": b.weights.scales[0],
            "overlap": OVERLAP_OF_EXPERTS,
            "expected_rows": expected(b),
        }
        narrow, scale = b.narrow
        library.grouped_gemm(rows, b.weights.w13, ends, epilogue=model.gate, out=narrow, scale_d=scale, **more)

    def down(b: Block) -> None:
        rows, *scale = b.narrow or (b.inner,)
        more = {"bias": b.weights.biases[1] if b.weights.biases else None, **scales(b, 1, next(iter(scale), None))}
        more["expected_rows"] = expected(b)
        library.grouped_gemm(rows, b.weights.w2, b.permuted[1], overlap=OVERLAP_OF_EXPERTS, out=b.made, **more)

    def combine(b: Block) -> None:
        library.call("moe_combine", b.made, b.permuted[2], b.router, out=b.out)

    launches = dict(zip(PIECES, (permute, gate_up, quantise, fused, down, combine), strict=True))
    return {"ours": whole, **{name: launches[name] for name in wanted_of(library, model)}}


def wanted_of(library: runtime.Library, model: Model) -> dict[str, Any]:
    """The signatures of the launches that are timed one by one, but for "fused" where the archive lacks it."""
    found = model.signatures()
    try:
        if "fused" in found:
            library.entry(found["fused"])
    except runtime.KernelMiss:
        del found["fused"]
    return found


@functools.cache
def compiled(gate: str) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """The gate of sums, and the sum of each token's rows by their weights, as torch compiles them, with biases where
    there are any: not as it compiled them before for other extents, which took up to four times as long."""
    torch._inductor.config.force_disable_caches = True

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
        local, (of_w13, of_w2), (w13, w2) = b.local().flatten(), b.weights.biases or (None, None), b.weights.wide
        if b.expert_map is not None:
            local = torch.where(local < 0, model.experts, local)
        ids, order = local.sort(stable=True)
        rows = b.hidden.index_select(0, order // model.top_k)
        ends_of = torch.searchsorted(ids, experts, right=True, out_int32=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device="cuda"))
        sums = torch._grouped_mm(rows, w13.transpose(-2, -1), offs=ends_of)
        made = torch._grouped_mm(gated(sums, of_w13, ids), w2.transpose(-2, -1), offs=ends_of)
        found: torch.Tensor = combine(made, places.view(b.ids.shape), b.router, ends_of[-1], of_w2, b.local())
        return found

    return block


def of_vllm(model: Model) -> tuple[Callable[[Block], torch.Tensor] | None, str]:
    """vLLM's Triton experts, and whether it has configurations for them here; or None, and why there are none."""
    try:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config, fp8_w8a8_moe_quant_config
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts, get_moe_configs
    except Exception as error:  # whatever an import of it raises here, it is absent
        return None, f"absent ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    config, activation = VllmConfig(), MoEActivation[_VLLM_GATES[model.gate]]
    block = [SCALE_BLOCK, SCALE_BLOCK] if model.scaled else []
    tuned = get_moe_configs(model.experts, model.inner, _VLLM_DTYPES[model.dtype], *block) is not None

    def quantised(b: Block) -> Any:
        if model.scaled:
            return fp8_w8a8_moe_quant_config(*b.weights.scales, block_shape=block)
        return biased_moe_quant_config(*b.weights.biases) if b.weights.biases else None

    def experts(b: Block) -> torch.Tensor:
        with set_current_vllm_config(config):
            found: torch.Tensor = fused_experts(
                *(b.hidden, b.weights.w13, b.weights.w2, b.router, b.ids, activation),
                global_num_experts=model.global_experts or model.experts,
                expert_map=b.expert_map,
                quant_config=quantised(b),
            )
        return found

    return experts, f"vllm {version('vllm')}, {'tuned' if tuned else 'untuned'}"


# --- measuring ---


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
        for name in pieces:
            pieces[name](b)
    wanted = reference(blocks[0], model.gate)
    errors = {"ours": error_of(blocks[0].out, wanted)}
    errors |= {n: error_of(contenders[n](blocks[0]), wanted) for n in ("torch", "vllm") if n in contenders}
    turns: Any = blocks  # which are no operands of one operation
    times = measure.time_interleaved(contenders, turns, model.floor_us(tokens), repeats, graph_us=1000.0)
    rows = expected_rows(blocks[0].ids, blocks[0].weights.w13, blocks[0].expert_map)
    m = dict.fromkeys(PIECES, rows)
    m |= {"permute": tokens, "combine": tokens, "quantise": tokens * model.top_k}
    best = {name: library.entry(s).best(m[name]) for name, s in wanted_of(library, model).items()}
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
    parts = " ".join(f"{us.get(piece, math.nan):8.2f}" for piece in PIECES)
    over = us["ours"] / found["floor_us"]
    return (
        f"{found['model']:24s} {found['tokens']:5d} {us['ours']:9.2f} {over:7.2f} {peers} {parts} "
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
    widths = 9, 7, 9, 7, 9, 7, *(8 for _ in PIECES), 9
    print(f"{'model':24s} {'T':>5s} " + " ".join(f"{c:>{w}s}" for c, w in zip(columns, widths, strict=True)))
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
                print(f"{model.name:24s} {tokens:5d} {str(miss).splitlines()[0]}", flush=True)
                results.append({"model": model.name, "tokens": tokens, "miss": str(miss)})
            write(options.out, environment, left_out=left_out, results=results)
        del weights
        torch.cuda.empty_cache()
    for peer in ("torch", "vllm"):
        ratios = [r[f"x_{peer}"] for r in results if f"x_{peer}" in r]
        if ratios:
            print(f"x {peer}: geomean {geomean(ratios):.3f}, worst {min(ratios):.3f}, of {len(ratios)} cases")
    write(options.out, environment, left_out=left_out, results=results)
    most = {model.name: MAX_ERROR[model.dtype] for model in models}
    wrong = [r for r in results if r.get("errors", {}).get("ours", 0.0) > most[r["model"]] or "miss" in r]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(ends(main))
