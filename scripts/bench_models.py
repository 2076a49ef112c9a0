"""Prefill and decode of Hugging Face transformers' models with an archive and without it, in one process; needs a GPU.

Real configurations with random weights, in bf16 or, but for the last layer, in e4m3 (against `torch._scaled_mm`).
Decode is one step of the whole model with a static key-value cache, captured into a CUDA graph; prefill is one forward
pass of a prompt, captured too. Both ways take turns, and their logits are compared with each other and with those of
layers that add up in f32 and round once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import ends, geomean, out_argument, write
from torch import nn

import runtime
import runtime.torch
from aot.tune import measure

# From the models' config.json on Hugging Face.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": (
        "Llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-8b": (
        "Qwen3",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": False,
        },
    ),
}


def model_of(name: str, layers: int | None, device: str) -> Any:
    """The model with random weights in bf16."""
    import transformers

    family, fields = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**fields)
    config.num_hidden_layers = layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = getattr(transformers, f"{family}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


@torch.compile(dynamic=True)
def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` (M, K) in e4m3, and the scale (M, 1) of each row."""
    scale = (x.abs().amax(-1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-12)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


@torch.compile(dynamic=True)
def gated(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of gate and up (M, N) side by side."""
    gate, up = x.chunk(2, -1)
    return nn.functional.silu(gate) * up


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A @ B^T in f32, of f32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return a @ b.t()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Fp8Linears(nn.Module):
    """Linear layers that read one input, as one GEMM of e4m3 with a scale for each token and each output channel."""

    library: Any = None  # computes it; torch does where this is None, in f32 where it is "reference"

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantised(torch.cat([layer.weight for layer in layers]))
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.result: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, scale = quantised(x.flatten(0, -2))
        if self.library == "reference":
            found = exact(a.float() * scale, self.weight.float() * self.scale).to(x.dtype)
        elif self.library is None:
            more = {"scale_a": scale, "scale_b": self.scale.t(), "out_dtype": x.dtype, "use_fast_accum": False}
            found = torch._scaled_mm(a, self.weight.t(), **more)
        else:
            scales = {"scale_a": scale.view(-1), "scale_b": self.scale.view(-1)}
            found = runtime.torch.gemm(self.library, a, self.weight, dtype=x.dtype, **scales)
        return found.view(*x.shape[:-1], -1)


class Fp8Part(nn.Module):
    """Columns of the result of layers together, of which the first that is called computes all."""

    def __init__(self, whole: Fp8Linears, start: int, end: int) -> None:
        super().__init__()
        self.start, self.end = start, end
        self.whole = [whole]  # whose tensors are not this module's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (whole,) = self.whole
        if self.start == 0:
            whole.result = whole(x)
        assert whole.result is not None
        return whole.result[..., self.start : self.end]


class Fp8Gated(nn.Module):
    """An MLP with SwiGLU."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up, self.down = Fp8Linears(mlp.gate_proj, mlp.up_proj), Fp8Linears(mlp.down_proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(gated(self.gate_up(x)))
        return found


def quantise(model: Any) -> None:
    """Let the model's layers compute in e4m3, all but the last one, as fp8 checkpoints keep it."""
    for layer in model.model.layers:
        attention = layer.self_attn
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        whole, start = Fp8Linears(*parts), 0
        for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
            setattr(attention, name, Fp8Part(whole, start, start + part.out_features))
            start += part.out_features
        attention.o_proj, layer.mlp = Fp8Linears(attention.o_proj), Fp8Gated(layer.mlp)


class Step:
    """One forward pass over fixed tensors: `tokens` for each of `batch` sequences, behind `context` that are cached."""

    def __init__(self, model: Any, batch: int, tokens: int, context: int) -> None:
        from transformers import StaticCache

        self.model, self.context = model, context
        device = model.device
        generator = torch.Generator(device).manual_seed(batch * 1000 + tokens)
        vocabulary = model.config.vocab_size
        self.ids = torch.randint(vocabulary, (batch, tokens), device=device, generator=generator)
        self.cache = StaticCache(config=model.config, max_cache_len=context + tokens)
        if context:  # what is there may be anything, but is the same for both
            prompt = torch.randint(vocabulary, (batch, context), device=device, generator=generator)
            self._forward(prompt, 0)

    def __call__(self) -> Any:
        """The logits of the last token of each sequence."""
        return self._forward(self.ids, self.context)

    @torch.no_grad()
    def _forward(self, ids: Any, start: int) -> Any:
        # A static layer counts what it was given, on the device: each step begins anew at `start`.
        lengths = [layer.cumulative_length for layer in self.cache.layers if layer.is_initialized]
        if lengths:
            torch._foreach_zero_(lengths)
            torch._foreach_add_(lengths, start)
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).unsqueeze(0)
        said = self.model(
            input_ids=ids,
            position_ids=positions.expand(ids.shape[0], -1),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return said.logits


def captured(step: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of a step, and the tensor that holds its result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def time_both(graphs: dict[str, Any], repeats: int, least_ms: float) -> dict[str, dict[str, float]]:
    """Milliseconds of each graph, in turns that last `least_ms`."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    counts = {}
    for name, graph in graphs.items():
        counts[name] = max(1, round(least_ms / max(_ms(graph, 1), 1e-3)))
    for _ in range(repeats):
        for name, graph in graphs.items():
            samples[name].append(_ms(graph, counts[name]))
    return {
        n: {"ms": round(statistics.median(s), 4), "spread": round((max(s) - min(s)) / statistics.median(s), 4)}
        for n, s in samples.items()
    }


def _ms(graph: Any, count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def difference(x: Any, y: Any) -> float:
    """||x - y|| / ||y||."""
    return float((x.float() - y.float()).norm() / y.float().norm())


def reference_logits(model: Any, case: tuple[int, int, int]) -> Any:
    """What the model gives where each linear layer adds up in f32 and rounds once."""

    def forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return exact(x.float(), layer.weight.float()).to(x.dtype)

    kept, nn.Linear.forward = nn.Linear.forward, forward
    Fp8Linears.library = "reference"
    try:
        return Step(model, *case)()
    finally:
        nn.Linear.forward = kept
        Fp8Linears.library = None


def compare(model: Any, library: Any, case: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """One case (batch, tokens, context) with torch alone and with the archive."""
    graphs, logits = {}, {}
    kept: list[Any] = [[p.data for p in model.parameters()]]  # that graphs use: replace_linears lays weights out anew
    for name in ("torch", "archive"):
        if name == "archive":
            runtime.torch.replace_linears(model, library)
            Fp8Linears.library = library
        step = Step(model, *case)
        graphs[name], out = captured(step)
        graphs[name].replay()
        torch.cuda.synchronize()
        logits[name] = out.clone()
        kept += [step, out]
    times = time_both(graphs, repeats, 150.0)
    graphs.clear()
    runtime.torch.restore_linears(model)
    Fp8Linears.library = None
    reference = reference_logits(model, case)
    batch, tokens, context = case
    return {
        "batch": batch,
        "tokens": tokens,
        "context": context,
        **{name: found | {"tokens_per_s": round(batch * tokens / found["ms"] * 1e3)} for name, found in times.items()},
        "speedup": round(times["torch"]["ms"] / times["archive"]["ms"], 4),
        "difference": difference(logits["archive"], logits["torch"]),
        "error": difference(logits["archive"], reference),
        "torch_error": difference(logits["torch"], reference),
        "same_best_token": float((logits["archive"].argmax(-1) == logits["torch"].argmax(-1)).float().mean()),
        "finite": bool(logits["archive"].isfinite().all()),
    }


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="a tuned archive that has the model's layers")
    parser.add_argument("--model", choices=list(MODELS), default="llama-3.1-8b")
    parser.add_argument("--fp8", action="store_true", help="layers in e4m3, with scales of rows and columns")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--batch", type=lambda t: [int(x) for x in t.split(",")], default=[1, 16, 64])
    parser.add_argument("--prefill", type=lambda t: [int(x) for x in t.split(",")], default=[512, 2048])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    out_argument(parser)
    options = parser.parse_args()
    library = runtime.load(options.archive, on_miss="error")
    library.preload()
    model = model_of(options.model, options.layers, "cuda")
    if options.fp8:
        quantise(model)
    report = runtime.torch.replace_linears(model, library)
    print(report)
    runtime.torch.restore_linears(model)
    cases = [(batch, 1, options.context) for batch in options.batch] + [(1, tokens, 0) for tokens in options.prefill]
    results = []
    for case in cases:
        results.append(compare(model, library, case, options.repeats))
        print(" ".join(f"{k}={v}" for k, v in results[-1].items()), flush=True)
    summary = {"geomean": round(geomean(r["speedup"] for r in results), 4)}
    environment = measure.environment() | {"archive_sha256": library.digest, "transformers": _version()}
    more = {"model": options.model, "fp8": options.fp8, "layers": options.layers}
    write(options.out, environment, **more, summary=summary, results=results)
    return 0 if all(r["finite"] for r in results) else 1


def _version() -> str:
    from report import version

    return version("transformers")


if __name__ == "__main__":
    sys.exit(ends(main))
