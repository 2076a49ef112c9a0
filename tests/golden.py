"""The golden files, `tests/data/golden/`: an archive with each kind of document, these, and what they evaluate to.

    python -m tests.golden    writes them anew, which is right only where a schema's number was raised with them

`every` has each kind of argument and each operation, so that a reader can be held against what its launch must be.
Everything here is written by hand: what providers and estimates say may change, and these files do not.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from aot.compile.cubin import CubinKernel
from aot.pack import build_table, tuning_table
from aot.pack.timings import TimingRow
from aot.pack.write import Package
from aot.tune import history
from runtime.container import canonical
from runtime.device.gpus import Gpu
from runtime.gemm import universal
from runtime.gemm.signature import Signature
from runtime.gemm.universal import FormSource, Function
from runtime.limits import MAX_EXTENT
from runtime.program.arguments import (
    Argument,
    DeviceArgument,
    NoneArgument,
    ScalarArgument,
    StreamArgument,
    Symbol,
    TensorArgument,
    TupleArgument,
    WorkspaceArgument,
)
from runtime.program.costs import CostSource
from runtime.program.program import LaunchSource, ParameterSource, ProgramSource
from runtime.program.record import Kernel, RecordSource
from runtime.tables import table
from runtime.tables.table import Entry

from .made_up_kernel import cubin_of

FOLDER = Path(__file__).parent / "data" / "golden"
ARCHIVE = FOLDER / "archive.aot"
TARGET = "sm_90a"
H200 = Gpu("NVIDIA H200", 132, 4917)
PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 4096, 1024)

# Inputs of each program by name, whose launches `launches.json` has.
INPUTS: dict[str, list[dict[str, int]]] = {
    "golden.double.sm_90a": [{"n": 1000}],
    "golden.every.sm_90a": [
        {"m": 1000, "ld": 1024, "count": -24, "offset": 1 << 40, "alpha": 0x3F800000, "clusters": 66},
        {"m": 1, "ld": 8, "count": 7, "offset": 5, "alpha": 0, "clusters": 1},
    ],
    "golden.gemm_small.sm_90a": [{"m": 17, "n": 4096, "k": 1024, "lda": 1024, "ldb": 1024, "ldd": 4096}],
    "golden.norm.sm_90a": [{"m": 17, "n": 4096, "ldx": 4096, "ldy": 8192, "eps": 0x358637BD}],
}
# Inputs of the cost program, whose results `costs.json` has.
COSTS = [[1, 4096, 1024, 1, 132, 4917], [300, 512, 4096, 1, 78, 4000], [8192, 28672, 8192, 1, 132, 4917]]


def _raw(pointer: int) -> ParameterSource:
    return ParameterSource(8, [], [(0, "raw", pointer, None)])


def record(
    name: str,
    arguments: list[Argument],
    symbols: dict[str, Symbol],
    program: ProgramSource,
    registers: int = 32,
) -> tuple[RecordSource, bytes]:
    """The source of a record with one kernel, and a cubin that fits it."""
    symbol = name.split(".")[1]
    sizes = tuple(parameter.size for parameter in program.launches[0].parameters)
    binary = cubin_of([CubinKernel(symbol, registers, 0, 0, sizes)])
    kernels = [Kernel(symbol, registers, shared_bytes=0, local_bytes=0)]
    digest = hashlib.sha256(binary).hexdigest()
    return RecordSource(name, TARGET, "golden", digest, arguments, symbols, kernels, program), binary


def double() -> tuple[RecordSource, bytes]:
    """y[i] = 2 x[i], 256 threads a CTA; the example of docs/records.md."""
    arguments: list[Argument] = [TensorArgument(name, "f32", ("n",), (1,), 4) for name in ("x", "y")]
    nodes = [
        ["const", 32, 255],
        ["add", 32, 0, 1, ["nsw"]],
        ["const", 32, 256],
        ["udiv", 32, 2, 3],
        ["const", 32, 1],
        ["const", 64, 0],
    ]
    parameters = [_raw(0), _raw(1), ParameterSource(4, [(0, 4, 0)], [])]
    launch = LaunchSource(0, (4, 5, 5), (3, 5, 5), 6, (), parameters)
    program = ProgramSource((("n", 32),), ("x", "y"), nodes, (launch,))
    return record("golden.double.sm_90a", [*arguments, StreamArgument("stream")], {"n": Symbol(32, 1)}, program)


BINARY: tuple[str, ...] = (
    "add",
    "sub",
    "mul",
    "and",
    "or",
    "xor",
    "udiv",
    "sdiv",
    "urem",
    "srem",
    "ceildivsi",
    "floordivsi",
)
BINARY += ("umin", "umax", "smin", "smax")
COMPARISONS = ("eq", "ne", "ult", "ule", "ugt", "uge", "slt", "sle", "sgt", "sge")


def every() -> tuple[RecordSource, bytes]:
    """A kernel that is passed the result of each operation."""
    arguments: list[Argument] = [
        TensorArgument("x", "bf16", ("m", 64), ("ld", 1), 16),
        TupleArgument("rest", (TensorArgument("y", "e4m3", ("m", 64), (64, 1), 128), NoneArgument("bias"))),
        ScalarArgument("count", "i32"),
        ScalarArgument("offset", "i64"),
        ScalarArgument("alpha", "f32"),
        WorkspaceArgument("partials", 4096, each="clusters", zeroed=False),
        WorkspaceArgument("counters", 64, each=None, zeroed=True),
        DeviceArgument("clusters", "max_active_clusters", 2),
        StreamArgument("stream"),
    ]
    values = [("m", 32), ("ld", 64), ("count", 32), ("offset", 64), ("alpha", 32), ("clusters", 32)]
    m, ld, count, offset, alpha, clusters = range(6)
    nodes: list[list[Any]] = []

    def node(*parts: Any) -> int:
        nodes.append(list(parts))
        return len(values) + len(nodes) - 1

    one, two, five, threads = (node("const", 32, x) for x in (1, 2, 5, 128))
    high, nothing, sixteen = node("const", 32, 1 << 30), node("const", 64, 0), node("const", 64, 16)
    results = [(4, node(op, 32, m, count)) for op in BINARY]
    results += [(4, node(op, 32, count, five)) for op in ("shl", "lshr", "ashr")]
    results += [(1, node(op, 1, m, count)) for op in COMPARISONS]
    thirty_two = node("shl", 32, m, five, ["nsw", "nuw"])
    results += [(4, thirty_two), (4, node("lshr", 32, thirty_two, five, ["exact"]))]
    results += [(4, node("or", 32, m, high, ["disjoint"])), (4, node("sub", 32, m, one, ["nsw"]))]
    byte = node("trunc", 8, count)
    results += [(1, byte), (4, node("zext", 32, byte)), (8, node("sext", 64, byte)), (2, node("trunc", 16, m))]
    results += [(4, node("ctlz", 32, m, 1)), (4, node("abs", 32, count, 0))]
    results += [(4, node("select", 32, node("slt", 1, count, one), m, count))]
    first = [m, node("const", 32, 0)]
    base = len(values) + len(nodes)  # of what is inside of the loop: its variables, then its nodes
    head, body = [["ugt", 1, base, one]], [["lshr", 32, base, one], ["add", 32, base + 1, one]]
    log2 = node("loop", 32, 32, 1, first, head, base + 2, body, [base + 3, base + 4])
    results += [(4, log2), (8, offset), (4, alpha)]
    words, at = [], 0
    for size, ref in results:
        at = -(-at // size) * size
        words.append((at, size, ref))
        at += size
    bytes_of_row = node("shl", 64, ld, node("const", 64, 1))
    descriptor = ParameterSource(128, [(8, 8, bytes_of_row)], [(0, "tma", 0, None)])
    parameters = [descriptor, ParameterSource(8, [], [(0, "raw", 1, sixteen)]), _raw(2), _raw(3)]
    attributes = [(2, [one]), (4, [two, one, one]), (11, [two, one, one])]
    grid = node("mul", 32, node("smin", 32, m, clusters), two)
    launch = LaunchSource(
        0, (grid, one, one), (threads, one, one), nothing, attributes, [*parameters, ParameterSource(at, words, [])]
    )
    program = ProgramSource(values, ("x", "y", "partials", "counters"), nodes, (launch,))
    return record("golden.every.sm_90a", arguments, {"m": Symbol(32, 1), "ld": Symbol(64, 8)}, program)


def gemm(name: str, rows: int) -> tuple[RecordSource, bytes]:
    """A GEMM of bf16 that begins before the kernel before it ended; a CTA for each `rows` x 128 of D."""
    arguments: list[Argument] = [
        TensorArgument("a", "bf16", ("m", "k"), ("lda", 1), 16),
        TensorArgument("b", "bf16", ("n", "k"), ("ldb", 1), 16),
        TensorArgument("d", "bf16", ("m", "n"), ("ldd", 1), 16),
        StreamArgument("stream"),
    ]
    symbols = {"m": Symbol(32, 1), "n": Symbol(32, 8), "k": Symbol(32, 8)}
    symbols |= {name: Symbol(64, 8) for name in ("lda", "ldb", "ldd")}
    nodes: list[list[Any]] = [
        ["const", 32, rows],
        ["ceildivsi", 32, 0, 6],
        ["const", 32, 128],
        ["ceildivsi", 32, 1, 8],
        ["const", 32, 1],
        ["const", 64, 4096],
    ]
    parameters = [*map(_raw, range(3)), *(ParameterSource(4, [(0, 4, x)], []) for x in range(3))]
    parameters += [ParameterSource(8, [(0, 8, x)], []) for x in range(3, 6)]
    launch = LaunchSource(0, (7, 9, 10), (8, 10, 10), 11, [(6, [10])], parameters)
    values = [(name, symbol.width) for name, symbol in symbols.items()]
    return record(name, arguments, symbols, ProgramSource(values, ("a", "b", "d"), nodes, (launch,)), 168)


SMALL, LARGE, NORM = "golden.gemm_small.sm_90a", "golden.gemm_large.sm_90a", "golden.norm.sm_90a"


def norm() -> tuple[RecordSource, bytes]:
    """A function of two matrices, a vector and a number, a CTA of 256 threads a row."""
    arguments: list[Argument] = [
        TensorArgument("x", "bf16", ("m", "n"), ("ldx", 1), 16),
        TensorArgument("weight", "bf16", ("n",), (1,), 16),
        TensorArgument("y", "bf16", ("m", "n"), ("ldy", 1), 16),
        ScalarArgument("eps", "f32"),
        StreamArgument("stream"),
    ]
    symbols = {"m": Symbol(32, 1), "n": Symbol(32, 8), "ldx": Symbol(64, 8), "ldy": Symbol(64, 8)}
    nodes: list[list[Any]] = [["const", 32, 256], ["const", 32, 1], ["const", 64, 0]]
    parameters = [*map(_raw, range(3)), *(ParameterSource(4, [(0, 4, x)], []) for x in (1, 4))]
    parameters += [ParameterSource(8, [(0, 8, x)], []) for x in (2, 3)]
    launch = LaunchSource(0, (0, 6, 6), (5, 6, 6), 7, (), parameters)
    values = [*((name, symbol.width) for name, symbol in symbols.items()), ("eps", 32)]
    return record(NORM, arguments, symbols, ProgramSource(values, ("x", "weight", "y"), nodes, (launch,)))


def records() -> list[tuple[RecordSource, bytes]]:
    """Sources of records with their cubins."""
    return [double(), every(), gemm(SMALL, 64), gemm(LARGE, 128), norm()]


def gemm_table() -> dict[str, Any]:
    """An entry that was tuned, with all it may have, and one with what every entry has."""
    timings = (
        TimingRow(
            m=16,
            function=SMALL,
            us=5.125,
            baseline_us=6.5,
            spread=0.0125,
            bimodal=True,
            baseline="torch.mm",
            baseline_spread=0.01,
            runner_up=LARGE,
            runner_up_us=5.5,
            candidates=24,
            sustained_us=5.25,
            baseline_sustained_us=6.75,
        ),
        TimingRow(m=64, function=SMALL, us=6.0, baseline_us=6.0),
    )
    tuned = Entry(
        signature=PLAIN,
        target=TARGET,
        gpu=H200,
        state="tuned",
        names=(SMALL, LARGE),
        bounds=(64,),
        chosen=(0, 1),
        invariant=((), (1,)),
        torch_faster=((3, 8), (4096, None)),
        apart=(),
        ranked=(),
        timings=tuple(row.to_json() for row in timings),
    )
    ranked = tuned._replace(gpu=None, state="ranked", names=(LARGE,), bounds=(), chosen=(0,), invariant=None)
    plain = ranked._replace(torch_faster=(), ranked=((16, (0,)),), timings=())
    return table.write([tuned, plain])


def ranked(signature: Any, function: str) -> Entry:
    """An entry of any operation that one function serves, chosen by estimates."""
    return Entry(
        signature=signature,
        target=TARGET,
        gpu=None,
        state="ranked",
        names=(function,),
        bounds=(),
        chosen=(0,),
        invariant=None,
        torch_faster=(),
        apart=(),
        ranked=((16, (0,)),),
        timings=(),
    )


def universal_table() -> dict[str, Any]:
    """A form of two functions, whose cost program has each operation."""
    steps: list[tuple[str, list[int]]] = [  # values 10 to 34
        ("div", [0, 6]),
        ("div", [1, 7]),
        ("ceil", [10]),
        ("ceil", [11]),
        ("mul", [12, 13]),
        ("mul", [14, 3]),
        ("div", [15, 4]),
        ("floor", [16]),
        ("max", [16, 8]),
        ("mul", [18, 2]),
        ("sqrt", [19]),
        ("add", [19, 8]),
        ("log", [21]),
        ("min", [22, 20]),
        ("add", [23, 8]),
        ("sub", [24, 9]),
        ("div", [9, 18]),
        ("exp", [26]),
        ("add", [25, 27]),
        ("select", [0, 6, 25, 28]),
        ("mul", [1, 2]),
        ("div", [30, 5]),
        ("add", [31, 8]),
        ("max", [28, 32]),
        ("add", [33, 17]),
    ]
    operands = [operand for _, of in steps for operand in of]
    costs = CostSource([64, 128, 1, 0.5], [operation for operation, _ in steps], operands, [29, 34])
    functions = [Function(SMALL, 8, 8, 1 << 20, 0), Function(LARGE, 8, 8, MAX_EXTENT, 1)]
    words = [getattr(PLAIN, word) for word in universal.WORDS]
    return universal.write([FormSource(words, False, TARGET, functions, costs, [H200.name])])


def documents() -> dict[str, dict[str, Any]]:
    """The documents by the names of their files, as today's writers write them."""
    gemms = [build_table.Problem("up", PLAIN.key(), 32)]
    origin = build_table.Build(
        models=[build_table.Model("made up", "config.json", "0" * 64, gemms)],
        targets=[TARGET],
        ranking={TARGET: "the families' own estimates"},
        candidates=24,
        tools={"nvidia-cutlass-dsl": "4.8.1"},
        providers={"golden": "0" * 64},
        failures=[("golden.gemm_wide.sm_90a", "spills")],
        unserved=[(PLAIN.key() + "_weights", TARGET, "no kernel family computes it")],
        asked=build_table.Asked([TARGET], ["rmsnorm"], False, {"base": "1" * 64}),
    )
    machine = {
        "gpu": H200.name,
        "gpu_id": "00000000",
        "compute_capability": "9.0",
        "multiprocessors": 132,
        "l2_bytes": 62_914_560,
        "cuda_driver": "13.0",
        "driver": "580.159.04",
        "cute_aot": "0.1.0",
        "torch": "2.13.0",
        "cuda": "13.0",
        "cublas": "13.1.0",
        "candidates": "2" * 64,
        "rejected": {"golden.gemm_wrong.sm_90a": "wrong at M = 17"},
        "tolerance": 0.01,
    }
    seen = {
        "signature": PLAIN.key(),
        "target": TARGET,
        "gpu": H200.name,
        "names": [LARGE, SMALL, "golden.gemm_wrong.sm_90a"],
        "rejected": [[2, "wrong at M = 17"]],
        "points": [
            {
                "m": 16,
                "baseline": ["torch.mm", 650, 10, 675, 0],
                "finalists": [[1, 512, 12, 525, 1]],
                "screened": [[0, 550]],
            }
        ],
    }
    return {
        **{source.name.split(".")[1]: source.to_json() for source, _ in records()},
        "gemm": gemm_table(),
        "universal": universal_table(),
        "build": origin.to_json(),
        "tuning": tuning_table.write([machine]),
        "history": history.table([], [seen]),
    }


def package() -> Package:
    """The archive of these."""
    found, written = Package(), documents()
    for source, binary in records():
        found.add_function(written.pop(source.name.split(".")[1]), binary)
    for name, obj in written.items():
        found.set_table(name, obj)
    return found


def main() -> None:
    """Write the files."""
    from .golden_programs import evaluated_costs, evaluated_launches

    FOLDER.mkdir(exist_ok=True)
    for name, obj in documents().items():
        (FOLDER / f"{name}.json").write_bytes(canonical.dumps(obj) + b"\n")
    package().write(ARCHIVE)
    for name, found in (("launches", evaluated_launches()), ("costs", evaluated_costs())):
        (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
