"""What manifests ask for of layers in fp8 whose tokens nobody has quantised."""

from __future__ import annotations

import dataclasses

import pytest

from aot.problem.manifest import Gemm, Manifest, dump, loads
from aot.problem.unquantised import FEW, of_unquantised, with_few_in_blocks
from runtime.gemm.signature import Signature
from runtime.quantise import Signature as Quantise

HOPPER, BLACKWELL = ["sm_90a"], ["sm_100a"]


def gemm(scaling: str = "block", tokens: tuple[int, ...] = (1, 64, 512, 4096), **more: object) -> Gemm:
    signature = Signature("e4m3", "e4m3", "bf16", "f32", "none", 512, 1024, scaling=scaling)
    traffic = tuple((m, 3) for m in tokens)
    return Gemm("qkv", dataclasses.replace(signature, **more), 1, tokens, traffic=traffic)  # type: ignore[arg-type]


@pytest.mark.parametrize(("scaling", "of_few"), [("block", "block_weight"), ("row_column", "column_weight")])
def test_few_tokens_and_more_have_kernels_of_their_own(scaling: str, of_few: str) -> None:
    (plain, few, behind), (quantise,) = of_unquantised([gemm(scaling)], HOPPER)
    assert plain == gemm(scaling)
    assert (few.name, few.tokens, few.traffic) == ("qkv.few", (1, FEW[scaling]), ((1, 3),))
    assert (few.signature.a, few.signature.scaling, few.signature.overlap) == ("bf16", of_few, "weights")
    assert (behind.name, behind.tokens, behind.signature.overlap) == ("qkv.behind", (64, 512), "weights")
    assert dataclasses.replace(behind.signature, overlap="serial") == plain.signature
    assert quantise.signature == Quantise("bf16", "e4m3", 1024, scaling)
    assert (quantise.name, quantise.tokens) == ("qkv_quantise", (64, 512, 4096))


def test_engines_gain_by_few_tokens_of_layers_in_blocks() -> None:
    named = {"in_blocks": gemm(), "by_rows": gemm("row_column")}
    gemms = [dataclasses.replace(of, name=name) for name, of in named.items()]
    assert [g.name for g in with_few_in_blocks(gemms, HOPPER)] == ["in_blocks", "in_blocks.few", "by_rows"]
    assert with_few_in_blocks(gemms, BLACKWELL) == gemms
    assert with_few_in_blocks([gemm(epilogue="bias")], HOPPER) == [gemm(epilogue="bias")]


def test_layers_of_one_k_are_quantised_by_one_kernel() -> None:
    gemms, uses = of_unquantised([gemm(), dataclasses.replace(gemm(n=2048), name="mlp")], HOPPER)
    assert [g.name for g in gemms] == [f"{n}{of}" for n in ("qkv", "mlp") for of in ("", ".few", ".behind")]
    assert [use.name for use in uses] == ["qkv_quantise"]


@pytest.mark.parametrize("scaling", ["block", "row_column"])
def test_gates_and_swiglu_are_one_kernel_too(scaling: str) -> None:
    for name in ("gate_up", "gate_up_proj", "gate_up_proj_n512_k1024"):
        gates = dataclasses.replace(gemm(scaling), name=name)
        (plain, *alone), _ = of_unquantised([gates], HOPPER, gated=False)
        (_, few, behind, *gated), _ = of_unquantised([gates], HOPPER)
        assert [few, behind] == alone
        assert [of.name for of in gated] == [f"{name}.{word}swiglu" for word in ("few.", "behind.", "")]
        assert [of.tokens for of in gated] == [few.tokens, behind.tokens, (64, 512, 4096)]
        assert gated[2].traffic == ((64, 3), (512, 3), (4096, 3))
        for of, product in zip(gated, (few, behind, plain), strict=True):
            assert of.signature == dataclasses.replace(product.signature, epilogue="swiglu")
    with_bias = dataclasses.replace(gemm(scaling, epilogue="bias"), name="gate_up")
    assert not any("swiglu" in of.name for of in of_unquantised([with_bias], HOPPER)[0])
    few_alone = dataclasses.replace(gemm(scaling, tokens=(1, 8)), name="gate_up")
    assert [of.name for of in of_unquantised([few_alone], HOPPER)[0]] == ["gate_up", "gate_up.few"]


@pytest.mark.parametrize("scaling", ["block", "row_column"])
def test_what_swiglu_gives_down_is_quantised_with_it(scaling: str) -> None:
    for name in ("down", "down_proj", "down_proj_n512_k1024"):
        down = dataclasses.replace(gemm(scaling), name=name)
        _, (quantise, swiglu) = of_unquantised([down], HOPPER)
        assert quantise.name == f"{name}_quantise"
        assert (swiglu.name, swiglu.tokens) == (f"{name}_swiglu_quantise", quantise.tokens)
        assert swiglu.signature == dataclasses.replace(quantise.signature, activation="swiglu")
        made = Manifest("m", "made up", (1, 64), ("sm_90a",), (down,), uses=(swiglu,))
        assert loads(dump(made)).uses == (swiglu,)
        _, (alone,) = of_unquantised([down], HOPPER, gated=False)
        assert alone == quantise


@pytest.mark.parametrize(
    "other",
    [
        gemm("tensor"),
        gemm(d="e4m3"),
        gemm(d="f16"),
        Gemm("head", Signature("bf16", "bf16", "bf16", "f32", "none", 512, 1024), 1, (1, 64)),
    ],
)
def test_others_stay_alone(other: Gemm) -> None:
    assert of_unquantised([other], HOPPER) == ([other], [])


def test_targets_without_such_kernels_get_nothing_more() -> None:
    assert of_unquantised([gemm("row_column")], BLACKWELL) == ([gemm("row_column")], [])
    assert len(of_unquantised([gemm("row_column")], [*BLACKWELL, *HOPPER])[0]) == 3


def test_names_stay_as_short_as_manifests_take_them() -> None:
    gemms, uses = of_unquantised([dataclasses.replace(gemm(), name="q" * 64)], HOPPER)
    made = Manifest("m", "made up", (1, 64, 512, 4096), ("sm_90a",), tuple(gemms), uses=tuple(uses))
    assert [len(item.name) for item in made.items()] == [64, 54, 57, 59]
    assert [item.name for item in loads(dump(made)).items()] == [item.name for item in made.items()]


def test_tokens_decide_which_are_asked_for() -> None:
    (_, few), uses = of_unquantised([gemm(tokens=(1, 8))], HOPPER)
    assert (few.tokens, uses) == ((1, 8), [])
    (_, behind), (quantise,) = of_unquantised([gemm(tokens=(64,))], HOPPER)
    assert (behind.name, quantise.tokens) == ("qkv.behind", (64,))
