"""Products with scales as operators of torch's, which serve every M: `cute_aot::scaled_gemm`, and of activations that
nobody has quantised yet `cute_aot::quantising_gemm`.

Where no kernel of the library takes a call, which the library itself refuses in fp8, torch computes it inside.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, KernelMiss
from ..numbers.quantised import scale_shape
from ..numbers.scaling import SCALE_BLOCK
from ..program.operation import OVERLAPS
from ..serve.library import Library
from ..torch.operator import DIRECT, OPERATORS, TAGS, Direct, bare, library_of, tell_inductor


class Unquantised(NamedTuple):
    """How a layer in fp8, whose GEMM of quantised tokens has this `scaling`, is computed of tokens as they are.

    Kernels of its GEMM quantise up to `few` tokens as they load them, with the promise `overlap`. More are quantised by
    the library if it `quantises`, else by the server, and up to `behind` of them the GEMM overlaps with that kernel. Or
    they are `packed`, as `unpacked` reads them.
    """

    scaling: str
    few: int
    overlap: str
    quantises: bool
    behind: int
    packed: bool = False


Quantiser = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_quantisers: dict[str, Quantiser] = {}  # the server's, by scaling


def quantise_with(scaling: str, quantiser: Quantiser) -> None:
    """Let the server's own function quantise x (M, K), to e4m3 and the scales that `scaling` has, where the library
    does not."""
    _quantisers[scaling] = quantiser


# Where it is said that torch computed a call of a library; that of no server, as far as nothing else was said.
_logs: weakref.WeakKeyDictionary[Library, logging.Logger] = weakref.WeakKeyDictionary()


def log_to(lib: Library, log: logging.Logger) -> None:
    """Let calls of `lib` that torch computes be said in `log`."""
    _logs[lib] = log


OPERATORS.define(
    "scaled_gemm(int library, Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType dtype) -> Tensor",
    tags=TAGS,
)


def _scaled_gemm(
    library: int, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return _computed(library, a, b, scale_a, scale_b, {"dtype": dtype})


def direct(library: int, *_names: str, dtype: torch.dtype) -> Callable[..., None]:
    """What generated code calls in the place of the operator; see `runtime.torch.direct`."""

    def call(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *, out: torch.Tensor
    ) -> None:
        _computed(library, a, b, scale_a, scale_b, {"out": out})

    return call


def _computed(
    library: int,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    to: dict[str, Any],
    overlap: str = OVERLAPS[0],
) -> torch.Tensor:
    """The product in the element type `to["dtype"]`, or written to `to["out"]`."""
    a, b, scale_a, scale_b = bare(a), bare(b), _in_f32(scale_a), _in_f32(scale_b)
    promised = {} if overlap == OVERLAPS[0] else {"overlap": overlap}
    lib = library_of(library)
    try:
        found: torch.Tensor = lib.gemm(a, b, scale_a=scale_a, scale_b=scale_b, **promised, **to)
    except (KernelMiss, ArgumentError) as error:
        found = _by_torch(lib, a, b, scale_a, scale_b, to, error)
    return found


def _by_torch(
    lib: Library,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    to: dict[str, Any],
    error: Exception,
) -> torch.Tensor:
    """The product that the library refused."""
    say_once(lib, f"an fp8 GEMM {_of(*b.shape)}", error)
    found = _widened(a, scale_a) @ _widened(b, scale_b).T
    return to["out"].copy_(found) if "out" in to else found.to(to["dtype"])


OPERATORS.define(
    "quantising_gemm(int library, Tensor x, Tensor b, Tensor scale_b, ScalarType dtype, str scaling, int few, "
    "str overlap, bool quantises, int behind, bool packed) -> Tensor",
    tags=TAGS,
)


def _quantising_gemm(
    library: int,
    x: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
    *way: Any,
) -> torch.Tensor:
    return quantising(library, x, b, scale_b, Unquantised(*way), {"dtype": dtype})


def direct_quantising(library: int, *_names: str, dtype: torch.dtype, **way: Any) -> Callable[..., None]:
    """As `direct`, of `quantising_gemm`."""
    of = Unquantised(**way)

    def call(x: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, *, out: torch.Tensor) -> None:
        quantising(library, x, b, scale_b, of, {"out": out})

    return call


def quantising(
    library: int, x: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, way: Unquantised, to: dict[str, Any]
) -> torch.Tensor:
    """The product, by one kernel of few tokens, or by one that multiplies behind one that quantises, unless that was
    done before; `to` is the "dtype" of what is made, or the "out" that is written."""
    x, lib = bare(x), library_of(library)
    tokens = x.shape[0]
    if tokens <= way.few and (found := few_tokens(lib, x, b, scale_b, way, to)) is not None:
        return found
    b, overlap = bare(b), OVERLAPS[-1 if tokens <= way.behind else 0]
    rows = packed_rows(lib, x, b.shape[0], way)
    if rows is None:
        a, scale_a = by_server(x, way.scaling)
        return _computed(library, a, b, scale_a, scale_b, to, overlap)
    out = to["out"] if "out" in to else x.new_empty((tokens, b.shape[0]), dtype=to["dtype"])
    try:
        multiply_packed(lib, rows, b, scale_b, way.scaling, overlap, out)
    except (KernelMiss, ArgumentError) as error:
        a, scale_a = unpacked(rows, way.scaling)
        _by_torch(lib, a, b, scale_a, _in_f32(scale_b), {"out": out}, error)
    return out


def multiply_packed(
    lib: Library,
    rows: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    scaling: str,
    overlap: str,
    out: torch.Tensor,
    epilogue: str = "none",
) -> None:
    """Write the product of packed rows to `out`, by `Library.gemm`.

    Raises:
        KernelMiss, ArgumentError: the library refuses it.
    """
    words, held = ("gemm", scaling, overlap, epilogue), (rows, b, _in_f32(scale_b), out)
    if not lib.launch_packed(words, *held):
        a, scale_a = unpacked(rows, scaling)
        more: dict[str, Any] = {"scale_a": scale_a, "scale_b": held[2], "epilogue": epilogue, "overlap": overlap}
        lib.call_packed(words, held, (0, 1, 3, 0, 2), "gemm", a, b, out=out, **more)


def few_tokens(
    lib: Library, x: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, way: Unquantised, more: dict[str, Any]
) -> torch.Tensor | None:
    """The product by a kernel that quantises, with more words for `Library.gemm`; None where it refuses, and that is
    said."""
    return tried(lib, "an fp8 GEMM of few tokens", bare(x), b, {"scale_b": scale_b, "overlap": way.overlap, **more})


def tried(lib: Library, what: str, a: torch.Tensor, b: torch.Tensor, words: dict[str, Any]) -> torch.Tensor | None:
    """`Library.gemm` with these words; None where it refuses, and then it is said what became of it."""
    scales: dict[str, Any] = {name: _in_f32(words[name]) for name in ("scale_a", "scale_b") if name in words}
    try:
        found: torch.Tensor = lib.gemm(a, bare(b), **(words | scales))
    except (KernelMiss, ArgumentError) as error:
        refused(lib, what, b, words.get("epilogue"), error)
        return None
    return found


def refused(lib: Library, what: str, b: torch.Tensor, epilogue: str | None, error: Exception) -> None:
    """Say what became of a product with this B that the library refused, with an epilogue or without."""
    with_it, then = (f" with {epilogue}", "took two kernels") if epilogue else ("", _OF_QUANTISED)
    say_once(lib, f"{what} {_of(*b.shape)}{with_it}", error, then)


def unpacked(rows: torch.Tensor, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of contiguous rows (M, K) of 16 bits, in whose memory M * K elements of e4m3 are followed by their scales: both,
    as views."""
    m, k = rows.shape
    shape = _scale_shape(scaling, m, k)
    scale = rows.view(torch.float32).as_strided(shape, (*shape[1:], 1), rows.storage_offset() // 2 + m * k // 4)
    return rows.view(torch.float8_e4m3fn).as_strided((m, k), (k, 1)), scale


_scale_shape = functools.lru_cache(4096)(scale_shape)  # whose arithmetic takes the host longer than a launch


def packed_rows(lib: Library, x: torch.Tensor, n: int, way: Unquantised) -> torch.Tensor | None:
    """x as packed rows, for a GEMM of this N, unless it is packed; None where that is left to the server."""
    if way.packed and x.shape[0] > way.few:
        return x
    if not way.quantises:
        return None
    rows = torch.empty_like(x, memory_format=torch.contiguous_format)
    try:
        pack(lib, x, way.scaling, rows)
    except (KernelMiss, ArgumentError) as error:
        say_once(lib, f"what quantises for an fp8 GEMM {_of(n, x.shape[1])}", error, "was left to the server")
        return None
    return rows


def pack(lib: Library, x: torch.Tensor, scaling: str, rows: torch.Tensor, activation: str = "none") -> None:
    """Pack x into rows (M, K): as it is, or the activation of x (M, 2 K).

    Raises:
        KernelMiss, ArgumentError: the library refuses it.
    """
    words = "quantise", scaling, activation
    if not lib.launch_packed(words, x, rows):
        out = unpacked(rows, scaling)
        lib.call_packed(words, (x, rows), (0, 1, 1), "quantise", x, scaling=scaling, activation=activation, out=out)


def by_server(x: torch.Tensor, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x in e4m3, and its scales, as the server makes them; see `quantise_with`."""
    return _quantisers[scaling](x)


def _in_f32(scales: torch.Tensor) -> torch.Tensor:
    """Scales as kernels take them; of checkpoints, some are ue8m0."""
    scales = bare(scales)
    return scales if scales.dtype is torch.float32 else scales.float()


def _widened(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x (rows, K) in float32, scaled: by one number, one for each row, or one for each 1 or 128 rows by 128 columns."""
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    for axis in (0, 1):
        if scales.shape[axis] not in (1, x.shape[axis]):
            scales = scales.repeat_interleave(SCALE_BLOCK, axis).narrow(axis, 0, x.shape[axis])
    return x.float() * scales


_BY_TORCH, _OF_QUANTISED = "was computed by torch, slowly", "was computed of quantised tokens"


def say_once(lib: Library, what: str, error: Exception, then: str = _BY_TORCH) -> None:
    """Say what becomes of `what`, since `lib` refused it with this error."""
    reason = getattr(error, "reason", "its operands")
    _say_once(_logs.get(lib, logging.getLogger("cute_aot")), what, then, type(error).__name__, reason)


@functools.lru_cache(1024)
def _say_once(log: logging.Logger, what: str, then: str, error: str, reason: str) -> None:
    log.warning("%s %s: %s, %s", what, then, error, reason)


def _of(n: int, k: int) -> str:
    return f"of N {n} and K {k}"


for _key in ("CUDA", "CPU"):
    OPERATORS.impl("scaled_gemm", _scaled_gemm, _key)
    OPERATORS.impl("quantising_gemm", _quantising_gemm, _key)


@torch.library.register_fake("cute_aot::scaled_gemm", lib=OPERATORS)
def _fake(library: int, a: torch.Tensor, b: torch.Tensor, _a: Any, _b: Any, dtype: torch.dtype) -> torch.Tensor:
    tell_inductor()
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


@torch.library.register_fake("cute_aot::quantising_gemm", lib=OPERATORS)
def _fake_quantising(library: int, x: torch.Tensor, b: torch.Tensor, _b: Any, dtype: torch.dtype, *_way: Any) -> Any:
    tell_inductor()
    return x.new_empty((x.shape[0], b.shape[0]), dtype=dtype)


SCALED = torch.ops.cute_aot.scaled_gemm.default
QUANTISING = torch.ops.cute_aot.quantising_gemm.default
DIRECT[SCALED] = Direct(__name__, "direct")
DIRECT[QUANTISING] = Direct(__name__, "direct_quantising")
