"""What `tests.ptx` says of PTX that is written out here: what warps do together, what waits, and what is an error."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from .ptx.arithmetic import function
from .ptx.machine import Grid, Machine
from .ptx.memory import Fault, GlobalMemory
from .ptx.parse import parse

# %rd0 and %rd1 are the thread's 16 bytes of input and of output; %r0 is its 16 bytes of shared memory, %r1 its number,
# and %r2 those of its neighbour, of whom the last has the first.
HEAD = """
.visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1) {
  .reg .b32 %r<40>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .pred %p<9>;
  ld.param.b64 %rd0, [k_param_0];
  ld.param.b64 %rd1, [k_param_1];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 16;
  add.s64 %rd0, %rd0, %rd2;
  add.s64 %rd1, %rd1, %rd2;
  mov.b32 %r3, __dynamic_shmem__0;
  shl.b32 %r4, %r1, 4;
  add.s32 %r0, %r3, %r4;
  mov.u32 %r5, %ntid.x;
  add.s32 %r6, %r1, 1;
  rem.u32 %r6, %r6, %r5;
  shl.b32 %r6, %r6, 4;
  add.s32 %r2, %r3, %r6;
"""
COPY = "cp.async.cg.shared.global [%r0], [%rd0], 16; cp.async.commit_group;"
SEE_NEIGHBOUR = "ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r2]; st.global.v4.b32 [%rd1], {%r10, %r11, %r12, %r13};"


def run(body: str, given: Any, threads: int = 64, seed: int = 0, written: int | None = None) -> Any:
    """What a CTA leaves of `threads` times 16 bytes, of 32-bit words; it may write to `written` bytes of these."""
    memory, found = GlobalMemory(), np.zeros((threads, 4), np.uint32)
    given = np.ascontiguousarray(given)
    memory.give(given.ctypes.data, given.nbytes, False)
    memory.give(found.ctypes.data, found.nbytes if written is None else written, True)
    pointers = tuple(int(each.ctypes.data).to_bytes(8, "little") for each in (given, found))
    grid = Grid((1, 1, 1), (threads, 1, 1), (1, 1, 1), threads * 16, pointers)
    Machine(memory, 1, seed).launch(parse(f"{HEAD} {body} ret; }}")["k"], grid)
    return found


WORDS = np.arange(1, 257, dtype=np.uint32).reshape(64, 4)


def test_copies_are_there_behind_a_wait_and_a_barrier_alone() -> None:
    neighbours = np.roll(WORDS, -1, axis=0)
    wait, barrier = "cp.async.wait_group 0;", "bar.sync 0;"

    def seen(*parts: str) -> set[bool]:
        runs = [run(" ".join((COPY, *parts, SEE_NEIGHBOUR)), WORDS, seed=seed) for seed in range(12)]
        return set(np.concatenate([(found == neighbours).all(1) for found in runs]).tolist())

    assert seen(wait, barrier) == {True}
    assert seen(barrier) == seen(wait) == {False, True}


def test_all_groups_of_copies_but_the_last_few_are_waited_for() -> None:
    """Of eight copies, what is there of each when so many may be under way still."""
    copies = "".join(
        f"cp.async.ca.shared.global [%r0+{4 * i}], [%rd0+{4 * i}], 4; cp.async.commit_group;" for i in range(4)
    )
    own = SEE_NEIGHBOUR.replace("%r2", "%r0")
    for pending, there in ((0, 4), (1, 3), (3, 1)):
        found = [run(f"{copies} cp.async.wait_group {pending}; {own}", WORDS, seed=seed) for seed in range(8)]
        assert all((each[:, :there] == WORDS[:, :there]).all() for each in found)
        assert there == 4 or not all((each == WORDS).all() for each in found)


def test_a_barrier_that_some_warp_never_reaches_is_told() -> None:
    with pytest.raises(Fault, match="nobody can go on: CTA"):
        run("setp.lt.u32 %p1, %r1, 32; @%p1 bra DONE; bar.sync 0, 64; DONE:", WORDS)


def test_lanes_that_part_at_what_a_warp_does_together_are_told() -> None:
    with pytest.raises(Fault, match="only some lanes of a warp are there"):
        run("setp.lt.u32 %p1, %r1, 5; @%p1 bra DONE; bar.sync 0; DONE:", WORDS)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.b32 [%rd0], %r1;", "writes 4 bytes at .*, which are an input"),
        ("st.global.b32 [%rd1+16], %r1;", "writes 4 bytes at .*, which nobody gave it"),
        ("ld.global.b32 %r9, [%rd0+1024];", "reads 4 bytes at .*, which nobody gave it"),
        ("ld.global.b32 %r9, [%rd0+2];", "is not aligned"),
        ("ld.shared.b32 %r9, [%r0+1024];", "4 bytes at shared offsets"),
    ],
)
def test_accesses_that_no_kernel_may_make_are_told(body: str, message: str) -> None:
    with pytest.raises(Fault, match=message):
        run(body, WORDS, written=1024)


# --- fragments, as the PTX ISA has them ---


def test_a_warp_multiplies_what_its_lanes_have_of_the_matrices() -> None:
    """mma.m16n8k16: of A (16 x 16), B (16 x 8) and C (16 x 8), element i of lane l."""
    random = np.random.default_rng(0)
    a, b = (random.integers(-4, 5, shape).astype(np.float32) for shape in ((16, 16), (16, 8)))
    of_lanes = np.zeros((32, 12), ml_dtypes.bfloat16)
    for lane, i in itertools.product(range(32), range(8)):
        group, of_group = lane // 4, lane % 4
        of_lanes[lane, i] = a[group + 8 * (i in (2, 3, 6, 7)), of_group * 2 + i % 2 + 8 * (i >= 4)]
        if i < 4:
            of_lanes[lane, 8 + i] = b[of_group * 2 + i % 2 + 8 * (i >= 2), group]
    loads = "mul.wide.u32 %rd3, %r1, 8; add.s64 %rd0, %rd0, %rd3;"  # 24 bytes of each lane
    loads += "".join(f"ld.global.b32 %r{10 + i}, [%rd0+{4 * i}];" for i in range(6))
    product = (
        "mov.f32 %f0, 0f3F800000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;"
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0, %f1, %f2, %f3}, {%r10, %r11, %r12, %r13},"
        "{%r14, %r15}, {%f0, %f1, %f2, %f3};"
    )
    found = run(f"{loads} {product} st.global.v4.f32 [%rd1], {{%f0, %f1, %f2, %f3}};", of_lanes, threads=32)
    wanted = a @ b + 1
    for lane, i in itertools.product(range(32), range(4)):
        assert found.view(np.float32)[lane, i] == wanted[lane // 4 + 8 * (i >= 2), lane % 4 * 2 + i % 2]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_lane_gets_two_neighbours_of_each_matrix_from_the_lanes_that_bring_its_rows(count: int) -> None:
    rows = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8)
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    body = f"""{COPY} cp.async.wait_group 0; bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {{{registers}}}, [%r0];
    st.global.v4.b32 [%rd1], {{%r10, %r11, %r12, %r13}};"""
    found = run(body, rows, threads=32).view(np.uint16)
    for lane, matrix in itertools.product(range(32), range(count)):
        wanted = rows[8 * matrix + lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
        assert found[lane, 2 * matrix : 2 * matrix + 2].tolist() == wanted.tolist()


def test_arithmetic_is_as_ptx_says() -> None:
    def made(words: str, *operands: int) -> int:
        _, _, compute = function(tuple(words.split(".")))
        return int(compute(*(np.full(32, each, np.uint32) for each in operands))[0])

    assert made("prmt.b32", 0x44332211, 0x88776655, 0x7402) == 0x88551133
    one, two, minus_three, tiny = 0x3F80, 0x4000, 0xC040, 0x0001
    found = made("fma.rn.bf16x2", two << 16 | tiny, one << 16 | two, minus_three << 16 | tiny)
    assert found == 0xBF80 << 16 | 0x0003  # 2 * 1 - 3, and subnormals
    assert made("fma.rn.bf16x2", 0x8000, two, 0x8000) == 0x8000  # -0 keeps a product's sign
