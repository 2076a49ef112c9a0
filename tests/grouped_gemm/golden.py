"""Golden files of grouped GEMM, `tests/grouped_gemm/data/`: its table, and an archive with it. As in `tests.golden`,

    python -m tests.grouped_gemm.golden

writes them anew, which is right only where a schema's number was raised with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aot.pack.write import Package
from runtime.container import canonical
from runtime.grouped_gemm import Signature
from runtime.program.arguments import Argument, StreamArgument, Symbol, TensorArgument
from runtime.program.program import LaunchSource, ParameterSource, ProgramSource
from runtime.program.record import RecordSource
from runtime.tables import table

from .. import golden

FOLDER = Path(__file__).parent / "data"
ARCHIVE = FOLDER / "archive.aot"
EXPERTS, GATED_EXPERTS = "golden.experts.sm_90a", "golden.gated_experts.sm_90a"
PLAIN = Signature("bf16", "bf16", "bf16", 128, 1536, 2048)
GATED = Signature("bf16", "bf16", "bf16", 8, 4096, 7168, "geglu_tanh_interleaved", "weights")


def function(name: str, columns: str) -> tuple[RecordSource, bytes]:
    """A function of A, B, where groups end, and D, a CTA of 256 threads a row; `columns` is the symbol of D's: "n", or
    "p" where a gate makes half as many."""
    arguments: list[Argument] = [
        TensorArgument("a", "bf16", ("m", "k"), ("lda", 1), 16),
        TensorArgument("b", "bf16", ("groups", "n", "k"), ("group_stride_b", "ldb", 1), 16),
        TensorArgument("ends", "i32", ("groups",), (1,), 4),
        TensorArgument("d", "bf16", ("m", columns), ("ldd", 1), 16),
        StreamArgument("stream"),
    ]
    symbols = {"m": Symbol(32, 1), "groups": Symbol(32, 1)}
    symbols |= dict.fromkeys(("n", "k", columns), Symbol(32, 8))
    symbols |= dict.fromkeys(("lda", "group_stride_b", "ldb", "ldd"), Symbol(64, 8))
    values = [(name, symbol.width) for name, symbol in symbols.items()]
    nodes: list[list[Any]] = [["const", 32, 256], ["const", 32, 1], ["const", 64, 0]]
    threads, one, nothing = range(len(values), len(values) + len(nodes))
    parameters = [ParameterSource(8, [], [(0, "raw", pointer, None)]) for pointer in range(4)]
    parameters += [ParameterSource(width // 8, [(0, width // 8, x)], []) for x, (_, width) in enumerate(values)]
    launch = LaunchSource(0, (0, one, one), (threads, one, one), nothing, (), parameters)
    return golden.record(name, arguments, symbols, ProgramSource(values, ("a", "b", "ends", "d"), nodes, (launch,)))


def document() -> dict[str, Any]:
    """The table, as today's writer writes it."""
    return table.write([golden.ranked(PLAIN, EXPERTS), golden.ranked(GATED, GATED_EXPERTS)])


def package() -> Package:
    """The archive of it and the functions that it names."""
    found = Package()
    for name, columns in ((EXPERTS, "n"), (GATED_EXPERTS, "p")):
        source, binary = function(name, columns)
        found.add_function(source.to_json(), binary)
    found.set_table("grouped_gemm", document())
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "grouped_gemm.json").write_bytes(canonical.dumps(document()) + b"\n")
    package().write(ARCHIVE)
