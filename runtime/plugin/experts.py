"""Which of a model's experts an archive computes, and the launches that compute them, into buffers of the server's.

Knows the weights of experts as servers hold them, and no module of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import AotError
from ..grouped_gemm import Signature as GroupedGemm
from ..moe.combine import Signature as MoeCombine
from ..moe.permute import Signature as MoePermute
from ..numbers.epilogue import Epilogue
from ..program.tensor import dtype_name
from ..serve.library import Library
from ..torch.operator import bare
from .linears import Decision, weight_problem

EXPERTS = "expert layer"
_OVERLAP = "launch"  # kernels may start while the one before ends, which all of the four wait for
_INTS = 4  # i32 that fill 16 bytes, at multiples of which tensors begin


@dataclass(frozen=True)
class ExpertsDecision(Decision):
    """What becomes of the experts of one layer: `per_token` are the keys of the signatures whose M counts tokens, and
    `per_row` of those whose M counts rows, `top_k` for each token. Both are empty where the server computes them."""

    per_token: tuple[str, ...] = ()
    per_row: tuple[str, ...] = ()
    top_k: int = 0

    @property
    def asked(self) -> str:
        """All that is called, in one word, empty if the server computes it."""
        return " ".join((*self.per_token, *self.per_row))

    @property
    def keys(self) -> set[str]:
        """The signatures that may be called."""
        return {*self.per_token, *self.per_row}

    def keys_by_rows(self) -> dict[int, set[str]]:
        """The same, by how many rows their kernels see for each token."""
        found = {1: set(self.per_token)}
        return found | {self.top_k: found.get(self.top_k, set()) | set(self.per_row)}


def left(reason: str) -> ExpertsDecision:
    """That the server computes them."""
    return ExpertsDecision(EXPERTS, reason=reason)


def decide(
    lib: Library,
    w13: Any,
    w2: Any,
    top_k: int,
    activation: str,
    expert_map: Any = None,
    biases: Sequence[Any] = (),
) -> ExpertsDecision:
    """What `lib` has for experts with these weights, w13 (experts, 2N, K) and w2 (experts, K, N); only kernels that
    were found right on a GPU. `activation` is a gated epilogue of grouped_gemm, which says how rows of gate and up lie;
    `expert_map` (global experts), i32, is there where ids are of more experts than these; `biases` are none, or those
    of w13 (experts, 2N) and of w2 (experts, K)."""
    for name, weight in (("gate and up", w13), ("down", w2)):
        if problem := _problem(lib, weight):
            return left(f"of {name}, {problem}")
    (experts, wide, k), dtype = w13.shape, dtype_name(w13.dtype)
    if tuple(w2.shape) != (experts, k, wide // 2) or wide % 2 or w2.dtype != w13.dtype:
        return left(f"weights of shapes {tuple(w13.shape)} and {tuple(w2.shape)} are no gate, up and down")
    if w13.element_size() != 2:
        return left(f"weights of {w13.dtype} are not of 16 bits")
    for name, weight, bias in zip(("gate and up", "down"), (w13, w2), biases, strict=False):
        if bias.dtype != weight.dtype or tuple(bias.shape) != tuple(weight.shape[:2]) or not bias.is_contiguous():
            return left(f"the bias of {name} is no {tuple(weight.shape[:2])} of the weight's type")
    if expert_map is not None and (expert_map.dtype != torch.int32 or expert_map.dim() != 1):
        return left(f"the map of experts is {expert_map.dtype} {tuple(expert_map.shape)}")
    globally = 0 if expert_map is None else expert_map.shape[0]
    of_tokens = MoePermute(dtype, experts, top_k, k, globally), MoeCombine(dtype, dtype, top_k, k)
    gate, down = (e._replace(bias=bool(biases)).word() for e in (Epilogue.of(activation), Epilogue()))
    of_rows = (
        GroupedGemm(dtype, dtype, dtype, experts, wide, k, gate, _OVERLAP),
        GroupedGemm(dtype, dtype, dtype, experts, k, wide // 2, down, _OVERLAP),
    )
    keys: list[tuple[str, ...]] = []
    for signatures in (of_tokens, of_rows):
        found = []
        for signature in signatures:
            try:
                entry = lib.entry(signature)
            except AotError as error:  # there is none, or nothing for this GPU, or a table that makes no sense
                return left(str(error).partition("\n")[0])
            if entry.state != "tuned":
                return left(f"{entry.signature.key()} is {entry.state}, never run on a GPU; run: aot tune")
            found.append(entry.signature.key())
        keys.append(tuple(dict.fromkeys(found)))
    per_token, per_row = keys
    return ExpertsDecision(EXPERTS, per_token=per_token, per_row=per_row, top_k=top_k)


def _problem(lib: Library, weight: Any) -> str:
    """Why no kernel reads this weight (experts, N, K), whatever its shape; empty if one may."""
    if len(getattr(weight, "shape", ())) != 3:
        return "the weight is no stack of matrices"
    if not weight.is_contiguous():
        return f"the weight has strides {tuple(weight.stride())}"
    return weight_problem(lib, weight.data.view(-1, weight.shape[2]))


@dataclass(frozen=True)
class Buffers:
    """What the launches keep between them, for T tokens: `wide`, as many elements as `wide_elements` says, and
    `inner`, T * top_k * N, both of the weights' type, contiguous, and apart from each other and all else."""

    wide: torch.Tensor
    inner: torch.Tensor


@dataclass(frozen=True)
class Made:
    """What experts made for tokens: rows (T * top_k, K), where each assignment's row is, and weights, f32, (T, top_k).

    A view of `Buffers.wide`, and so valid until that is written again."""

    rows: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Launches:
    """The experts of one layer: three launches of `lib` that make rows, and a fourth that adds them up. `biases` are
    none, or those of w13 and of w2, as `decide` was given them."""

    lib: Library
    activation: str
    biases: tuple[torch.Tensor, ...] = ()

    def make(
        self,
        hidden: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        buffers: Buffers,
    ) -> Made:
        """Rows for hidden (T, K), with ids, i32 or i64, and weights (T, top_k), which are kept for `combine`.

        Nothing is allocated where ids are i32 and weights f32, and nothing asked of the device.

        Raises:
            KernelMiss: the archive lacks a function for one of the three.
            ArgumentError: the tensors do not go together.
        """
        (tokens, k), top_k, experts = hidden.shape, ids.shape[1], w13.shape[0]
        rows = buffers.wide[: tokens * top_k * k].view(-1, k)
        inner = buffers.inner.view(-1)[: tokens * top_k * w2.shape[2]].view(-1, w2.shape[2])
        ints = _ints(tokens, top_k, experts)
        numbers = buffers.wide[len(buffers.wide) - ints * 4 // buffers.wide.element_size() :].view(torch.int32)
        ends, positions = numbers[:experts], numbers[ints - tokens * top_k :].view(tokens, top_k)
        words = {} if expert_map is None else {"expert_map": expert_map}
        given = hidden, ids.to(torch.int32).contiguous()
        gates, down = bare(w13), bare(w2)
        of_gates, of_down = ({"bias": bare(bias)} for bias in self.biases) if self.biases else ({}, {})
        self.lib.call("moe_permute", *given, experts=experts, out=(rows, ends, positions), **words)
        self.lib.grouped_gemm(rows, gates, ends, epilogue=self.activation, overlap=_OVERLAP, out=inner, **of_gates)
        self.lib.grouped_gemm(inner, down, ends, overlap=_OVERLAP, out=rows, **of_down)
        return Made(rows, positions, weights.to(torch.float32).contiguous())

    def combine(self, made: Made, out: torch.Tensor) -> None:
        """Add up to `out` (T, K) what the experts of each token made; raises as `make` does."""
        self.lib.call("moe_combine", made.rows, made.positions, made.weights, out=out)


def wide_elements(rows: int, width: int, experts: int, element_bytes: int) -> int:
    """How many elements `Buffers.wide` has for so many rows, T * top_k, of `width` elements, K or more: the rows, and
    behind them, at a multiple of 16 bytes, where experts end and where rows are."""
    of_rows = -(-rows * width * element_bytes // 16) * 16
    return (of_rows + 4 * _ints(rows, 1, experts)) // element_bytes


def _ints(tokens: int, top_k: int, experts: int) -> int:
    """How many i32 are at the end of `Buffers.wide`: `experts`, and then, at a multiple of 16 bytes, the positions."""
    return -(-experts // _INTS) * _INTS + tokens * top_k
