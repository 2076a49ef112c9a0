"""An SGLang engine on made-up weights, without an archive and with it: decode, prefill and answers; needs a GPU.

    python scripts/bench_sglang.py MODEL --archive universal --out sglang.json
    python scripts/bench_sglang.py MODEL --archive model.aot --layers 12 --engine '{"disable_cuda_graph": true}'
    python scripts/bench_sglang.py MODEL --out stock.json

MODEL is a folder with a config.json. Weights are drawn as `scripts/bench_vllm.py` draws them, and what is measured is
the same. The engine without the archive runs first, then the other, each with a scheduler in a process of its own. The
exit status is 1 where an archive was to serve and no layer is served, or none of a model's experts, or where a compiler
was started for this project's kernels (compilations.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import compilations
from bench_vllm import (
    ANSWER_PROMPTS,
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    TEXT_TOKENS,
    compared,
    draw,
    drawn_prompts,
    engine_options,
)
from report import ends, out_argument, version, write

from runtime.errors import ArgumentError
from runtime.plugin.hooks import is_marked
from runtime.plugin.settings import KEY

# How the plugin marks layers and weights that it serves (runtime/plugin/served.py, runtime/sglang/fp8.py).
LAYER_MARKS, WEIGHT_MARK = ("_cute_aot_plain", "_cute_aot_biased"), "_cute_aot_scaled"


def main() -> int:
    options = _options().parse_args()
    if not (options.model / "config.json").is_file():
        raise ArgumentError(f"{options.model}: has no config.json; name the folder of a model")
    found: dict[str, Any] = {"stock": _run(options, [])}
    lacking = False
    if options.archive:
        found["served"] = served = _run(options, options.archive)
        lacking = not served["served"] or bool(served["experts"] and not served["experts_served"])
        found["compared"] = compared(served, found["stock"])
        for name, value in found["compared"].items():
            print(f"{name:40} {value}")
    about = {"model": options.model.name, **({"model_layers": options.layers} if options.layers else {})}
    write(options.out, _environment(), **about, **found)
    counts = [each["compilations"] for name, each in found.items() if name != "compared"]
    ours = any(count is not None and count[compilations.OURS] for count in counts)
    return 1 if lacking or ours else 0


def _options() -> argparse.ArgumentParser:
    parser = engine_options(__doc__, "Engine")
    parser.add_argument("--zero", help="set this weight to 0 beside the archive, to see that answers differ")
    out_argument(parser)
    return parser


def _run(options: argparse.Namespace, archive: list[str]) -> dict[str, Any]:
    """Start an engine, measure it and end it."""
    print(f"--- {'served' if archive else 'stock'}", flush=True)
    began = time.perf_counter()
    engine = _engine(options, archive)
    try:
        ready_s = time.perf_counter() - began
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "drawn.json"
            engine.collective_rpc("draw_weights", out=str(out), zero=options.zero if archive else None)
            figures: dict[str, Any] = {"ready_s": round(ready_s, 1), **json.loads(out.read_text())}
        print(f"ready after {ready_s:.1f} s; {json.dumps(figures)}", flush=True)
        figures["decode"] = {str(batch): _decode(engine, batch, options) for batch in options.batches}
        figures["prefill"] = {str(tokens): _prefill(engine, tokens, options.repeats) for tokens in options.prompts}
        figures["answers"] = _answers(engine)
        figures["compilations"] = compiled = _compiled(engine)
        print(compilations.said(compiled), flush=True)
    finally:
        engine.shutdown()
    return figures


def _engine(options: argparse.Namespace, archive: list[str]) -> Any:
    from sglang.srt.entrypoints import engine  # sglang.Engine is no class, but what imports it when called

    class Engine(engine.Engine):
        run_scheduler_process_func = staticmethod(scheduler_process)

    overrides: dict[str, Any] = {"num_hidden_layers": options.layers} if options.layers else {}
    if archive:
        overrides[KEY] = archive
    settings = {
        "context_length": 4096,
        "disable_radix_cache": True,  # or a repeated prompt would cost nothing
        "log_level": "info" if archive else "warning",  # the plugin's line says what is served
        "random_seed": 0,
        **options.engine,
    }
    return Engine(
        model_path=str(options.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        json_model_override_args=json.dumps(overrides),
        **settings,
    )


def _compiled(engine: Any) -> compilations.Counted | None:
    """What was compiled in an engine's schedulers so far, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        engine.collective_rpc("write_compilations", folder=folder)
        return compilations.together(json.loads(file.read_text()) for file in Path(folder).iterdir())


# --- in a scheduler's process ---


def scheduler_process(server_args: Any, *arguments: Any, **words: Any) -> None:
    """SGLang's own, watched for what it compiles, after the plugin was registered as the entry point of the installed
    distribution does it, where there is an archive."""
    compilations.watch()
    from sglang.srt.managers import scheduler

    if KEY in server_args.json_model_override_args:
        from runtime.sglang import register

        register()
    scheduler.Scheduler.draw_weights = draw_weights
    scheduler.Scheduler.write_compilations = write_compilations
    scheduler.run_scheduler_process(server_args, *arguments, **words)


def draw_weights(scheduler: Any, out: str, zero: str | None) -> None:
    """Draw a scheduler's weights, and write to a file how many layers are served."""
    model = scheduler.tp_worker.model_runner.model
    draw(model, zero)
    Path(out).write_text(json.dumps(served_layers(model)))


def write_compilations(scheduler: Any, folder: str) -> None:
    """Write what a scheduler compiled to a file of its own in a folder."""
    (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(compilations.counted()))


def served_layers(model: Any) -> dict[str, int]:
    """How many layers a model has and how many of them the archive computes, and the same of layers of experts."""
    holders = [m for m in model.modules() if getattr(m, "quant_method", None) is not None]
    layers = [m for m in holders if hasattr(m, "weight")]
    experts = [m for m in holders if hasattr(m, "w13_weight")]
    served = [m for m in layers if any(hasattr(m, mark) for mark in LAYER_MARKS) or hasattr(m.weight, WEIGHT_MARK)]
    runners = [getattr(m.quant_method, "runner", None) for m in experts]
    experts_served = sum(is_marked(getattr(runner, "fused_func", None)) for runner in runners)
    counts = {"layers": len(layers), "served": len(served)}
    return {**counts, "experts": len(experts), "experts_served": experts_served}


# --- measuring ---


def _generate(engine: Any, prompts: list[list[int]], tokens: int, **words: Any) -> tuple[float, list[dict[str, Any]]]:
    """Seconds, and what was generated."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": tokens}
    began = time.perf_counter()
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling, **words)
    return time.perf_counter() - began, outputs


def _decode(engine: Any, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Output tokens a second after the first of each sequence: the time of `tokens` less that of one."""
    rates = []
    for repeat in range(-1, options.repeats):  # the first warms up
        prompts = drawn_prompts(batch, PROMPT_TOKENS, repeat)
        first_s, _ = _generate(engine, prompts, 1)
        all_s, _ = _generate(engine, prompts, options.tokens)
        rates.append(batch * (options.tokens - 1) / (all_s - first_s))
    rates = rates[1:]
    print(f"decode, batch {batch}: {statistics.median(rates):.1f} tokens/s", flush=True)
    return {"tokens_per_s": round(statistics.median(rates), 1), "all": [round(r, 1) for r in rates]}


def _prefill(engine: Any, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds from a prompt to its first token."""
    times = [_generate(engine, drawn_prompts(1, tokens, r), 1)[0] for r in range(-2, 2 * repeats)][2:]
    print(f"prefill of {tokens}: {statistics.median(times) * 1e3:.2f} ms", flush=True)
    return {"s": round(statistics.median(times), 5), "all": [round(t, 5) for t in times]}


def _answers(engine: Any) -> dict[str, Any]:
    """Log-probabilities of the tokens of given texts, and greedy tokens after others."""
    _, read = _generate(engine, drawn_prompts(4, TEXT_TOKENS, 0), 1, return_logprob=True, logprob_start_len=0)
    text = [[round(step[0], 5) for step in each["meta_info"]["input_token_logprobs"][1:]] for each in read]
    _, said = _generate(engine, drawn_prompts(ANSWER_PROMPTS, PROMPT_TOKENS, 99), ANSWER_TOKENS)
    return {"text_logprobs": text, "tokens": [each["output_ids"] for each in said]}


def _environment() -> dict[str, Any]:
    from aot.tune import measure

    return {**measure.environment(), **{name: version(name) for name in ("sglang", "sglang-kernel")}}


if __name__ == "__main__":
    sys.exit(ends(main))
