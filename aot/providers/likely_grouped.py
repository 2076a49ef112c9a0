"""Which grouped GEMMs of our own are worth compiling: an opinion, from how the persistent GEMM behaves.

Nothing here decides the code of a kernel, so a change compiles nothing anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernels.sm90.persistent.form import Form
from ..kernels.sm90.sizes import WGMMA_ROWS

# What is worth trying of each choice.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "tile_m": (8, 16, 32, 48, 64, 96, 128, 144, 192, 256),
    "tile_n": (64, 88, 96, 112, 128, 160, 176, 192, 256),
    "cluster_n": (1, 2),
    "share_b": (False, True),
}
# Of ragged tiles (`Plan.ragged`), by whether there is a gate: rows of B that make so many tiles as there are SMs, where
# those of 128 and 256 rows would leave some idle. No GPU has run them, so builds make none (`RAGGED`), and estimates
# leave out what tells them from whole tiles.
RAGGED_TO_TIME = {False: (88, 96, 112), True: (96, 176, 192)}
RAGGED: dict[bool, tuple[int, ...]] = {False: (), True: ()}
_RAGGED_TOKENS = 8  # with more in each group tiles are so many that SMs are busy anyway


def unlikely(options: Mapping[str, Any], form: Form) -> str | None:
    """Why choices that are legal, each among `OPTIONS`, are not worth compiling together, or None."""
    few = options["tile_m"] <= 64
    between = options["tile_m"] % WGMMA_ROWS > 0  # a tile that only swapped operands have
    swaps = (few or between) and form.scaling != "block"
    if options["swap"] != swaps and not (few and form.gated):  # whose N swaps may not take
        return "tokens take WGMMA's N side where they are few, and its M side where they are many"
    ragged = options["swap"] and options["tile_n"] in RAGGED[form.gated]
    if ragged and (options["tile_m"] > _RAGGED_TOKENS or options.get("cluster_n", 1) > 1):
        return "tiles are made of fewer rows of B to be as many as SMs, one by one, where they are few"
    if options["tile_n"] in (88, 112, 176) and not ragged:
        return "other rows of B than 64 or 32 divides are for the fewest tokens"
    # Of gates a warp group needs two atoms of weights, which up to 128 rows are for one warp group alone.
    alone = form.gated and options["swap"] and options["tile_n"] <= 128
    if few and (options["schedule"] == "pingpong") != alone:
        return "tiles of few tokens wait for weights, and not for each other's epilogue"
    blocks = form.scaling == "block"
    if few and not ragged and options["tile_n"] not in ((96, 128, 192, 256) if blocks else (128, 256)):
        return "weights of few tokens are loaded by 128 rows or 256, and with scales of blocks by 96 or 192 too"
    if form.gated and options["tile_n"] == 96 and not ragged:
        return "half of 96 rows, as a gate has, fill no atom of WGMMA evenly"
    if not blocks and options["tile_n"] == 160:
        return "tiles of 160 columns are for scales of blocks"
    if few and options.get("share_b"):
        return "few tokens have no second tile that would share rows of B"
    if not few and options["tile_n"] < 128:
        return "tiles of many tokens are wide"
    return None
