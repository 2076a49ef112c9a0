"""How functions add up along K, as `aot.search.legal.summation` words it: which of them give equal bits.

With bf16, K-major B and no epilogue, on an H200 at five M and five signatures, all functions of the three families of
Hopper that cut K nowhere agree bit by bit, whatever their tiles, clusters, schedules and operands' sides. So do those
of `sm90_small_m` and `sm90_persistent` that cut it in two, and those of `sm90_small_m` that cut it in four
(benchmarks/results/bits_h200.json, by scripts/compare_bits.py). A tensor core adds up the products of 16 columns at a
time, and the K of a tile goes by in order.

That holds for f16 too, which is the same instruction with other inputs. It holds for epilogues of our families: both do
the same operations on f32 sums in the same order, and the compiler fuses the same multiplications into additions
(tests/test_summation.py). It is not claimed of what was not compared: 8-bit inputs, whose sums move to f32 registers at
other intervals, batches, N-major B, other cuts and targets. Nor of `stream_k`, which cuts K by the number of tiles.

Apart from the providers, so that another word compiles nothing anew.
"""

from __future__ import annotations

from runtime.numbers.dtypes import DTYPES

from ..kernels.sm90.persistent_choices import STAGE_BYTES_OF_K
from ..kernels.sm90.small_m_choices import Form, tile_k
from ..search.variants import Variant

_UNCUT = "uncut"
_COMPARED_BITS = 16  # of an element of A and B
_COMPARED_SPLITS_SMALL_M = 1, 2, 4
_COMPARED_SPLITS_PERSISTENT = 1, 2


def by_itself(v: Variant, k: int | None) -> str | None:
    """Of a kernel that does the same for a row whatever M is, and was compared with no other."""
    return v.name()


def of_operator(v: Variant, k: int | None) -> str | None:
    """Of NVIDIA's persistent kernels for Hopper, which cut K nowhere."""
    return _UNCUT if _was_compared(v) else v.name()


def of_small_m(v: Variant, k: int | None) -> str | None:
    """Of `aot.kernels.sm90.small_m`, whose slices of K are whole stages: 128 columns for few tokens, 64 for many."""
    split = v.integer("split_k")
    if not _was_compared(v) or split not in _COMPARED_SPLITS_SMALL_M:
        return v.name()
    columns = tile_k(v.options, Form())
    return _cut(v, split, columns, None if k is None else -(-k // columns))


def of_persistent(v: Variant, k: int | None) -> str | None:
    """Of `aot.kernels.sm90.persistent`, where each slice of K has a stage even if that is zeros."""
    if v.options["stream_k"]:
        return None
    split = v.integer("split_k")
    if not _was_compared(v) or split not in _COMPARED_SPLITS_PERSISTENT:
        return v.name()
    columns = STAGE_BYTES_OF_K * 8 // _COMPARED_BITS
    return _cut(v, split, columns, None if k is None else max(split, -(-k // columns)))


def _was_compared(v: Variant) -> bool:
    return DTYPES[v.a].bits == _COMPARED_BITS and not v.batched and v.b_major == "k"


def _cut(v: Variant, split: int, columns: int, stages: int | None) -> str:
    """The word for `split` slices of `stages` of so many columns, added up in order: where the slices begin.

    Where K is not known, it is that of the family's functions with such stages.
    """
    if split == 1:
        return _UNCUT
    if stages is None:
        return f"{v.family}, {split} slices of {columns} columns"
    return "cut at " + ", ".join(str(stages * part // split * columns) for part in range(1, split))
