"""Instructions that each lane executes alone, on registers: numpy over the 32 lanes of a warp.

A function gets values of operands, viewed as the instruction's type says, and gives those of the result. Special
functions are computed exactly, not approximated as the hardware does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

Values: TypeAlias = np.ndarray[Any, Any]

TYPES: dict[str, Any] = {
    "pred": np.bool_,
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}").type for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}").type for bits in (8, 16, 32, 64)},
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": np.uint16,
    "bf16x2": np.uint32,
    "f16x2": np.uint32,
}
_WIDER = {"s16": np.int32, "u16": np.uint32, "s32": np.int64, "u32": np.uint64}


def from_bf16(values: Values) -> Values:
    """f32 of bf16's bits."""
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: Values) -> Values:
    """The bits of bf16, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = np.isnan(values)
    return np.where(nan, np.uint32(0x7FFF), rounded).astype(np.uint16)


def _e4m3_values() -> Values:
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    magnitudes = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    found = np.where(bits & 128, -magnitudes, magnitudes).astype(np.float32)
    found[[127, 255]] = np.nan
    return found


E4M3 = _e4m3_values()  # by their bits
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
UE8M0 = np.append(2.0 ** (np.arange(255) - 127.0), np.nan).astype(np.float32)
_E4M3_UP = np.sort(np.unique(E4M3[:127].astype(np.float64)))


def to_e4m3(values: Values) -> Values:
    """The bits of e4m3, to nearest, ties to even, saturated; NaN stays NaN."""
    magnitudes = np.minimum(np.abs(values.astype(np.float64)), 448.0)
    above = np.minimum(np.searchsorted(_E4M3_UP, magnitudes), len(_E4M3_UP) - 1)
    below = np.maximum(above - 1, 0)
    low, high = magnitudes - _E4M3_UP[below], _E4M3_UP[above] - magnitudes
    place = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, below)
    bits = np.where(np.isnan(values), 0x7F, place).astype(np.uint32)
    return bits | (np.signbit(values).astype(np.uint32) << np.uint32(7))


def _pair(low: Values, high: Values, bits: int) -> Values:
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(bits))


def _halves_bf16(operation: Callable[..., Values]) -> Callable[..., Values]:
    """Of both bf16 of a register, rounded once."""

    def both(*operands: Values) -> Values:
        parts = []
        for shift in (0, 16):
            given = [from_bf16(((x >> np.uint32(shift)) & np.uint32(0xFFFF)).astype(np.uint16)) for x in operands]
            # A product of two bf16 is exact in f32, and a sum of it and a third in f64.
            parts.append(to_bf16(operation(*[x.astype(np.float64) for x in given]).astype(np.float32)))
        return _pair(parts[0], parts[1], 16)

    return both


def _halves_f32(operation: Callable[..., Values]) -> Callable[..., Values]:
    """Of both f32 of a register, rounded once."""

    def both(*operands: Values) -> Values:
        given = [np.ascontiguousarray(x).view(np.float32).astype(np.float64) for x in operands]
        return operation(*given).astype(np.float32).view(np.uint64)

    return both


def _wide(a: Values, b: Values, kind: str) -> Values:
    return a.astype(_WIDER[kind]) * b.astype(_WIDER[kind])


def _high(a: Values, b: Values, kind: str) -> Values:
    if kind == "u64":
        products = [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]
        return np.array(products, np.uint64)
    return (_wide(a, b, kind) >> TYPES_BITS[kind]).astype(TYPES[kind])


TYPES_BITS = {kind: np.dtype(of).itemsize * 8 for kind, of in TYPES.items()}


def _quotient(a: Values, b: Values) -> Values:
    """Rounded to zero, as the hardware does."""
    if a.dtype.kind == "u":
        return a // b
    return (np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64)) * np.sign(a) * np.sign(b)).astype(a.dtype)


def _shifted(a: Values, by: Values, left: bool) -> Values:
    """Shifts beyond the width give zeros, or signs."""
    bits = a.dtype.itemsize * 8
    by = by.astype(np.uint32)
    most = np.minimum(by, np.uint32(bits - 1)).astype(a.dtype)
    found = a << most if left else a >> most
    if not left and a.dtype.kind == "i":
        return found
    return np.where(by >= bits, a.dtype.type(0), found)


_SIMPLE: dict[str, Callable[..., Values]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "neg": lambda a: -a,
    "abs": np.abs,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "mov": lambda a: a,
    "div": lambda a, b: a / b if a.dtype.kind == "f" else _quotient(a, b),
    "rem": lambda a, b: a - _quotient(a, b) * b,
    "rcp": lambda a: np.float32(1) / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: np.float32(1) / np.sqrt(a),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
    "shl": lambda a, by: _shifted(a, by, True),
    "shr": lambda a, by: _shifted(a, by, False),
    "popc": lambda a: np.array([int(x).bit_count() for x in a], np.uint32),
    "cvta": lambda a: a,
}
_COMPARISONS: dict[str, Callable[[Values, Values], Values]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "neu": lambda a, b: a != b,
}


def _lop3(a: Values, b: Values, c: Values, table: int) -> Values:
    found = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            found |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return found


def _dot_of_bytes(a: Values, b: Values, c: Values) -> Values:
    """Four products of signed bytes, and what they are added to."""
    left, right = (np.ascontiguousarray(x).view(np.int8).reshape(-1, 4).astype(np.int32) for x in (a, b))
    return (left * right).sum(1, dtype=np.int32) + c


def _selected(a: Values, b: Values, first: Values) -> Values:
    found: Values = np.where(first, a, b)
    return found


def _permuted(a: Values, b: Values, selector: Values) -> Values:
    whole = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    found = np.zeros_like(a)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = (whole >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
        signs = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        byte = np.where(nibble & np.uint32(8), signs, byte)
        found |= byte.astype(np.uint32) << np.uint32(8 * place)
    return found


def conversion(words: tuple[str, ...]) -> tuple[str, str, Callable[..., Values]]:
    """Of cvt: the result's type, the operands', and what it does."""
    to, of = words[-2], words[-1]
    if (to, of) == ("f16", "s16"):
        return "f16", "s16", lambda a: a.astype(np.float16)
    if (to, of) == ("bf16x2", "s2f6x2"):
        return "b32", "b16", _from_s2f6
    if to == "e4m3x2":
        return "b16", "f32", lambda a, b: (to_e4m3(a) << np.uint32(8) | to_e4m3(b)).astype(np.uint16)
    if to == "bf16x2":
        return "b32", "f32", lambda a, b: _pair(to_bf16(b), to_bf16(a), 16)
    if to == "f16x2" and of == "e4m3x2":
        return "b32", "b16", lambda a: _halves_of_e4m3(a)
    if to == "f16x2":
        return "b32", "f32", lambda a, b: _pair(_f16_bits(b), _f16_bits(a), 16)
    if to == "bf16":
        return "b16", "f32", to_bf16
    if of == "bf16":
        return "f32", "b16", from_bf16
    if "f16" in (to, of) and {to, of} <= {"f16", "f32"}:
        kind = TYPES[to]
        return to, of, lambda a: a.astype(kind)
    kind = TYPES[to]
    if of[0] == "f" and to[0] in "su":
        if "rzi" not in words:
            raise NotImplementedError(".".join(words))
        return to, of, lambda a: np.trunc(a).astype(kind)
    return to, of, lambda a: a.astype(kind)


def _f16_bits(values: Values) -> Values:
    return values.astype(np.float16).view(np.uint16)


def _halves_of_e4m3(a: Values) -> Values:
    return _pair(_f16_bits(E4M3[a & np.uint16(255)]), _f16_bits(E4M3[a >> np.uint16(8)]), 16)


def function(words: tuple[str, ...]) -> tuple[str, tuple[str, ...] | str, Callable[..., Values]]:
    """The type of the result, those of operands (one word where all have it), and what the instruction does."""
    opcode, kind = words[0], words[-1]
    if opcode == "cvt":
        return conversion(words)
    if kind == "bf16x2" and opcode in _PAIRS:
        return "b32", "b32", _halves_bf16(_PAIRS[opcode])
    if opcode == "add" and kind == "f32x2" and words[-2] in ("bf16x2", "f16x2"):
        return "b64", ("b32", "b64"), _widening_add(words[-2])
    if kind == "f32x2":
        return "b64", "b64", _halves_f32(_PAIRS[opcode])
    if opcode == "setp":
        return "pred", kind, _COMPARISONS[words[1]]
    if opcode == "selp":
        return kind, (kind, kind, "pred"), _selected
    if opcode == "mul" and "wide" in words:
        to = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}[kind]
        return to, kind, lambda a, b: _wide(a, b, kind)
    if opcode == "mul" and "hi" in words:
        return kind, kind, lambda a, b: _high(a, b, kind)
    if opcode == "mul":
        return kind, kind, lambda a, b: a * b
    if opcode == "mad" and "wide" in words:
        to = {"s32": "s64", "u32": "u64"}[kind]
        return to, (kind, kind, to), lambda a, b, c: _wide(a, b, kind) + c
    if opcode == "mad":
        return kind, kind, lambda a, b, c: a * b + c
    if opcode == "dp4a":
        return "s32", "s32", _dot_of_bytes
    if opcode == "copysign":  # the sign of the first operand
        return kind, kind, lambda a, b: np.copysign(b, a)
    if opcode == "fma" and words[-2:] in (("f32", "bf16"), ("f32", "f16")):
        return "f32", ("b16", "b16", "f32"), _mixed_fma(kind)
    if opcode == "fma":
        return kind, kind, lambda a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype)
    if opcode in ("min", "max"):
        pick = (np.fmin if opcode == "min" else np.fmax) if kind == "f32" else getattr(np, f"{opcode}imum")
        if "relu" in words:
            return kind, kind, lambda a, b: np.maximum(pick(a, b), 0)
        return kind, kind, pick
    if opcode in ("shl", "shr"):
        return kind, (kind, "u32"), _SIMPLE[opcode]
    if opcode == "lop3":
        return kind, kind, lambda a, b, c, table: _lop3(a, b, c, int(table[0]))
    if opcode == "prmt":
        return "b32", "b32", _permuted
    if opcode in _SIMPLE:
        return kind, kind, _SIMPLE[opcode]
    raise NotImplementedError(".".join(words))


def _halves(values: Values, kind: str) -> Values:
    """(lanes, 2) in f32 of registers of two 16-bit numbers."""
    pairs = np.ascontiguousarray(values).view(np.uint16).reshape(-1, 2)
    return from_bf16(pairs) if kind == "bf16x2" else pairs.view(np.float16).astype(np.float32)


def _widening_add(kind: str) -> Callable[..., Values]:
    """Two 16-bit numbers to two of 32."""

    def add(a: Values, b: Values) -> Values:
        wide = np.ascontiguousarray(b).view(np.float32).reshape(-1, 2)
        return np.ascontiguousarray(_halves(a, kind) + wide).view(np.uint64)[:, 0]

    return add


def _from_s2f6(pair: Values, scale: Values) -> Values:
    """Two bytes in units of 1/64, each times a power of two, as bf16."""
    numbers = np.ascontiguousarray(pair).view(np.int8).reshape(-1, 2) / 64.0
    scales = UE8M0[np.ascontiguousarray(scale).view(np.uint8).reshape(-1, 2)]
    return np.ascontiguousarray(to_bf16((numbers * scales).astype(np.float32))).view(np.uint32)[:, 0]


def _mixed_fma(kind: str) -> Callable[..., Values]:
    """Of two 16-bit numbers and one of 32."""

    def fma(a: Values, b: Values, c: Values) -> Values:
        wide = [from_bf16(x) if kind == "bf16" else x.view(np.float16) for x in (a, b)]
        return (wide[0].astype(np.float64) * wide[1] + c).astype(np.float32)

    return fma


_PAIRS: dict[str, Callable[..., Values]] = {
    "fma": lambda a, b, c: a * b + c,
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
}
