"""Golden files of grouped GEMM, as `tests.golden_tables` has it."""

from __future__ import annotations

from pathlib import Path

from runtime.grouped_gemm import Signature
from runtime.program.arguments import Symbol, TensorArgument
from runtime.program.record import RecordSource

from ..golden_tables import GoldenTable, function

PLAIN = Signature("bf16", "bf16", "bf16", 128, 1536, 2048)
GATED = Signature("bf16", "bf16", "bf16", 8, 4096, 7168, "geglu_tanh_interleaved", "weights")


def grouped(name: str, columns: str) -> tuple[RecordSource, bytes]:
    """A function of A, B, where groups end, and D; `columns` is the symbol of D's: "n", or "p" where a gate makes half
    as many."""
    tensors = (
        TensorArgument("a", "bf16", ("m", "k"), ("lda", 1), 16),
        TensorArgument("b", "bf16", ("groups", "n", "k"), ("group_stride_b", "ldb", 1), 16),
        TensorArgument("ends", "i32", ("groups",), (1,), 4),
        TensorArgument("d", "bf16", ("m", columns), ("ldd", 1), 16),
    )
    symbols = {"m": Symbol(32, 1), "groups": Symbol(32, 1)}
    symbols |= dict.fromkeys(("n", "k", columns), Symbol(32, 8))
    symbols |= dict.fromkeys(("lda", "group_stride_b", "ldb", "ldd"), Symbol(64, 8))
    return function(name, tensors, symbols)


TABLE = GoldenTable(
    Path(__file__).parent / "data",
    {PLAIN: grouped("golden.experts.sm_90a", "n"), GATED: grouped("golden.gated_experts.sm_90a", "p")},
)

if __name__ == "__main__":
    TABLE.write()
