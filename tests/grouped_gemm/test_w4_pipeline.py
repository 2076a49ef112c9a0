"""Stages and barriers of the grouped GEMM of 4-bit weights: its producer and its consumers, in Python, as threads.

Loads, products and the epilogue are stand-ins that say what they were given and look whether it is still there; the
loops, stages, phases and barriers are those of the kernel. A deadlock, a stage that is filled again while it is read,
and sums that are another tile's are seen; what the hardware makes of it is for a GPU to say.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="the DSL is not installed")

from aot.kernels.sm90.grouped_w4 import kernel as of_kernel  # needs the DSL
from aot.kernels.sm90.grouped_w4.plan import Plan
from aot.kernels.sm90.small_m.epilogue import EpilogueOperands
from aot.kernels.sm90.small_m.pipeline import STAGED, Pipeline
from aot.kernels.sm90.w4 import mainloop as of_mainloop
from aot.kernels.w4.form import BLOCK_K, SCALE_WORDS, Form
from runtime.numbers.weights import WORDS

from .. import emulated, emulated_threads
from ..command_line import ROOT
from ..emulated import HERE, Pointer, Tensor, module, run

SM90 = ROOT / "aot/kernels/sm90"
EMPTY = 1000  # where the numbers of empty barriers begin
_LONG = 300


class Loads(NamedTuple):
    """What is loaded for a tile."""

    a: Any
    group: tuple[Any, ...]
    along_n: Any
    tokens: Any


class Barriers:
    """The mbarriers and named barriers of a CTA, made when they are first met."""

    def __init__(self, plan: Plan) -> None:
        self._arrivals = {False: 1, True: plan.empty_arrivals}
        self._state: dict[int, list[int]] = {}  # by mbarrier: arrivals that are missing, phases that are complete
        self._waiting: dict[int, list[int]] = {}
        self._named: dict[int, Any] = {}

    def _of(self, number: int) -> list[int]:
        return self._state.setdefault(number, [self._arrivals[number >= EMPTY], 0])

    def wait(self, number: int, phase: int) -> None:
        while self._of(number)[1] % 2 == phase:
            self._waiting.setdefault(number, []).append(HERE.thread)
            turns().wait()

    def arrive(self, number: int) -> None:
        state = self._of(number)
        state[0] -= 1
        assert state[0] >= 0, "more arrive than a phase expects"
        if not state[0]:
            state[:] = [self._arrivals[number >= EMPTY], state[1] + 1]
            turns().ready(self._waiting.pop(number, []))

    def meet(self, *, barrier_id: int, number_of_threads: int) -> None:
        made = emulated_threads.Barrier(turns(), number_of_threads)
        self._named.setdefault(barrier_id, made).wait()


def turns() -> Any:
    return HERE.shared.barrier._turns


def let_others_run() -> None:
    turns().ready([HERE.thread])
    turns().wait()


class Cta:
    """What stand-ins see of one CTA."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.barriers = plan, Barriers(plan)
        self.ring: dict[int, Any] = {}  # by stage, the tile and the K tile that it holds
        self.under_way: dict[int, list[list[tuple[int, Any]]]] = {}  # by thread, what groups of WGMMAs read
        self.terms: dict[tuple[int, int], Any] = {}  # by buffer and thread
        self.staged: dict[int, Any] = {}  # by thread
        self.multiplied: dict[int, set[Any]] = {}  # by thread, of the tile that it makes
        self.of_tile: dict[int, set[Any]] = {}  # by thread, of the tile that is stored
        self.stored: list[tuple[Any, int]] = []

    # The producer.

    def begin_stage(self, loads: Any, k: int, stage: int, full: int) -> None:
        self.ring[stage] = (loads, k)
        let_others_run()
        self.barriers.arrive(full)

    # The mainloop.

    def load(self, plan: Plan, weights: Any, stage: int, thread: int) -> tuple[Any, Any]:
        return self.ring[stage], None

    def dequantise(self, plan: Plan, mma: Any, codes: Any, scales: Any, block: int) -> Any:
        return {(None, None, step): codes for step in range(WORDS)}

    def gemm(self, mma: Any, accumulators: Tensor, held: Any, at: tuple[Any, ...], _: Tensor) -> None:
        stage = at[3]
        assert self.ring[stage] == held, "weights and tokens are of one stage"
        self.under_way.setdefault(HERE.thread, [[]])[-1].append((stage, held))
        self.multiplied.setdefault(HERE.thread, set()).add(held)
        accumulators[0] = accumulators[0] + held[1] + 1

    def commit_group(self) -> None:
        self.under_way[HERE.thread].append([])

    def wait_group(self, left: int) -> None:
        groups = self.under_way.setdefault(HERE.thread, [[]])
        let_others_run()
        while len(groups) > left + 1:
            for stage, held in groups.pop(0):
                assert self.ring[stage] == held, "the stage was filled again while it was read"
        HERE.shared.warps[HERE.thread // emulated.WARP].barrier.wait()  # warps wait as one

    def release(self, plan: Plan, empty: int, who: bool) -> None:
        if who:
            self.barriers.arrive(empty)

    # The epilogue.

    def fetch_terms(self, plan: Plan, operand: Any, b: Any, work: Any, thread: int) -> None:
        self.terms[operand.terms // plan.epilogue_terms, thread] = (operand.bias, work.tile_column)

    def stage_accumulators(self, plan: Plan, mma: Any, sums: Tensor, staging: Any, tokens: int, thread: int) -> None:
        mine = self.multiplied.pop(HERE.thread, set())
        if tokens:
            self.staged[thread] = sums[0], {loads for loads, _ in mine}
        self.of_tile[HERE.thread] = mine
        self.barriers.meet(barrier_id=STAGED, number_of_threads=plan.consumer_threads)

    def store(self, plan: Plan, operand: Any, staging: Any, work: Any, thread: int) -> None:
        k_tiles, buffer = work.k_tiles.count, operand.terms // plan.epilogue_terms
        for _ in range(_LONG if thread == plan.consumer_threads - 1 else 1):  # one stores for as long as a mainloop
            let_others_run()
        terms = {self.terms[buffer, t] for t in range(plan.consumer_threads)}
        assert len(terms) == 1, "all terms are of one tile"
        ((group, along_n),) = terms
        assert (operand.d.along_n, operand.d.tokens) == (work.tile_column, work.tokens) == (along_n, work.tokens)
        held = set().union(*(self.of_tile[t] for t in range(plan.consumer_threads)))
        loads = Loads(None, (group,), along_n, work.tokens)
        assert held == {(loads, k) for k in range(k_tiles)}
        wanted = WORDS * plan.blocks_k * k_tiles * (k_tiles + 1) // 2 * 2.0**plan.weights.exponent
        assert all(self.staged[t] == (wanted, {loads}) for t in range(plan.slice_threads)), "sums of all K of the tile"
        if thread == 0:
            self.stored.append((operand.d, group))


@pytest.fixture
def cutlass_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A way to make `kernel.py` for a CTA, whose stand-ins `Cta` are."""
    for name in ("TiledMma", "Pointer"):
        monkeypatch.setattr(emulated.CUTE, name, object, raising=False)
    monkeypatch.setattr(emulated.CUTE, "domain_offset", lambda at, tensor: tensor, raising=False)

    def make(cta: Cta) -> Any:
        barriers = cta.barriers
        monkeypatch.setattr(emulated.CUTE, "gemm", cta.gemm, raising=False)
        arch = {"mbarrier_wait": barriers.wait, "barrier": barriers.meet, "make_warp_uniform": lambda x: x}
        for name, of in arch.items():
            monkeypatch.setattr(emulated.ARCH, name, of, raising=False)
        field = SimpleNamespace(ACCUMULATE=None)
        warpgroup = SimpleNamespace(
            wait_group=cta.wait_group, commit_group=cta.commit_group, fence=lambda: None, Field=field
        )
        of_plan = {"Plan": Plan, "BLOCK_K": BLOCK_K, "SCALE_WORDS": SCALE_WORDS}
        none = {"scales_of_word": None, "weights_of_word": None}
        loop = module(SM90 / "w4/mainloop.py", of_mainloop.__package__, {"warpgroup": warpgroup, **of_plan, **none})
        loop.update(_load=cta.load, _dequantise=cta.dequantise, _release=cta.release)
        groups = module(SM90 / "groups.py", "aot.kernels.sm90")
        lanes = SimpleNamespace(codes_of_lanes=lambda *_: None, scales_of_rows=lambda *_: None)
        made = module(
            SM90 / "grouped_w4/kernel.py",
            of_kernel.__package__,
            {
                **{name: groups[name] for name in ("Groups", "add_up", "allocate", "tile_at")},
                **{name: loop[name] for name in ("Slice", "Weights", "add_slices", "multiply")},
                **{name: getattr(cta, name) for name in ("fetch_terms", "stage_accumulators", "store", "begin_stage")},
                "EpilogueOperands": EpilogueOperands,
                "Operands": of_kernel.Operands,
                "issue_a": lambda *_: None,
                "loads_of": lambda plan, of, work: Loads(None, work.batch, work.tile_column, work.tokens),
                "operands": lanes,
                "Plan": Plan,
            },
        )
        made["_rows_of"] = lambda d, tile: tile
        return made

    return make


class Mma:
    """A tiled MMA without numbers."""

    def get_slice(self, thread: int) -> Any:
        return SimpleNamespace(partition_B=lambda tensor: None)

    def make_fragment_B(self, tensor: Any) -> Any:  # as the DSL calls it
        return {}

    def partition_shape_C(self, shape: Any) -> Any:
        return (1,)

    def set(self, *_: Any) -> None:
        pass


class Bias:
    """Of a group it is the group's number."""

    def __getitem__(self, at: tuple[int, None]) -> int:
        return at[0]


class Tokens(dict[Any, Any]):
    """A fragment that says where it is looked at."""

    def __missing__(self, at: Any) -> Any:
        return at


@pytest.mark.parametrize("k_tiles", [1, 2, 3, 7])
@pytest.mark.parametrize(("tile_m", "tile_n", "sliced_k"), [(64, 64, 1), (64, 64, 2), (32, 64, 3), (64, 128, 1)])
def test_every_tile_is_made_of_its_own_stages_and_stored_once(
    cutlass_of: Any, monkeypatch: pytest.MonkeyPatch, tile_m: int, tile_n: int, sliced_k: int, k_tiles: int
) -> None:
    options = {"tile_m": tile_m, "tile_n": tile_n, "tile_k": 128, "sliced_k": sliced_k, "ctas_per_sm": 1}
    plan = Plan.of({**options, "overlap": "launch"}, Form("mxfp4_weight", "bias"))
    monkeypatch.setattr(Mma, "make_fragment_B", lambda self, tensor: Tokens())
    sizes, across, ctas = [0, tile_m + 1, 0, 3, tile_m, 1, 2 * tile_m], 2, 2
    rows = list(itertools.accumulate(sizes, initial=0))
    tiles = list(itertools.accumulate((-(-size // tile_m) * across for size in sizes), initial=0))
    assert tiles[-1] * k_tiles > plan.stages or k_tiles < 3, "stages are filled again"
    found = []
    for first in range(ctas):
        cta = Cta(plan)
        made = cutlass_of(cta)
        kernel = made["GroupedW4"](options | {"overlap": "launch"}, Form("mxfp4_weight", "bias"))
        storage = SimpleNamespace(
            tokens=None,
            codes=None,
            scales=None,
            staging=Pointer(np.zeros(1 << 20, object)),
            pipeline=Pipeline(0, EMPTY),
            terms=0,
            noted=Tensor(Pointer(np.zeros(6, np.int64)), (3, 2), (1, 3)),
            groups=made["Groups"](Tensor.of(np.array(rows)), Tensor.of(np.array(tiles))),
        )
        grid, of_cta = made["_Grid"](len(sizes), across, k_tiles), made["_Tiles"](first, tiles[-1], ctas)
        operand = SimpleNamespace(atom=None, tensor=None, shared=None)

        def body(
            kernel: Any = kernel, storage: Any = storage, grid: Any = grid, of_cta: Any = of_cta, operand: Any = operand
        ) -> None:
            if HERE.thread == plan.consumer_threads:
                kernel._produce(SimpleNamespace(a=operand, codes=None, scales=None), storage, grid, of_cta)
            elif HERE.thread < plan.consumer_threads:
                kernel._consume(Mma(), None, None, Bias(), storage, grid, of_cta)

        run(body, (1, 1), plan.threads)
        found += cta.stored
    wanted = [
        (group, row, rows[group + 1] - row, n)
        for group, size in enumerate(sizes)
        for n in range(across)
        for row in range(rows[group], rows[group] + size, tile_m)
    ]
    assert sorted((group, t.first, t.tokens, t.along_n) for t, group in found) == sorted(wanted)
