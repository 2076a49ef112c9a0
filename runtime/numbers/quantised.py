"""Rows of A in 8 bits whose scales are made of them: their type, what may share a scale, and how many scales there are.

A scale is the largest magnitude that it is for, at least `LEAST_AMAX`, over the largest number of the type.
"""

from __future__ import annotations

from .scaling import SCALINGS, extent_of

NARROW = "e4m3"  # the type of rows where nobody says another
SCALINGS_OF_ROWS = ("block", "row_column")  # what shares a scale: 128 elements of a row, or the row
# Of rows of a group on average, up to which a grouped GEMM quantises what it makes. Its tiles have 64 rows: with 128 of
# Qwen3's and DeepSeek-V3's experts on an H200 it takes 0.91 to 0.97 of the time of larger tiles and a launch that
# quantises; more were not timed.
MOST_ROWS_OF_A_GROUP = 128
# And its tiles, on average, from which it is faster than one of smaller tiles and a launch that quantises: with 30 and
# 84 for DeepSeek-V3's experts on H200s it takes 1.12 to 1.25 times as long as these, with 47 for Qwen3's 0.95 to 1.05,
# and with 126 and more 0.92 to 0.99.
LEAST_TILES_OF_QUANTISING = 96
LEAST_AMAX = 1e-10  # so that what is all zeros has a scale


def scale_axes(scaling: str, along: str = "K") -> tuple[str, ...]:
    """The axes of the scales of A (M, K), as a GEMM with this scaling reads them; or of rows `along` another axis."""
    return tuple(axis.replace("K", along) for axis in SCALINGS[scaling].axes("a"))


def scale_shape(scaling: str, rows: int, k: int) -> tuple[int, ...]:
    """The shape of the scales of so many rows."""
    return tuple(extent_of(axis, {"M": rows, "K": k}) for axis in scale_axes(scaling))
