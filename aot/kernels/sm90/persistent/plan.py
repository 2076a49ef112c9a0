"""What a form and its options come to: tiles, clusters, stages and registers of one persistent kernel.

Pure arithmetic, some of it on numbers that may be the compiler's. Knows nothing of which options are legal (`choices`),
and imports no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from runtime.numbers.dtypes import DTYPES

from ..h200 import ENOUGH_STAGES, LEAST_SLICE, MOST_SLICES, RASTER_ROWS, RASTER_SWIZZLES
from ..sizes import (
    BARRIER_BYTES,
    SHARED_BYTES_PER_CTA,
    STATIC_BYTES,
    SWIZZLE_ATOM_ROWS,
    WARP,
    WARP_GROUP,
    WGMMA_ROWS,
)
from .form import Form
from .scale_blocks import ScaleBlocks

STAGE_BYTES_OF_K = 128  # a swizzle atom of K
CONSUMERS = 2  # warp groups
STORE_BUFFERS = 2  # epilogue tiles in shared memory, for each consumer warp group
OUTPUT_ALIGNMENT = 1024  # bytes, of epilogue tiles: eight rows of a swizzle atom
COUNTER_BYTES = 32  # a sector of L2
# Columns of 16 bits whose rows are an odd number of 16 bytes: epilogue tiles without a swizzle.
_UNSWIZZLED_COLUMNS = (56, 40, 24, 8)
_WIDE_EPILOGUE_TILE = 24  # how narrow they may be for more stages
_MOST_TRANSPOSED_COLUMNS = 64  # of an epilogue tile where D is stored transposed, and any number would do
_GATHER_WARPS = 2  # of four rows at a time each
MAXIMA = CONSUMERS * WGMMA_ROWS  # largest magnitudes that consumer warp groups tell each other: of each row
_SCALE_BYTES = CONSUMERS * WARP * 4  # of one product of scales for all groups of four threads, which share rows
# Room for mbarriers beside what finds groups. By 32 bytes of what is saved, tiles of 128 x 192 with scales of blocks
# have a fifth stage.
_BARRIER_BYTES_OF_GROUPED = BARRIER_BYTES - 256
# Whose epilogue tiles must be small for there to be one for each of many slices of K.
_FEW_ACCUMULATORS = 64
_ACCUMULATORS_BESIDE_WIDE_TILES = 80  # an epilogue with more of them needs the registers of half an epilogue tile


class AtomLayout(NamedTuple):
    """The consumer warp groups that share a tile, along its rows and along its columns."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Plan:
    """All that a kernel is specialised on. Rows and columns are WGMMA's: those of D, or exchanged where `swap`."""

    form: Form
    swap: bool
    rows: int  # of a tile, as WGMMA multiplies it
    loaded_rows: int  # that a tile has: fewer where they fill no whole atoms of WGMMA (`ragged`)
    columns: int
    atom_layout: AtomLayout
    cluster_rows: int
    cluster_columns: int
    raster_swizzle: int  # clusters' tiles, of one column or row, that follow each other in raster order
    raster_along_n: bool  # they are of one row
    quads: bool  # and four that follow each other fall to clusters of one GPC
    split_k: int
    stream_k: bool
    nonpersistent: bool  # a CTA for each tile, whose epilogue tiles go where its stages were
    pingpong: bool
    overlap: bool
    accumulator_registers: int  # that a thread needs while it stores a tile
    epilogue_tile_columns: int  # of D, by 64 rows, stored at once
    staged_scales: int  # products of blocks' scales that a thread finds in a stage
    stages: int

    @classmethod
    def of(cls, options: Mapping[str, Any], form: Form) -> Plan:
        """What `options` (`choices.OPTIONS`) come to for a form."""
        swap, pingpong = options["swap"], options["schedule"] == "pingpong"
        by_mode = (options["tile_m"], options["tile_n"]), (options["cluster_m"], options["cluster_n"])
        (loaded_rows, columns), (cluster_rows, cluster_columns) = (pair[::-1] if swap else pair for pair in by_mode)
        rows = _multiplied_rows(loaded_rows, swap, form.gated, pingpong)
        atom_layout = AtomLayout(1, 1)
        if not pingpong:
            atom_layout = AtomLayout(2, 1) if rows % (2 * WGMMA_ROWS) == 0 else AtomLayout(1, 2)
        registers = rows * columns // (atom_layout.rows * atom_layout.columns) // WARP_GROUP
        atoms = rows // WGMMA_ROWS // atom_layout.rows
        if form.promotion_interval:
            registers += registers // atoms
        staged_scales = 0
        if form.scaling == "block":
            staged_scales = 2 * atoms * _scale_blocks(form, columns // atom_layout.columns).scales
            if form.epilogue != "none":
                registers = rows * columns // (atom_layout.rows * atom_layout.columns) // WARP_GROUP
        narrow = (form.epilogue != "none" or options["split_k"] > 1) and registers > _ACCUMULATORS_BESIDE_WIDE_TILES
        share = (4 if registers <= _FEW_ACCUMULATORS else 2) if options["stream_k"] else 2 if narrow else 1
        if staged_scales:
            share = 2  # for a stage more
        multiple = options["split_k"] // math.gcd(options["split_k"], max(1, atoms))
        part = columns // (2 if form.gated and not swap else 1) // atom_layout.columns
        scales = CONSUMERS * columns // atom_layout.columns * 4 if form.scaling == "row_column" else 0
        if form.quantises:
            scales = MAXIMA * 4

        barriers = _BARRIER_BYTES_OF_GROUPED if form.grouped else BARRIER_BYTES

        def stages_with(width: int) -> int:
            buffers = 0 if options["nonpersistent"] else CONSUMERS * STORE_BUFFERS
            store = buffers * WGMMA_ROWS * width * DTYPES[form.d].bytes
            left = SHARED_BYTES_PER_CTA - STATIC_BYTES - barriers - store - scales - form.scheduler_bytes
            return int(left // ((loaded_rows + columns) * STAGE_BYTES_OF_K + staged_scales * _SCALE_BYTES))

        whole = not swap or options["split_k"] > 1 or options["stream_k"]
        width = _epilogue_tile_columns(part, swap, form.d, share, multiple, whole)
        if not form.promotion_interval and share == 1 and stages_with(width) < ENOUGH_STAGES:
            narrower = _epilogue_tile_columns(part, swap, form.d, 2, multiple, whole)
            if narrower >= _WIDE_EPILOGUE_TILE and stages_with(narrower) > stages_with(width):
                width = narrower
        return cls(
            form=form,
            swap=swap,
            rows=rows,
            loaded_rows=loaded_rows,
            columns=columns,
            atom_layout=atom_layout,
            cluster_rows=cluster_rows,
            cluster_columns=cluster_columns,
            raster_swizzle=RASTER_SWIZZLES.get(options["order"]) or max(1, RASTER_ROWS // (rows * cluster_rows)),
            raster_along_n=options["order"] == "columns",
            quads=options["order"] == "quads",
            split_k=options["split_k"],
            stream_k=options["stream_k"],
            nonpersistent=options["nonpersistent"],
            pingpong=pingpong,
            overlap=options["overlap"] != "serial",
            accumulator_registers=registers,
            epilogue_tile_columns=width,
            staged_scales=staged_scales,
            stages=stages_with(width),
        )

    # The cluster.

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_tiles * self.split_k

    @property
    def cluster_tiles(self) -> int:
        """Tiles of a cluster: CTAs that have the same slice of K."""
        return self.cluster_rows * self.cluster_columns

    @property
    def cluster_along_n(self) -> int:
        """CTAs of a cluster whose tiles differ in their columns of D."""
        return self.cluster_rows if self.swap else self.cluster_columns

    @property
    def multicasts(self) -> bool:
        """Whether CTAs load for each other."""
        return self.cluster_tiles > 1

    @property
    def pairs_tiles(self) -> bool:
        """Whether clusters are of two tiles of a group that share rows of B, or of two that share nothing."""
        return self.form.grouped and not self.swap and self.cluster_rows > 1

    @property
    def empty_arrivals(self) -> int:
        """Warps, of all CTAs, that arrive at the empty barrier of a stage once they have read it."""
        readers = sum(extent for extent in (self.cluster_rows, self.cluster_columns) if extent > 1) or 1
        return readers * 4 * (1 if self.pingpong else CONSUMERS)

    # Stages, and the TMA boxes that fill them.

    @property
    def operand_bytes(self) -> tuple[int, int]:
        """Of one stage, for the operands on WGMMA's M and N sides."""
        return self.loaded_rows * STAGE_BYTES_OF_K, self.columns * STAGE_BYTES_OF_K

    @property
    def ragged(self) -> bool:
        """Whether WGMMA multiplies more rows than a tile has: its atoms of 64 reach into what follows in shared memory,
        and what becomes of that is not stored."""
        return self.loaded_rows < self.rows

    @property
    def rows_past_stage(self) -> int:
        """Rows of 128 bytes behind a stage's that WGMMA reads."""
        return (self.rows - self.loaded_rows) // (2 if self.pairs_atoms else 1)

    @property
    def box_rows(self) -> int | tuple[int, int]:
        """A tile's rows as TMA loads them: so many, or (gates, 2) where all that make gates come before all that make
        what they gate."""
        return (self.loaded_rows // 2, 2) if self.ragged and self.pairs_atoms else self.loaded_rows

    @property
    def loads_in_turn(self) -> tuple[bool, bool]:
        """Whether the CTAs that share the operand on WGMMA's M side load it in turn, a whole stage each, and that on
        its N side: where it has no shares of whole groups of 8 rows, gates with those that they gate."""
        unit = 16 if self.form.gated and not self.swap else 8
        return self.loaded_rows % (self.cluster_columns * 8) != 0, self.columns % (self.cluster_rows * unit) != 0

    @property
    def passes_over(self) -> bool:
        """Whether a warp group that has no rows to store of a tile multiplies nothing: where rows of groups, which
        fill no whole tiles, are split between warp groups. Of 8-bit types with scales of blocks alone, as others take
        turns to multiply."""
        return self.form.grouped and self.staged_scales > 0 and self.atom_layout.rows > 1

    @property
    def tokens(self) -> int:
        """Rows of A in a tile."""
        return self.columns if self.swap else self.rows

    def moved_up(self, tile: Any, m: Any, least: Callable[..., Any] = min, most: Callable[..., Any] = max) -> Any:
        """By how many rows tile number `tile` along M begins before its place, so that all of its rows are inside `m`,
        or none before the first. The numbers may be the compiler's, and `least` and `most` are then its.

        Not with `stream_k`: of two tiles that share rows one may be cut along K, and the bits of D would depend on
        which was stored last.
        """
        if self.stream_k:
            return 0
        before = tile * self.tokens
        return least(before, most(before + self.tokens - m, 0))

    @property
    def stage_bytes(self) -> int:
        """What arrives by TMA at a stage of each CTA, from itself and others."""
        of_rows, of_columns = self.operand_bytes
        if self.form.gathered:
            return of_rows if self.swap else of_columns
        return of_rows + of_columns

    @property
    def gather_warps(self) -> int:
        """Warps of the producer warp group that gather rows of A, or 0 where these come by TMA: so many that each has
        rows of the smallest tile, and that all together load whole swizzle atoms at a time."""
        return _GATHER_WARPS if self.form.gathered else 0

    @property
    def gather_lag(self) -> int:
        """Stages that a gathering warp begins to load before it waits for the first of them to have come, and hands
        that over. A warp waits for a stage to be empty before it loads it, and consumers release a stage when products
        of the next one are under way, so it must be less than `stages` - 1."""
        return max(1, (self.stages - 1) // 2)

    # The mainloop.

    @property
    def promotion_interval(self) -> int:
        """See `Form.promotion_interval`."""
        return self.form.promotion_interval

    @property
    def partial_accumulators(self) -> int:
        """Those of a thread that the tensor core fills and f32 registers take over: of 64 rows, which a warp group
        promotes while the other multiplies."""
        return self.accumulators // self.m_atoms if self.promotion_interval else 0

    @property
    def begins_early(self) -> bool:
        """Whether the first products of a tile, which are promoted, are begun before the tile before is stored: not
        where the epilogue needs their registers, or stages give way to others' partial sums."""
        return self.split_k == 1 and not (self.staged_scales and self.form.epilogue != "none")

    @property
    def accumulators(self) -> int:
        """F32 accumulators of a thread, for a tile."""
        return self.rows * self.columns // (self.atom_layout.rows * self.atom_layout.columns) // WARP_GROUP

    @property
    def pairs_atoms(self) -> bool:
        """Whether an atom of rows makes gates, and the next one of the same warp group what they gate."""
        return self.swap and self.form.gated

    @property
    def gates_in_turn(self) -> int:
        """See the function of this name."""
        return gates_in_turn(self.swap, self.loaded_rows if self.swap else self.columns)

    @property
    def n_multiple(self) -> int:
        """What the rows of B are a multiple of: as many that make gates as make what they gate, or any number."""
        return 2 * self.gates_in_turn if self.form.gated else 1

    @property
    def m_atoms(self) -> int:
        """WGMMA atoms, of `WGMMA_ROWS` rows, in a warp group's part of a tile."""
        return self.rows // WGMMA_ROWS // self.atom_layout.rows

    @property
    def k_tile_multiple(self) -> int:
        """K tiles (stages along K) go by so many to a slice of K, the last ones zeros if need be."""
        return max(1, self.promotion_interval)

    @property
    def scale_blocks(self) -> ScaleBlocks:
        """Where scales are of blocks, those that a warp group's part of a tile has columns of."""
        return _scale_blocks(self.form, self.columns // self.atom_layout.columns)

    @property
    def scale_warps(self) -> int:
        """Warps of the producer warp group that put blocks' scales into stages: one for each consumer warp group."""
        return CONSUMERS if self.staged_scales else 0

    @property
    def full_arrivals(self) -> int:
        """Warps that arrive at the full barrier of a stage, besides bytes."""
        return 1 + self.scale_warps + self.gather_warps

    # The epilogue.

    @property
    def shared_scales(self) -> int:
        """Scales of a warp group's columns, which wait for their accumulators in shared memory."""
        return self.columns // self.atom_layout.columns if self.form.scaling == "row_column" else 0

    @property
    def out_columns(self) -> int:
        """Columns of D in a tile, along WGMMA's columns; its tokens where `swap`."""
        return self.columns // (2 if self.form.gated and not self.swap else 1)

    @property
    def out_atoms(self) -> int:
        """Atoms of 64 rows that a warp group stores of a tile."""
        return self.m_atoms // (2 if self.pairs_atoms else 1)

    @property
    def out_rows(self) -> int:
        """Rows of D in a tile, along WGMMA's rows; its columns where `swap`."""
        return self.loaded_rows // (2 if self.pairs_atoms else 1)

    @property
    def part_columns(self) -> int:
        """Columns of D in a warp group's part of a tile."""
        return self.out_columns // self.atom_layout.columns

    @property
    def epilogue_tiles_across(self) -> int:
        """Along the columns of a warp group's part of a tile."""
        return -(-self.part_columns // self.epilogue_tile_columns)

    def epilogue_tile_start(self, across: Any) -> Any:
        """The first column of an epilogue tile in a warp group's part of a tile. The last one ends where the part does,
        and so may store columns that the one before it stores too."""
        start = across * self.epilogue_tile_columns
        if self.part_columns % self.epilogue_tile_columns == 0:
            return start
        return min(start, self.part_columns - self.epilogue_tile_columns)

    @property
    def epilogue_tiles(self) -> int:
        """In a warp group's part of a tile: `out_atoms` times those across, which change first."""
        return self.out_atoms * self.epilogue_tiles_across

    @property
    def epilogue_tile_accumulators(self) -> int:
        """A thread's accumulators behind an epilogue tile."""
        return self.epilogue_tile_columns * (2 if self.form.gated else 1) // 2

    @property
    def output_buffers(self) -> int:
        """Epilogue tiles in shared memory, for each consumer warp group: all that it stores if not persistent."""
        return -(-self.epilogue_tiles // self.split_k) if self.nonpersistent else STORE_BUFFERS

    @property
    def output_bytes(self) -> int:
        """Of these, for all warp groups."""
        return CONSUMERS * self.output_buffers * WGMMA_ROWS * self.epilogue_tile_columns * DTYPES[self.form.d].bytes

    @property
    def output_offset(self) -> int:
        """Bytes of the stages before epilogue tiles, if not persistent: those that others' partial sums take, in whole
        swizzle atoms."""
        return -(-self.pushed_bytes // OUTPUT_ALIGNMENT) * OUTPUT_ALIGNMENT

    # Slices of K.

    @property
    def pushed_bytes(self) -> int:
        """What a CTA gets from the others of its cluster: partial sums of the epilogue tiles that it reduces."""
        share = self.epilogue_tiles // self.split_k
        return (self.split_k - 1) * share * self.epilogue_tile_accumulators * CONSUMERS * WARP_GROUP * 4

    @property
    def slices(self) -> tuple[int, ...]:
        """Of K, into which `stream_k` may cut a tile: with an epilogue tile for each, and room for a CTA's share."""
        tiles = self.epilogue_tiles
        room = self.stages * (self.rows + self.columns) * STAGE_BYTES_OF_K
        each = self.epilogue_tile_accumulators * CONSUMERS * WARP_GROUP * 4
        most = min(tiles, MOST_SLICES)
        return tuple(s for s in range(2, most + 1) if -(-tiles // s) * s * each <= room)

    @property
    def least_slice(self) -> int:
        """K tiles that such a slice has at least."""
        return LEAST_SLICE

    @property
    def partials_bytes(self) -> int:
        """Of the workspace that `stream_k` needs for partial sums, for each cluster."""
        return self.cluster * CONSUMERS * WARP_GROUP * self.accumulators * 4

    @property
    def counters_bytes(self) -> int:
        """And of the one for counters, which is left zero."""
        return self.cluster * CONSUMERS * COUNTER_BYTES


def gates_in_turn(swap: bool, of_b: int) -> int:
    """How many rows of B that make gates come before as many that make what they gate, in a tile with `of_b` of B: an
    atom's where rows of B are WGMMA's rows, else those that leave a gate and its partner to the same thread. Half of a
    ragged tile is gates, and those of the last tile may be as few as a swizzle atom has."""
    return WGMMA_ROWS if swap and of_b % (2 * WGMMA_ROWS) == 0 else SWIZZLE_ATOM_ROWS


def _multiplied_rows(rows: int, swap: bool, gated: bool, pingpong: bool) -> int:
    """Rows that WGMMA multiplies for so many of a tile: as many, or where rows of B fill no atoms, whole atoms for each
    warp group that shares them, of gates and of what they gate."""
    parts = 2 if gated else 1
    if not swap or rows % (parts * WGMMA_ROWS) == 0:
        return rows
    each = WGMMA_ROWS * (1 if pingpong else CONSUMERS)
    return parts * math.ceil(rows // parts / each) * each


def _scale_blocks(form: Form, columns: int) -> ScaleBlocks:
    """Gates are of other blocks of B than what they gate, unless they alternate in B."""
    lanes = 2 if form.gated and "_interleaved" not in form.epilogue else 1
    return ScaleBlocks(columns // lanes, lanes)


def _epilogue_tile_columns(part: int, swap: bool, d: str, share: int, multiple: int, whole: bool) -> int:
    """The widest epilogue tile for a warp group's columns of D, or 0; a half or a quarter as wide at most if `share` is
    2 or 4. It divides them into multiples of `multiple` if `whole`, else the last one overlaps the one before it.

    Its rows are those of a swizzle atom, 128, 64 or 32 bytes; of D stored transposed, any number of such rows. Where
    none of these divides, rows an odd number of 16 bytes apart meet no bank twice as they are.
    """
    if swap:
        widest = _MOST_TRANSPOSED_COLUMNS // share
        if not whole:
            return math.ceil(part / math.ceil(part / widest) / 8) * 8
        return next((c for c in range(widest, 0, -8) if part % (c * multiple) == 0), 0)
    widest = 128 // DTYPES[d].bytes
    narrower = widest, widest // 2, widest // 4, *(_UNSWIZZLED_COLUMNS if DTYPES[d].bits == 16 else ())
    return next((c for c in narrower if c * share <= widest and part % (c * multiple) == 0), 0)
