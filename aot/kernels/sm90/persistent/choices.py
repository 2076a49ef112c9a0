"""Which choices a persistent GEMM has, and which go together for a form, as pure arithmetic.

Knows nothing of how a kernel is made (`plan` says what choices come to), and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import Epilogue
from runtime.numbers.scaling import SCALE_BLOCK

from ..sizes import CLUSTER_EXTENTS, PORTABLE_CLUSTER, SWIZZLE_ATOM_ROWS, TILE_EXTENTS, WGMMA_ROWS
from .form import Form
from .plan import STAGE_BYTES_OF_K, Plan, gates_in_turn

_FEWEST_STAGES = 2  # one is released when the products of the next are under way
_FEWEST_GATHERED = 3  # one more is on its way when a gathering warp hands one over
_N_MAJOR_ATOMS_OF_K = 8  # in a stage, of 64 columns of 16 bits, by which TMA shares it out
_MOST_ROWS_OF_B = 1 << 27  # in tiles of 64: see `scheduler`, whose quotients are exact up to 2^21
# What a thread has for accumulators, of the 232 registers that it is given: the rest holds addresses, coordinates and
# counters. Above these the compiler spills.
_MOST_ACCUMULATORS, _MOST_FUSED, _MOST_RESIDUAL, _MOST_RESIDUAL_SWAPPED = 200, 144, 144, 96
# Of swapped gates, whose two atoms an epilogue tile takes half as wide as others: of a tile after the other in clusters
# of one CTA or two, without erf; and of a CTA for each tile, with it.
_MOST_SWAPPED_GATES, _MOST_SWAPPED_ERF_ONE_TILE = 184, 112
_MOST_SPLIT = 120  # twice those that are promoted, whatever their partial ones are
_MOST_STAGED_SCALES = 8  # of the 40 registers of a thread that loads them
_MOST_BLOCKS, _MOST_SUB_BLOCKS = 2, 5  # of B, that columns of a tile lie in: consumers choose between two scales
_MOST_PROMOTED_THREE = 176  # of tiles of three atoms of rows
_MOST_RESIDUAL_BESIDE = 120  # of such tiles, and of clusters of four, and of gates where scales are staged
_MOST_GELU_STAGED = 120  # of gelu alone where scales are staged
_MOST_RESIDUAL_ONE_TILE = 64  # of tiles with a CTA each, whose epilogue tiles are not stored one after the other
_MOST_RAGGED_TOKENS = 64  # threads store ragged tiles piece by piece, and beside 200 accumulators the compiler spills
_MOST_FUSED_IN_TURN = 112  # of tiles that CTAs load in turn, and of gelu on three atoms of rows of both warp groups

# What the kernel can be asked for. What is worth asking for is in `aot.providers.likely_persistent`.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "schedule": ("cooperative", "pingpong"),
    "swap": (False, True),  # rows of B on WGMMA's M side, whose extent is a multiple of 64, and tokens on its N side
    "tile_m": TILE_EXTENTS,
    "tile_n": TILE_EXTENTS,
    "cluster_m": CLUSTER_EXTENTS,
    "cluster_n": CLUSTER_EXTENTS,
    # CTAs of a cluster that take slices of K of the same tile, each of which then reduces some epilogue tiles of D.
    "split_k": CLUSTER_EXTENTS,
    # Tiles of the last wave, where they are too few for all SMs, are cut along K and shared by these.
    "stream_k": (False, True),
    # A CTA for each tile, not as many as fit. Its epilogue tiles go where its stages were, all at once, and leave their
    # shared memory to more stages.
    "nonpersistent": (False, True),
    # The raster order of tiles: down 2048 rows, down two clusters' rows, or along eight clusters' columns. What L2
    # serves at a time depends on it, and on which SMs ask together. "quads" gives clusters of one GPC, four by four,
    # tiles that read the same of the operand that clusters do not multicast.
    "order": ("rows", "two_rows", "columns", "quads"),
    # What may happen before the kernel before this one ends: nothing, or all but reading and writing ("launch").
    # Loading B too was tried, and gains nothing (docs/kernels/sm90_persistent.md).
    "overlap": ("serial", "launch"),
}


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together, or None: what the hardware and this kernel demand.

    What is not worth trying is for `aot.providers.likely_persistent` to say.
    """
    # First what needs no plan, for the time that it takes.
    if form.promotion_interval and (options["stream_k"] or options["schedule"] == "pingpong"):
        return "warp groups that take turns to promote share every tile, and no tile with other CTAs through memory"
    for rule_of_choice in _RULES_OF_CHOICES.values():
        if form.grouped and options["swap"] and rule_of_choice is _rule_of_rows:
            continue  # `_rule_of_ragged` looks at the plan
        if reason := rule_of_choice(options):
            return reason
    plan = Plan.of(options, form)
    unit = 16 if form.gated and not plan.swap else 8
    whole = 16 if DTYPES[form.d].bits == 8 else unit
    if plan.columns % (whole * plan.atom_layout.columns):
        return f"columns must divide into parts of {whole}"
    if plan.columns // plan.atom_layout.columns > 256:
        return "WGMMA's N side has at most 256"
    if plan.epilogue_tile_columns == 0:
        return (
            "a warp group's columns do not divide into epilogue tiles, as many for each slice of K, that TMA can store"
        )
    return _rule_of_ragged(plan) or _rule_of_form(plan, form) or _rule_of_room(plan)


def limit(options: Mapping[str, Any], form: Form, n: int) -> str | None:
    """Why these choices cannot compute a form for B of `n` rows, or None."""
    if n > _MOST_ROWS_OF_B:
        return f"coordinates of tiles are exact up to N = {_MOST_ROWS_OF_B}"
    each = gates_in_turn(options["swap"], options["tile_n"])
    if form.gated and n % (2 * each):
        return f"gates and what they gate are loaded {each} rows at a time"
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


def _rule_of_cluster(options: Mapping[str, Any]) -> str | None:
    ctas = options["cluster_m"] * options["cluster_n"]
    return f"a cluster of {ctas} CTAs exceeds {PORTABLE_CLUSTER}" if ctas > PORTABLE_CLUSTER else None


def _rule_of_split(options: Mapping[str, Any]) -> str | None:
    if options["split_k"] > 1 and options["schedule"] == "pingpong":
        return "slices of K belong to both warp groups"
    ctas = options["cluster_m"] * options["cluster_n"] * options["split_k"]
    return f"a cluster of {ctas} CTAs exceeds {PORTABLE_CLUSTER}" if ctas > PORTABLE_CLUSTER else None


def _rule_of_sharing(options: Mapping[str, Any]) -> str | None:
    if options["stream_k"] and (options["schedule"] == "pingpong" or options["split_k"] > 1):
        return "a shared tile's accumulators are both warp groups', and not shared by a cluster as well"
    return None


def _rule_of_grid(options: Mapping[str, Any]) -> str | None:
    if options["stream_k"] and options["nonpersistent"]:
        return "tiles of a last wave are known where waves are, and shared by CTAs that are all resident"
    if options["split_k"] > 1 and options["cluster_m"] * options["cluster_n"] > 1 and not options["nonpersistent"]:
        return "a next tile's stages may come from another CTA while partial sums are in their place"
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
    "cluster_n": _rule_of_cluster,
    "split_k": _rule_of_split,
    "stream_k": _rule_of_sharing,
    "nonpersistent": _rule_of_grid,
    "order": _rule_of_order,
    "overlap": _rule_of_overlap,
}


def _rule_of_ragged(plan: Plan) -> str | None:
    if not plan.ragged:
        return None
    if not plan.form.grouped:
        return "tiles of fewer rows than WGMMA multiplies are of grouped GEMMs"
    if plan.tokens > _MOST_RAGGED_TOKENS:
        return f"tiles of fewer rows than WGMMA multiplies have at most {_MOST_RAGGED_TOKENS} tokens"
    if plan.out_rows % SWIZZLE_ATOM_ROWS or plan.loaded_rows % plan.out_rows:
        return f"rows of a tile, and gates of them, are whole swizzle atoms of {SWIZZLE_ATOM_ROWS}"
    if plan.rows_past_stage >= WGMMA_ROWS:
        return "an atom of WGMMA would have no row of the tile"
    if plan.rows_past_stage > plan.stages * plan.columns:
        return "WGMMA would read past the stages"
    return None


def _rule_of_form(plan: Plan, form: Form) -> str | None:
    if form.scaling != "none" and DTYPES[form.a].bits != 8:
        return "scales are for 8-bit inputs"
    if plan.swap and (DTYPES[form.d].bits == 8 or form.scaling == "block"):
        return "swapped operands have no 8-bit output or block scaling"
    if plan.pairs_atoms and plan.m_atoms % 2:
        return "a warp group has as many atoms of gates as of what they gate"
    if plan.pairs_atoms and (plan.split_k > 1 or plan.stream_k):
        return "slices of K exchange accumulators that follow each other, which an atom of gates and its partner do not"
    if form.b_major == "n":
        if plan.swap or form.gated or DTYPES[form.a].bits == 8:
            return "N-major B is for 16-bit types, unswapped and not gated"
        if plan.columns % 64:
            return "N-major B needs columns in whole swizzle atoms of 64"
        if _N_MAJOR_ATOMS_OF_K % plan.cluster_rows:
            return f"each CTA of a cluster loads as many of {_N_MAJOR_ATOMS_OF_K} swizzle atoms along K of N-major B"
        if 64 < plan.columns // plan.atom_layout.columns < 128:
            return "a warp group's part of N-major B would end within a swizzle atom of 64"
    return _rule_of_blocks(plan) if form.scaling == "block" else None


def _rule_of_blocks(plan: Plan) -> str | None:
    blocks = plan.scale_blocks
    if blocks.blocks > _MOST_BLOCKS:
        return f"the columns of a warp group's part of a tile must lie within {_MOST_BLOCKS} blocks of B"
    if blocks.sub_blocks > _MOST_SUB_BLOCKS:
        return f"of {blocks.sub_blocks} sub-blocks each would choose among scales"
    return None


def _rule_of_room(plan: Plan) -> str | None:
    most = _MOST_ACCUMULATORS if plan.form.epilogue == "none" else _MOST_FUSED
    if plan.pairs_atoms and not plan.form.grouped:
        by_erf = Epilogue.of(plan.form.epilogue).activation == "geglu"
        if not (by_erf or plan.nonpersistent or plan.cluster > 2):
            most = _MOST_SWAPPED_GATES
        elif by_erf and plan.nonpersistent:
            most = _MOST_SWAPPED_ERF_ONE_TILE
    if plan.m_atoms == 3 and plan.promotion_interval:
        most = min(most, _MOST_PROMOTED_THREE)
    if Epilogue.of(plan.form.epilogue).residual:
        most = _MOST_RESIDUAL_SWAPPED if plan.swap else _MOST_RESIDUAL
        gates_beside_scales = plan.staged_scales > 0 and plan.form.gated
        if plan.m_atoms == 3 or plan.cluster_rows * plan.cluster_columns > 2 or gates_beside_scales:
            most = min(most, _MOST_RESIDUAL_BESIDE)
        if plan.nonpersistent:
            most = min(most, _MOST_RESIDUAL_ONE_TILE)
    gelu_on_three = plan.form.epilogue == "gelu" and plan.m_atoms == 3 and not plan.pingpong and not plan.form.grouped
    if gelu_on_three or (plan.form.epilogue != "none" and any(plan.loads_in_turn)):
        most = min(most, _MOST_FUSED_IN_TURN)
    if plan.staged_scales and plan.form.epilogue == "gelu":
        most = min(most, _MOST_GELU_STAGED)
    if plan.split_k > 1 and plan.accumulators * (2 if plan.promotion_interval else 1) > _MOST_SPLIT:
        return "adding up others' partial sums needs registers"
    if plan.accumulators + plan.partial_accumulators > _MOST_ACCUMULATORS:
        return "the mainloop needs partial accumulators beside a tile's"
    if plan.accumulator_registers > most:
        return f"{plan.accumulator_registers} registers for accumulators exceed {most}, and the compiler would spill"
    if plan.staged_scales > _MOST_STAGED_SCALES:
        return "the warps that load scales have registers for fewer"
    if plan.pushed_bytes > plan.stages * (plan.rows + plan.columns) * STAGE_BYTES_OF_K:
        return "others' partial sums must fit where stages were"
    if plan.nonpersistent and plan.output_offset + plan.output_bytes > plan.stages * sum(plan.operand_bytes):
        return "epilogue tiles must fit where stages were, behind others' partial sums"
    if plan.stream_k and not plan.slices:
        return "a tile of one epilogue tile is not shared, nor one whose partial sums do not fit where stages were"
    fewest = _FEWEST_GATHERED if plan.form.gathered else _FEWEST_STAGES
    if plan.stages < fewest:
        return f"shared memory holds {plan.stages} stages, fewer than {fewest}"
    return None
