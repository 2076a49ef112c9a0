"""The experts of a mixture as a whole on a real GPU, beside references.

pytest -m gpu tests/moe --archive=X, for an archive with all operations of some model: of a manifest that `aot manifest
from-config` writes, of tests/data/experts.yaml, which has experts with GPT-OSS's biases and gate, of
tests/data/experts_w4.yaml, which has them in 4 bits, or of benchmarks/moe_fp8.yaml, whose weights are in e4m3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import runtime
from aot.pack import tables
from runtime import Library
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.gemm.fallback import apply_activation
from runtime.grouped_gemm import Signature as Grouped
from runtime.moe.combine import Signature as Combine
from runtime.moe.permute import Signature as Permute
from runtime.numbers.epilogue import CLAMPED
from runtime.quantise import Signature as Quantise
from runtime.tables.dispatch import serves

torch = pytest.importorskip("torch")

import runtime.torch as aot  # noqa: E402  # needs torch
from aot.tune.elements import TORCH_DTYPES  # noqa: E402
from aot.tune.gemm.operands import MAX_ERROR_FP8_PROMOTED  # noqa: E402
from aot.tune.gemm.prepared_weights import dequantised, prepared, put_zero_points, random_weight, scale_size  # noqa: E402
from aot.tune.grouped_gemm.measures import GroupedMeasures, OperandSet, scaled  # noqa: E402
from aot.tune.quantise.measures import error_behind, quantised  # noqa: E402
from runtime.numbers.quantised import scale_shape  # noqa: E402
from runtime.plugin.experts import Buffers, Launches, Operands, wide_elements  # noqa: E402
from runtime.torch.experts import quantises_in_gemm  # noqa: E402

from ..gpu_library import library_of_module as library_of_module  # noqa: E402

pytestmark = pytest.mark.gpu

MAX_ERROR = 6e-3  # relative, in the norm: two roundings to 16 bits between launches, and one behind them
MEASURES = GroupedMeasures()
CLAMPED_SIZE = 4.0  # of sums where they are clamped, so that one in twelve is


@dataclass(frozen=True)
class Experts:
    """The experts of a model that the archive has whole, and random operands for them."""

    up: Grouped
    down: Grouped
    top_k: int

    @property
    def activation(self) -> str:
        return self.up.parts.activation_word

    @functools.cached_property  # a graph that is captured can make no generator
    def biases(self) -> tuple[Any, ...]:
        """Of w13 and of w2; none where the epilogues have none."""
        if not self.up.parts.bias:
            return ()
        return tuple(self._normal(self._random(99), s.groups, s.n) for s in (self.up, self.down))

    @functools.cached_property
    def scales(self) -> tuple[Any, ...]:
        """Of w13 and of w2; none where these are of 16 bits."""
        if self.up.scaling == "none":
            return ()
        random, found = self._random(98), []
        if self.in_4_bits:
            for s, size in ((self.up, self._size), (self.down, 1.0)):
                operand = next(o for o in s.operands() if o.name == "scale_b")
                scales = torch.rand([s.extents()[axis] for axis in operand.axes], device="cuda", generator=random)
                share = size * s.k**-0.5 * scale_size(s.scaling)
                scales = scales.add_(0.5).mul_(share).to(TORCH_DTYPES[operand.dtype])
                found.append(put_zero_points(s.scaling, scales, random))
            return tuple(found)
        for s in (self.up, self.down):
            shape = (s.groups, s.n) if s.scaling == "row_column" else (s.groups, -(-s.n // 128), -(-s.k // 128))
            found.append((torch.rand(shape, device="cuda", generator=random) + 0.5) * s.k**-0.5)
        return tuple(found)

    @property
    def in_8_bits(self) -> bool:
        return bool(self.scales) and not self.in_4_bits

    @property
    def in_4_bits(self) -> bool:
        """Whether weights alone have few bits."""
        return prepared(self.up.scaling)

    @property
    def _size(self) -> float:
        return CLAMPED_SIZE if self.up.parts.activation == CLAMPED else 1.0

    @property
    def given(self) -> dict[str, Any]:
        """What there is of biases and scales, by the operator's names."""
        biases = zip(("w13_bias", "w2_bias"), self.biases, strict=False)
        return {**dict(biases), **dict(zip(("w13_scale", "w2_scale"), self.scales, strict=False))}

    @property
    def max_error(self) -> float:
        return error_behind(MAX_ERROR_FP8_PROMOTED, self.up.a) if self.in_8_bits else MAX_ERROR

    def operands(self, tokens: int, seed: int = 0) -> list[Any]:
        """hidden, w13, w2, ids and weights."""
        random, up, down = self._random(seed), self.up, self.down
        if self.in_4_bits:
            w13, w2 = (
                random_weight(s.groups * s.n, s.k, s.b, random).unflatten(0, (s.groups, s.n)) for s in (up, down)
            )
        else:
            w13, w2 = (self._normal(random, s.groups, s.n, s.k) for s in (up, down))
        if self.in_8_bits:
            w13, w2 = w13.to(torch.float8_e4m3fn), w2.to(torch.float8_e4m3fn)
        elif not self.in_4_bits:
            w13, w2 = w13.mul_(self._size * up.k**-0.5), w2.mul_(down.k**-0.5)
        ids = torch.rand((tokens, up.groups), device="cuda", generator=random).topk(self.top_k).indices
        weights = torch.rand((tokens, self.top_k), device="cuda", generator=random).softmax(-1)
        return [self._normal(random, tokens, up.k), w13, w2, ids, weights]

    def moe(self, library: Library, *operands: Any, **more: Any) -> Any:
        """The operator's result."""
        given: Any = {**more, **self.given}
        return aot.moe(library, *operands, activation=self.activation, **given)

    def reference(self, hidden: Any, w13: Any, w2: Any, ids: Any, weights: Any) -> Any:
        """In float32, expert by expert, with what each made rounded as it is between launches."""
        out, biases = torch.zeros(hidden.shape, device="cuda", dtype=torch.float32), self.biases
        for expert in range(len(w13)):
            tokens, slots = torch.where(ids == expert)
            if not len(tokens):
                continue
            of_w13, of_w2 = (bias[expert].float() for bias in biases) if biases else (0.0, 0.0)
            first, second = (self._number(w[expert], i, expert) for i, w in enumerate((w13, w2)))
            sums = self._rows(hidden[tokens]) @ first.t() + of_w13
            inner = apply_activation(torch, self.up.parts, sums).to(hidden.dtype)
            made = (self._rows(inner) @ second.t() + of_w2).to(hidden.dtype)
            out.index_add_(0, tokens, made.float() * weights[tokens, slots, None])
        return out

    def _number(self, weight: Any, which: int, expert: int) -> Any:
        """A weight (N, K) of an expert times its scales, f32."""
        if self.in_4_bits:
            return dequantised(self.up.scaling, weight, self.scales[which][expert])
        return scaled(weight, self.scales[which][expert], torch.float32) if self.scales else weight.float()

    def _rows(self, x: Any) -> Any:
        """Rows as they are multiplied, f32."""
        if not self.in_8_bits:
            return x.float()
        over, scale = quantised(x, "e4m3", self.up.scaling)
        return scaled(over.to(torch.float8_e4m3fn), scale, torch.float32)

    def _normal(self, random: Any, *shape: int) -> Any:
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[self.up.d]
        return torch.randn(shape, device="cuda", generator=random, dtype=dtype)

    def _random(self, seed: int) -> Any:
        return torch.Generator(device="cuda").manual_seed(seed)


@pytest.fixture(scope="module")
def served(tuned_archive: Path) -> list[Experts]:
    """Those of each model that the archive has whole, without an expert map."""
    with Archive.open(tuned_archive) as archive:
        of_all = [
            e.signature for e in tables.operation_entries(archive) if serves(e.target, Driver().compute_capability)
        ]
    found = whole(of_all)
    if not found:
        pytest.skip("the archive has no whole block of experts for this GPU")
    return found


def whole(signatures: list[Any]) -> list[Experts]:
    """The experts whose four launches are all among these signatures."""
    permute = [s for s in signatures if isinstance(s, Permute) and not s.global_experts]
    combine = [s for s in signatures if isinstance(s, Combine)]
    grouped = [s for s in signatures if isinstance(s, Grouped) and s.rows == "contiguous"]
    found = [
        Experts(up, down, p.top_k)
        for p in permute
        for up in grouped
        for down in grouped
        if not up.quantises
        and (up.groups, up.k, up.a, up.d, up.parts.gated) == (p.experts, p.k, p.rows, p.x, True)
        and p.scaling == ("none" if prepared(up.scaling) else up.scaling)
        and (up.scaling, up.b) == (down.scaling, down.b)
        and up.overlap == down.overlap
        and (down.groups, down.n, down.k, down.a, down.d) == (p.experts, p.k, up.columns, p.rows, p.x)
        and (p.scaling == "none" or Quantise(up.d, up.a, up.columns, up.scaling, up.groups) in signatures)
        and down.epilogue == ("bias" if up.parts.bias else "none")
        and Combine(p.x, p.x, p.top_k, p.k) in combine
    ]
    return sorted(set(found), key=lambda of: of.up.key())


def smallest(served: list[Experts]) -> list[Experts]:
    """For each epilogue and scaling those with the fewest weights."""
    by_size = sorted(served, key=lambda of: of.up.groups * of.up.n * of.up.k, reverse=True)
    return list({(of.up.epilogue, of.up.scaling): of for of in by_size}.values())


def error_of(found: Any, wanted: Any) -> float:
    return float((found.float() - wanted).norm() / (wanted.norm() or 1.0))


@pytest.mark.parametrize("tokens", [1, 8, 65, 512])
def test_the_experts_of_a_model_are_right(served: list[Experts], library: Library, tokens: int) -> None:
    for of in served:
        hidden, w13, w2, ids, weights = operands = of.operands(tokens)
        wanted, found = of.reference(*operands), of.moe(library, *operands)
        assert error_of(of.moe(library, *operands, overlap=of.up.overlap), wanted) < of.max_error, of.up.key()
        assert error_of(found, wanted) < of.max_error, of.up.key()
        assert torch.equal(of.moe(library, hidden, w13, w2, ids.int(), weights), found), "of other ids of a type"
        ids[0] = -1
        ids[-1, 0] = of.up.groups + 3
        found = of.moe(library, *operands)
        assert not bool(found[0].any())
        if tokens > 1:
            assert error_of(found, of.reference(*operands)) < of.max_error, of.up.key()


@pytest.mark.parametrize("tokens", [1, 8, 65, 512])
def test_experts_in_8_bits_are_right_launch_by_launch(served: list[Experts], library: Library, tokens: int) -> None:
    """Each grouped GEMM is as exact on what was quantised as tuning wants it alone, and all launches together have the
    bits of the operator. What quantises has tests of its own, bit by bit."""
    in_8_bits = [of for of in served if of.in_8_bits]
    if not in_8_bits:
        pytest.skip("the archive has no experts with weights in e4m3")
    for of in in_8_bits:
        hidden, w13, w2, ids, weights = of.operands(tokens)
        words = {"scaling": of.up.scaling}
        more = {"experts": of.up.groups, **words}
        rows, ends, positions, scale = library.call("moe_permute", hidden, ids.int(), **more)
        for s, weight, of_weight in ((of.up, w13, of.scales[0]), (of.down, w2, of.scales[1])):
            extras = {"scale_a": scale, "scale_b": of_weight}
            asked: Any = {"epilogue": s.epilogue, "overlap": "launch", **extras}
            if s is of.up and quantises_in_gemm(library, weight, len(rows), asked, hidden.dtype):
                narrow = torch.empty((len(rows), s.columns), dtype=torch.float8_e4m3fn, device="cuda")
                of_narrow = torch.empty(scale_shape("block", *narrow.shape), device="cuda")
                library.grouped_gemm(rows, weight, ends, out=narrow, scale_d=of_narrow, **asked)
                s, extras = dataclasses.replace(s, d=s.a), {**extras, "scale_d": of_narrow}
                wanted = MEASURES.reference(s, OperandSet(rows, weight, ends, narrow, extras))
                for name, found in (("d", narrow), ("scale_d", of_narrow)):
                    assert error_of(found, wanted[name]) < MEASURES.max_error(s, name), s.key()
                rows, scale = narrow, of_narrow
                continue
            made = library.grouped_gemm(rows, weight, ends, **asked)
            wanted = MEASURES.reference(s, OperandSet(rows, weight, ends, made, extras))["d"]
            assert error_of(made, wanted) < MAX_ERROR_FP8_PROMOTED, s.key()
            if s is of.up:
                rows, scale = library.call("quantise", made, ends, **words)
        out = library.call("moe_combine", made, positions, weights.float())
        assert torch.equal(out, of.moe(library, hidden, w13, w2, ids, weights)), of.up.key()


def test_the_biases_of_experts_are_added_once_for_each_of_a_token(served: list[Experts], library: Library) -> None:
    """Of tokens that are zero what is left is what biases make."""
    biased = [of for of in served if of.up.parts.bias]
    if not biased:
        pytest.skip("the archive has no experts with biases")
    for of in biased:
        hidden, *rest = of.operands(9)
        hidden.zero_()
        assert error_of(of.moe(library, hidden, *rest), of.reference(hidden, *rest)) < of.max_error, of.up.key()
        ends = torch.full((of.up.groups,), 9, dtype=torch.int32, device="cuda")
        more: Any = {"epilogue": of.activation, "bias": of.biases[0], "overlap": "launch"}
        more |= {"scale_b": of.scales[0]} if of.in_4_bits else {}
        first = library.grouped_gemm(hidden, rest[0], ends, **more)
        wanted = apply_activation(torch, of.up.parts, of.biases[0][:1].float()).expand(9, -1)
        assert error_of(first, wanted) < of.max_error, of.up.key()


@pytest.mark.parametrize("tokens", [1, 8, 65])
def test_launches_that_overlap_in_a_graph_wait_for_each_other(
    served: list[Experts], library: Library, tokens: int
) -> None:
    for of in smallest(served):
        layers = [of.operands(tokens, seed) for seed in range(6)]

        def chain(between: Callable[[], None], of: Experts = of, layers: Any = layers) -> Any:
            x = layers[0][0]
            for _, *weights in layers * 4:
                x = of.moe(library, x, *weights)
                x = x / x.float().norm(dim=-1, keepdim=True).to(x.dtype) * x.shape[-1] ** 0.5
                between()
            return x

        apart = chain(torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            together = chain(lambda: None)
        for _ in range(20):
            together.fill_(float("nan"))
            graph.replay()
            assert torch.equal(together, apart), of.up.key()


def test_a_captured_block_serves_the_tokens_and_experts_of_its_replay(served: list[Experts], library: Library) -> None:
    for of in served:
        for tokens in (1, 48):
            hidden, *_, ids, _weights = operands = of.operands(tokens)
            out = torch.empty_like(hidden)
            of.moe(library, *operands, out=out)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                of.moe(library, *operands, out=out)
            one = torch.full_like(ids, of.up.groups // 2)
            random = torch.rand((tokens, of.up.groups), device="cuda").topk(of.top_k).indices
            for other in (random, one, random - 5):
                ids.copy_(other)
                hidden.normal_()
                wanted = of.reference(*operands)
                bits = []
                for _ in range(3):
                    out.fill_(float("nan"))
                    graph.replay()
                    bits.append(out.clone())
                # `error_behind` is of many rows. One, whose scales may fall on the other side, is over it in 0.5% of
                # draws of a right kernel, by a third at most in 6,000.
                most = of.max_error * (1.5 if of.in_8_bits and tokens == 1 else 1)
                assert error_of(out, wanted) < most, (of.up.key(), tokens)
                assert torch.equal(bits[0], bits[1])
                assert torch.equal(bits[0], bits[2])


def test_router_weights_may_be_on_the_input(served: list[Experts], library: Library) -> None:
    """What experts make of a token times its weight, added up alone; of archives with such a permutation."""
    ran = False
    for of in served:
        for tokens in (1, 48):
            hidden, w13, w2, ids, weights = of.operands(tokens)
            weights = weights + 0.5
            try:
                found = of.moe(library, hidden, w13, w2, ids, weights, apply_router_weight_on_input=True)
            except runtime.KernelMiss:
                continue
            ran, wanted = True, torch.zeros(hidden.shape, device="cuda")
            for slot in range(of.top_k):
                weighed = (hidden.float() * weights[:, slot, None]).to(hidden.dtype)
                wanted += of.reference(weighed, w13, w2, ids[:, slot, None], torch.ones_like(weights[:, :1]))
            assert error_of(found, wanted) < of.max_error, (of.up.key(), tokens)
    if not ran:
        pytest.skip("the archive has no moe_permute with weights")


def test_a_compiled_block_gives_the_bits_of_an_eager_one(served: list[Experts], library: Library) -> None:
    for of in smallest(served):

        def eager(*given: Any, of: Experts = of, more: Any = of.given) -> Any:
            return aot.moe(library, given[0] * 2, *given[1:], activation=of.activation, **more) + 1

        torch._dynamo.reset()
        step = torch.compile(eager, fullgraph=True, dynamic=True)
        for tokens in (3, 17, 40):
            operands = of.operands(tokens, tokens)
            assert torch.equal(step(*operands), eager(*operands)), of.up.key()


def test_experts_that_are_on_another_gpu_add_nothing(served: list[Experts], library: Library) -> None:
    """What an expert map takes away is what ids of -1 do; of archives with an entry for twice the experts."""
    ran = False
    for of in served:
        *others, ids, weights = of.operands(20)
        expert_map = torch.full((2 * of.up.groups,), -1, dtype=torch.int32, device="cuda")
        expert_map[::2] = torch.arange(of.up.groups, dtype=torch.int32, device="cuda")
        try:
            found = of.moe(library, *others, ids * 2 + (ids % 3 == 0), weights, expert_map=expert_map)
        except runtime.KernelMiss:
            continue
        ran = True
        every = {"global_experts": 2 * of.up.groups}  # so that both expect as many rows, and choose the same functions
        assert torch.equal(found, of.moe(library, *others, torch.where(ids % 3 == 0, -1, ids), weights, **every))
    if not ran:
        pytest.skip("the archive has no moe_permute with twice the experts in all")


def test_launches_into_a_servers_buffers_give_the_bits_of_the_operator(served: list[Experts], library: Library) -> None:
    """In a captured graph, with NaN in all buffers, and the output where the inner rows are, as vLLM has it."""
    for of in (of for of in served if of.up.scaling in ("none", "block")):  # servers have no layers of others
        up, down = of.up, of.down
        for tokens in (1, 48):
            hidden, w13, w2, ids, weights = of.operands(tokens)
            ids, rows = ids.int(), tokens * of.top_k
            elements = wide_elements(rows, max(up.n, up.k), up.groups, 2, down.k if of.scales else 0)
            wide, inner = (hidden.new_full((n,), float("nan")) for n in (elements, rows * max(down.k, up.k)))
            out = inner[: tokens * up.k].view(tokens, up.k)
            held = functools.partial(Operands, of.biases, of.scales)
            launches = Launches(library, of.activation, held, quantises=bool(of.scales))

            def step(given: Any = (hidden, w13, w2, ids, weights), to: Any = (launches, wide, inner, out)) -> None:
                launches, wide, inner, out = to
                launches.combine(launches.make(*given, None, Buffers(wide, inner)), out)

            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            for seed in range(2):
                fresh = torch.Generator(device="cuda").manual_seed(seed)
                ids.copy_(torch.rand((tokens, up.groups), device="cuda", generator=fresh).topk(of.top_k).indices)
                wide.fill_(float("nan"))
                inner.fill_(float("nan"))
                graph.replay()
                assert torch.equal(out, of.moe(library, hidden, w13, w2, ids, weights)), (up.key(), tokens)
