"""Loads, stores and atomics of lanes, of global and of shared memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import TYPES, Values
from .memory import SharedMemory, aligned, as_bytes
from .parse import Instruction
from .steps import LANES, Step

if TYPE_CHECKING:
    from .code import Code
    from .machine import Warp


def _elements(given: Instruction) -> tuple[str, int]:
    """The type of an access, and how many each lane has."""
    kind = given.words[-1]
    count = next((int(word[1:]) for word in given.words if re.fullmatch(r"v\d", word)), 1)
    return kind, count


def load(code: Code, given: Instruction) -> Step:
    kind, count = _elements(given)
    puts, to = code.targets(given.operands[0], kind), TYPES[kind]
    size = np.dtype(to).itemsize
    if "param" in given.words:
        match = re.fullmatch(r"\[([\w$]+)(?:\+(\d+))?\]", given.operands[1])
        if match and match[1] in code.offsets:
            offset = code.offsets[match[1]] + int(match[2] or 0)

            def of_parameters(warp: Warp) -> None:
                data = np.frombuffer(warp.machine.parameters, np.uint8, size * count, offset).view(to)
                for put, value in zip(puts, data, strict=True):
                    put(warp, np.full(LANES, value, to))

            return of_parameters
    shared = any(word.startswith("shared") for word in given.words)
    place = code.address(given.operands[1])

    def step(warp: Warp) -> None:
        lanes = warp.active()
        addresses = place(warp)[lanes]
        aligned(addresses, size * count)
        memory = _shared(warp, addresses, given) if shared else warp.machine.memory
        found = memory.load(addresses, size * count).view(to).reshape(len(lanes), count)
        for i, put in enumerate(puts):
            values = np.zeros(LANES, to)
            values[lanes] = found[:, i]
            put(warp, values)

    return step


def store(code: Code, given: Instruction) -> Step:
    if "async" in given.words:
        return _store_async(code, given)
    kind, count = _elements(given)
    place, values = code.address(given.operands[0]), code.vector(given.operands[1], kind)
    shared = any(word.startswith("shared") for word in given.words)
    size = np.dtype(TYPES[kind]).itemsize * count

    def step(warp: Warp) -> None:
        lanes = warp.active()
        addresses = place(warp)[lanes]
        aligned(addresses, size)
        data = as_bytes(np.stack([value(warp)[lanes] for value in values], 1))
        memory = _shared(warp, addresses, given) if shared else warp.machine.memory
        memory.store(addresses, data)

    return step


def _store_async(code: Code, given: Instruction) -> Step:
    """To a CTA of the cluster, whose mbarrier is told how many bytes came."""
    kind, _ = _elements(given)
    place, values = code.address(given.operands[0]), code.vector(given.operands[1], kind)
    barrier = code.address(given.operands[2])

    def step(warp: Warp) -> None:
        lanes, cluster = warp.active(), warp.cta.cluster
        data = as_bytes(np.stack([value(warp)[lanes] for value in values], 1))
        for address, at, row in zip(place(warp)[lanes], barrier(warp)[lanes], data, strict=True):
            warp.machine.pending.append(_arrival(cluster.shared(int(address)), int(address), int(at), row.copy()))

    def _arrival(memory: SharedMemory, address: int, at: int, row: Values) -> Callable[[], None]:
        def arrive() -> None:
            memory.store(np.array([address]), row[None])
            memory.barrier(at).complete(len(row))

        return arrive

    return step


def _shared(warp: Warp, addresses: Values, given: Instruction) -> SharedMemory:
    """The CTA's own, or of the cluster that of the one that the addresses are of."""
    if "shared_cluster" in given.words:
        return warp.cta.cluster.shared(int(addresses[0]))
    return warp.cta.shared


def atomic(code: Code, given: Instruction) -> Step:
    """atom and red: of lanes one after the other."""
    kind = given.words[-1]
    combine: dict[str, Callable[[Any, Any], Any]] = {
        "add": lambda a, b: a + b,
        "min": min,
        "max": max,
        "exch": lambda a, b: b,
        "or": lambda a, b: a | b,
        "and": lambda a, b: a & b,
        "inc": lambda a, b: a.dtype.type(0) if a >= b else a + a.dtype.type(1),
    }
    names = [word for word in given.words if word in combine or word == "cas"]
    to, result = TYPES[kind], given.opcode == "atom"
    put = code.target(given.operands[0], kind) if result else None
    rest = given.operands[1:] if result else given.operands
    place, operands = code.address(rest[0]), [code.value(word, kind) for word in rest[1:]]
    shared = any(word.startswith("shared") for word in given.words)

    def step(warp: Warp) -> None:
        lanes, found = warp.active(), np.zeros(LANES, to)
        addresses, given_values = place(warp), [operand(warp) for operand in operands]
        for lane in lanes:
            address = int(addresses[lane])
            if shared:
                memory = warp.cta.cluster.shared(address)
                offset = memory.offset(address, np.dtype(to).itemsize)
                at = memory.data[offset : offset + np.dtype(to).itemsize].view(to)
            else:
                at = warp.machine.memory.bytes_of(address, np.dtype(to).itemsize, True).view(to)
            found[lane] = at[0]
            if names[0] == "cas":
                at[0] = given_values[1][lane] if at[0] == given_values[0][lane] else at[0]
            else:
                with np.errstate(over="ignore"):
                    at[0] = combine[names[0]](at[0], given_values[0][lane])
        if put is not None:
            put(warp, found)

    return step
