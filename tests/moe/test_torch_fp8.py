"""The experts of a mixture with weights in e4m3, on the CPU: what is computed, launched and refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import runtime.torch as aot
import runtime.torch.experts as experts_module
from aot.tune.quantise.measures import quantised
from runtime import ArgumentError, KernelMiss

from .on_cpu import ExpertsOnCpu, experts, library

FIVE = ["moe_permute", "grouped_gemm", "quantise", "grouped_gemm", "moe_combine"]
EXPERTS, N, K = 5, 128, 144
SCALINGS = pytest.mark.parametrize("scaling", ["block", "row_column"])


@pytest.fixture
def lib(tmp_path: Path) -> Iterator[ExpertsOnCpu]:
    with library(tmp_path) as made:
        yield made


def narrow(weight: Any, scaling: str) -> tuple[Any, Any]:
    """A weight (experts, N, K) in e4m3, and scales of it that differ from each other."""
    count, n, k = weight.shape
    shape = (count, n) if scaling == "row_column" else (count, -(-n // 128), -(-k // 128))
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(n)) * 0.01 + 0.002
    return (weight / widened(torch.ones(weight.shape), scale)).to(torch.float8_e4m3fn), scale


def widened(weight: Any, scale: Any) -> Any:
    """A weight times its scales, f32."""
    if scale.dim() == 2:
        return weight.float() * scale[..., None]
    whole = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return weight.float() * whole[:, : weight.shape[1], : weight.shape[2]]


def tensors(scaling: str, tokens: int = 9, top_k: int = 3) -> tuple[list[Any], dict[str, Any]]:
    random = torch.Generator().manual_seed(tokens)
    hidden = torch.randn((tokens, K), generator=random).bfloat16()
    w13, of_w13 = narrow(torch.randn((EXPERTS, 2 * N, K), generator=random) * K**-0.5, scaling)
    w2, of_w2 = narrow(torch.randn((EXPERTS, K, N), generator=random) * N**-0.5, scaling)
    ids = torch.rand((tokens, EXPERTS), generator=random).topk(top_k).indices
    weights = torch.rand((tokens, top_k), generator=random).softmax(-1)
    return [hidden, w13, w2, ids, weights], {"w13_scale": of_w13, "w2_scale": of_w2}


def wanted(given: list[Any], scales: dict[str, Any], scaling: str) -> Any:
    """With weights as they are, and tokens as they are after quantising; rows between both GEMMs are not rounded."""
    hidden, w13, w2, ids, weights = given
    rows, of_rows = quantised(hidden, "e4m3", scaling)
    rows = rows.to(torch.float8_e4m3fn)
    of_rows = of_rows[:, None] if scaling == "row_column" else of_rows.repeat_interleave(128, 1)[:, :K]
    return experts(
        rows.float() * of_rows, widened(w13, scales["w13_scale"]), widened(w2, scales["w2_scale"]), ids, weights
    )


def error(found: Any, of: Any) -> float:
    assert found.dtype == torch.bfloat16
    return float((found.double() - of).norm() / of.norm())


@SCALINGS
@pytest.mark.parametrize("tokens", [1, 9])
def test_it_is_what_experts_make_in_five_launches(lib: ExpertsOnCpu, scaling: str, tokens: int) -> None:
    given, scales = tensors(scaling, tokens)
    assert error(aot.moe(lib, *given, **scales), wanted(given, scales, scaling)) < 3e-2
    assert lib.calls == FIVE


QUANTISES, QUANTISE = "e4m3_e4m3_e4m3_grouped_swiglu_g5_n256_k144_block_launch", "bf16_e4m3_quantise_k128_block_g5"


@pytest.mark.parametrize(
    ("tokens", "least", "lacks", "asked_for", "fused"),
    [
        (9, 0, "", [QUANTISES], True),
        (9, 96, "", [QUANTISES, QUANTISE], False),
        (9, 96, QUANTISE, [QUANTISES, QUANTISE], True),
        (9, 0, QUANTISES, [QUANTISES], False),
        (1000, 0, "", [], False),
    ],
)
def test_the_gemm_of_gate_and_up_quantises_what_it_makes_where_it_can_and_experts_have_few_rows_and_tiles(
    lib: ExpertsOnCpu,
    tokens: int,
    least: int,
    lacks: str,
    asked_for: list[str],
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def entry(self: ExpertsOnCpu, signature: Any) -> None:
        asked.append(signature.key())
        if signature.key() == lacks:
            raise KernelMiss("no kernel")

    monkeypatch.setattr(ExpertsOnCpu, "entry", entry)
    monkeypatch.setattr(experts_module, "LEAST_TILES_OF_QUANTISING", least)
    experts_module._has.cache_clear()
    given, scales = tensors("block", tokens)
    found = aot.moe(lib, *given, **scales)
    experts_module._has.cache_clear()
    assert lib.calls == ([name for name in FIVE if name != "quantise"] if fused else FIVE)
    assert asked == asked_for
    few = [t[:5] if t.shape[0] == tokens else t for t in given]
    assert error(found[:5], wanted(few, scales, "block")) < 4e-2


@pytest.mark.parametrize(
    ("groups", "n", "rows", "fused"),
    [
        *((8, 4096, rows, fused) for rows, fused in ((0, False), (2, False), (8, False), (32, True))),
        *((128, 1536, rows, fused) for rows, fused in ((8, False), (64, True))),
        *((1, n, 1, fused) for n, fused in ((24_320, False), (24_576, True))),
    ],
)
def test_experts_of_deepseek_and_qwen_have_tiles_enough_as_they_were_measured(
    lib: ExpertsOnCpu, groups: int, n: int, rows: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExpertsOnCpu, "entry", lambda self, signature: None)
    experts_module._has.cache_clear()
    w13, scale = torch.empty((groups, n, 2048), device="meta"), torch.empty((groups, 1, 1), device="meta")
    words = {"epilogue": "swiglu", "overlap": "launch", "scale_b": scale}
    assert experts_module.quantises_in_gemm(lib, w13, rows, words, torch.bfloat16) == fused
    experts_module._has.cache_clear()


def test_of_experts_that_are_elsewhere_no_rows_are_expected() -> None:
    ids, w13 = torch.zeros((100, 8), dtype=torch.int32), torch.zeros((4, 2, 2))
    assert experts_module.expected_rows(ids, w13, None) == 800
    assert experts_module.expected_rows(ids, w13, torch.zeros(64, dtype=torch.int32)) == 50
    assert experts_module.expected_rows(ids[:1], w13, torch.zeros(64, dtype=torch.int32)) == 1, "rounded up"


@SCALINGS
def test_experts_that_are_elsewhere_add_nothing(lib: ExpertsOnCpu, scaling: str) -> None:
    """Their rows are neither made nor quantised, whatever lies there."""
    given, scales = tensors(scaling)
    given[3][0], given[3][4, 1] = -1, EXPERTS + 3
    found = aot.moe(lib, *given, **scales)
    assert error(found, wanted(given, scales, scaling)) < 3e-2
    assert not bool(found[0].any())


def test_it_is_one_operator_of_a_compiled_graph(lib: ExpertsOnCpu) -> None:
    given, scales = tensors("block")
    torch._dynamo.reset()

    def eager(hidden: Any) -> Any:
        return aot.moe(lib, hidden * 2, *given[1:], **scales) + 1

    step = torch.compile(eager, fullgraph=True, backend="aot_eager")
    assert torch.equal(step(given[0]), eager(given[0]))


BLOCKS = {"w13_scale": torch.ones((EXPERTS, 2, 2)), "w2_scale": torch.ones((EXPERTS, 2, 1))}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"w2_scale": None}, "w2 in float8_e4m3fn or in 4 bits, and no other, comes with w2_scale; found .* no scale"),
        ({"w13": torch.zeros((EXPERTS, 2 * N, K), dtype=torch.bfloat16)}, "found torch.bfloat16 and a scale of"),
        ({"w13_scale": torch.ones((EXPERTS, 2, 1))}, r"must be float32 \(5, 2, 2\), .* or \(5, 256\)"),
        ({"w13_scale": torch.ones((EXPERTS, 2, 2)).bfloat16()}, "w13_scale must be float32"),
        ({"w2_scale": torch.ones((EXPERTS, K))}, "both for blocks or both for output channels"),
    ],
)
def test_scales_that_do_not_go_with_weights_are_one_clear_error(
    lib: ExpertsOnCpu, change: dict[str, Any], match: str
) -> None:
    names = "hidden", "w13", "w2", "topk_ids", "topk_weights"
    given = dict(zip(names, tensors("block")[0], strict=True)) | BLOCKS | change
    with pytest.raises(ArgumentError, match=match):
        aot.moe(lib, *(given.pop(name) for name in names), **given)
    assert lib.calls == []
