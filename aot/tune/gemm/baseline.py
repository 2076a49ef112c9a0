"""What torch would run in place of a GEMM, the fastest that it has: what measurements are set against.

Needs torch and a GPU. Whether torch has a fast path for something depends on its version and the GPU, so each is tried
on real operands, and the name that comes back says which was taken.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from runtime.gemm.call import EXTRAS
from runtime.gemm.fallback import (
    Product,
    apply_activation,
    batched_product,
    block_scaled_product,
    plain_product,
    product_with_bias,
    scaled_product,
)
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES, DType
from runtime.numbers.epilogue import Epilogue
from runtime.numbers.scaling import SCALINGS, TILES

from ..elements import TORCH_DTYPES
from ..measure import Launch, MeasureError
from .operands import OperandSet, reference, weights_as_numbers

COPIES_BYTES = 180 << 20  # three times the L2 of an H200


class _Product(NamedTuple):
    """A way to scale(A @ B^T), perhaps plus bias, in `dtype`; `run` takes an output or makes one."""

    name: str
    run: Callable[[OperandSet, torch.Tensor | None], torch.Tensor]
    dtype: torch.dtype
    adds_bias: bool = False


def baseline(signature: Signature, example: OperandSet) -> tuple[str, Launch]:
    """What torch runs for a signature, and its name; it has run on `example`, so it is compiled and can be captured.

    An epilogue that the product does not take is one elementwise kernel made by torch.compile, or where that fails
    eager torch; the name says which. Resets torch.compile, whose limit on recompilations would otherwise be reached
    after a few signatures.

    Raises:
        MeasureError: torch runs none of what could be tried.
    """
    reasons = []
    for product in _products(signature, example.a.device):
        try:
            product.run(example, None)
        except (RuntimeError, ValueError, TypeError) as error:
            reasons.append(f"{product.name}: {str(error).splitlines()[0]}")
            continue
        return _with_epilogue(signature, product, example)
    raise MeasureError(f"torch cannot compute {signature.key()}: {'; '.join(reasons)}")


# --- products ---


def _products(signature: Signature, device: torch.device) -> Iterator[_Product]:
    """The ways to try, fastest first."""
    dtype = TORCH_DTYPES["bf16" if DTYPES[signature.d].narrow and DTYPES[signature.a].narrow else signature.d]
    if signature.b != signature.a:
        yield _of_dequantised(signature)
    elif not DTYPES[signature.a].narrow:
        yield _of_16_bits(signature)
    elif signature.scaling == "block":
        yield _Product("torch._scaled_mm block-wise", lambda o, out: _block_wise(o, dtype, out), dtype)
    elif SCALINGS[signature.scaling].layout == TILES:
        yield _in_tiles(signature, dtype)
    elif SCALINGS[signature.scaling].k is None:  # scales multiply sums
        if signature.parts.bias:
            yield _scaled(signature, dtype, device, adds_bias=True)
        yield _scaled(signature, dtype, device)
        yield _scaled(signature, torch.bfloat16, device)
    if DTYPES[signature.a].narrow:  # which takes any extents and scales
        yield _Product("dequantise, torch.mm", lambda o, out: _dequantised(signature, o, dtype, out), dtype)


def _of_16_bits(signature: Signature) -> _Product:
    dtype = TORCH_DTYPES[signature.a]
    if signature.batch > 1:
        return _of_torch("torch.bmm", batched_product, dtype)
    if signature.parts.bias and signature.d == signature.a:
        return _of_torch("torch.addmm", product_with_bias, dtype, adds_bias=True)
    return _of_torch("torch.mm", plain_product, dtype)


def _of_dequantised(signature: Signature) -> _Product:
    """The 16-bit product of dequantised weights. The first call makes these, of its operands; calls take copies of them
    in turn, more than L2 holds, because what is captured afterwards must not dequantise."""
    weights: list[torch.Tensor] = []
    turns = itertools.count()

    def run(o: OperandSet, out: torch.Tensor | None) -> torch.Tensor:
        if not weights:
            first = weights_as_numbers(signature, o.b, o.extras).to(o.a.dtype)
            copies = COPIES_BYTES // first.nbytes
            weights.extend([first, *(first.clone() for _ in range(copies))])
        found: torch.Tensor = plain_product(torch, o.a, weights[next(turns) % len(weights)], (), out)
        return found

    return _Product("torch.mm of dequantised weights", run, TORCH_DTYPES[signature.a])


def _of_torch(name: str, run: Product, dtype: torch.dtype, adds_bias: bool = False) -> _Product:
    """A product as `runtime.gemm.fallback` asks torch for it."""
    return _Product(name, lambda o, out: run(torch, o.a, o.b, _operands(o), out), dtype, adds_bias)


def _operands(o: OperandSet) -> tuple[Any, ...]:
    return tuple(o.extras.get(name) for name in EXTRAS)


def _scaled(signature: Signature, dtype: torch.dtype, device: torch.device, adds_bias: bool = False) -> _Product:
    """`torch._scaled_mm`, row-wise or tensor-wise; scales are 1 where the signature has none."""
    row_wise = signature.scaling == "row_column"
    one = torch.ones((), device=device)
    of_torch = scaled_product(_word(dtype), row_wise, adds_bias)

    def run(o: OperandSet, out: torch.Tensor | None) -> torch.Tensor:
        scale_a, scale_b, *rest = _operands(o)
        scales = (one, one) if scale_a is None else (scale_a, scale_b)
        found: torch.Tensor = of_torch(torch, o.a, o.b, (*scales, *rest), out)
        return found

    name = "torch._scaled_mm row-wise" if row_wise else "torch._scaled_mm tensor-wise, fast accumulation"
    return _Product(name + (" with bias" if adds_bias else ""), run, dtype, adds_bias)


def _block_wise(o: OperandSet, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    """cuBLAS takes a multiple of 4 rows: those behind A, which `aot.tune.gemm.operands` puts there."""
    m, k = o.a.shape
    scale_a, scale_b, *rest = _operands(o)
    rows = scale_a.stride(1)
    a = o.a.as_strided((rows, k), o.a.stride())
    scales = scale_a.as_strided((rows, scale_a.shape[1]), (1, rows))
    whole = out if rows == m else None
    found: torch.Tensor = block_scaled_product(_word(dtype))(torch, a, o.b, (scales, scale_b, *rest), whole)
    return found[:m]


def _in_tiles(signature: Signature, dtype: torch.dtype) -> _Product:
    """`torch._scaled_mm` with scales of blocks, which takes no factor of the whole product: it does that much less."""

    def run(o: OperandSet, out: torch.Tensor | None) -> torch.Tensor:
        scale_a, scale_b, *_ = _operands(o)
        found: torch.Tensor = torch._scaled_mm(o.a, o.b.t(), scale_a, scale_b, out_dtype=dtype, out=out)
        return found

    less = " without its tensor scale" if SCALINGS[signature.scaling].tensor_scale else ""
    return _Product(f"torch._scaled_mm {signature.scaling}{less}", run, dtype)


def _word(dtype: torch.dtype) -> str:
    return next(word for word, known in TORCH_DTYPES.items() if known == dtype)


def _dequantised(signature: Signature, o: OperandSet, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    plain = dataclasses.replace(signature, epilogue="none", d="bf16")
    found = reference(
        plain, OperandSet(o.a, o.b, o.d, {n: t for n, t in o.extras.items() if n in ("scale_a", "scale_b", "scale_ab")})
    )
    return found.to(dtype) if out is None else out.copy_(found)


# --- epilogues ---


def _with_epilogue(signature: Signature, product: _Product, example: OperandSet) -> tuple[str, Launch]:
    parts = signature.parts._replace(bias=signature.parts.bias and not product.adds_bias)
    name = product.name
    if parts == Epilogue() and product.dtype == TORCH_DTYPES[signature.d]:
        return name, lambda o: product.run(o, o.d)
    what = parts.word() if parts != Epilogue() else f"to {signature.d}"
    finish = _finisher(parts, DTYPES[signature.d])
    torch._dynamo.reset()
    compiled = torch.compile(finish, fullgraph=True)

    def launch_with(run: Callable[[torch.Tensor, OperandSet], None]) -> Launch:
        return lambda o: run(product.run(o, None), o)

    def run_compiled(sums: torch.Tensor, o: OperandSet) -> None:
        tensors = [sums, o.d, *(o.extras[n] for n in ("residual",) if n in o.extras)]
        for tensor in tensors:  # one kernel for every M
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        compiled(sums, o.d, o.extras.get("bias"), o.extras.get("residual"), o.extras.get("scale_d"))

    def run_eager(sums: torch.Tensor, o: OperandSet) -> None:
        finish(sums, o.d, o.extras.get("bias"), o.extras.get("residual"), o.extras.get("scale_d"))

    try:
        launch_with(run_compiled)(example)
    except Exception as error:  # whatever a compiler, a C++ toolchain or Triton may raise
        launch_with(run_eager)(example)
        return f"{name}, eager {what} ({type(error).__name__} in torch.compile)", launch_with(run_eager)
    return f"{name}, torch.compile'd {what}", launch_with(run_compiled)


def _finisher(parts: Epilogue, dtype: DType) -> Callable[..., None]:
    """From sums to D, which has `dtype`, elementwise, as one writes it in torch."""
    narrow, largest = dtype.narrow, dtype.largest

    def finish(
        sums: torch.Tensor,
        d: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        scale_d: torch.Tensor | None,
    ) -> None:
        value = sums.float()
        if parts.bias and bias is not None:
            value = value + bias
        value = apply_activation(torch, parts, value)
        if residual is not None:
            value = value + residual
        if scale_d is not None:
            value = value * scale_d
        if narrow:
            value = value.clamp(-largest, largest)
        d.copy_(value)

    return finish
