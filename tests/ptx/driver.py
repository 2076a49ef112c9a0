"""A driver that runs launches on the CPU, by a kernel's PTX, over the memory of CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.device.gpus import Gpu
from runtime.device.launch import CLUSTER_DIMENSION, Launch
from runtime.device.prepared_launch import PreparedLaunch

from ..parameters import with_pointers
from ..recording_driver import FakeTensor, RecordingDriver
from .machine import Grid, Machine
from .memory import GlobalMemory
from .parse import Kernel


def as_on_gpu(tensor: Any) -> FakeTensor:
    """A CPU tensor of torch's, as the runtime is to see it: on a GPU, at the address where it is."""
    name = str(tensor.dtype).removeprefix("torch.")
    return FakeTensor(tuple(tensor.shape), name, tuple(tensor.stride()), tensor.data_ptr())


@dataclass(eq=False)
class EmulatingDriver(RecordingDriver):
    """Runs what is launched at once. `ptx` has the kernels of each cubin by their symbols; `seed` draws in which order
    warps and copies go."""

    ptx: dict[bytes, Mapping[str, Kernel]] = field(default_factory=dict)
    memory: GlobalMemory = field(default_factory=GlobalMemory)
    seed: int = 0

    def give(self, tensor: Any, writable: bool = False) -> None:
        """Let kernels use a CPU tensor."""
        last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.memory.give(tensor.data_ptr(), (last + 1) * tensor.element_size() if tensor.numel() else 0, writable)

    def allocate(self, size: int, zeroed: bool) -> int:
        room = np.full(size + 256, 0 if zeroed else 0xA5, np.uint8)
        pointer = int(room.ctypes.data) + -int(room.ctypes.data) % 256
        self._rooms.append(room)
        self.memory.give(pointer, size, True)
        self.allocated[pointer] = size, zeroed
        return pointer

    def max_active_clusters(
        self, kernel: Any, cluster: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int
    ) -> int:
        return max(self.multiprocessors // int(np.prod(cluster)), 1)

    def prepare(self, kernel: Any, launch: Launch, pointers: int, like: PreparedLaunch | None = None) -> PreparedLaunch:
        library, symbol = kernel
        ready: Any = _Emulated(self, self.ptx[library][symbol], launch)
        return ready

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rooms: list[Any] = []


class _Emulated:
    def __init__(self, driver: EmulatingDriver, kernel: Kernel, shape: Launch) -> None:
        self._driver, self._kernel, self._shape = driver, kernel, shape

    def launch(self, pointers: Sequence[int], stream: int) -> None:
        shape, driver = self._shape, self._driver
        buffer = with_pointers(shape, pointers)
        parameters = tuple(bytes(buffer[o : o + s]) for o, s in zip(shape.offsets, shape.sizes, strict=True))
        cluster = next((words for identity, words in shape.attributes if identity == CLUSTER_DIMENSION), (1, 1, 1))
        grid = Grid(shape.grid, shape.block, (cluster[0], cluster[1], cluster[2]), shape.shared_bytes, parameters)
        Machine(driver.memory, driver.multiprocessors, driver.seed).launch(self._kernel, grid)


def small_gpu(multiprocessors: int) -> Gpu:
    """An H200 with fewer SMs."""
    return Gpu("NVIDIA H200", multiprocessors, 4917)
