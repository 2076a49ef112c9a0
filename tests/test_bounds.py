"""What bounds engines and experts, as scripts/bounds.py computes it, and what pages say of that."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import bounds  # noqa: E402

from .pages import text  # noqa: E402

BOTH = "stock", "served"
MODELS = "Qwen3-30B-A3B", "GPT-OSS-120B", "Mixtral-8x22B-TP4"
BLOCKS = 11, 12, 10  # the runs of engines.json by blocks with --quantise, on three H200s, the first two with DeepGEMM
BF16 = 4, 6, 7, 15  # the runs of engines.json with norms, on four H200s
CHANNEL = 17, 16, 20, 3, 18  # those by channel with --quantise, on five
PAIRED = 3  # that of these with a second stock like the first
# GEMMs of one token: how many experts it has, and N and K of gate and up and of down.
ONE_TOKEN = {
    "Qwen3-30B-A3B": (8, (1536, 2048), (2048, 768)),
    "GPT-OSS-120B": (4, (5760, 2880), (2880, 2880)),
    "Mixtral-8x22B-TP4": (2, (8192, 6144), (6144, 4096)),
}
STUDIED = bounds.study("answers by blocks without few")


def test_what_is_not_in_a_table_is_on_the_line_through_its_neighbours() -> None:
    points = [(8, 40.0), (1, 5.0), (64, 20.0)]
    assert bounds.between(8, points) == pytest.approx(40)
    assert bounds.between(8**0.5, points) == pytest.approx((5 * 40) ** 0.5)
    assert bounds.between(512, points) == pytest.approx(10), "as between the last two"
    assert bounds.between(1 / 8, points) == pytest.approx(5 / 8), "as between the first two"


def test_a_step_is_bounded_by_weights_and_by_what_is_no_gemm() -> None:
    found = bounds.decoding("bf16", "1")
    assert found.read_us == pytest.approx(32 * 103.7 + 232, rel=0.001)
    run = bounds.load("engines")["runs"][4]
    stock, ours = (1e6 / run[who]["decode"]["1"]["tokens_per_s"] for who in BOTH)
    gemms = run["served"]["profile"]["1"]["this project's"]
    assert gemms < found.read_us, "with norms, behind which weights are read early"
    assert found.could == pytest.approx(stock / ours), "so that GEMMs that only read would gain nothing"
    at_64, gemms = bounds.decoding("bf16", "64"), run["served"]["profile"]["64"]["this project's"]
    assert at_64.could == pytest.approx(at_64.steps[0] / (at_64.steps[1] - gemms + found.read_us))
    assert (found.steps, found.was) == ((stock, ours), pytest.approx(stock / ours))
    assert sum(us for us, _ in found.parts) == pytest.approx(sum(run["stock"]["profile"]["1"].values()))
    of_deep_gemm, of_cutlass = (
        bounds.decoding(f"fp8 by blocks, stock with {name}", "1") for name in ("DeepGEMM", "CUTLASS")
    )
    assert [ours for _, ours in of_deep_gemm.parts] == [ours for _, ours in of_cutlass.parts]
    assert of_deep_gemm.could / of_cutlass.could == pytest.approx(of_deep_gemm.steps[0] / of_cutlass.steps[0])


@pytest.mark.parametrize("batch", bounds.BATCHES)
@pytest.mark.parametrize("label", bounds.DECODED)
def test_what_was_measured_is_within_its_estimate(label: str, batch: str) -> None:
    found = bounds.decoding(label, batch)
    assert found.was <= found.could


@pytest.mark.parametrize("label", bounds.DECODED)
def test_kernels_fill_a_step(label: str) -> None:
    """What is between them, and what the profiler adds, is little, but for CUTLASS by blocks at batch 16, which was
    profiled at batch 64 at the speed of its fastest repeat, of a second run."""
    for batch in bounds.BATCHES:
        found = bounds.decoding(label, batch)
        for place, who in enumerate(BOTH):
            step = found.steps[place]
            if (label, batch, who) == ("fp8 by blocks, stock with CUTLASS", "64", "stock"):
                step = 64e6 / fastest_of_cutlass()
            kernels = sum(pair[place] for pair in found.parts)
            if (label, batch, who) == ("fp8 by blocks, stock with CUTLASS", "16", "stock"):
                said = (
                    f"at batch 16 its step without the profiler took {step / kernels - 1:.0%} longer than its kernels"
                )
                assert said in text("engines")
            else:
                assert kernels == pytest.approx(step, rel=0.05)


def fastest_of_cutlass() -> float:
    """Tokens a second, by blocks at batch 64, of its fastest repeat."""
    runs = bounds.load("engines")["runs"]
    return max(rate for i in BLOCKS for rate in runs[i]["stock"]["decode"]["64"]["all"])


def test_the_page_says_what_gemms_take_of_a_step() -> None:
    over, besides, outside = {}, {}, {}
    for label in bounds.DECODED:
        for batch in bounds.BATCHES:
            found = bounds.decoding(label, batch)
            ours = [us for _, us in found.parts]
            over[label, batch], besides[label, batch] = ours[0] / found.read_us - 1, 1 - ours[0] / found.steps[1]
            outside[label, batch] = 1 - sum(ours) / found.steps[1]
    bf16, channel, blocks = ([x for (of, _), x in over.items() if of == label] for label in list(bounds.DECODED)[:3])
    page = text("engines")
    assert "GEMMs and norms take {:.2f}, {:.2f} and {:.2f} times a bare read".format(*(1 + x for x in bf16)) in page
    assert "by channel GEMMs take {:.2f}, {:.2f} and {:.2f} times one".format(*(1 + x for x in channel)) in page
    in_fp8 = [1 + x for x in (*channel, *blocks)]
    assert f"in fp8 GEMMs take {min(in_fp8):.2f} to {max(in_fp8):.2f} times a read" in page
    of = [f"{besides[label, batch]:.0%}" for label in list(bounds.DECODED)[:2] for batch in ("1", "64")]
    assert "takes {} of our step in bf16 at batch 1 and {} at batch 64, and {} and {} by channel".format(*of) in page
    assert f"By blocks GEMMs of 64 tokens take {1 + blocks[-1]:.2f} times a bare read" in page
    most = [f"{1 + max(over[label, batch] for batch in ('16', '64')):.2f}" for label in list(bounds.DECODED)[:3]]
    assert "they take up to {}, {} and {} times as long".format(*most) in page
    deep_gemm, cutlass = (list(bounds.DECODED)[i] for i in (3, 2))
    steps = [ours / stock for stock, ours in (bounds.decoding(deep_gemm, b).steps for b in bounds.BATCHES)]
    assert "Ours takes {:.2f}, {:.2f} and {:.2f} times DeepGEMM's step".format(*steps) in page
    faster, at_64 = fastest_of_cutlass(), bounds.decoding(cutlass, "64")
    could, was = (x * 64e6 / faster / at_64.steps[0] for x in (at_64.could, at_64.was))
    assert f"over that the estimate is {could:.2f} and ours was {was:.2f}, while" in page
    assert f"up to {max(outside.values()):.0%} of our steps" in page


def test_the_page_says_what_scales_of_blocks_take_at_64_tokens() -> None:
    blocks, channel = (sum(of) for of in zip(*bounds.study("GEMMs of 64 tokens in e4m3").values(), strict=True))
    assert f"take {blocks:.1f} us at 64 tokens, and by channel {channel:.1f} (" in text("engines")


def test_qwen3_is_beyond_its_estimate_by_no_more_than_its_repeats_differ() -> None:
    could, was = bounds.qwen_decoding()
    run = bounds.load("engines")["runs"][bounds.QWEN]
    for batch, most, measured in zip(bounds.BATCHES, could, was, strict=True):
        repeats = [run[who]["decode"][batch]["all"] for who in BOTH]
        assert measured < most * (1 + max((max(of) - min(of)) / statistics.median(of) for of in repeats))


def test_the_page_says_what_a_prefill_needs() -> None:
    weights = bounds.LAYERS * sum(bounds.LAYER)
    ms = 2 * 2048 * weights / bounds.FLOOR.flops_per_us[16] / 1e3
    assert f"GEMMs need {ms * 720 / 700:.0f} at the 700 TFLOP/s" in text("engines")
    runs = [bounds.load("engines")["runs"][i] for i in BF16]
    whole = [run["stock"]["prefill"]["2048"]["s"] * 1e3 for run in runs]
    assert f"Of the {statistics.fmean(whole):.0f} ms of 2048 tokens" in text("engines")


def test_the_page_says_what_residuals_gave() -> None:
    (study,) = (s for s in bounds.load("studies_h200")["studies"] if s["study"] == "residuals in a decode step")
    gains = {batch: 1 - with_[1] / with_[0] for batch, with_ in study["answer"].items() if batch != "spread"}
    least, most = (f"{-x:.1%}".removesuffix("%") for x in sorted(gains.values())[:3:2][::-1])
    assert f"saved {gains['1']:.1%} of a step at batch 1 and cost {least} to {most}% at 16 to 64" in text("engines")


def test_the_page_says_how_far_experts_are_from_their_floor() -> None:
    every = over_floor(MODELS, (1, 8, 32, 128, 2048))
    one, some = (over_floor(MODELS, (tokens,)) for tokens in (1, 32))
    said = f"{every:.2f} times the floor (Qwen3, GPT-OSS and Mixtral, up to 128 tokens and at 2,048; {one:.2f} at one"
    all_four = over_floor((*MODELS, "DeepSeek-V3-EP32"), (1, 8, 32, 128, 2048))
    assert f"{said} token, {some:.2f} at 32; with DeepSeek-V3 {all_four:.2f})" in text("moe")
    results = {(r["model"], r["tokens"]): r["us"] for r in bounds.load("moe_h200")["results"]}
    qwen3, of_qwen3, oss, of_oss, mixtral, of_mixtral = (f"{x:.2f}" for x in one_token_over_cold_read())
    said = (
        f"its GEMMs take {oss} and {of_oss} times a cold read of the weights that they need, Qwen3's {qwen3} and "
        f"{of_qwen3}, and Mixtral's {mixtral} and {of_mixtral}."
    )
    assert said in text("moe")
    qwen = results["Qwen3-30B-A3B", 2048]
    assert (qwen["permute"] + qwen["combine"]) / qwen["ours"] == pytest.approx(1 / 8, abs=0.01), "an eighth"


def over_floor(models: Sequence[str], tokens: Sequence[int]) -> float:
    """vLLM's time of a block of experts in bf16 over its floor, a geometric mean."""
    found = [r for r in bounds.load("moe_h200")["results"] if r["error"]]  # else no expert was here
    of = [r for r in found if r["model"] in models and r["tokens"] in tokens]
    return statistics.geometric_mean(r["us"]["vllm"] / r["floor_us"] for r in of)


def one_token_over_cold_read() -> list[float]:
    """The times of `ONE_TOKEN` over a cold read of the weights that they need: gate and up, then down, by model."""
    us = {r["model"]: r["us"] for r in bounds.load("moe_h200")["results"] if r["tokens"] == 1}
    return [
        us[model][launch] / bounds.cold_read_us(2 * experts * n * k)
        for model, (experts, *gemms) in ONE_TOKEN.items()
        for launch, (n, k) in zip(("gate_up", "down"), gemms, strict=True)
    ]


def test_groups_are_expected_as_tuning_draws_rows() -> None:
    assert bounds._drawn_groups(128, 0) == 0
    assert bounds._drawn_groups(128, 1) == pytest.approx(1)
    assert 7.5 < bounds._drawn_groups(128, 8) < 8
    assert bounds._drawn_groups(8, 1000) == pytest.approx(8)


def test_grouped_gemms_of_few_tokens_read_weights_at_the_rate_of_memory() -> None:
    found = bounds.grouped_over_cold_read()
    assert found["bf16"][0] < 1.25
    assert found["bf16"][1] == 37
    assert json.dumps(found)  # of numbers alone


def test_the_page_says_what_steps_without_a_graph_take() -> None:
    runs = bounds.load("engines")["runs"]

    def prefill(run: int, tokens: str = "700") -> list[float]:
        return [1e3 * runs[run][who]["prefill"][tokens]["s"] for who in BOTH[::-1]]

    needed = 2 * 700 * bounds.LAYERS * sum(bounds.LAYER) / bounds.FLOOR.flops_per_us[16] / 1e3
    page = text("engines")
    channel, blocks, bf16 = bounds.LAUNCHED_WHOLE[::-1][0], bounds.LAUNCHED_WHOLE[0], bounds.LAUNCHED_WHOLE[1]
    said = "ours {:.0f} ms by channel and stock {:.0f}; by blocks {:.0f} and CUTLASS {:.0f}; in bf16 {:.0f} and {:.0f},"
    assert (
        f"{said.format(*prefill(channel), *prefill(blocks), *prefill(bf16))} of which GEMMs need {needed:.0f}." in page
    )
    earlier = [prefill(run) for run in (PAIRED, 17, 11)]
    said = (
        "ours at {:.0f} and {:.0f} by channel, stock at {:.0f} and {:.0f}; by blocks ours at {:.0f}, stock at {:.0f}."
    )
    assert said.format(*(of[i] for i in (0, 1) for of in earlier[:2]), *earlier[2]) in page
    pair = runs[PAIRED]["stock"], runs[PAIRED][bounds.AGAIN]
    took = [f"{1e3 * of['prefill']['700']['s']:.0f}" for of in pair]
    waits = [
        f"{statistics.median(of['traffic']['in_turn'][wait]):.0f}"
        for wait in ("ttft_p99_ms", "itl_p99_ms")
        for of in pair
    ]
    said = (
        "took {} and {} ms for 700 tokens, and under requests of random lengths {} and {} ms to the first token at 99%,"
    )
    assert f"{said} and {{}} and {{}} ms to later ones.".format(*took, *waits) in page
    all_of = [[1e3 * s for i in (4, 7, 15) for s in runs[i][who]["prefill"]["700"]["all"]] for who in BOTH[::-1]]
    least_and_most = [each for of in all_of for each in (min(of), max(of))]
    assert (
        "of ours in bf16 are of {:.0f} to {:.0f} ms and of stock {:.0f} to {:.0f}, on".format(*least_and_most) in page
    )
    faster = sorted(prefill(i, "2048")[1] / prefill(i, "2048")[0] for i in BF16)
    more = sorted(prefill(i, "2048")[0] - prefill(i, "2048")[1] for i in BF16)
    of_ours = [[1 / s for s in runs[i]["served"]["prefill"]["2048"]["all"]] for i in BF16]  # speeds, as tables have
    spreads = [100 * (max(of) - min(of)) / statistics.median(of) for of in of_ours]
    assert f"repeats of ours differ by {min(spreads):.0f} to {max(spreads):.0f}%." in page
    said = (
        f"take {more[1]:.0f} to {more[-1]:.0f} ms more than stock, at {faster[0]:.2f} to {faster[2]:.2f} of its speed"
    )
    assert f"{said}, and in one {-more[0]:.0f} less, at {faster[3]:.2f};" in page


def test_the_page_says_what_engines_compiled_and_reloaded() -> None:
    document = bounds.load("engines")
    engines = [
        run[who] for run in document["runs"] for who in (*BOTH, bounds.AGAIN) if "compilations" in run.get(who, {})
    ]
    served = [run["served"] for run in document["runs"] if run["served"] in engines]
    counted = [engine["compilations"] for engine in engines]
    assert {each["ours"] for each in counted} == {0}
    assert f"nothing was compiled in {len(served)} engines" in text("vllm")
    by = {name: {each["by"]["vllm"][name] for each in counted} for name in ("nvcc", "ptxas", "gcc")}
    assert by["nvcc"] == {1}
    said = f"ptxas {min(by['ptxas'])} to {max(by['ptxas'])} times and gcc {min(by['gcc'])} to {max(by['gcc'])} times."
    assert said in text("vllm")
    warmup = document["deep_gemm_warmup"]
    said = f"{warmup['gemms']:,}; {warmup['compiled']} took {warmup['s']} s on {warmup['cores']} cores."
    assert said in text("engines")
    reloads = [each["reloads"] for each in served if "reloads" in each]
    requests, count, minutes = (sum(each[name] for each in reloads) for name in ("requests", "reloads", "minutes"))
    said = f"served {requests:,} random requests in {minutes:.0f} minutes and loaded their archives again {count} times"
    assert f"{said}, in {max(each['slowest_reload_s'] for each in reloads):.2f} s at most." in text("vllm")


def test_answers_in_fp8_by_channel_differ_as_stocks_own_do() -> None:
    found = bounds.load("engines")["runs"][9]
    ours, stocks = (found[who]["compared"] for who in ("served", "stock again"))
    name = "log-probabilities, mean difference"
    assert ours[name] < stocks[name]
    said = f"and {ours[name]:.2f} in fp8 by channel. Stock's own differ by {stocks[name]:.2f} in the last,"
    assert said in text("engines")
    name = "greedy tokens before the first other"
    runs = bounds.load("engines")["runs"]
    of = [f"{runs[i]['served']['compared'][name]:.0f}" for i in (5, 23, 8, 22, *BLOCKS, *CHANNEL)]
    channel, (least, most), (without, again) = (
        {ours[name], *map(float, of[:2])},
        (min(of[2:]), max(of[2:])),
        STUDIED["greedy tokens"],
    )
    assert {f"{x:.0f}" for x in channel} == {"4"}
    said = f"4 in fp8 by channel ({stocks[name]:.0f}), {least} to {most} with `few`, and {without:.0f}"
    assert f"{said} by blocks." in text("engines")
    assert (without, again) == pytest.approx((6.25, 6.59))
    mean = "log-probabilities, mean difference"
    few, deep_gemm = runs[8]["served"]["compared"][mean], runs[11][bounds.AGAIN]["compared"][mean]
    assert f"with it they are {few:.2f} off, and DeepGEMM's are {deep_gemm:.2f} off CUTLASS's" in text("engines")


def test_the_page_says_what_quantising_before_gemms_takes() -> None:
    parts = bounds.decoding("fp8 by blocks, stock with CUTLASS", "1").parts
    places = [1 + list(bounds.ELSE).index(what) for what in ("norms", "quantising")]
    stock, ours = (sum(parts[place][who] for place in places) for who in (0, 1))
    assert f"take {stock:.0f} us of stock's step by blocks and {ours:.0f} of ours, of 128 GEMMs" in text("sm90_small_m")
    assert 2 < (stock - ours) / 128 <= 3, "up to 3 us of a GEMM"
