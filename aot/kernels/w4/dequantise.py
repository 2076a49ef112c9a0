"""From 4-bit codes and their scales to bf16 in registers, as `mma.sync` and WGMMA take their operand A from there.

`runtime.numbers.weights` says where a thread's codes and scales are. Knows nothing of stages.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from runtime.numbers.weights import WeightFormat, e2m1_pairs, int4_pairs

_ZERO = 4  # in a selector of PRMT: a byte of its second operand, which is 0
_MINUS_0 = 0x80008000  # two bf16: what changes no product that it is added to
_MINUS_2_130 = 0x80088008  # two bf16, subnormal: -8 codes of int4 by what their scales are multiplied with


def scales_of_word(form: WeightFormat, word: Any, group: int) -> list[Any]:
    """What multiplies a thread's codes of one group, in a word of scales: two equal bf16 for its row, then for the row
    8 below; of int4 also, after each, what is added."""
    found = []
    for row in range(2):
        if form.word == "mxfp4_weight":
            found.append(_power(word, 2 * group + row))
        else:
            scale = _prmt(word, 0x1010 if row == 0 else 0x3232)
            found += [scale, _multiplied(scale, cutlass.Uint32(_MINUS_2_130), cutlass.Uint32(_MINUS_0))]
    return found


def _power(word: Any, byte: int) -> Any:
    """2^(b - 127) twice, as bf16, of a word's byte `byte`: b is the exponent."""
    return _prmt(word, _ZERO << 12 | byte << 8 | _ZERO << 4 | byte) << 7


def weights_of_word(form: WeightFormat, word: Any, scales: list[Any], here: bool = False) -> list[Any]:
    """The four registers of operand A, 16 rows of a warp by 16 columns, that a word of codes is: pairs of bf16.

    `here`, they are made before any WGMMA that follows: else the compiler moves them between those of a block, and
    ptxas lets none overlap.
    """
    if form.word == "mxfp4_weight":
        zero = cutlass.Uint32(_MINUS_0)
        return [_multiplied(pair, scales[j % 2], zero, here) for j, pair in enumerate(e2m1_pairs(word))]
    return [
        _multiplied(pair, scales[j % 2 * 2], scales[j % 2 * 2 + 1], here) for j, pair in enumerate(int4_pairs(word))
    ]


def _multiplied(pair: Any, scale: Any, more: Any, here: bool = False) -> Any:
    """`pair` times `scale` plus `more`, each two bf16, rounded once; Ampere has no instruction that only multiplies."""
    return _packed("fma.rn.bf16x2 $0, $1, $2, $3;", pair, scale, more, here=here)


def _prmt(word: Any, selector: int) -> Any:
    return _packed("prmt.b32 $0, $1, $2, $3;", word, cutlass.Uint32(0), cutlass.Uint32(selector))


def _packed(code: str, *operands: Any, here: bool = False) -> Any:
    """An instruction on 32-bit registers, which the compiler does not move if it is `here`."""
    values = [cutlass.Uint32(x).ir_value() for x in operands]
    constraints = ",".join(["=r"] + ["r"] * len(values))
    return cutlass.Uint32(llvm.inline_asm(T.i32(), values, code, constraints, has_side_effects=here))
