"""Prefill and decode of Hugging Face transformers' models with an archive and without it, in one process; needs a GPU.

Real configurations with random weights. Decode is one step of the whole model with a static key-value cache, captured
into a CUDA graph; prefill is one forward pass of a prompt, captured too. Both ways take turns, and their logits are
compared with each other, beside what torch gives when it runs again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import geomean, out_argument, write

import runtime
import runtime.torch
from aot import measure

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


class Step:
    """One forward pass over fixed tensors: `tokens` for each of `batch` sequences, behind `context` that are cached."""

    def __init__(self, model: Any, batch: int, tokens: int, context: int) -> None:
        from transformers import StaticCache

        self.model = model
        device = model.device
        generator = torch.Generator(device).manual_seed(batch * 1000 + tokens)
        vocabulary = model.config.vocab_size
        self.ids = torch.randint(vocabulary, (batch, tokens), device=device, generator=generator)
        self.positions = torch.arange(context, context + tokens, device=device)
        self.cache = StaticCache(config=model.config, max_cache_len=context + tokens)
        if context:  # what is there may be anything, but is the same for both
            prompt = torch.randint(vocabulary, (batch, context), device=device, generator=generator)
            self._forward(prompt, torch.arange(context, device=device))

    def __call__(self) -> Any:
        """The logits of the last token of each sequence."""
        return self._forward(self.ids, self.positions)

    @torch.no_grad()
    def _forward(self, ids: Any, positions: Any) -> Any:
        said = self.model(
            input_ids=ids,
            position_ids=positions.unsqueeze(0).expand(ids.shape[0], -1),
            cache_position=positions,
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


def compare(model: Any, library: Any, case: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """One case (batch, tokens, context) with torch alone and with the archive."""
    graphs, logits = {}, {}
    kept: list[Any] = [[p.data for p in model.parameters()]]  # that graphs use: replace_linears lays weights out anew
    for name in ("torch", "archive"):
        if name == "archive":
            runtime.torch.replace_linears(model, library)
        step = Step(model, *case)
        graphs[name], out = captured(step)
        graphs[name].replay()
        torch.cuda.synchronize()
        logits[name] = out.clone()
        kept += [step, out]
    times = time_both(graphs, repeats, 150.0)
    graphs.clear()
    runtime.torch.restore_linears(model)
    again = Step(model, *case)()
    batch, tokens, context = case
    return {
        "batch": batch,
        "tokens": tokens,
        "context": context,
        **{name: found | {"tokens_per_s": round(batch * tokens / found["ms"] * 1e3)} for name, found in times.items()},
        "speedup": round(times["torch"]["ms"] / times["archive"]["ms"], 4),
        "difference": difference(logits["archive"], logits["torch"]),
        "difference_of_torch_again": difference(again, logits["torch"]),
        "same_best_token": float((logits["archive"].argmax(-1) == logits["torch"].argmax(-1)).float().mean()),
        "finite": bool(logits["archive"].isfinite().all()),
    }


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="a tuned archive that has the model's layers")
    parser.add_argument("--model", choices=list(MODELS), default="llama-3.1-8b")
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
    write(options.out, environment, model=options.model, layers=options.layers, summary=summary, results=results)
    return 0 if all(r["finite"] for r in results) else 1


def _version() -> str:
    from report import version

    return version("transformers")


if __name__ == "__main__":
    sys.exit(main())
