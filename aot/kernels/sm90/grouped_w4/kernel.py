"""The grouped GEMM of 4-bit weights itself: its host function, and who does what in a CTA.

The package says how it works. Knows the parts' order and what they share, not how any of them works.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from ...groups import Groups, add_up, allocate, tile_at
from ...w4.form import Form
from ..sizes import WARP
from ..small_m.epilogue import EpilogueOperands, fetch_terms, stage_accumulators, store
from ..small_m.operands import box_layout, n_side_layout
from ..small_m.pipeline import DRAINED, KTiles, Pipeline, Work
from ..small_m.producer import TmaOperand
from ..w4 import operands
from ..w4.mainloop import Slice, Weights, add_slices, multiply
from ..w4.producer import Operands, begin_stage, issue_a, loads_of
from .plan import Plan


class _Storage(NamedTuple):
    """A CTA's shared memory."""

    tokens: Any  # A as WGMMA reads it, (rows, tile_k, stages)
    codes: Any  # the first of all stages' codes
    scales: Any
    staging: Any  # of sums
    pipeline: Pipeline
    terms: Any  # what the epilogue keeps, of one tile and of the next
    noted: Any  # where these are (`_Tile`)
    groups: Groups


class _Grid(NamedTuple):
    """What there is to do: how many groups, tiles along N, and K tiles."""

    groups: Any
    tiles_along_n: Any
    k_tiles: Any


class _Tiles(NamedTuple):
    """The tiles that fall to a CTA: every `step`th from `first` on, of so many."""

    first: Any
    count: Any
    step: Any


class _Tile(NamedTuple):
    """A tile: its first row of A, how many of its group's there are from there on, and its number along N."""

    first: Any
    tokens: Any
    along_n: Any


class GroupedW4:
    """The kernel for one set of choices (`choices.OPTIONS`) and one form."""

    __module__ = __package__  # part of the kernel's symbol, which tools find it by: the package, not this file

    def __init__(self, options: Mapping[str, Any], form: Form) -> None:
        self.plan = Plan.of(options, form)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        ends: cute.Tensor,
        d: cute.Tensor,
        scale_b: cute.Tensor,
        bias: cute.Tensor | None,
        max_active_clusters: cutlass.Int32,
        stream: Any,
    ) -> None:
        """Launch over A (M, K), B (groups, N, K) and scale_b as `runtime.numbers.weights` has them, group by group, the
        row of A that each group ends before, i32 (groups), D (M, columns), and bias (groups, N) if the form has it."""
        plan = self.plan
        element = a.element_type
        b = cute.make_tensor(b.iterator, cute.select(b.layout, [1, 2, 0]))
        load = cpasync.CopyBulkTensorTileG2SOp()
        boxes = box_layout(plan, element)
        of_a = cpasync.make_tiled_tma_atom(load, a, cute.select(boxes, [0, 1]), (plan.box_tokens, plan.tile_k))
        of_codes, of_scales = operands.tma_of_weights(plan, b, scale_b)
        m, groups = cute.size(d, mode=[0]), cute.size(ends)
        grid = _Grid(
            groups,
            cute.ceil_div(cute.size(b, mode=[0]), plan.tile_n),
            cute.ceil_div(cute.size(b, mode=[1]), plan.tile_k),
        )
        # Each group has a tile at most that is not full.
        most = (cute.ceil_div(m, plan.tile_m) + cutlass.min(groups, m)) * grid.tiles_along_n
        layouts = (n_side_layout(plan, element), boxes)
        mma = operands.tiled_mma(plan, element)
        self.kernel(of_a, of_codes, of_scales, b, d, (ends, bias), grid, mma, layouts).launch(
            grid=[cutlass.min(most, max_active_clusters), 1, 1],
            block=[plan.threads, 1, 1],
            cluster=[1, 1, 1],
            stream=stream,
            use_pdl=plan.overlap != "serial",
            max_number_threads=[plan.threads * plan.ctas_per_sm, 1, 1],  # so few registers that so many CTAs fit
        )

    @cute.kernel
    def kernel(
        self,
        of_a: Any,
        of_codes: Any,
        of_scales: Any,
        b: cute.Tensor,
        d: cute.Tensor,
        extras: Any,
        grid: _Grid,
        mma: Any,
        layouts: Any,
    ) -> None:
        """Every tile of D that falls to this CTA. Operands are a TMA atom and a tensor, `layouts` those of stages."""
        plan = self.plan
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        ends, bias = extras
        tokens_layout, boxes = layouts
        storage = self._allocate(tokens_layout)
        producer_warp = plan.consumer_threads // WARP
        if warp == producer_warp:
            for atom, _ in (of_codes, of_scales, of_a):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(plan.stages):
                    cute.arch.mbarrier_init(storage.pipeline.full + stage, plan.full_arrivals)
                    cute.arch.mbarrier_init(storage.pipeline.empty + stage, plan.empty_arrivals)
                cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(plan.overlap != "serial"):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()  # the kernel before may be what says where groups end
        if warp == 0:
            add_up(plan.tile_m, False, storage.groups, ends, cute.size(d, mode=[0]), grid.tiles_along_n)
        cute.arch.sync_threads()
        tiles = _Tiles(block, storage.groups.tiles[grid.groups], blocks)
        if warp == producer_warp:
            a = TmaOperand(of_a[0], of_a[1], cute.make_tensor(storage.tokens.iterator, boxes.outer))
            codes = TmaOperand(of_codes[0], of_codes[1], operands.codes_stages(plan, storage.codes))
            scales = TmaOperand(of_scales[0], of_scales[1], operands.scales_stages(plan, storage.scales))
            self._produce(Operands(a, codes, scales), storage, grid, tiles)
        else:
            self._consume(mma, b, d, bias, storage, grid, tiles)

    def _allocate(self, tokens_layout: Any) -> _Storage:
        """Lay out shared memory."""
        plan, memory = self.plan, self.plan.memory
        smem = cutlass.memory.SmemAllocator()
        block = smem.allocate_array(cutlass.Uint8, memory.block, byte_alignment=1024)
        tokens = cute.make_tensor(cute.recast_ptr(block, tokens_layout.inner, cutlass.BFloat16), tokens_layout.outer)
        codes = block + plan.stages * memory.n_side
        scales = codes + plan.stages * plan.codes_bytes
        codes, scales = (cute.recast_ptr(pointer, dtype=cutlass.Int32) for pointer in (codes, scales))
        staging = cute.recast_ptr(block + plan.staging_offset, dtype=cutlass.Float32)
        full = smem.allocate_array(cutlass.Int64, plan.stages, byte_alignment=8)
        empty = smem.allocate_array(cutlass.Int64, plan.stages, byte_alignment=8)
        buffers = plan.tile_buffers
        terms = smem.allocate_array(cutlass.Float32, max(buffers * plan.epilogue_terms, 1), byte_alignment=16)
        noted = smem.allocate_tensor(cutlass.Int32, cute.make_layout((len(_Tile._fields), buffers)), 16)
        return _Storage(tokens, codes, scales, staging, Pipeline(full, empty), terms, noted, allocate(smem))

    def _work(self, tile: Any, grid: _Grid, batch: tuple[Any, ...] = ()) -> Work:
        """A tile as producer and consumers take it, whose operands begin at its first row."""
        return Work(0, tile.along_n, batch, 0, 0, KTiles(0, grid.k_tiles), tile.tokens)

    @cute.jit
    def _produce(self, of: Operands, storage: _Storage, grid: _Grid, tiles: _Tiles) -> None:
        """The producer warp: load every tile's operands, a stage as soon as it is empty."""
        plan = self.plan
        full, empty = storage.pipeline
        stage, phase = cutlass.Int32(0), cutlass.Int32(1)  # the first round finds every stage empty
        for index in cutlass.range(tiles.first, tiles.count, tiles.step, unroll=1):
            group, tile = self._tile(storage, grid, index)
            work = self._work(tile, grid, (group,))
            rows = cute.domain_offset((tile.first, 0), of.a.tensor)
            loads = loads_of(plan, Operands(TmaOperand(of.a.atom, rows, of.a.shared), of.codes, of.scales), work)
            for k in cutlass.range(grid.k_tiles, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                begin_stage(loads, k, stage, full + stage)
                issue_a(plan, loads.a, work, k, stage, full + stage)
                stage += 1
                if stage == plan.stages:
                    stage = cutlass.Int32(0)
                    phase ^= 1

    @cute.jit
    def _consume(
        self,
        mma: cute.TiledMma,
        b: cute.Tensor,
        d: cute.Tensor,
        bias: Any,
        storage: _Storage,
        grid: _Grid,
        tiles: _Tiles,
    ) -> None:
        """The consumer warp groups: every tile's accumulators, and D."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        weights = Weights(operands.codes_of_lanes(plan, storage.codes), operands.scales_of_rows(plan, storage.scales))
        first, thread_of_slice = cutlass.Int32(0), thread
        if cutlass.const_expr(plan.sliced_k > 1):
            first = cute.arch.make_warp_uniform(thread // plan.slice_threads)
            thread_of_slice = thread % plan.slice_threads
        made = cutlass.Int32(0)  # tiles
        for index in cutlass.range(tiles.first, tiles.count, tiles.step, unroll=1):
            # What the epilogue needs waits in shared memory: the mainloop leaves no registers for it.
            buffer = made % plan.tile_buffers
            terms, noted = storage.terms + buffer * plan.epilogue_terms, storage.noted[None, buffer]
            self._begin_tile(b, bias, storage, grid, index, terms, noted)
            loaded = made * grid.k_tiles + first  # stages before the slice's first
            of_slice = Slice(first, loaded % plan.stages, loaded // plan.stages % 2)
            accumulators = multiply(
                plan, mma, weights, storage.tokens, storage.pipeline, grid.k_tiles, of_slice, thread_of_slice
            )

            # All have stored the tile before, and what the first threads keep of this one is there.
            cute.arch.barrier(barrier_id=DRAINED, number_of_threads=plan.consumer_threads)
            tile = _Tile(*(noted[i] for i in range(len(_Tile._fields))))
            staged_tokens = tile.tokens
            if cutlass.const_expr(plan.sliced_k > 1):
                sums = storage.staging + plan.memory.staging // 4
                add_slices(plan, accumulators, sums, first, thread_of_slice)
                staged_tokens = tile.tokens if first == 0 else cutlass.Int32(0)  # those of the others are in the sums
            stage_accumulators(plan, mma, accumulators, storage.staging, staged_tokens, thread_of_slice)
            operand = EpilogueOperands(_rows_of(d, tile), None, None, None, bias, None, terms)
            store(plan, operand, storage.staging, self._work(tile, grid), thread)
            made += 1

    @cute.jit
    def _begin_tile(
        self,
        b: cute.Tensor,
        bias: Any,
        storage: _Storage,
        grid: _Grid,
        index: cutlass.Int32,
        terms: cute.Pointer,
        noted: cute.Tensor,
    ) -> None:
        """Bring a tile's bias to `terms`, and note where it is, while its first loads are under way."""
        thread, _, _ = cute.arch.thread_idx()
        group, tile = self._tile(storage, grid, index)
        of_group = None
        if cutlass.const_expr(bias is not None):
            of_group = bias[group, None]
        operand = EpilogueOperands(None, None, None, None, of_group, None, terms)
        fetch_terms(self.plan, operand, b, self._work(tile, grid), thread)
        if thread == 0:
            for i in cutlass.range_constexpr(len(_Tile._fields)):
                noted[i] = tile[i]

    def _tile(self, storage: _Storage, grid: _Grid, index: Any) -> tuple[Any, _Tile]:
        """The group of tile number `index`, and the tile."""
        found = tile_at(self.plan.tile_m, False, storage.groups, grid.groups, index)
        first = found.begin + found.along_m * self.plan.tile_m
        return found.group, _Tile(first, found.end - first, found.along_n)


def _rows_of(d: cute.Tensor, tile: _Tile) -> cute.Tensor:
    """D's rows from a tile's first to its group's last."""
    layout = cute.make_layout((tile.tokens, cute.size(d, mode=[1])), stride=d.stride)
    return cute.make_tensor(cute.domain_offset((tile.first, 0), d).iterator, layout)
