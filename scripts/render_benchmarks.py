"""Write docs/benchmarks.md from the JSON files in benchmarks/results/; no figure of its tables is typed by hand.

The floor of a cold read is a constant here where a run did not time it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import bench_startup
import random_cases
import summarise_random
from report import geomean

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
INTRO = """# Benchmarks

Made by `python scripts/render_benchmarks.py` from `benchmarks/results/*.json`; each section names the command, date
and commit behind it. Device times are medians of CUDA-graph replays over operands that together exceed three times L2
(cold weights), interleaved with torch (cuBLAS) in one process; *spread* is (largest - smallest) / median over the
replays, and *noise* is torch against itself in the same run. Below 1.00x this archive is slower than cuBLAS.

The archive off the tuned grid was tuned with default settings, by predicted time at every M; estimates have changed
since, and kernels that skip rows past M have not run yet. No other archive on this page was tuned so: winners at the M
values that are shown served up to the next, and M between them fares worse.

The archives of the first two sections on the tuned grid and of those beside quack, of `build/serial8.aot` and those
laid over it, are of kernels as of commit 1c2cbb1, compiled without a GPU (`aot build build/NAME.yaml --candidates C
--target sm_90a --no-tune`), from parts of the manifests in `benchmarks/`:

```bash
grep -Ev 'overlap:|scaling:' benchmarks/layers.yaml > build/serial8.yaml   # 24 candidates, 821 kernels
(grep -v '^  - ' benchmarks/layers.yaml; grep 'overlap:' benchmarks/layers.yaml) > build/weights8.yaml   # 24, 828
(grep -v '^  - ' benchmarks/layers.yaml; grep 'scaling:' benchmarks/layers.yaml) > build/fp8.yaml   # 12, 286
sed 's/, overlap: weights//' benchmarks/overlap.yaml > build/rest.yaml   # what manifests/*.yaml have besides: 16, 703
cp benchmarks/overlap.yaml benchmarks/fused.yaml build/   # 16 each, 714 and 386
```

The first two were tuned with `aot tune --tolerance 0 --no-sustained --finalists 4 --repeats 4`, two minutes each,
rest, overlap and fused the same but for `--finalists 3 --repeats 3`, one to three minutes each. `build/fp8.aot` is of
commit 23f3e75, and so are `build/llama.aot` (`manifests/llama-3.1-8b*.yaml`, 8 candidates) and `build/llama8b.aot`
(manifests/llama-3.1-8b.yaml).

The others are of kernels before: `build/tuned.aot` of `aot build benchmarks/layers.yaml manifests/*.yaml --target
sm_90a --candidates 16 --function rmsnorm` and `aot tune --finalists 3 --repeats 3`; patches that end in `_13` as
above, of 24 candidates (`more8`, `weights24`), as of commit bed5e2b; `_new` and `_short` of before them;
`build/more_tuned.aot` and `build/weights_tuned.aot`, tuned under sustained load too, 24 candidates. Where bounds and
company_h200.json name the last two they are of `benchmarks/more.yaml`, 24 candidates, and of 12 with overlap; beside
`build/rest_tuned.aot`, of 20. `build/tiles.aot` has the kernels of three problems, 16 candidates. The commit named is
the scripts'; kernels are of it or of one before. `build/qwen_tuned.aot` is of `benchmarks/qwen3-8b.yaml`,
`build/llama_tuned.aot` of manifests/llama-3.1-8b.yaml, and `build/thousand.aot` as `benchmarks/thousand.yaml` says.
GPUs of one kind differ: no two of these H200s give the same figures. Where a section's archive_sha256 is another, its
archive was tuned before, with kernels before these.
"""


def load(name: str) -> dict[str, Any] | None:
    """A result file, or None if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(header: list[str], rows: list[list[Any]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(str(x) for x in row) + " |" for row in rows]


def origin(result: dict[str, Any]) -> list[str]:
    """Where the figures of a section come from."""
    environment = ", ".join(f"{k} {v}" for k, v in result["environment"].items() if v not in ("", "unknown"))
    said = "; ".join(x for x in (f"commit {result['commit'][:12]}", environment) if x)
    lines = [f"`{result['command']}`, {result['date']}, {said}.", ""]
    return [*lines, f"{result['note']}.", ""] if "note" in result else lines


# A cold read of so many MiB alone, in microseconds on an H200: what an operand B takes at least. Measured apart, and
# interpolated between.
READ_FLOOR_US = ((8, 3.9), (16, 5.7), (32, 9.5), (48, 13.4), (112, 28.5), (224, 53.8))
# What is compared: how it is called, the type of signatures, and its M.
HEADLINES = (
    ("bf16, M = 1..64", "bf16", range(1, 65)),
    ('bf16 with overlap "weights", M = 1..64', "bf16 weights", range(1, 65)),
    ("bf16, M = 128, 256", "bf16", (128, 256)),
    ('bf16 with overlap "weights", M = 128, 256', "bf16 weights", (128, 256)),
    ("bf16, M = 333", "bf16", (333,)),
    ("bf16, M = 512..8192", "bf16", range(512, 8193)),
    ('bf16 with overlap "weights", M = 512..8192', "bf16 weights", range(512, 8193)),
    ("e4m3 row_column, M = 1..64", "e4m3 row_column", range(1, 65)),
    ("e4m3 row_column, M = 128..8192", "e4m3 row_column", range(128, 8193)),
    ("SwiGLU, all M", "bf16 swiglu", range(1, 8193)),
    ("SwiGLU, without M = 333", "bf16 swiglu", [m for m in range(1, 8193) if m != 333]),
    ('SwiGLU with overlap "weights", all M', "bf16 swiglu weights", range(1, 8193)),
)


def headlines(result: dict[str, Any]) -> list[str]:
    """Geometric means and worst cases over torch, of the eight layers that kernels are judged by and of all."""
    measured = [r for r in result["results"] if "speedup" in r]
    eight = [r for r in measured if r["layers"].startswith("layers:")]
    rows = []
    for what, types, tokens in HEADLINES:
        picked = [[r for r in rs if r["types"] == types and r["m"] in tokens] for rs in (eight, measured)]
        cells = [_ratios(rs, f) for rs in picked for f in ("speedup", "sustained_speedup")]
        if any(cells):
            rows.append([what, *cells])
    few = [r for r in measured if r["types"] == "bf16" and r["m"] <= 16]
    floors = [f"{_floors(rs)} of a cold read of B on {which}" for which, rs in _read(few, eight) if rs]
    lines = ["Times torch's, geometric mean (worst), number of cases:", ""]
    lines += table(["", "eight layers", "sustained", "all", "sustained"], rows)
    return [
        *lines,
        "",
        *([f"bf16, M <= 16: {', '.join(floors)}."] if floors else []),
        *_free_gates(measured),
        "",
    ]


def _free_gates(measured: list[dict[str, Any]]) -> list[str]:
    """What SwiGLU costs, where the same GEMM was timed without it: what a fused one could gain if it cost nothing."""
    plain = {(r["signature"], r["m"]): r for r in measured if r["types"] in ("bf16", "bf16 weights")}
    lines = []
    for types in ("bf16 swiglu", "bf16 swiglu weights"):
        fused = [r for r in measured if r["types"] == types]
        pairs = [(r, plain.get((r["signature"].replace("_swiglu_", "_none_"), r["m"]))) for r in fused]
        both = [(r, p) for r, p in pairs if p is not None]
        if both:
            lines += [
                "",
                f"{types}, the {len(both)} problems that were timed without SwiGLU as well: ours takes "
                f"{geomean([r['us'] / p['us'] for r, p in both]):.3f} of the plain GEMM, torch's two kernels "
                f"{geomean([r['torch_us'] / p['torch_us'] for r, p in both]):.3f} of its own; ours is at "
                f"{geomean([r['speedup'] for r, _ in both]):.3f} of torch's two, and the plain GEMM alone would be at "
                f"{geomean([r['torch_us'] / p['us'] for r, p in both]):.3f}.",
            ]
    return lines


def _read(few: list[dict[str, Any]], eight: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Whose times are held against a cold read: of the eight layers, and of all if the run timed one for each."""
    timed = all("read_us" in r for r in few)
    return [("the eight layers", [r for r in few if r in eight]), ("all", few if timed else [])]


def _floors(rows: list[dict[str, Any]]) -> str:
    """Geometric mean (largest) of times over a cold read of B: that of the same run, where it was timed."""
    ratios = [r["us"] / (r["read_us"] if "read_us" in r else read_floor_us(r)) for r in rows]
    return f"{geomean(ratios):.3f} ({max(ratios):.2f})"


def read_floor_us(row: dict[str, Any]) -> float:
    """What reading B takes at least, for a row of bf16."""
    found = re.search(r"_n(\d+)_k(\d+)", row["signature"])
    assert found is not None
    mib = 2 * int(found[1]) * int(found[2]) / 2**20
    below = max((p for p in READ_FLOOR_US if p[0] <= mib), default=READ_FLOOR_US[0])
    above = min((p for p in READ_FLOOR_US if p[0] >= mib), default=READ_FLOOR_US[-1])
    if below[0] == above[0]:
        return below[1] * mib / below[0]
    return below[1] + (above[1] - below[1]) * (mib - below[0]) / (above[0] - below[0])


def _ratios(rows: list[dict[str, Any]], field: str) -> str:
    ratios = [r[field] for r in rows if field in r]
    return f"{geomean(ratios):.3f} ({min(ratios):.2f}), {len(ratios)}" if ratios else ""


def gemm(title: str, result: dict[str, Any]) -> list[str]:
    """Speed and correctness of the tuned archive."""
    lines = [f"## {title}", "", *origin(result), *headlines(result)]
    summary = result["summary"]
    lines += table(
        ["inputs", "M", "cases", "geomean", "worst", "best", "noise", "largest spread", "wrong", "sustained"],
        [
            [
                s["types"],
                s["regime"].removeprefix("M = ").replace("M >= ", ">= "),
                s["cases"],
                f"**{s['geomean']:.3f}x**",
                f"{s['worst']:.2f}x",
                f"{s['best']:.2f}x",
                f"{s['noise_geomean']:.3f}x",
                f"{100 * s['largest_spread']:.0f}%",
                s["wrong"],
                _sustained(s),
            ]
            for s in summary
        ],
    )
    tokens = sorted({r["m"] for r in result["results"]})
    cells: dict[str, dict[int, dict[str, Any]]] = {}
    labels, kinds = {}, {}
    for r in result["results"]:
        kinds[r["signature"]] = r.get("types", "")
        cells.setdefault(r["signature"], {})[r["m"]] = r
        labels[r["signature"]] = r["layers"]
    rows = []
    for signature, by_m in cells.items():
        row = [
            labels[signature].replace("_", "\\_"),
            re.sub(r".*_(?=n\d)", "", signature).replace("_", " "),
            kinds[signature],
        ]
        for m in tokens:
            r = by_m.get(m)
            row.append("" if r is None else f"{r['us']:.1f} ({r['speedup']:.2f}x)" if "speedup" in r else "miss")
        rows.append(row)
    if any(s.get("sustained_cases") for s in summary):
        lines += [
            "",
            "*sustained*: cases where operations take twice as long as bytes or longer once more, each for 150 ms",
            "without pause, of which the last 40 are timed: at the clock that its own power leaves it.",
        ]
    lines += ["", "Microseconds, and times cuBLAS, at each M:", ""]
    lines += table(["layers", "shape", "type", *(f"M={m}" for m in tokens)], rows)
    errors = [r["error"] for r in result["results"] if isinstance(r["error"], float)]
    wrong = len(result["results"]) - len(errors)
    lines += [
        "",
        f"Correctness in the same run: {len(result['results'])} cases on fresh random inputs with poisoned outputs, "
        f"{wrong} wrong; the largest relative error against float32 is {max(errors):.2e}.",
        "",
    ]
    return lines


def _sustained(summary: dict[str, Any]) -> str:
    """Geomean and worst under sustained load, where some cases were timed so."""
    if not summary.get("sustained_cases"):
        return ""
    ratios = f"{summary['sustained_geomean']:.3f}x, worst {summary['sustained_worst']:.2f}x"
    return f"{ratios} ({summary['sustained_cases']} cases)"


def peers(title: str, result: dict[str, Any]) -> list[str]:
    """This archive against other libraries: who took part, summaries, and every case."""
    lines = [f"## {title}", "", *origin(result)]
    for name, said in result["peers"].items():
        if "absent" in said:
            lines.append(f"- {name}: absent ({said['absent']}).")
        else:
            versions = ", ".join(f"{k} {v}" for k, v in said["versions"].items())
            lines.append(f"- {name}: {versions}; of {said['search']}, the fastest that is right.")
    lines += ["", "Times as long as this archive takes:", ""]
    columns = (
        "kind",
        "ours",
        "regime",
        "against",
        "cases",
        "geomean",
        "worst",
        "best",
        "noise_geomean",
        "largest_spread",
    )
    lines += table(
        ["kind", "of", "M", "against", "cases", "geomean", "worst", "best", "noise", "largest spread"],
        [[_peers_cell(column, ({"ours": "ours"} | s)[column]) for column in columns] for s in result["summary"]],
    )
    names = list(dict.fromkeys(name for r in result["results"] for name in r["contenders"]))
    rows = []
    for r in result["results"]:
        ours = r["contenders"]["ours"].get("us")
        cells = [_peers_time(r["contenders"].get(name, {}), None if name == "ours" else ours) for name in names]
        rows.append([r["kind"], r["layer"].replace("_", "\\_"), r["m"], *cells])
    lines += ["", "Microseconds, and times as long as this archive takes:", ""]
    lines += table(["kind", "layer", "M", *names], rows)
    imprecise = sorted({name for r in result["results"] for name, c in r["contenders"].items() if "imprecise" in c})
    if imprecise:
        what = "let the tensor core sum over all of K, or round twice, and err by more than this archive's kernels may"
        lines += ["", f"Less precise: {', '.join(imprecise)} {what}."]
    for name in names:
        reasons = [f"{v}: {why}" for r in result["results"] for v, why in _wrong(r["contenders"].get(name, {}))]
        if reasons:
            lines += ["", f"{name} counts as wrong and is not timed in {len(reasons)} cases, first for {reasons[0]}."]
    left_out = len(result["left_out"])
    if left_out:
        lines += ["", f"{left_out} case{'s were' if left_out > 1 else ' was'} left out for want of time."]
    return [*lines, ""]


def _wrong(contender: dict[str, Any]) -> list[tuple[str, str]]:
    """What a contender that was not timed computed wrong: variants and how."""
    return [] if "us" in contender else list(contender.get("wrong", {}).items())


def _peers_cell(column: str, value: Any) -> str:
    if column == "largest_spread":
        return f"{100 * value:.0f}%"
    if column == "regime":
        return str(value).removeprefix("M = ").removeprefix("M ").replace(" M", "")
    if column == "geomean":
        return f"**{value:.3f}x**"
    return f"{value:.2f}x" if column in ("worst", "best", "noise_geomean") else str(value)


def _peers_time(found: dict[str, Any], ours: float | None) -> str:
    """What a contender took, or the reason why it has no time in one word."""
    if "us" not in found:
        return next((word for word in ("unsupported", "failed", "wrong") if word in found), "")
    ratio = f" ({found['us'] / ours:.2f}x)" if ours else ""
    return f"{found['us']:.1f}{ratio}"


def power(title: str, result: dict[str, Any]) -> list[str]:
    """What kernels settle at when they are launched without pause."""
    limit = result["environment"]["enforced.power.limit"]
    lines = [f"## {title}", "", *origin(result)]
    lines += [f"Launched without pause; medians after the first 0.4 s. The limit is {limit} W.", ""]
    rows = [
        [
            _shape(r["signature"]),
            r["m"],
            r["who"] + (", zeros" if r.get("values") == "zero" else ""),
            r["us"],
            _percent(r.get("spread")),
            r["tflops"],
            r["clock_mhz"],
            r["power_w"],
            f"{r['power_capped']:.0%}",
        ]
        for r in result["results"]
    ]
    header = ["signature", "M", "", "us", "spread", "TFLOP/s", "clock, MHz", "power, W", "samples at the power cap"]
    return [*lines, *table(header, rows), ""]


def lengths(result: dict[str, Any]) -> list[str]:
    """Times against K, as lines."""
    lines = ["## What a launch pays once and for each column of K, on an H200", "", *origin(result)]
    lines += [
        "Least-squares lines through the times at nine values of K, a quarter to one and a half times the layer's: us "
        "paid once and us for 1,024 columns; *off* is the farthest time's distance from its line. *One stage* is the "
        "time with 64 columns, which is little more than a launch.",
        "",
    ]
    rows = [
        [
            _shape(r["signature"]),
            r["m"],
            _kernel(r["who"]),
            r["one_stage_us"],
            r["fixed_us"],
            r["us_per_1024"],
            _percent(r["off"]),
            _percent(r["spread"]),
        ]
        for r in result["results"]
    ]
    header = ["", "M", "", "one stage", "us once", "us for 1,024 columns", "off", "largest spread"]
    return [*lines, *table(header, rows), ""]


def cold_read(result: dict[str, Any]) -> list[str]:
    """What reading takes at least."""
    lines = [
        "## Cold reads, on an H200",
        "",
        *origin(result),
        "Microseconds; the last columns are all kernels tried.",
        "",
    ]
    names = list(result["results"][0]["all_us"])
    rows = [
        [r["mib"], r["us"], _percent(r["spread"]), f"{r['mib'] * 2**20 / r['us'] / 1e6:.2f}", *r["all_us"].values()]
        for r in result["results"]
    ]
    return [*lines, *table(["MiB", "fastest", "spread", "TB/s", *names], rows), ""]


def gpcs(title: str, result: dict[str, Any]) -> list[str]:
    """Which SMs are neighbours."""
    lines = [f"## {title}", "", *origin(result)]
    rows = [[number, len(sms), " ".join(map(str, sms))] for number, sms in enumerate(result["groups"])]
    lines += [*table(["group", "SMs", ""], rows), ""]
    order = " ".join(map(str, result["groups_of_clusters"]))
    return [*lines, f"Clusters of two, one for each TPC, fall in their order to groups {order}.", ""]


def overlap(result: dict[str, Any]) -> list[str]:
    """What loading weights early adds to beginning early."""
    lines = ["## Launches that begin early, against those that load weights early too", "", *origin(result)]
    lines += [f"{result['what']}. Times that the former take, of what the latter take:", ""]
    columns = ("what", "cases", "launch_over_weights", "least", "most", "largest_spread")
    rows = [[s[column] for column in columns] for s in result["summary"]]
    return [*lines, *table(["", "cases", "geomean", "least", "most", "largest spread"], rows), ""]


def bounds(title: str, result: dict[str, Any]) -> list[str]:
    """Hardware counters."""
    lines = [f"## {title}", "", *origin(result)]
    lines += [
        "Medians of three launches with cold caches and nothing else running, ncu. Shares are of what a unit can do in "
        "that time; *SMs active* is the share of cycles in which an SM holds a CTA, *longest*, where it was counted, "
        "the cycles in which the busiest does. Below each of ours are the kernels that torch launches for the same.",
        "",
    ]
    shares = ("sms_active", "tensor_pipe", "shared_reads", "shared_writes", "l2", "memory")
    longest = "mega_cycles_of_the_longest_sm"
    cycles = [name for name in ("mega_cycles", longest) if name in result["results"][0]]
    header = ["", "M", "", "us", "spread", "thousand cycles", "longest", "CTAs", "SMs active", "tensor pipe"]
    header = [name for name in header if name != "longest" or longest in cycles]
    header += ["shared memory read", "written", "L2", "memory", "MB into SMs", "MB from memory"]
    titles = {
        "l2_mega_sectors": "million sectors of L2",
        "multicast_mega_sectors": "spared by multicast",
        "merged_mega_sectors": "spared as reads met",
    }
    sectors = [name for name in titles if name in result["results"][0]]
    header += [titles[name] for name in sectors]
    rows = [
        [
            _shape(r["signature"]),
            r["m"],
            _who(r),
            f"{r['us']:.1f}",
            f"{r['spread']:.0%}",
            *(f"{r[k] * 1e3:.1f}" for k in cycles),
            f"{r['ctas']:.0f}",
            *(f"{r[k]:.0%}" for k in shares),
            *(f"{r[k]:.0f}" for k in ("mb_into_sms", "mb_read")),
            *(f"{r[k]:.2f}" for k in sectors),
        ]
        for r in result["results"]
    ]
    return [*lines, *table(header, rows), ""]


def tiles(title: str, result: dict[str, Any]) -> list[str]:
    """What tiles cost besides their products."""
    lines = [f"## {title}", "", *origin(result)]
    lines += [
        "Medians of three launches alone with cold caches, ncu. Thousand cycles of the SM that is busy for longest, "
        "and what of them is not 512 for each 128 x 128 x 64 of its products; kernels that differ in the order of "
        "tiles and in what may overlap, which here is nothing, are in one row, from least to most.",
        "",
    ]
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in result["results"]:
        schedule = re.sub(r".*\.(tile\w+\.cluster\w+)\.\w+\.\w+\.(\w+)\.split_k1(.*)\.sm_90a", r"\1 \2\3", r["kernel"])
        found.setdefault((f"{r['m']} x {r['n']} x {r['k']}", schedule.replace(".", " "), r["tiles"]), []).append(r)
    rows = [
        [
            *what,
            _span([r["us"] for r in rs], ".1f"),
            _span([r["cycles_of_the_longest_sm"] / 1e3 for r in rs], ".1f"),
            _span([r["cycles_besides"] / 1e3 for r in rs], ".1f"),
            _span([r["tensor_pipe"] * 100 for r in rs], ".1f") + "%",
            f"{max(r['spread'] for r in rs):.1%}",
        ]
        for what, rs in found.items()
    ]
    header = ["M x N x K", "", "tiles of an SM", "us", "thousand cycles", "besides", "tensor pipe", "spread"]
    return [*lines, *table(header, rows), ""]


def _span(values: list[float], form: str) -> str:
    """The least and the most."""
    least, most = (f"{x:{form}}" for x in (min(values), max(values)))
    return least if least == most else f"{least}-{most}"


def company(result: dict[str, Any]) -> list[str]:
    """What comes before a launch."""
    lines = ["## What comes before a launch, on an H200", "", *origin(result)]
    lines += [
        "Microseconds of a launch in a CUDA graph behind another, what that takes alone taken off, and in brackets the "
        "spread; each twice, one round after the other.",
        "",
    ]
    before = list(dict.fromkeys(r["before"] for r in result["results"]))
    rows: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    for r in result["results"]:
        of_kernel = rows.setdefault((_shape(r["signature"]), r["m"], _kernel(r["who"])), {})
        of_kernel.setdefault(r["before"], []).append(f"{r['us']:.1f} ({r['spread']:.0%})")
    cells = [[*what, *(", ".join(found[name]) for name in before)] for what, found in rows.items()]
    return [*lines, *table(["", "M", "", *before], cells), ""]


def _who(row: dict[str, Any]) -> str:
    """Whose kernel, and which; of ours the compiler's symbol says nothing, and only the function's name is shown."""
    if row["who"] != "ours":
        return _kernel(row["kernel"]) if row["who"] == "torch" else f"{row['who']} {row['kernel']}"
    function = "" if row["kernel"].startswith("kernel_") else _kernel(row["kernel"])
    return f"**ours** {function}".strip()


def _kernel(name: str) -> str:
    """A kernel's name without what all have."""
    return re.sub(r".*\.(?=tile)|\.sm_90a|nvjet_sm90_tst_|<.*|.*::", "", name).replace(".", " ")


def _shape(signature: str) -> str:
    """The extents in the key of a signature, and what follows them."""
    return re.sub(r".*_(?=n\d)", "", signature).replace("_", " ")


def turns(result: dict[str, Any]) -> list[str]:
    """The same contenders in turns of several lengths."""
    lines = ["## The length of a turn, on an H200", "", *origin(result)]
    lines += [
        "The candidates that are fastest in short turns, and torch; of each turn the last quarter is timed. Times "
        "torch's, and in brackets the spread over the turns.",
        "",
    ]
    lengths = sorted({r["turn_ms"] for r in result["results"]})
    cells: dict[tuple[str, int, str], dict[float, str]] = {}
    for r in result["results"]:
        who = re.sub(r".*\.(?=tile)|\.sm_90a", "", r["who"]).replace(".", " ")
        shown = f"{r['us']:.1f} us" if who == "torch" else f"{r['speedup']:.3f}x"
        cells.setdefault((r["signature"], r["m"], who), {})[r["turn_ms"]] = f"{shown} ({r['spread']:.0%})"
    rows = [[_shape(key), m, who, *(found[x] for x in lengths)] for (key, m, who), found in cells.items()]
    return [*lines, *table(["", "M", "", *(f"{x:g} ms" for x in lengths)], rows), ""]


def models(title: str, result: dict[str, Any]) -> list[str]:
    """Whole models of transformers."""
    lines = [f"## {title}", "", *origin(result)]
    lines += [
        "One forward pass captured into a CUDA graph; both ways take turns of 150 ms. *difference* is the relative one "
        "of the logits, beside torch's where it runs again without a graph, or *error* and *torch error*: from a model "
        "whose layers add up in f32 and round once. A model of random weights makes much of a rounding.",
        "",
    ]
    differences = ("difference", "difference_of_torch_again", "error", "torch_error")
    shown = [name for name in differences if name in result["results"][0]]
    header = ["batch", "tokens", "context", "torch", "archive", "times torch", "tokens/s"]
    rows = [
        [
            *(r[k] for k in ("batch", "tokens", "context")),
            *(f"{r[k]['ms']:.3f} ms ({r[k]['spread']:.1%})" for k in ("torch", "archive")),
            f"**{r['speedup']:.3f}x**",
            r["archive"]["tokens_per_s"],
            *(f"{r[name]:.3f}" for name in shown),
        ]
        for r in result["results"]
    ]
    return [*lines, *table([*header, *(name.replace("_", " ") for name in shown)], rows), ""]


def startup(title: str, result: dict[str, Any]) -> list[str]:
    """Processes from their start."""
    lines = [f"## {title}", "", *origin(result)]
    lines += ["Medians in milliseconds (largest), each of processes of their own, which take turns.", ""]
    parts = list(dict.fromkeys(part for found in result["results"].values() for part in found))
    rows = [[name, *(_part(part, found.get(part)) for part in parts)] for name, found in result["results"].items()]
    return [*lines, *table(["", *parts], rows), ""]


def _part(name: str, found: dict[str, float] | None) -> str:
    if found is None:
        return ""
    if name in bench_startup.COUNTS:
        return f"{found['median']:.0f}"
    return f"{found['median'] * 1e3:.1f} ({found['max'] * 1e3:.1f})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def host(title: str, result: dict[str, Any]) -> list[str]:
    """Host costs."""
    r = result["results"]
    lines = [f"## {title}", "", *origin(result)]
    rows: list[list[Any]] = []
    for key in ("open_large_ms", "open_tuned_ms"):
        if key in r:
            count = r[key.split("_")[1] + "_functions"]
            rows.append([f"open an archive of {count} functions", f"{r[key]['median']} ms", f"{r[key]['max']} ms"])
    first = r["first_launch_ms"]
    rows.append(
        [f"first launch of a kernel ({first['kernels']} kernels)", f"{first['median']} ms", f"{first['max']} ms"]
    )
    rows.append(["first launch at a new M", f"{r['new_m_ms']['median']} ms", f"{r['new_m_ms']['max']} ms"])
    for name, what in (("first_of_kernel_ms", "of a kernel"), ("one_row_ms", "at M = 1")):
        if name in r:
            found = r[name]
            rows.append(
                [f"first call {what}, preloaded ({found['calls']})", f"{found['median']} ms", f"{found['max']} ms"]
            )
    rows += [[f"`{name}`", f"{t['median']} us", f"{t['max']} us"] for name, t in r["host_us"].items()]
    lines += table(["", "median", "max"], rows)
    lines += [
        "",
        f"`lib.gemm(a, b, out=d)` takes **{r['host_ratio']}x** the host time of `torch.mm(a, b.t(), out=d)`.",
        "",
    ]
    return lines


def build(title: str, result: dict[str, Any]) -> list[str]:
    """Build throughput and archive size."""
    lines = [f"## {title}", "", *origin(result)]
    return lines + table(["", ""], [[k.replace("_", " "), v] for k, v in result["results"].items()]) + [""]


def ranking(title: str, result: dict[str, Any]) -> list[str]:
    """How much slower than the best of all variants the best of those that are ranked first is."""
    rows = [
        [line["form"], line["cases"]]
        + [f"{mean:.4f} ({worst:.3f})" for mean, worst in zip(line["geomean"], line["worst"], strict=True)]
        for line in result["summary"]
    ]
    header = ["", "cases", *(f"first {n}" for n in result["first"])]
    return [f"## {title}", "", *origin(result), *table(header, rows), ""]


OFF_GRID_NAMES = {
    "ours": "this archive",
    "on_slower": 'with `on_slower="torch"`',
    "against": "the other archive",
    "best_of": "the best of the candidates",
    "torch": "torch (cuBLAS)",
    "deep_gemm": "DeepGEMM",
}
OFF_GRID_COLUMNS = ("regime", "cases", "gpus", "geomean", "lowest", "worst", "slower", "most")


def off_grid(documents: list[dict[str, Any]]) -> list[str]:
    """Cases that nobody tuned for, of every run of scripts/bench_random.py: one table for each archive and draw."""
    lines = ["## Off the tuned grid", ""]
    lines += [
        f"Layers of many models, each at an M drawn from 1 to {random_cases.MOST_TOKENS} with the commit as seed."
    ]
    lines += [
        "*slower* is the share of cases below 0.97x. Beside the mean and the share is the least favourable GPU's.",
        "",
    ]
    summary = summarise_random.summarise(documents)
    for archive, drawn in dict.fromkeys((d["archive"], d["drawn"]) for d in documents):
        own = [d for d in documents if (d["archive"], d["drawn"]) == (archive, drawn)]
        for document in own:
            lines += origin(document)
            others = [e for e in document["environments"].values() if e["gpu_id"] != document["environment"]["gpu_id"]]
            lines += [f"Also on {e['gpu']} {e['gpu_id']}, driver {e.get('driver')}." for e in others]
            lines += [""] if others else []
        rows = [
            [OFF_GRID_NAMES[s["who"]], OFF_GRID_NAMES[s["over"]], s["group"], *_off_grid_cells(s)]
            for s in summary
            if (s["archive"], s["drawn"]) == (archive, drawn)
        ]
        header = [
            "",
            "over",
            "signatures",
            "M",
            "cases",
            "GPUs",
            "geomean",
            "lowest GPU's",
            "worst",
            "slower",
            "highest GPU's",
        ]
        lines += table([*header, "highest GPU"], rows)
        wrong, unserved = len(summarise_random.wrong(own)), len(summarise_random.unserved(own))
        of_torch = summarise_random.noise(own)
        noise = f"; torch against itself is at {of_torch:.3f}x" if of_torch else ""
        left = sum(summarise_random.improvised(r) for d in own for r in d["results"])
        noise += f". Not compared with torch, which has no kernel for them: {left}" if left else ""
        lines += ["", f"Wrong results: {wrong}. Cases not served: {unserved}{noise}.", ""]
    return lines


def _off_grid_cells(line: dict[str, Any]) -> list[str]:
    ratios = {c: f"{line[c]:.3f}x" for c in ("geomean", "lowest", "worst")}
    shares = {c: f"{line[c]:.1%}" for c in ("slower", "most")}
    regime = {"regime": line["regime"].removeprefix("M = ").removeprefix("M ")}
    cells = line | regime | shares | ratios | {"geomean": f"**{ratios['geomean']}**"}
    return [str(cells[c]) for c in OFF_GRID_COLUMNS]


def main() -> int:
    """Render the page."""
    lines = [INTRO]
    random_files = sorted(RESULTS.glob("random_*.json"))
    if random_files:
        lines += off_grid(summarise_random.read(random_files))
    sections = {
        "gemm_h200_tuned": lambda r: gemm("GEMM of every layer on an H200, against cuBLAS", r),
        "gemm_h200_all": lambda r: gemm("The same archives on another, at the same time", r),
        "gemm_h200": lambda r: gemm("GEMM on a third, under sustained load too, with kernels of before", r),
        "gemm_h200_before": lambda r: gemm("Every layer on a fourth, with kernels before those", r),
        "gemm_h200_other": lambda r: gemm("GEMM on a fifth, without the patches and before those", r),
        "peers_bf16": lambda r: peers("bf16 GEMM on an H200, against other libraries", r),
        "peers_bf16_few": lambda r: peers("The archives of the first sections beside quack, up to M = 256", r),
        "peers_bf16_many": lambda r: peers("The same from M = 512", r),
        "peers_bf16_all": lambda r: peers("All layers of the manifests from M = 512 beside quack", r),
        "peers_bf16_other": lambda r: peers("The same on another, with kernels of before", r),
        "peers_fp8": lambda r: peers("e4m3 GEMM against other libraries", r),
        "peers_swiglu": lambda r: peers("gate_up with SwiGLU against cuBLAS and quack", r),
        "peers_triton": lambda r: peers("bf16 GEMM against Triton's autotuning, with an earlier archive", r),
        "overlap_h200": overlap,
        "peers_quack_overlapping": lambda r: peers("quack as it is, overlapping with itself", r),
        "peers_quack_serial": lambda r: peers("quack with use_pdl = False in its gemm_sm90.py", r),
        "power_h200": lambda r: power("Clock and power under steady load, on an H200", r),
        "power_zeros_h200": lambda r: power("The same with operands of zeros as well, on another", r),
        "lengths_h200": lengths,
        "gpcs_h200": lambda r: gpcs("SMs whose reads L2 serves once, on an H200", r),
        "gpcs_other_h200": lambda r: gpcs("The same on another", r),
        "cold_read_h200": cold_read,
        "ranking_all_h200": lambda r: ranking("The best of the first few candidates over the best of all variants", r),
        "ranking_before_h200": lambda r: ranking("The same with estimates of before", r),
        "bounds_h200": lambda r: bounds("What bounds a launch, on an H200", r),
        "bounds_patch_h200": lambda r: bounds("The same with the patch, on another", r),
        "bounds_swiglu_h200": lambda r: bounds("What bounds SwiGLU and others, on a third", r),
        "bounds_l2_h200": lambda r: bounds("L2 and the order of tiles, with the archive tuned in short turns", r),
        "bounds_gpcs_h200": lambda r: bounds("The same with tiles in order of GPCs, on another", r),
        "bounds_more_h200": lambda r: bounds("Two problems again, on a fourth", r),
        "bounds_quack_h200": lambda r: bounds("What bounds a launch of quack's, on the same", r),
        "tiles_h200": lambda r: tiles("What a tile costs besides its products, on an H200", r),
        "tiles_before_h200": lambda r: tiles("The same with kernels of before, on the same", r),
        "tiles_staggered_h200": lambda r: tiles("The same with warpgroups apart, not offered, on the same", r),
        "company_h200": company,
        "turns_h200": turns,
        "models_llama_h200": lambda r: models("Llama-3.1-8B of transformers on an H200", r),
        "models_llama_fp8_h200": lambda r: models("The same in e4m3, against _scaled_mm", r),
        "models_qwen3_h200": lambda r: models("Qwen3-8B of transformers on an H200", r),
        "startup_h200": lambda r: startup("The start of a process, on the machine with the H200", r),
        "startup_other_h200": lambda r: startup("The same on another", r),
        "startup_jit_h200": lambda r: startup("The same on a third, beside cute.compile and torch.compile", r),
        "startup_model_h200": lambda r: startup("Preloading a model, and torch.compile of its layers for three M", r),
        "soak_h200": lambda r: build("A soak: threads launch while the archive is reloaded", r),
        "processes": lambda r: build("A thousand processes that open one archive and read all of it, without a GPU", r),
        "runtime_h200": lambda r: host("Host costs of serving, on the machine with the H200", r),
        "runtime_fourth_h200": lambda r: host("The same on another, with code of since", r),
        "runtime_fourth_slow_h200": lambda r: host("The same on that host, in the process before", r),
        "runtime_other_h200": lambda r: host("The same on another, with code of before", r),
        "runtime_slow_h200": lambda r: host("The same on a third, whose host is slower, with code of before", r),
        "runtime_python_h200": lambda r: host("The same without native code, with code of before", r),
        "compile_llama": lambda r: build("Building Llama-3.1-8B for five targets", r),
        "compile_thousand": lambda r: build("Building a thousand kernels", r),
    }
    for name, render in sections.items():
        result = load(name)
        if result is not None:
            lines += render(result)
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
