"""Products of tokens that nobody has quantised yet: by a kernel that quantises them as it loads them, by two of the
library's, or behind what quantises in the server.

What the library refuses is done in the next of these ways, and at last by torch. Knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, KernelMiss
from ..program.operation import OVERLAPS
from ..serve.library import Library
from ..torch.operator import bare
from .log import say_once
from .packed_rows import multiply_packed, pack, unpacked
from .scaled_products import extents, in_f32, multiply, multiply_by_torch

_OF_QUANTISED = "was computed of quantised tokens"


class Unquantised(NamedTuple):
    """How a layer in fp8, whose GEMM of quantised tokens has this `scaling`, is computed of tokens as they are.

    Kernels of its GEMM quantise up to `few` tokens as they load them, with the promise `overlap`. More are quantised by
    the library if it `quantises`, else by the server, and up to `behind` of them the GEMM overlaps with that kernel. Or
    they are `packed`, as `packed_rows.unpacked` reads them.
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


def by_server(x: torch.Tensor, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x in e4m3, and its scales, as the server makes them; see `quantise_with`."""
    return _quantisers[scaling](x)


def multiply_unquantised(
    lib: Library, x: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, way: Unquantised, to: dict[str, Any]
) -> torch.Tensor:
    """The product of x (M, K) and b (N, K), by one kernel of few tokens, or by one that multiplies behind one that
    quantises, unless that was done before; `to` is the "dtype" of what is made, or the "out" that is written."""
    x = bare(x)
    tokens = x.shape[0]
    if tokens <= way.few and (found := few_tokens(lib, x, b, scale_b, way, to)) is not None:
        return found
    b, overlap = bare(b), OVERLAPS[-1 if tokens <= way.behind else 0]
    rows = packed_rows(lib, x, b.shape[0], way)
    if rows is None:
        a, scale_a = by_server(x, way.scaling)
        return multiply(lib, a, b, scale_a, scale_b, to, overlap)
    out = to["out"] if "out" in to else x.new_empty((tokens, b.shape[0]), dtype=to["dtype"])
    try:
        multiply_packed(lib, rows, b, scale_b, way.scaling, overlap, out)
    except (KernelMiss, ArgumentError) as error:
        a, scale_a = unpacked(rows, way.scaling)
        multiply_by_torch(lib, a, b, scale_a, in_f32(scale_b), {"out": out}, error)
    return out


def few_tokens(
    lib: Library, x: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, way: Unquantised, more: dict[str, Any]
) -> torch.Tensor | None:
    """The product by a kernel that quantises, with more words for `Library.gemm`; None where it refuses, and that is
    said."""
    return tried(lib, "an fp8 GEMM of few tokens", bare(x), b, {"scale_b": scale_b, "overlap": way.overlap, **more})


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
        say_once(lib, f"what quantises for an fp8 GEMM {extents(n, x.shape[1])}", error, "was left to the server")
        return None
    return rows


def tried(lib: Library, what: str, a: torch.Tensor, b: torch.Tensor, words: dict[str, Any]) -> torch.Tensor | None:
    """`Library.gemm` with these words; None where it refuses, and then it is said what became of it."""
    scales: dict[str, Any] = {name: in_f32(words[name]) for name in ("scale_a", "scale_b") if name in words}
    try:
        found: torch.Tensor = lib.gemm(a, bare(b), **(words | scales))
    except (KernelMiss, ArgumentError) as error:
        refused(lib, what, b, words.get("epilogue"), error)
        return None
    return found


def refused(lib: Library, what: str, b: torch.Tensor, epilogue: str | None, error: Exception) -> None:
    """Say what became of a product with this B that the library refused, with an epilogue or without."""
    with_it, then = (f" with {epilogue}", "took two kernels") if epilogue else ("", _OF_QUANTISED)
    say_once(lib, f"{what} {extents(*b.shape)}{with_it}", error, then)
