"""What the plugin takes of a model's experts with weights in e4m3, as `tests.test_vllm_experts` has others."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from runtime.grouped_gemm import Signature as Grouped

from . import test_vllm_experts, vllm_stand_in
from .test_vllm_experts import (
    EXPERTS,
    FIVE,
    GLOBALLY,
    OF_FP8,
    K,
    N,
    _stacked,
    kernel_of,
    left,
    of_fp8,
    tokens,
    wanted_of,
)

start, serve = vllm_stand_in.start, test_vllm_experts.serve  # fixtures


@pytest.mark.parametrize("globally", [0, GLOBALLY])
def test_experts_in_fp8_by_blocks_take_five_launches(serve: Any, globally: int) -> None:
    server = serve(OF_FP8)
    layer = of_fp8(server, globally)
    server.serve(layer, quant="fp8")
    for count in (1, 9):
        given = tokens(count, of=globally or EXPERTS)
        near(layer(*given), wanted_of(layer, *given))
    assert server.lib.calls == 2 * FIVE
    assert kernel_of(layer).called == 0
    assert "serves 1 of 1 expert layers (5 signatures preloaded" in server.lines[0]


@pytest.mark.parametrize("least", [0, 96])
def test_a_gemm_of_gate_and_up_that_quantises_takes_the_place_of_two_launches_if_it_has_tiles_enough(
    serve: Any, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    monkeypatch.setattr("runtime.torch.experts.LEAST_TILES_OF_QUANTISING", least)
    server = serve([*OF_FP8, Grouped("e4m3", "e4m3", "e4m3", EXPERTS, 2 * N, K, "swiglu", scaling="block")])
    layer = of_fp8(server)
    server.serve(layer, quant="fp8")
    given = tokens(9)
    near(layer(*given), wanted_of(layer, *given))
    assert server.lib.calls == [name for name in FIVE if name != "quantise" or least]
    assert "serves 1 of 1 expert layers (6 signatures preloaded" in server.lines[0]


def near(found: Any, wanted: Any) -> None:
    """As near as rows in 8 bits allow, twice."""
    assert float((found.double() - wanted).norm()) <= 6e-2 * float(wanted.norm())


@pytest.mark.parametrize("operation", sorted(set(FIVE)))
def test_a_launch_that_fails_in_fp8_is_vllms_to_compute_from_tokens_as_they_are(serve: Any, operation: str) -> None:
    server = serve(OF_FP8)
    layer = of_fp8(server)
    server.serve(layer, quant="fp8")
    server.lib.lacking = operation
    given = tokens()
    near(layer(*given), wanted_of(layer, *given))
    assert kernel_of(layer).called == 1


def test_experts_in_fp8_without_what_quantises_between_gemms_are_left(serve: Any) -> None:
    server = serve(OF_FP8[:-1])
    assert OF_FP8[-1].key() in left(server, of_fp8(server), quant="fp8")


@pytest.mark.parametrize(
    ("block", "change", "reason"),
    [
        ((64, 64), None, "no scales of blocks of 128"),
        ((128, 128), lambda x: setattr(x, "w13_input_scale", 1.0), "tokens have static scales"),
        ((128, 128), lambda x: _stacked(x, "w2_weight_scale_inv", lambda s: s[:, :, 0]), "scales of down are"),
    ],
)
def test_experts_in_fp8_of_another_kind_are_left(serve: Any, block: Any, change: Any, reason: str) -> None:
    server = serve(OF_FP8)
    layer = of_fp8(server, block=block)
    if change is not None:
        change(layer)
    server.serve(layer, quant="fp8")
    assert reason in server.lines[0]
