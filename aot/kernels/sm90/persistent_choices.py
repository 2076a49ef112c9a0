"""Which forms of `persistent.Persistent` exist, as pure arithmetic: options, rules, depth, a guess at the time.

A *form* is what all variants for a signature share: element types, scaling, epilogue, order of B. Imports no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.dtypes import DTYPES
from runtime.signature import SCALE_BLOCK, Epilogue

SHARED_BYTES_PER_CTA = 227 << 10
_STATIC_BYTES = 1 << 10  # of a CTA's, what every kernel of the DSL declares
_BARRIER_BYTES = 1 << 10  # room for every mbarrier, and for aligning what comes before them
STAGE_BYTES_OF_K = 128  # a swizzle atom of K
WARPGROUPS = 2
WGMMA_ROWS = 64
STORE_BUFFERS = 2  # pieces of D in shared memory, for each warpgroup
_MOST_PIECE_COLUMNS = 64  # where D is stored transposed, and any number would do
_FEWEST_STAGES = 3
_BAND_ROWS = 2048  # so many rows stay in L2 while columns pass: 1-3% faster than 1024 or 512 on an H200
_UNIT_K = 4  # stages of a loop's body where two sets of sums alternate
# What a thread has for sums, of the 232 registers that it is given: the rest holds addresses, coordinates and counters.
# Above these the compiler spills.
_MOST_SUMS, _MOST_SUMS_FUSED, _MOST_SUMS_RESIDUAL, _MOST_SUMS_RESIDUAL_SWAPPED = 200, 144, 144, 96
_MOST_SUMS_SPLIT = 120  # all sets of them

_SUMS_BESIDE_WIDE_PIECES = 80  # an epilogue with more of them needs the registers of half a piece

# What won somewhere, of wider choices, over the layers and M of docs/kernels.md on an H200.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "schedule": ("cooperative", "pingpong"),
    "swap": (False, True),  # rows of B on WGMMA's M side, whose extent is a multiple of 64, and tokens on its N side
    "tile_m": (64, 80, 96, 112, 128, 144, 160, 168, 176, 192, 256),
    "tile_n": (64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    "cluster_m": (1, 2),
    "cluster_n": (1, 2),
    # Stages of K after which f32 registers take over what the tensor core summed up: its accumulator is short in fp8.
    # 0 is never, 1 where each has scales of its own.
    "promotion": (0, 1, 2),
    # CTAs of a cluster that take slices of K of the same tile, each of which then adds up some pieces of D.
    "split_k": (1, 2, 4),
}


BEST_UP_TO_M = 1 << 31  # and its estimates say where others are better


@dataclass(frozen=True)
class Form:
    """What a kernel computes, as far as code depends on it."""

    a: str = "bf16"
    d: str = "bf16"
    scaling: str = "none"
    epilogue: str = "none"
    b_major: str = "k"

    @property
    def gated(self) -> bool:
        """Whether two columns become one."""
        return Epilogue.of(self.epilogue).gated


@dataclass(frozen=True)
class Plan:
    """All that a kernel is specialised on. Rows and columns are WGMMA's: those of D, or exchanged where `swap`."""

    form: Form
    swap: bool
    rows: int  # of a tile, as WGMMA multiplies it
    columns: int
    parts: tuple[int, int]  # how the warpgroups that share a tile divide it
    cluster_rows: int
    cluster_columns: int
    band: int  # clusters' tiles, of one column, that follow each other
    split_k: int
    pingpong: bool
    promotion: int
    registers: int  # that a thread needs for sums while it stores a tile
    piece_columns: int  # of D, by 64 rows, stored at once
    stages: int

    @classmethod
    def of(cls, options: Mapping[str, Any], form: Form) -> Plan:
        """What `options` come to for a form."""
        swap, pingpong = options["swap"], options["schedule"] == "pingpong"
        by_mode = (options["tile_m"], options["tile_n"]), (options["cluster_m"], options["cluster_n"])
        (rows, columns), cluster = (pair[::-1] if swap else pair for pair in by_mode)
        parts = (1, 1) if pingpong else (2, 1) if rows % (2 * WGMMA_ROWS) == 0 else (1, 2)
        sums = rows * columns // (parts[0] * parts[1]) // 128
        if options["promotion"]:
            sums += sums if form.scaling == "block" else sums // (rows // WGMMA_ROWS // parts[0])
        narrow = (form.epilogue != "none" or options["split_k"] > 1) and sums > _SUMS_BESIDE_WIDE_PIECES
        turns = options["split_k"] // math.gcd(options["split_k"], max(1, rows // WGMMA_ROWS // parts[0]))
        piece = _piece_columns(columns // (2 if form.gated else 1) // parts[1], swap, form.d, narrow, turns)
        store = WARPGROUPS * STORE_BUFFERS * WGMMA_ROWS * piece * DTYPES[form.d].bytes
        scales = WARPGROUPS * columns // parts[1] * 4 if form.scaling == "row_column" else 0
        left = SHARED_BYTES_PER_CTA - _STATIC_BYTES - _BARRIER_BYTES - store - scales
        return cls(
            form=form,
            swap=swap,
            rows=rows,
            columns=columns,
            parts=parts,
            cluster_rows=cluster[0],
            cluster_columns=cluster[1],
            band=max(1, _BAND_ROWS // (rows * cluster[0])),
            split_k=options["split_k"],
            pingpong=pingpong,
            promotion=options["promotion"],
            registers=sums,
            piece_columns=piece,
            stages=left // ((rows + columns) * STAGE_BYTES_OF_K),
        )

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_rows * self.cluster_columns * self.split_k

    @property
    def multicasts(self) -> bool:
        """Whether CTAs load for each other."""
        return self.cluster_rows * self.cluster_columns > 1

    @property
    def piece_sums(self) -> int:
        """A thread's sums behind a piece of D."""
        return self.piece_columns * (2 if self.form.gated else 1) // 2

    @property
    def pushed_bytes(self) -> int:
        """What a CTA gets from the others of its cluster, which is sums of the pieces that it adds up."""
        share = self.blocks * self.pieces // self.split_k
        return (self.split_k - 1) * share * self.piece_sums * WARPGROUPS * 128 * 4

    @property
    def sets(self) -> int:
        """Of registers that the tensor core sums up into: one, for 64 rows, where the warpgroups take turns to multiply
        and to promote. Scaling blocks takes longer than the other's turn, so there are two, for all rows, and a
        warpgroup promotes one while the tensor core fills the other."""
        if not self.promotion:
            return 0
        return 2 if self.form.scaling == "block" else 1

    @property
    def sums(self) -> int:
        """Of a thread, for a tile."""
        return self.rows * self.columns // (self.parts[0] * self.parts[1]) // 128

    @property
    def shared_scales(self) -> int:
        """Scales of a warpgroup's columns, which wait for their sums in shared memory."""
        return self.columns // self.parts[1] if self.form.scaling == "row_column" else 0

    @property
    def unit_k(self) -> int:
        """Stages along K go by so many to a slice of it, the last ones zeros if need be."""
        return _UNIT_K if self.sets > 1 else max(1, self.promotion)

    @property
    def spare(self) -> int:
        """Stages that are loaded behind the last ones for products that nobody needs."""
        return 1 if self.sets > 1 else 0

    @property
    def releases(self) -> int:
        """Warps, of all CTAs, that say of a stage that they have read it."""
        sharers = sum(extent for extent in (self.cluster_rows, self.cluster_columns) if extent > 1) or 1
        return sharers * 4 * (1 if self.pingpong else WARPGROUPS)

    @property
    def blocks(self) -> int:
        """Of `WGMMA_ROWS` rows, in a warpgroup's part of a tile."""
        return self.rows // WGMMA_ROWS // self.parts[0]

    @property
    def out_columns(self) -> int:
        """Columns of D in a tile, along WGMMA's columns."""
        return self.columns // (2 if self.form.gated else 1)

    @property
    def pieces(self) -> int:
        """Across a warpgroup's part of a tile."""
        return self.out_columns // self.parts[1] // self.piece_columns


def _piece_columns(part: int, swap: bool, d: str, narrow: bool, turns: int) -> int:
    """The widest piece that divides a warpgroup's columns of D into multiples of `turns`, or 0; half as wide at most if
    `narrow`.

    Pieces are rows of a swizzle atom, 128, 64 or 32 bytes; of D stored transposed, any number of such rows.
    """
    share = 2 if narrow else 1
    if swap:
        return next((c for c in range(_MOST_PIECE_COLUMNS // share, 0, -8) if part % (c * turns) == 0), 0)
    widest = 128 // DTYPES[d].bytes
    return next((c for c in (widest, widest // 2, widest // 4)[share - 1 :] if part % (c * turns) == 0), 0)


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together, or None."""
    # First what most combinations fail by, for the time that a plan takes.
    if options["promotion"] != (0 if DTYPES[form.a].bits > 8 else 1 if form.scaling == "block" else 2):
        return "8-bit sums are promoted after 256 columns of K, or where each 128 have their scales; others are not"
    multicasts = options["cluster_m"] * options["cluster_n"] > 1
    if options["split_k"] > 1 and (options["schedule"] == "pingpong" or multicasts):
        return "slices of K belong to both warpgroups of CTAs that share nothing else"
    plan = Plan.of(options, form)
    if plan.cluster_rows * plan.cluster_columns > 2:
        return "clusters of four leave SMs idle"
    taller = 192 if plan.pingpong and plan.swap else 256 if not plan.pingpong else 128
    if plan.rows not in (64, 128, taller):
        return f"{plan.rows} rows on WGMMA's M side never won"
    if plan.columns % (16 * plan.parts[1]) and not plan.swap:
        return "columns must divide into parts of 16"
    if plan.columns // plan.parts[1] > 256:
        return "WGMMA's N side has at most 256"
    if (plan.columns // plan.cluster_rows) % 8 or (plan.rows // plan.cluster_columns) % 8:
        return "each CTA of a cluster loads as many whole groups of 8 rows"
    if plan.piece_columns == 0:
        return "the tile does not divide into pieces that TMA can store"
    if plan.promotion and plan.pingpong:
        return "promotion leaves no registers to alternate with"
    return _rule_of_form(plan, form) or _rule_of_room(plan)


def limit(form: Form, n: int) -> str | None:
    """Why a form cannot be computed for B of `n` rows, or None."""
    if form.gated and n % 16:
        return "gates and what they gate are loaded 8 rows at a time"
    if form.scaling == "block" and form.gated and "_interleaved" not in form.epilogue and n % (2 * SCALE_BLOCK):
        return "a block of B holds gates and what they gate"
    return None


def _rule_of_form(plan: Plan, form: Form) -> str | None:
    if plan.swap and (form.gated or DTYPES[form.d].bits == 8 or form.scaling == "block"):
        return "swapped operands have no gated epilogue, 8-bit output or block scaling"
    if form.b_major == "n":
        if plan.swap or form.gated or DTYPES[form.a].bits == 8:
            return "N-major B is for 16-bit types, unswapped and not gated"
        if plan.columns % 64:
            return "N-major B needs columns in whole swizzle atoms of 64"
    if form.scaling == "block":
        if plan.blocks > 1:
            return "two sets of partial sums and four blocks' scales leave no registers for more rows"
        if SCALE_BLOCK % plan.columns:
            return "a tile's columns must lie within one block of B"
    return None


def _rule_of_room(plan: Plan) -> str | None:
    most = _MOST_SUMS if plan.form.epilogue == "none" else _MOST_SUMS_FUSED
    if Epilogue.of(plan.form.epilogue).residual:
        most = _MOST_SUMS_RESIDUAL_SWAPPED if plan.swap else _MOST_SUMS_RESIDUAL
    if plan.split_k > 1 and plan.sums * (1 + plan.sets) > _MOST_SUMS_SPLIT:
        return "adding up others' sums needs registers"
    if plan.registers > most:
        return f"{plan.registers} registers for sums exceed {most}, and the compiler would spill"
    if plan.pushed_bytes > plan.stages * (plan.rows + plan.columns) * STAGE_BYTES_OF_K:
        return "others' sums must fit where stages were"
    if plan.stages < _FEWEST_STAGES:
        return f"shared memory holds {plan.stages} stages, fewer than {_FEWEST_STAGES}"
    return None


@dataclass(frozen=True)
class _Rates:
    """Fitted to times on an H200 (132 SMs, power-limited; November 2026), per microsecond."""

    start_us: float
    power: float  # multiply-adds of an SM while all are busy
    clock: float  # multiply-adds of an SM while few are
    sm_bytes: float
    l2_bytes: float
    epilogue_us: float  # of 128 x 128 sums by one warpgroup
    spare_columns: float  # what a tile costs besides, as so many more rows and columns
    spare_rows: float


_RATES = {
    2: _Rates(1.04, 3.12e6, 3.33e6, 0.151e6, 13.0e6, 1.65, 0.304, 8.0),
    1: _Rates(3.66, 7.09e6, 6.78e6, 0.098e6, 10.8e6, 1.89, 9.2, 2.4),
}
_SCALED_BLOCKS = 1.15  # how much longer products take whose blocks have scales
_MEMORY_BYTES_PER_US = 4.3e6
_MULTIPROCESSORS = 132
_CLUSTERS = {1: 132, 2: 66, 4: 30}  # that run at a time, by CTAs
_MEETING_US = 0.6  # of a cluster's CTAs, before they push sums
_PUSHED_BYTES_PER_US = 0.1e6


def estimate_us(options: Mapping[str, Any], form: Form, extents: tuple[int, int, int], batch: int = 1) -> float:
    """A guess at the time on an H200 for `extents` M, N and K, good for putting the choices for a problem in order.

    The slowest of five flows (products at the clock and at the power that there is, into an SM, out of L2, out of
    memory), a little of the others, the time to start, and the epilogues that nothing hides. In bf16 and M = 512 to
    8192 (74 choices) its first choice took 5.4% longer than the best on average, the best of its first eight 0.7% (6%
    at worst); at M = 128, 256 and 333 (264 choices) 15.7% and 2.6% (18%). In e4m3 with scales by row and column and M =
    128 to 4096 (some 28 choices for each of 56 problems, to which it was fitted) 4.6% and 0.4% (11%).
    """
    plan, rates, size = Plan.of(options, form), _RATES[DTYPES[form.a].bytes], DTYPES[form.a].bytes
    m, n, k = extents
    clusters = math.ceil(m / (options["tile_m"] * options["cluster_m"])) * batch
    clusters *= math.ceil(n / (options["tile_n"] * options["cluster_n"]))
    waves = math.ceil(clusters / _CLUSTERS[plan.cluster])
    tiles = clusters * plan.cluster
    products = plan.rows * plan.columns * k / plan.split_k * (_SCALED_BLOCKS if form.scaling == "block" else 1)
    loads = (plan.rows / plan.cluster_columns + plan.columns / plan.cluster_rows) * k * size / plan.split_k
    busy = waves * max(products / rates.clock, loads / rates.sm_bytes)
    power = tiles * products / _MULTIPROCESSORS / rates.power
    power *= 1 + rates.spare_columns / plan.columns + rates.spare_rows / plan.rows
    memory = batch * (n * k * size + m * k * size + m * n * DTYPES[form.d].bytes) / _MEMORY_BYTES_PER_US
    flows = (busy, power, tiles * loads / rates.l2_bytes, memory)
    body = 0.9 * max(flows) + 0.1 * sum(flows)
    epilogue = rates.epilogue_us * plan.rows * plan.columns / 128**2 / (1 if plan.pingpong else WARPGROUPS)
    epilogue /= plan.split_k
    if plan.split_k > 1:
        epilogue += _MEETING_US + plan.pushed_bytes / _PUSHED_BYTES_PER_US
    return rates.start_us + body + epilogue * (1 if plan.pingpong else waves)
