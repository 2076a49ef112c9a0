"""Golden files of RMSNorm, as `tests.golden_tables` has it."""

from __future__ import annotations

from pathlib import Path

from runtime.rmsnorm import Signature

from .. import golden
from ..golden_tables import GoldenTable

TABLE = GoldenTable(Path(__file__).parent / "data", {Signature("bf16", "bf16", "bf16", 4096): golden.norm()})

if __name__ == "__main__":
    TABLE.write()
