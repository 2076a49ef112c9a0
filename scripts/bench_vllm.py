"""vLLM engines on made-up weights: decode, prefill and what they answer, with archives or without; needs a GPU.

    python scripts/bench_vllm.py MODEL --out stock.json
    python scripts/bench_vllm.py MODEL --archive universal --against stock.json --out served.json
    python scripts/bench_vllm.py MODEL... --archive model.aot --archive universal --beside-stock --out both.json
    python scripts/bench_vllm.py benchmarks/gpt-oss-20b --archive model.aot --beside-stock --out gpt_oss.json

MODEL is a folder with a config.json. vLLM's dummy weights are so small that layers hardly matter; here they are drawn
anew, each layer's outputs as large as its inputs, the same in every run, so routers choose experts at random. Weights
in 4 bits are drawn before vLLM or the archive lays them out. With --unquantised the model is as if its config did not
say how its weights are quantised. With --beside-stock each model runs without and with the archives: all engines start
at once, so the GPU must hold them all, and measure in turn, repeat by repeat. Each has --kv-gb for its cache. Answers
of the two are compared, or with --against those of one run with another's: log-probabilities of a given text, and
greedy tokens up to the first that differs. Two runs of vLLM itself that differ in how GEMMs are computed say how much
is to be expected: --stock-again makes the second beside the others, such as with TORCH_BLAS_PREFER_CUBLASLT=1 in bf16
or VLLM_DISABLED_KERNELS=CutlassFP8ScaledMMLinearKernel in fp8. If --most-difference is not given, it is then twice
their mean difference of log-probabilities; where these are equal, as cuBLASLt leaves those of a text, greedy tokens of
the archives are to agree with stock's for half as long as stock's own. What is compiled, from before an engine starts
until all was measured, is counted by whose code asked for it (compilations.py). With --reload-minutes the archives are
rewritten and loaded again under random requests, before answers are compared. With --profile, kernels of so many decode
steps at each batch, and of so many prefills of each length, are timed by what they are for, and the GPU's waits by the
kernels behind them (kernel_times.py), after decoding, prefills and traffic. With --lengths prompts are prefilled whose
lengths are new to the process, then others of the same lengths: what a new one takes longer is what a new M costs.

The exit status is 1 where an archive was to serve and no layer is served, or none of a model's experts, where a
compiler was started for this project's kernels, where answers differ by more than --most-difference, or where not all
engines were done after --timeout.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import multiprocessing.util  # noqa: F401, first: at exit vLLM's finalizers must end engines before this waits for them
import os
import random
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import compilations
import kernel_times
import reloads
import traffic
import turns
from report import AGAIN, ends, geomean, out_argument, write
from turns import FLAG, Turns

from runtime.errors import ArgumentError

PROMPT_TOKENS = 128
E2M1, UE8M0_OF_ONE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), 127
_INT4_WORDS = "qweight", "qzeros", "weight_packed", "weight_zero_point"  # how parameters end that are drawn as int32
_INT4_DEVIATION = 5.5  # of a code less 8, or less a zero point: between those of each
_PROJECTIONS = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
BOTH = STOCK, SERVED = "stock", "served"
ANSWER_PROMPTS, ANSWER_TOKENS, TEXT_TOKENS = 32, 64, 512
LENGTHS, MOST_LENGTHS = (513, 4000), 1000  # beyond vLLM's largest CUDA graph; to fit with an answer in max_model_len
PROFILED_AFTER = 8  # steps, of which the first are prefills: of fewer tokens than so many steps may have
WARM_LENGTHS = 514, 720, 1026, 1440, 2050, 2880, 3602  # never drawn; Triton compiles once more for multiples of 16
MEAN_DIFFERENCE = "log-probabilities, mean difference"
GREEDY = "greedy tokens before the first other"


def main() -> int:
    options = _options().parse_args()
    if not 0 <= options.lengths <= MOST_LENGTHS:
        raise ArgumentError(f"--lengths takes 0 to {MOST_LENGTHS}, found {options.lengths}")
    if options.profile < 0:
        raise ArgumentError(f"--profile takes 0 steps or more, found {options.profile}")
    if options.traffic_seed != traffic.USUAL_SEED and not options.traffic:
        raise ArgumentError("--traffic-seed takes --traffic, whose requests it draws")
    if options.beside_stock:
        return _beside_stock(options)
    if len(options.model) > 1:
        raise ArgumentError("several models are for --beside-stock; run this for each by itself")
    if options.stock_again:
        raise ArgumentError("--stock-again takes --beside-stock, which runs stock a first time")
    if options.most_difference is not None and not options.against:
        raise ArgumentError("--most-difference takes --against or --beside-stock, which say what answers differ from")
    (model,) = options.model
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions of this script are sent to workers
    if options.reload_minutes and not options.archive:
        raise ArgumentError("--reload-minutes takes --archive, which is what is loaded again")
    with contextlib.ExitStack() as stack:
        options.traces = Path(stack.enter_context(tempfile.TemporaryDirectory())) if options.profile else None
        files = stack.enter_context(reloads.copied(options.archive)) if options.reload_minutes else None
        options.archive = options.archive if files is None else files.paths
        return _one_engine(options, model, files)


def _one_engine(options: argparse.Namespace, model: Path, files: reloads.Files | None) -> int:
    """The exit status of a run of one engine; `files` are its archives where they are to be loaded again."""
    compilations.watch()
    with _folder(model, options.unquantised) as folder:
        began = time.perf_counter()
        is_packed = _is_packed(folder)
        engine = _engine(options, folder, is_packed)
        ready_s = time.perf_counter() - began
    served = engine.apply_model(_served if is_packed else functools.partial(draw, zero=options.zero))[0]
    of_experts = (
        f" and {served['experts_served']} of {served['experts']} layers of experts" if served["experts"] else ""
    )
    what = f"{served['served']} of {served['layers']} layers{of_experts}"
    print(f"{model.name}: ready after {ready_s:.1f} s; {what} served by the archive", flush=True)
    figures: dict[str, Any] = {
        "model": model.name,
        "unquantised": options.unquantised,
        "ready_s": round(ready_s, 1),
        **served,
    }
    if options.layers:
        figures["model_layers"] = options.layers
    figures |= _measured(engine, options, files)
    figures["compilations"] = compiled = _compiled(engine)
    print(compilations.said(compiled), flush=True)
    if options.against:
        _compare(figures, options.against.name, json.loads(options.against.read_text()))
    write(options.out, _environment(), **figures)
    lacking = not served["served"] or (served["experts"] and not served["experts_served"])
    ours = compiled is not None and compiled[compilations.OURS] > 0
    return 1 if (options.archive and lacking) or ours or differs([figures], options.most_difference) else 0


def _measured(engine: Any, options: argparse.Namespace, files: reloads.Files | None) -> dict[str, Any]:
    """All that is measured of an engine, each repeat in a turn of its own."""
    mine = Turns(options.turns)
    figures: dict[str, Any] = {"decode": {}, "prefill": {}}
    if options.lengths:  # first, while the engine has computed no such lengths
        figures["lengths"] = _lengths(engine, mine, options.lengths)
    rates: dict[str, list[float]] = {str(batch): [] for batch in options.batches}
    times: dict[str, list[float]] = {str(tokens): [] for tokens in options.prompts}
    for repeat in range(-1, options.repeats):  # the first warms up
        with mine.turn():
            for batch in options.batches:
                rates[str(batch)].append(_decode(engine, batch, repeat, options.tokens))
            for tokens in options.prompts:
                times[str(tokens)] += [_prefill(engine, tokens, 2 * repeat + i) for i in range(2)]
    for batch, found in rates.items():
        middle = statistics.median(found[1:])
        print(f"decode, batch {batch}: {middle:.1f} tokens/s", flush=True)
        figures["decode"][batch] = {"tokens_per_s": round(middle, 1), "all": [round(r, 1) for r in found[1:]]}
    for tokens, found in times.items():
        middle = statistics.median(found[2:])
        print(f"prefill of {tokens}: {middle * 1e3:.2f} ms", flush=True)
        figures["prefill"][tokens] = {"s": round(middle, 5), "all": [round(t, 5) for t in found[2:]]}
    if options.traffic:
        with mine.turn():
            figures["traffic"] = traffic.measured(engine.llm_engine, _sampling, options.traffic, options.traffic_seed)
        print(f"traffic: {json.dumps(figures['traffic'])}", flush=True)
    if options.profile:
        figures["profile"] = {}
        steps = PROFILED_AFTER + options.profile
        runs: dict[str, Callable[[], object]] = {}
        for batch in options.batches:
            prompts = drawn_prompts(batch, PROMPT_TOKENS, "profiled")
            runs[str(batch)] = functools.partial(_generate, engine, prompts, max_tokens=PROFILED_AFTER + steps)
        for tokens in options.prompts:
            runs[f"prefill of {tokens}"] = functools.partial(_prefills, engine, tokens, steps)
        for name, run in runs.items():
            with mine.turn():
                figures["profile"][name] = step = _profiled(engine, run, options)
            print(f"a step, {name}, us: {json.dumps(step and step['us'] | step['waits'])}", flush=True)
    if files is not None:
        with mine.turn():
            figures["reloads"] = reloads.under_traffic(engine, files, _sampling, options.reload_minutes)
        print(f"reloads: {json.dumps(figures['reloads'])}", flush=True)
    with mine.turn():
        figures["answers"] = _answers(engine)
    return figures


def _profiled(engine: Any, run: Callable[[], object], options: argparse.Namespace) -> dict[str, Any] | None:
    """Microseconds of a step of what `run` has the engine do, by what kernels are for, of those that took most, and of
    no kernel, by what was waited for; None where vLLM wrote no trace with kernels."""
    before = set(options.traces.iterdir())
    engine.start_profile()
    run()
    engine.stop_profile()
    new = sorted(path for path in options.traces.iterdir() if path not in before and ".trace.json" in path.name)
    kernels = kernel_times.read(new[0]) if new else []
    if not kernels:
        return None
    of_steps = kernels, options.profile
    return {
        "us": kernel_times.by_purpose(*of_steps),
        "longest": kernel_times.longest(*of_steps),
        "waits": kernel_times.waits(*of_steps),
    }


def _lengths(engine: Any, mine: Turns, count: int) -> dict[str, Any]:
    """Seconds of a prefill of each of so many lengths that are new to an engine, then of another prompt of the same
    length, each length in a turn of its own."""
    with mine.turn():
        for tokens in WARM_LENGTHS:
            _prefill(engine, tokens, "warm")
    found: dict[str, Any] = {"tokens": drawn_lengths(count), "new_s": [], "again_s": []}
    for tokens in found["tokens"]:
        with mine.turn():
            _prefill(engine, WARM_LENGTHS[0], f"before {tokens}")  # or the new one alone would follow a wait
            for which in ("new", "again"):
                found[f"{which}_s"].append(round(_prefill(engine, tokens, which), 6))
    new, again = (1e3 * geomean(found[f"{which}_s"]) for which in ("new", "again"))
    print(f"prefill of {count} new lengths: {new:.3f} ms, of the same again: {again:.3f} ms", flush=True)
    return found


def _compiled(engine: Any) -> compilations.Counted | None:
    """What was compiled in all processes of an engine so far; None unless they were forked from this one, which is
    watched, as its workers say."""
    found = engine.apply_model(compilations.counted_by_worker)
    return None if None in found else found[-1]  # all read the same


def _compare(figures: dict[str, Any], name: str, against: dict[str, Any]) -> None:
    figures["compared"] = {"with": name, **compared(figures, against)}
    for what, value in figures["compared"].items():
        print(f"{what:40} {value}")


def differs(runs: Iterable[dict[str, Any]], most: float | None) -> bool:
    """Whether answers of any of these runs, each compared with another, differ from the other's by more than `most`, on
    average of log-probabilities; says so in a line for each. None is no limit."""
    found = False
    for run in runs if most is not None else ():
        mean = run["compared"][MEAN_DIFFERENCE]
        if not mean <= most:  # also where it is no number
            print(f"{run['model']}: {MEAN_DIFFERENCE} to {run['compared']['with']} is {mean}, not within {most}")
            found = True
    return found


def differs_from_stocks(served: dict[str, Any], again: dict[str, Any]) -> bool:
    """Whether answers of a run differ from stock's by more than twice what a second run of stock's does, `again`; says
    so in a line."""
    most = 2 * again["compared"][MEAN_DIFFERENCE]
    if most:
        return differs([served], most)
    agree, least = served["compared"][GREEDY], again["compared"][GREEDY] / 2
    if agree < least:
        print(f"{served['model']}: {GREEDY} than stock's are {agree}, fewer than {least}")
    return bool(agree < least)


def _beside_stock(options: argparse.Namespace) -> int:
    """Run this script for each model without the archives and with them, and write all results as one."""
    if not options.archive or options.against:
        raise ArgumentError("--beside-stock takes --archive, and makes the run that it is compared with itself")
    if wrong := [each for each in options.stock_again if not each.partition("=")[0] or "=" not in each]:
        raise ArgumentError(f"--stock-again takes NAME=VALUE, found {wrong[0]!r}")
    for model in options.model:
        with _folder(model, unquantised=False):
            pass
    of_served = [f"--archive={path}" for path in options.archive]
    of_served += [f"--zero={options.zero}"] if options.zero else []
    of_served += [f"--reload-minutes={options.reload_minutes}"] if options.reload_minutes else []
    names = (*BOTH, AGAIN) if options.stock_again else BOTH
    with tempfile.TemporaryDirectory() as folder:
        files = {(m, name): Path(folder) / f"{i}_{name}.json" for i, m in enumerate(options.model) for name in names}
        commands = {}
        for i, ((model, name), file) in enumerate(files.items()):
            more = of_served if name == SERVED else []
            words = [str(model), *_of_one_engine(options), *more, "--out", str(file)]
            first = ["env", *options.stock_again] if name == AGAIN else []
            commands[f"{i // len(names)} {model.name}, {name}"] = [*first, sys.executable, __file__, *words]
        statuses = turns.run(commands, options.timeout)
        found = {key: json.loads(file.read_text()) for key, file in files.items() if file.exists()}
    for what, status in statuses.items():
        if status:
            print(f"{what}: " + (f"exit status {status}" if status > 0 else f"ended by signal {-status}"))
    different = False
    done = [model for model in options.model if all((model, name) in found for name in names)]
    if done:
        environment = found[done[0], STOCK]["environment"]
        runs = [_of_engines({name: found[m, name] for name in names}) for m in done]
        if options.stock_again:
            runs = [run | {"again_with": options.stock_again} for run in runs]
        write(options.out, environment, runs=runs)
        for run in runs:
            served = {"model": run["model"], **run[SERVED]}
            if options.most_difference is None and AGAIN in run:
                different |= differs_from_stocks(served, run[AGAIN])
            else:
                different |= differs([served], options.most_difference)
    return 1 if any(statuses.values()) or len(done) < len(options.model) or different else 0


def _of_one_engine(options: argparse.Namespace) -> list[str]:
    """The words that both engines of a model are started with."""
    memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": round(options.kv_gb * 1e9)}
    words = [f"--engine={json.dumps({**memory, **options.engine})}"]
    for name in ("batches", "prompts"):
        words.append(f"--{name}={','.join(map(str, getattr(options, name)))}")
    words += [
        f"--{name}={getattr(options, name)}"
        for name in ("tokens", "repeats", "layers", "lengths", "traffic", "profile")
    ]
    words.append(f"--traffic-seed={options.traffic_seed}")
    return [*words, *(["--unquantised"] if options.unquantised else [])]


def _of_engines(engines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The results of a model's engines as one, all compared with stock's, printed too."""
    stock = engines[STOCK]
    for name, other in engines.items():
        if name != STOCK:
            print(f"--- {stock['model']}, {name}")
            _compare(other, STOCK, stock)
    print(f"{'ready after, s: stock, served':40} {stock['ready_s']}, {engines[SERVED]['ready_s']}")
    kept: dict[str, Any] = {k: stock.pop(k) for k in ("model", "unquantised", "model_layers") if k in stock}
    for each in engines.values():
        each.pop("answers")
        for name in (*kept, "environment", "commit", "date", "command"):
            each.pop(name, None)
    return {**kept, **engines}


def _options() -> argparse.ArgumentParser:
    parser = engine_options(__doc__, "vllm.LLM", models="+")
    parser.add_argument("--traffic", type=int, default=0, help="runs of requests of random lengths (traffic.py)")
    seed = "what those requests are drawn by; another text draws others"
    parser.add_argument("--traffic-seed", default=traffic.USUAL_SEED, metavar="TEXT", help=seed)
    lengths = "how many lengths of prompts are prefilled while new to the process, then again; each must fit in a step"
    parser.add_argument("--lengths", type=int, default=0, metavar="N", help=lengths)
    profile = "so many decode steps at each batch and prefills of each length, to time kernels by what they are for"
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS", help=profile)
    minutes = "of random requests, with reloads of the archives between them"
    parser.add_argument("--reload-minutes", type=float, default=0.0, metavar="M", help=minutes)
    parser.add_argument("--unquantised", action="store_true", help="leave quantization_config out of config.json")
    parser.add_argument("--beside-stock", action="store_true", help="run each model without the archives too")
    parser.add_argument("--kv-gb", type=float, default=4.0, help="of each engine of --beside-stock")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for all engines of --beside-stock")
    parser.add_argument(FLAG, help=argparse.SUPPRESS)
    parser.add_argument("--zero", help="set this weight to 0 beside the archives, to see that answers differ")
    most = "status 1 where log-probabilities differ from the other run's by more, on average"
    parser.add_argument("--most-difference", type=float, metavar="X", help=most)
    again = "run stock again with this in its environment, beside the others; may be repeated"
    parser.add_argument("--stock-again", action="append", default=[], metavar="NAME=VALUE", help=again)
    parser.add_argument("--against", type=Path, help="the result file of another run to compare with")
    out_argument(parser)
    return parser


def engine_options(about: str | None, engine: str, models: str | None = None) -> argparse.ArgumentParser:
    """What the scripts of all engines take; `engine` is what takes the further arguments, `models` says how many models
    there may be (one)."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs=models, help="a folder with the config.json of a model")
    parser.add_argument("--archive", action="append", default=[], help='"universal" or a path; repeat for layers')
    parser.add_argument("--batches", type=_integers, default=[1, 16, 64], help="sequences decoded at once")
    parser.add_argument("--prompts", type=_integers, default=[512, 2048], help="lengths of prompts, for prefill")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each sequence is decoded for")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=0, help="so many of the model's layers, not all")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help=f"further arguments of {engine}")
    return parser


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


@contextlib.contextmanager
def _folder(model: Path, unquantised: bool) -> Iterator[Path]:
    """The folder whose config.json is the model's, while an engine starts. Of GPTQ it names the layers, which vLLM
    would look for in files of weights and leave in 16 bits where there are none.

    Raises:
        ArgumentError: it has none.
    """
    if not (model / "config.json").is_file():
        raise ArgumentError(f"{model}: has no config.json; name the folder of a model")
    config = json.loads((model / "config.json").read_text())
    quantised = config.get("quantization_config") or {}
    unnamed = quantised.get("quant_method") == "gptq" and not quantised.get("modules_in_block_to_quantize")
    if not unquantised and not unnamed:
        yield model
        return
    if unquantised:
        config.pop("quantization_config", None)
    else:
        quantised["modules_in_block_to_quantize"] = _PROJECTIONS
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder)


def _engine(options: argparse.Namespace, folder: Path, is_packed: bool) -> Any:
    from vllm import LLM

    from runtime.vllm import register

    settings: dict[str, Any] = {"max_model_len": 4096}
    if options.archive:
        register()  # as an entry point does where the distribution is installed
        settings["additional_config"] = {"cute_aot": options.archive}
    if options.profile:
        settings["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(options.traces),
            "torch_profiler_with_stack": False,
            "torch_profiler_use_gzip": False,
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,
            "delay_iterations": PROFILED_AFTER,
            "max_iterations": options.profile,
        }
    if options.layers:
        settings["hf_overrides"] = {"num_hidden_layers": options.layers}
    return LLM(
        model=str(folder),
        load_format=_loader(options.zero) if is_packed else "dummy",
        skip_tokenizer_init=True,
        seed=0,
        **{**settings, **options.engine},
    )


def _is_packed(folder: Path) -> bool:
    """Whether a model has weights in 4 bits, which nobody can draw any more once they are laid out for a kernel."""
    found = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    return found.get("quant_method") in ("mxfp4", "awq", "gptq") or found.get("format") == "pack-quantized"


def _loader(zero: str | None) -> str:
    """The name of a loader of vLLM's that draws weights. Processes that vLLM starts know it if it forks them."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("drawn")
    class Drawn(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            _draw_weights(model, zero)

    return "drawn"


def draw(model: Any, zero: str | None = None) -> dict[str, Any]:
    """Draw the weights of a worker's model, that called `zero` as zeros, and say how many layers are served."""
    _draw_weights(model, zero)
    return _served(model)


def _draw_weights(model: Any, zero: str | None) -> None:
    import torch

    fp8 = torch.float8_e4m3fn
    fan_in = {}  # by the name of a weight, (N, K) or, of experts, (experts, N, K)
    for name, weight in model.named_parameters():
        if weight.dim() in (2, 3) and "weight_scale" not in name:
            transposed = weight.dtype == fp8 and weight.stride(-2) == 1  # (K, N), a view of (N, K)
            fan_in[name] = weight.shape[-2 if transposed else -1]
    names = {name for name, _ in model.named_parameters()}
    for name, weight in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        groups = _int4_groups(name, weight, names)
        generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
        if weight.dtype == torch.uint8:
            _draw_mxfp4(weight.data, "scale" in kind, generator)
            weight.data.mul_(name != zero)
            continue
        if not weight.is_floating_point():
            if kind.endswith(_INT4_WORDS):  # eight of 4 bits; others are indices and shapes
                weight.data.random_(-(1 << 31), 1 << 31, generator=generator)
            continue
        drawn = torch.empty(weight.shape, dtype=torch.float32, device=weight.device).normal_(generator=generator)
        if name == zero:
            drawn.zero_()
        elif groups:
            drawn.mul_(0.2).exp_().div_(_INT4_DEVIATION * (128 * groups) ** 0.5)
        elif "weight_scale" in kind:  # of weights that are drawn with a standard deviation of 64
            drawn.mul_(0.2).exp_().div_(64 * fan_in[name.partition("weight_scale")[0] + "weight"] ** 0.5)
        elif weight.dtype == fp8:
            drawn.mul_(64).clamp_(-448, 448)
        elif weight.dim() < 2 and "scale" in kind:
            continue
        elif kind.endswith("bias"):
            drawn.mul_(0.1)
        elif weight.dim() == 1:
            drawn.mul_(0.1).add_(1)  # of a norm
        elif "embed" not in layer:
            drawn.div_(weight.shape[-1] ** 0.5)
        weight.data.copy_(drawn)


def _int4_groups(name: str, weight: Any, names: Collection[str]) -> int:
    """How many groups of 128 along K int4 has whose scales these are; 0 of all else."""
    if name.endswith("scales") and f"{name.removesuffix('scales')}qweight" in names:
        return int(weight.shape[-2])
    if name.endswith("weight_scale") and f"{name.removesuffix('scale')}packed" in names:
        return int(weight.shape[-1 if weight.dim() == 2 else -2])  # of experts turned
    return 0


def _draw_mxfp4(data: Any, of_scales: bool, generator: Any) -> None:
    """Any bytes as two elements each, or ue8m0 scales of (..., K / 32) of such, so that weights are about as large as
    others that are drawn: within a factor of 1.5."""
    if not of_scales:
        data.random_(0, 256, generator=generator)
        return
    exponents = range(-2, 1)  # of these, each as often
    usual = (sum(x * x for x in E2M1) / len(E2M1) * sum(4.0**e for e in exponents) / len(exponents)) ** 0.5
    largest = UE8M0_OF_ONE + round(math.log2((32 * data.shape[-1]) ** -0.5 / usual))
    data.random_(largest + exponents.start, largest + exponents.stop, generator=generator)


def _served(model: Any) -> dict[str, Any]:
    """How many layers of a worker's model are served."""
    weights = "weight", "qweight", "weight_packed"
    layers = [
        m
        for m in model.modules()
        if getattr(m, "quant_method", None) is not None and any(hasattr(m, name) for name in weights)
    ]
    found = {"layers": len(layers), "served": sum(map(_is_served, layers))}
    experts = [m.quant_method for m in model.modules() if hasattr(m, "quant_method") and hasattr(m, "w13_weight")]
    kernels = [getattr(getattr(method, "moe_kernel", None), "fused_experts", None) for method in experts]
    launched = sum(getattr(kernel, "launches", None) is not None for kernel in kernels)
    computed_by = sorted({type(kernel).__name__ for kernel in kernels})
    return found | {"experts": len(experts), "experts_served": launched, "experts_computed_by": computed_by}


def _is_served(layer: Any) -> bool:
    """Whether the archive computes a layer: it is marked as such, or an fp8 GEMM of its method is the plugin's."""
    holders = [each for each in (layer.quant_method, getattr(layer, "scheme", None)) if each is not None]
    gemms = [gemm for holder in holders for gemm in vars(holder).values()]
    marked = any(hasattr(layer, name) for name in ("_cute_aot_plain", "_cute_aot_biased"))
    return marked or any(type(gemm).__module__.startswith("runtime.vllm") for gemm in gemms)


def _sampling(max_tokens: int, **parameters: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, **parameters)


def _generate(engine: Any, prompts: list[list[int]], **parameters: Any) -> tuple[float, Any]:
    """Seconds, and what was generated."""
    sampling = _sampling(**parameters)
    began = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return time.perf_counter() - began, outputs


def drawn_prompts(count: int, tokens: int, seed: int | str) -> list[list[int]]:
    """Prompts that no other seed has, so that no cache of prefixes knows them."""
    draw = random.Random(f"{count} {tokens} {seed}")
    return [[draw.randrange(10, 30000) for _ in range(tokens)] for _ in range(count)]


def drawn_lengths(count: int) -> list[int]:
    """So many lengths of prompts, all different and none of WARM_LENGTHS. Fewer are the first of more."""
    draw, found = random.Random("lengths"), dict.fromkeys(WARM_LENGTHS)
    while len(found) < len(WARM_LENGTHS) + count:
        found[traffic.log_uniform(draw, *LENGTHS)] = None
    return list(found)[len(WARM_LENGTHS) :]


def _decode(engine: Any, batch: int, repeat: int, tokens: int) -> float:
    """Output tokens a second after the first of each sequence: the time of `tokens` less that of one."""
    first_s, _ = _generate(engine, drawn_prompts(batch, PROMPT_TOKENS, f"{repeat} first"), max_tokens=1)
    all_s, _ = _generate(engine, drawn_prompts(batch, PROMPT_TOKENS, f"{repeat} all"), max_tokens=tokens)
    return batch * (tokens - 1) / (all_s - first_s)


def _prefill(engine: Any, tokens: int, repeat: int | str) -> float:
    """Seconds from a prompt to its first token."""
    return _generate(engine, drawn_prompts(1, tokens, f"{repeat} prefill"), max_tokens=1)[0]


def _prefills(engine: Any, tokens: int, count: int) -> None:
    """So many prefills, one after another."""
    for i in range(count):
        _prefill(engine, tokens, f"{i} profiled")


def _answers(engine: Any) -> dict[str, Any]:
    """Log-probabilities of the tokens of given texts, and greedy tokens after others."""
    _, read = _generate(engine, drawn_prompts(4, TEXT_TOKENS, 0), max_tokens=1, prompt_logprobs=0)
    text = []
    for output in read:
        steps = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        text.append([round(step[token].logprob, 5) for token, step in steps])
    _, said = _generate(engine, drawn_prompts(ANSWER_PROMPTS, PROMPT_TOKENS, 99), max_tokens=ANSWER_TOKENS)
    return {"text_logprobs": text, "tokens": [list(output.outputs[0].token_ids) for output in said]}


def compared(figures: dict[str, Any], against: dict[str, Any]) -> dict[str, float]:
    """How many times as fast as another run, and how far the answers of the two differ."""
    found = {}
    for batch, rate in figures["decode"].items():
        found[f"decode, batch {batch}, x"] = rate["tokens_per_s"] / against["decode"][batch]["tokens_per_s"]
    for tokens, took in figures["prefill"].items():
        found[f"prefill of {tokens}, x"] = against["prefill"][tokens]["s"] / took["s"]
    if "lengths" in figures and "lengths" in against:
        for name, which in (("new lengths", "new_s"), ("the same again", "again_s")):
            mine, theirs = (each["lengths"][which] for each in (figures, against))
            of_each = zip(theirs, mine, strict=False)  # fewer are the first of more
            found[f"prefill of {name}, x"] = geomean(a / b for a, b in of_each)
    if "traffic" in figures and "traffic" in against:
        of_both = figures["traffic"], against["traffic"]
        if len({each.get("seed", traffic.USUAL_SEED) for each in of_both}) == 1:  # else of other requests
            mine, theirs = (each["at_once"]["tokens_per_s"] for each in of_both)
            found["traffic at once, x"] = mine / theirs
    mine, theirs = figures["answers"], against["answers"]
    pairs = [zip(a, b, strict=True) for a, b in zip(mine["text_logprobs"], theirs["text_logprobs"], strict=True)]
    differences = [abs(a - b) for pair in pairs for a, b in pair]
    found[MEAN_DIFFERENCE] = statistics.fmean(differences)
    found["log-probabilities, largest difference"] = max(differences)
    alike = [_alike(a, b) for a, b in zip(mine["tokens"], theirs["tokens"], strict=True)]
    found[GREEDY] = statistics.fmean(alike)
    return {name: round(value, 4) for name, value in found.items()}


def _alike(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _environment() -> dict[str, Any]:
    import vllm

    from aot.tune import measure

    return {**measure.environment(), "vllm": vllm.__version__}


if __name__ == "__main__":
    sys.exit(ends(main))
