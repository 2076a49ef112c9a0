"""How prepared 4-bit weights lie in memory: what `runtime.torch.weights` writes and kernels read.

B (N, K) is cut into blocks of `BLOCK_ROWS` rows by `BLOCK_COLUMNS` columns of K, those of the same columns one after
another. A block is four words of 32 bits for each of 32 lanes, which are the lanes of a warp that multiplies it as
operand A of WGMMA: lane `l` has rows `l / 4` and `l / 4 + 8`, and of each 16 columns (a word) those numbered
`2 * (l % 4)` and the next, and these plus 8. The pairs of a word, of neighbours along K, are numbered: row, row + 8,
and the same 8 columns on. Pair `j` has its first element in the word's low half and the second in its high half, where
`SIGN_BITS[j]`, `MAGNITUDE_BITS[j]` (e2m1) or bit `4 * j` (u4: int4 plus 8, or plus its zero point) say.

The words of scales of a block of columns are for rows `r` and `r + 8` of each 16, `r` from 0 to 7: of mxfp4 a byte
each for the first 32 of 64 columns, then for the others; of int4 a bf16 each for 128 columns. They are scales times a
power of two (`WeightFormat`). With zero points these words are of 64 columns: first, for 128 columns, those of scales,
and then those of zero points, which are a bf16 each, less than 0: the zero point in units of the smallest bf16.

Pure arithmetic; knows no framework (tensors are torch's, by their methods alone) and no kernel.
"""

from __future__ import annotations

from typing import Any

from ..named_tuple import NamedTuple

BLOCK_ROWS, BLOCK_COLUMNS = 16, 64
LANES, WORDS, PAIRS = 32, 4, 4  # of a block, of a lane, of a word
HIGH_HALF = 16  # the bit where the second element of a pair begins
# Where pairs of e2m1 have their bits: each takes few instructions to bring to where bf16 has them (`e2m1_pairs`).
SIGN_BITS, MAGNITUDE_BITS = (15, 12, 14, 13), (6, 3, 0, 9)
MINUS_0 = -0x8000  # the bits of a bf16 as int16; a zero point is added to them
INT4_ZERO = 8  # what is added to symmetric int4, so that it is not negative

_SIGNS, _MAGNITUDES = 0x80008000, 0x01C001C0  # of two bf16: sign; the low two bits of the exponent, and the high one
_NIBBLES = 0x000F000F
_HALVES, _ROWS_OF_LANES, _LANES_OF_ROW = 2, 8, 4  # of 16 rows or columns; rows of a half; lanes that have a row


class WeightFormat(NamedTuple):
    """A scaling of weights alone (`runtime.numbers.scaling`), `group` neighbours along K to a scale.

    Kernels have a scale times 2^`scale_exponent` in memory, so that a code as bf16, which is subnormal, times its scale
    is normal; and sums times 2^`exponent` are those of weights. The largest scale there is, is below `limit`.
    """

    word: str
    codes: str  # the element type of codes
    group: int
    code_exponent: int  # a code as bf16 is its number times 2^-this
    scale_exponent: int
    limit: float
    zeros: bool = False

    @property
    def exponent(self) -> int:
        """By which power of two registers have weights too small."""
        return self.code_exponent - self.scale_exponent

    @property
    def columns(self) -> int:
        """Columns of K that 4 bytes are for, of a row and of the row 8 below it, in the memory of scales."""
        return columns_of_word(self.group, self.zeros)

    @property
    def multiple(self) -> int:
        """Columns of K come in multiples of this."""
        return max(self.group, self.columns)


def columns_of_word(group: int, zeros: bool) -> int:
    """Columns of K that 4 bytes are for in the memory of scales, each scale of which is for `group`."""
    return BLOCK_COLUMNS if zeros else max(group, BLOCK_COLUMNS)


FORMATS: dict[str, WeightFormat] = {
    f.word: f
    for f in (
        WeightFormat("mxfp4_weight", "e2m1", 32, 126, 104, 2.0 ** (128 - 104)),
        WeightFormat("int4_weight", "u4", 128, 133, 115, 2.0 ** (127 - 115)),
        WeightFormat("int4_zero_weight", "u4", 128, 133, 115, 2.0 ** (127 - 115), zeros=True),
    )
}


def e2m1_pairs(word: Any) -> tuple[Any, ...]:
    """The four pairs of a word as two bf16 each: the numbers times 2^-126. The word has no sign, and its bits above 32
    are not looked at."""
    both = _SIGNS | _MAGNITUDES
    first = word & both
    second = (word << 3) & both
    third = ((word & 0x40074007) * 66) & both  # by 6 bits, and by 1
    fourth = ((word << 2) & _SIGNS) | ((word >> 3) & _MAGNITUDES)
    return first, second, third, fourth


def int4_pairs(word: Any) -> tuple[Any, ...]:
    """The four pairs of a word as two bf16 each: the codes times 2^-133."""
    return tuple((word >> (4 * j)) & _NIBBLES for j in range(PAIRS))


def arrange_codes(codes: Any, form: WeightFormat) -> Any:
    """Codes (N, K), integers from 0 to 15 (e2m1's bits, or u4), as words of 32 bits (K / 64, N / 16, 32, 4),
    in the same integer type, which has 32 bits or more."""
    n, k = codes.shape
    split = codes.reshape(
        n // BLOCK_ROWS, _HALVES, _ROWS_OF_LANES, k // BLOCK_COLUMNS, WORDS, _HALVES, _LANES_OF_ROW, 2
    )
    pairs = split.permute(3, 0, 2, 6, 4, 5, 1, 7).reshape(-1, n // BLOCK_ROWS, LANES, WORDS, PAIRS, 2)
    found = 0
    for j in range(PAIRS):
        for element in range(2):
            found = found | _bits(pairs[..., j, element], form, j) << (HIGH_HALF * element)
    return found


def _bits(code: Any, form: WeightFormat, pair: int) -> Any:
    if form.codes == "u4":
        return code << (4 * pair)
    return ((code >> 3) << SIGN_BITS[pair]) | ((code & 7) << MAGNITUDE_BITS[pair])


def codes_of(words: Any, form: WeightFormat) -> Any:
    """What `arrange_codes` was given: (N, K)."""
    blocks, slabs, *_ = words.shape
    found = words.new_empty((*words.shape, PAIRS, 2))
    for j in range(PAIRS):
        for element in range(2):
            half = words >> (HIGH_HALF * element)
            code = half >> (4 * j)
            if form.codes != "u4":
                code = (half >> SIGN_BITS[j] & 1) << 3 | (half >> MAGNITUDE_BITS[j] & 7)
            found[..., j, element] = code & 15
    split = found.reshape(blocks, slabs, _ROWS_OF_LANES, _LANES_OF_ROW, WORDS, _HALVES, _HALVES, 2)
    return split.permute(1, 6, 2, 0, 4, 5, 3, 7).reshape(slabs * BLOCK_ROWS, blocks * BLOCK_COLUMNS)


def arrange_scales(scales: Any, form: WeightFormat) -> Any:
    """Scales (N, K / group), or where there are zero points, scales and these in turn (N, 2 * K / group), in the order
    of memory: (K / columns, N times as many as are for `columns`)."""
    n, groups = scales.shape
    each = _of_word(form)
    split = scales.reshape(n // BLOCK_ROWS, _HALVES, _ROWS_OF_LANES, groups // each, each)
    return split.permute(3, 0, 2, 4, 1).reshape(groups // each, n * each)


def scales_of(arranged: Any, form: WeightFormat) -> Any:
    """What `arrange_scales` was given."""
    blocks, across = arranged.shape
    each = _of_word(form)
    split = arranged.reshape(blocks, across // each // BLOCK_ROWS, _ROWS_OF_LANES, each, _HALVES)
    return split.permute(1, 4, 2, 0, 3).reshape(across // each, blocks * each)


def in_turn(scales: Any, zeros: Any) -> Any:
    """Scales and what follows them, each (N, K / group), as `arrange_scales` takes them: (N, 2 * K / group)."""
    found = scales.new_empty((len(scales), 2 * scales.shape[1]))
    found[:, ::2], found[:, 1::2] = scales, zeros
    return found


def _of_word(form: WeightFormat) -> int:
    """How many scales of a row, or zero points, a word has."""
    return max(1, form.columns // form.group)
