"""From 4-bit codes and their scales to bf16 in registers, as `mma.sync` and WGMMA take their operand A from there.

`runtime.numbers.weights` says where a thread's codes and scales are. Knows nothing of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from runtime.numbers.weights import WeightFormat, e2m1_pairs, int4_pairs

_ZERO = 4  # in a selector of PRMT: a byte of its second operand, which is 0
_MINUS_0 = 0x80008000  # two bf16: what changes no product that it is added to
_ONE = 0x3F803F80  # two bf16
_MINUS_2_130 = 0x80088008  # two bf16, subnormal: -8 codes of int4 by what their scales are multiplied with


class Factors(NamedTuple):
    """What a thread's codes of one group and row become numbers with: two equal bf16 in each."""

    scale: Any
    added: Any  # to the products
    zero: Any = None  # to the codes before


def words_of_column(form: WeightFormat, column: int) -> tuple[int, ...]:
    """Which words, in the memory of scales of a row, a column of K takes: its scale's, and its zero point's."""
    if form.zeros:
        first = column // form.group * (form.group // form.columns)
        return first, first + 1
    return (column // form.columns,)


def factors_of_words(form: WeightFormat, words: Sequence[Any], column: int) -> list[Factors]:
    """How codes of a column of K become numbers, by what `words_of_column` names: of a thread's row, then of the row 8
    below."""
    word = words[0]
    if form.codes == "e2m1":
        group = column % form.columns // form.group
        return [Factors(_power(word, 2 * group + row), cutlass.Uint32(_MINUS_0)) for row in range(2)]
    scales = [_twice(word, row) for row in range(2)]
    if form.zeros:
        return [Factors(s, cutlass.Uint32(_MINUS_0), _twice(words[1], row)) for row, s in enumerate(scales)]
    return [Factors(s, _fma(s, cutlass.Uint32(_MINUS_2_130), cutlass.Uint32(_MINUS_0))) for s in scales]


def _twice(word: Any, half: int) -> Any:
    """A half of a word in both halves."""
    return _prmt(word, 0x3232 if half else 0x1010)


def _power(word: Any, byte: int) -> Any:
    """2^(b - 127) twice, as bf16, of a word's byte `byte`: b is the exponent."""
    return _prmt(word, _ZERO << 12 | byte << 8 | _ZERO << 4 | byte) << 7


def weights_of_word(form: WeightFormat, word: Any, factors: Sequence[Factors], here: bool = False) -> list[Any]:
    """The four registers of operand A, 16 rows of a warp by 16 columns, that a word of codes is: pairs of bf16.

    `here`, they are made before any WGMMA that follows: else the compiler moves them between those of a block, and
    ptxas lets none overlap.
    """
    pairs = e2m1_pairs(word) if form.codes == "e2m1" else int4_pairs(word)
    found = []
    for j, pair in enumerate(pairs):
        scale, added, zero = factors[j % 2]
        if zero is not None:  # a difference of subnormal numbers, which is exact
            pair = _fma(pair, cutlass.Uint32(_ONE), zero, here)
        found.append(_fma(pair, scale, added, here))
    return found


def _fma(pair: Any, factor: Any, added: Any, here: bool = False) -> Any:
    """`pair` times `factor` plus `added`, each two bf16, rounded once; Ampere has no instruction that only multiplies,
    or only adds."""
    return _packed("fma.rn.bf16x2 $0, $1, $2, $3;", pair, factor, added, here=here)


def _prmt(word: Any, selector: int) -> Any:
    return _packed("prmt.b32 $0, $1, $2, $3;", word, cutlass.Uint32(0), cutlass.Uint32(selector))


def _packed(code: str, *operands: Any, here: bool = False) -> Any:
    """An instruction on 32-bit registers, which the compiler does not move if it is `here`."""
    values = [cutlass.Uint32(x).ir_value() for x in operands]
    constraints = ",".join(["=r"] + ["r"] * len(values))
    return cutlass.Uint32(llvm.inline_asm(T.i32(), values, code, constraints, has_side_effects=here))
