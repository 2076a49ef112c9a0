"""The tile scheduler of the persistent GEMM: every tile once, split-K, stream-K, and the orders of GPCs."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from aot.kernels.sm90.persistent.plan import Plan
from aot.providers import estimate_persistent
from runtime.gemm.signature import Signature

from .persistent_variants import BLOCK, FP8, PLAIN, SIGNATURES, form, legal_plans, variants


def shared(signature: Signature) -> list[Plan]:
    """Those that share tiles, and are likely."""
    return [Plan.of(v.options, form(signature)) for v in variants(signature) if v.options["stream_k"]]


def shareable(signature: Signature) -> list[Plan]:
    """All that share tiles."""
    return [plan for plan in legal_plans(signature) if plan.stream_k]


def test_tiles_are_shared_where_types_have_16_bits() -> None:
    for signature in SIGNATURES:
        plans = shared(signature)
        assert bool(plans) == (signature.a != "e4m3"), signature.key()
        assert len(plans) <= 6
        assert all(not plan.pingpong and plan.split_k == 1 for plan in plans)


@pytest.mark.parametrize("signature", [PLAIN, FP8, BLOCK], ids=Signature.key)
def test_every_slice_of_a_shared_tile_has_an_epilogue_tile_and_room_for_what_others_send(signature: Signature) -> None:
    for plan in shareable(signature):
        assert plan.slices
        for slices in plan.slices:
            most = -(-plan.epilogue_tiles // slices)
            assert plan.epilogue_tiles // slices >= 1
            each = plan.epilogue_tile_accumulators * 256 * 4
            assert most * slices * each <= plan.stages * (plan.rows + plan.columns) * 128


@pytest.mark.parametrize("signature", [PLAIN, FP8, BLOCK], ids=Signature.key)
def test_workspace_holds_all_sums_and_two_counters_of_every_cta(signature: Signature) -> None:
    for plan in shareable(signature):
        assert plan.partials_bytes == plan.cluster * plan.rows * plan.columns * 4
        assert plan.counters_bytes == plan.cluster * 2 * 32


def test_tiles_of_a_last_wave_are_cut_as_often_as_clusters_are_there() -> None:
    plan = shared(PLAIN)[0]
    of = partial(estimate_persistent._slices, plan)
    assert of(40, 132, 128) == (3, 40)
    assert of(132 + 40, 132, 128) == (3, 40)
    assert of(132, 132, 128) == (1, 0)
    assert of(80, 132, 128) == (1, 80), "there is less than a cluster more for each"
    assert of(40, 132, 9) == (2, 40), "a slice has a few stages"
    assert of(1, 132, 1024) == (plan.slices[-1], 1)


@pytest.mark.parametrize("clusters", [1, 3, 35, 36, 39, 63, 64, 65, 66])
def test_every_tile_is_taken_once_whatever_gpc_takes_it(monkeypatch: pytest.MonkeyPatch, clusters: int) -> None:
    pytest.importorskip("cutlass")
    from aot.kernels.sm90.persistent import gpc

    plain = SimpleNamespace(Int32=int, select_=lambda condition, one, other: one if condition else other)
    monkeypatch.setattr(gpc, "cutlass", plain)

    def items(count: int) -> list[list[int]]:
        """Those of each cluster, in its order."""
        found = []
        for cluster in range(clusters):
            shift = gpc.gpc_shift(cluster, clusters, count)
            found.append([gpc.shifted(i, shift) for i in range(cluster, count, clusters)])
        return found

    for count in (*range(clusters, 3 * clusters + 2), 1000):
        assert sorted(itertools.chain.from_iterable(items(count))) == list(range(count))
    if clusters >= 64:  # a GPC's: four at the beginning, and of each eight and each seven the first
        first = [mine[0] for mine in items(clusters)]
        assert first[:4] == [0, 1, 2, 3]
        assert [first[c] for c in (4, 12, 20, 28)] == [4, 5, 6, 7]
        assert [first[c] for c in (36, 43, 50, 57)] == [36, 37, 38, 39]


class _Int(int):
    """An integer as kernels have them: `to` makes an f32 of it."""

    def to(self, _: object) -> _Float:
        return _Float(self)

    def __add__(self, other: int) -> _Int:
        return _Int(int(self) + int(other))

    def __sub__(self, other: int) -> _Int:
        return _Int(int(self) - int(other))

    def __mul__(self, other: int) -> _Int:
        return _Int(int(self) * int(other))

    def __floordiv__(self, other: int) -> _Int:
        return _Int(int(self) // int(other))

    __rmul__ = __mul__


class _Float:
    """An f32."""

    def __init__(self, x: Any) -> None:
        self.x: Any = numpy.float32(x.x if isinstance(x, _Float) else x)

    def __mul__(self, other: _Float) -> _Float:
        return _Float(self.x * other.x)

    def __truediv__(self, other: _Float) -> _Float:
        return _Float(self.x / other.x)

    def to(self, _: object) -> _Int:
        return _Int(self.x)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tile scheduler's module, with numbers in place of a kernel's."""
    pytest.importorskip("cutlass")
    from aot.kernels.sm90.persistent import gpc, scheduler

    plain = SimpleNamespace(
        Int32=_Int,
        Float32=_Float,
        min=lambda a, b: _Int(min(a, b)),
        max=lambda a, b: _Int(max(a, b)),
        select_=lambda condition, one, other: one if condition else other,
    )
    for module in (gpc, scheduler):
        monkeypatch.setattr(module, "cutlass", plain)
    return scheduler


def test_quotients_are_exact(scheduler: Any) -> None:
    """By way of f32, for quotients up to 2^21, next to multiples of the divisor as well."""
    random = numpy.random.default_rng(0)
    for _ in range(3000):
        divisor = _Int(random.integers(1, 2 ** random.integers(1, 25)))
        product = divisor * int(random.integers(0, 2 ** random.integers(1, 22)))
        for x in (product + int(random.integers(0, divisor)), product, product - 1):
            if 0 <= x < 2**31 - divisor and x // divisor < 2**21:
                assert scheduler._quotient(_Int(x), divisor, scheduler._reciprocal(divisor)) == x // divisor


@pytest.mark.parametrize("batched", [False, True])
def test_every_tile_is_scheduled_once(scheduler: Any, batched: bool) -> None:
    from aot.kernels.sm90.persistent.pipeline import ClusterCta

    orders = [
        {"raster_swizzle": swizzle, "raster_along_n": along_n, "split_k": split_k}
        for swizzle, along_n, split_k in itertools.product((1, 2, 8, 10, 16), (False, True), (1, 2))
    ]
    for order, rows, columns in itertools.product(orders, (1, 2, 7, 16, 33), (1, 3, 8, 41)):
        plan = SimpleNamespace(quads=False, cluster_rows=2, cluster_columns=1, k_tile_multiple=1, **order)
        plan.swap, plan.moved_up = False, lambda *_: 0
        batches = 3 if batched else 1
        grid = scheduler.Grid(1, _Int(rows), _Int(columns), rows * columns * batches, 1, None)
        tiles = scheduler.TileScheduler.of(plan, grid, 0, ClusterCta(1, 0), 0, batched)
        found = [tiles.tile_coord(_Int(i))[:3] for i in range(grid.work)]
        wanted = itertools.product(range(1, 2 * rows, 2), range(columns), range(batches))
        assert sorted(found) == sorted(wanted)
        assert [batch for *_, batch in found] == sorted(batch for *_, batch in found)
