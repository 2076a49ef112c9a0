"""Warps, CTAs and clusters of a launch, and the order in which they and what is asynchronous run.

A warp runs the lanes that are furthest behind, so lanes that parted meet again where their paths do. It gives way where
it waits, and now and then; who is next is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arithmetic import Values
from .code import Code
from .memory import CTA_SHIFT, DYNAMIC, Fault, GlobalMemory, SharedMemory
from .parse import Kernel
from .steps import LANES, WAIT, Apart
from .tcgen05 import TensorMemory
from .tensor_map import TensorMap

_SLICE = 400  # instructions that a warp runs at a time, at most
_MOST_STEPS = 40_000_000  # of a launch
_MOST_IDLE = 5_000  # slices of warps that ask for what does not come
_ALL = np.ones(LANES, np.bool_)


@dataclass(frozen=True)
class Grid:
    """A launch: CTAs, threads of each, CTAs of a cluster, and the parameters' bytes with their offsets."""

    ctas: tuple[int, int, int]
    threads: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    parameters: tuple[bytes, ...]


@dataclass(eq=False)
class Cta:
    """A CTA: where it is, its shared memory, and its named barriers: who has arrived, and how many times all have."""

    block: tuple[int, int, int]
    rank: int
    shared: SharedMemory
    cluster: Cluster
    warps: list[Warp] = field(default_factory=list)
    tensor: TensorMemory = field(default_factory=TensorMemory)
    pipe: list[Callable[[], None]] = field(default_factory=list)  # products and what follows them, in order
    arrived: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)

    def arrive(self, barrier: int, threads: int) -> int:
        """A warp arrives at a barrier for so many threads; the round that it waits for."""
        mine = self.rounds.get(barrier, 0)
        self.arrived[barrier] = self.arrived.get(barrier, 0) + LANES
        if self.arrived[barrier] > threads:
            raise Fault(f"more than {threads} threads arrive at barrier {barrier}")
        if self.arrived[barrier] == threads:
            self.arrived[barrier], self.rounds[barrier] = 0, mine + 1
        return mine


@dataclass(eq=False)
class Cluster:
    """CTAs that see each other's shared memory, and the cluster's barrier."""

    ctas: list[Cta] = field(default_factory=list)
    arrived: set[Warp] = field(default_factory=set)
    rounds: int = 0

    def arrive(self, warp: Warp) -> int:
        """The round that the warp waits for."""
        mine = self.rounds
        if warp in self.arrived:
            raise Fault("a warp arrives twice at the cluster's barrier")
        self.arrived.add(warp)
        self.look()
        return mine

    def look(self) -> None:
        """Whether all have arrived that have not ended."""
        if self.arrived and all(warp.done or warp in self.arrived for cta in self.ctas for warp in cta.warps):
            self.arrived, self.rounds = set(), self.rounds + 1

    def shared(self, address: int) -> SharedMemory:
        """Whose an address in the cluster's window is."""
        rank = address >> CTA_SHIFT
        if not 0 <= rank < len(self.ctas):
            raise Fault(f"shared address {address:#x} is of no CTA of the cluster")
        return self.ctas[rank].shared


class Warp:
    """32 lanes: their registers, where they are, and what they wait for."""

    def __init__(self, code: Code, cta: Cta, number: int, machine: Machine) -> None:
        self.code: Code = code
        self.cta: Cta = cta
        self.number: int = number
        self.machine: Machine = machine
        self.registers: list[Values] = code.empty_registers()
        self.mask, self.full = _ALL, True
        self.paths: list[tuple[int, Values]] = [(0, _ALL)]
        self.apart: set[int] = set()  # where some lanes are that wait for others of the warp
        self.blocked: Callable[[], bool] | None = None
        self.patient = True  # whether it can go on only where it is not blocked
        self.threads: Values = number * LANES + np.arange(LANES)
        self.products: list[list[Callable[[], None]]] = [[]]  # of WGMMA, by group; the last is open
        self.bulk: list[list[Callable[[], None]]] = [[]]  # stores from shared memory
        self.copies: list[list[Callable[[], None]]] = [[]]  # cp.async
        self.moves: list[Callable[[], None]] = []  # of tensor memory
        self.cluster_round = 0
        self.place = 0

    @property
    def done(self) -> bool:
        return not self.paths

    def set(self, register: int, values: Values) -> None:
        """Of the lanes that run."""
        if self.full:
            self.registers[register] = values
        else:
            mask = self.mask if values.ndim == 1 else self.mask[:, None]
            self.registers[register] = np.where(mask, values, self.registers[register])

    def active(self) -> Values:
        """The numbers of the lanes that run."""
        return np.flatnonzero(self.mask)

    def run(self) -> int:
        """A slice; how many instructions it had."""
        count = 0
        while self.paths and count < _SLICE:
            place, mask = min(self.paths, key=lambda path: (path[0] in self.apart, path[0]))
            for other in [path for path in self.paths if path[0] == place and path[1] is not mask]:
                mask = mask | other[1]
            self.paths = [path for path in self.paths if path[0] != place]
            alone = place in self.apart and all(path[0] in self.apart for path in self.paths)
            self.apart.discard(place)
            self.mask, self.full = mask, bool(mask.all())
            try:
                result, steps = self._along(place, _SLICE - count)
            except Apart:
                if alone:
                    raise
                self.apart.add(self.place)
                result, steps = [(self.place, self.mask)], 1
            count += steps
            if result is WAIT:
                self.paths.append((self.place + 1, self.mask))
                return count
            self.paths += [(self.place + 1, self.mask)] if result is None else result
        return count

    def _along(self, place: int, most: int) -> tuple[Any, int]:
        """Run lanes to where others are, at most so many instructions; what the last gave, and how many."""
        steps, first = self.code.steps, place
        stop = min([path[0] for path in self.paths if path[0] > place], default=len(steps))
        self.place = place
        result = steps[place](self)
        while result is None and place + 1 < stop and place - first + 1 < most:
            place += 1
            self.place = place
            result = steps[place](self)
        return result, place - first + 1

    # --- what is asynchronous ---

    def late(self, groups: list[list[Callable[[], None]]], left: int) -> None:
        """Close the open group where `left` says so by -1; else do all but the last `left` closed ones."""
        if left < 0:
            groups.append([])
            return
        while len(groups) - 1 > left:
            for each in groups.pop(0):
                each()

    def early(self, rng: random.Random) -> None:
        """Do some of what may be done before its wait: in order, as hardware does each kind."""
        for groups in (self.products, self.bulk, self.copies):
            while len(groups) > 1 and rng.random() < 0.5:
                for each in groups.pop(0):
                    each()


class Machine:
    """Runs launches of kernels over global memory, a CTA on each SM at a time."""

    def __init__(self, memory: GlobalMemory, multiprocessors: int, seed: int = 0) -> None:
        self.memory = memory
        self.multiprocessors: int = multiprocessors
        self.rng = random.Random(seed)
        self.pending: list[Callable[[], None]] = []  # what may be done at any time
        self.newest = 0.0  # how often the newest of these is done first
        self.grid = Grid((1, 1, 1), (32, 1, 1), (1, 1, 1), 0, ())
        self.parameters = b""
        self.steps = self.idle = 0
        self._maps: dict[int, TensorMap] = {}
        self._ctas: list[Cta] = []  # that run
        self._blocks: Iterator[tuple[int, int, int]] = iter(())
        self._sms: dict[int, int] = {}

    def sm_of(self, cta: Cta) -> int:
        """An SM that only this CTA is on, as far as there are some."""
        return self._sms.setdefault(id(cta), len(self._sms) % self.multiprocessors)

    def tensor_map(self, offset: int) -> TensorMap:
        """That of the parameter at an offset."""
        if offset not in self._maps:
            self._maps[offset] = TensorMap.read(self.parameters[offset : offset + 128])
        return self._maps[offset]

    def launch(self, kernel: Kernel, grid: Grid) -> None:
        """Run all of a grid.

        Raises:
            Fault: it does what would be an error, never ends, or waits for what nobody does.
        """
        offsets, data = [], b""
        for (_, size), value in zip(kernel.parameters.values(), grid.parameters, strict=True):
            if len(value) != size:
                raise Fault(f"a parameter of {len(value)} bytes, where the kernel takes {size}")
            data += bytes(-len(data) % 64)
            offsets.append(len(data))
            data += value
        self.grid, self.parameters, self.steps = grid, data, 0
        self.newest = self.rng.choice((0.0, 0.9))
        self._maps.clear()
        self._sms.clear()
        code = Code(kernel, offsets)
        self._blocks = self._clusters()
        running: list[Warp] = []
        while True:
            while len(self._ctas) < self.multiprocessors and (block := self.next_block()) is not None:
                cluster = self._cluster(code, block)
                self._ctas += cluster.ctas
                running += [warp for cta in cluster.ctas for warp in cta.warps]
            if not running:
                break
            self._some(running)
            if any(warp.done for warp in running):
                running = [warp for warp in running if not warp.done]
                self._ctas = [cta for cta in self._ctas if not all(warp.done for warp in cta.warps)]
        while self._work(self.rng):
            pass

    def next_block(self) -> tuple[int, int, int] | None:
        """The first CTA of the next cluster that has not begun, which then begins, or never does: whoever asks has its
        work."""
        return next(self._blocks, None)

    def _work(self, rng: random.Random) -> bool:
        """Do something that may be done at any time; whether there was something."""
        pipes = [cta.pipe for cta in self._ctas if cta.pipe]
        if not self.pending and not pipes:
            return False
        choice = rng.randrange(len(self.pending) + len(pipes))
        if self.pending and rng.random() < self.newest:  # loads end in any order, the first of many perhaps last
            choice = len(self.pending) - 1
        (self.pending.pop(choice) if choice < len(self.pending) else pipes[choice - len(self.pending)].pop(0))()
        return True

    def _clusters(self) -> Iterator[tuple[int, int, int]]:
        """The first CTA of each."""
        grid = self.grid
        counts = [-(-a // b) for a, b in zip(grid.ctas, grid.cluster, strict=True)]
        if any(a % b for a, b in zip(grid.ctas, grid.cluster, strict=True)):
            raise Fault(f"a grid of {grid.ctas} in clusters of {grid.cluster}")
        for z, y, x in np.ndindex(counts[2], counts[1], counts[0]):
            yield x * grid.cluster[0], y * grid.cluster[1], z * grid.cluster[2]

    def _cluster(self, code: Code, first: tuple[int, int, int]) -> Cluster:
        """Its CTAs, about to begin."""
        grid, cluster = self.grid, Cluster()
        threads = int(np.prod(grid.threads))
        for z, y, x in np.ndindex(grid.cluster[2], grid.cluster[1], grid.cluster[0]):
            block = (first[0] + x, first[1] + y, first[2] + z)
            rank = len(cluster.ctas)
            cta = Cta(block, rank, SharedMemory(rank, grid.shared_bytes + DYNAMIC), cluster)
            cta.warps = [Warp(code, cta, number, self) for number in range(-(-threads // LANES))]
            cluster.ctas.append(cta)
        return cluster

    def _able(self, running: list[Warp]) -> Warp | None:
        """One that does not wait, drawn."""
        first = self.rng.randrange(len(running))
        for warp in (*running[first:], *running[:first]):
            if warp.blocked is None or warp.blocked():
                return warp
        return None

    def _some(self, running: list[Warp]) -> None:
        """Run a slice of a warp that can, or something that is pending."""
        warp = self._able(running)
        if warp is None and self._work(self.rng):
            return
        self.idle = self.idle + 1 if warp is None else 0
        impatient = [each for each in running if not each.patient] if warp is None else []
        if impatient and self.idle < _MOST_IDLE:
            warp = self.rng.choice(impatient)
        if warp is None:
            where = {
                f"CTA {warp.cta.block} warp {warp.number}: {warp.code.kernel.instructions[warp.place].text}"
                for warp in running
            }
            raise Fault("nobody can go on: " + "; ".join(sorted(where)[:6]))
        warp.blocked, warp.patient = None, True
        if self.rng.random() < 0.3:
            self._work(self.rng)
        if self.rng.random() < 0.2:
            warp.early(self.rng)
        self.steps += warp.run()
        if warp.done:
            warp.cta.cluster.look()
            warp.late(warp.products, 0)
            for groups in (warp.bulk, warp.copies):
                groups.append([])
                warp.late(groups, 0)
        if self.steps > _MOST_STEPS:
            raise Fault(f"it has not ended after {_MOST_STEPS:,} instructions of warps")
