"""What the golden programs evaluate to, with native code where it was built or in Python."""

from __future__ import annotations

from typing import Any

from runtime.device.launch import Launch
from runtime.gemm.universal import INPUTS
from runtime.program.costs import CostProgram
from runtime.program.evaluator import PythonEvaluator
from runtime.program.record import Record

from . import golden


def _launch(launch: Launch) -> dict[str, Any]:
    return {
        "grid": launch.grid,
        "block": launch.block,
        "shared_bytes": launch.shared_bytes,
        "attributes": launch.attributes,
        "parameters": [
            launch.parameters[at : at + size].hex() for at, size in zip(launch.offsets, launch.sizes, strict=True)
        ],
    }


def evaluated_launches(in_python: bool = False) -> list[dict[str, Any]]:
    """What the golden programs launch, for `launches.json`; slots are zero in the bytes of parameters."""
    found = []
    for source, _ in golden.records():
        obj = source.to_json()
        record, program = Record.from_json(obj), obj["program"]
        evaluate: Any = record.program
        if in_python:
            counts = len(program["pointers"]), len(obj["kernels"])
            values = record.program.values
            evaluate = PythonEvaluator.from_json(values, program["nodes"], program["launches"], *counts)
        for given in golden.INPUTS.get(source.name, []):
            inputs = tuple(given[name] for name, _ in record.program.values)
            launches = [_launch(launch) for launch in evaluate.evaluate(inputs, None).launches]
            found.append({"function": source.name, "inputs": given, "launches": launches})
    return found


def evaluated_costs(in_python: bool = False) -> list[dict[str, Any]]:
    """What the golden cost program gives, for `costs.json`."""
    (obj,) = golden.universal_table()["programs"]
    program = CostProgram.from_json(obj, len(INPUTS), "golden", in_python)
    return [{"inputs": values, "results": program.evaluate(values)} for values in golden.COSTS]
