"""Which forms of `persistent.Persistent` exist, as pure arithmetic: options, rules, depth.

A *form* is what all variants for a signature share: element types, scaling, epilogue, order of B. Imports no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.gemm.signature import Epilogue, extra_operands
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.scaling import SCALE_BLOCK

SHARED_BYTES_PER_CTA = 227 << 10
_STATIC_BYTES = 1 << 10  # of a CTA's, what every kernel of the DSL declares
_BARRIER_BYTES = 1 << 10  # room for every mbarrier, and for aligning what comes before them
STAGE_BYTES_OF_K = 128  # a swizzle atom of K
WARPGROUPS = 2
WGMMA_ROWS = 64
STORE_BUFFERS = 2  # pieces of D in shared memory, for each warpgroup
_ENOUGH_STAGES, _WIDE_PIECE = 5, 24  # of 64 K, for which pieces of D may be narrower, and how narrow
_MOST_PIECE_COLUMNS = 64  # where D is stored transposed, and any number would do
_ODD_PIECES = 56, 40, 24  # columns of 16 bits whose rows are an odd number of 16 bytes
_FEWEST_STAGES = 3
_MOST_ROWS_OF_B = 1 << 27  # in tiles of 64: see `persistent_places`, whose quotients are exact up to 2^21
_BAND_ROWS = 2048  # so many rows stay in L2 while columns pass: 1-3% faster than 1024 or 512 on an H200
_BANDS = {"two_rows": 2, "columns": 8, "quads": 8}
_LEAST_SLICE, _MOST_SLICES = 4, 12  # stages of K, and how many to a tile
COUNTER_BYTES = 32  # a sector of L2
_BOX_TOKENS, _SMALL_BOX_TOKENS = 16, 8  # of a TMA box where rows past M are left out; 8 are a swizzle atom's
_UNIT_K = 4  # stages of a loop's body where two sets of sums alternate
# What a thread has for sums, of the 232 registers that it is given: the rest holds addresses, coordinates and counters.
# Above these the compiler spills.
_MOST_SUMS, _MOST_SUMS_FUSED, _MOST_SUMS_RESIDUAL, _MOST_SUMS_RESIDUAL_SWAPPED = 200, 144, 144, 96
_MOST_SUMS_SPLIT = 120  # all sets of them
_MOST_SUMS_PROMOTED_THREE = 176  # of tiles of three blocks of rows
_MOST_SUMS_RESIDUAL_BESIDE = 120  # of such tiles, and of clusters of four

_FEW_SUMS = 64  # whose pieces must be small for there to be one for each of many slices of K
_SUMS_BESIDE_WIDE_PIECES = 80  # an epilogue with more of them needs the registers of half a piece

# What won somewhere, of wider choices, over layers of models at several M on an H200.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "schedule": ("cooperative", "pingpong"),
    "swap": (False, True),  # rows of B on WGMMA's M side, whose extent is a multiple of 64, and tokens on its N side
    "tile_m": (64, 80, 88, 96, 112, 128, 144, 160, 168, 176, 192, 256),
    "tile_n": (64, 80, 96, 112, 128, 144, 160, 168, 176, 192, 224, 256),
    "cluster_m": (1, 2),
    "cluster_n": (1, 2),
    # CTAs of a cluster that take slices of K of the same tile, each of which then adds up some pieces of D.
    "split_k": (1, 2, 4),
    # Tiles of the last wave, where they are too few for all SMs, are cut along K and shared by these.
    "stream_k": (False, True),
    # Of tiles: down the rows of a band of `_BAND_ROWS` rows, of two clusters' rows, or along a band of eight clusters'
    # columns. What L2 serves at a time depends on it, and on which SMs ask together. "quads" gives clusters of one GPC,
    # four by four, tiles that read the same of the operand that clusters do not multicast.
    "order": ("rows", "two_rows", "columns", "quads"),
    # What may happen before the kernel before this one ends: nothing, or all but reading and writing ("launch").
    # Loading B too was tried, and gains nothing (docs/kernels/sm90_persistent.md).
    "overlap": ("serial", "launch"),
    # Loads of a tile that hangs over M leave out rows of A past it, which take longer to load than others.
    "skip_oob": (False, True),
}


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

    @property
    def reads(self) -> bool:
        """Whether there are operands besides A and B."""
        return bool(extra_operands(self.d, self.scaling, self.epilogue, batched=False))

    @property
    def promotion(self) -> int:
        """Stages of K after which f32 registers take over what the tensor core summed up, or 0 for never.

        Its accumulator is short in fp8: two stages at most, one where each has scales of its own.
        """
        return 0 if DTYPES[self.a].bits > 8 else 1 if self.scaling == "block" else 2


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
    band: int  # clusters' tiles, of one column or row, that follow each other
    along_columns: bool  # they are of one row
    quads: bool  # and four that follow each other fall to clusters of one GPC
    split_k: int
    stream_k: bool
    pingpong: bool
    overlap: bool
    skip_oob: bool
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
        if form.promotion:
            sums += sums if form.scaling == "block" else sums // (rows // WGMMA_ROWS // parts[0])
        narrow = (form.epilogue != "none" or options["split_k"] > 1) and sums > _SUMS_BESIDE_WIDE_PIECES
        share = (4 if sums <= _FEW_SUMS else 2) if options["stream_k"] else 2 if narrow else 1
        turns = options["split_k"] // math.gcd(options["split_k"], max(1, rows // WGMMA_ROWS // parts[0]))
        part = columns // (2 if form.gated else 1) // parts[1]
        scales = WARPGROUPS * columns // parts[1] * 4 if form.scaling == "row_column" else 0

        def stages_with(piece: int) -> int:
            store = WARPGROUPS * STORE_BUFFERS * WGMMA_ROWS * piece * DTYPES[form.d].bytes
            left = SHARED_BYTES_PER_CTA - _STATIC_BYTES - _BARRIER_BYTES - store - scales
            return int(left // ((rows + columns) * STAGE_BYTES_OF_K))

        piece = _piece_columns(part, swap, form.d, share, turns)
        if not form.promotion and share == 1 and stages_with(piece) < _ENOUGH_STAGES:
            narrower = _piece_columns(part, swap, form.d, 2, turns)
            if narrower >= _WIDE_PIECE and stages_with(narrower) >= _ENOUGH_STAGES:
                piece = narrower
        return cls(
            form=form,
            swap=swap,
            rows=rows,
            columns=columns,
            parts=parts,
            cluster_rows=cluster[0],
            cluster_columns=cluster[1],
            band=_BANDS.get(options["order"]) or max(1, _BAND_ROWS // (rows * cluster[0])),
            along_columns=options["order"] == "columns",
            quads=options["order"] == "quads",
            split_k=options["split_k"],
            stream_k=options["stream_k"],
            pingpong=pingpong,
            overlap=options["overlap"] != "serial",
            skip_oob=options["skip_oob"],
            registers=sums,
            piece_columns=piece,
            stages=stages_with(piece),
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
    def tokens(self) -> int:
        """Rows of A in a tile."""
        return self.columns if self.swap else self.rows

    @property
    def token_sharers(self) -> int:
        """CTAs of a cluster that load these together: each a share, which all get."""
        return self.cluster_rows if self.swap else self.cluster_columns

    @property
    def box_tokens(self) -> int:
        """Rows of A in a TMA box where `skip_oob` leaves some of a tile out, such that boxes divide among sharers."""
        return _SMALL_BOX_TOKENS if self.tokens // self.token_sharers % _BOX_TOKENS else _BOX_TOKENS

    @property
    def boxes(self) -> int:
        """Such boxes in a tile."""
        return self.tokens // self.box_tokens

    def tokens_inside(self, tile: Any, m: Any, least: Callable[..., Any] = min, most: Callable[..., Any] = max) -> Any:
        """Rows of A that tile number `tile` along M has, of `m`: none if it is all past M. The numbers may be the
        compiler's, as in the methods that follow, and `least` and `most` are then its."""
        return least(most(m - tile * self.tokens, 0), self.tokens)

    def boxes_inside(self, inside: Any) -> Any:
        """The first boxes of a tile that hold any of its first `inside` rows of A."""
        return (inside + self.box_tokens - 1) // self.box_tokens

    def boxes_of(self, sharer: Any) -> list[Any]:
        """The boxes of a tile that one of the CTAs that share them loads: they take turns, so that all have as many of
        the first ones."""
        return [turn * self.token_sharers + sharer for turn in range(self.boxes // self.token_sharers)]

    def stage_bytes(self, boxes: Any) -> Any:
        """What arrives at a stage of each CTA in all, from itself and others, where the first `boxes` are loaded."""
        others = self.rows + self.columns - self.tokens
        return (others + boxes * self.box_tokens) * STAGE_BYTES_OF_K

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
    def slices(self) -> tuple[int, ...]:
        """Of K, into which `stream_k` may cut a tile: with a piece of D for each, and room for a CTA's share."""
        pieces = self.blocks * self.pieces
        room = self.stages * (self.rows + self.columns) * STAGE_BYTES_OF_K
        each = self.piece_sums * WARPGROUPS * 128 * 4
        most = min(pieces, _MOST_SLICES)
        return tuple(s for s in range(2, most + 1) if -(-pieces // s) * s * each <= room)

    @property
    def least_slice(self) -> int:
        """Stages of K that such a slice has at least."""
        return _LEAST_SLICE

    def slices_of(self, tiles: int, clusters: int, count_k: int) -> tuple[int, int]:
        """Into how many slices of K the tiles of the last wave are cut, and how many these are."""
        rest = tiles % clusters
        if not self.stream_k or rest == 0:
            return 1, rest
        most = min(clusters // rest, count_k // self.least_slice)
        return max((s for s in self.slices if s <= most), default=1), rest

    @property
    def partials_bytes(self) -> int:
        """Of the workspace that `stream_k` needs for sums, for each cluster."""
        return self.cluster * WARPGROUPS * 128 * self.sums * 4

    @property
    def counters_bytes(self) -> int:
        """And of the one for counters, which is left zero."""
        return self.cluster * WARPGROUPS * COUNTER_BYTES

    @property
    def promotion(self) -> int:
        """See `Form.promotion`."""
        return self.form.promotion

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


def _piece_columns(part: int, swap: bool, d: str, share: int, turns: int) -> int:
    """The widest piece that divides a warpgroup's columns of D into multiples of `turns`, or 0; a half or a quarter as
    wide at most if `share` is 2 or 4.

    Pieces are rows of a swizzle atom, 128, 64 or 32 bytes; of D stored transposed, any number of such rows. Where none
    of these divides, rows an odd number of 16 bytes apart meet no bank twice as they are.
    """
    if swap:
        return next((c for c in range(_MOST_PIECE_COLUMNS // share, 0, -8) if part % (c * turns) == 0), 0)
    widest = 128 // DTYPES[d].bytes
    widths = widest, widest // 2, widest // 4, *(_ODD_PIECES if DTYPES[d].bits == 16 else ())
    return next((c for c in widths if c * share <= widest and part % (c * turns) == 0), 0)


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together, or None: what the hardware and this kernel demand.

    What is not worth trying is for `aot.providers.likely_persistent` to say.
    """
    # First what needs no plan, for the time that it takes.
    if form.promotion and (options["stream_k"] or options["schedule"] == "pingpong"):
        return "warpgroups that take turns to promote share every tile, and no tile with other CTAs through memory"
    for rule_of_choice in _RULES_OF_CHOICES.values():
        if reason := rule_of_choice(options):
            return reason
    plan = Plan.of(options, form)
    unit = 16 if form.gated else 8
    whole = 16 if DTYPES[form.d].bits == 8 else unit
    if plan.columns % (whole * plan.parts[1]) and not plan.swap:
        return f"columns must divide into parts of {whole}"
    if plan.columns // plan.parts[1] > 256:
        return "WGMMA's N side has at most 256"
    if (plan.columns // plan.cluster_rows) % unit or (plan.rows // plan.cluster_columns) % 8:
        return "each CTA of a cluster loads as many whole groups of 8 rows, of gates 8 with the 8 that they gate"
    if plan.piece_columns == 0:
        return "the tile does not divide into pieces that TMA can store"
    return _rule_of_form(plan, form) or _rule_of_room(plan)


def limit(form: Form, n: int) -> str | None:
    """Why a form cannot be computed for B of `n` rows, or None."""
    if n > _MOST_ROWS_OF_B:
        return f"places of tiles are exact up to N = {_MOST_ROWS_OF_B}"
    if form.gated and n % 16:
        return "gates and what they gate are loaded 8 rows at a time"
    if form.scaling == "block" and form.gated and "_interleaved" not in form.epilogue and n % (2 * SCALE_BLOCK):
        return "a block of B holds gates and what they gate"
    return None


def hopeless(options: Mapping[str, Any]) -> bool:
    """Whether no form admits these choices, which are the first of `OPTIONS`, whatever the others are."""
    *_, last = options
    rule_of_choice = _RULES_OF_CHOICES.get(last)
    return rule_of_choice is not None and rule_of_choice(options) is not None


def _rule_of_rows(options: Mapping[str, Any]) -> str | None:
    rows = options["tile_n" if options["swap"] else "tile_m"]
    return f"WGMMA's M side has multiples of {WGMMA_ROWS} rows, not {rows}" if rows % WGMMA_ROWS else None


def _rule_of_split(options: Mapping[str, Any]) -> str | None:
    if options["split_k"] > 1 and (
        options["schedule"] == "pingpong" or options["cluster_m"] * options["cluster_n"] > 1
    ):
        return "slices of K belong to both warpgroups of CTAs that share nothing else"
    return None


def _rule_of_sharing(options: Mapping[str, Any]) -> str | None:
    if options["stream_k"] and (options["schedule"] == "pingpong" or options["split_k"] > 1):
        return "a shared tile's sums are both warpgroups', and not shared by a cluster as well"
    return None


def _rule_of_order(options: Mapping[str, Any]) -> str | None:
    if options["stream_k"] and options["order"] == "quads":
        return "quads move tiles among clusters, and slices of shared tiles do not move"
    return None


def _rule_of_overlap(options: Mapping[str, Any]) -> str | None:
    if options["stream_k"] and options["overlap"] != "serial":
        return "a kernel with a workspace may not begin before the one before it, which may use the same"
    return None


# What needs to be known of a combination, by the last choice that it looks at.
_RULES_OF_CHOICES = {
    "tile_n": _rule_of_rows,
    "split_k": _rule_of_split,
    "stream_k": _rule_of_sharing,
    "order": _rule_of_order,
    "overlap": _rule_of_overlap,
}


def _rule_of_form(plan: Plan, form: Form) -> str | None:
    if form.scaling != "none" and DTYPES[form.a].bits != 8:
        return "scales are for 8-bit inputs"
    if plan.swap and (form.gated or DTYPES[form.d].bits == 8 or form.scaling == "block"):
        return "swapped operands have no gated epilogue, 8-bit output or block scaling"
    if form.b_major == "n":
        if plan.swap or form.gated or DTYPES[form.a].bits == 8:
            return "N-major B is for 16-bit types, unswapped and not gated"
        if plan.columns % 64:
            return "N-major B needs columns in whole swizzle atoms of 64"
        if 64 < plan.columns // plan.parts[1] < 128:
            return "a warpgroup's part of N-major B would end within a swizzle atom of 64"
    if form.scaling == "block":
        if plan.blocks > 1:
            return "two sets of partial sums and four blocks' scales leave no registers for more rows"
        if SCALE_BLOCK % plan.columns:
            return "a tile's columns must lie within one block of B"
    return None


def _rule_of_room(plan: Plan) -> str | None:
    most = _MOST_SUMS if plan.form.epilogue == "none" else _MOST_SUMS_FUSED
    if plan.blocks == 3 and plan.sets == 1:
        most = min(most, _MOST_SUMS_PROMOTED_THREE)
    if Epilogue.of(plan.form.epilogue).residual:
        most = _MOST_SUMS_RESIDUAL_SWAPPED if plan.swap else _MOST_SUMS_RESIDUAL
        if plan.blocks == 3 or plan.cluster_rows * plan.cluster_columns > 2:
            most = min(most, _MOST_SUMS_RESIDUAL_BESIDE)
    if plan.split_k > 1 and plan.sums * (1 + plan.sets) > _MOST_SUMS_SPLIT:
        return "adding up others' sums needs registers"
    if plan.registers > most:
        return f"{plan.registers} registers for sums exceed {most}, and the compiler would spill"
    if plan.pushed_bytes > plan.stages * (plan.rows + plan.columns) * STAGE_BYTES_OF_K:
        return "others' sums must fit where stages were"
    if plan.stream_k and not plan.slices:
        return "a tile in one piece is not shared, nor one whose sums do not fit where stages were"
    if plan.stages < _FEWEST_STAGES:
        return f"shared memory holds {plan.stages} stages, fewer than {_FEWEST_STAGES}"
    return None
