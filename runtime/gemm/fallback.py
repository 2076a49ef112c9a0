"""What is left to torch: GEMMs that an archive cannot serve, and those that torch is faster at.

Imports no framework; where a tensor is torch's, torch is already there. This is the one place that knows how torch is
asked for a product, for serving and for measuring (`aot.tune.gemm.baseline`) alike.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..numbers.dtypes import DTYPES
from ..numbers.epilogue import CLAMPED, CLAMPED_ALPHA, CLAMPED_LIMIT, GATES, Epilogue
from ..numbers.scaling import SCALINGS
from ..program.outputs import on_stream
from ..program.pointers import PointerChecks
from ..program.record import TensorView
from ..program.streams import stream_handle
from .call import EXTRAS
from .signature import Signature

_SCALE_A, _SCALE_B, _BIAS = (EXTRAS.index(name) for name in ("scale_a", "scale_b", "bias"))
_NO_OPERANDS = (None,) * len(EXTRAS)
_SCALED_PRODUCTS = ("tensor", "row_column", "block")  # of which one call was tried
_WIDE = frozenset(d.name for d in DTYPES.values() if d.mantissa_bits is not None and d.bits >= 16)
_SCALE_MULTIPLE = 4  # what cuBLAS wants factors of blocks to be apart: rows of A, and rows of those of B


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
    """The activation of `value`, or what gates make of it, with half the columns."""
    name = epilogue.activation
    if not epilogue.gated:
        return _activate(torch, name, value)
    if epilogue.interleaved:
        gate, up = value[..., 0::2], value[..., 1::2]
    else:
        gate, up = value.chunk(2, dim=-1)
    if name == CLAMPED:
        gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
        return gate * torch.sigmoid(CLAMPED_ALPHA * gate) * (up + 1)
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


# --- products, as torch is asked for them ---

# A product: torch, A, B as (N, K), the operands of `EXTRAS` or None, and an output or None; gives the output.
Product = Callable[[Any, Any, Any, Sequence[Any], Any], Any]


def plain_product(torch: Any, a: Any, b: Any, _operands: Sequence[Any], out: Any) -> Any:
    """A @ B^T of 16-bit matrices."""
    return torch.mm(a, b.t(), out=out)


def batched_product(torch: Any, a: Any, b: Any, _operands: Sequence[Any], out: Any) -> Any:
    """A @ B^T of batches of 16-bit matrices."""
    return torch.bmm(a, b.transpose(1, 2), out=out)


def product_with_bias(torch: Any, a: Any, b: Any, operands: Sequence[Any], out: Any) -> Any:
    """A @ B^T + bias of 16-bit matrices."""
    return torch.addmm(operands[_BIAS], a, b.t(), out=out)


def scaled_product(dtype: str, row_wise: bool, adds_bias: bool = False) -> Product:
    """scale_a * scale_b * A @ B^T of 8-bit floats in `dtype`, a factor for each row and column or one for each tensor.

    Sums of row-wise products are promoted to f32, as ours are; those of the others are fast, as ours are too.
    """
    shapes = ((-1, 1), (1, -1)) if row_wise else ((), ())

    def run(torch: Any, a: Any, b: Any, operands: Sequence[Any], out: Any) -> Any:
        scale_a, scale_b = operands[_SCALE_A].view(shapes[0]), operands[_SCALE_B].view(shapes[1])
        bias, wanted = operands[_BIAS] if adds_bias else None, getattr(torch, DTYPES[dtype].torch)
        return torch._scaled_mm(
            a, b.t(), scale_a, scale_b, bias=bias, out_dtype=wanted, use_fast_accum=not row_wise, out=out
        )

    return run


def block_scaled_product(dtype: str) -> Product:
    """A @ B^T of 8-bit floats in `dtype`, with a factor for each 1 x 128 of A and 128 x 128 of B.

    The rows must be a multiple of 4, and factors lie as `lie_for_torch` says.
    """

    def run(torch: Any, a: Any, b: Any, operands: Sequence[Any], out: Any) -> Any:
        scale_a, scale_b, wanted = operands[_SCALE_A], operands[_SCALE_B].t(), getattr(torch, DTYPES[dtype].torch)
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=wanted, use_fast_accum=False, out=out)

    return run


# --- where torch is faster ---


@functools.lru_cache(1024)
def one_call(signature: Signature) -> Product | None:
    """The one call of torch's that computes `signature`; None where it takes several, or none does.

    These are 16-bit products, plain, batched or with a bias, in their own element type; and products of 8 bits with
    scales, of a (K-major) B, in 16 or 32 bits, with a bias where that has 16 bits and scales are not of blocks. Whether
    a version of torch has a kernel for the latter on a GPU shows when it is asked.
    """
    parts, d = signature.parts, signature.d
    if parts not in (Epilogue(), Epilogue(bias=True)):
        return None
    if DTYPES[signature.a].bits == 16:
        if not signature.a == signature.b == d or signature.scaling != "none":
            return None
        if signature.batch > 1:
            return None if parts.bias else batched_product
        return product_with_bias if parts.bias else plain_product
    if signature.a != signature.b or signature.batch > 1 or signature.b_major != "k":
        return None
    if signature.scaling not in _SCALED_PRODUCTS or signature.a not in SCALINGS[signature.scaling].of:
        return None
    if d not in _WIDE or (parts.bias and (DTYPES[d].bits != 16 or signature.scaling == "block")):
        return None
    if signature.scaling == "block":
        return block_scaled_product(d)
    return scaled_product(d, signature.scaling == "row_column", parts.bias)


def torch_runs(signature: Signature) -> bool:
    """Whether torch computes `signature` in one call, so that it may serve where it was measured to be faster."""
    return one_call(signature) is not None


def lie_for_torch(signature: Signature, views: Mapping[str, TensorView]) -> bool:
    """Whether the caller's tensors lie in memory as `one_call` of their signature takes them.

    A batch of one may not, nor may factors of blocks: torch wants those of A column after column, and rows of those
    of B apart by a multiple, of 4 rows or factors.
    """
    if signature.batch == 1 and len(views["b"].shape) != 2:
        return False
    if signature.scaling != "block":
        return True
    rows, (of_a, of_b) = views["a"].shape[:-1], (views[name] for name in ("scale_a", "scale_b"))
    step = -(-of_b.shape[1] // _SCALE_MULTIPLE) * _SCALE_MULTIPLE
    return (
        len(rows) == 1 and rows[0] % _SCALE_MULTIPLE == 0 and of_a.strides == (1, rows[0]) and of_b.strides == (step, 1)
    )


def rows_matter(signature: Signature) -> bool:
    """Whether `lie_for_torch` may say otherwise of the same call with other rows."""
    return signature.scaling == "block"


class TorchCall:
    """torch's own call for calls of `gemm` that are alike but for their pointers; `count` is called after each."""

    __slots__ = ("_checks", "_compute", "_count", "_run", "_shape", "_torch")

    def __init__(
        self,
        signature: Signature,
        views: Mapping[str, TensorView],
        shape: tuple[int, ...],
        count: Callable[[], object],
    ) -> None:
        """`views` are the call's tensors by operand, as kernels would take them; `shape` is that of the result."""
        run = one_call(signature)
        assert run is not None
        self._torch, self._run, self._count, self._shape = sys.modules["torch"], run, count, shape
        self._compute = self._flattened if signature.batch == 1 and len(shape) != 2 else run
        self._checks = PointerChecks.of(tuple(views.values()), [1] * len(views), [tuple(views).index("d")])

    def with_rows(self, more: int, steps: Sequence[int]) -> TorchCall:
        """This for matrices with `more` rows; `steps` are the bytes from row to row of each operand, 0 where it has
        none."""
        grown: TorchCall = object.__new__(TorchCall)
        grown._torch, grown._run, grown._count, grown._compute = self._torch, self._run, self._count, self._run
        grown._shape = (self._shape[0] + more, *self._shape[1:])
        grown._checks = self._checks.grown(more, steps)
        return grown

    def __call__(self, a: Any, b: Any, out: Any, stream: Any, operands: Sequence[Any] = _NO_OPERANDS) -> Any:
        """Compute: gives `out`, or a new tensor; None, and nothing was done, where tensors have no memory or `out` has
        some of the others'. Whatever torch raises passes through."""
        if operands is _NO_OPERANDS and out is None:
            if not (a.data_ptr() and b.data_ptr()):
                return None
        elif not self._fits(a, b, out, operands):
            return None
        torch = self._torch
        if stream is None and not torch.is_grad_enabled() and not torch.is_autocast_enabled():
            found = self._compute(torch, a, b, operands, out)
        else:
            handle = None if stream is None else stream_handle(stream)
            with torch.no_grad(), torch.autocast("cuda", enabled=False), on_stream(handle, a):
                found = self._compute(torch, a, b, operands, out)
        self._count()
        return found

    def _fits(self, a: Any, b: Any, out: Any, operands: Sequence[Any]) -> bool:
        given = [x.data_ptr() for x in operands if x is not None]
        if out is None:
            return all([a.data_ptr(), b.data_ptr(), *given])
        return self._checks.fit([a.data_ptr(), b.data_ptr(), out.data_ptr(), *given])

    def _flattened(self, torch: Any, a: Any, b: Any, operands: Sequence[Any], out: Any) -> Any:
        """The product of all rows, for tensors of other than two dimensions."""
        rows = None if out is None else out.view(-1, self._shape[-1])
        found = self._run(torch, a.view(-1, a.shape[-1]), b, operands, rows)
        return found.view(self._shape) if out is None else out
