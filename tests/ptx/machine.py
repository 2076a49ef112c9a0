"""Warps, CTAs and clusters of a launch, and the order in which they and what is asynchronous run.

A warp runs the lanes that are furthest behind, so lanes that parted meet again where their paths do. It gives way where
it waits, and now and then; who is next is drawn.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import effects
from .arithmetic import TYPES, Values, function
from .memory import CTA_SHIFT, DYNAMIC, SHARED_BYTES, Fault, GlobalMemory, SharedMemory
from .parse import Instruction, Kernel
from .tcgen05 import TensorMemory
from .tensor_map import TensorMap

LANES = 32
_SLICE = 400  # instructions that a warp runs at a time, at most
_MOST_STEPS = 40_000_000  # of a launch
_MOST_IDLE = 5_000  # slices of warps that ask for what does not come
_ALL = np.ones(LANES, np.bool_)
_WIDE = "two of 64 bits"  # what a register of 128 bits is
_BANKS: dict[int, Any] = {1: np.bool_, 8: np.uint16, 16: np.uint16, 32: np.uint32, 64: np.uint64, 128: _WIDE}

Operand = Callable[["Warp"], Values]
Step = Callable[["Warp"], Any]


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
        self.code, self.cta, self.number, self.machine = code, cta, number, machine
        self.registers: list[Values] = code.empty_registers()
        self.mask, self.full = _ALL, True
        self.paths: list[tuple[int, Values]] = [(0, _ALL)]
        self.apart: set[int] = set()  # where some lanes are that wait for others of the warp
        self.blocked: Callable[[], bool] | None = None
        self.patient = True  # whether it can go on only where it is not blocked
        self.threads = number * LANES + np.arange(LANES)
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
            except effects.Apart:
                if alone:
                    raise
                self.apart.add(self.place)
                result, steps = [(self.place, self.mask)], 1
            count += steps
            if result is effects.WAIT:
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


class Code:
    """A kernel's instructions as functions of a warp."""

    def __init__(self, kernel: Kernel, offsets: Sequence[int], rng: random.Random) -> None:
        self.kernel, self.rng = kernel, rng
        names = list(kernel.registers)
        self.numbers = {name: place for place, name in enumerate(names)}
        self.banks = [_BANKS[kernel.registers[name]] for name in names]
        self.offsets = dict(zip(kernel.parameters, offsets, strict=True))
        self.steps: list[Step] = [self._step(each) for each in kernel.instructions]

    def empty_registers(self) -> list[Values]:
        return [np.zeros(LANES, bank) if bank is not _WIDE else np.zeros((LANES, 2), np.uint64) for bank in self.banks]

    # --- operands ---

    def value(self, word: str, kind: str) -> Operand:
        """What an operand is, viewed as `kind`; of a vector an error."""
        to = TYPES[kind]
        if word in self.numbers:
            number, bank = self.numbers[word], self.banks[self.numbers[word]]
            if bank is to:
                return lambda warp: warp.registers[number]
            if np.dtype(bank).itemsize == np.dtype(to).itemsize and bank is not np.bool_:
                return lambda warp: warp.registers[number].view(to)
            if np.dtype(bank).itemsize > np.dtype(to).itemsize:  # the lower bits
                unsigned = np.dtype(f"u{np.dtype(to).itemsize}").type
                return lambda warp: warp.registers[number].astype(unsigned).view(to)
            raise NotImplementedError(f"{word} as {kind}")
        if word in _SPECIAL:
            find = _SPECIAL[word]
            return lambda warp: find(warp).astype(np.uint32).view(to) if to is not np.uint64 else find(warp).astype(to)
        if word == "__dynamic_shmem__0" or word.startswith("__dynamic_shmem"):
            return lambda warp: np.full(LANES, warp.cta.shared.base + DYNAMIC, to)
        if word in self.offsets:
            offset = self.offsets[word]
            return lambda warp: np.full(LANES, offset, to)
        constant = _constant(word, kind)
        return lambda warp: constant

    def target(self, word: str, kind: str) -> Callable[[Warp, Values], None]:
        """Where a result of `kind` goes; "_" is nowhere."""
        if word == "_":
            return lambda warp, values: None
        number = self.numbers[word]
        bank = self.banks[number]
        unsigned = np.dtype(f"u{np.dtype(TYPES[kind]).itemsize}").type

        def put(warp: Warp, values: Values) -> None:
            if bank is not np.bool_:
                values = np.ascontiguousarray(values)
                values = values.view(unsigned)
                if values.dtype != bank:
                    signed = kind[0] == "s"
                    values = (
                        values.view(TYPES[kind]).astype(np.dtype(f"i{np.dtype(bank).itemsize}")) if signed else values
                    )
                    values = values.astype(bank)
            warp.set(number, values)

        return put

    def vector(self, word: str, kind: str) -> list[Operand]:
        """Of a register, or of several in braces."""
        return [self.value(each, kind) for each in _parts(word)]

    def targets(self, word: str, kind: str) -> list[Callable[[Warp, Values], None]]:
        return [self.target(each, kind) for each in _parts(word)]

    def address(self, word: str, kind: str = "") -> Operand:
        """Of "[register+offset]"."""
        inner = word.strip("[]")
        match = re.fullmatch(r"(.+?)([+-]+\d+)?", inner)
        assert match
        base, offset = match[1], int((match[2] or "0").replace("+-", "-"))
        if not kind:
            wide = base in self.numbers and self.banks[self.numbers[base]] is np.uint64
            kind = "u64" if wide else "u32"
        of = self.value(base, kind)
        more = np.array(offset & (1 << np.dtype(TYPES[kind]).itemsize * 8) - 1, TYPES[kind])
        return lambda warp: of(warp) + more

    # --- instructions ---

    def _step(self, given: Instruction) -> Step:
        if given.opcode in ("bra", "ret", "exit"):
            return self._jump(given)
        try:
            plain = effects.effect(self, given) if given.opcode in effects.OPCODES else self._arithmetic(given)
        except (NotImplementedError, KeyError) as error:
            plain = _refusal(given, error)
        if not given.predicate:
            return plain
        left_out, name = given.predicate.startswith("!"), given.predicate.lstrip("!")
        number = self.numbers[name]

        def step(warp: Warp) -> Any:
            whole, full = warp.mask, warp.full
            mask = whole & (warp.registers[number] ^ left_out)
            if not mask.any():
                return None
            warp.mask, warp.full = mask, bool(mask.all())
            result = plain(warp)
            warp.mask, warp.full = whole, full
            return result

        return step

    def _arithmetic(self, given: Instruction) -> Step:
        if given.opcode == "mov" and ("{" in given.operands[0] or "{" in given.operands[1]):
            return self._moved(given)
        to, of, compute = function(given.words)
        kinds = (of,) * (len(given.operands) - 1) if isinstance(of, str) else of
        put = self.target(given.operands[0], to)
        operands = [self.value(word, kind) for word, kind in zip(given.operands[1:], kinds, strict=True)]
        if len(operands) == 1:
            (one,) = operands
            return lambda warp: put(warp, compute(one(warp)))
        if len(operands) == 2:
            one, two = operands
            return lambda warp: put(warp, compute(one(warp), two(warp)))
        return lambda warp: put(warp, compute(*[each(warp) for each in operands]))

    def _moved(self, given: Instruction) -> Step:
        """mov between a register and its parts."""
        bits = int(given.words[-1][1:])
        into, source = given.operands
        if bits == 128:
            halves, number = self.vector(source, "u64"), self.numbers[into]
            return lambda warp: warp.set(number, np.stack([half(warp) for half in halves], 1))
        if "{" in source:
            each = f"u{bits // len(_parts(source))}"
            parts, put = self.vector(source, each), self.target(into, f"u{bits}")
            kind = TYPES[f"u{bits}"]

            def pack(warp: Warp) -> None:
                whole = np.stack([part(warp) for part in parts], 1)
                put(warp, np.ascontiguousarray(whole).view(kind)[:, 0])

            return pack
        puts, of = self.targets(into, f"u{bits // len(_parts(into))}"), self.value(source, f"u{bits}")
        kind = TYPES[f"u{bits // len(_parts(into))}"]

        def unpack(warp: Warp) -> None:
            parts = np.ascontiguousarray(of(warp)).view(kind).reshape(LANES, -1)
            for place, put in enumerate(puts):
                put(warp, np.ascontiguousarray(parts[:, place]))

        return unpack

    def _jump(self, given: Instruction) -> Step:
        target = self.kernel.labels[given.operands[0]] if given.opcode == "bra" else None
        ahead = [] if target is None else [target]
        if not given.predicate:
            return lambda warp: [(place, warp.mask) for place in ahead]
        left_out, number = given.predicate.startswith("!"), self.numbers[given.predicate.lstrip("!")]

        def step(warp: Warp) -> Any:
            taken = warp.mask & (warp.registers[number] ^ left_out)
            if not taken.any():
                return None
            found = [(place, taken) for place in ahead]
            stay = warp.mask & ~taken
            if stay.any():
                found.append((warp.place + 1, stay))
            return found

        return step


def _refusal(given: Instruction, error: Exception) -> Step:
    """Of an instruction that is not known: only who runs it needs it."""

    def step(warp: Warp) -> Any:
        raise NotImplementedError(f"{given.text}: {error!r}")

    return step


def _parts(word: str) -> list[str]:
    return [each.strip() for each in word.strip("{}").split(",")]


def _constant(word: str, kind: str) -> Values:
    to = TYPES[kind]
    if match := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})", word):
        bits = np.full(LANES, int(match[1], 16), np.uint32)
        return bits if to is np.uint32 else bits.view(np.float32).astype(to) if to is np.float32 else bits.astype(to)
    if match := re.fullmatch(r"0[dD]([0-9A-Fa-f]{16})", word):
        return np.full(LANES, int(match[1], 16), np.uint64).view(np.float64)
    value = int(word.removesuffix("U"), 0)
    if to is np.bool_:
        return np.full(LANES, bool(value))
    bits = np.dtype(to).itemsize * 8
    return np.full(LANES, value & (1 << bits) - 1, np.dtype(f"u{bits // 8}")).view(to)


def _of_block(pick: Callable[[Warp], int]) -> Operand:
    return lambda warp: np.full(LANES, pick(warp), np.uint32)


_SPECIAL: dict[str, Operand] = {
    "%laneid": lambda warp: np.arange(LANES, dtype=np.uint32),
    "%warpid": _of_block(lambda warp: warp.number),
    "%smid": _of_block(lambda warp: warp.machine.sm_of(warp.cta)),
    "%nsmid": _of_block(lambda warp: int(warp.machine.multiprocessors)),
    "%cluster_ctarank": _of_block(lambda warp: warp.cta.rank),
    "%lanemask_lt": lambda warp: ((1 << np.arange(LANES, dtype=np.int64)) - 1).astype(np.uint32),
    "%tid.x": lambda warp: warp.threads.astype(np.uint32),
    "%tid.y": _of_block(lambda warp: 0),
    "%tid.z": _of_block(lambda warp: 0),
}


def _of_axis(axis: int) -> dict[str, Operand]:
    """Where a CTA is, and how many there are, along an axis."""

    def cta(warp: Warp) -> int:
        return warp.cta.block[axis]

    def ctas(warp: Warp) -> int:
        return warp.machine.grid.ctas[axis]

    def of_cluster(warp: Warp) -> int:
        return warp.machine.grid.cluster[axis]

    found: dict[str, Callable[[Warp], int]] = {
        "ctaid": cta,
        "nctaid": ctas,
        "ntid": lambda warp: warp.machine.grid.threads[axis],
        "cluster_ctaid": lambda warp: cta(warp) % of_cluster(warp),
        "cluster_nctaid": of_cluster,
        "clusterid": lambda warp: cta(warp) // of_cluster(warp),
        "nclusterid": lambda warp: ctas(warp) // of_cluster(warp),
    }
    return {f"%{name}.{'xyz'[axis]}": _of_block(pick) for name, pick in found.items()}


_SPECIAL |= _of_axis(0) | _of_axis(1) | _of_axis(2)


class Machine:
    """Runs launches of kernels over global memory, `together` CTAs at a time."""

    def __init__(self, memory: GlobalMemory, multiprocessors: int, seed: int = 0, together: int = 0) -> None:
        self.memory, self.together = memory, together or multiprocessors
        self.multiprocessors: int = multiprocessors
        self.rng = random.Random(seed)
        self.pending: list[Callable[[], None]] = []  # what may be done at any time
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
        self._maps.clear()
        self._sms.clear()
        code = Code(kernel, offsets, self.rng)
        self._blocks = self._clusters()
        running: list[Warp] = []
        while True:
            while len(self._ctas) < self.together and (block := self.next_block()) is not None:
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
        choice = rng.randrange(len(self.pending) + len(pipes)) if self.pending or pipes else -1
        if choice < 0:
            return False
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
            cta = Cta(block, rank, SharedMemory(rank, min(grid.shared_bytes + DYNAMIC, SHARED_BYTES)), cluster)
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
