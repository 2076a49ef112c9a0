"""LLVM types as they are printed in the DSL's lowered IR, and their layout in memory on a 64-bit host.

Knows nothing of operations or launches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from runtime.errors import AotError


class HostIRError(AotError):
    """The lowered host code holds something that a launch program cannot express; the message names it."""


@dataclass(frozen=True)
class Scalar:
    """An integer, a float or a pointer; `bytes` in memory (an i1 takes one)."""

    kind: str  # "int", "float" or "ptr"
    bits: int

    @property
    def bytes(self) -> int:
        """Size in memory."""
        return max(1, self.bits // 8)

    align = bytes


@dataclass(frozen=True)
class Aggregate:
    """A struct, an array or a vector: members at byte `offsets`."""

    members: tuple[Type, ...]
    offsets: tuple[int, ...]
    bytes: int
    align: int


Type = Scalar | Aggregate

POINTER = Scalar("ptr", 64)
_TOKEN = re.compile(r"\s*(!?llvm\.|[A-Za-z_]\w*|\d+|[<>(),x])")


def _struct(members: list[Type]) -> Aggregate:
    offsets, end, align = [], 0, 1
    for m in members:
        end = -(-end // m.align) * m.align
        offsets.append(end)
        end += m.bytes
        align = max(align, m.align)
    return Aggregate(tuple(members), tuple(offsets), -(-end // align) * align, align)


def _array(count: int, member: Type, align: int | None = None) -> Aggregate:
    offsets = tuple(i * member.bytes for i in range(count))
    return Aggregate((member,) * count, offsets, count * member.bytes, align or member.align)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def peek(self) -> str:
        match = _TOKEN.match(self.text, self.at)
        return match.group(1) if match else ""

    def take(self, expected: str | None = None) -> str:
        match = _TOKEN.match(self.text, self.at)
        if not match or (expected is not None and match.group(1) != expected):
            raise HostIRError(f"cannot read the type {self.text[:200]!r} at {self.text[self.at : self.at + 30]!r}")
        self.at = match.end()
        return match.group(1)

    def parse(self) -> Type:
        token = self.take()
        if token in ("!llvm.", "llvm."):
            token = self.take()
        if token == "ptr":
            if self.peek() == "<":
                self.take("<")
                self.take()
                self.take(">")
            return POINTER
        if re.fullmatch(r"i\d+", token):
            return Scalar("int", int(token[1:]))
        if token in ("f16", "bf16", "f32", "f64"):
            return Scalar("float", int(token.lstrip("bf")))
        if token == "struct":
            return self._struct_body()
        if token in ("array", "vector"):
            self.take("<")
            count = int(self.take())
            self._take_times()
            member = self.parse()
            self.take(">")
            # A vector is aligned to its whole size (x86-64 and aarch64 alike).
            return _array(count, member, count * member.bytes if token == "vector" else None)
        raise HostIRError(f"unknown type {token!r} in {self.text[:200]!r}")

    def _take_times(self) -> None:
        # "8xi32" comes as the word "xi32", "16 x i64" as the word "x".
        match = re.compile(r"\s*x\s*").match(self.text, self.at)
        if not match:
            raise HostIRError(f"cannot read the type {self.text[:200]!r}")
        self.at = match.end()

    def _struct_body(self) -> Type:
        self.take("<")
        self.take("(")
        members = []
        while self.peek() != ")":
            members.append(self.parse())
            if self.peek() == ",":
                self.take(",")
        self.take(")")
        self.take(">")
        return _struct(members)


def parse_type(text: str) -> Type:
    """The type that `text` spells.

    Raises:
        HostIRError: the type is unknown.
    """
    return _Parser(text).parse()


def split_types(text: str) -> list[str]:
    """Split a comma-separated list at its top level: `a, b<c, d>` gives two."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "<([{":
            depth += 1
        elif c in ">)]}":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    tail = text[start:].strip()
    return parts + [tail] if tail else parts


def leaves(t: Type, base: int = 0) -> Iterator[tuple[int, Scalar]]:
    """Every scalar of a type with its byte offset, in order."""
    if isinstance(t, Scalar):
        yield base, t
    else:
        for member, offset in zip(t.members, t.offsets, strict=True):
            yield from leaves(member, base + offset)
