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
    "tile_n": (64, 96, 128, 160, 192, 256),
    "cluster_n": (1, 2),
    "share_b": (False, True),
}


def unlikely(options: Mapping[str, Any], form: Form) -> str | None:
    """Why choices that are legal, each among `OPTIONS`, are not worth compiling together, or None."""
    few = options["tile_m"] <= 64
    between = options["tile_m"] % WGMMA_ROWS > 0  # a tile that only swapped operands have
    swaps = (few or between) and form.scaling != "block"
    if options["swap"] != swaps and not (few and form.gated):  # whose N swaps may not take
        return "tokens take WGMMA's N side where they are few, and its M side where they are many"
    # Of gates a warp group needs two atoms of weights, which 128 rows are for one warp group alone.
    alone = form.gated and options["swap"] and options["tile_n"] == 128
    if few and (options["schedule"] == "pingpong") != alone:
        return "tiles of few tokens wait for weights, and not for each other's epilogue"
    blocks = form.scaling == "block"
    if few and options["tile_n"] not in ((96, 128, 192, 256) if blocks else (128, 256)):
        return "weights of few tokens are loaded by 128 rows or 256, and with scales of blocks by 96 or 192 too"
    if form.gated and options["tile_n"] == 96:
        return "half of 96 rows, as a gate has, fill no atom of WGMMA evenly"
    if not blocks and options["tile_n"] == 160:
        return "tiles of 160 columns are for scales of blocks"
    if few and options.get("share_b"):
        return "few tokens have no second tile that would share rows of B"
    if not few and options["tile_n"] < 128:
        return "tiles of many tokens are wide"
    return None
