"""Archives of RMSNorm that no compiler made."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from aot.pack import tables
from aot.pack.write import Package
from runtime.container.archive import Archive
from runtime.program.arguments import Argument, ScalarArgument, Symbol, TensorArgument
from runtime.rmsnorm import Signature

from ..recording_driver import RecordingDriver, cubin, entry, tensors_record, write_archive

RECORDS = Path(__file__).parents[1] / "data" / "records.json"
OF = Signature("bf16", "bf16", "bf16", 4096)
ADDED = replace(OF, residual="bf16")
SCALED = replace(ADDED, y="e4m3", scaling="block")


def record(name: str) -> dict[str, Any]:
    """The record of this project's kernel, under another name."""
    found: dict[str, Any] = next(r for r in json.loads(RECORDS.read_text()) if "rmsnorm" in r["name"])
    kernels = [found["kernels"][0] | {"symbol": f"kernel_{name}"}]
    return found | {"name": name, "kernels": kernels, "cubin": hashlib.sha256(cubin(name)).hexdigest()}


def write(path: Path) -> RecordingDriver:
    """Write an archive with an entry of `OF`: "narrow" serves up to 8 rows, "wide" more."""
    rows = [entry(OF.to_json(), [(8, "narrow"), (None, "wide")])]
    return RecordingDriver(kernels=write_archive(path, [record("narrow"), record("wide")], rows, "rmsnorm"))


def write_added(path: Path) -> RecordingDriver:
    """Write an archive with an entry of `ADDED`, whose function is made up."""
    names = {"x": "ldx", "residual": "ldr", "y": "ldy", "sum": "lds"}
    symbols = {"m": Symbol(32, 1), "n": Symbol(32, 8), **dict.fromkeys(names.values(), Symbol(64, 8))}

    def matrix(name: str) -> Argument:
        return TensorArgument(name, "bf16", ("m", "n"), (names[name], 1), 16)

    weight = TensorArgument("weight", "bf16", ("n",), (1,), 16)
    tree = [matrix("x"), matrix("residual"), weight, matrix("y"), matrix("sum"), ScalarArgument("eps", "f32")]
    found = tensors_record("added", symbols, tree)
    rows = [entry(ADDED.to_json(), [(None, "added")])]
    return RecordingDriver(kernels=write_archive(path, [found], rows, "rmsnorm"))


def tuned(built: Path, to: Path) -> None:
    """Write the archive of a build as if its norms had been tuned."""
    package = Package()
    with Archive.open(built) as archive:
        package.add_archive(archive)
        rows = [replace(row, state="tuned") for row in tables.operation_rows(archive)]
        for name, table in tables.operation_tables(rows, archive.functions.targets_by_name()).items():
            package.set_table(name, table)
    package.write(to)
