"""One table of what `bench_random.py` measured on several occasions; needs neither torch nor a GPU.

    python scripts/summarise_random.py build/random.json...

For each range of M: the geometric mean of how many times as fast one is as the other, its worst case, and the share of
cases below 0.97; beside each mean and share, the least favourable of any one GPU. Exit status 1 if any result is wrong.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import random_cases
from report import ROOT, ends, geomean

OURS, TORCH, AGAINST, ON_SLOWER, BEST_OF, DEEP_GEMM = "ours", "torch", "against", "on_slower", "best_of", "deep_gemm"
SLOWER = 0.97  # of torch's speed: less than this is counted, as more than noise
PAIRS = (  # who is compared with what
    (OURS, TORCH),
    (ON_SLOWER, TORCH),
    (AGAINST, TORCH),
    (OURS, AGAINST),
    (AGAINST, OURS),
    (OURS, DEEP_GEMM),
    (OURS, BEST_OF),
)
ALL = "all"
# By whose times the package's archive was made, from which day on.
_MADE_BY = {"variants_h200": "", "ragged_h200": "", "drawn_h200": "2026-11-27", "drawn_h100": "2026-11-27"}
_OWN = (OURS, AGAINST, ON_SLOWER, BEST_OF)  # contenders that are archives
_COLUMNS = (
    "who",
    "over",
    "group",
    "regime",
    "cases",
    "measured",
    "gpus",
    "geomean",
    "lowest",
    "worst",
    "slower",
    "most",
)


def summarise(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each archive, pair, group of signatures and range of M that was measured.

    `geomean`, `worst` and `slower` (the share below `SLOWER`) are over all measurements; `lowest` is the lowest geomean
    of one GPU, `most` the largest share of one. `cases` are distinct, `measured` counts each time.
    """
    lines = []
    for archive, drawn in dict.fromkeys((d["archive"], d["drawn"]) for d in documents):
        rows = [r for d in documents if (d["archive"], d["drawn"]) == (archive, drawn) for r in d["results"]]
        for who, over in PAIRS:
            timed = [(r, found) for r in rows if (found := ratio(r, who, over)) is not None]
            for group in (ALL, *sorted({r["group"] for r, _ in timed})):
                for regime, low, high in random_cases.REGIMES:
                    picked = [(r, x) for r, x in timed if group in (ALL, r["group"]) and low <= r["m"] <= high]
                    if picked:
                        line = {"archive": archive, "drawn": drawn, "who": who, "over": over, "group": group}
                        lines.append(line | {"regime": regime} | figures(picked))
    return lines


def unseen(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the cases whose N and K the package's archive of that day never saw: by whose times neither
    estimates were fitted or corrected nor functions chosen."""
    seen = _seen(document["date"])
    return {**document, "results": [r for r in document["results"] if _extents(r["signature"]) not in seen]}


@functools.cache
def _seen(date: str) -> frozenset[tuple[int, int]]:
    paths = [ROOT / "benchmarks" / f"{name}.json.xz" for name, since in _MADE_BY.items() if since <= date]
    kept = [json.loads(lzma.decompress(path.read_bytes())) for path in paths]
    signatures = (r["signature"] for each in kept for r in each["results"])
    return frozenset(_extents(of) if isinstance(of, str) else (of["n"], of["k"]) for of in signatures)


def _extents(key: str) -> tuple[int, int]:
    n, k = re.findall(r"_n(\d+)_k(\d+)", key)[0]
    return int(n), int(k)


def ratio(result: Mapping[str, Any], who: str, over: str) -> float | None:
    """How many times as fast `who` is as `over`; None where one was not timed, or torch has no kernel for the case."""
    if over == TORCH and improvised(result):
        return None
    ours, theirs = (result["contenders"].get(name, {}).get("us") for name in (who, over))
    if not ours or not theirs:
        return None
    return min(theirs / ours, 1.0) if over == BEST_OF else theirs / ours  # what serves is one of those, timed twice


def improvised(result: Mapping[str, Any]) -> bool:
    """Whether torch multiplied what it had dequantised, or ran an epilogue op by op: nobody would, and it is slow."""
    variant = result["contenders"].get(TORCH, {}).get("variant", "")
    return variant.startswith("dequantise") or ", eager " in variant


def figures(picked: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, Any]:
    """What a line says of cases and ratios: see `summarise`."""
    by_gpu: dict[str, list[float]] = {}
    for result, ratio in picked:
        by_gpu.setdefault(result["gpu_id"], []).append(ratio)
    ratios = [ratio for _, ratio in picked]
    worst, at = min(((ratio, f"{r['layers']} M={r['m']}") for r, ratio in picked), key=lambda found: found[0])
    return {
        "cases": len({(r["signature"], r["m"]) for r, _ in picked}),
        "measured": len(picked),
        "gpus": len(by_gpu),
        "geomean": round(geomean(ratios), 5),
        "lowest": round(min(geomean(own) for own in by_gpu.values()), 4),
        "worst": round(worst, 4),
        "worst_at": at,
        "slower": round(_slower(ratios), 4),
        "most": round(max(_slower(own) for own in by_gpu.values()), 4),
    }


def _slower(ratios: Sequence[float]) -> float:
    return sum(ratio < SLOWER for ratio in ratios) / len(ratios)


def wrong(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each result of an archive that was wrong."""
    return [f"{name}: {r['signature']} M={r['m']}: {why}" for r, name, why in _said(documents, "wrong")]


def unserved(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each case that an archive did not serve, with its reason."""
    return [f"{name}: {r['signature']} M={r['m']}: {why}" for r, name, why in _said(documents, "unserved")]


def _said(documents: Sequence[Mapping[str, Any]], what: str) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    for document in documents:
        for result in document["results"]:
            for name in _OWN:
                if what in result["contenders"].get(name, {}):
                    yield result, name, result["contenders"][name][what]


def noise(documents: Sequence[Mapping[str, Any]]) -> float | None:
    """Torch's time over its own in the same runs, as a geometric mean; None where nothing was timed."""
    found = [r["noise"] for d in documents for r in d["results"] if "noise" in r]
    return round(geomean(found), 4) if found else None


def table(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """What people read: a line for each of `summarise`, then what was wrong and what was not served."""
    lines = []
    summary = summarise(documents)
    for archive, drawn in dict.fromkeys((s["archive"], s["drawn"]) for s in summary):
        lines.append(f"archive {archive[:12]}, {drawn}")
        lines.append(" ".join(f"{c:>{_width(c)}s}" for c in _COLUMNS))
        for s in summary:
            if (s["archive"], s["drawn"]) == (archive, drawn):
                lines.append(" ".join(f"{_cell(s, c):>{_width(c)}s}" for c in _COLUMNS) + f"  {s['worst_at'][:60]}")
    for what, found in (("wrong", wrong(documents)), ("not served", unserved(documents))):
        lines.append(f"{len(found)} {what}" + (f", first {found[0]}" if found else ""))
    if left := sum(improvised(r) for d in documents for r in d["results"]):
        lines.append(f"{left} not compared with torch, which has no kernel for them")
    if (of_torch := noise(documents)) is not None:
        lines.append(f"torch against itself: {of_torch:.4f}")
    return lines


def _width(column: str) -> int:
    return {"group": 16, "who": 9, "over": 9, "regime": 11}.get(column, 8)


def _cell(line: Mapping[str, Any], column: str) -> str:
    value = line[column]
    if column in ("slower", "most"):
        return f"{value:.1%}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The result files.

    Raises:
        ValueError: one is no such file; the message names it.
    """
    documents = []
    for path in paths:
        try:
            found = json.loads(path.read_text())
            assert {"archive", "drawn", "environments", "results"} <= found.keys()
        except (OSError, ValueError, AttributeError, AssertionError):
            raise ValueError(f"{path} is no result file of scripts/bench_random.py") from None
        documents.append(whole(found))
    return documents


def whole(document: Mapping[str, Any]) -> dict[str, Any]:
    """A result file with a row for each case, also where `reduce_results.py` put those of a layer together."""
    rows = []
    for each in document["results"]:
        r = document.get("of_each", {}) | each
        if "cases" not in r:
            rows.append(r)
            continue
        of = {k: r[k] for k in ("layers", "signature", "group", "gpu_id")}
        for m, noise, *found in r["cases"]:
            said = {
                name: dict(zip(("us", "spread"), x, strict=True)) if isinstance(x, list) else dict(x)
                for name, x in zip(r["contenders"], found, strict=True)
            }
            if TORCH in said:
                said[TORCH]["variant"] = r["torch"]
            rows.append(of | {"m": m, "contenders": said} | ({} if noise is None else {"noise": noise}))
    return {k: v for k, v in document.items() if k != "of_each"} | {"results": rows}


def main() -> int:
    """Read and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="what bench_random.py --out wrote")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    options = parser.parse_args()
    try:
        documents = read(options.results)
    except ValueError as error:
        parser.error(str(error))
    if options.json:
        found = {"summary": summarise(documents), "wrong": wrong(documents), "unserved": unserved(documents)}
        print(json.dumps(found | {"noise": noise(documents)}, indent=1))
    else:
        print("\n".join(table(documents)))
    return 1 if wrong(documents) else 0


if __name__ == "__main__":
    sys.exit(ends(main))
