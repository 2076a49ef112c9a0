"""A library whose experts torch computes, on the CPU: what `Library.call` launches is the reference of tuning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from aot.tune.grouped_gemm.measures import OperandSet as GroupedOperands
from aot.tune.moe_combine.measures import OperandSet as CombineOperands
from aot.tune.moe_permute.measures import OperandSet as PermuteOperands
from aot.tune.operation import tuning
from aot.tune.quantise.measures import OperandSet as QuantiseOperands
from runtime import Library
from runtime.container.archive import Archive
from runtime.program.operation import operation as operation_named
from runtime.program.record import TensorView
from runtime.program.tensor import dtype_name, in_elements

from ..recording_driver import RecordingDriver, entry, operands_record, signature, write_archive


class ExpertsOnCpu(Library):
    """Asks each operation what is asked for, and writes what its reference says, over NaN; `calls` has their names, and
    `chosen_for` how many rows their functions are chosen for."""

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def calls(self) -> list[str]:
        found: list[str] = vars(self).setdefault("_calls", [])
        return found

    @property
    def chosen_for(self) -> list[int]:
        found: list[int] = vars(self).setdefault("_chosen_for", [])
        return found

    def call(self, operation: str, *tensors: Any, stream: Any = None, **words: Any) -> Any:
        def view(x: torch.Tensor, what: str, writable: bool) -> TensorView:
            dtype = dtype_name(x.dtype)
            return TensorView(x.data_ptr(), dtype, *in_elements(dtype, tuple(x.shape), x.stride(), what), 0)

        asked = operation_named(operation).ask(view, *tensors, **words)
        if asked.m == 0:
            return asked.result
        self.calls.append(operation)
        self.chosen_for.append(asked.m)
        operands = _operands(operation, tensors, words, asked.result)
        for output, value in tuning(asked.signature).measures().reference(asked.signature, operands).items():
            written = operands.outputs()[output]
            end = _rows_written(operation, output, operands, len(written))
            if words.get("out") is None and written.is_floating_point():
                written.copy_(torch.full(written.shape, float("nan")))
            written[:end] = value[:end].to(written.dtype)
        return asked.result


def _operands(name: str, tensors: Any, words: Any, result: Any) -> Any:
    of: dict[str, Any] = {
        "moe_permute": PermuteOperands,
        "moe_combine": CombineOperands,
        "grouped_gemm": GroupedOperands,
    }
    if name == "quantise":
        return QuantiseOperands(*tensors, *result)
    results = (words.get("expert_map"), words.get("weights"), *result) if name == "moe_permute" else (result,)
    if name == "moe_combine" and len(tensors) < 3:
        results = (None, *results)
    extras = {word: words[word] for word in ("scale_a", "scale_b", "bias", "scale_d") if words.get(word) is not None}
    return of[name](*tensors, *results, *([extras] if extras else []))


def _rows_written(name: str, output: str, operands: Any, whole: int) -> int:
    """How many rows kernels write: not those behind the last group's."""
    if name in ("grouped_gemm", "quantise"):
        return int(operands.ends[-1])
    return int((operands.local() >= 0).sum()) if output in ("rows", "scale") else whole


@contextmanager
def library(folder: Path) -> Iterator[ExpertsOnCpu]:
    """One of an archive that has nothing to do with experts."""
    of = signature(256, 128)
    rows = [entry(of, [(None, "f")])]
    driver = RecordingDriver(kernels=write_archive(folder / "any.aot", [operands_record("f", of)], rows))
    made = ExpertsOnCpu(Archive.open(folder / "any.aot"), driver)
    try:
        yield made
    finally:
        made.close()


def experts(
    hidden: Any, w13: Any, w2: Any, ids: Any, weights: Any, activation: str = "swiglu", biases: Any = None
) -> Any:
    """What they make, in float64, token by token; ids that are no experts' add nothing. `biases` are those of w13 and
    of w2, or None."""
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    of_w13, of_w2 = ([0.0] * len(w13),) * 2 if biases is None else (bias.double() for bias in biases)
    for token, j in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        expert = int(ids[token, j])
        if not 0 <= expert < len(w13):
            continue
        both = w13[expert].double() @ hidden[token].double() + of_w13[expert]
        gate, up = (both[0::2], both[1::2]) if activation.endswith("_interleaved") else both.chunk(2)
        if activation.startswith("swiglu_clamped"):
            gate = gate.clamp(max=7.0)
            inner = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)
        else:
            inner = torch.nn.functional.silu(gate) * up
        out[token] += float(weights[token, j]) * (w2[expert].double() @ inner + of_w2[expert])
    return out
