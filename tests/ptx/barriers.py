"""Barriers: of warps, of CTAs by name, of clusters, and mbarriers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .parse import Instruction
from .steps import LANES, WAIT, Step, require_all

if TYPE_CHECKING:
    from .code import Code
    from .machine import Warp


def barrier(code: Code, given: Instruction) -> Step:
    if given.words[1] == "warp":
        members = code.value(given.operands[0], "u32")
        return lambda warp: require_all(warp, given, members(warp))
    if given.opcode == "barrier" and given.words[1] == "cluster":
        return _cluster_barrier(given)
    number = code.value(given.operands[0], "u32")
    count = code.value(given.operands[1], "u32") if len(given.operands) > 1 else None
    waits = "arrive" not in given.words

    def step(warp: Warp) -> Any:
        require_all(warp, given)
        cta, name = warp.cta, int(number(warp)[0])
        mine = cta.arrive(name, LANES * len(cta.warps) if count is None else int(count(warp)[0]))
        if not waits or cta.rounds.get(name, 0) > mine:
            return None
        warp.blocked = lambda: cta.rounds.get(name, 0) > mine
        return WAIT

    return step


def _cluster_barrier(given: Instruction) -> Step:
    def arrive(warp: Warp) -> None:
        warp.cluster_round = warp.cta.cluster.arrive(warp)

    def wait(warp: Warp) -> Any:
        cluster, mine = warp.cta.cluster, warp.cluster_round
        if cluster.rounds > mine:
            return None
        warp.blocked = lambda: cluster.rounds > mine
        return WAIT

    return arrive if given.words[2] == "arrive" else wait


def mbarrier(code: Code, given: Instruction) -> Step:
    how = given.words[1]
    if how == "init":
        place, count = code.address(given.operands[0]), code.value(given.operands[1], "u32")

        def initialise(warp: Warp) -> None:
            for lane in warp.active():
                warp.cta.shared.initialise(int(place(warp)[lane]), int(count(warp)[lane]))

        return initialise
    if how in ("try_wait", "test_wait"):
        return _mbarrier_wait(code, given)
    if how in ("expect_tx", "arrive"):
        return _mbarrier_arrive(code, given)
    if how == "inval":
        return lambda warp: None
    raise NotImplementedError(given.text)


def _mbarrier_wait(code: Code, given: Instruction) -> Step:
    put, place, parity = (
        code.target(given.operands[0], "pred"),
        code.address(given.operands[1]),
        code.value(given.operands[2], "u32"),
    )

    def wait(warp: Warp) -> Any:
        lanes = warp.active()
        waited = {(int(place(warp)[lane]), int(parity(warp)[lane])) for lane in lanes}
        barriers = [(warp.cta.shared.barrier(address), bit) for address, bit in waited]
        passed = all(barrier.passed(bit) for barrier, bit in barriers)
        put(warp, np.full(LANES, passed))
        if passed:
            return None
        # It need not wait: a kernel may ask in advance, and has then other things to do.
        warp.blocked, warp.patient = lambda: all(barrier.passed(bit) for barrier, bit in barriers), False
        return WAIT

    return wait


def _mbarrier_arrive(code: Code, given: Instruction) -> Step:
    expects = "expect_tx" in given.words
    operands = [word for word in given.operands if word.startswith("[")]
    place = code.address(operands[0])
    after = given.operands[given.operands.index(operands[0]) + 1 :]
    more = code.value(after[0], "u32") if after else None
    arrives = "arrive" in given.words

    def arrive(warp: Warp) -> None:
        for lane in warp.active():
            address = int(place(warp)[lane])
            barrier = warp.cta.cluster.shared(address).barrier(address)
            if expects:
                assert more is not None
                barrier.expect(int(more(warp)[lane]))
            if arrives:
                barrier.arrive(1 if expects or more is None else int(more(warp)[lane]))

    return arrive
