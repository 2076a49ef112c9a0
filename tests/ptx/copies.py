"""Copies that are under way while a warp goes on: cp.async and TMA's tensors; answers of cluster launch control."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import tensor_map
from .arithmetic import Values
from .memory import Fault, SharedMemory, aligned
from .parse import Instruction
from .steps import Step

if TYPE_CHECKING:
    from .code import Code
    from .machine import Cta, Warp


def copy(code: Code, given: Instruction) -> Step:
    words = given.words
    if "bulk" in words and "tensor" in words and "prefetch" in words:
        return lambda warp: None
    if "bulk" in words and "tensor" in words:
        to_shared = next(word for word in words if word.startswith(("shared", "global"))).startswith("shared")
        return _tensor_load(code, given) if to_shared else _tensor_store(code, given)
    if "commit_group" in words:
        return committed("bulk" if "bulk" in words else "copies")
    if "wait_group" in words or "wait_all" in words:
        return waited("bulk" if "bulk" in words else "copies", int(given.operands[0], 0) if given.operands else 0)
    if "mbarrier" in words:
        return _copies_arrive(code, given)
    if "bulk" not in words:
        return _copy_lanes(code, given)
    raise NotImplementedError(given.text)


def committed(kind: str) -> Step:
    return lambda warp: warp.late(getattr(warp, kind), -1)


def waited(kind: str, left: int) -> Step:
    return lambda warp: warp.late(getattr(warp, kind), left)


def _tensor_operands(code: Code, word: str) -> tuple[Any, list[Any]]:
    """Of "[map, {c0, c1}]": where the map is, and coordinates."""
    match = re.fullmatch(r"\[\s*([^,]+?)\s*,\s*\{(.*)\}\s*\]", word)
    assert match, word
    return code.value(match[1], "u64"), [code.value(each.strip(), "s32") for each in match[2].split(",")]


def _tensor_load(code: Code, given: Instruction) -> Step:
    target, (where, coordinates), barrier = (
        code.address(given.operands[0]),
        _tensor_operands(code, given.operands[1]),
        code.address(given.operands[2]),
    )
    several = any(word.startswith("multicast") for word in given.words)
    mask = code.value(given.operands[3], "u16") if several else None
    paired = "cta_group_2" in given.words

    def load(warp: Warp) -> None:
        for lane in warp.active():
            of = warp.machine.tensor_map(int(where(warp)[lane]))
            at = tuple(int(c(warp)[lane]) for c in coordinates)
            address, full = int(target(warp)[lane]), int(barrier(warp)[lane])
            own = warp.cta
            ctas = own.cluster.ctas if mask is not None else [own]
            if mask is not None:
                bits = int(mask(warp)[lane])
                if bits >> len(ctas):
                    raise Fault(f"{given.text}: a mask of {bits:#x}, of {len(ctas)} CTAs")
                ctas = [cta for cta in ctas if bits >> cta.rank & 1]
            for cta in ctas:
                warp.machine.pending.append(_come(of, at, warp, cta, address, full))

    def _come(
        of: tensor_map.TensorMap, at: tuple[int, ...], warp: Warp, cta: Cta, address: int, full: int
    ) -> Callable[[], None]:
        # The same offsets, whichever CTA's addresses they were given as; of a pair one's barrier may count for both.
        memory, rank = cta.shared, cta.rank
        if paired:
            rank = rank & ~1 | full >> 24 & 1
        there = cta.cluster.ctas[rank].shared
        barrier = there.barrier(there.own(full))
        here = memory.own(address)

        def come() -> None:
            tensor_map.load(of, at, warp.machine.memory, memory, here)
            barrier.complete(of.bytes)

        return come

    return load


def _tensor_store(code: Code, given: Instruction) -> Step:
    (where, coordinates), source = _tensor_operands(code, given.operands[0]), code.address(given.operands[1])

    def store(warp: Warp) -> None:
        for lane in warp.active():
            of = warp.machine.tensor_map(int(where(warp)[lane]))
            at, address = tuple(int(c(warp)[lane]) for c in coordinates), int(source(warp)[lane])
            warp.bulk[-1].append(_leave(of, at, warp, address))

    def _leave(of: tensor_map.TensorMap, at: tuple[int, ...], warp: Warp, address: int) -> Callable[[], None]:
        return lambda: tensor_map.store(of, at, warp.machine.memory, warp.cta.shared, address)

    return store


def _copy_lanes(code: Code, given: Instruction) -> Step:
    """cp.async: a few bytes of each lane; with fewer source bytes than that the rest are zeros."""
    target, source = code.address(given.operands[0]), code.address(given.operands[1])
    size = int(given.operands[2], 0)
    given_bytes = code.value(given.operands[3], "u32") if len(given.operands) > 3 else None

    def step(warp: Warp) -> None:
        lanes = warp.active()
        to, of = target(warp)[lanes], source(warp)[lanes]
        aligned(to, size)
        counts = np.full(len(lanes), size) if given_bytes is None else given_bytes(warp)[lanes].astype(np.int64)

        def come() -> None:
            for address, at, count in zip(to, of, counts, strict=True):
                row = np.zeros(size, np.uint8)
                if count:
                    row[:count] = warp.machine.memory.bytes_of(int(at), int(count), False)
                warp.cta.shared.store(np.array([address]), row[None])

        warp.copies[-1].append(come)

    return step


def _copies_arrive(code: Code, given: Instruction) -> Step:
    """An mbarrier is arrived at by each lane when its copies so far are there."""
    place = code.address(given.operands[0])

    def arrive(warp: Warp) -> None:
        lanes = warp.active()
        addresses = [int(address) for address in place(warp)[lanes]]
        so_far = [each for group in warp.copies for each in group]
        warp.copies = [[]]

        def come() -> None:
            for each in so_far:
                each()
            for address in addresses:
                warp.cta.shared.barrier(address).arrive()

        warp.machine.pending.append(come)

    return arrive


def cluster_launch(code: Code, given: Instruction) -> Step:
    """clusterlaunchcontrol: a CTA that runs takes the work of a cluster that has not begun."""
    if given.words[1] == "query_cancel":
        kind = given.words[-2]
        put, number = code.target(given.operands[0], kind), code.numbers[given.operands[1]]
        what = given.words[2]
        axis = "xyz".find(what[-1]) if what.startswith("get_first_ctaid") else -1

        def query(warp: Warp) -> None:
            words = np.ascontiguousarray(warp.registers[number]).view(np.uint32)
            put(warp, words[:, axis] if axis >= 0 else words[:, 3] != 0)

        return query
    place, barrier = code.address(given.operands[0]), code.address(given.operands[1])
    everywhere = "multicast_cluster_all" in given.words

    def cancel(warp: Warp) -> None:
        for lane in warp.active():
            block = warp.machine.next_block()
            answer = np.array([0, 0, 0, 0] if block is None else [*block, 1], np.uint32).view(np.uint8)
            address, at = int(place(warp)[lane]), int(barrier(warp)[lane])
            for cta in warp.cta.cluster.ctas if everywhere else [warp.cta]:
                warp.machine.pending.append(_answer(cta.shared, address, at, answer))

    def _answer(memory: SharedMemory, address: int, at: int, answer: Values) -> Callable[[], None]:
        def come() -> None:
            memory.store(np.array([memory.own(address)]), answer[None])
            memory.barrier(memory.own(at)).complete(len(answer))

        return come

    return cancel
