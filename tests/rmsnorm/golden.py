"""Golden files of RMSNorm, `tests/rmsnorm/data/`: its table, and an archive with it. As in `tests.golden`,

    python -m tests.rmsnorm.golden

writes them anew, which is right only where a schema's number was raised with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aot.pack.write import Package
from runtime.container import canonical
from runtime.rmsnorm import Signature
from runtime.tables import table

from .. import golden

FOLDER = Path(__file__).parent / "data"
ARCHIVE = FOLDER / "archive.aot"
ROWS = Signature("bf16", "bf16", "bf16", 4096)


def document() -> dict[str, Any]:
    """The table, as today's writer writes it."""
    return table.write([golden.ranked(ROWS, golden.NORM)])


def package() -> Package:
    """The archive of it and the function that it names."""
    found = Package()
    source, binary = golden.norm()
    found.add_function(source.to_json(), binary)
    found.set_table("rmsnorm", document())
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "rmsnorm.json").write_bytes(canonical.dumps(document()) + b"\n")
    package().write(ARCHIVE)
