"""The experts of a mixture with weights of 4 bits, on the CPU: what is computed, launched and refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import runtime.torch as aot
from aot.tune.gemm.prepared_weights import dequantised
from runtime import ArgumentError
from runtime.torch.weights import prepare_in_place, widened

from .on_cpu import ExpertsOnCpu, experts, library

FOUR = ["moe_permute", "grouped_gemm", "grouped_gemm", "moe_combine"]
EXPERTS, N, K, TOKENS = 5, 128, 192, 9
GPT_OSS = "swiglu_clamped_interleaved"


@pytest.fixture
def lib(tmp_path: Path) -> Iterator[ExpertsOnCpu]:
    with library(tmp_path) as made:
        yield made


def checkpoint(n: int, k: int, seed: int) -> tuple[Any, Any]:
    """Blocks (experts, N, K / 32, 16) and scales (experts, N, K / 32), as GPT-OSS's checkpoints have them."""
    random = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (EXPERTS, n, k // 32, 16), generator=random, dtype=torch.uint8)
    return blocks, torch.randint(120, 125, (EXPERTS, n, k // 32), generator=random, dtype=torch.uint8)


def numbers(weight: Any, word: str = "mxfp4_weight") -> Any:
    """A prepared weight of experts as numbers."""
    return torch.stack([dequantised(word, b, scale) for b, scale in zip(weight.b, weight.scale_b, strict=True)])


def tensors(word: str = "mxfp4_weight", k: int = K) -> tuple[Any, Any, Any, Any, Any]:
    """hidden, w13 and w2 as they are prepared, ids and weights."""
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn((TOKENS, k), generator=random).bfloat16()
    made = []
    for rows, columns in ((2 * N, k), (k, N)):
        if word == "mxfp4_weight":
            made.append(aot.prepare_weight(*checkpoint(rows, columns, rows), "mxfp4"))
        else:
            packed = torch.randint(-(1 << 31), 1 << 31, (EXPERTS, rows, columns // 8), generator=random).int()
            scales = torch.rand((EXPERTS, rows, columns // 128), generator=random) * 0.02
            drawn = torch.randint(-(1 << 31), 1 << 31, (EXPERTS, rows // 8, columns // 128), generator=random).int()
            zeros = drawn if word == "int4_zero_weight" else None
            made.append(aot.prepare_weight(packed, scales, "compressed-tensors", zeros))
    ids = torch.rand((TOKENS, EXPERTS), generator=random).topk(3).indices
    return hidden, *made, ids, torch.rand((TOKENS, 3), generator=random).softmax(-1)


def biases() -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    of_w13, of_w2 = (torch.randn((EXPERTS, n), generator=random).bfloat16() for n in (2 * N, K))
    return {"w13_bias": of_w13, "w2_bias": of_w2}


def close(found: Any, wanted: Any) -> None:
    assert found.dtype == torch.bfloat16
    assert float((found.double() - wanted).norm()) < 1e-2 * float(wanted.norm())


@pytest.mark.parametrize("activation", [GPT_OSS, "swiglu"])
def test_blocks_and_scales_of_gpt_oss_are_what_experts_are_computed_of(lib: ExpertsOnCpu, activation: str) -> None:
    hidden, w13, w2, ids, weights = tensors()
    more = biases()
    found = aot.moe(lib, hidden, w13, w2, ids, weights, activation=activation, **more)
    of = more["w13_bias"], more["w2_bias"]
    close(found, experts(hidden, numbers(w13), numbers(w2), ids, weights, activation, of))
    assert lib.calls == FOUR


def test_both_parts_of_a_weight_may_be_given_apart(lib: ExpertsOnCpu) -> None:
    hidden, w13, w2, ids, weights = tensors()
    scales = {"w13_scale": w13.scale_b, "w2_scale": w2.scale_b}
    found = aot.moe(lib, hidden, w13.b, w2.b, ids, weights, **scales)
    assert torch.equal(found, aot.moe(lib, hidden, w13, w2, ids, weights))


@pytest.mark.parametrize("word", ["int4_weight", "int4_zero_weight"])
def test_int4_is_computed_too(lib: ExpertsOnCpu, word: str) -> None:
    hidden, w13, w2, ids, weights = tensors(word, k=256)
    of_w13, of_w2 = (numbers(w, word) for w in (w13, w2))
    close(aot.moe(lib, hidden, w13, w2, ids, weights), experts(hidden, of_w13, of_w2, ids, weights))


def test_it_is_one_operator_of_a_compiled_graph(lib: ExpertsOnCpu) -> None:
    hidden, w13, w2, ids, weights = tensors()
    torch._dynamo.reset()

    def eager(hidden: Any) -> Any:
        return aot.moe(lib, hidden * 2, w13, w2, ids, weights, activation=GPT_OSS) + 1

    step = torch.compile(eager, fullgraph=True, backend="aot_eager")
    assert torch.equal(step(hidden), eager(hidden))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"w13_scale": torch.ones(1)}, "has its scales with it"),
        ({"w2": torch.zeros((EXPERTS, K, N), dtype=torch.bfloat16)}, "w13_scale and w2_scale come together"),
        ({"hidden": torch.zeros((TOKENS, K // 2), dtype=torch.bfloat16)}, r"found \(9, 96\), \(5, 256, 192\) and"),
        ({"activation": "relu"}, r"w13 \(experts, N, K\)"),
    ],
)
def test_what_does_not_go_together_is_one_clear_error(lib: ExpertsOnCpu, change: dict[str, Any], match: str) -> None:
    names = "hidden", "w13", "w2", "topk_ids", "topk_weights"
    given = dict(zip(names, tensors(), strict=True)) | change
    with pytest.raises(ArgumentError, match=match):
        aot.moe(lib, *(given.pop(name) for name in names), **given)
    assert lib.calls == []


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"w2_scale": None}, "w2 in float8_e4m3fn or in 4 bits, and no other, comes with w2_scale; found"),
        ({"w13_scale": checkpoint(2 * N, K, 0)[1]}, "must be torch.float8_e8m0fnu .5, 3, 512., found torch.uint8"),
    ],
)
def test_scales_that_are_not_prepared_are_one_clear_error(
    lib: ExpertsOnCpu, change: dict[str, Any], match: str
) -> None:
    hidden, w13, w2, ids, weights = tensors()
    scales = {"w13_scale": w13.scale_b, "w2_scale": w2.scale_b} | change
    with pytest.raises(ArgumentError, match=match):
        aot.moe(lib, hidden, w13.b, w2.b, ids, weights, **scales)


def test_packed_weights_and_scales_of_other_experts_are_refused() -> None:
    blocks, scales = checkpoint(2 * N, K, 0)
    with pytest.raises(ArgumentError, match="as many experts"):
        aot.prepare_weight(blocks[:3], scales, "mxfp4")
    with pytest.raises(ArgumentError, match="as many experts"):
        aot.prepare_weight(blocks[0, 0], scales, "mxfp4")
    with pytest.raises(ArgumentError, match="N in multiples of 16"):
        aot.prepare_weight(blocks[:, :40], scales[:, :40], "mxfp4")


@pytest.mark.parametrize("word", ["mxfp4_weight", "int4_weight", "int4_zero_weight"])
def test_prepared_weights_are_widened_to_the_numbers_that_kernels_read(word: str) -> None:
    for weight in tensors(word, k=256)[1:3]:
        assert torch.equal(widened(weight).float(), numbers(weight, word))


def test_weights_are_prepared_where_they_lie_or_left_as_they_are() -> None:
    blocks, scales = checkpoint(2 * N, K, 0)
    packed, of = blocks.flatten(2).clone(), scales.clone()
    of[-1, -1, -1] = 160
    with pytest.raises(ArgumentError, match=r"a scale of mxfp4 is 2\^33"):
        prepare_in_place(packed, of, "mxfp4")
    assert torch.equal(packed, blocks.flatten(2))
    of.copy_(scales)
    found, wanted = prepare_in_place(packed, of, "mxfp4"), aot.prepare_weight(blocks, scales, "mxfp4")
    for mine, theirs, memory in zip(found, wanted, (packed, of), strict=True):
        assert (mine.shape, mine.dtype, mine.data_ptr()) == (theirs.shape, theirs.dtype, memory.data_ptr())
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_grouped_gemm_is_an_operator_for_prepared_weights_too(lib: ExpertsOnCpu) -> None:
    hidden, w13, *_ = tensors()
    ends = torch.tensor([1, 1, 5, 6, 9], dtype=torch.int32)
    torch._dynamo.reset()

    def eager(hidden: Any) -> Any:
        return aot.grouped_gemm(lib, hidden, w13.b, ends, scale_b=w13.scale_b, epilogue="swiglu_interleaved") + 1

    found = eager(hidden)
    sums = numbers(w13)[2].double() @ hidden[3].double()
    gate, up = sums[0::2], sums[1::2]
    close(found[3] - 1, torch.nn.functional.silu(gate) * up)
    assert torch.equal(torch.compile(eager, fullgraph=True, backend="aot_eager")(hidden), found)
