"""How A and B of a product are scaled: what shares a scale, of which type it is, and how scales lie in memory.

An axis is a word: "batch", "M", "N", "K", "P" (columns of D where those are not N); "K/128", the number of blocks of
128 along K, the last perhaps short; "512*K/128", 512 times as many; or a number that an extent is. Knows nothing of
signatures or kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..named_tuple import NamedTuple
from .weights import columns_of_word

PLAIN = "plain"
# Blackwell's (the 1D block scaling factors layout of cuBLAS, Swizzle32x4x4 of CUTLASS): tiles of 128 rows by 4 blocks
# along K, whole tiles only, each of 512 neighbours in memory; tiles of the same rows follow each other along K, and the
# next rows' tiles these: a matrix (tiles of rows, scales of a row of tiles) without a gap.
TILES = "128x4"
TILE_ROWS, TILE_BLOCKS = 128, 4
TILE_SCALES = TILE_ROWS * TILE_BLOCKS
COLUMNS = "columns"  # scales of B's rows side by side, one block along K after the other: (blocks, N) without a gap
FRAGMENTS = "fragments"  # as a warp's registers take 4-bit weights and their scales: `runtime.numbers.weights`

_CONVERTED = ("i8",)  # types of B that become A's type as they are, without scales


class Scaling(NamedTuple):
    """What multiplies the products of A (M, K) and B (N, K).

    A scale of A is for `rows_a` rows by `k` elements of K, one of B for `rows_b` rows by as many; None means all of
    them. Where `k` is a number, scales differ along K, so they multiply while sums are made, and else afterwards.
    Where `of_b` says of which types B is, A is of another, `of`, and has no scales.

    `tensor_scale`: scales are themselves scaled by one f32 factor for the whole product, that of A times that of B.
    `zeros`: what a scale multiplies is a number of B less a zero point.
    `quantises`: kernels quantise A to B's type, with a scale for each row and `SCALE_BLOCK` elements of K, the largest
    magnitude of which becomes the type's largest number.
    """

    word: str
    of: tuple[str, ...] = ()  # the element types of A and B that it is for; empty for all that are the same
    dtype: str = ""  # of scales; "" where there are none
    rows_a: int | None = None
    rows_b: int | None = None
    k: int | None = None
    layout: str = PLAIN
    tensor_scale: bool = False
    of_b: tuple[str, ...] = ()
    zeros: bool = False  # in the memory of scales each is followed by a zero point
    quantises: bool = False

    def fits(self, a: str, b: str) -> bool:
        """Whether A and B of these element types may be scaled so."""
        same = (a, *(() if self.dtype else _CONVERTED))
        return b in (self.of_b or same) and (not self.of or a in self.of)

    @property
    def operands(self) -> str:
        """Which operands have scales: "ab", "b" or ""."""
        return "" if not self.dtype else "b" if self.of_b else "ab"

    def axes(self, of: str) -> tuple[str, ...]:
        """The axes of scale_a ("a") or scale_b ("b"), which there must be: rows, then blocks along K; or those of
        tiles or fragments."""
        rows, axis = (self.rows_a, "M") if of == "a" else (self.rows_b, "N")
        if self.layout == TILES:
            assert rows is not None
            assert self.k is not None
            return blocks(axis, rows * TILE_ROWS), f"{TILE_SCALES}*{blocks('K', self.k * TILE_BLOCKS)}"
        if self.layout in (FRAGMENTS, COLUMNS):
            assert self.k is not None
            columns = self.k if self.layout == COLUMNS else columns_of_word(self.k, self.zeros)
            return blocks("K", columns), "N" if columns <= self.k else f"{columns // self.k}*N"
        pairs = ((axis, rows), ("K", self.k))
        return tuple([blocks(name, size) for name, size in pairs if size is not None]) or ("1",)

    @property
    def fine(self) -> bool:
        """Whether there is more than one scale for a tensor, so that results are to be exact."""
        return (self.rows_a, self.rows_b, self.k) != (None, None, None)


SCALE_BLOCK = 128  # elements of K, and rows of B, that share one scale where scaling is "block"

SCALINGS: dict[str, Scaling] = {
    s.word: s
    for s in (
        Scaling("none"),
        Scaling("tensor", ("e4m3",), "f32"),
        Scaling("row_column", ("e4m3",), "f32", rows_a=1, rows_b=1),
        Scaling("block", ("e4m3",), "f32", rows_a=1, rows_b=SCALE_BLOCK, k=SCALE_BLOCK),
        # OCP Microscaling Formats (MX) 1.0.
        Scaling("mxfp8", ("e4m3",), "ue8m0", rows_a=1, rows_b=1, k=32, layout=TILES),
        Scaling("mxfp4", ("e2m1",), "ue8m0", rows_a=1, rows_b=1, k=32, layout=TILES),
        Scaling("nvfp4", ("e2m1",), "ue4m3", rows_a=1, rows_b=1, k=16, layout=TILES, tensor_scale=True),
        # Of weights alone in e4m3, whose A is quantised as "block" has it while it is loaded.
        Scaling(
            *("block_weight", ("bf16",), "f32"),
            rows_b=SCALE_BLOCK,
            k=SCALE_BLOCK,
            of_b=("e4m3",),
            quantises=True,
        ),
        Scaling("column_weight", ("bf16",), "f32", rows_b=1, of_b=("e4m3",), quantises=True),
        # Of weights alone, prepared by `runtime.torch.weights`.
        Scaling("mxfp4_weight", ("bf16",), "ue8m0", rows_b=1, k=32, layout=FRAGMENTS, of_b=("e2m1",)),
        Scaling("int4_weight", ("bf16",), "bf16", rows_b=1, k=128, layout=FRAGMENTS, of_b=("u4",)),
        # The same with a zero point for each 1 x 128, as AWQ has.
        Scaling("int4_zero_weight", ("bf16",), "bf16", rows_b=1, k=128, layout=FRAGMENTS, of_b=("u4",), zeros=True),
        # Symmetric int4 in rows, of signed int4, as `runtime.torch.weights.int4_rows` makes them.
        Scaling("int4_group128", ("bf16",), "bf16", rows_b=1, k=128, layout=COLUMNS, of_b=("i4",)),
    )
}


# By the scaling of a product of quantised A that of a kernel that quantises A itself; scales of B are the same.
QUANTISING = {"block": "block_weight", "row_column": "column_weight"}


def blocks(axis: str, size: int) -> str:
    """The axis that counts blocks of `size` along `axis`."""
    return axis if size == 1 else f"{axis}/{size}"


def extent_of(axis: str, known: Mapping[str, int]) -> int:
    """How long an axis is, by the extents of axes that are no blocks.

    Raises:
        KeyError: it is, or has blocks of, none of them.
    """
    if axis.isdigit():
        return int(axis)
    times, _, axis = axis.rpartition("*")
    if times:
        return int(times) * extent_of(axis, known)
    whole, _, size = axis.partition("/")
    return -(-known[whole] // int(size)) if size else known[axis]


def symbol_of(axis: str) -> str | int:
    """What argument trees call the extent of an axis: l, m, n, k, p; mb, nb and kb for blocks; kt for tiles; a
    number."""
    if axis.isdigit():
        return int(axis)
    if axis == "batch":
        return "l"
    times, _, axis = axis.rpartition("*")
    whole, _, size = axis.partition("/")
    return whole.lower() + ("t" if times else "b" if size else "")
