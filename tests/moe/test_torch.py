"""The experts of a mixture as an operator of torch's, on the CPU: what it computes, launches, and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import runtime.torch as aot
from runtime import ArgumentError

from .on_cpu import ExpertsOnCpu, experts, library

FOUR = ["moe_permute", "grouped_gemm", "grouped_gemm", "moe_combine"]
EXPERTS, N, K = 6, 48, 32


@pytest.fixture
def lib(tmp_path: Path) -> Iterator[ExpertsOnCpu]:
    with library(tmp_path) as made:
        yield made


def tensors(tokens: int = 9, top_k: int = 3, seed: int = 0) -> tuple[Any, ...]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn((tokens, K), generator=random).bfloat16()
    w13 = (torch.randn((EXPERTS, 2 * N, K), generator=random) * K**-0.5).bfloat16()
    w2 = (torch.randn((EXPERTS, K, N), generator=random) * N**-0.5).bfloat16()
    ids = torch.rand((tokens, EXPERTS), generator=random).topk(top_k).indices
    return hidden, w13, w2, ids, torch.rand((tokens, top_k), generator=random).softmax(-1)


def biases() -> tuple[Any, Any]:
    """Of w13 and of w2, of the order of sums."""
    random = torch.Generator().manual_seed(1)
    of_w13, of_w2 = (torch.randn((EXPERTS, n), generator=random).bfloat16() for n in (2 * N, K))
    return of_w13, of_w2


def close(found: Any, wanted: Any) -> None:
    assert found.dtype == torch.bfloat16
    assert float((found.double() - wanted).norm()) < 1e-2 * float(wanted.norm())


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_it_is_what_experts_make_in_four_launches(lib: ExpertsOnCpu, ids: Any) -> None:
    hidden, w13, w2, of, weights = tensors()
    close(aot.moe(lib, hidden, w13, w2, of.to(ids), weights), experts(hidden, w13, w2, of, weights))
    assert lib.calls == FOUR


@pytest.mark.parametrize("none", [1 << 32, -(1 << 63), (1 << 63) - 1])
def test_an_id_beyond_32_bits_is_of_no_expert(lib: ExpertsOnCpu, none: int) -> None:
    hidden, w13, w2, ids, weights = tensors()
    ids, fewer = ids.long(), ids.long().clone()
    ids[:, 0], fewer[:, 0] = none, -1
    assert torch.equal(aot.moe(lib, hidden, w13, w2, ids, weights), aot.moe(lib, hidden, w13, w2, fewer, weights))


def test_gates_that_take_turns_with_up(lib: ExpertsOnCpu) -> None:
    hidden, w13, w2, ids, weights = tensors()
    found = aot.moe(lib, hidden, w13, w2, ids, weights, activation="swiglu_interleaved")
    close(found, experts(hidden, w13, w2, ids, weights, "swiglu_interleaved"))


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_clamped", "swiglu_clamped_interleaved"])
def test_biases_are_added_before_the_gate_and_before_router_weights(lib: ExpertsOnCpu, activation: str) -> None:
    hidden, w13, w2, ids, weights = tensors()
    hidden, (of_w13, of_w2) = hidden * 4, biases()  # so that some sums are clamped
    found = aot.moe(lib, hidden, w13, w2, ids, weights, w13_bias=of_w13, w2_bias=of_w2, activation=activation)
    close(found, experts(hidden, w13, w2, ids, weights, activation, (of_w13, of_w2)))
    assert lib.calls == FOUR


@pytest.mark.parametrize("which", [0, 1])
def test_either_bias_may_be_there_alone(lib: ExpertsOnCpu, which: int) -> None:
    (hidden, w13, w2, ids, weights), of = tensors(), biases()
    of[1 - which].zero_()
    found = aot.moe(lib, hidden, w13, w2, ids, weights, **{("w13_bias", "w2_bias")[which]: of[which]})
    close(found, experts(hidden, w13, w2, ids, weights, biases=of))


@pytest.mark.parametrize("top_k", [1, 3])
def test_router_weights_may_be_on_the_input(lib: ExpertsOnCpu, top_k: int) -> None:
    """Each expert of a token takes another row, and what they make is added up alone."""
    hidden, w13, w2, ids, weights = tensors(top_k=top_k)
    weights = weights + 0.5
    found = aot.moe(lib, hidden, w13, w2, ids, weights, apply_router_weight_on_input=True)
    wanted = torch.zeros(hidden.shape, dtype=torch.float64)
    for slot in range(top_k):
        weighed = (hidden.float() * weights[:, slot, None]).bfloat16()
        wanted += experts(weighed, w13, w2, ids[:, slot, None], torch.ones_like(weights[:, :1]))
    close(found, wanted)
    assert lib.calls == FOUR


def test_hidden_states_may_have_more_dimensions(lib: ExpertsOnCpu) -> None:
    hidden, w13, w2, ids, weights = tensors(tokens=10)
    found = aot.moe(lib, hidden.view(2, 5, K), w13, w2, ids.view(2, 5, -1), weights.view(2, 5, -1))
    assert torch.equal(found.view(10, K), aot.moe(lib, hidden, w13, w2, ids, weights))
    assert torch.equal(found, aot.moe(lib, hidden.view(2, 5, K), w13, w2, ids, weights))


def test_out_is_written_and_returned(lib: ExpertsOnCpu) -> None:
    hidden, *rest = tensors()
    out = torch.full_like(hidden, float("nan"))
    assert aot.moe(lib, hidden, *rest, out=out) is out
    assert torch.equal(out, aot.moe(lib, hidden, *rest))


def test_experts_that_are_elsewhere_add_nothing(lib: ExpertsOnCpu) -> None:
    """By an id that is none here, and by a map from global ids."""
    hidden, w13, w2, ids, weights = tensors()
    ids[0], ids[3, 1] = -1, EXPERTS + 5
    wanted = experts(hidden, w13, w2, ids, weights)
    assert not bool(wanted[0].any())
    found = aot.moe(lib, hidden, w13, w2, ids, weights)
    close(found, wanted)
    assert not bool(found[0].any())
    expert_map = torch.full((3 * EXPERTS,), -1, dtype=torch.int32)
    expert_map[2::3] = torch.arange(EXPERTS, dtype=torch.int32)
    inside = (ids >= 0) & (ids < EXPERTS)
    globally = torch.where(inside, ids * 3 + 2, 0)
    lib.chosen_for.clear()
    assert torch.equal(aot.moe(lib, hidden, w13, w2, globally, weights, expert_map=expert_map), found)
    tokens, expected = len(ids), -(-ids.numel() // 3)
    assert lib.chosen_for == [tokens, expected, expected, tokens], "a third of the experts is here"
    lib.chosen_for.clear()
    assert torch.equal(aot.moe(lib, hidden, w13, w2, ids, weights, global_experts=3 * EXPERTS), found)
    assert lib.chosen_for == [tokens, expected, expected, tokens], "and no map says so"


@pytest.mark.parametrize("more", [{"global_experts": EXPERTS - 1}, {"global_experts": -1}])
def test_fewer_experts_than_there_are_are_refused(lib: ExpertsOnCpu, more: Any) -> None:
    with pytest.raises(ArgumentError, match=f"global_experts must be 0, or at least the {EXPERTS} experts"):
        aot.moe(lib, *tensors(), **more)
    mapped = torch.zeros(2 * EXPERTS, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="as many as expert_map has; found"):
        aot.moe(lib, *tensors(), expert_map=mapped, global_experts=3 * EXPERTS)


def test_no_tokens_launch_nothing(lib: ExpertsOnCpu) -> None:
    hidden, w13, w2, ids, weights = tensors()
    assert aot.moe(lib, hidden[:0], w13, w2, ids[:0], weights[:0]).shape == (0, K)
    assert lib.calls == []


@pytest.mark.parametrize("biased", [False, True])
def test_it_is_one_operator_of_a_compiled_graph_for_any_number_of_tokens(lib: ExpertsOnCpu, biased: bool) -> None:
    _, w13, w2, *_ = tensors()
    torch._dynamo.reset()
    more = dict(zip(("w13_bias", "w2_bias"), biases(), strict=True)) if biased else {"global_experts": 2 * EXPERTS}

    def eager(hidden: Any, ids: Any, weights: Any) -> Any:
        return aot.moe(lib, hidden * 2, w13, w2, ids, weights, **more) + 1

    step = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 9, 20):
        hidden, _, _, ids, weights = tensors(tokens)
        assert torch.equal(step(hidden, ids, weights), eager(hidden, ids, weights))


def test_its_fake_result_is_like_hidden() -> None:
    given = [t.to("meta") for t in tensors()]
    found = torch.ops.cute_aot.moe(0, *given, w2_bias=biases()[1].to("meta"))
    assert (found.shape, found.dtype, found.device.type) == (given[0].shape, torch.bfloat16, "meta")
    with pytest.raises(ArgumentError, match="w13_bias must have"):
        torch.ops.cute_aot.moe(0, *given, w13_bias=biases()[1].to("meta"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"activation": "none"}, "activation must be one of relu"),
        ({"activation": "relu"}, r"w13 \(experts, N, K\) and w2 \(experts, K, N\)"),
        ({"w2": torch.zeros((EXPERTS, K, N + 8), dtype=torch.bfloat16)}, r"w13 \(experts, 2N, K\) and w2"),
        ({"w13": torch.zeros((2 * N, K), dtype=torch.bfloat16)}, "found .*, .96, 32., "),
        ({"topk_ids": torch.zeros((9, 3), dtype=torch.int16)}, "int32 or int64"),
        ({"topk_ids": torch.zeros((9, 2), dtype=torch.int64)}, "must both be"),
        ({"topk_ids": torch.zeros((8, 3), dtype=torch.int64), "topk_weights": torch.zeros((8, 3))}, "as many tokens"),
        ({"out": torch.zeros((9, K + 8), dtype=torch.bfloat16)}, "out must have the shape of hidden"),
        ({"w13_bias": torch.zeros((EXPERTS, N), dtype=torch.bfloat16)}, r"in w13, \(6, 96\), .* found \(6, 48\)"),
        ({"w2_bias": torch.zeros((K,), dtype=torch.bfloat16)}, r"w2_bias must have .* found \(32,\)"),
        ({"w2_bias": torch.zeros((EXPERTS, K))}, "hidden's type, torch.bfloat16; found .* in torch.float32"),
    ],
)
def test_what_does_not_go_together_is_one_clear_error(lib: ExpertsOnCpu, change: dict[str, Any], match: str) -> None:
    names = "hidden", "w13", "w2", "topk_ids", "topk_weights"
    given = dict(zip(names, tensors(), strict=True)) | change
    with pytest.raises(ArgumentError, match=match):
        aot.moe(lib, *(given.pop(name) for name in names), **given)
    assert lib.calls == []


def test_a_gradient_is_refused(lib: ExpertsOnCpu) -> None:
    hidden, *rest = tensors()
    with pytest.raises(ArgumentError, match="would have to record a gradient"):
        aot.moe(lib, hidden.requires_grad_(), *rest)
    with pytest.raises(ArgumentError, match="would have to record a gradient"):
        aot.moe(lib, hidden.detach(), *rest, w2_bias=biases()[1].requires_grad_())


def test_grouped_gemm_is_an_operator_of_its_own(lib: ExpertsOnCpu) -> None:
    hidden, w13, *_ = tensors(tokens=12)
    ends = torch.tensor([1, 1, 5, 6, 9, 12], dtype=torch.int32)
    found = aot.grouped_gemm(lib, hidden, w13, ends, epilogue="swiglu")
    both = hidden[4].double() @ w13[2].double().t()
    gate, up = both.chunk(2)
    close(found[4], torch.nn.functional.silu(gate) * up)
    assert torch.equal(lib.grouped_gemm(hidden, w13, ends, epilogue="swiglu"), found)
