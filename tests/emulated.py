"""Kernels of `aot/kernels/` that use nothing of Hopper, run on the CPU: each thread of a block is one of Python's.

What they take of the DSL is here in plain Python, with its barriers, shuffles and atomics, and in `emulated_warp` what
a warp does together with tensor cores, so that what a kernel does to memory can be seen where there is no GPU. Blocks
run one after the other, and of a block one thread at a time, in orders that differ between barriers. Nothing is
compiled, and addresses, types and vectors are not checked: those the launch-program oracle and a GPU see.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import emulated_warp
from .emulated_threads import HERE as HERE
from .emulated_threads import WARP as WARP
from .emulated_threads import Shared, Turns

_ROOT = Path(__file__).parent.parent


def _rounded_to_e4m3(values: Sequence[Any]) -> list[Any]:
    """To nearest, ties to even, saturated; of finite numbers."""
    magnitudes = np.minimum(np.abs(np.array(values, np.float64)), 448.0)
    steps = np.exp2(np.floor(np.log2(np.maximum(magnitudes, 2.0**-6))) - 3)
    return list(np.copysign(np.round(magnitudes / steps) * steps, values))


@dataclass(frozen=True)
class Kind:
    """An element type; `array` is numpy's, where the memory of one can be taken for that of another."""

    width: int
    array: Any = None
    rounded: Callable[[Sequence[Any]], list[Any]] = list


HALF, E4M3 = Kind(16), Kind(8, rounded=_rounded_to_e4m3)
BFLOAT16 = Kind(16, ml_dtypes.bfloat16, lambda values: list(np.array(values, ml_dtypes.bfloat16)))
UINT8 = Kind(8, np.uint8)


class Pointer:
    def __init__(self, memory: np.ndarray[Any, Any], offset: int = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, more: int) -> Pointer:
        return Pointer(self.memory, self.offset + int(more))

    @property
    def llvm_ptr(self) -> Pointer:
        return self

    def recast(self, dtype: Any) -> Pointer:
        """The same place, where what is there is of another type."""
        memory, at = self.memory.view(_array_of(dtype)), self.offset * self.memory.itemsize
        assert at % memory.itemsize == 0
        return Pointer(memory, at // memory.itemsize)


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

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The memory that it is a view of."""
        memory, at = self.iterator.memory, self.iterator.offset
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        assert 0 <= at <= at + last < memory.size, f"elements {at} to {at + last} of {memory.size}"
        strides = [stride * memory.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(memory[at:], self.shape, strides)

    def load(self) -> _Values:
        return _Values([self[i] for i in range(self.shape[0])])

    def store(self, values: Any) -> None:
        for i, value in enumerate(values):
            self[i] = value


class _Values:
    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __add__(self, other: Any) -> _Values:
        return _Values([a + b for a, b in zip(self, other, strict=True)])

    def __mul__(self, factor: Any) -> _Values:
        return _Values([value * factor for value in self])

    def to(self, kind: Any) -> _Values:
        if kind is _Number:
            return _Values([_Number(value) for value in self])
        return _Values(kind.rounded(list(self)))


class _Number(np.float32):
    def to(self, kind: Any) -> _Number:
        return _Number(self)


class Word(int):
    """32 bits without a sign."""

    def __new__(cls, value: Any) -> Word:
        return super().__new__(cls, int(value) & 0xFFFFFFFF)

    def ir_value(self) -> Word:
        return self


def _array_of(kind: Any) -> Any:
    """Numpy's element type, where there is one for what the DSL has."""
    known = {int: np.int32, Word: np.uint32, _Number: np.float32}
    return kind.array if isinstance(kind, Kind) else known[kind]


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _make_layout(shape: Any, stride: tuple[int, ...] | None = None) -> _Layout:
    extents = tuple(map(int, shape)) if isinstance(shape, tuple) else (int(shape),)
    return _Layout(extents, stride or tuple(itertools.accumulate((1, *extents[:-1]), lambda a, b: a * b)))


def _make_tensor(at: Pointer, layout: _Layout, element_type: Any = HALF) -> Tensor:
    return Tensor(at, *layout, element_type)


def _make_rmem_tensor(shape: Any, kind: Any) -> Tensor:
    layout = _make_layout(shape)
    typed = kind in (BFLOAT16, Word)  # else a register keeps whatever Python has
    memory = np.empty(math.prod(layout.shape), _array_of(kind) if typed else object)
    return Tensor(Pointer(memory), *layout, kind)


class _Allocator:
    """Every thread allocates in the same order, and what it gets is the block's."""

    def allocate_tensor(self, kind: Any, layout: _Layout, alignment: int) -> Tensor:
        dtype = np.float32 if kind is _Number else np.int64
        return _make_tensor(self._of_block(math.prod(layout.shape), 12345, dtype), layout)

    def allocate_array(self, kind: Any, count: int, byte_alignment: int) -> Pointer:
        """Bytes that are all ones, so no number in bf16 or f32."""
        return self._of_block(count, 0xFF, _array_of(kind))

    def _of_block(self, count: int, value: int, dtype: Any) -> Pointer:
        number, HERE.allocated = HERE.allocated, HERE.allocated + 1
        return Pointer(HERE.shared.memory.setdefault(number, np.full(count, value, dtype)))


class _Copy:
    """A copy of a thread's own, at once."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        for i in range(source.shape[0]):
            target[i] = source[i]


def _zipped_divide(tensor: Tensor, tile: tuple[int]) -> Tensor:
    (step,), (size,) = tensor.strides, tile
    assert tensor.shape[0] % size == 0, "tiles that hang over are not emulated"
    return Tensor(tensor.iterator, (size, tensor.shape[0] // size), (step, step * size), tensor.element_type)


def _shuffle(source: Callable[[int, int], int]) -> Callable[[Any, int], Any]:
    def exchange(value: Any, by: int) -> Any:
        lane, found = HERE.lane, HERE.warp.exchange(HERE.lane, value)
        place = source(lane, by)
        return found[place] if 0 <= place < WARP else value

    return exchange


def _brought(value: Any) -> list[Any]:
    return HERE.warp.exchange(HERE.lane, value)


def _uniform(value: Any) -> Any:
    assert len(set(_brought(value))) == 1, "a warp's lanes bring different values"
    return value


def _atomic_add(at: Pointer, value: int) -> None:
    at.memory[at.offset] += value


def _range(*bounds: int, unroll: int = 1) -> range:
    return range(*map(int, bounds))


ARCH = types.SimpleNamespace(
    thread_idx=lambda: (HERE.thread, 0, 0),
    block_idx=lambda: HERE.block,
    lane_idx=lambda: HERE.lane,
    make_warp_uniform=_uniform,
    sync_threads=lambda: HERE.shared.barrier.wait(),
    sync_warp=lambda: HERE.warp.barrier.wait(),
    cp_async_commit_group=emulated_warp.commit_group,
    cp_async_wait_group=emulated_warp.wait_group,
    shuffle_sync=_shuffle(lambda lane, of: of),
    shuffle_sync_up=_shuffle(lambda lane, by: lane - by),
    shuffle_sync_bfly=_shuffle(lambda lane, by: lane ^ by),
    fmax=np.fmax,
    rcp_approx=lambda x: np.float32(1) / x,
    vote_ballot_sync=lambda chosen: sum(1 << lane for lane, other in enumerate(_brought(bool(chosen))) if other),
    popc=lambda bits: int(bits).bit_count(),
    lanemask_lt=lambda: (1 << HERE.lane) - 1,
    atomic_add=_atomic_add,
    warp_redux_sync=lambda value, kind: {"add": sum}[kind](_brought(value)),
)


def _assume(value: int, divby: int) -> int:
    assert value % divby == 0, f"{value} is no multiple of {divby}"
    return value


def _size(tensor: Tensor, mode: Sequence[int] | None = None) -> int:
    return math.prod(tensor.shape) if mode is None else tensor.shape[mode[0]]


CUTE = types.SimpleNamespace(
    arch=ARCH,
    jit=lambda function: function,
    kernel=lambda function: function,
    Tensor=Tensor,
    size=_size,
    rank=lambda tensor: len(tensor.shape),
    ceil_div=lambda a, b: -(-a // b),
    make_layout=_make_layout,
    make_tensor=_make_tensor,
    make_rmem_tensor=_make_rmem_tensor,
    recast_ptr=lambda pointer, dtype: pointer.recast(dtype),
    assume=_assume,
    make_copy_atom=lambda atom, *_, **__: atom,
    make_mma_atom=lambda atom: atom,
    copy=lambda atom, source, target: atom.copy(source, target),
    gemm=lambda atom, *operands: atom.gemm(*operands),
    zipped_divide=_zipped_divide,
    nvgpu=types.SimpleNamespace(CopyUniversalOp=_Copy, LoadCacheMode=types.SimpleNamespace(GLOBAL=None)),
    math=types.SimpleNamespace(absf=abs, exp=lambda x, fastmath: np.exp(x)),
    **dict.fromkeys(("CopyAtom", "Pointer"), Any),
)
CUTLASS = types.SimpleNamespace(
    cute=CUTE,
    Int32=int,
    Int64=int,
    Uint32=Word,
    Uint8=UINT8,
    Float32=_Number,
    BFloat16=BFLOAT16,
    Constexpr=Any,
    const_expr=bool,
    range=_range,
    range_constexpr=range,
    min=min,
    max=max,
    select_=lambda chosen, a, b: a if chosen else b,
    memory=types.SimpleNamespace(SmemAllocator=_Allocator),
)

# What modules of kernels import of the DSL.
_MODULES = {
    "cutlass": CUTLASS,
    "cutlass.cute.nvgpu": emulated_warp,
    "cutlass._mlir.dialects": types.SimpleNamespace(llvm=emulated_warp),
    "cutlass.cutlass_dsl": types.SimpleNamespace(T=types.SimpleNamespace(i32=lambda: None)),
}


def module(path: Path, package: str = "aot.kernels", given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a kernel's module, of a package, defines, of this DSL; and so modules of kernels from which it imports, but
    for names that are `given`."""
    given = given or {}
    found: dict[str, Any] = {**given, "__package__": package, "__name__": f"{package}.{path.stem}"}
    tree = ast.parse(path.read_text())
    for node in list(tree.body):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        defined = None
        if {alias.name for alias in node.names} <= set(given):
            defined = given
        elif isinstance(node, ast.Import):
            defined = _MODULES if node.names[0].name in _MODULES else None
        elif node.level:
            defined = _emulated(node, package)
        elif node.module in _MODULES:
            defined = vars(_MODULES[node.module])
        if defined is not None and all(alias.name in defined for alias in node.names):
            found |= {alias.asname or alias.name: defined[alias.name] for alias in node.names}
            tree.body.remove(node)
    exec(compile(tree, str(path), "exec"), found)
    return found


def _emulated(node: ast.ImportFrom, package: str) -> dict[str, Any] | None:
    """What a module of `package` imports by its place, if that is of this DSL: names of a module, or modules."""
    parents = package.split(".")
    within = [*parents[: len(parents) + 1 - node.level], *(node.module.split(".") if node.module else ())]
    folder = _ROOT.joinpath(*within)
    if folder.with_suffix(".py").is_file():
        return _of_dsl(folder.with_suffix(".py"), ".".join(within[:-1]))
    found = {alias.name: _of_dsl(folder / f"{alias.name}.py", ".".join(within)) for alias in node.names}
    return {name: types.SimpleNamespace(**defined) for name, defined in found.items() if defined is not None} or None


def _of_dsl(path: Path, package: str) -> dict[str, Any] | None:
    ours = path.is_file() and re.search("^(import|from) cutlass", path.read_text(), re.MULTILINE)
    return module(path, package) if ours else None


def run(kernel: Callable[..., None], grid: tuple[int, int], threads: int, *arguments: Any) -> None:
    """Launch, block after block; what a thread raises is raised."""
    for y, x in itertools.product(range(grid[1]), range(grid[0])):
        _run_block(lambda: kernel(*arguments), (x, y, 0), threads)


def _run_block(kernel: Callable[[], None], block: tuple[int, int, int], threads: int) -> None:
    def body(number: int) -> None:
        HERE.thread, HERE.block, HERE.shared, HERE.allocated, HERE.copies = number, block, shared, 0, [[]]
        kernel()
        assert not any(HERE.copies), "a thread ends while copies may be under way"

    turns = Turns(threads, body)
    shared = Shared(threads, turns)
    turns.run()
