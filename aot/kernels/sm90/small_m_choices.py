"""Which forms of `small_m.SmallM` exist, as pure arithmetic: options, rules, shared memory.

Imports no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from runtime.gemm.signature import OVERLAPS, Epilogue
from runtime.numbers.scaling import SCALE_BLOCK

SHARED_BYTES_PER_SM = 228 << 10
SHARED_BYTES_PER_CTA = 227 << 10
RESERVED_BYTES_PER_CTA = 1 << 10  # what CUDA keeps of an SM's shared memory for each CTA
_STATIC_BYTES = 1 << 10  # of a CTA's, what every kernel of the DSL declares
_BARRIER_BYTES = 1 << 10  # room for every mbarrier, and for aligning what comes before them
_MOST_STAGES = 32
_FEWEST_STAGES = 2  # a stage is said to be free when the next one is under way
_PORTABLE_CLUSTER = 8
_ATOM_ROWS = 8
_ATOM_BYTES = 128
_WGMMA_ROWS = 64
_FEW_TOKENS, _FEW_WEIGHTS = 64, 128  # tiles up to which weights take WGMMA's M side, which comes in 64 rows
_WARPGROUP = 128
_REGISTERS_PER_SM, _MOST_REGISTERS = 1 << 16, 255
_OTHER_REGISTERS = 40  # of a multiplying thread, besides its sums
HALF_GROUP = 8  # gates, or ups, of the 16 rows of B that a gated epilogue takes together

OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "tile_m": (8, 16, 32, 64, 96, 128, 192, 256),  # tokens
    # Rows of B. Tiles need not divide N, nor be multiples of WGMMA's 64 rows.
    "tile_n": (48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 144, 176, 224),
    "split_k": (1, 2, 4, 8),  # CTAs of a cluster that share a tile of D
    "cluster_n": (1, 2, 4),  # tiles of D whose CTAs, in one cluster, share the loads of A
    "ctas_per_sm": (1, 2),  # how many fit, by shared memory
    # What may happen before the kernel before this one ends: nothing ("serial"), all but reading ("launch"), or
    # reading B too ("weights"), which is right only where that kernel does not write B.
    "overlap": OVERLAPS,
}


@dataclass(frozen=True)
class Form:
    """What a kernel computes, of all that decides its code: the width of A and B, and words of a signature."""

    element_bytes: int = 2
    scaling: str = "none"
    b_major: str = "k"
    epilogue: str = "none"
    batched: bool = False

    @property
    def gated(self) -> bool:
        """Whether two columns become one."""
        return Epilogue.of(self.epilogue).gated


class Memory(NamedTuple):
    """Shared memory of a CTA: how many stages, and bytes of each part.

    `staging` and, where `apart` is 0, `partial` lie over the stages, which are done with by then; `apart` follows them.
    """

    stages: int
    left: int  # one stage of the operand on WGMMA's M side
    right: int
    staging: int
    partial: int
    apart: int
    block: int  # stages, what lies over them, and `apart`


def swapped(options: Mapping[str, Any]) -> bool:
    """Whether weights take WGMMA's M side, and tokens its N side, and not the other way round."""
    return bool(options["tile_m"] <= _FEW_TOKENS and options["tile_n"] <= _FEW_WEIGHTS)


def sides(options: Mapping[str, Any]) -> tuple[int, int]:
    """Rows of a tile on WGMMA's M and N sides."""
    tile_m, tile_n = options["tile_m"], options["tile_n"]
    return (tile_n, tile_m) if swapped(options) else (tile_m, tile_n)


def warpgroups(options: Mapping[str, Any]) -> int:
    """How many multiply: one for each 64 rows of WGMMA's M side, up to three."""
    blocks = math.ceil(sides(options)[0] / _WGMMA_ROWS)
    return blocks if blocks < 4 else 2


def sums_pitch(options: Mapping[str, Any]) -> int:
    """F32 elements from one token's sums to the next in shared memory, so that a warp's stores meet different banks.

    Swapped, a warp stores eight rows of four tokens at a time; else pairs of columns of four tokens.
    """
    tile_n: int = options["tile_n"]
    return tile_n + 4 if swapped(options) else tile_n + 8 * (tile_n % 16 == 0)


def tile_k(options: Mapping[str, Any], form: Form) -> int:
    """Columns of a stage: rows of 256 bytes for few tokens, of 128 for many, which leaves more stages."""
    if form.scaling == "block":
        return SCALE_BLOCK
    few = options["tile_m"] <= _FEW_TOKENS
    return (2 if few else 1) * _ATOM_BYTES // form.element_bytes


def piece(options: Mapping[str, Any]) -> int:
    """Rows of A in one load. Rows past M take longer to load than others, so pieces wholly past it are left out."""
    return 16 if options["tile_m"] // options["cluster_n"] % 16 == 0 else _ATOM_ROWS


def row_of_b(tile_n: int, form: Form, tile: Any, position: Any, extent_n: Any) -> Any:
    """Which row of B is at `position` in a tile of D; numbers may be the compiler's. Where there is none, no such row
    or one that is not looked at."""
    if not form.gated:
        return tile * tile_n + position
    group, half, column = position // (2 * HALF_GROUP), position // HALF_GROUP % 2, position % HALF_GROUP
    pair = (tile * (tile_n // (2 * HALF_GROUP)) + group) * HALF_GROUP + column
    return 2 * pair + half if Epilogue.of(form.epilogue).interleaved else pair + half * (extent_n // 2)


def memory(options: Mapping[str, Any], form: Form) -> Memory:
    """What fits the shared memory of a CTA, if `ctas_per_sm` of them share an SM."""
    tile_m, split_k, ctas = (options[o] for o in ("tile_m", "split_k", "ctas_per_sm"))
    left, right = (rows * tile_k(options, form) * form.element_bytes for rows in sides(options))
    pitch_bytes = sums_pitch(options) * 4
    staging = tile_m * pitch_bytes
    partial = (split_k - 1) * (tile_m // split_k) * pitch_bytes
    apart = partial if swapped(options) else 0
    free = min(SHARED_BYTES_PER_CTA, SHARED_BYTES_PER_SM // ctas - RESERVED_BYTES_PER_CTA)
    free -= _STATIC_BYTES + _BARRIER_BYTES + terms(options, form) * 4 + apart
    scales = tile_m * 4 if form.scaling == "block" else 0
    stages = min(_MOST_STAGES, free // (left + right + scales))
    over = staging + partial - apart
    return Memory(
        stages if over <= free else 0, left, right, staging, partial, apart, max(stages * (left + right), over) + apart
    )


def terms(options: Mapping[str, Any], form: Form) -> int:
    """F32 elements of what a tile's epilogue keeps: scales of its tokens and rows of B, and bias."""
    scales = options["tile_m"] + options["tile_n"] if form.scaling == "row_column" else 0
    bias = options["tile_n"] if Epilogue.of(form.epilogue).bias else 0
    return int(scales + bias)


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together in a kernel of this form, or None: what the hardware and
    this kernel demand.

    What is not worth trying is for `aot.providers.likely_small_m` to say.
    """
    return _rule_of_shape(options) or _rule_of_form(options, form) or _rule_of_resources(options, form)


def _rule_of_shape(options: Mapping[str, Any]) -> str | None:
    tile_m, split_k, cluster_n = (options[o] for o in ("tile_m", "split_k", "cluster_n"))
    if split_k * cluster_n > _PORTABLE_CLUSTER:
        return f"a cluster of {split_k * cluster_n} CTAs exceeds {_PORTABLE_CLUSTER}"
    if tile_m % (cluster_n * _ATOM_ROWS):
        return f"each of cluster_n CTAs loads as many whole groups of {_ATOM_ROWS} tokens, and tile_m has no such share"
    if tile_m % split_k:
        return "each of split_k CTAs adds up as many tokens, and tile_m has no such share"
    return None


def _rule_of_form(options: Mapping[str, Any], form: Form) -> str | None:
    if form.scaling != "none" and form.element_bytes != 1:
        return "scales are for 8-bit inputs"
    if form.gated and form.b_major != "k":
        return "a gated epilogue takes rows of B eight by eight, which TMA cannot where N is contiguous"
    if form.gated and options["tile_n"] % (2 * HALF_GROUP):
        return f"a gated epilogue needs tile_n in multiples of {2 * HALF_GROUP}"
    if form.b_major != "k" and (form.element_bytes != 2 or options["tile_n"] % _WGMMA_ROWS):
        return f"N-major B needs 16-bit elements, and tile_n in multiples of {_WGMMA_ROWS}"
    if form.scaling == "block" and not swapped(options):
        return f"scales of blocks need a tile of at most {_FEW_TOKENS} x {_FEW_WEIGHTS}"
    return None


def _rule_of_resources(options: Mapping[str, Any], form: Form) -> str | None:
    found = memory(options, form)
    if found.stages < _FEWEST_STAGES:
        return f"shared memory holds {found.stages} stages, fewer than {_FEWEST_STAGES}"
    left, right = sides(options)
    if -left % _WGMMA_ROWS * _ATOM_BYTES > found.stages * found.right:
        return "WGMMA would read past the stages"
    threads = warpgroups(options) * _WARPGROUP
    sums = math.ceil(left / _WGMMA_ROWS) * _WGMMA_ROWS * right // threads * (2 if form.element_bytes == 1 else 1)
    registers = min(_MOST_REGISTERS, _REGISTERS_PER_SM // (threads + _WARPGROUP) // 8 * 8)
    if sums + _OTHER_REGISTERS > registers:
        return f"{sums} sums of a thread leave fewer than {_OTHER_REGISTERS} of {registers} registers"
    return None
