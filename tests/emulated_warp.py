"""What warps do besides arithmetic of a thread's own, for `emulated`: mma.sync, ldmatrix, cp.async, and instructions of
PTX that kernels write out.

Names are those that kernels import from `cutlass.cute.nvgpu` and `cutlass._mlir.dialects.llvm`. Layouts of fragments
are those of the PTX ISA ("Matrix Fragments for mma.m16n8k16 with floating point type", "ldmatrix").
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from .emulated_threads import HERE, WARP

# --- mma.sync.m16n8k16: which elements lane l has, in the order of its registers ---

_GROUP, _OF_GROUP = np.arange(WARP)[:, None] // 4, np.arange(WARP)[:, None] % 4
_A, _B, _C = (np.arange(count)[None] for count in (8, 4, 4))
_ROWS_OF_A, _COLUMNS_OF_A = _GROUP + 8 * (_A // 2 % 2), 2 * _OF_GROUP + _A % 2 + 8 * (_A // 4)
_ROWS_OF_B, _COLUMNS_OF_B = 2 * _OF_GROUP + _B % 2 + 8 * (_B // 2), _GROUP + 0 * _B
_ROWS_OF_C, _COLUMNS_OF_C = _GROUP + 8 * (_C // 2), 2 * _OF_GROUP + _C % 2


class _Mma:
    """D (values, M, N) = A (values, M) times B (values, N) plus C, all of a lane, for each M and N: an instruction
    each, whose sums are rounded once."""

    def __init__(self, element: Any, accumulator: Any, shape: tuple[int, int, int]) -> None:
        assert shape == (16, 8, 16)

    def gemm(self, d: Any, a: Any, b: Any, c: Any) -> None:
        brought = a.array.astype(np.float64), b.array.astype(np.float64), c.array.astype(np.float64)
        assert [x.shape[0] for x in brought] == [8, 4, 4]
        d.array[...] = HERE.warp.together(HERE.lane, brought, _multiplied)[HERE.lane]


def _multiplied(brought: Sequence[Any]) -> np.ndarray[Any, Any]:
    of_a, of_b, of_c = (np.stack(fragments) for fragments in zip(*brought, strict=True))
    a, b = np.empty((16, 16, of_a.shape[2])), np.empty((16, 8, of_b.shape[2]))
    c = np.empty((16, 8, *of_c.shape[2:]))
    a[_ROWS_OF_A, _COLUMNS_OF_A], b[_ROWS_OF_B, _COLUMNS_OF_B], c[_ROWS_OF_C, _COLUMNS_OF_C] = of_a, of_b, of_c
    with np.errstate(invalid="ignore"):  # what nobody loaded is no number
        d = np.einsum("ikm,kjn->ijmn", a, b) + c
    return d[_ROWS_OF_C, _COLUMNS_OF_C].astype(np.float32)


class _LdMatrix:
    """Matrices of 8 x 8: lane l brings row l % 8 of matrix l / 8, and of each gets two neighbours of row l / 4."""

    def __init__(self, transpose: bool, num_matrices: int) -> None:
        assert (transpose, num_matrices) in ((False, 1), (False, 2), (False, 4))
        self._matrices = num_matrices

    def copy(self, source: Any, target: Any) -> None:
        assert (source.array.shape, source.iterator.offset % 8) == ((8,), 0), "a row is 16 bytes at a multiple of 16"
        target.array[...] = HERE.warp.together(HERE.lane, source.array.copy(), self._dealt)[HERE.lane]

    def _dealt(self, rows: Sequence[Any]) -> np.ndarray[Any, Any]:
        matrices = np.stack(rows[: 8 * self._matrices]).reshape(self._matrices, 8, 4, 2)
        return matrices.transpose(1, 2, 0, 3).reshape(WARP, 2 * self._matrices)


warp = types.SimpleNamespace(MmaF16BF16Op=_Mma, LdMatrix8x8x16bOp=_LdMatrix)

# --- cp.async: a copy may be done as soon as it is begun, or not before it is waited for; which is drawn ---


class _CopyAsync:
    def __init__(self, cache_mode: Any) -> None:
        pass

    def copy(self, source: Any, target: Any) -> None:
        size = source.array.nbytes
        assert size in (4, 8, 16)
        for tensor in (source, target):
            assert tensor.iterator.offset * tensor.array.itemsize % size == 0, "a copy begins at a multiple of its size"

        def done() -> None:
            target.array[...] = source.array

        if HERE.shared.random.random() < 0.5:
            done()
            HERE.copies[-1].append(lambda: None)
        else:
            HERE.copies[-1].append(done)


cpasync = types.SimpleNamespace(CopyG2SOp=_CopyAsync)


def commit_group() -> None:
    """The copies that this thread has begun since are a group."""
    HERE.copies.append([])


def wait_group(pending: int) -> None:
    """Wait for all of this thread's groups but the last so many."""
    while len(HERE.copies) > pending + 1:
        for done in HERE.copies.pop(0):
            done()


# --- PTX that kernels write out ---


def inline_asm(result: Any, operands: Sequence[int], code: str, constraints: str, has_side_effects: bool) -> int:
    """What one instruction makes of registers, of those that are here."""
    name, registers = code.rstrip(";").split(" ", 1)
    assert registers == ", ".join(f"${i}" for i in range(len(operands) + 1))
    return _INSTRUCTIONS[name](*operands)


def _prmt(a: int, b: int, selector: int) -> int:
    assert not selector & 0x8888, "bytes that are a sign are not emulated"
    eight = (b << 32 | a).to_bytes(8, "little")
    return int.from_bytes(bytes(eight[selector >> 4 * i & 7] for i in range(4)), "little")


@lru_cache(1 << 16)
def _fma_bf16x2(a: int, b: int, c: int) -> int:
    x, y, z = (
        np.array([i & 0xFFFF, i >> 16], np.uint16).view(ml_dtypes.bfloat16).astype(np.float64) for i in (a, b, c)
    )
    with np.errstate(invalid="ignore"):
        low, high = (x * y + z).astype(ml_dtypes.bfloat16).view(np.uint16)
    return int(low) | int(high) << 16


_INSTRUCTIONS: dict[str, Callable[..., int]] = {"prmt.b32": _prmt, "fma.rn.bf16x2": _fma_bf16x2}
