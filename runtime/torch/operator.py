"""`Library.gemm` as an operator of torch's, which graphs can hold: `cute_aot::gemm` and `cute_aot::gemm_out`.

Knows nothing of models or of who puts the operator into a graph.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from ..errors import ArgumentError
from ..gemm.call import EXTRAS, GemmOptions, check_shapes, epilogue_of, result_shape, signature_of
from ..numbers.dtypes import DTYPES, TORCH_NAMES
from ..program.outputs import result_dtype
from ..program.record import TensorView
from ..program.tensor import dtype_name, in_elements
from ..serve.library import Library, alive
from .direct_calls import DIRECT, Direct

if TYPE_CHECKING:
    from typing import Unpack

_log = logging.getLogger(__name__)

# --- libraries by number ---

# Operators take no objects, so a graph names its library by number, and this is where numbers lead. It keeps no library
# alive.
_libraries: weakref.WeakValueDictionary[int, Library] = weakref.WeakValueDictionary()
_numbers: weakref.WeakKeyDictionary[Library, int] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def register(lib: Library, *, identity: str | None = None) -> int:
    """The number by which operators of `cute_aot` know `lib`; the library must be kept, and open, while it is used.

    It follows from archive, device and options, so that compiled graphs, which hold it, can be kept on disk: in another
    process it is the same. Once a library was closed or is gone, the next like it takes its number. At the first call
    for a library `identity` may be given to follow from instead, where graphs of one device are run on another.

    Raises:
        ArgumentError: `lib` is none, or was closed.
    """
    if not isinstance(lib, Library):
        raise ArgumentError(f"lib must be what runtime.load returns, found {type(lib).__name__}")
    if lib.closed:
        raise ArgumentError("this library was closed; load the archive again")
    number = _numbers.get(lib)
    if number is not None:
        return number
    with _lock:
        number = int.from_bytes(hashlib.sha256((identity or lib.identity).encode()).digest()[:6], "big")
        while (other := _libraries.get(number)) is not None and not other.closed:
            number += 1
        _libraries[number] = lib
        _numbers[lib] = number
    return number


@torch.compiler.assume_constant_result
def register_by_id(object_id: int) -> int:
    """`register` of the library with this `id`, which the trace that asks holds."""
    return register(alive[object_id])


def number_of(lib: Library) -> int:
    """`register`, also where torch traces the call."""
    return register_by_id(id(lib)) if torch.compiler.is_compiling() else register(lib)


def library_of(number: int) -> Library:
    """The library that `register` gave this number.

    Raises:
        ArgumentError: there is none.
    """
    lib = _libraries.get(number)
    if lib is None:
        raise ArgumentError(
            f"cute_aot knows no library {number}: it is gone, or this process never loaded it; load the archive, "
            "keep the library, and pass it to runtime.torch.register"
        )
    return lib


# --- the operator ---

ALIGNMENT_BYTES = 16  # what kernels ask of addresses and rows (TMA)

_SCALARS = "str epilogue='none', str overlap='serial'"
_OPERANDS = ", ".join(f"Tensor? {name}=None" for name in EXTRAS)
OPERATORS = torch.library.Library("cute_aot", "DEF")
# Views of weights must come to the kernel as they are, not as a copy of another layout.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
OPERATORS.define(
    f"gemm(int library, Tensor a, Tensor b, *, {_OPERANDS}, {_SCALARS}, ScalarType? dtype=None) -> Tensor", tags=TAGS
)
OPERATORS.define(
    f"gemm_out(int library, Tensor a, Tensor b, Tensor(a!) out, *, {_OPERANDS}, {_SCALARS}) -> ()", tags=TAGS
)


_BARE = (torch.Tensor, torch.nn.Parameter)  # classes that answer for themselves, which native code reads


def bare(x: torch.Tensor) -> torch.Tensor:
    """What an operator was given, as a torch.Tensor where its class has a `__torch_function__`, as vLLM's weights have:
    each attribute would be looked up through that, and native code leaves such a class to Python.

    A class without memory of its own never reaches an operator on a device: torch asks its `__torch_dispatch__` before.
    """
    if type(x) in _BARE:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach()


def _gemm(library: int, a: torch.Tensor, b: torch.Tensor, **more: Any) -> torch.Tensor:
    result: torch.Tensor = library_of(library).gemm(bare(a), bare(b), **more)
    return result


def _gemm_out(library: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **more: Any) -> None:
    library_of(library).gemm(bare(a), bare(b), out=out, **more)


# Also for the CPU, where the library itself says what is wrong.
for _key in ("CUDA", "CPU"):
    OPERATORS.impl("gemm", _gemm, _key)
    OPERATORS.impl("gemm_out", _gemm_out, _key)


def _described(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    *,
    epilogue: str = "none",
    overlap: str = "serial",
    dtype: torch.dtype | None = None,
    **operands: torch.Tensor | None,
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and element type of the result, which `out` must have; raises as `Library.gemm` does, for shapes and types.

    Extents may be symbols.
    """
    given = {"a": a, "b": b} | {name: x for name in EXTRAS if (x := operands.get(name)) is not None}
    views = {name: description(name, x, a) for name, x in given.items()}
    check_shapes(views["a"], views["b"])
    whole = epilogue_of(epilogue, views)
    shape = result_shape(views["a"], views["b"], whole)
    if out is None:
        d = TensorView(0, result_dtype(views["a"].dtype) if dtype is None else dtype_name(dtype), shape, (), 0)
    else:
        d = description("out", out, a)
        if d.shape != shape:
            raise ArgumentError(
                f"out must have shape {shape} for a {views['a'].shape} and b {views['b'].shape}, found {d.shape}"
            )
    signature_of({"a": views.pop("a"), "b": views.pop("b"), "d": d} | views, whole, overlap)
    return shape, getattr(torch, DTYPES[d.dtype].torch)


def description(name: str, x: torch.Tensor, first: torch.Tensor, of: str = "a") -> TensorView:
    """A tensor of a trace as a view at no address; its extents may be symbols. `first`, called `of`, is on the device.

    Raises:
        ArgumentError: it is on another device, or of an element type that is not known.
    """
    if x.device != first.device:
        raise ArgumentError(f"{name} is on {x.device} and {of} on {first.device}; move them to one device")
    try:
        dtype = dtype_name(x.dtype)
    except ArgumentError:
        known = ", ".join(TORCH_NAMES.values())
        raise ArgumentError(f"{name} has element type {x.dtype}; it must be one of {known}") from None
    return TensorView(0, dtype, *in_elements(dtype, tuple(x.shape), tuple(x.stride()), name), 0)


@torch.library.register_fake("cute_aot::gemm", lib=OPERATORS)
def _fake_gemm(library: int, a: torch.Tensor, b: torch.Tensor, **more: Any) -> torch.Tensor:
    tell_inductor()
    shape, dtype = _described(a, b, None, **more)
    return a.new_empty(shape, dtype=dtype)


@torch.library.register_fake("cute_aot::gemm_out", lib=OPERATORS)
def _fake_gemm_out(library: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **more: Any) -> None:
    _described(a, b, out, **more)


GEMM = torch.ops.cute_aot.gemm.default
_GEMM_OUT = torch.ops.cute_aot.gemm_out.default
DIRECT[GEMM] = Direct(f"{__package__}.direct", "gemm")


def tell_inductor() -> None:
    """Let Inductor lower the operators in `DIRECT`, if it was imported: whenever one of them is traced, since by then
    it was, where it is what compiles."""
    if "torch._inductor.lowering" in sys.modules and (lowering := _lowering()) is not None:
        lowering.install()


@functools.lru_cache(None)
def _lowering() -> Any:
    """The module that knows Inductor; None where that is not as it is known."""
    try:
        from . import lowering
    except (ImportError, AttributeError, TypeError) as error:
        _log.warning("compiled code calls operators through torch's dispatcher, which takes longer: %s", error)
        return None
    return lowering


def gemm(
    lib: Library, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, **more: Unpack[GemmOptions]
) -> torch.Tensor:
    """`lib.gemm(a, b, ...)` on torch's current stream, in eager mode and inside torch.compile (fullgraph, dynamic M).

    Shapes, keywords and errors are those of `Library.gemm`; `dtype` is a torch.dtype. `out` is written and returned.

    Raises:
        ArgumentError: also where a gradient would have to be recorded, which the archive's kernels do not do.
    """
    number = number_of(lib)
    refuse_gradient("gemm", (a, b, *(x for x in more.values() if isinstance(x, torch.Tensor))))
    if out is None:
        result: torch.Tensor = GEMM(number, a, b, **more)
        return result
    dtype = more.pop("dtype", None)
    if dtype not in (None, out.dtype):
        raise ArgumentError(f"out has element type {out.dtype}, dtype says {dtype}; pass one of them")
    _GEMM_OUT(number, a, b, out, **more)
    return out


def refuse_gradient(what: str, tensors: Iterable[torch.Tensor | None]) -> None:
    """Raise ArgumentError where a call on these tensors would have to record a gradient, or compute one forward."""
    given = [x for x in tensors if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        raise ArgumentError(
            f"{what} would have to record a gradient, which kernels of an archive do not; call it under "
            "torch.no_grad() or torch.inference_mode()"
        )
    dual = not torch.compiler.is_compiling() and forward_ad._current_level >= 0  # which no public name says
    if dual and any(forward_ad.unpack_dual(x).tangent is not None for x in given):
        raise ArgumentError(f"{what} would have to compute a tangent (forward-mode AD), which kernels do not")
