"""Which functions of an archive take the operands of a signature, whatever they were built for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aot.pack.compatibility import refusal
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.program.record import Record
from runtime.tables.dispatch import serves


def functions_of(archive: Path, family: str, s: Any) -> list[str]:
    """The functions of a family for this GPU that take the operands of a signature."""
    with Archive.open(archive) as opened:
        found = []
        for name in opened.functions:
            here = serves(opened.functions[name].target, Driver().compute_capability)
            if here and f".{family}." in name and refusal(Record.from_json(opened.record(name)), s) is None:
                found.append(name)
    return sorted(found)
