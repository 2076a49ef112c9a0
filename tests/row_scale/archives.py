"""Archives of row-wise scaling, of made-up functions that no compiler made, and a manifest that asks for it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from runtime.program.program import LaunchSource, ParameterSource, ProgramSource
from runtime.program.record import Kernel, RecordSource

from ..recording_driver import FakeTensor, RecordingDriver, cubin, entry, write_archive
from .operation import Signature
from .provider import SYMBOLS, tree

OF = Signature("bf16", "bf16", "bf16", 4096)
MANIFEST = """
format: 1
model: scales
source: made up
tokens: [1, 64]
targets: [sm_90a]
operations:
  row_scale:
    - {name: input_scale, x: bf16, weight: bf16, y: bf16, n: 4096}
    - {name: q, x: f16, weight: f16, y: f16, n: 128, tokens: [1, 32]}
"""


def record(name: str) -> dict[str, Any]:
    """A function of bf16, a CTA of 256 threads a row, whose kernel takes the tensors' addresses and then the factor."""
    pointers = "x", "weight", "y"
    parameters = [ParameterSource(8, [], [(0, "raw", i, None)]) for i in range(len(pointers))]
    values = [*((symbol, of.width) for symbol, of in SYMBOLS.items()), ("factor", 32)]
    factor, threads, one, nothing = 4, 5, 6, 7
    nodes: list[list[Any]] = [["const", 32, 256], ["const", 32, 1], ["const", 64, 0]]
    parameters.append(ParameterSource(4, [(0, 4, factor)], []))
    launch = LaunchSource(0, (0, one, one), (threads, one, one), nothing, (), parameters)
    return RecordSource(
        name,
        "sm_90a",
        "row_scales.row",
        hashlib.sha256(cubin(name)).hexdigest(),
        tree("bf16", "bf16", "bf16"),
        SYMBOLS,
        [Kernel(f"kernel_{name}", registers=32, shared_bytes=0, local_bytes=0)],
        ProgramSource(values, pointers, nodes, [launch]),
    ).to_json()


def row(ranges: list[tuple[int | None, str]], of: Signature = OF, state: str = "tuned") -> dict[str, Any]:
    """A row of the operation's table."""
    return entry(of.to_json(), ranges, state=state)


def write(path: Path, table: str = "row_scale") -> RecordingDriver:
    """Write an archive with an entry of `OF`: "narrow" serves up to 8 rows, "wide" more. `table` names its table."""
    rows = [row([(8, "narrow"), (None, "wide")])]
    return RecordingDriver(kernels=write_archive(path, [record("narrow"), record("wide")], rows, table))


def tensors(m: int, n: int = OF.n) -> tuple[FakeTensor, FakeTensor, FakeTensor]:
    """x, weight and y at `m` rows."""
    return FakeTensor((m, n)), FakeTensor((n,)), FakeTensor((m, n))
