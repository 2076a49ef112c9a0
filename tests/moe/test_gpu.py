"""The experts of a mixture on a real GPU: functions of an archive against references, and the whole of it.

pytest -m gpu tests/moe --archive=X, for an archive of manifests/qwen3-30b-a3b.yaml, or any with these operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import runtime
from aot.pack import tables
from aot.pack.fits import refusal
from runtime import Library
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.grouped_gemm import Signature as Grouped
from runtime.moe.combine import Signature as Combine
from runtime.moe.permute import Signature as Permute
from runtime.program.record import Record
from runtime.tables.dispatch import serves

torch = pytest.importorskip("torch")

import runtime.torch as aot  # noqa: E402  # needs torch
from aot.tune import measure  # noqa: E402
from aot.tune.moe_combine.measures import CombineMeasures  # noqa: E402
from aot.tune.moe_permute.measures import OperandSet, PermuteMeasures, Weights  # noqa: E402
from aot.tune.operation import tuning  # noqa: E402
from runtime.plugin.experts import Buffers, Launches, wide_elements  # noqa: E402

pytestmark = pytest.mark.gpu

TOKENS = 1, 2, 7, 33, 128, 700
# Experts, those of a token, K; and of how many there are in all.
EXTENTS = (1, 1, 64, 0), (8, 2, 512, 0), (40, 5, 1000, 0), (128, 8, 2048, 0), (512, 10, 256, 0), (16, 8, 256, 128)
GUARD = 8
PERMUTE, COMBINE = PermuteMeasures(), CombineMeasures()


@pytest.fixture(scope="module")
def library(tuned_archive: Path) -> Iterator[Library]:
    with runtime.load(tuned_archive) as library:
        yield library
        torch.cuda.synchronize()


def functions_of(archive: Path, family: str, s: Any) -> list[str]:
    """The functions of a family for this GPU that take the operands of a signature."""
    with Archive.open(archive) as opened:
        found = []
        for name in opened.functions:
            here = serves(opened.functions[name].target, Driver().compute_capability)
            if here and f".{family}." in name and refusal(Record.from_json(opened.record(name)), s) is None:
                found.append(name)
    return sorted(found)


@pytest.fixture(scope="module")
def permutations(tuned_archive: Path) -> dict[tuple[str, bool], list[str]]:
    """Functions by element type, and whether they take an expert map."""
    found = {}
    for dtype in ("bf16", "f16", "e4m3"):
        for mapped in (False, True):
            s = Permute(dtype, 16, 4, 256, 64 if mapped else 0)
            names = functions_of(tuned_archive, "moe_permute", s)
            if names:
                found[dtype, mapped] = names
    if not found:
        pytest.skip("the archive has no moe_permute for this GPU")
    return found


@pytest.fixture(scope="module")
def combinations(tuned_archive: Path) -> dict[str, list[str]]:
    """Functions that add rows up, by element type."""
    found = {}
    for dtype in ("bf16", "f16"):
        s = Combine(dtype, dtype, 4, 256)
        if names := functions_of(tuned_archive, "moe_combine", s):
            found[dtype] = names
    if not found:
        pytest.skip("the archive has no moe_combine for this GPU")
    return found


def launch(library: Library, name: str, o: Any) -> None:
    library.functions[name](*o.arguments(), stream=torch.cuda.current_stream())


def launcher(library: Library, name: str) -> Callable[[Any], None]:
    return lambda o: launch(library, name, o)


def signatures(dtype: str, mapped: bool) -> list[Permute]:
    return [Permute(dtype, e, top, k - k % 16, every) for e, top, k, every in EXTENTS if mapped == bool(every)]


def same(found: Any, wanted: Any) -> bool:
    """Whether rows are equal where there is one, and what was not to be written is not."""
    return bool(((found == wanted) | (torch.isnan(found) & torch.isnan(wanted))).all())


def is_right(s: Permute, o: OperandSet) -> bool:
    wanted = PERMUTE.reference(s, o)
    integers = all(torch.equal(getattr(o, n).double(), wanted[n]) for n in ("ends", "positions"))
    return integers and same(o.rows.float(), wanted["rows"])


# --- permutations ---


def test_every_permutation_is_right_by_the_check_of_tuning(
    permutations: dict[tuple[str, bool], list[str]], library: Library
) -> None:
    """Experts drawn at random, and one that has all; guards behind each output."""
    for (dtype, mapped), names in permutations.items():
        for s in signatures(dtype, mapped):
            for m in TOKENS:
                weights = tuning(s).measures().weights(s, m, 0, m)
                found = measure.check(s, m, weights, {name: launcher(library, name) for name in names})
                assert {name: why for name, why in found.items() if isinstance(why, str)} == {}, (s.key(), m)


def test_ids_that_are_no_experts_get_no_row_and_leave_the_rest_as_it_is(
    permutations: dict[tuple[str, bool], list[str]], library: Library
) -> None:
    for (dtype, mapped), names in permutations.items():
        for s in signatures(dtype, mapped):
            for m in (1, 33, 700):
                weights = Weights(s, m, 0, m)
                random = torch.randint(-s.experts, 2 * s.experts, (m, s.top_k), device="cuda")
                for experts in (random, torch.full_like(random, -1), random % s.experts):
                    for name in names:
                        o = weights.made(experts)
                        launch(library, name, o)
                        assert is_right(s, o), (name, s.key(), m)


def test_no_ids_make_a_kernel_write_outside_its_outputs(
    permutations: dict[tuple[str, bool], list[str]], library: Library
) -> None:
    for (dtype, mapped), names in permutations.items():
        s = Permute(dtype, 8, 4, 128, 24 if mapped else 0)
        o = Weights(s, 50, 0, 0).made(torch.zeros((50, 4), dtype=torch.int64, device="cuda"))
        whole = torch.full((200 + 2 * GUARD, 128), float("nan"), device="cuda").to(o.rows.dtype)
        integers = torch.full((2, 200 + 2 * GUARD), 77, dtype=torch.int32, device="cuda")
        outputs = {
            "rows": whole[GUARD:-GUARD],
            "ends": integers[0, GUARD : GUARD + 8],
            "positions": integers[1, GUARD:-GUARD].view(50, 4),
        }
        o = o.writing(outputs)
        if o.expert_map is not None:
            o.expert_map.copy_(torch.arange(-8, 16, dtype=torch.int32) * 12345678)
        hostile = torch.tensor([-1, 8, (1 << 31) - 1, -(1 << 31), 1 << 20, 24, 23, 7], dtype=torch.int32)
        for ids in (hostile.repeat(25), hostile.repeat_interleave(25)):
            o.ids.copy_(ids.view(50, 4))
            for name in names:
                launch(library, name, o)
                assert bool(torch.isnan(whole[:GUARD].float()).all()), name
                assert bool(torch.isnan(whole[-GUARD:].float()).all()), name
                assert bool((integers[:, :GUARD] == 77).all()), name
                assert bool((integers[0, GUARD + 8 :] == 77).all()), name
                assert bool((integers[1, -GUARD:] == 77).all()), name
        torch.cuda.synchronize()


# --- sums ---


def test_every_sum_is_right_by_the_check_of_tuning(combinations: dict[str, list[str]], library: Library) -> None:
    """All rows named once, and a third of the positions -1 with NaN in rows that nobody names."""
    for dtype, names in combinations.items():
        for _, top_k, n, _ in EXTENTS:
            s = Combine(dtype, dtype, top_k, n - n % 8)
            for m in TOKENS:
                weights = tuning(s).measures().weights(s, m, 0, m)
                found = measure.check(s, m, weights, {name: launcher(library, name) for name in names})
                assert {name: why for name, why in found.items() if isinstance(why, str)} == {}, (s.key(), m)


def test_positions_that_are_no_rows_are_not_read(combinations: dict[str, list[str]], library: Library) -> None:
    for dtype, names in combinations.items():
        s = Combine(dtype, dtype, 4, 256)
        (o, *_) = COMBINE.weights(s, 20, 0, 0).operands(20)
        o.positions[::2, 1] = 80
        o.positions[1::2, 2] = (1 << 31) - 1
        o.positions[5, 3] = -(1 << 31)
        wanted = COMBINE.reference(s, o)["y"]
        for name in names:
            o.y.fill_(float("nan"))
            launch(library, name, o)
            error = float((o.y.float() - wanted).norm() / wanted.norm())
            assert error < measure.tolerance(dtype), (name, error)


def test_all_sums_give_equal_bits_at_every_repeat(combinations: dict[str, list[str]], library: Library) -> None:
    for dtype, names in combinations.items():
        s = Combine(dtype, dtype, 8, 2048)
        (o, *_) = COMBINE.weights(s, 300, 0, 0).operands(300)
        found = []
        for name in names:
            for _ in range(5):
                o.y.fill_(float("nan"))
                launch(library, name, o)
                found.append(o.y.clone())
        assert all(torch.equal(y, found[0]) for y in found)


# --- the whole ---


@pytest.fixture(scope="module")
def served(tuned_archive: Path) -> list[tuple[Grouped, Grouped, int]]:
    """gate_up, down and top_k of each model whose experts the archive has whole, without an expert map."""
    with Archive.open(tuned_archive) as archive:
        of_all = [
            e.signature for e in tables.operation_entries(archive) if serves(e.target, Driver().compute_capability)
        ]
    permute = [s for s in of_all if isinstance(s, Permute) and not s.global_experts]
    combine = [s for s in of_all if isinstance(s, Combine)]
    grouped = [s for s in of_all if isinstance(s, Grouped) and s.rows == "contiguous"]
    found = [
        (up, down, p.top_k)
        for p in permute
        for up in grouped
        for down in grouped
        if (up.groups, up.k, up.a, up.epilogue) == (p.experts, p.k, p.x, "swiglu")
        and up.overlap == down.overlap
        and (down.groups, down.n, down.k, down.a, down.epilogue) == (p.experts, p.k, up.columns, p.x, "none")
        and Combine(p.x, p.x, p.top_k, p.k) in combine
    ]
    if not found:
        pytest.skip("the archive has no whole block of experts for this GPU")
    return sorted(set(found), key=lambda x: x[0].key())


def block(up: Grouped, down: Grouped, top_k: int, tokens: int, seed: int = 0) -> list[Any]:
    random = torch.Generator(device="cuda").manual_seed(seed)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[up.a]

    def normal(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", generator=random, dtype=dtype)

    w13, w2 = normal(up.groups, up.n, up.k).mul_(up.k**-0.5), normal(down.groups, down.n, down.k).mul_(down.k**-0.5)
    ids = torch.rand((tokens, up.groups), device="cuda", generator=random).topk(top_k).indices
    weights = torch.rand((tokens, top_k), device="cuda", generator=random).softmax(-1)
    return [normal(tokens, up.k), w13, w2, ids, weights]


def reference(hidden: Any, w13: Any, w2: Any, ids: Any, weights: Any) -> Any:
    """In float32, expert by expert, with what each made rounded as it is between launches."""
    out = torch.zeros(hidden.shape, device="cuda", dtype=torch.float32)
    for expert in range(len(w13)):
        tokens, slots = torch.where(ids == expert)
        if not len(tokens):
            continue
        gate, up = (hidden[tokens].float() @ w13[expert].float().t()).chunk(2, -1)
        inner = (torch.nn.functional.silu(gate) * up).to(hidden.dtype)
        made = (inner.float() @ w2[expert].float().t()).to(hidden.dtype)
        out.index_add_(0, tokens, made.float() * weights[tokens, slots, None])
    return out


def error_of(found: Any, wanted: Any) -> float:
    return float((found.float() - wanted).norm() / (wanted.norm() or 1.0))


@pytest.mark.parametrize("tokens", [1, 8, 65])
def test_launches_that_overlap_in_a_graph_wait_for_each_other(
    served: list[tuple[Grouped, Grouped, int]], library: Library, tokens: int
) -> None:
    up, down, top_k = served[0]
    layers = [block(up, down, top_k, tokens, seed) for seed in range(6)]

    def chain(between: Callable[[], None]) -> Any:
        x = layers[0][0]
        for _, *weights in layers * 4:
            x = aot.moe(library, x, *weights)
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
        assert torch.equal(together, apart)


@pytest.mark.parametrize("tokens", [1, 8, 65, 512])
def test_the_experts_of_a_model_are_right(
    served: list[tuple[Grouped, Grouped, int]], library: Library, tokens: int
) -> None:
    for up, down, top_k in served:
        hidden, w13, w2, ids, weights = block(up, down, top_k, tokens)
        wanted = reference(hidden, w13, w2, ids, weights)
        found = aot.moe(library, hidden, w13, w2, ids, weights, overlap=up.overlap)
        assert error_of(found, wanted) < 6e-3, up.key()
        found = aot.moe(library, hidden, w13, w2, ids, weights)
        assert error_of(found, wanted) < 6e-3, up.key()
        assert torch.equal(aot.moe(library, hidden, w13, w2, ids.int(), weights), found), "of other ids of a type"
        ids[0], wanted[0] = -1, 0
        ids[-1, 0] = up.groups + 3
        wanted = reference(hidden, w13, w2, ids, weights)
        found = aot.moe(library, hidden, w13, w2, ids, weights)
        assert not bool(found[0].any())
        if tokens > 1:
            assert error_of(found, wanted) < 6e-3, up.key()


def test_a_captured_block_serves_the_tokens_and_experts_of_its_replay(
    served: list[tuple[Grouped, Grouped, int]], library: Library
) -> None:
    for up, down, top_k in served:
        for tokens in (1, 48):
            hidden, w13, w2, ids, weights = block(up, down, top_k, tokens)
            out = torch.empty_like(hidden)
            aot.moe(library, hidden, w13, w2, ids, weights, out=out)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                aot.moe(library, hidden, w13, w2, ids, weights, out=out)
            one = torch.full_like(ids, up.groups // 2)
            random = torch.rand((tokens, up.groups), device="cuda").topk(top_k).indices
            for other in (random, one, random - 5):
                ids.copy_(other)
                hidden.normal_()
                wanted = reference(hidden, w13, w2, ids, weights)
                bits = []
                for _ in range(3):
                    out.fill_(float("nan"))
                    graph.replay()
                    bits.append(out.clone())
                assert error_of(out, wanted) < 6e-3, (up.key(), tokens)
                assert torch.equal(bits[0], bits[1])
                assert torch.equal(bits[0], bits[2])


def test_a_compiled_block_gives_the_bits_of_an_eager_one(
    served: list[tuple[Grouped, Grouped, int]], library: Library
) -> None:
    (up, down, top_k), *_ = served
    torch._dynamo.reset()
    step = torch.compile(lambda *given: aot.moe(library, given[0] * 2, *given[1:]) + 1, fullgraph=True, dynamic=True)
    for tokens in (3, 17, 40):
        hidden, *rest = block(up, down, top_k, tokens, tokens)
        assert torch.equal(step(hidden, *rest), aot.moe(library, hidden * 2, *rest) + 1)


def test_experts_that_are_on_another_gpu_add_nothing(
    served: list[tuple[Grouped, Grouped, int]],
    permutations: dict[tuple[str, bool], list[str]],
    library: Library,
) -> None:
    """What an expert map takes away is what ids of -1 do; of archives with an entry for twice the experts."""
    ran = False
    for up, down, top_k in served:
        hidden, w13, w2, ids, weights = block(up, down, top_k, 20)
        expert_map = torch.full((2 * up.groups,), -1, dtype=torch.int32, device="cuda")
        expert_map[::2] = torch.arange(up.groups, dtype=torch.int32, device="cuda")
        try:
            found = aot.moe(library, hidden, w13, w2, ids * 2 + (ids % 3 == 0), weights, expert_map=expert_map)
        except runtime.KernelMiss:
            continue
        ran = True
        wanted = aot.moe(library, hidden, w13, w2, torch.where(ids % 3 == 0, -1, ids), weights)
        assert torch.equal(found, wanted)
    if not ran:
        pytest.skip("the archive has no moe_permute with twice the experts in all")


def test_launches_into_a_servers_buffers_give_the_bits_of_the_operator(
    served: list[tuple[Grouped, Grouped, int]], library: Library
) -> None:
    """In a captured graph, with NaN in all buffers, and the output where the inner rows are, as vLLM has it."""
    for up, down, top_k in served:
        for tokens in (1, 48):
            hidden, w13, w2, ids, weights = block(up, down, top_k, tokens)
            ids, rows = ids.int(), tokens * top_k
            elements = wide_elements(rows, max(up.n, up.k), up.groups, 2)
            wide, inner = (hidden.new_full((n,), float("nan")) for n in (elements, rows * max(down.k, up.k)))
            out, launches = inner[: tokens * up.k].view(tokens, up.k), Launches(library, "swiglu")

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
                ids.copy_(torch.rand((tokens, up.groups), device="cuda", generator=fresh).topk(top_k).indices)
                wide.fill_(float("nan"))
                inner.fill_(float("nan"))
                graph.replay()
                assert torch.equal(out, aot.moe(library, hidden, w13, w2, ids, weights)), (up.key(), tokens)
