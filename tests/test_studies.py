"""Studies of benchmarks/results/studies_h200.json that follow from whole files in git's history, and what pages on
kernels say of these and of other results."""

from __future__ import annotations

import itertools
import json
import lzma
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import random_cases  # noqa: E402
import summarise_random  # noqa: E402
from report import geomean  # noqa: E402
from summarise_random import AGAINST, DEEP_GEMM, OURS, TORCH  # noqa: E402

from aot.inspect.floor import floor  # noqa: E402
from aot.search import boosted  # noqa: E402
from aot.tune import roofline  # noqa: E402
from runtime.device.gpus import H100, H200, Gpu  # noqa: E402
from runtime.gemm.signature import Signature  # noqa: E402

from .pages import choosing, text  # noqa: E402

STUDIES = ROOT / "benchmarks" / "results" / "studies_h200.json"
SLOWEST = 3  # cases that a study of the slowest has
Results = Sequence[dict[str, Any]]


def study(name: str) -> dict[str, Any]:
    (found,) = (s for s in json.loads(STUDIES.read_text())["studies"] if s["study"] == name)
    return dict(found)


def whole(source: str) -> Results:
    """The cases of a file in history."""
    shown = subprocess.run(["git", "show", source], cwd=ROOT, capture_output=True, text=True, check=False)
    if shown.returncode:
        pytest.skip("the history that has the whole files is not here")
    return list(summarise_random.whole(json.loads(shown.stdout))["results"])


def of_ratios(found: Sequence[tuple[dict[str, Any], float]]) -> dict[str, Any]:
    figures = summarise_random.figures(found)
    return {"cases": len(found)} | {name: figures[name] for name in ("geomean", "worst", "slower")}


def slowest(runs: Sequence[Results]) -> dict[str, Any]:
    """Where archives that are tuned are slowest with scales of blocks above M = 64, beside torch and DeepGEMM."""
    (blocks,) = runs
    return {
        "e4m3 in blocks, times torch": dict(least(blocks, TORCH)),
        "e4m3 in blocks, times DeepGEMM": dict(least(blocks, DEEP_GEMM)),
    }


def least(results: Results, over: str) -> Iterator[tuple[str, dict[str, Any]]]:
    found = [(x, r) for r in results if r["m"] > 64 and (x := ratio(r, OURS, over))]
    for x, r in sorted(found, key=lambda of: of[0])[:SLOWEST]:
        tile = re.findall(r"(tile.*?)\.serial", r["contenders"][OURS]["variant"])[0].replace(".", " ")
        spread = max(r["contenders"][name]["spread"] for name in (OURS, over))
        yield where(r), {"times": round(x, 6), "tile": tile, "spread": round(spread, 3)}


def ratio(result: dict[str, Any], who: str, over: str) -> float | None:
    return summarise_random.ratio(result, who, over)


def where(result: dict[str, Any]) -> str:
    n, k = re.findall(r"_n(\d+)_k(\d+)", result["signature"])[0]
    return f"{result['layers'].partition(':')[2]}, {n} x {k}, M = {result['m']}"


ANSWERS: dict[str, Callable[[Sequence[Results]], dict[str, Any]]] = {
    "the slowest cases": slowest,
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_what_the_whole_files_give(name: str) -> None:
    kept = study(name)
    assert ANSWERS[name]([whole(source) for source in kept["whole"]]) == kept["answer"]


# --- what the page says ---

TRIPLE = re.compile(r"\b(\d\.\d{3}), (\d\.\d{3}) and (\d\.\d{3})\b")
RULES = (  # of `on_slower`: a run of occasions_llama.json, and what it left below 0.97 from M = 65 up, in two ranges
    (0, "interpolated between timed M: {} of Llama's cases stayed below 0.97 at M = 65 to 511 and {} above"),
    (3, "({} and {} on an H100, at worst 0.79)"),
    (1, "beside the two likeliest functions: {} and {},"),
    (2, "Beside what serves: {} and {}."),
)


def occasions(run: int, what: str) -> list[dict[str, Any]]:
    """The lines of a run over torch, one for each range of M."""
    summary = json.loads((STUDIES.parent / "occasions_llama.json").read_text())["summary"]
    return [s for s in summary if (s["run"], s["what"], s["over"]) == (run, what, TORCH)]


def test_means_of_three_ranges_are_of_one_run() -> None:
    runs = [occasions(run, what) for run in range(9) for what in (OURS, AGAINST)]
    kept = [tuple(f"{line['geomean']:.3f}" for line in lines) for lines in runs]
    found = TRIPLE.findall(choosing())
    assert len(found) == 4
    assert [three for three in found if three not in kept] == []


@pytest.mark.parametrize(("run", "said"), RULES)
def test_the_page_says_what_each_rule_of_on_slower_left(run: int, said: str) -> None:
    _, middle, above = occasions(run, "on_slower")
    assert said.format(f"{middle['slower']:.0%}", f"{above['slower']:.0%}") in choosing()
    assert "0.79" not in said or f"{above['worst']:.2f}" == "0.79"


def test_the_page_says_how_far_the_packages_archive_is_from_a_tuned_one_on_h100s() -> None:
    lines = json.loads((STUDIES.parent / "occasions_default_h100.json").read_text())["summary"]
    means = {
        regime: min(x["geomean"] for x in lines if (x["what"], x["over"], x["regime"]) == (AGAINST, OURS, regime))
        for regime in ("M <= 64", "M = 65..511", "M >= 512")
    }
    assert "in the mean at {:.2f}, {:.2f} and {:.2f} times what was tuned".format(*means.values()) in choosing()


def draws_of_blocks() -> list[str]:
    """The whole files of scales of blocks on H200s."""
    return list(json.loads((STUDIES.parent / "blocks_h200.json").read_text())["summary_of"])


def test_the_page_names_the_slowest_cases_of_block_scales() -> None:
    answer = study("the slowest cases")["answer"]
    down = answer["e4m3 in blocks, times DeepGEMM"]["llama_down, 4096 x 14336, M = 536"]
    every = json.loads((STUDIES.parent / "blocks_h200.json").read_text())["summary"]
    lines = [line for line in every if line["what"] == OURS]
    worst = {over: min(line["worst"] for line in lines if line["over"] == over) for over in (TORCH, DEEP_GEMM)}
    assert round(worst[DEEP_GEMM], 4) == round(down["times"], 4)
    slower = [
        "{}, {} and {}".format(
            *(f"{line['slower']:.1%}" if line["slower"] else "none" for line in lines if line["over"] == over)
        )
        for over in (TORCH, DEEP_GEMM)
    ]
    said = (
        f"{slower[0]} of the cases are below 0.97 times torch, at worst DeepSeek-V3's o (7168 x 16384, M = 859) at "
        f"{worst[TORCH]:.2f}, and {slower[1]} are below 0.97 times DeepGEMM, at worst Llama's down (4096 x 14336, M = "
        f"536, tile 128 x 160) at {down['times']:.2f}."
    )
    assert said in choosing()
    found = [r for source in draws_of_blocks() for r in whole(source)]
    of_o = [ratio(r, OURS, TORCH) or 9 for r in found if r["layers"].endswith("v3_o") and 804 <= r["m"] <= 874]
    assert f"o** is at {min(of_o):.2f} to {max(of_o):.2f} times torch from M = 804 to 874" in choosing()
    qkv = [ratio(r, OURS, TORCH) or 9 for r in found if r["layers"].endswith("qkv") and 537 <= r["m"] <= 549]
    assert f"qkv** is at {min(qkv):.2f} to {max(qkv):.2f} times torch at M = 537 to 549" in choosing()
    assert down["tile"].startswith("tile128x160")


def test_the_page_says_what_two_tunings_made_of_the_slowest_layer() -> None:
    """In the third draw, whose other archive has kernels that prefetch scales."""
    (source,) = study("scales prefetched")["whole"]
    found = [r["contenders"] for r in whole(source) if r["layers"].endswith("v3_o") and 804 <= r["m"] <= 874]
    gain = geomean([of[OURS]["us"] / of[AGAINST]["us"] for of in found]) - 1
    assert {re.findall(r"tile(\d+x\d+)", of[AGAINST]["variant"])[0] for of in found} == {"64x256"}
    assert f"had 64 x 256 there and was {gain:.0%} faster" in choosing()


def test_the_page_says_what_block_scales_did_not_gain_by() -> None:
    count, prefetched = study("scales prefetched")["answer"]["all"]
    promoted = study("promotion in L2")["answer"]
    assert count == 148
    said = f"to bring scales to L2 eight stages ahead costs {prefetched - 1:.0%}, and TMA descriptors that promote 256"
    assert said in choosing()
    assert abs(promoted["blocks, M >= 512"][1] - 1) < 0.005, "nothing"
    assert f"(in 16 bits they cost {promoted['M <= 64'][1] - 1:.0%} up to M = 64)" in choosing()


def test_the_page_says_by_how_much_down_is_behind_deep_gemm() -> None:
    """Where neither has more waves than the other, which leaves one behind by far more."""
    (source,) = study("the slowest cases")["whole"]
    found = [r for r in whole(source) if r["layers"].endswith("llama_down") and r["m"] < 2300]
    us = [(r["contenders"][OURS]["us"], r["contenders"][DEEP_GEMM]["us"]) for r in found]
    behind = sorted((ours - theirs, theirs) for ours, theirs in us if ours > 1.02 * theirs)
    assert len(behind) >= 15
    low, high = min(theirs for _, theirs in behind), max(ours for ours, theirs in us if ours > 1.02 * theirs)
    answer = study("scales of blocks beside scales of rows and columns")["answer"]
    means = [geomean([blocks / rows for rows, blocks in (of[m] for of in answer.values())]) - 1 for m in answer["down"]]
    few, *many = (round(100 * mean) for mean in means)
    rows, blocks = answer["down"]["512"]
    said = f"{few}% at M = 512 (down {blocks - rows:.1f} us) and {min(many)} to {max(many)}% from 1024"
    assert said in choosing()
    tiled = [(re.findall(r"tile(\d+x\d+)", r["contenders"][OURS]["variant"])[0], r) for r in whole(source)]
    times = [(tile, ratio(r, OURS, DEEP_GEMM) or 9) for tile, r in tiled if r["layers"].endswith("llama_down")]
    two = [x < 1 / 1.02 for tile, x in times if tile in ("128x160", "128x192")]
    others = [x for tile, x in times if tile == "256x128"]
    assert f"({sum(two)} of {len(two)} of these; none of {len(others)} of 256 x 128)" in choosing()
    assert min(others) > 1 / 1.02
    least, most = behind[0][0], behind[-1][0]
    assert f"by {least:.0f} to {most:.0f} us, of {low:.0f} to {high:.0f} us, whatever M" in choosing()


def test_the_page_says_what_the_best_functions_leave_below_at_random_m() -> None:
    cases = json.loads(lzma.decompress((ROOT / "benchmarks" / "ragged_h200.json.xz").read_bytes()))["results"]
    said = (
        "best of 215 functions is at {mean} times cuBLAS, with {below} of {cases} problems below",
        "with {below} of {cases} below",
    )
    for (low, high), form in zip(((65, 511), (512, 8192)), said, strict=True):
        best = [
            (c["best"][TORCH], min(us for n, us in c["best"].items() if n != TORCH))
            for c in cases
            if low <= c["m"] <= high
        ]
        ratios = [torch / ours for torch, ours in best]
        below = sum(ratio < summarise_random.SLOWER for ratio in ratios) / len(ratios)
        assert form.format(mean=f"{geomean(ratios):.2f}", below=f"{below:.0%}", cases=len(ratios)) in choosing()


def test_the_page_of_the_kernel_names_where_it_is_slowest() -> None:
    """By the best of some candidates, and by what served in tuned archives."""
    reached = {case: found["of cuBLAS"] for case, found in study("cuBLAS's kernels in the middle")["answer"].items()}
    slow = sorted(reached, key=lambda case: reached[case])[:6]
    one, *many, other = [f"2048 x 4096, M = {m}" for m in (313, 256, 135, 200)]
    assert slow == ["5376 x 4096, M = 257", one, *many, "3072 x 8192, M = 200", other]
    tuned = [case for case in drawn(H200S) if ".sm90_persistent." in case["contenders"][OURS]["variant"]]
    regimes = ([case for case in tuned if low <= case["m"] <= high] for low, high in ((65, 511), (512, 8192)))
    least = [min((r, case) for case in of if (r := ratio(case, OURS, TORCH))) for of in regimes]
    said = (
        f"5376 x 4096 at M = 257 ({reached[slow[0]]:.2f} times cuBLAS), 2048 x 4096 at M = 135 to 313 "
        f"({reached[one]:.2f} to {reached[other]:.2f}),",
        f"3072 x 8192 at M = 200 ({reached[slow[4]]:.2f}); as tuned, {' and '.join(map(slowest_of, least))}.",
    )
    assert [part for part in said if part not in text("sm90_persistent")] == []


def slowest_of(found: tuple[float, dict[str, Any]]) -> str:
    times, case = found
    _, size, m = where(case).split(", ")
    return f"{size} at {m} ({times:.2f})"


# --- what `on_slower` leaves, by default settings ---

H200S = [f"95338695:benchmarks/results/whole_h200_{i}.json" for i in (1, 2, 3)]
H100S = [f"29c1c644:benchmarks/results/whole_drawn_h100_{i}.json" for i in (1, 2, 3)]
ON_SLOWER = "on_slower"
SCATTER = 0.09  # of repeats, from which on a case says little of 3%


def drawn(sources: Sequence[str]) -> list[dict[str, Any]]:
    return [case for source in sources for case in whole(source)]


def left_by_on_slower(sources: Sequence[str]) -> tuple[str, int, int, int, float]:
    """What the page of results says, the cases below 0.97, those of them that scatter, all cases, and the worst."""
    cases = [case["contenders"] for case in drawn(sources)]
    ratios = [case[TORCH]["us"] / case[ON_SLOWER]["us"] for case in cases]
    scatter = [max(case[name]["spread"] for name in (TORCH, ON_SLOWER)) for case in cases]
    below = [s for ratio, s in zip(ratios, scatter, strict=True) if ratio < summarise_random.SLOWER]
    share = len(below) / len(cases)
    said = f"gives {geomean(ratios):.2f} times cuBLAS, and {share:.1%} of {len(cases):,} cases are below 0.97"
    return said, len(below), sum(s > SCATTER for s in below), len(cases), min(ratios)


def test_pages_say_what_on_slower_leaves() -> None:
    (of_h200, below, scattered, cases, worst), (of_h100, *others) = map(left_by_on_slower, (H200S, H100S))
    assert f"Over all M `on_slower` {of_h200}; on H100s it {of_h100}." in text("benchmarks")
    assert (
        f"{below} of {cases:,} ({others[0]} of {others[2]:,}) drawn cases are below 0.97, and in {scattered} "
        f"({others[1]}) of these repeats differ by over {SCATTER:.0%}; at worst 2560 x 9728 at M = 309, at "
        f"{worst:.2f}; on H100s 6144 x 24576 with a bias at M = 1633, at {others[3]:.2f}, where repeats differ by 38% |"
    ) in choosing()


def left_by_choosing(sources: Sequence[str], low: int, high: int) -> tuple[str, str, str, str, str]:
    """The mean over cuBLAS in a range of M, and what is below 0.97: of all, in the draws with least and most, and of
    all had the faster of two archives been chosen."""
    cases = [[case["contenders"] for case in whole(source) if low <= case["m"] <= high] for source in sources]
    every = [*itertools.chain(*cases)]
    shares = sorted(below(OURS, of) for of in cases)
    mean = geomean([case[TORCH]["us"] / case[OURS]["us"] for case in every])
    found = below(OURS, every), shares[0], shares[-1], below(OURS, every, AGAINST)
    of_all, least, most, both = (f"{share:.0%}" for share in found)
    return f"{mean:.2f}", of_all, least.removesuffix("%"), most, both


def test_the_page_says_what_choosing_leaves() -> None:
    """Between points that were timed, and means of two archives."""
    (mean, of_all, *_, both), (mean_above, all_above, *_, both_above) = (
        left_by_choosing(H200S, low, high) for low, high in ((65, 511), (512, 8192))
    )
    (*_, least, most, both_there), (*_, least_above, most_above, both_there_above) = (
        left_by_choosing(H100S, low, high) for low, high in ((65, 511), (512, 8192))
    )
    assert (
        f"and in drawn cases at {mean} and {mean_above}, {of_all} and {all_above} below ({least} to {most} "
        f"and {least_above} to {most_above} in each draw); near powers of two, which are timed, these are no better "
        f"for M = 65 to 511 ({near_powers_of_two()}"
    ) in choosing()
    assert (
        f"The faster of what serves and of `runtime.universal()` would "
        f"leave {both} and {both_above} ({both_there} and {both_there_above})."
    ) in choosing()
    large = [case["contenders"] for case in drawn(H100S) if case["m"] >= 512]
    ours, others = (geomean([case[TORCH]["us"] / case[who]["us"] for case in large]) for who in (OURS, AGAINST))
    assert f"at {ours:.3f} times cuBLAS in {len(large):,} cases, and `runtime.universal()`" in choosing()
    assert f"which was not tuned for these layers, at {others:.3f}." in choosing()


def near_powers_of_two() -> str:
    """Of H200s' cases that are within 1.4% of one, how many are below."""
    ms = [case for case in drawn(H200S) if 65 <= case["m"] <= 511]
    near = [case for case in ms if abs(math.log2(case["m"]) - round(math.log2(case["m"]))) < 0.02]
    return f"{below(OURS, [case['contenders'] for case in near]) * len(near):.0f} of {len(near)} below)"


def test_the_page_says_which_drawn_cases_are_below() -> None:
    found = []
    for sources in (H200S, H100S):
        cases = [case["contenders"] for case in drawn(sources) if 257 <= case["m"] <= 320]
        found.append(f"{below(OURS, cases) * len(cases):.0f} of {len(cases)}")
    assert f"from M = 257 to 320, with {found[0]} drawn cases below ({found[1]})" in choosing()


def test_the_page_says_how_far_the_choice_is_behind_the_best() -> None:
    def behind(results: Results) -> list[float]:
        return [1 - 1 / case["contenders"][OURS]["us"] * case["contenders"]["best_of"]["us"] for case in results]

    best_of = whole("95338695:benchmarks/results/whole_best_h200.json")
    summary = json.loads((STUDIES.parent / "occasions_default_h200.json").read_text())["summary"]
    of = [s for s in summary if (s["what"], s["over"]) == (OURS, "best_of")]
    few, middle, above = (f"{1 - s['geomean']:.1%}" for s in of)
    counts = {4: "four"}[len({case["layers"] for case in best_of})]
    assert (
        f"in {len(best_of)} cases of {counts} drawn layers the choice is behind the best of the candidates by {few} up "
        f"to M = 64, {middle} to 511 and {above} above, {max(behind(best_of)):.1%} at worst"
    ) in choosing()


def test_the_page_says_what_bounds_the_package() -> None:
    cases, of_h100s = drawn(H200S), drawn(H100S)
    slow = sum(below(AGAINST, [case["contenders"]], least=0.85) for case in cases)
    behind = [case["contenders"][AGAINST]["us"] / case["contenders"][OURS]["us"] for case in cases]
    worst, of_tuned = min(cases, key=lambda case: ratio(case, AGAINST, TORCH) or 1), max(behind)
    least_h100 = min(of_h100s, key=lambda case: ratio(case, AGAINST, TORCH) or 1)
    behind_there = [c["contenders"][AGAINST]["us"] / c["contenders"][OURS]["us"] for c in of_h100s]
    slow_there = sum(below(AGAINST, [case["contenders"]], least=0.85) for case in of_h100s)
    there = f"{slow_there:.0f} and {sum(b > 1.2 for b in behind_there)}, 1024 x 4096 at M = 292 {max(behind_there):.2f}"
    names = [re.sub(r", M =", " M =", where(case).partition(", ")[2]) for case in (worst, least_h100)]
    assert [name.partition(" M")[0] for name in names] == ["128 x 2048", "1280 x 8192"]
    gate_up = [case for case in cases if case["layers"].endswith("llama-3.1-8b.gate_up") and case["m"] <= 64]
    of_gate_up = [r for case in gate_up if (r := ratio(case, AGAINST, TORCH))]
    assert (
        f"of {len(cases):,} drawn cases {slow:.0f} are below 0.85 times cuBLAS, at worst 128 x 2048, a router, at "
        f"{ratio(worst, AGAINST, TORCH):.2f} at M = {worst['m']} (1280 x 8192 at "
        f"{ratio(least_h100, AGAINST, TORCH):.2f} at M = {least_h100['m']}), and {sum(b > 1.2 for b in behind)} "
        f"take over 1.2 times as long as what was tuned, 8 x 6144 at M = 1415 {of_tuned:.2f} times (of H100s "
        f"{there} times); up to M = 64 Llama's gate_up is at {geomean(of_gate_up):.2f} times cuBLAS, "
        f"{min(of_gate_up):.2f} at worst"
    ) in choosing()


def test_the_page_says_what_trees_know_of_the_drawn_layers() -> None:
    cases = [(size(case), case["m"], case["contenders"]) for case in drawn(H200S)]
    layers = {of for of, _, _ in cases}
    fitted = {of for of in layers if not boosted.is_unseen(*of)}
    shares = [
        f"{below(OURS, [c for of, m, c in cases if low <= m <= high and (of in fitted) is known]):.0%}"
        for known in (True, False)
        for low, high in ((65, 511), (512, 8192))
    ]
    assert (
        f"Of the {len(layers)} N x K of the drawn layers {len(fitted)} were fitted to: on H200s {shares[0]} of their "
        f"drawn cases are below 0.97 times cuBLAS for M = 65 to 511 and {shares[1]} from 512, and {shares[2]} and "
        f"{shares[3]} of the other seven's."
    ) in choosing()
    assert len(layers) - len(fitted) == 7


def size(case: dict[str, Any]) -> tuple[int, int]:
    (found,) = re.findall(r"_n(\d+)_k(\d+)", case["signature"])
    return int(found[0]), int(found[1])


def below(
    who: str, cases: Sequence[dict[str, Any]], other: str | None = None, least: float = summarise_random.SLOWER
) -> float:
    """The share below 0.97, or another share, of the faster of two where there is another."""
    us = [min(case[name]["us"] for name in (who, other or who)) for case in cases]
    slow = [case[TORCH]["us"] / t < least for t, case in zip(us, cases, strict=True)]
    return sum(slow) / len(slow)


def test_the_page_of_grouped_gemm_says_what_shared_rows_gain() -> None:
    count, mean, least, most = study("shared rows of B")["answer"]
    said = f"they took {mean - 1:.1%} off at 1,024 and 16,384 rows ({max(least - 1, 0):.0%} to {most - 1:.0%}, "
    assert f"{said}eight layers)" in text("sm90_grouped")
    assert count == 8


def test_the_page_of_rmsnorm_says_what_it_gives_a_decode_step() -> None:
    (one, with_one), (some, with_some), (many, with_many) = (
        study("norms in a decode step")["answer"][m] for m in ("1", "16", "64")
    )
    said = (
        f"a layer takes {with_one:.0f} us with it and {one:.0f} with torch's norms at one token, {with_some:.0f} and "
        f"{some:.0f} at 16, and {with_many:.0f} and {many:.0f} at 64."
    )
    assert said in text("rmsnorm")


def test_the_page_of_grouped_gemm_says_what_was_tried_and_lost() -> None:
    gathered = [row for rows in study("gathered rows")["answer"].values() for row in rows]
    gemm = [of_gathered / consecutive for _, consecutive, of_gathered, *_ in gathered]
    block = [(of_gathered + rank) / (consecutive + permute) for _, consecutive, of_gathered, permute, rank in gathered]
    few = [b for (tokens, *_), b in zip(gathered, block, strict=True) if tokens <= 16][-5:]
    assert f"DeepSeek's up to 16 tokens {min(few):.2f} to {max(few):.2f} times." in text("sm90_grouped")
    assert (
        f"takes {geomean(gemm):.2f} times as long ({min(gemm):.2f} to {max(gemm):.2f}), and with what ranks tokens "
        f"{geomean(block):.2f} times ({min(block):.2f} to {max(block):.2f}) as long as behind `moe_permute`"
    ) in text("sm90_grouped")
    few, deep, others = study("the order of a group's tiles")["answer"].values()
    assert (
        f"{few[1]:.3f} times as long in bf16 ({few[0]} pairs of functions and points), in e4m3 {deep[1]:.2f} times at "
        f"K = 7168 and over 4,000 rows of a group, and else {others[1]:.2f} times"
    ) in text("sm90_grouped")


def test_the_page_of_the_kernel_says_what_slices_in_clusters_gain() -> None:
    kept = json.loads((STUDIES.parent / "slices_h100.json").read_text())
    gains: dict[tuple[int, int], dict[int, float]] = {}
    for n, k, m, torch, other, ours, _ in kept["rows"]:
        gains.setdefault((n, k), {})[m] = other / ours - 1
        assert (torch < ours) == ((n, k, m) == (1280, 8192, 512))
    narrow, deep, one = gains.values()
    by_narrow, by_deep = (f"by {min(of.values()) * 100:.0f} to {max(of.values()):.0%} at four" for of in (narrow, deep))
    assert (
        f"the fastest of our functions at {len(kept['rows'])} of {kept['points']} points of five layers on an H100: "
        f"{by_narrow} M of 1280 x 8192 from {min(narrow)} to {max(narrow)} (at 512 torch led), {by_deep} of 2560 x "
        f"9728 from {min(deep)} to {max(deep)}, and by {max(one.values()):.0%} at one of 3072 x 8192 "
        "(`slices_h100.json`)"
    ) in text("sm90_persistent")
    assert [len(of) for of in (narrow, deep, one)] == [4, 4, 1]


def test_the_page_of_results_begins_with_its_least_means() -> None:
    def least(name: str, runs: Sequence[int]) -> list[float]:
        summary = json.loads((STUDIES.parent / f"occasions_default_{name}.json").read_text())["summary"]
        of = [s for s in summary if (s["what"], s["over"]) == (OURS, TORCH) and s["run"] in runs]
        return [min(s["geomean"] for s in of if s["regime"] == regime) for regime, *_ in random_cases.REGIMES]

    few, middle, many = (f"{mean:.2f}" for mean in least("h200", (0, 1, 2)))
    others = "{:.2f}, {:.2f} and {:.2f} on H100s.".format(*least("h100", (0, 1, 2, 3)))
    said = f"at {few} times cuBLAS's speed up to M = 64, {middle} to M = 511, and {many} above on H200s, {others}"
    assert said in text("benchmarks")


def test_the_page_says_how_long_tuning_takes() -> None:
    rows = json.loads((STUDIES.parent / "tunings.json").read_text())["seconds of Llama-3.1-8B"]
    first, one, another = (row["seconds"] for row in rows)
    note = json.loads((STUDIES.parent / "occasions_default_h200.json").read_text())["note"]
    (both,) = re.findall(r"\(Llama in (\d+) s\)", note)
    said = f"{first} s for Llama-3.1-8B by default on an H200, {both} s on two at once, {one} s and {another} s on two"
    assert f"{said} H100s" in choosing()


LOADED = "8d298daa:benchmarks/results/whole_loaded_h200.json"


def test_pages_say_what_a_pause_hid_from_tuning_on_an_h200() -> None:
    """What served over what was predicted, where operations take 0.4 to 1.15 times as long as memory, and above."""
    near, above, short = list[tuple[bool, dict[str, Any], float]](), list[float](), list[float]()
    for case in whole(LOADED):
        ours, signature = case["contenders"][OURS], Signature.of_key(case["signature"])
        if signature is None or "predicted_us" not in ours:
            continue
        share, longer = roofline.over_memory(signature, case["m"]), ours["us"] / ours["predicted_us"]
        if share > roofline.OVER_MEMORY:
            above.append(longer)
        elif roofline.power_bound(signature, case["m"]):
            near.append((".sm90_small_m." in ours["variant"], case, longer))
        elif share > roofline._NEAR_MEMORY:
            short.append(longer)
    ms = [case["m"] for _, case, _ in near]
    least_us = min(case["contenders"][OURS]["us"] for _, case, _ in near)
    assert f"a launch takes some {least_us:.0f} us or more (M = {min(ms)} to {max(ms)} in 16 bits)" in choosing()
    few, others = ([longer for is_few, _, longer in near if is_few is of] for of in (True, False))
    means = [geomean(of) for of in ([*few, *others], few, others, above, short)]
    assert (
        "{:.2f} times as long as predicted in {} drawn cases, kernels for few tokens {:.2f} times and others {:.2f}, "
        "and {:.2f} times in {} cases that were tuned after load."
    ).format(means[0], len(near), *means[1:4], len(above)) in choosing()
    comment = " ".join((ROOT / "aot" / "tune" / "roofline.py").read_text().replace("\n#", "").split())
    assert (
        "{:.2f} times as long as predicted (kernels for few tokens {:.2f} times, others {:.2f}) in {} cases from here "
        "to the share above. It took {:.2f} times as long in {} cases above, tuned after load, and {:.2f} times in {} "
        "cases of shorter launches."
    ).format(*means[:3], len(near), means[3], len(above), means[4], len(short)) in comment
    before, after = (few_tokens_near(sources) for sources in ([LOADED], H200S))
    assert (
        f"{sum(before)} of {len(before)} were below 0.97 times cuBLAS there, and tuned after load {sum(after)} of "
        f"{len(after)}."
    ) in choosing()


def few_tokens_near(sources: Sequence[str]) -> list[bool]:
    """Of each case of a kernel for few tokens, where tuning comes after load since operations take nearly as long as
    memory, whether it is below 0.97 times cuBLAS."""
    return [
        below(OURS, [case["contenders"]]) > 0
        for case in drawn(sources)
        if ".sm90_small_m." in case["contenders"][OURS]["variant"]
        and (signature := Signature.of_key(case["signature"])) is not None
        and roofline.power_bound(signature, case["m"])
        and roofline.over_memory(signature, case["m"]) <= roofline.OVER_MEMORY
    ]


SMALL = (2048, 2048), (2560, 2048), (2560, 9728), (2048, 4096)


def slower_than_cublas(sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """From M = 512 the shares of cases below 0.97: of large products of K from 8192, of others, and of short ones; the
    share of the latter in all cases below; and how many of how many are below of small layers in the middle, of others
    there, and of one layer among those below from M = 512."""
    cases = drawn(sources)
    sizes = [tuple(map(int, re.findall(r"_n(\d+)_k(\d+)", case["signature"])[0])) for case in cases]
    us = [case["contenders"][TORCH]["us"] for case in cases]
    slow = [t / case["contenders"][OURS]["us"] < summarise_random.SLOWER for t, case in zip(us, cases, strict=True)]
    found = list(zip(cases, sizes, us, slow, strict=True))
    large = [(k, t, is_slow) for case, (_, k), t, is_slow in found if case["m"] >= 512]
    groups = (
        [is_slow for k, t, is_slow in large if t > 15 and k >= 8192],
        [is_slow for k, t, is_slow in large if t > 15 and k < 8192],
        [is_slow for _, t, is_slow in large if t <= 15],
    )
    of_all = sum(groups[2]) / sum(is_slow for _, _, is_slow in large)
    middle = [(size in SMALL, is_slow) for case, size, _, is_slow in found if 65 <= case["m"] <= 511]
    of_small, of_others = ([is_slow for is_small, is_slow in middle if is_small is of] for of in (True, False))
    of_one = [size == (1024, 4096) for case, size, _, is_slow in found if is_slow and case["m"] >= 512]
    shares = [*(sum(group) / len(group) for group in groups), of_all]
    return [f"{x:.0%}" for x in shares], [f"{sum(of)} of {len(of)}" for of in (of_small, of_others, of_one)]


def test_the_page_says_what_bounds_few_tokens() -> None:
    few = [case for case in drawn(H200S) if case["m"] <= 64]
    of_few = [(r, case) for case in few if (r := ratio(case, OURS, TORCH))]
    slow = sorted(((r, i) for i, (r, _) in enumerate(of_few) if r < 1))
    named = [(few[i]["m"], few[i]["signature"].rpartition("_n")[2], f"{times:.2f}") for times, i in slow[:2]]
    assert named == [(19, "16032_k8192", "0.98"), (5, "16032_k8192", "0.99")]
    behind = sum((ratio(few[i], AGAINST, TORCH) or 0) > times for times, i in slow)
    (mean, *there), (of_h100s, *on_h100s) = (over_floor(*given) for given in ((H200S, H200), (H100S, H100)))
    assert f"at {mean} times cuBLAS on H200s, {of_h100s} on H100s, as many layers are large." in choosing()
    share, over, large, small = (f"{a} ({b})" for a, b in zip(there, on_h100s, strict=True))
    assert (
        f"is 20 us or more, in {share.replace(' (', ' of the cases on H200s (')}, ours take {over} times the floor and "
        f"are at {large} times cuBLAS; where it is less, at {small}. Of {len(few):,} cases {({6: 'six'})[len(slow)]} "
        f"are below 1.00, at worst 16032 x 8192 at 0.98 (M = 19) and 0.99 (M = 5), in {({4: 'four'})[behind]} of them "
        "behind `runtime.universal()`, as tuning chose worse there; on H100s none |"
    ) in choosing()
    assert below(OURS, [case["contenders"] for case in drawn(H100S) if case["m"] <= 64], least=1.0) == 0


def over_floor(sources: list[str], gpu: Gpu) -> tuple[str, str, str, str, str]:
    """Up to M = 64, as words: how many times as fast as torch; the share of cases whose floor is 20 us or more, over
    which ours take how many times as long, how many times as fast as torch they are, and how many where it is less."""
    few = [case for case in drawn(sources) if case["m"] <= 64]
    found = [(Signature.of_key(case["signature"]), case["m"]) for case in few]
    least = [of.us for s, m in found if s is not None and (of := floor(s, m, gpu)) is not None]
    assert len(least) == len(few)
    us = [
        (us, case["contenders"][OURS]["us"], case["contenders"][TORCH]["us"])
        for us, case in zip(least, few, strict=True)
    ]
    large, small = ([each for each in us if (each[0] >= 20) is of] for of in (True, False))
    over = geomean([ours / of for of, ours, _ in large])
    times = [geomean([torch / ours for _, ours, torch in of]) for of in (us, large, small)]
    return f"{times[0]:.2f}", f"{len(large) / len(us):.0%}", f"{over:.2f}", f"{times[1]:.2f}", f"{times[2]:.2f}"


def test_the_page_says_how_many_drawn_cases_are_far_below() -> None:
    for low, high, said in (
        (65, 511, "Below 0.93 are {} of {:,} cases ({} of {:,}), at worst 2048 x 2048 at M = 288, at {:.2f} |"),
        (512, 8192, "below 0.93 are {} of {:,} ({} of {:,}), at worst 8 x 6144, a router, at {:.2f} at M = 5427:"),
    ):
        counts: list[int] = []
        for sources in (H200S, H100S):
            cases = [c["contenders"] for c in drawn(sources) if low <= c["m"] <= high]
            counts += [round(below(OURS, cases, least=0.93) * len(cases)), len(cases)]
        worst = min(ratio(c, OURS, TORCH) or 9 for c in drawn(H200S) if low <= c["m"] <= high)
        assert said.format(*counts, worst) in choosing()
    router = {c["m"]: ratio(c, OURS, TORCH) or 0 for c in drawn(H200S) if size(c) == (8, 6144) and c["m"] > 4000}
    slow = [m for m, times in router.items() if times < 1]
    assert f"trail cuBLAS from M = {min(slow)} to {max(slow)} and lead it at 4446 and 6657." in choosing()
    assert all(router[m] > 1 for m in (4446, 6657))


def test_the_page_says_where_products_are_slower_than_cublas() -> None:
    (h200, counts), (h100, counts_h100) = map(slower_than_cublas, (H200S, H100S))
    deep, rest, short, of_all = (f"{a} ({b})" for a, b in zip(h200, h100, strict=True))
    small, others, one = zip(counts, counts_h100, strict=True)
    assert (
        f"15 us, {deep} if K is 8192 or more and {rest} if it is less; where cuBLAS takes less, {short}, which are "
        f"{of_all} of all cases below."
    ) in choosing()
    (ours, of_ours), (theirs, of_theirs) = (said.split(" of ") for said in one)
    assert (
        f"The layer with most of the {of_ours} cases below ({of_theirs}) is 1024 x 4096, with {ours} ({theirs});"
    ) in choosing()
    of_h200s = [case["contenders"] for case in drawn(H200S) if 65 <= case["m"] <= 511]
    slow = [case for case in of_h200s if below(OURS, [case])]
    seen = sum(not below(ON_SLOWER, [case]) for case in slow)
    assert (
        f" {small[0]} are below ({small[1]}), and of all others {others[0]} ({others[1]}). In {seen} of these "
        f"{len(slow)} tuning had seen torch ahead"
    ) in choosing()
