"""A kernel's instructions as functions of a warp: operands, results, predicates and branches."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import effects
from .arithmetic import TYPES, Values, function
from .memory import DYNAMIC
from .parse import Instruction, Kernel
from .steps import LANES

if TYPE_CHECKING:
    from .machine import Warp

_WIDE = "two of 64 bits"  # what a register of 128 bits is
_BANKS: dict[int, Any] = {1: np.bool_, 8: np.uint16, 16: np.uint16, 32: np.uint32, 64: np.uint64, 128: _WIDE}

Operand = Callable[["Warp"], Values]
Step = Callable[["Warp"], Any]


class Code:
    """A kernel's instructions as functions of a warp."""

    def __init__(self, kernel: Kernel, offsets: Sequence[int]) -> None:
        self.kernel = kernel
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
