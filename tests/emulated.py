"""Kernels of `aot/kernels/` that use no tensor cores, run on the CPU: each thread of a block is one of Python's.

What they take of the DSL is here in plain Python, with its barriers, shuffles and atomics, so that what a kernel does
to memory can be seen where there is no GPU. Blocks run one after the other, and of a block one thread at a time, in
orders that differ between barriers. Nothing is compiled, and addresses, types and vectors are not checked: those the
launch-program oracle and a GPU see.
"""

from __future__ import annotations

import _thread
import ast
import itertools
import math
import random
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WARP = 32


class _Turns:
    """Lets one thread of a block run at a time, until it waits for others or ends; which is next is drawn, with a fixed
    seed. A thread that has not begun begins on the system's thread of one that has ended, if there is one."""

    def __init__(self, threads: int, body: Callable[[int], None]) -> None:
        self._body = body
        self._ready, self._left = list(range(threads)), threads
        self._gates: dict[int, Any] = {}  # locks, of threads that have begun
        self._random = random.Random(threads)
        self._failed: BaseException | None = None
        self._done = threading.Lock()

    def run(self) -> None:
        """Run `body` of every thread; what the first that fails raises is raised."""
        self._done.acquire()
        self._pass_on()
        self._done.acquire()
        if self._failed is not None:
            raise self._failed

    def wait(self) -> None:
        """Let others run until `ready` names this thread and its turn comes."""
        gate = self._gates[HERE.thread]
        self._pass_on()
        gate.acquire()
        if self._failed is not None:
            raise SystemExit  # ends a thread of a block in which another failed

    def ready(self, threads: list[int]) -> None:
        """These wait no longer."""
        self._ready += threads

    def _pass_on(self) -> None:
        thread = self._next()
        if thread is not None:
            _thread.start_new_thread(self._work, (thread,))

    def _next(self) -> int | None:
        """The thread whose turn it is, if it has not begun; one that has goes on where it waits."""
        if not self._ready:
            self._fail(AssertionError("all threads that have not ended are at barriers that others never reach"))
            return None
        place = self._random.randrange(len(self._ready))
        self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
        thread = self._ready.pop()
        if thread not in self._gates:
            return thread
        self._gates[thread].release()
        return None

    def _work(self, thread: int | None) -> None:
        while thread is not None:
            self._gates[thread] = threading.Lock()
            self._gates[thread].acquire()
            try:
                self._body(thread)
            except BaseException as error:
                self._fail(error)
                return
            self._left -= 1
            if not self._left:
                self._done.release()
                return
            thread = self._next()

    def _fail(self, error: BaseException) -> None:
        if self._failed is None:
            self._failed = error
            self._done.release()
            for gate in self._gates.values():
                if gate.locked():
                    gate.release()


class _Barrier:
    """Where so many threads wait for each other."""

    def __init__(self, turns: _Turns, size: int) -> None:
        self._turns, self._size = turns, size
        self._arrived: list[int] = []

    def wait(self) -> None:
        if len(self._arrived) + 1 < self._size:
            self._arrived.append(HERE.thread)
            self._turns.wait()
        else:
            arrived, self._arrived = self._arrived, []
            self._turns.ready(arrived)


class _Warp:
    """Where 32 threads meet and see what each brought."""

    def __init__(self, turns: _Turns) -> None:
        self.barrier = _Barrier(turns, WARP)
        self.values: list[Any] = [None] * WARP

    def exchange(self, lane: int, value: Any) -> list[Any]:
        self.values[lane] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class _Here(threading.local):
    """The thread that runs: its number, its block's, and what it shares."""

    thread: int
    block: tuple[int, int, int]
    shared: Any
    allocated: int


HERE = _Here()


class _Shared:
    """What the threads of a block share."""

    def __init__(self, threads: int, turns: _Turns) -> None:
        self.barrier = _Barrier(turns, threads)
        self.warps = [_Warp(turns) for _ in range(threads // WARP)]
        self.memory: dict[int, np.ndarray[Any, Any]] = {}


HALF = types.SimpleNamespace(width=16)  # element types
E4M3 = types.SimpleNamespace(width=8, rounded=lambda values: _rounded_to_e4m3(values))


def _rounded_to_e4m3(values: Sequence[Any]) -> list[Any]:
    """To nearest, ties to even, saturated; of finite numbers."""
    magnitudes = np.minimum(np.abs(np.array(values, np.float64)), 448.0)
    steps = np.exp2(np.floor(np.log2(np.maximum(magnitudes, 2.0**-6))) - 3)
    return list(np.copysign(np.round(magnitudes / steps) * steps, values))


class Pointer:
    def __init__(self, memory: np.ndarray[Any, Any], offset: int = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, more: int) -> Pointer:
        return Pointer(self.memory, self.offset + int(more))

    @property
    def llvm_ptr(self) -> Pointer:
        return self


class Tensor:
    """A view of memory by shape and strides, as the DSL's, with the first mode innermost where none are given."""

    def __init__(self, at: Pointer, shape: tuple[int, ...], strides: tuple[int, ...], element_type: Any = HALF) -> None:
        self.iterator, self.shape, self.strides, self.element_type = at, shape, strides, element_type

    @classmethod
    def of(cls, array: np.ndarray[Any, Any], element_type: Any = HALF) -> Tensor:
        flat = array.reshape(-1)
        assert np.shares_memory(flat, array) or not array.size
        return cls(Pointer(flat), array.shape, tuple(s // array.itemsize for s in array.strides), element_type)

    def _at(self, index: Any) -> tuple[int, list[int]]:
        whole = index if isinstance(index, tuple) else (index,)
        left, offset = [], self.iterator.offset
        for mode, i in enumerate(whole):
            if i is None:
                left.append(mode)
            else:
                assert 0 <= i < self.shape[mode], f"index {whole} of {self.shape}"
                offset += int(i) * self.strides[mode]
        return offset, left

    def __getitem__(self, index: Any) -> Any:
        offset, left = self._at(index)
        if not left:
            return self.iterator.memory[offset]
        shape, strides = (tuple(of[mode] for mode in left) for of in (self.shape, self.strides))
        return Tensor(Pointer(self.iterator.memory, offset), shape, strides, self.element_type)

    def __setitem__(self, index: Any, value: Any) -> None:
        offset, left = self._at(index)
        assert not left
        self.iterator.memory[offset] = value

    def fill(self, value: Any) -> None:
        self.iterator.memory[:] = value

    def load(self) -> _Values:
        return _Values([self[i] for i in range(self.shape[0])])

    def store(self, values: Any) -> None:
        for i, value in enumerate(values):
            self[i] = value


class _Values(list[Any]):
    def to(self, kind: Any) -> _Values:
        return _Values(kind.rounded(self)) if kind is E4M3 else self


class _Number(np.float32):
    def to(self, kind: Any) -> _Number:
        return _Number(self)


def _make_layout(shape: Any) -> tuple[int, ...]:
    return tuple(map(int, shape)) if isinstance(shape, tuple) else (int(shape),)


def _tensor_of(at: Pointer, shape: tuple[int, ...], element_type: Any = HALF) -> Tensor:
    strides = tuple(itertools.accumulate((1, *shape[:-1]), lambda a, b: a * b))
    return Tensor(at, shape, strides, element_type)


class _Allocator:
    """Every thread allocates in the same order, and what it gets is the block's."""

    def allocate_tensor(self, kind: Any, shape: tuple[int, ...], alignment: int) -> Tensor:
        number, HERE.allocated = HERE.allocated, HERE.allocated + 1
        dtype = np.float32 if kind is _Number else np.int64
        memory = HERE.shared.memory.setdefault(number, np.full(math.prod(shape), 12345, dtype))
        return _tensor_of(Pointer(memory), shape)


def _copy(atom: Any, source: Tensor, target: Tensor) -> None:
    for i in range(source.shape[0]):
        target[i] = source[i]


def _zipped_divide(tensor: Tensor, tile: tuple[int]) -> Tensor:
    (step,), (size,) = tensor.strides, tile
    return Tensor(tensor.iterator, (size, tensor.shape[0] // size), (step, step * size), tensor.element_type)


def _shuffle(source: Callable[[int, int], int]) -> Callable[[Any, int], Any]:
    def exchange(value: Any, by: int) -> Any:
        lane = HERE.thread % WARP
        found = HERE.shared.warps[HERE.thread // WARP].exchange(lane, value)
        place = source(lane, by)
        return found[place] if 0 <= place < WARP else value

    return exchange


def _brought(value: Any) -> list[Any]:
    return HERE.shared.warps[HERE.thread // WARP].exchange(HERE.thread % WARP, value)


def _atomic_add(at: Pointer, value: int) -> None:
    at.memory[at.offset] += value


def _range(*bounds: int, unroll: int = 1) -> range:
    return range(*map(int, bounds))


ARCH = types.SimpleNamespace(
    thread_idx=lambda: (HERE.thread, 0, 0),
    block_idx=lambda: HERE.block,
    lane_idx=lambda: HERE.thread % WARP,
    sync_threads=lambda: HERE.shared.barrier.wait(),
    sync_warp=lambda: HERE.shared.warps[HERE.thread // WARP].barrier.wait(),
    shuffle_sync=_shuffle(lambda lane, of: of),
    shuffle_sync_up=_shuffle(lambda lane, by: lane - by),
    shuffle_sync_bfly=_shuffle(lambda lane, by: lane ^ by),
    fmax=np.fmax,
    vote_ballot_sync=lambda chosen: sum(1 << lane for lane, other in enumerate(_brought(bool(chosen))) if other),
    popc=lambda bits: int(bits).bit_count(),
    lanemask_lt=lambda: (1 << HERE.thread % WARP) - 1,
    atomic_add=_atomic_add,
    warp_redux_sync=lambda value, kind: {"add": sum}[kind](_brought(value)),
)


def _size(tensor: Tensor, mode: Sequence[int] | None = None) -> int:
    return math.prod(tensor.shape) if mode is None else tensor.shape[mode[0]]


CUTE = types.SimpleNamespace(
    arch=ARCH,
    jit=lambda function: function,
    kernel=lambda function: function,
    Tensor=Tensor,
    size=_size,
    ceil_div=lambda a, b: -(-a // b),
    make_layout=_make_layout,
    make_tensor=_tensor_of,
    make_rmem_tensor=lambda shape, kind: _tensor_of(Pointer(np.empty(math.prod(shape), object)), shape, kind),
    make_copy_atom=lambda *_, **__: None,
    copy=_copy,
    zipped_divide=_zipped_divide,
    nvgpu=types.SimpleNamespace(CopyUniversalOp=lambda: None),
    math=types.SimpleNamespace(absf=abs),
)
CUTLASS = types.SimpleNamespace(
    cute=CUTE,
    Int32=int,
    Float32=_Number,
    Constexpr=Any,
    const_expr=bool,
    range=_range,
    range_constexpr=range,
    min=min,
    max=max,
    select_=lambda chosen, a, b: a if chosen else b,
    memory=types.SimpleNamespace(SmemAllocator=_Allocator),
)


def module(path: Path, package: str = "aot.kernels", given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a kernel's module, of a package, defines, of this DSL; and so modules beside it from which it imports, but
    for names that are `given`."""
    given = given or {}
    found: dict[str, Any] = {
        **given,
        "cutlass": CUTLASS,
        "cute": CUTE,
        "__package__": package,
        "__name__": f"{package}.{path.stem}",
    }
    tree = ast.parse(path.read_text())
    for node in list(tree.body):
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
        if names and names <= set(given):
            tree.body.remove(node)
            continue
        beside = path.parent / f"{node.module}.py" if isinstance(node, ast.ImportFrom) and node.level == 1 else None
        if beside is not None:
            defined = module(beside, package)
            found |= {name: defined[name] for name in names}
        if beside is not None or names in ({"cutlass"}, {"cute"}):
            tree.body.remove(node)
    exec(compile(tree, str(path), "exec"), found)
    return found


def run(kernel: Callable[..., None], grid: tuple[int, int], threads: int, *arguments: Any) -> None:
    """Launch, block after block; what a thread raises is raised."""
    for y, x in itertools.product(range(grid[1]), range(grid[0])):
        _run_block(lambda: kernel(*arguments), (x, y, 0), threads)


def _run_block(kernel: Callable[[], None], block: tuple[int, int, int], threads: int) -> None:
    def body(number: int) -> None:
        HERE.thread, HERE.block, HERE.shared, HERE.allocated = number, block, shared, 0
        kernel()

    turns = _Turns(threads, body)
    shared = _Shared(threads, turns)
    turns.run()
