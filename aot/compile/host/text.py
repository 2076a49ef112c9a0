"""The text of a host function in MLIR's generic form, read into blocks and operations.

Knows the form, and nothing of what an operation means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .types import HostIRError, split_types


@dataclass
class Operation:
    """One operation, as printed in MLIR's generic form."""

    name: str
    results: list[str]
    operands: list[str]
    successors: list[str]
    attributes: str
    operand_types: list[str]
    result_types: list[str]

    def attribute(self, name: str) -> str | None:
        """The text of an attribute, or None."""
        for part in split_types(self.attributes):
            key, _, value = part.partition(" = ")
            if key.strip() == name:
                return value.strip()
        return None

    def integers(self, name: str) -> list[int]:
        """The integers of an `array<...>` attribute."""
        text = self.attribute(name) or ""
        match = re.fullmatch(r"array<i\d+(?::\s*(.*))?>", text)
        if not match:
            raise HostIRError(f"{self.name}: cannot read attribute {name} = {text!r}")
        return [int(x) for x in (match.group(1) or "").split(",") if x.strip()]

    def integer(self, name: str, default: int = 0) -> int:
        """An integer attribute."""
        text = self.attribute(name)
        return default if text is None else int(text.split(":")[0])


@dataclass
class Block:
    """A basic block: its arguments (name, type) and operations."""

    arguments: list[tuple[str, str]]
    operations: list[Operation]


_OPERATION = re.compile(
    r'(?:(?P<results>%[\w, %:]+?) = )?"(?P<name>[\w.]+)"\((?P<operands>[^)]*)\)'
    r"(?:\[(?P<successors>[^\]]*)\])?(?: <\{(?P<attributes>.*)\}>)?"
    r"(?: \{(?P<discardable>.*)\})? : \((?P<types>.*)\) -> (?P<result_types>.*)$"
)


def parse_function(text: str) -> dict[str, Block]:
    """Read a function printed in generic form into its blocks; the first is the entry.

    Raises:
        HostIRError: a line is not understood.
    """
    blocks: dict[str, Block] = {}
    current: Block | None = None
    for line in text.splitlines()[1:]:
        line = line.strip()
        if not line or line.startswith("})"):
            continue
        if line.startswith("^"):
            match = re.match(r"\^(\w+)(?:\((.*)\))?:", line)
            if not match:
                raise HostIRError(f"cannot read the block header {line[:200]!r}")
            arguments = [tuple(a.split(": ", 1)) for a in split_types(match.group(2) or "")]
            current = blocks[match.group(1)] = Block([(n, t) for n, t in arguments], [])
            continue
        match = _OPERATION.match(line)
        if not match or current is None:
            raise HostIRError(f"cannot read the operation {line[:300]!r}")
        result_types = match["result_types"].strip()
        if result_types.startswith("("):
            result_types = result_types[1:-1]
        current.operations.append(
            Operation(
                match["name"],
                [r.strip() for r in (match["results"] or "").split(",") if r.strip()],
                [o.strip() for o in match["operands"].split(",") if o.strip()],
                [s.strip().lstrip("^") for s in (match["successors"] or "").split(",") if s.strip()],
                match["attributes"] or "",
                split_types(match["types"]),
                split_types(result_types),
            )
        )
    return blocks
