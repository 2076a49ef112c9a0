"""Make the tables of docs/benchmarks.md, and of other pages that have one here, anew from the files in
benchmarks/results/; the words between are by hand.

On a page a table stands between `<!-- table NAME -->` and `<!-- end -->`. No figure in it is typed, and each says
which files it is made from. `--check` writes nothing: exit status 1 if a page is not what would be made.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from statistics import geometric_mean, median
from typing import Any

import bounds
import reduce_results
import summarise_random
from random_cases import REGIMES
from report import AGAIN, ROOT, ends

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
_KERNELS = ROOT / "docs" / "kernels"
PAGES = (
    PAGE,
    *(ROOT / "docs" / f"{n}.md" for n in ("moe", "vllm")),
    _KERNELS / "sm90_w4.md",
    _KERNELS / "sm90_grouped.md",
    _KERNELS / "sm90_small_m.md",
    _KERNELS / "engines.md",
)
USUAL = "NVIDIA H200, driver 580.159.04"  # the page's head says it, and tables only what is unlike it
_MOST_WORDS = 4  # of a command that is shown in full
_MARK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

_H200, _H100 = "occasions_default_h200", "occasions_default_h100"
OCCASIONS = (  # the file, its runs, what took part, over what, and what the row says
    (_H200, (0, 1, 2), "ours", "torch", "tuned"),
    (_H200, (0, 1, 2), "on_slower", "torch", 'with `on_slower="torch"`'),
    (_H200, (0, 1, 2), "against", "torch", "`runtime.universal()`"),
    (_H200, (0, 1, 2), reduce_results.UNSEEN, "torch", "N x K never seen"),
    (_H200, (0, 1, 2), "against", "ours", "`runtime.universal()`, over tuned"),
    (_H200, (3, 5), "ours", "torch", "Llama-3.1-8B, tuned"),
    (_H100, (0, 1, 2, 3), "ours", "torch", "H100s: tuned"),
    (_H100, (0, 1, 2, 3), "on_slower", "torch", "H100s: `on_slower`"),
    (_H100, (0, 1, 2), "against", "torch", "H100s: `runtime.universal()`"),
    (_H100, (0, 1, 2), reduce_results.UNSEEN, "torch", "H100s: N x K never seen"),
    (_H100, (4, 5), "ours", "torch", "H100s: Llama-3.1-8B, tuned"),
)
SERVED = {  # what a row says, and the runs of engines.json that it is of
    "Llama-3.1-8B, bf16, norms": (4, 6, 7, 15),
    "bf16, tensor parallel 2, vLLM's norms": (14,),
    "bf16 on an H100, vLLM's norms": (21,),
    "Llama-3.1-8B, AWQ": (2,),
    "Llama-3.1-8B, fp8 by channel and token": (5,),
    "by channel, `--quantise`, norms": (17, 16, 20, 3, 18),
    "Llama-3.1-8B, fp8 by blocks, stock with DeepGEMM": (11, 12),
    "the same, stock with CUTLASS, `few`": (8,),
    "by blocks over CUTLASS, `--quantise`, norms": (11, 12, 10),
    "by blocks over CUTLASS, `few`, on an H100": (22,),
    "Llama-3.1-8B, fp8 by channel and token, on an H100": (23,),
    "24 layers of Qwen3-30B-A3B, bf16": (bounds.QWEN,),
    "gpt-oss-20b, experts in MXFP4, on an H100": (0,),
    "SGLang: Llama-3.1-8B, bf16, on an H100": (1,),
}
STOCKS = {"Llama-3.1-8B, fp8 by blocks, stock with DeepGEMM": AGAIN}  # rows over another engine than "stock"
WAITS = {  # milliseconds of requests that come in turn, for the first token and for every next one
    "ttft_p50_ms": "TTFT, median",
    "ttft_p99_ms": "99%",
    "itl_p50_ms": "ITL, median",
    "itl_p99_ms": "99%",
}
ON_GRID = {
    "bf16": "bf16",
    "bf16 residual": "bf16 + residual",
    "bf16 swiglu": "bf16 SwiGLU",
    "e4m3 row_column": "e4m3, row and column scales",
}
GROUPED = {  # by the kinds of scripts/bench_grouped.py
    "bf16": "bf16",
    "e4m3 row_column": "e4m3, scales of rows and columns",
    "e4m3 block": "e4m3, scales of blocks",
    "e4m3 block masked": "the same, masked, by rows of a group",
}
GROUPED_ELSEWHERE = {
    "grouped_h200_again": "another H200",
    "grouped_h200_shared": "a third H200",
    "grouped_h100": "on an H100",
}
PEERS = (  # file, kind, contender, what the row says
    ("peers_bf16", "bf16 ours", "quack", "bf16, quack"),
    ("peers_swiglu", "swiglu ours", "quack", "SwiGLU, quack"),
    ("peers_fp8", "fp8 ours", "cublas fast", "e4m3, cuBLAS with fast accumulation *"),
    ("peers_operators", "bf16 ours", "operators", "bf16, Operator API *"),
    ("peers_triton", "bf16 ours", "triton", "bf16, Triton *"),
    ("blocks_h200", "ours", "torch", "e4m3 in blocks, torch's `_scaled_mm`"),
    ("blocks_h200", "ours", "deep_gemm", "e4m3 in blocks, DeepGEMM 2.5.0"),
    ("blocks_h100", "ours", "torch", "the same on an H100, `_scaled_mm`"),
    ("blocks_h100", "ours", "deep_gemm", "the same on an H100, DeepGEMM"),
)
MODELS = {
    "models_llama_h200": "Llama-3.1-8B, bf16",
    "models_llama_fp8_h200": "Llama-3.1-8B, e4m3",
    "models_qwen3_h200": "Qwen3-8B, bf16",
}
EXPERTS = {"moe_h200": "bf16", "moe_fp8_h200": "e4m3"}
EXPERT_TOKENS = 1, 32, 2048  # of the table of launches
_WHOLE_US = 10.0  # from which times have no fraction
FORMATS = {"mxfp4": "MXFP4", "int4": "int4", "int4_zero": "int4 with zero points"}
START = (  # file, process, part of it, how many it is divided by, what the row says
    ("startup_h200", "torch, the archive's GEMM", "import", "", "import runtime"),
    ("startup_h200", "torch, the archive's GEMM", "load", "", "open an archive of 1,002 kernels"),
    ("startup_h200", "torch, the archive's GEMM", "first", "", "its first GEMM, without preload"),
    ("startup_h200", "torch, preload", "preload", "", "preload Llama-3.1-8B, 64 kernels"),
    ("startup_jit_h200", "torch, cute.compile", "compile", "kernels", "cute.compile, a kernel"),
    ("startup_jit_h200", "torch.compile, max-autotune", "first", "", "torch.compile max-autotune, one GEMM"),
    ("startup_model_h200", "torch.compile, max-autotune of a model", "compile", "", "the same, 15 GEMMs"),
)


def load(name: str) -> dict[str, Any]:
    """A result file."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A Markdown table."""
    return ["| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)]


def source(*names: str) -> list[str]:
    """Which files a table is made from, and on what, when and by what they were measured; they say at which commit."""
    runs = [run for name in names for run in load(name).get("runs", [load(name)])]
    machines = list(dict.fromkeys(_machine(run["environment"]) for run in runs))
    machines = [] if machines == [USUAL] else machines
    dates = sorted({run["date"] for run in runs})
    commands = dict.fromkeys(re.sub(r" --out \S+", "", run["command"]) for run in runs)
    if len(commands) > 1 or len(next(iter(commands)).split()) > _MOST_WORDS:
        commands = dict.fromkeys(map(_program, commands))
    files, said = (", ".join(f"`{x}`" for x in found) for found in ([f"{name}.json" for name in names], commands))
    where = [*machines, ", ".join(dates), said]
    return ["", f"{files}: {'; '.join(where)}."]


def _program(command: str) -> str:
    """A command without its arguments: the script that Python runs, or a program and what it is told to do."""
    program, what, *_ = command.split()
    return what if program == "python" else f"{program} {what}"


def _machine(environment: dict[str, Any]) -> str:
    return f"{environment['gpu']}, driver {environment['driver']}" if "gpu" in environment else "no GPU"


def _ratios(rows: Sequence[tuple[str, Sequence[dict[str, Any]]]], what: str) -> list[str]:
    """A row for each label: how many times as fast, the worst case, and what share is below 0.97, by ranges of M."""
    regimes = [name for name, _, _ in REGIMES if any(line["regime"] == name for _, lines in rows for line in lines)]
    cells = []
    for label, lines in rows:
        by_regime = {line["regime"]: line for line in lines}
        cells.append([label, *(_ratio(by_regime.get(regime)) for regime in regimes)])
    return table([what, *(f"{regime} ({_cases(rows, regime)})" for regime in regimes)], cells)


def _ratio(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    share = line["slower"]
    slower = "" if not share else ", <1%" if share < 0.005 else f", {share:.0%}"
    return f"{line['geomean']:.3f} ({line['worst']:.2f}){slower}"


def _cases(rows: Sequence[tuple[str, Sequence[dict[str, Any]]]], regime: str) -> str:
    counts = [line["cases"] for _, lines in rows for line in lines if line["regime"] == regime]
    least, most = min(counts), max(counts)
    return f"{least}" if least == most else f"{least}-{most}"


def occasions() -> list[str]:
    """Cases at random M, on several GPUs: of several runs the least favourable."""
    rows = []
    for file, runs, what, over, label in OCCASIONS:
        of = [s for s in load(file)["summary"] if (s["what"], s["over"]) == (what, over) and s["run"] in runs]
        rows.append((label, _least(of)))
    files = dict.fromkeys(file for file, *_ in OCCASIONS)
    found = [run for file in files for run in load(file)["runs"]]
    wrong, noise = sum(r["wrong"] for r in found), [r["noise"] for r in found]
    said = f"Wrong: {wrong}; torch against itself {min(noise):.3f} to {max(noise):.3f}."
    return [*_ratios(rows, "times cuBLAS"), "", said, *source(*files)]


def _least(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the lines of several runs the least favourable figures in each range of M, with the cases of all."""
    by_regime: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_regime.setdefault(line["regime"], []).append(line)
    return [
        of[0]
        | {key: min(s[key] for s in of) for key in ("geomean", "worst")}
        | {"slower": max(s["slower"] for s in of), "cases": sum(s["cases"] for s in of)}
        for of in by_regime.values()
    ]


def on_grid() -> list[str]:
    """The layers of manifests at the M values that were tuned for."""
    found = load("gemm_h200")
    lines = [s for s in found["summary"] if s["group"] == summarise_random.ALL]
    rows = [(label, [s for s in lines if s["what"] == what]) for what, label in ON_GRID.items()]
    reads = {(r["what"], r["group"]): f"{r['geomean']:.2f} ({r['most']:.2f})" for r in found["over_cold_read"]}
    wrong, errors = sum(run["wrong"] for run in found["runs"]), max(run["largest_error"] for run in found["runs"])
    spread = max(s["largest_spread"] for s in lines)
    said = (
        f"Wrong: {wrong}; largest relative error {errors:.4f}; largest spread {spread:.0%}. Up to M = 16 the eight "
        f"layers take {reads['bf16', 'eight layers']} of a cold read of B, cuBLAS {reads['torch', 'eight layers']}."
    )
    return [*_ratios(rows, "times cuBLAS"), "", said, *source("gemm_h200")]


def peers() -> list[str]:
    """Other libraries."""
    rows = [
        (label, _least([s for s in load(name)["summary"] if (s["what"], s["over"]) == (what, over)]))
        for name, what, over, label in PEERS
    ]
    return [*_ratios(rows, "their time over ours"), *source(*dict.fromkeys(name for name, *_ in PEERS))]


def weights() -> list[str]:
    """4-bit weights beside bf16 of our own and beside Marlin: a row for each layer and format."""
    ours, document = load("w4_h200")["results"], load("w4_h100")
    beside = document["results"]
    found = [*ours, *beside]
    wrong, error = sum(isinstance(r["error"], str) for r in found), max(r["error"] for r in found)
    versions = ", ".join(f"{k} {v}" for k, v in document["peers"]["marlin"]["versions"].items())
    off = sum(isinstance(r["marlin_error"], str) for r in beside)
    said = f"Wrong: {wrong}; largest relative error {error:.4f}; largest spread {max(r['spread'] for r in found):.0%}. "
    said += f"Marlin is of {versions}; wrong: {off}."
    tables = [
        _by_layer(ours, "bf16_us", "times our bf16, on an H200"),
        _by_layer(beside, "marlin_us", "times Marlin, on an H100"),
    ]
    return [*tables[0], "", *tables[1], "", said, *source("w4_h200", "w4_h100")]


def few() -> list[str]:
    """Weights in e4m3, of tokens that were quantised and of tokens that the GEMM quantises: a row for each layer."""
    us: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
    for r in load("few_h100")["results"]:
        n, k, scaling = re.findall(r"_n(\d+)_k(\d+)_(\w+)$", r["signature"])[0]
        us.setdefault((n, k), {}).update({(scaling, m): found for m, found, _ in r["cases"]})
    tokens = sorted(set.intersection(*({m for m, *_ in r["cases"]} for r in load("few_h100")["results"])))
    pairs = {"by blocks": ("block", "block_weight"), "by channel": ("row_column", "column_weight")}
    rows = [
        [f"{n} x {k}, {word}", *(f"{of[quantised, m]:.1f}, {of[own, m]:.1f}" for m in tokens)]
        for word, (quantised, own) in pairs.items()
        for (n, k), of in us.items()
        if (quantised, tokens[0]) in of
    ]
    return [*table(["us, of e4m3 and of bf16 A", *(f"M = {m}" for m in tokens)], rows), *source("few_h100")]


def grouped_weights() -> list[str]:
    """Experts with 4-bit weights: a row for each other, a column for each range of rows."""
    results = load("grouped_w4_h100")["results"]
    bf16 = {
        r["signature"].replace("bf16_bf16_bf16", "bf16_e2m1_bf16"): r["cases"] for r in results if r["kind"] == "bf16"
    }
    ratios: dict[str, list[tuple[int, float]]] = {"torch, in bf16": [], "Marlin": [], "ours, in bf16": []}
    for r in results:
        if r["kind"] == "bf16":
            continue
        of_m = {c[0]: c[1] for c in bf16[r["signature"].replace("_mxfp4_weight", "")]}
        for m, ours, torch, marlin in r["cases"]:
            for name, us in zip(ratios, (torch, marlin, of_m[m]), strict=True):
                ratios[name].append((m, us / ours))
    rows = [[name, *_by_rows(cases)] for name, cases in ratios.items()]
    return [*table(["their time over ours", *_ROWS], rows), *source("grouped_w4_h100")]


def _by_layer(found: Sequence[dict[str, Any]], other: str, what: str) -> list[str]:
    """How many times as long as ours another takes, by layer and format; empty where it was not timed."""
    tokens = sorted({r["m"] for r in found})
    rows: dict[tuple[str, str, str], dict[int, str]] = {}
    for r in found:
        n, k, word = re.findall(r"_n(\d+)_k(\d+)_(\w+)_weight$", r["signature"])[0]
        rows.setdefault((word, n, k), {})[r["m"]] = f"{r[other] / r['us']:.2f}" if other in r else ""
    cells = [[f"{FORMATS[word]}, {n} x {k}", *(of[m] for m in tokens)] for (word, n, k), of in sorted(rows.items())]
    return table([what, *(f"M = {m}" for m in tokens)], cells)


def experts() -> list[str]:
    """Experts of mixtures beside vLLM's: a row for each model, a column for each number of tokens."""
    tokens = sorted({r["tokens"] for name in EXPERTS for r in load(name)["results"]})
    rows, said = [], []
    for name, types in EXPERTS.items():
        results = [
            r for r in load(name)["results"] if r["error"]
        ]  # else no expert was here, and nothing was multiplied
        cells: dict[str, dict[int, str]] = {}
        for r in results:
            over_floor = r["us"]["ours"] / r["floor_us"]
            cells.setdefault(r["model"].removeprefix("FP8-"), {})[r["tokens"]] = f"{r['x_vllm']:.2f} ({over_floor:.2f})"
        rows += [[f"{model}, {types}", *(of.get(t, "") for t in tokens)] for model, of in cells.items()]
        torch, vllm = (
            f"{geometric_mean(r[f'x_{who}'] for r in results):.2f} ({min(r[f'x_{who}'] for r in results):.2f} at least)"
            for who in ("torch", "vllm")
        )
        said.append(f"{len(results)} cases in {types}: times torch {torch}, times vLLM {vllm}")
    header = ["times vLLM", *(f"{t:,}" for t in tokens)]
    lines = {(s["types"], s["over"]): s for s in load("moe_h100")["summary"]}
    elsewhere = ", ".join(
        f"{types} " + " and ".join(_mean_and_least(lines[types, over]) for over in ("torch", "vllm"))
        for types in EXPERTS.values()
    )
    said = ["; ".join(said) + f". On an H100, times torch and vLLM: {elsewhere}."]
    return [*table(header, rows), "", *said, *source(*EXPERTS, "moe_h100")]


def expert_launches() -> list[str]:
    """The launches of a block of experts: a row for each model, a column for some numbers of tokens."""
    rows = []
    for name, types in EXPERTS.items():
        cells: dict[str, dict[int, str]] = {}
        for r in load(name)["results"]:
            us = r["us"]
            parts = [us["permute"], us.get("fused", us["gate_up"]), us["down"], us["combine"]]
            if r["error"]:  # else no expert was here
                cells.setdefault(r["model"].removeprefix("FP8-"), {})[r["tokens"]] = ", ".join(
                    f"{us:.1f}" if us < _WHOLE_US else f"{us:.0f}" for us in parts
                )
        rows += [[f"{model}, {types}", *(of.get(t, "") for t in EXPERT_TOKENS)] for model, of in cells.items()]
    return [*table(["us of each launch", *(f"{t:,}" for t in EXPERT_TOKENS)], rows), *source(*EXPERTS)]


def _mean_and_least(line: dict[str, Any]) -> str:
    return f"{line['geomean']:.2f} ({line['worst']:.2f})"


_ROWS = {"up to 64 rows": (1, 64), "65 to 511": (65, 511), "from 512": (512, math.inf)}


def _by_rows(cases: Sequence[tuple[int, float]]) -> list[str]:
    """Of numbers of rows and how many times as fast, the mean, the worst and the count, by ranges of rows."""
    of = [[ratio for m, ratio in cases if low <= m <= high] for low, high in _ROWS.values()]
    return [f"{geometric_mean(ratios):.2f} ({min(ratios):.2f}), {len(ratios)}" if ratios else "" for ratios in of]


def grouped() -> list[str]:
    """Grouped GEMMs beside others': a row for each kind and other, a column for each range of rows."""
    results, rows = load("grouped_h200")["results"], []
    for kind, label in GROUPED.items():
        for place, other in ((2, "torch"), (3, "quack" if kind == "bf16" else "DeepGEMM")):
            cases = [(c[0], c[place] / c[1]) for r in results if r["kind"] == kind for c in r["cases"] if c[place]]
            rows += [[f"{label}, {other}", *_by_rows(cases)]] if cases else []
    for name, where in GROUPED_ELSEWHERE.items():
        elsewhere = load(name)["summary"]
        for kind, other in dict.fromkeys((line["kind"], line["over"]) for line in elsewhere):
            of = [line for line in elsewhere if line["kind"] == kind]
            cells = (f"{_mean_and_least(line)}, {line['cases']}" for line in of)
            rows.append([f"{GROUPED[kind]}, {other}, {where}", *cells])
    floors = ", ".join(f"{GROUPED[kind]} {mean:.2f}" for kind, (mean, _) in bounds.grouped_over_cold_read().items())
    by_tokens = ", ".join(
        f"{', '.join([GROUPED[kind], whose] if whose else [GROUPED[kind]])} {mean:.2f} ({least:.2f})"
        for (kind, whose), (mean, least) in bounds.grouped_by_tokens().items()
    )
    said = (
        f"Up to {bounds.FEW} tokens (of DeepSeek-V3's rank {8 * bounds.FEW:,} rows), over a cold read of the weights "
        f"that they need: {floors}. All cases of the first five rows, few tokens being up to {bounds.FEW}: {by_tokens}."
    )
    return [*table(["their time over ours", *_ROWS], rows), "", said, *source("grouped_h200", *GROUPED_ELSEWHERE)]


def engines() -> list[str]:
    """Servers with an archive over the same without, of several runs the median, and how long until each was ready."""
    runs = load("engines")["runs"]
    names = [
        *(f"decode, batch {b}" for b in (1, 16, 64)),
        *(f"prefill of {t}" for t in (512, 2048)),
        "ready: stock, ours",
    ]
    rows = []
    for label, which in SERVED.items():
        stock, cells = STOCKS.get(label, "stock"), []
        for of_runs in zip(*(_speeds(runs[run], stock) for run in which), strict=True):
            times = median(median(ours) / median(theirs) for ours, theirs in of_runs)
            cells.append(f"{times:.2f} ({max(_spread(each) for pair in of_runs for each in pair):.0%})")
        ready = [median(runs[run][who]["ready_s"] for run in which) for who in (stock, "served")]
        label += f", {len(which)} runs" if len(which) > 1 else ""
        rows.append([label, *cells, f"{ready[0]:.0f} s, {ready[1]:.0f} s"])
    return [*table(["stock over ours", *names], rows), *source("engines")]


def engine_runs() -> list[str]:
    """What each of several runs of an engine gave, in one order for all numbers of sequences."""
    runs, rows = load("engines")["runs"], []
    for label, which in SERVED.items():
        if len(which) > 1:
            of_runs = [_speeds(runs[run], STOCKS.get(label, "stock"))[: len(bounds.BATCHES)] for run in which]
            speeds = [[f"{median(ours) / median(theirs):.2f}" for ours, theirs in of] for of in of_runs]
            rows.append([label, *map(", ".join, zip(*speeds, strict=True))])
    return [*table(["stock over ours, batch", *bounds.BATCHES], rows), *source("engines")]


def decode_steps() -> list[str]:
    """What a decode step consists of, in stock and in ours, and what bounds it: a row for each engine and batch."""
    rows = []
    for label in bounds.DECODED:
        for batch in bounds.BATCHES:
            found = bounds.decoding(label, batch)
            cells = [f"{stock:,.0f}, {ours:,.0f}" for stock, ours in (*found.parts, found.steps)]
            rows.append(
                [f"{label}, {batch}", *cells, f"{found.read_us:,.0f}", f"{found.could:.2f}", f"{found.was:.2f}"]
            )
    header = ["us, batch", "GEMMs: stock, ours", *bounds.ELSE, "step", "bare read", "estimate", "was"]
    could, was = (", ".join(f"{x:.2f}" for x in of) for of in bounds.qwen_decoding())
    faster, batches = bounds.DENSE_OVER_FLOOR, ", ".join(bounds.BATCHES)
    said = (
        f"24 of 48 layers of Qwen3-30B-A3B in bf16, experts at their floor, other weights read {faster} times as fast, "
        f"all else as stock's: an estimated {could} at batch {batches}; it was {was}."
    )
    return [*table(header, rows), "", said, *source("engines", "moe_h200")]


def _speeds(run: dict[str, Any], who: str) -> list[tuple[list[float], list[float]]]:
    """Our speeds and those of `who`: tokens a second for each number of sequences, prompts a second for each length."""
    stock, served = run[who], run["served"]
    found = [(served["decode"][b]["all"], stock["decode"][b]["all"]) for b in ("1", "16", "64")]
    for tokens in ("512", "2048"):
        ours, theirs = ([1 / s for s in of["prefill"][tokens]["all"]] for of in (served, stock))
        found.append((ours, theirs))
    return found


def traffic() -> list[str]:
    """Requests of random lengths to engines, all at once and in turn, of those runs that had them the median, or of
    those that launch as this version does: a row for each engine that had any."""
    runs, rows = load("engines")["runs"], []
    for label, which in SERVED.items():
        names = STOCKS.get(label, "stock"), "served"
        which = tuple(run for run in which if run in bounds.LAUNCHED_WHOLE) or which
        pairs = [[runs[run][name]["traffic"] for name in names] for run in which if "traffic" in runs[run]["served"]]
        if pairs:
            at_once = median(
                median(served["at_once"]["all"]) / median(stock["at_once"]["all"]) for stock, served in pairs
            )
            waits = [[median(median(pair[i]["in_turn"][wait]) for pair in pairs) for i in (0, 1)] for wait in WAITS]
            rows.append([label, f"{at_once:.2f}", *(f"{a:.1f}, {b:.1f}" for a, b in waits)])
    return [*table(["stock, ours", "tokens at once, ours over stock", *WAITS.values()], rows)]


def models() -> list[str]:
    """Whole models over torch's."""
    rows: list[list[str]] = []
    names: list[str] = []
    for name, label in MODELS.items():
        results = load(name)["results"]
        names = [f"{'decode, batch' if r['context'] else 'prefill,'} {max(r['batch'], r['tokens'])}" for r in results]
        cells = [f"{r['speedup']:.3f} ({max(r['torch']['spread'], r['archive']['spread']):.1%})" for r in results]
        rows.append([label, *cells])
    return [*table(["their time over ours", *names], rows), *source(*MODELS)]


def _spread(of: Sequence[float]) -> float:
    """From the least to the most, over the median."""
    return (max(of) - min(of)) / median(of)


def host() -> list[str]:
    """What a launch costs the host: from the least of the processes to the most."""
    rows = []
    runs = load("runtime_h200")["runs"]
    for native, label in ((True, "native code"), (False, "Python alone")):
        of = [run["results"] for run in runs if run["environment"]["native"] == native]
        us = [{name.split("(")[0]: t["median"] for name, t in reversed(r["host_us"].items())} for r in of]
        times = [_span([u[name] for u in us], ".1f") for name in ("lib.gemm", "torch.mm", "cuLaunchKernelEx, prepared")]
        ratio, new_m = _span([r["host_ratio"] for r in of], ".2f"), _span([r["new_m_ms"]["median"] for r in of], ".3f")
        rows.append([f"{label}, {len(of)}", *times[:2], ratio, times[2], new_m])
    header = ["processes", "lib.gemm, us", "torch.mm, us", "ratio", "bare launch, us", "new M, ms"]
    return [*table(header, rows), *source("runtime_h200")]


def _span(values: Sequence[float], form: str) -> str:
    least, most = (f"{x:{form}}" for x in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def start() -> list[str]:
    """Parts of a process's start."""
    rows = []
    for name, process, part, count, label in START:
        found = load(name)["results"][process]
        times = [found[part][k] * 1e3 / (found[count]["median"] if count else 1) for k in ("median", "min", "max")]
        median, least, most = (f"{t:,.0f}" if t >= 20 else f"{t:.1f}" for t in times)
        rows.append([label, median, "one process" if times[1] == times[2] else f"{least} to {most}"])
    return [*table(["", "ms", "range"], rows), *source(*dict.fromkeys(name for name, *_ in START))]


def long_runs() -> list[str]:
    """What long and wide use costs in memory."""
    soak, many = load("soak_h200")["results"], load("processes")["results"]
    resident = soak["resident_mb"]
    first = (
        f"- {soak['launches']:,} launches by eight threads, {soak['reloads']} reloads: {soak['wrong']} wrong, "
        f"{len(soak['failures'])} failures; {resident[1]:,} MB resident after a tenth, {resident[-1]:,} in the end; "
        f"device memory {soak['device_growth_mb']:+.0f} MB."
    )
    second = (
        f"- {many['processes']:,} processes that open one archive: {many['own_mb_opened_median']:.2f} MB of its own "
        f"for each, {many['own_mb_after_reading_all_median']:.2f} after reading every kernel once."
    )
    return [f"{first} {source('soak_h200')[-1]}", f"{second} {source('processes')[-1]}"]


TABLES: dict[str, Callable[[], list[str]]] = {
    "drawn": occasions,
    "on-grid": on_grid,
    "peers": peers,
    "weights": weights,
    "few": few,
    "grouped-weights": grouped_weights,
    "engines": engines,
    "traffic": traffic,
    "decode-steps": decode_steps,
    "runs": engine_runs,
    "experts": experts,
    "expert-launches": expert_launches,
    "grouped": grouped,
    "models": models,
    "host": host,
    "start": start,
    "long-runs": long_runs,
}


def render(page: str) -> str:
    """The page with every table made anew.

    Raises:
        KeyError: the page asks for a table that there is not.
    """
    return _MARK.sub(lambda found: found[1] + "\n".join(["", *TABLES[found[2]](), "", found[3]]), page)


def main() -> int:
    """Render the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and say whether the pages are up to date")
    options = parser.parse_args()
    before = [page.read_text() for page in PAGES]
    after = list(map(render, before))
    if options.check:
        return int(before != after)
    for page, text in zip(PAGES, after, strict=True):
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(ends(main))
