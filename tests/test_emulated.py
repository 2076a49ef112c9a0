"""The CPU's stand-in for a GPU's threads: `tests.emulated` says when a kernel would hang, and what went wrong first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from . import emulated_warp
from .emulated import ARCH, BFLOAT16, CUTE, CUTLASS, HERE, Tensor, run


def test_a_barrier_that_some_thread_never_reaches_is_told() -> None:
    def kernel() -> None:
        if HERE.thread != 5:
            ARCH.sync_threads()

    with pytest.raises(AssertionError, match="at barriers that others never reach"):
        run(kernel, (1, 1), 64)


def test_what_a_thread_raises_is_raised_though_others_wait_for_it() -> None:
    def kernel() -> None:
        if HERE.thread == 40:
            raise ZeroDivisionError
        ARCH.sync_threads()

    with pytest.raises(ZeroDivisionError):
        run(kernel, (2, 1), 64)


def test_all_threads_are_behind_a_barrier_once_one_is() -> None:
    before, behind = set[int](), list[int]()

    def kernel() -> None:
        before.add(HERE.thread)
        ARCH.sync_threads()
        behind.append(len(before))

    run(kernel, (1, 1), 64)
    assert behind == [64] * 64


# --- warps ---


def fragment(values: Any, kind: Any = CUTLASS.Float32) -> Any:
    """Registers of a thread that have these, shape and all."""
    made = CUTE.make_rmem_tensor(values.shape, kind)
    for index in np.ndindex(values.shape):
        made[index] = values[index]
    return made


def test_a_warp_multiplies_what_its_lanes_have_of_the_matrices_as_ptx_says() -> None:
    """PTX ISA, mma.m16n8k16: of A (16 x 16), B (16 x 8) and C (16 x 8), element i of lane l."""
    random = np.random.default_rng(0)
    a, b, c = (random.integers(-4, 5, shape).astype(np.float32) for shape in ((2, 16, 16), (3, 16, 8), (2, 3, 16, 8)))
    d = np.full(c.shape, np.nan, np.float32)

    def kernel() -> None:
        group, of_group = HERE.lane // 4, HERE.lane % 4
        of_a = [(group + 8 * (i in (2, 3, 6, 7)), of_group * 2 + i % 2 + 8 * (i >= 4)) for i in range(8)]
        of_b = [(of_group * 2 + i % 2 + 8 * (i >= 2), group) for i in range(4)]
        of_c = [(group + 8 * (i >= 2), of_group * 2 + i % 2) for i in range(4)]
        rows = fragment(np.array([[a[m][at] for m in range(2)] for at in of_a]), BFLOAT16)
        columns = fragment(np.array([[b[n][at] for n in range(3)] for at in of_b]), BFLOAT16)
        sums = fragment(np.array([[[c[m, n][at] for n in range(3)] for m in range(2)] for at in of_c]))
        CUTE.gemm(emulated_warp.warp.MmaF16BF16Op(None, None, (16, 8, 16)), sums, rows, columns, sums)
        for i, at in enumerate(of_c):
            for m, n in np.ndindex(2, 3):
                d[m, n][at] = sums[i, m, n]

    run(kernel, (1, 1), 32)
    np.testing.assert_array_equal(d, a[:, None] @ b[None] + c)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_lane_gets_two_neighbours_of_each_matrix_from_the_lanes_that_bring_its_rows(count: int) -> None:
    rows = np.arange(32 * 8).reshape(32, 8).astype(BFLOAT16.array)
    found: dict[int, list[float]] = {}

    def kernel() -> None:
        made = CUTE.make_rmem_tensor((2 * count,), BFLOAT16)
        source = Tensor.of(rows)[HERE.lane, None]
        CUTE.copy(emulated_warp.warp.LdMatrix8x8x16bOp(False, count), source, made)
        found[HERE.lane] = [float(x) for x in made.load()]

    run(kernel, (1, 1), 32)
    for lane, values in found.items():
        wanted = [rows[8 * j + lane // 4, lane % 4 * 2 + i] for j in range(count) for i in range(2)]
        assert values == [float(x) for x in wanted]


def copied(waits: bool, reads_behind_a_barrier: bool = True) -> tuple[int, int]:
    """Of 64 threads that each copy an element and read their neighbour's, how many see it, and how many do not."""
    source, seen = np.arange(1, 257, dtype=np.int32), list[int]()

    def kernel() -> None:
        block = CUTLASS.memory.SmemAllocator().allocate_array(CUTLASS.Uint8, 1024, 16)
        shared = CUTE.make_tensor(CUTE.recast_ptr(block, CUTLASS.Int32), CUTE.make_layout((4, 64)))
        atom = emulated_warp.cpasync.CopyG2SOp(None)
        CUTE.copy(atom, Tensor.of(source.reshape(64, 4))[HERE.thread, None], shared[None, HERE.thread])
        ARCH.cp_async_commit_group()
        if waits:
            ARCH.cp_async_wait_group(0)
        if reads_behind_a_barrier:
            ARCH.sync_threads()
        other = (HERE.thread + 1) % 64
        seen.append(int(shared[3, other]) == 4 * other + 4)
        ARCH.sync_threads()
        ARCH.cp_async_wait_group(0)

    run(kernel, (1, 1), 64)
    return sum(seen), len(seen) - sum(seen)


def test_copies_are_there_behind_a_wait_and_a_barrier_alone() -> None:
    assert copied(waits=True) == (64, 0)
    for there, not_there in (copied(waits=False), copied(waits=True, reads_behind_a_barrier=False)):
        assert there > 8
        assert not_there > 8


def test_all_groups_of_copies_but_the_last_few_are_waited_for() -> None:
    source = np.arange(1, 33, dtype=np.int32)
    seen: list[list[bool]] = []

    def kernel() -> None:
        if HERE.thread > 0:
            return
        block = CUTLASS.memory.SmemAllocator().allocate_array(CUTLASS.Uint8, 128, 16)
        shared = CUTE.make_tensor(CUTE.recast_ptr(block, CUTLASS.Int32), CUTE.make_layout((4, 8)))
        for i in range(8):
            CUTE.copy(emulated_warp.cpasync.CopyG2SOp(None), Tensor.of(source.reshape(8, 4))[i, None], shared[None, i])
            ARCH.cp_async_commit_group()
        for pending in (5, 1, 0):
            ARCH.cp_async_wait_group(pending)
            seen.append([int(shared[0, i]) == 4 * i + 1 for i in range(8)])

    run(kernel, (1, 1), 32)
    assert [all(there[:n]) for there, n in zip(seen, (3, 7, 8), strict=True)] == [True] * 3
    assert not all(seen[0])


def test_a_thread_that_ends_before_its_copies_are_done_is_told() -> None:
    source, target = np.ones(4, np.int32), np.zeros(4, np.int32)

    def kernel() -> None:
        CUTE.copy(emulated_warp.cpasync.CopyG2SOp(None), Tensor.of(source), Tensor.of(target))
        ARCH.cp_async_commit_group()

    with pytest.raises(AssertionError, match="a thread ends while copies may be under way"):
        run(kernel, (1, 1), 32)


def test_lanes_that_do_not_agree_on_what_their_warp_has_in_common_are_told() -> None:
    with pytest.raises(AssertionError, match="a warp's lanes bring different values"):
        run(lambda: ARCH.make_warp_uniform(HERE.thread // 16), (1, 1), 32)


def test_instructions_that_kernels_write_out_do_what_ptx_says() -> None:
    def asm(code: str, *operands: int) -> int:
        return emulated_warp.inline_asm(None, operands, code, "", False)

    assert asm("prmt.b32 $0, $1, $2, $3;", 0x44332211, 0x88776655, 0x7402) == 0x88551133
    one, two, minus_three, tiny = 0x3F80, 0x4000, 0xC040, 0x0001
    found = asm("fma.rn.bf16x2 $0, $1, $2, $3;", two << 16 | tiny, one << 16 | two, minus_three << 16 | tiny)
    assert found == 0xBF80 << 16 | 0x0003  # 2 * 1 - 3, and subnormals
    assert asm("fma.rn.bf16x2 $0, $1, $2, $3;", 0x8000, two, 0x8000) == 0x8000  # -0 keeps a product's sign
