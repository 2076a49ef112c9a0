"""Reduce result files to what their summary needs, which is what benchmarks/results/ keeps.

    python scripts/reduce_results.py build/gemm.json build/gemm_on_another.json -o benchmarks/results/gemm_h200.json
    python scripts/reduce_results.py 701bf53:benchmarks/results/peers_fp8.json -o benchmarks/results/peers_fp8.json

Sources are files, or files of a commit as git names them; what is written says of which it is a summary. Several are of
one script, and their cases are averaged together. Files of `bench_gemm.py` and `bench_peers.py` become a line for each
pair, group of layers and range of M. One of `bench_random.py` keeps its cases, without what no summary reads; several
become a line for each run, pair and range of M. One of `compare_bits.py` names each function once. Those of other
scripts are put together whole. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import random_cases
import summarise_random
from report import ROOT, ends, geomean

EIGHT = "eight layers"  # those of benchmarks/layers.yaml, which kernels are judged by
ALL = summarise_random.ALL
UNIVERSAL = "universal.aot"  # what the package calls its archive
UNSEEN = "against, N x K never seen"
_ABSOLUTE = re.compile(r"(?<= )/\S*/")  # folders of the machine that a command ran on
_RUN = ("command", "date", "commit", "note", "left_out")
_ENVIRONMENT = ("gpu", "gpu_id", "driver", "torch", "cublas", "archive_sha256", "ours_sha256")
_DIGITS = 16  # of a digest that are kept where there are many runs
_CONTENDER = ("us", "spread", "wrong", "unserved", "failed")

Document = Mapping[str, Any]
Timed = tuple[dict[str, Any], float]  # a case with its GPU, and how many times as fast one is as another


def gemm(documents: Sequence[Document]) -> dict[str, Any]:
    """The archive over torch, of each kind of signature; and over a cold read of B, where that was timed."""
    rows = [r | {"gpu_id": _gpu(d)} for d in documents for r in d["results"] if "speedup" in r]
    summary = []
    for types in sorted({r["types"] for r in rows}):
        of_types = [r for r in rows if r["types"] == types]
        for group, of in _groups(of_types):
            timed = [(r, r["speedup"]) for r in of]
            summary += _lines({"what": types, "over": "torch", "group": group}, timed, [r["spread"] for r in of])
    return {"summary": summary, "over_cold_read": list(_over_cold_read(rows))}


def _groups(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    return [(EIGHT, [r for r in rows if r["layers"].startswith("layers:")]), (ALL, list(rows))]


def _over_cold_read(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """How many times as long as reading B alone GEMMs of so few tokens take that they do little else."""
    read = [r for r in rows if r["types"] == "bf16" and "read_us" in r]
    for group, of in _groups(read):
        for who in ("us", "torch_us"):
            ratios = [r[who] / r["read_us"] for r in of]
            if ratios:
                name = "torch" if who == "torch_us" else "bf16"
                found = {"geomean": round(geomean(ratios), 4), "most": round(max(ratios), 4)}
                yield {"what": name, "group": group, "most_m": max(r["m"] for r in of), "cases": len(ratios), **found}


def peers(documents: Sequence[Document]) -> dict[str, Any]:
    """The archive over each contender, of each kind, with what overlaps as a line of its own."""
    rows = [r | {"gpu_id": _gpu(d), "layers": r["layer"]} for d in documents for r in d["results"]]
    summary = []
    for kind in sorted({r["kind"] for r in rows}):
        for ours in ("ours", "ours overlapping"):
            of = [r for r in rows if r["kind"] == kind and "us" in r["contenders"].get(ours, {})]
            for over in sorted({name for r in of for name in r["contenders"] if not name.startswith("ours")}):
                found = [r for r in of if "us" in r["contenders"].get(over, {})]
                timed = [(r, r["contenders"][over]["us"] / r["contenders"][ours]["us"]) for r in found]
                spreads = [r["contenders"][ours]["spread"] for r in found]
                summary += _lines({"what": f"{kind} {ours}", "over": over, "group": ALL}, timed, spreads)
    said = {name: found for d in documents for name, found in d["peers"].items()}
    return {"peers": said, "summary": summary}


def drawn(documents: Sequence[Document]) -> dict[str, Any]:
    """One document of `bench_random.py`, its cases by layer; `summarise_random.whole` has the way back."""
    (document,) = documents
    layers: dict[tuple[str, ...], dict[str, Any]] = {}
    for r in document["results"]:
        said, torch = r["contenders"], r["contenders"].get(summarise_random.TORCH, {}).get("variant", "")
        of = {"layers": r["layers"], "signature": r["signature"], "group": r["group"], "gpu_id": r["gpu_id"]}
        of |= {"torch": torch, "contenders": list(said)}
        layer = layers.setdefault(tuple(map(str, of.values())), of | {"cases": []})
        noise = r.get("noise")
        layer["cases"].append([r["m"], noise and round(noise, 3), *map(_said, said.values())])
    rows = list(layers.values())
    alike = {k: rows[0][k] for k in ("gpu_id", "contenders") if all(r[k] == rows[0][k] for r in rows)} if rows else {}
    return {**document, "of_each": alike, "results": [{k: v for k, v in r.items() if k not in alike} for r in rows]}


def _said(contender: Mapping[str, Any]) -> Any:
    """Microseconds, to four digits, and spread; of what was not timed, why."""
    said = {k: v for k, v in contender.items() if k in _CONTENDER}
    return [float(f"{said['us']:.4g}"), round(said["spread"], 3)] if said.keys() == {"us", "spread"} else said


def occasions(documents: Sequence[Document]) -> dict[str, Any]:
    """Runs of `bench_random.py` on several occasions: a line for each run, pair and range of M, without the cases."""
    runs, summary = [], []
    inverse = summarise_random.OURS, summarise_random.AGAINST  # of what is kept
    for document in map(summarise_random.whole, documents):
        results, environment = document["results"], document["environment"]
        wrong, noise = len(summarise_random.wrong([document])), summarise_random.noise([document])
        kept = {k: document[k] for k in _RUN if k != "left_out" and document.get(k)}
        kept["command"] = _ABSOLUTE.sub("", kept["command"])
        kept |= {} if document["seed"] in document["command"] else {"seed": document["seed"]}
        where = {k: v for k, v in environment.items() if k in _ENVIRONMENT}
        kept["environment"] = {k: v[:_DIGITS] if k.endswith("sha256") else v for k, v in where.items()}
        runs.append(kept | {"cases": len(results), "wrong": wrong, "noise": noise})
        lines = summarise_random.summarise([document])
        if environment.get("against") == UNIVERSAL:
            of = summarise_random.summarise([summarise_random.unseen(document)])
            pair = summarise_random.AGAINST, summarise_random.TORCH
            lines += [line | {"who": UNSEEN} for line in of if (line["who"], line["over"]) == pair]
        for line in lines:
            if line["group"] == ALL and (line["who"], line["over"]) != inverse:
                figures = {k: line[k] for k in ("regime", "cases", "geomean", "worst", "slower")}
                summary.append({"run": len(runs) - 1, "what": line["who"], "over": line["over"], **figures})
    return {"runs": runs, "summary": summary}


def bits(documents: Sequence[Document]) -> dict[str, Any]:
    """One document of `compare_bits.py`, with the choices of all functions by what they begin with (provider, family
    and element types), and groups of places among them."""
    (document,) = documents
    functions = sorted({name for r in document["results"] for group in r["groups"] for name in group})
    place = {name: i for i, name in enumerate(functions)}
    results = [r | {"groups": [[place[name] for name in group] for group in r["groups"]]} for r in document["results"]]
    families: dict[str, list[str]] = {}
    for name in functions:
        words = name.split(".")
        families.setdefault(".".join(words[:3]), []).append(".".join(words[3:]))
    return {**document, "results": results, "functions": families}


def runs(documents: Sequence[Document]) -> dict[str, Any]:
    """The documents as they are, or the runs that they are of, but for what `bench_vllm.py` compares answers by."""
    found: list[dict[str, Any]] = []
    for document in documents:
        whole = {name: value for name, value in document.items() if name not in ("answers", "runs")}
        found += [whole | run for run in document.get("runs", [{}])]
    return {"runs": found}


def _lines(pair: dict[str, str], timed: Sequence[Timed], spreads: Sequence[float]) -> list[dict[str, Any]]:
    """A line for each range of M, as `summarise_random.summarise` has them, and one for all M."""
    lines = []
    for regime, low, high in (*random_cases.REGIMES, ("all M", 1, random_cases.MOST_TOKENS)):
        inside = [low <= r["m"] <= high for r, _ in timed]
        if any(inside):
            picked = [t for t, of in zip(timed, inside, strict=True) if of]
            largest = max(s for s, of in zip(spreads, inside, strict=True) if of)
            lines.append(pair | {"regime": regime, **summarise_random.figures(picked), "largest_spread": largest})
    return lines


def _gpu(document: Document) -> str:
    return str(document["environment"].get("gpu_id", "unknown"))


def _run(document: Document) -> dict[str, Any]:
    """Where figures come from, and what held for all cases of one file."""
    rows = document["results"]
    found = {k: document[k] for k in _RUN if document.get(k)}
    if "left_out" in found:
        found["left_out"] = len(found["left_out"])
    found["environment"] = {k: v for k, v in document["environment"].items() if k in _ENVIRONMENT}
    noise = [r["noise"] for r in rows if "noise" in r]
    errors = [r["error"] for r in rows if isinstance(r.get("error"), float)]
    more = {"largest_error": round(max(errors), 6), "wrong": len(rows) - len(errors)} if errors else {}
    return found | {"cases": len(rows), "noise": round(geomean(noise), 4)} | more


def reduced(sources: Sequence[str], documents: Sequence[Document], lines: bool = False) -> dict[str, Any]:
    """What is kept of the documents; `lines`: of one of `bench_random.py` what is kept of several.

    Raises:
        ValueError: they are not of one script.
    """
    kinds = {_kind(d, lines or len(documents) > 1) for d in documents}
    if len(kinds) > 1:
        raise ValueError("the sources are of several scripts; reduce those of each by themselves")
    (kind,) = kinds
    whole = {"summary_of": list(sources)}
    if kind in (gemm, peers):
        return whole | {"runs": [_run(d) for d in documents]} | kind(documents)
    return whole | kind(documents)


def _kind(document: Document, several: bool) -> Callable[[Sequence[Document]], dict[str, Any]]:
    rows = document.get("results")
    if "drawn" in document:
        return occasions if several else drawn
    if isinstance(rows, list) and rows and "groups" in rows[0] and not several:
        return bits
    if isinstance(rows, list) and rows and "speedup" in rows[0] and "types" in rows[0]:
        return gemm
    return peers if isinstance(rows, list) and rows and "contenders" in rows[0] else runs


def read(source: str) -> dict[str, Any]:
    """A result file, or one of a commit.

    Raises:
        ValueError: there is none; the message names it.
    """
    try:
        if Path(source).exists():
            text = Path(source).read_text()
        else:
            show = ["git", "show", source]
            text = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        found: dict[str, Any] = json.loads(text)
        assert {"command", "date", "commit", "environment"} <= found.keys()
    except (OSError, ValueError, AttributeError, AssertionError, subprocess.CalledProcessError):
        raise ValueError(f"{source} is no result file; name one, or COMMIT:PATH of one in git's history") from None
    return found


def dump(document: Document) -> str:
    """JSON with a line for each element of each list, so that changes can be read and the file stays small."""
    lines = []
    for key, value in document.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{json.dumps(key)}: [\n{_rows(value)}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rows(rows: Iterable[Any]) -> str:
    return ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)


def main() -> int:
    """Read, reduce and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="result files, or COMMIT:PATH")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--lines", action="store_true", help="of one file of bench_random.py keep lines, not its cases")
    parser.add_argument("--over", action="append", help="only lines that compare with this one; may be repeated")
    parser.add_argument("--note", help="what else a reader must know, such as how the archives were built")
    options = parser.parse_args()
    try:
        found = reduced(options.sources, [read(source) for source in options.sources], options.lines)
    except ValueError as error:
        parser.error(str(error))
    if options.over:
        found["summary"] = [line for line in found["summary"] if line["over"] in options.over]
    if options.note:
        found["note"] = options.note
    options.output.write_text(dump(found))
    return 0


if __name__ == "__main__":
    sys.exit(ends(main))
