"""WGMMA, mma.sync, and the matrices that ldmatrix and stmatrix move."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from . import tensor_cores
from .copies import committed, waited
from .memory import Fault, aligned
from .parse import Instruction
from .steps import Step, require_all

if TYPE_CHECKING:
    from .code import Code
    from .machine import Warp


def wgmma(code: Code, given: Instruction) -> Step:
    how = given.words[1]
    if how == "fence":
        return lambda warp: None
    if how == "commit_group":
        return committed("products")
    if how == "wait_group":
        return waited("products", int(given.operands[0], 0))
    match = re.fullmatch(r"m64n(\d+)k(\d+)", given.words[4])
    assert match
    columns, depth, kind = int(match[1]), int(match[2]), given.words[6]
    k_bytes = depth * (1 if kind == "e4m3" else 2)
    sums = [code.numbers[each] for each in _names(given.operands[0])]
    in_registers = "{" in given.operands[1]
    a = [code.numbers[each] for each in _names(given.operands[1])] if in_registers else []
    a_word = None if in_registers else code.value(given.operands[1], "u64")
    b_word, scale = code.value(given.operands[2], "u64"), code.value(given.operands[3], "pred")
    flags = [int(each, 0) for each in given.operands[4:]]
    signs, majors = flags[:2], flags[2:]
    if any(sign != 1 for sign in signs):
        raise NotImplementedError(given.text)
    a_transposed = bool(majors[0]) if len(majors) == 2 else False
    b_transposed = bool(majors[-1]) if majors else False

    def product(warp: Warp) -> None:
        require_all(warp, given)
        if warp.number // 4 * 4 + 3 >= len(warp.cta.warps):
            raise Fault(f"{given.text}: in a warp group of fewer than four warps")
        memory, quarter = warp.cta.shared, warp.number % 4
        of_b = tensor_cores.Descriptor.read(int(b_word(warp)[0]))
        of_a = None if a_word is None else tensor_cores.Descriptor.read(int(a_word(warp)[0]))
        adds = bool(scale(warp)[0])

        def compute() -> None:
            if of_a is None:
                left = tensor_cores.a_registers([warp.registers[each] for each in a], kind)
            else:
                rows = range(16 * quarter, 16 * quarter + 16)
                left = of_a.matrix(memory, rows, k_bytes, a_transposed, kind)
            right = of_b.matrix(memory, range(columns), k_bytes, b_transposed, kind)
            found = left @ right.T
            if adds:
                found = found + tensor_cores.sums_of([warp.registers[each] for each in sums])
            for number, values in zip(sums, tensor_cores.registers_of(found), strict=True):
                warp.registers[number] = values

        warp.products[-1].append(compute)

    return product


def _names(word: str) -> list[str]:
    return [each.strip() for each in word.strip("{}").split(",")]


def mma(code: Code, given: Instruction) -> Step:
    """mma.sync of m16n8."""
    kind = given.words[-2]
    puts = code.targets(given.operands[0], "b32")
    a, b, c = (code.vector(word, "b32") for word in given.operands[1:4])
    if given.words[-1] != "f32" or given.words[-4] != "f32":
        raise NotImplementedError(given.text)

    def product(warp: Warp) -> None:
        require_all(warp, given)
        left = tensor_cores.a_registers([each(warp) for each in a], kind)
        right = tensor_cores.b_registers([each(warp) for each in b], kind)
        found = left @ right.T + tensor_cores.sums_of([each(warp) for each in c])
        for put, values in zip(puts, tensor_cores.registers_of(found), strict=True):
            put(warp, values)

    return product


def matrices(code: Code, given: Instruction) -> Step:
    """ldmatrix and stmatrix."""
    count, transposed = (
        next(int(word[1:]) for word in given.words if re.fullmatch(r"x\d", word)),
        "trans" in given.words,
    )
    loads = given.opcode == "ldmatrix"
    registers, place = (given.operands if loads else given.operands[::-1])[:2]
    where = code.address(place)
    puts, values = (code.targets(registers, "b32"), []) if loads else ([], code.vector(registers, "b32"))

    def step(warp: Warp) -> None:
        require_all(warp, given)
        addresses = where(warp)
        aligned(addresses[: 8 * count], 16)
        if loads:
            for put, found in zip(
                puts, tensor_cores.load_matrices(warp.cta.shared, addresses, count, transposed), strict=True
            ):
                put(warp, found)
        else:
            tensor_cores.store_matrices(warp.cta.shared, addresses, [each(warp) for each in values], transposed)

    return step
