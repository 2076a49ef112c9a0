"""Golden files of operations, each in `data/` beside its tests: the operation's table, and an archive with it.

A package of tests has them where it has a module `golden` with a `GoldenTable` called TABLE, or several called TABLES;
`tests/test_golden_tables.py` holds all of them. `python -m tests.quantise.golden` writes those of `tests/quantise/`
anew, which is right only where a schema's number was raised with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aot.pack.write import Package
from runtime.container import canonical
from runtime.program.arguments import StreamArgument, Symbol, TensorArgument
from runtime.program.program import LaunchSource, ParameterSource, ProgramSource
from runtime.program.record import RecordSource
from runtime.tables import table

from . import golden


@dataclass(frozen=True)
class GoldenTable:
    """The table of an operation with one ranked entry for each signature, by the function that serves it, its record
    and its cubin; in `folder`."""

    folder: Path
    entries: Mapping[Any, tuple[RecordSource, bytes]]

    @property
    def operation(self) -> str:
        """The name of the operation, and of its table."""
        return str(next(iter(self.entries)).operation)

    @property
    def path(self) -> Path:
        """The file of the table alone."""
        return self.folder / f"{self.operation}.json"

    @property
    def archive(self) -> Path:
        """The file of the archive."""
        return self.folder / "archive.aot"

    def document(self) -> dict[str, Any]:
        """The table, as today's writer writes it."""
        return table.write([golden.ranked(signature, source.name) for signature, (source, _) in self.entries.items()])

    def write(self) -> None:
        """Write both files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(canonical.dumps(self.document()) + b"\n")
        package = Package()
        for source, binary in self.entries.values():
            package.add_function(source.to_json(), binary)
        package.set_table(self.operation, self.document())
        package.write(self.archive)


def function(name: str, tensors: Sequence[TensorArgument], symbols: dict[str, Symbol]) -> tuple[RecordSource, bytes]:
    """A function of these tensors and a stream, which launches a CTA of 256 threads for each of the first symbol."""
    values = [(name, symbol.width) for name, symbol in symbols.items()]
    nodes: list[list[Any]] = [["const", 32, 256], ["const", 32, 1], ["const", 64, 0]]
    threads, one, nothing = range(len(values), len(values) + len(nodes))
    parameters = [ParameterSource(8, [], [(0, "raw", pointer, None)]) for pointer in range(len(tensors))]
    parameters += [ParameterSource(width // 8, [(0, width // 8, x)], []) for x, (_, width) in enumerate(values)]
    launch = LaunchSource(0, (0, one, one), (threads, one, one), nothing, (), parameters)
    program = ProgramSource(values, tuple(tensor.name for tensor in tensors), nodes, (launch,))
    return golden.record(name, [*tensors, StreamArgument("stream")], symbols, program)
