"""Golden files of moe_permute and moe_combine, as `tests.golden_tables` has it."""

from __future__ import annotations

from pathlib import Path

from runtime.moe.combine import Signature as Combine
from runtime.moe.permute import Signature as Permute
from runtime.program.arguments import Symbol, TensorArgument
from runtime.program.record import RecordSource

from ..golden_tables import GoldenTable, function

FOLDER = Path(__file__).parent / "data"
_ONE, _EIGHTS = Symbol(32, 1), Symbol(32, 8)


def permute(name: str, mapped: bool) -> tuple[RecordSource, bytes]:
    """A function of x, ids, an expert map if `mapped`, rows, ends and positions."""
    symbols = {"m": _ONE, "top_k": _ONE, "r": _ONE, "experts": _ONE, "k": _EIGHTS}
    symbols |= {"global_experts": _ONE} if mapped else {}
    tensors = (
        TensorArgument("x", "bf16", ("m", "k"), ("ldx", 1), 16),
        TensorArgument("ids", "i32", ("m", "top_k"), ("top_k", 1), 4),
        *([TensorArgument("expert_map", "i32", ("global_experts",), (1,), 4)] if mapped else []),
        TensorArgument("rows", "bf16", ("r", "k"), ("ldr", 1), 16),
        TensorArgument("ends", "i32", ("experts",), (1,), 4),
        TensorArgument("positions", "i32", ("m", "top_k"), ("top_k", 1), 4),
    )
    return function(name, tensors, symbols | dict.fromkeys(("ldx", "ldr"), Symbol(64, 8)))


def combine(name: str) -> tuple[RecordSource, bytes]:
    """A function of rows, positions, weights and y."""
    symbols = {"m": _ONE, "top_k": _ONE, "r": _ONE, "n": _EIGHTS}
    tensors = (
        TensorArgument("rows", "bf16", ("r", "n"), ("ldr", 1), 16),
        TensorArgument("positions", "i32", ("m", "top_k"), ("top_k", 1), 4),
        TensorArgument("weights", "f32", ("m", "top_k"), ("top_k", 1), 4),
        TensorArgument("y", "bf16", ("m", "n"), ("ldy", 1), 16),
    )
    return function(name, tensors, symbols | dict.fromkeys(("ldr", "ldy"), Symbol(64, 8)))


TABLES = (
    GoldenTable(
        FOLDER / "permute",
        {
            Permute("bf16", 128, 8, 2048): permute("golden.permute.sm_90a", False),
            Permute("bf16", 16, 8, 7168, 256): permute("golden.mapped_permute.sm_90a", True),
        },
    ),
    GoldenTable(FOLDER / "combine", {Combine("bf16", "bf16", 8, 2048): combine("golden.combine.sm_90a")}),
)

if __name__ == "__main__":
    for table in TABLES:
        table.write()
