"""What is left to torch: memory for results, and GEMMs that an archive cannot serve.

Imports no framework; where a tensor is torch's, torch is already there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from .errors import ArgumentError
from .signature import GATES, Epilogue
from .tensor import TORCH_NAMES, is_torch


def torch_gemm(torch: Any, epilogue: Epilogue, operands: Mapping[str, Any], out: Any) -> None:
    """Write epilogue(A @ B^T) into `out`; `operands` has a, b and what the epilogue names, of 16 bits or more.

    With an epilogue the sums are rounded to A's type and the rest is f32, so it is less exact than a kernel.
    """
    a, b = operands["a"], operands["b"].transpose(-1, -2)
    if epilogue == Epilogue():
        torch.matmul(a, b, out=out)
        return
    value = torch.matmul(a, b).float()
    if epilogue.bias:
        value = value + operands["bias"]
    value = apply_activation(torch, epilogue, value)
    if epilogue.residual:
        value = value + operands["residual"]
    if epilogue.scale:
        value = value * operands["scale_d"].reshape(())
    out.copy_(value)


def apply_activation(torch: Any, epilogue: Epilogue, value: Any) -> Any:
    """The activation of `value`, or act(gate) * up with half the columns."""
    name = epilogue.activation
    if not epilogue.gated:
        return _activate(torch, name, value)
    if epilogue.interleaved:
        gate, up = value[..., 0::2], value[..., 1::2]
    else:
        gate, up = value.chunk(2, dim=-1)
    return _activate(torch, GATES[name], gate) * up


def _activate(torch: Any, name: str, value: Any) -> Any:
    functional = torch.nn.functional
    if name == "relu":
        return functional.relu(value)
    if name == "silu":
        return functional.silu(value)
    if name == "gelu":
        return functional.gelu(value)
    if name == "gelu_tanh":
        return functional.gelu(value, approximate="tanh")
    return value


def result_dtype(dtype: str) -> str:
    """The element type of a result that was neither given nor said, for A's."""
    return "bf16" if dtype in ("e4m3", "e5m2") else dtype


def allocate(a: Any, shape: tuple[int, ...], dtype: str, stream: int | None) -> Any:
    """A torch tensor, from the memory pool of `stream` if that is given, so that it is not reused too early."""
    if not is_torch(a):
        raise ArgumentError(f"out is needed: there is no allocating for a {type(a).__name__}")
    torch = sys.modules["torch"]
    with on_stream(stream, a):
        return a.new_empty(shape, dtype=getattr(torch, TORCH_NAMES[dtype]))


def on_stream(stream: int | None, a: Any) -> Any:
    """A context in which `stream` is torch's current stream; None changes nothing."""
    torch = sys.modules["torch"]
    return torch.cuda.stream(None if stream is None else torch.cuda.ExternalStream(stream, device=a.device))
