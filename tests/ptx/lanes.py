"""Instructions in which the lanes of a warp see each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import TYPES
from .parse import Instruction
from .steps import LANES, Step, require_all

if TYPE_CHECKING:
    from .code import Code
    from .machine import Warp


def shuffled(code: Code, given: Instruction) -> Step:
    how = given.words[2]
    target, _, predicate = given.operands[0].partition("|")
    put = code.target(target, "b32")
    put_inside = code.target(predicate, "pred") if predicate else None
    value, by, clamp, members = (
        code.value(word, "b32" if i == 0 else "u32") for i, word in enumerate(given.operands[1:])
    )

    def step(warp: Warp) -> None:
        require_all(warp, given, members(warp))
        lanes, b, c = np.arange(LANES), by(warp).astype(np.int64), clamp(warp).astype(np.int64)
        segment = c >> 8 & 31
        most = (lanes & segment) | (c & 31 & ~segment)
        least = lanes & segment
        if how == "idx":
            source = least | (b & 31 & ~segment)
            inside = source <= most
        elif how == "up":
            source = lanes - b
            inside = source >= most
        elif how == "down":
            source = lanes + b
            inside = source <= most
        else:
            source = lanes ^ b
            inside = source <= most
        source = np.where(inside, source, lanes)
        put(warp, value(warp)[source])
        if put_inside is not None:
            put_inside(warp, inside)

    return step


def voted(code: Code, given: Instruction) -> Step:
    how = given.words[2]
    put = code.target(given.operands[0], given.words[-1])
    source, members = code.value(given.operands[1].lstrip("!"), "pred"), code.value(given.operands[2], "u32")
    flipped = given.operands[1].startswith("!")

    def step(warp: Warp) -> None:
        require_all(warp, given, members(warp))
        chosen = (source(warp) ^ flipped) & warp.mask
        if how == "ballot":
            put(warp, np.full(LANES, sum(1 << int(lane) for lane in np.flatnonzero(chosen)), np.uint32))
        else:
            there = warp.active()
            put(warp, np.full(LANES, chosen[there].all() if how == "all" else chosen[there].any()))

    return step


def elected(code: Code, given: Instruction) -> Step:
    _, _, predicate = given.operands[0].partition("|")
    put = code.target(predicate, "pred")
    members = code.value(given.operands[1], "u32")

    def step(warp: Warp) -> None:
        require_all(warp, given, members(warp))
        put(warp, np.arange(LANES) == warp.active()[0])

    return step


def reduced(code: Code, given: Instruction) -> Step:
    kind = given.words[-1]
    put, value = code.target(given.operands[0], kind), code.value(given.operands[1], kind)
    how = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}

    def step(warp: Warp) -> None:
        found = how[given.words[2]].reduce(value(warp)[warp.active()])
        put(warp, np.full(LANES, found, TYPES[kind]))

    return step
