"""Norms and activations that quantise what they make for the fp8 GEMMs that read it, in place of a kernel between:
operators of torch's, and the pass over vLLM's compiled graphs that puts them there.

For more than `few` tokens, which GEMMs quantise themselves, rows are packed: the memory of M * K elements of 16 bits
holds M * K of e4m3 and behind them their scales. So nobody but `cute_aot::quantising_gemm`, told so, may read them,
which the pass makes sure of. The GEMM of gates may compute the activation too. Knows no module of vLLM's.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, KernelMiss
from ..gemm.signature import Signature
from ..numbers.dtypes import TORCH_NAMES
from ..numbers.quantised import NARROW
from ..plugin.activations import EPILOGUE
from ..plugin.gated import activation_of
from ..plugin.linears import is_tuned, of_few, with_gates
from ..plugin.log import say_once
from ..plugin.packed_rows import multiply_packed, pack, unpacked
from ..plugin.quantising import (
    Unquantised,
    by_server,
    few_tokens,
    multiply_unquantised,
    packed_rows,
    refused,
    tried,
)
from ..plugin.scaled import QUANTISING
from ..program.operation import OVERLAPS
from ..program.tensor import dtype_name
from ..quantise import Signature as Quantise
from ..rmsnorm import Signature as Norm
from ..serve.library import Library
from ..torch.direct import norm_and_sum
from ..torch.direct_calls import DIRECT, Direct
from ..torch.norms import ADD_RMSNORM
from ..torch.operator import OPERATORS, TAGS, bare, library_of, tell_inductor

_BY_SERVER = "was left to one that does not, and to the server"


class Rows(NamedTuple):
    """Rows of `k` elements of a type, by short name, that fp8 GEMMs with this scaling read; up to `few` they quantise
    themselves."""

    dtype: str
    k: int
    scaling: str
    few: int


def norm_of(dtype: str, n: int, scaling: str) -> Norm:
    """The signature of a norm, with a residual, of rows of `n` elements of this type, which quantises."""
    return Norm(dtype, dtype, NARROW, n, dtype, scaling)


def swiglu_of(dtype: str, k: int, scaling: str) -> Quantise:
    """That of SwiGLU of rows of 2 * `k` elements of this type, which quantises."""
    return Quantise(dtype, NARROW, k, scaling, activation=EPILOGUE)


# --- norms ---

# As `cute_aot::add_rmsnorm`, the norm and the sum in one tensor (2, M, N); the norm is packed.
OPERATORS.define(
    "add_rmsnorm_packed(int library, Tensor x, Tensor residual, Tensor weight, float eps, str scaling, int few) -> "
    "Tensor",
    tags=TAGS,
)


def _add_rmsnorm_packed(
    library: int, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scaling: str, few: int
) -> torch.Tensor:
    both = x.new_empty((2, *x.shape))
    direct_norm(library, eps=eps, scaling=scaling, few=few)(x, residual, weight, out=both)
    return both


def direct_norm(library: int, *_names: str, eps: float, scaling: str, few: int) -> Callable[..., None]:
    """What generated code calls in the place of the operator; see `runtime.torch.direct`."""
    words = "rmsnorm", scaling, eps

    def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
        lib, held = library_of(library), (bare(x), bare(residual), bare(weight), out)
        x, residual, weight, _ = held
        if x.shape[0] <= few:
            norm_and_sum(lib, x, residual, weight, out, eps)
            return
        if lib.launch_packed(words, *held):
            return
        norm, total = out.unbind()
        y, scale = unpacked(norm, scaling)
        more = {"residual": residual, "scaling": scaling, "out": (y, scale, total), "eps": eps}
        try:
            lib.call_packed(words, held, (0, 2, 1, 3, 3, 3), "rmsnorm", x, weight, **more)
        except (KernelMiss, ArgumentError) as error:
            say_once(lib, f"a norm of N {x.shape[1]} that quantises", error, _BY_SERVER)
            apart = torch.empty_like(x)
            lib.call("rmsnorm", x, weight, residual=residual, out=(apart, total), eps=eps)
            _pack(apart, scaling, y, scale)

    return call


def _pack(rows: torch.Tensor, scaling: str, y: torch.Tensor, scale: torch.Tensor) -> None:
    """Let the server quantise rows, and put what it gives where it is looked for."""
    for to, made in zip((y, scale), by_server(rows, scaling), strict=True):
        to.copy_(made.reshape(to.shape))


@torch.library.register_fake("cute_aot::add_rmsnorm_packed", lib=OPERATORS)
def _fake_norm(_library: int, x: torch.Tensor, *_: Any) -> torch.Tensor:
    tell_inductor()
    return x.new_empty((2, *x.shape))


# --- activations ---

# The server's own activation, (M, K) of x (M, 2 K), as something that the pass knows; and that which packs.
OPERATORS.define("swiglu(int library, Tensor x) -> Tensor", tags=TAGS)
OPERATORS.define("swiglu_packed(int library, Tensor x, str scaling, int few) -> Tensor", tags=TAGS)


def _swiglu(library: int, x: torch.Tensor) -> torch.Tensor:
    return activation_of(library)(bare(x))


# Generated code calls both through the dispatcher: the server's activation gives its result where it likes, up to `few`
# tokens.
def _swiglu_packed(library: int, x: torch.Tensor, scaling: str, few: int) -> torch.Tensor:
    x = bare(x)
    if x.shape[0] <= few:
        return activation_of(library)(x)
    rows = x.new_empty((x.shape[0], x.shape[1] // 2))
    _pack_rows(library, x, scaling, rows, EPILOGUE)
    return rows


def _pack_rows(library: int, x: torch.Tensor, scaling: str, rows: torch.Tensor, activation: str = "none") -> None:
    """Pack x into rows (M, K): as it is, or the activation of x (M, 2 K)."""
    lib = library_of(library)
    try:
        pack(lib, x, scaling, rows, activation)
    except (KernelMiss, ArgumentError) as error:
        k, plain = rows.shape[1], activation == "none"
        what = f"what quantises rows of K {k}" if plain else f"a SwiGLU of K {k} that quantises"
        say_once(lib, what, error, "was left to the server" if plain else _BY_SERVER)
        _pack(x if plain else activation_of(library)(x), scaling, *unpacked(rows, scaling))


class Gated(NamedTuple):
    """Up to how many tokens kernels compute SwiGLU with the GEMM of gates before it: those that quantise themselves,
    and those that begin behind what quantises; and whether others do of more."""

    few: int
    behind: int
    more: bool


# `quantising_gemm` of gates and what they gate, as it is given, and then `swiglu_packed`; the last three are `Gated`.
OPERATORS.define(
    "gated_packed(int library, Tensor x, Tensor b, Tensor scale_b, ScalarType dtype, str scaling, int few, "
    "str overlap, bool quantises, int behind, bool packed, str scaling_after, int few_after, int gated_few, "
    "int gated_behind, bool gated_more) -> Tensor",
    tags=TAGS,
)
_OF_GATED = "scaling_after", "few_after", "gated_few", "gated_behind", "gated_more"


def _gated_packed(
    library: int, x: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype, *how: Any
) -> torch.Tensor:
    rows = x.new_empty((x.shape[0], b.shape[0] // 2), dtype=dtype)
    words = dict(zip((*Unquantised._fields, *_OF_GATED), how, strict=True))
    direct_gated(library, dtype=dtype, **words)(x, b, scale_b, out=rows)
    return rows


def direct_gated(
    library: int,
    *_names: str,
    dtype: torch.dtype,
    scaling_after: str,
    few_after: int,
    gated_few: int,
    gated_behind: int,
    gated_more: bool,
    **way: Any,
) -> Callable[..., None]:
    """What generated code calls in the place of the operator; see `runtime.torch.direct`."""
    of, gated = Unquantised(**way), Gated(gated_few, gated_behind, gated_more)

    def call(x: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, *, out: torch.Tensor) -> None:
        packs = x.shape[0] > few_after
        lib = library_of(library)
        rows = _with_gates(lib, x, b, scale_b, of, gated, None if packs else out)
        if rows is not None and packs:
            _pack_rows(library, rows, scaling_after, out)
        elif rows is None:
            rows = multiply_unquantised(lib, x, b, scale_b, of, {"dtype": dtype})
            if packs:
                _pack_rows(library, rows, scaling_after, out, EPILOGUE)
            else:
                out.copy_(activation_of(library)(rows))

    return call


def _with_gates(
    lib: Library, x: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, way: Unquantised, gated: Gated, out: Any
) -> torch.Tensor | None:
    """The activation (M, K) of a product of gates, written to `out` if it is given; None where no kernel computes
    both."""
    m = x.shape[0]
    if m <= gated.few:
        to = {"dtype": x.dtype} if out is None else {"out": out}
        return few_tokens(lib, x, b, scale_b, way, {"epilogue": EPILOGUE, **to})
    if m <= way.few or not (gated.more or m <= gated.behind):
        return None
    x, b, overlap = bare(x), bare(b), OVERLAPS[-1 if m <= gated.behind else 0]
    rows = packed_rows(lib, x, b.shape[0], way)
    if out is None:
        out = x.new_empty((m, b.shape[0] // 2))
    if rows is None:
        a, scale_a = by_server(x, way.scaling)
        more = {"scale_a": scale_a, "scale_b": scale_b, "epilogue": EPILOGUE, "overlap": overlap, "out": out}
        return tried(lib, "an fp8 GEMM", a, b, more)
    try:
        multiply_packed(lib, rows, b, scale_b, way.scaling, overlap, out, EPILOGUE)
    except (KernelMiss, ArgumentError) as error:
        refused(lib, "an fp8 GEMM", b, EPILOGUE, error)
        return None
    return out


@torch.library.register_fake("cute_aot::gated_packed", lib=OPERATORS)
def _fake_gated(_library: int, x: torch.Tensor, b: torch.Tensor, _b: Any, dtype: torch.dtype, *_: Any) -> torch.Tensor:
    tell_inductor()
    return x.new_empty((x.shape[0], b.shape[0] // 2), dtype=dtype)


@torch.library.register_fake("cute_aot::swiglu", lib=OPERATORS)
def _fake_swiglu(_library: int, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.register_fake("cute_aot::swiglu_packed", lib=OPERATORS)
def _fake_swiglu_packed(_library: int, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


for _key in ("CUDA", "CPU"):  # the CPU too, where the library itself says what is wrong
    OPERATORS.impl("add_rmsnorm_packed", _add_rmsnorm_packed, _key)
    OPERATORS.impl("swiglu", _swiglu, _key)
    OPERATORS.impl("swiglu_packed", _swiglu_packed, _key)
    OPERATORS.impl("gated_packed", _gated_packed, _key)

PACKED_NORM = torch.ops.cute_aot.add_rmsnorm_packed.default
SWIGLU = torch.ops.cute_aot.swiglu.default
PACKED_SWIGLU = torch.ops.cute_aot.swiglu_packed.default
GATED_PACKED = torch.ops.cute_aot.gated_packed.default
DIRECT[PACKED_NORM] = Direct(__name__, "direct_norm")
DIRECT[GATED_PACKED] = Direct(__name__, "direct_gated")


class Activation(torch.nn.Module):
    """The activation of an MLP, as an operator that the pass knows where x is (M, 2 K) of this type, else as it was."""

    def __init__(self, number: int, activation: torch.nn.Module, dtype: str) -> None:
        super().__init__()
        self.number, self.activation, self.dtype = number, activation, getattr(torch, TORCH_NAMES[dtype])

    def forward(self, x: torch.Tensor) -> Any:
        """What torch.compile traces."""
        if x.dim() != 2 or x.dtype != self.dtype:
            return self.activation(x)
        return SWIGLU(self.number, x.contiguous())


# --- the pass ---


class _Read(NamedTuple):
    """The GEMMs that read something, all alike, and how: the library's number, the scaling, and up to how many tokens
    they quantise themselves."""

    by: list[Any]
    library: int
    scaling: str
    few: int


def fuse(graph: torch.fx.Graph) -> None:
    """Let norms with a residual, and activations, quantise what only GEMMs read that quantise all alike, where the
    library was tuned for that."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (ADD_RMSNORM, SWIGLU):
            continue
        is_norm, value = node.target is ADD_RMSNORM, node.meta.get("val")
        read = _read(_norms(node) if is_norm else [node])
        if read is None or read.library != node.args[0] or value is None or value.dim() != (3 if is_norm else 2):
            continue
        of = norm_of if is_norm else swiglu_of
        if is_tuned(library_of(read.library), of(dtype_name(value.dtype), int(value.shape[-1]), read.scaling)):
            gated = None if is_norm else _gated(node, read)
            if gated is None:
                _put(graph, node, node, PACKED_NORM if is_norm else PACKED_SWIGLU, (read.scaling, read.few))
            else:
                gates = node.args[1]
                _put(graph, node, gates, GATED_PACKED, (read.scaling, read.few, *gated))
                graph.erase_node(gates)
            for gemm in read.by:
                gemm.args = (*gemm.args[:5], *Unquantised(*gemm.args[5:])._replace(packed=True))


def _put(graph: torch.fx.Graph, node: Any, of: Any, packed: Any, more: tuple[Any, ...]) -> None:
    """Put an operator that packs, with what `of` is given and more, in the place of `node`."""
    with graph.inserting_before(node):
        new = graph.call_function(packed, (*of.args, *more))
    new.meta.update(node.meta)
    new.meta.pop("eager_input_vals", None)
    if (given := of.meta.get("eager_input_vals")) is not None:  # by whose strides Inductor lays out what is given
        new.meta["eager_input_vals"] = (*given[0], *more), given[1]
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _gated(node: Any, read: _Read) -> Gated | None:
    """Of how many tokens kernels compute an activation with the GEMM before it, where GEMMs `read` it so; None where
    none does."""
    gates, lib = node.args[1], library_of(read.library)
    if gates.target is not QUANTISING or gates.args[0] != read.library or list(gates.users) != [node]:
        return None
    (x, b), dtype, way = (of.meta.get("val") for of in gates.args[1:3]), gates.args[4], Unquantised(*gates.args[5:])
    if x is None or b is None or x.dtype != dtype:
        return None
    d, (n, k) = dtype_name(dtype), map(int, b.shape)
    product = Signature(NARROW, dtype_name(b.dtype), d, "f32", "none", n, k, scaling=way.scaling)
    ways = of_few(product, way.overlap), dataclasses.replace(product, overlap=OVERLAPS[-1]), product
    few, behind, more = (0 if found is None else found.most or 0 for found in (with_gates(lib, of) for of in ways))
    if not is_tuned(lib, Quantise(d, NARROW, n // 2, read.scaling)):
        behind = more = 0  # what they give would be quantised by nobody
    least = min(way.few, read.few)  # of which all are to have it: others' activation would be copied to its place
    found = Gated(least, behind if behind > way.few else 0, more > 0)
    return found if any(found) and few >= least else None


def _read(parts: Iterable[Any]) -> _Read | None:
    """How all `parts` are read, where that is by GEMMs that quantise alike, and nothing else; a part may be None, for a
    use of something else."""
    found = list[Any]()
    for part in parts:
        if part is None:
            return None
        for user in part.users:
            if user.target is not QUANTISING or [at for at, of in enumerate(user.args) if of is part] != [1]:
                return None
            found.append(user)
    ways = {(gemm.args[0], (way := Unquantised(*gemm.args[5:])).scaling, way.few, way.packed) for gemm in found}
    if len(ways) != 1:
        return None
    ((library, scaling, few, packed),) = ways
    return None if packed else _Read(found, library, scaling, few)


def _norms(node: Any) -> Iterator[Any]:
    """What is the first half of a node's tensor (2, M, N), and None for any use of it but a half."""
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
