"""Golden files of quantise, as `tests.golden_tables` has it."""

from __future__ import annotations

from pathlib import Path

from runtime.program.arguments import Symbol, TensorArgument
from runtime.program.record import RecordSource
from runtime.quantise import Signature

from ..golden_tables import GoldenTable, function

_ONE, _WHOLE = Symbol(32, 1), Symbol(32, 16)


def quantise(name: str, blocks: bool) -> tuple[RecordSource, bytes]:
    """A function of x, ends, y and scales, of blocks or of rows."""
    symbols = {"m": _ONE, "groups": _ONE, "k": _WHOLE} | ({"kb": _ONE} if blocks else {})
    tensors = (
        TensorArgument("x", "bf16", ("m", "k"), ("ldx", 1), 16),
        TensorArgument("ends", "i32", ("groups",), (1,), 4),
        TensorArgument("y", "e4m3", ("m", "k"), ("ldy", 1), 16),
        TensorArgument("scale", "f32", ("m", "kb") if blocks else ("m",), ("lds", 1) if blocks else (1,), 4),
    )
    strides = dict.fromkeys(("ldx", "ldy"), Symbol(64, 16)) | ({"lds": Symbol(64, 1)} if blocks else {})
    return function(name, tensors, symbols | strides)


TABLE = GoldenTable(
    Path(__file__).parent / "data",
    {
        Signature("bf16", "e4m3", 768, "block", 128): quantise("golden.blocks.sm_90a", True),
        Signature("bf16", "e4m3", 768, "row_column", 128): quantise("golden.rows.sm_90a", False),
    },
)

if __name__ == "__main__":
    TABLE.write()
