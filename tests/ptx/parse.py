"""PTX text to instructions. Knows how they are written, and nothing of what they do."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

# Registers by how PTX declares them, with their bits; predicates have one.
_BITS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "b128": 128, "u16": 16, "u32": 32, "u64": 64}
_BITS |= {"s16": 16, "s32": 32, "s64": 64, "f16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16": 16, "bf16x2": 32}


class Instruction(NamedTuple):
    """`words` are those of the opcode, split at points; operands are as written, of a vector or an address the whole;
    `predicate` is the register that lanes are left out by, with "!" before it where those that have it are."""

    words: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str
    text: str

    @property
    def opcode(self) -> str:
        """The first word."""
        return self.words[0]


@dataclass
class Kernel:
    """An entry: parameters with their offsets in one buffer, registers with their bits, labels by instruction."""

    name: str
    parameters: dict[str, tuple[int, int]]  # offset and bytes
    registers: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)  # bytes of static shared memory, by symbol, at offsets


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\s*\((.*?)\)([^{]*)\{", re.S)
_POINTER = r"(?:\.ptr\s+(?:\.global\s+)?(?:\.align\s+\d+\s+)?)?"
_PARAMETER = re.compile(rf"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+{_POINTER}(\w+)(?:\[(\d+)\])?")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of a module, by name."""
    text = _COMMENT.sub("", text)
    found = {}
    for match in _ENTRY.finditer(text):
        kernel = Kernel(match[1], _parameters(match[2]))
        _read_body(_body(text, match.end()), kernel)
        found[kernel.name] = kernel
    return found


def _parameters(text: str) -> dict[str, tuple[int, int]]:
    found, offset = {}, 0
    for align, kind, name, count in _PARAMETER.findall(text):
        size = _BITS[kind] // 8 * int(count or 1)
        offset += -offset % int(align or min(size, 8))
        found[name] = offset, size
        offset += size
    return found


def _body(text: str, start: int) -> str:
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[start:place]
    raise ValueError("a kernel's braces do not match")


class _Scope:
    """Names of one pair of braces, which inline assembly opens: registers and labels that others do not see."""

    def __init__(self, number: int, outer: _Scope | None) -> None:
        self.number, self.outer = number, outer
        self.names: set[str] = set()

    def named(self, name: str) -> str:
        """What a register or label is called in all of the kernel."""
        scope: _Scope | None = self
        while scope is not None and name not in scope.names:
            scope = scope.outer
        return f"{name}@{scope.number}" if scope is not None and scope.outer is not None else name


_TOKEN = re.compile(r"[%$A-Za-z_][\w$]*(?:\.[xyzw](?!\w))?")


def _read_body(body: str, kernel: Kernel) -> None:
    scope, count = _Scope(0, None), 0
    waiting: list[tuple[str, _Scope]] = []  # statements with the scope that they are in; labels may come after
    for statement in _statements(body):
        if statement == "{":
            count += 1
            scope = _Scope(count, scope)
        elif statement == "}":
            assert scope.outer is not None
            scope = scope.outer
        elif match := _REGISTERS.fullmatch(statement):
            for name in match[2].split(","):
                _declare(name.strip(), _BITS[match[1]], scope, kernel)
        elif statement.startswith((".pragma", ".loc", ".local")):
            continue
        elif statement.startswith(".shared") or statement.startswith(".extern"):
            raise ValueError(f"not read: {statement}")
        elif statement.endswith(":"):
            scope.names.add(statement[:-1])
            waiting.append((statement, scope))
        else:
            waiting.append((statement, scope))
    for statement, of in waiting:
        if statement.endswith(":"):
            kernel.labels[of.named(statement[:-1])] = len(kernel.instructions)
        else:
            kernel.instructions.append(_instruction(statement, of))


def _declare(name: str, bits: int, scope: _Scope, kernel: Kernel) -> None:
    if match := re.fullmatch(r"([%\w$]+)<(\d+)>", name):
        names = [f"{match[1]}{i}" for i in range(int(match[2]))]
    else:
        names = [name]
    scope.names.update(names)
    for each in names:
        kernel.registers[scope.named(each)] = bits


def _statements(body: str) -> list[str]:
    """Statements without their semicolons, labels with their colons, and braces that open or close a scope."""
    found: list[str] = []
    for part in body.split(";"):
        rest = part.strip()
        while rest:
            if match := re.match(r"([$A-Za-z_][\w$]*:)(?!:)\s*", rest):
                found.append(match[1])
                rest = rest[match.end() :]
                continue
            if rest[0] in "{}":
                found.append(rest[0])
                rest = rest[1:].strip()
                continue
            found.append(rest)
            break
    return found


def _instruction(statement: str, scope: _Scope) -> Instruction:
    predicate, rest = "", statement
    if match := re.match(r"@(!?)([%\w$]+)\s+", statement):
        predicate, rest = match[1] + scope.named(match[2]), statement[match.end() :]
    opcode, *more = rest.split(None, 1)
    operands = " ".join(more[0].split()) if more else ""
    words = tuple(opcode.replace("::", "_").split("."))
    given = [_TOKEN.sub(lambda match: scope.named(match[0]), each) for each in _split(operands)]
    return Instruction(words, tuple(given), predicate, statement)


def _split(operands: str) -> list[str]:
    """At commas outside of brackets and braces."""
    found, depth, start = [], 0, 0
    for place, character in enumerate(operands):
        if character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and not depth:
            found.append(operands[start:place].strip())
            start = place + 1
    return [*found, operands[start:].strip()] if operands.strip() else []
