"""Where a scale is in the tiles that Blackwell's tensor cores read, said once more, for tests."""

from __future__ import annotations


def tile_offset(row: int, block: int) -> int:
    """Where in its tile of `TILES` the scale of a row, 0 to 127, and a block along K, 0 to 3, is."""
    return row % 32 * 16 + row // 32 * 4 + block
