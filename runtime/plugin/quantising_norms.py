"""Norms that quantise rows for the fp8 GEMMs that read them, in place of a kernel between: two operators of torch's,
and the pass over a server's compiled graph that puts them there.

`cute_aot::add_rmsnorm_packed` gives the norm and the sum in one tensor (2, M, N), as `cute_aot::add_rmsnorm` does. For
more than `few` rows the norm is packed: its M * N elements of 16 bits hold M * N of e4m3 and behind them the scales. So
nobody but `cute_aot::quantising_gemm`, told so, may read it, which the pass makes sure of. Knows no server.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import AotError, ArgumentError, KernelMiss
from ..numbers.quantised import NARROW
from ..program.tensor import dtype_name
from ..rmsnorm import Signature
from ..serve.library import Library
from ..torch.norms import ADD_RMSNORM
from ..torch.operator import DIRECT, OPERATORS, TAGS, Direct, bare, library_of, tell_inductor
from .scaled import QUANTISING, Unquantised, by_server, say_once, unpacked

OPERATORS.define(
    "add_rmsnorm_packed(int library, Tensor x, Tensor residual, Tensor weight, float eps, str scaling, int few) -> "
    "Tensor",
    tags=TAGS,
)


def _packed(
    library: int, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *way: Any
) -> torch.Tensor:
    both = x.new_empty((2, *x.shape))
    _launch(library, x, residual, weight, both, eps, *way)
    return both


def direct(library: int, *_names: str, eps: float, scaling: str, few: int) -> Callable[..., None]:
    """What generated code calls in the place of the operator; see `runtime.torch.direct`."""

    def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
        _launch(library, x, residual, weight, out, eps, scaling, few)

    return call


def _launch(
    library: int,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    both: torch.Tensor,
    eps: float,
    scaling: str,
    few: int,
) -> None:
    lib, x, residual, weight = library_of(library), bare(x), bare(residual), bare(weight)
    norm, total = both.unbind()
    if x.shape[0] <= few:
        lib.call("rmsnorm", x, weight, residual=residual, out=(norm, total), eps=eps)
        return
    y, scale = unpacked(norm, scaling)
    try:
        lib.call("rmsnorm", x, weight, residual=residual, scaling=scaling, out=(y, scale, total), eps=eps)
    except (KernelMiss, ArgumentError) as error:
        what, then = f"a norm of N {x.shape[1]} that quantises", "was left to one that does not, and to the server"
        say_once(lib, what, error, then)
        apart = torch.empty_like(x)
        lib.call("rmsnorm", x, weight, residual=residual, out=(apart, total), eps=eps)
        for to, made in zip((y, scale), by_server(apart, scaling), strict=True):
            to.copy_(made.reshape(to.shape))


for _key in ("CUDA", "CPU"):  # the CPU too, where the library itself says what is wrong
    OPERATORS.impl("add_rmsnorm_packed", _packed, _key)


@torch.library.register_fake("cute_aot::add_rmsnorm_packed", lib=OPERATORS)
def _fake(_library: int, x: torch.Tensor, *_: Any) -> torch.Tensor:
    tell_inductor()
    return x.new_empty((2, *x.shape))


PACKED = torch.ops.cute_aot.add_rmsnorm_packed.default
DIRECT[PACKED] = Direct(__name__, "direct")


def signature_of(dtype: str, n: int, scaling: str) -> Signature:
    """That of a norm of rows of `n` elements of this type which quantises."""
    return Signature(dtype, dtype, NARROW, n, dtype, scaling)


def is_tuned(lib: Library, dtype: str, n: int, scaling: str) -> bool:
    """Whether `lib` was tuned for a norm that quantises so."""
    try:
        return lib.is_tuned(signature_of(dtype, n, scaling))
    except AotError:  # an element type that has none, or no table of this operation
        return False


# --- the pass ---


def fuse(graph: torch.fx.Graph) -> None:
    """Let norms with a residual quantise whose rows only GEMMs read that quantise all alike, where the library was
    tuned for that."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is ADD_RMSNORM:
            _fuse(graph, node)


def _fuse(graph: torch.fx.Graph, node: Any) -> None:
    library, x, residual, weight, eps = node.args
    readers = list(_readers(node))
    if not readers or not all(isinstance(reader, torch.fx.Node) for reader in readers):
        return
    ways = {(reader.args[0], Unquantised(*reader.args[5:])) for reader in readers}
    alike = {(number, way.scaling, way.few, way.packed) for number, way in ways}
    if len(alike) != 1:
        return
    ((number, scaling, few, packed),) = alike
    val = node.meta.get("val")
    if number != library or packed or val is None or val.dim() != 3:
        return
    if not is_tuned(library_of(library), dtype_name(val.dtype), int(val.shape[-1]), scaling):
        return
    with graph.inserting_before(node):
        new = graph.call_function(PACKED, (library, x, residual, weight, eps, scaling, few))
    new.meta.update({key: of for key, of in node.meta.items() if key != "eager_input_vals"})
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    for reader in readers:
        reader.args = (*reader.args[:5], *Unquantised(*reader.args[5:])._replace(packed=True))


def _readers(node: Any) -> Iterator[Any]:
    """The GEMMs that read the norm of a node (2, M, N), and None for any other use of it."""
    for part in _norms(node):
        if part is None:
            yield None
            continue
        for user in part.users:
            if user.target is QUANTISING and [at for at, given in enumerate(user.args) if given is part] == [1]:
                yield user
            else:
                yield None


def _norms(node: Any) -> Iterator[Any]:
    """What is the first half of a node's tensor, and None for any use of it but a half."""
    for user in node.users:
        if user.target is torch.ops.aten.unbind.int and user.args in ((node,), (node, 0)):
            for half in user.users:
                if half.target is not operator.getitem:
                    yield None
                elif half.args[1] == 0:
                    yield half
        elif user.target is torch.ops.aten.select.int and user.args[:2] == (node, 0):
            if user.args[2] == 0:
                yield user
            elif user.args[2] != 1:
                yield None
        else:
            yield None
