"""The pass that has norms and activations quantise what fp8 GEMMs read: which graphs it changes, made by hand."""

from __future__ import annotations

import operator
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from runtime.plugin.linears import Besides
from runtime.plugin.quantising import Unquantised
from runtime.plugin.scaled import QUANTISING
from runtime.torch.norms import ADD_RMSNORM
from runtime.vllm import packed_tokens
from runtime.vllm.packed_tokens import GATED_PACKED, PACKED_NORM, PACKED_SWIGLU, SWIGLU, fuse

LIBRARY, EPS = 7, 1e-6
WAY = Unquantised("block", 16, "weights", True, 64)
STRIDES = ("what Inductor was told of x, and the rest",)


@pytest.fixture(autouse=True)
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All is tuned; the signatures that were asked for."""
    asked: list[Any] = []

    def is_tuned(_lib: Any, signature: Any) -> bool:
        asked.append(signature)
        return True

    monkeypatch.setattr(packed_tokens, "library_of", lambda number: number)
    monkeypatch.setattr(packed_tokens, "is_tuned", is_tuned)
    monkeypatch.setattr(packed_tokens, "with_gates", lambda *_: None)
    return asked


class Made:
    """A graph of a norm (`halves` says how its tensor is parted), or of an activation."""

    def __init__(self, halves: str = "select", of: Any = ADD_RMSNORM, gates: tuple[Any, ...] = ()) -> None:
        self.graph = torch.fx.Graph()
        x, residual, weight, self.b, self.scale = (self.graph.placeholder(n) for n in ("x", "r", "w", "b", "s"))
        if gates:  # of a GEMM, with these words
            x.meta["val"] = torch.empty(40, 128, dtype=torch.bfloat16, device="meta")
            self.b.meta["val"] = torch.empty(512, 128, dtype=torch.float8_e4m3fn, device="meta")
            x = self.call(QUANTISING, *gates[:1], x, self.b, self.scale, torch.bfloat16, *gates[1])
            x.meta["eager_input_vals"] = ("what Inductor was told of x",), {}
        if of is SWIGLU:
            self.gates = x
            self.node = self.rows = self.call(SWIGLU, LIBRARY, x)
            self.node.meta["val"] = torch.empty(40, 256, dtype=torch.bfloat16, device="meta")
            return
        self.node = self.call(ADD_RMSNORM, LIBRARY, x, residual, weight, EPS)
        self.node.meta |= {"val": torch.empty(2, 40, 256, dtype=torch.bfloat16, device="meta")}
        self.node.meta |= {"eager_input_vals": ((LIBRARY, *STRIDES, EPS), {})}
        if halves == "select":
            self.rows, self.sum = (self.call(torch.ops.aten.select.int, self.node, 0, i) for i in range(2))
        else:
            both = self.call(torch.ops.aten.unbind.int, self.node)
            self.rows, self.sum = (self.call(operator.getitem, both, i) for i in range(2))

    def call(self, target: Any, *args: Any) -> Any:
        return self.graph.call_function(target, args)

    def read(self, way: Unquantised = WAY, library: int = LIBRARY) -> Any:
        return self.call(QUANTISING, library, self.rows, self.b, self.scale, torch.bfloat16, *way)

    def fused(self, *results: Any) -> list[Any]:
        """The nodes that pack, after the pass, of a graph with these results."""
        self.graph.output(results)
        fuse(self.graph)
        self.graph.lint()
        return [node for node in self.graph.nodes if node.target in (PACKED_NORM, PACKED_SWIGLU, GATED_PACKED)]


@pytest.mark.parametrize("halves", ["select", "unbind"])
@pytest.mark.parametrize("readers", [1, 3])
def test_a_norm_that_gemms_alone_read_packs(halves: str, readers: int, tuned: list[Any]) -> None:
    of = Made(halves)
    gemms = [of.read() for _ in range(readers)]
    (node,) = of.fused(*gemms, of.sum)
    assert node.args[4:] == (EPS, "block", 16)
    assert node.meta["eager_input_vals"] == ((LIBRARY, *STRIDES, EPS, "block", 16), {})
    assert [Unquantised(*gemm.args[5:]) for gemm in gemms] == [WAY._replace(packed=True)] * readers
    assert [s.key() for s in tuned] == ["bf16_bf16_e4m3_rmsnorm_n256_residual_bf16_block"]


def test_an_activation_that_gemms_alone_read_packs(tuned: list[Any]) -> None:
    of = Made(of=SWIGLU)
    gemm = of.read()
    (node,) = of.fused(gemm)
    assert (node.target, node.args[2:], gemm.args[1]) == (PACKED_SWIGLU, ("block", 16), node)
    assert [s.key() for s in tuned] == ["bf16_e4m3_quantise_k256_block_swiglu"]


def with_gates(monkeypatch: pytest.MonkeyPatch, **tuned_to: int) -> list[str]:
    """Kernels with SwiGLU were tuned up to these M: `few`, `weights` and `serial`. The keys of what was asked for."""
    asked: list[str] = []

    def found(_lib: Any, of: Any) -> Besides | None:
        asked.append(of.key())
        most = tuned_to.get("few" if of.a == of.d else of.overlap, 0)
        return Besides("gated", 1, most) if most else None

    monkeypatch.setattr(packed_tokens, "with_gates", found)
    return asked


@pytest.mark.parametrize(
    ("few", "tuned_to", "after", "most"), [(16, 16, 16, 16), (8, 16, 16, 8), (16, 4, 2, 2), (16, 16, 2, 2)]
)
def test_gates_before_it_are_computed_with_it(
    few: int, tuned_to: int, after: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few tokens no more than all three take as they are."""
    asked = with_gates(monkeypatch, few=tuned_to, weights=64)
    gates = WAY._replace(few=few, packed=True)
    of = Made(of=SWIGLU, gates=(LIBRARY, gates))
    gemm = of.read(WAY._replace(few=after))
    (node,) = of.fused(gemm)
    assert (node.target, gemm.args[1]) == (GATED_PACKED, node)
    more = ("block", after, most, 64, False)
    assert node.args[2:] == (of.b, of.scale, torch.bfloat16, *gates, *more)
    assert node.meta["eager_input_vals"] == (("what Inductor was told of x", *more), {})
    assert QUANTISING not in [each.target for each in of.graph.nodes if each is not gemm]
    assert asked == ["bf16_e4m3_bf16_f32_none_n512_k128_block_weight_weights"] + [
        f"e4m3_e4m3_bf16_f32_none_n512_k128_block{overlap}" for overlap in ("_weights", "")
    ]


def test_gates_that_nobody_would_quantise_behind_are_computed_of_few_tokens(
    monkeypatch: pytest.MonkeyPatch, tuned: list[Any]
) -> None:
    with_gates(monkeypatch, few=16, weights=64, serial=512)
    of = Made(of=SWIGLU, gates=(LIBRARY, WAY))
    (node,) = of.fused(of.read())
    assert node.args[-3:] == (16, 64, True)
    assert [s.key() for s in tuned] == ["bf16_e4m3_quantise_k256_block_swiglu", "bf16_e4m3_quantise_k256_block"]
    monkeypatch.setattr(packed_tokens, "is_tuned", lambda _lib, s: s.key().endswith("swiglu"))
    of = Made(of=SWIGLU, gates=(LIBRARY, WAY))
    (node,) = of.fused(of.read())
    assert node.args[-3:] == (16, 0, False)


@pytest.mark.parametrize("case", ["another library", "read by others", "fewer tuned"])
def test_gates_of_others_stay(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is gained where the activation of some tokens would have to be copied."""
    with_gates(monkeypatch, few=4 if case == "fewer tuned" else 16, serial=512)
    of = Made(of=SWIGLU, gates=(LIBRARY + (case == "another library"), WAY))
    (node,) = of.fused(of.read(), *([of.gates] if case == "read by others" else []))
    assert (node.target, node.args[1]) == (PACKED_SWIGLU, of.gates)


def test_gemms_that_overlap_differently_read_the_same() -> None:
    of = Made()
    assert of.fused(of.read(), of.read(WAY._replace(overlap="serial", behind=0, quantises=False)))


@pytest.mark.parametrize(
    ("way", "library"),
    [
        (WAY._replace(few=8), LIBRARY),
        (WAY._replace(scaling="row_column"), LIBRARY),
        (WAY._replace(packed=True), LIBRARY),
        (WAY, LIBRARY + 1),
    ],
    ids=["few", "scaling", "packed", "library"],
)
def test_gemms_that_quantise_differently_read_what_nobody_packed(way: Unquantised, library: int) -> None:
    of = Made()
    assert not of.fused(of.read(), of.read(way, library))
    of = Made()
    if way.few == WAY.few and way.scaling == WAY.scaling:
        assert not of.fused(of.read(way, library)), "nor alone"


@pytest.mark.parametrize("other", ["view", "whole", "from the end", "as weights", "result", "nobody"])
def test_what_others_read_stays(other: str) -> None:
    of = Made()
    gemms = [] if other == "nobody" else [of.read()]
    more = {
        "view": lambda: of.call(torch.ops.aten.view.default, of.rows, [40, 256]),
        "whole": lambda: of.node,
        "from the end": lambda: of.call(torch.ops.aten.select.int, of.node, 0, -2),
        "as weights": lambda: of.call(QUANTISING, LIBRARY, of.rows, of.rows, of.scale, torch.bfloat16, *WAY),
        "result": lambda: of.rows,
        "nobody": lambda: of.sum,
    }[other]()
    assert not of.fused(*gemms, of.sum, more)


def test_what_was_not_tuned_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_tokens, "is_tuned", lambda *_: False)
    of = Made()
    assert not of.fused(of.read())
