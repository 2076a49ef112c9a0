"""What a first call of `gemm` asks for, of whatever tensors: its signature, its operands as views, and its output.

Knows nothing of archives and plans.
"""

from __future__ import annotations

from typing import Any

from ...device.driver import Driver
from ...errors import ArgumentError
from ...gemm.call import EXTRAS, check_shapes, epilogue_of, result_shape, signature_of
from ...gemm.signature import Signature
from ...named_tuple import NamedTuple
from ...program.outputs import allocate, on_stream, result_dtype
from ...program.record import TensorView
from ...program.tensor import dtype_name, is_torch
from ..operands import device_view, resolve_stream
from .keys import Call


class Request(NamedTuple):
    """What a first call asks for. `views` are all operands by name, a, b and d first; `given` the caller's tensors but
    for `out`, which is the caller's or was `allocated`; `handle` is the stream's."""

    call: Call
    signature: Signature
    views: dict[str, TensorView]
    given: dict[str, Any]
    out: Any
    allocated: bool
    handle: int
    of_torch: bool  # all tensors are torch's


def request_of(call: Call, driver: Driver) -> Request:
    """Find out what a call asks for.

    Raises:
        ArgumentError: its tensors or words make no sense.
    """
    a, out, stream = call.a, call.out, call.stream
    given = {"a": a, "b": call.b} | {n: x for n, x in zip(EXTRAS, call.operands, strict=True) if x is not None}
    handle = resolve_stream(stream, tuple(given.values()), driver)
    seen = {name: device_view(x, name, handle, driver) for name, x in given.items()}
    check_shapes(seen["a"], seen["b"])
    epilogue = epilogue_of(call.epilogue, seen)
    shape = result_shape(seen["a"], seen["b"], epilogue)
    wanted = None if call.dtype is None else dtype_name(call.dtype)
    allocated = out is None
    if allocated:
        out = allocate(a, shape, wanted or result_dtype(seen["a"].dtype), None if stream is None else handle)
    d = device_view(out, "out", handle, driver, writable=True)
    if d.shape != shape:
        raise ArgumentError(
            f"out must have shape {shape} for a {seen['a'].shape} and b {seen['b'].shape}, found {d.shape}"
        )
    if wanted not in (None, d.dtype):
        raise ArgumentError(f"out has element type {d.dtype}, dtype says {wanted}; pass one of them")
    seen = {"a": seen.pop("a"), "b": seen.pop("b"), "d": d} | seen
    of_torch = all(is_torch(x) for x in (*given.values(), out))
    signature = signature_of(seen, epilogue, call.overlap)
    return Request(call, signature, seen, given, out, allocated, handle, of_torch)


def residual_beside(request: Request) -> Any:
    """A copy of a residual that is the output: where M is no multiple of a kernel's tile, two CTAs make some rows,
    and the second would add what the first one wrote.

    Raises:
        ArgumentError: it is not torch's, and so not copied.
    """
    residual = request.given["residual"]
    if not is_torch(residual):
        raise ArgumentError(
            "out is residual, which kernels may read after they wrote it; write to another tensor, or pass torch's "
            "tensors, of which a copy is made"
        )
    with on_stream(None if request.call.stream is None else request.handle, request.call.a):
        return residual.new_empty_strided(residual.shape, residual.stride()).copy_(residual)
