"""Which of a model's experts an archive computes, and the launches that compute them, into buffers of the server's.

Knows the weights of experts as servers hold them, and no module of theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import AotError
from ..grouped_gemm import OVERLAP_OF_EXPERTS
from ..grouped_gemm import Signature as GroupedGemm
from ..moe.combine import Signature as MoeCombine
from ..moe.permute import Signature as MoePermute
from ..numbers.epilogue import Epilogue
from ..numbers.quantised import scale_shape
from ..numbers.scaling import SCALE_BLOCK
from ..program.tensor import dtype_name
from ..quantise import Signature as Quantise
from ..serve.library import Library
from ..torch.experts import Between, Narrow, columns_of, expected_rows, make_rows
from ..torch.operator import bare
from ..torch.weights import PreparedWeight, widened
from .linears import Decision, weight_problem
from .log import warn_once

EXPERTS = "expert layer"
NAMES = "gate and up", "down"
_INTS = 4  # i32 that fill 16 bytes, at multiples of which tensors begin


@dataclass(frozen=True)
class ExpertsDecision(Decision):
    """What becomes of the experts of one layer: the keys of the signatures that are called, by how many rows each token
    has; none where the server computes them. It is 0 where experts are elsewhere, and functions are so chosen for fewer
    rows than operands have: only a call makes a plan of that."""

    by_rows: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def asked(self) -> str:
        """All that is called, in one word, empty if the server computes it."""
        return " ".join(key for keys in self.by_rows.values() for key in keys)

    @property
    def keys(self) -> set[str]:
        """The signatures that may be called."""
        return {key for keys in self.by_rows.values() for key in keys}

    def keys_by_rows(self) -> dict[int, set[str]]:
        """The same, by how many rows of each token, or 0."""
        return {rows: set(keys) for rows, keys in self.by_rows.items()}


def left(reason: str) -> ExpertsDecision:
    """That the server computes them."""
    return ExpertsDecision(EXPERTS, reason=reason)


def say_refused(log: logging.Logger, server: str, error: Exception) -> None:
    """Say once that `server`'s kernels computed experts, since launches were refused with this error."""
    what = str(error).partition("\n")[0]
    warn_once(log, f"experts were computed by {server}'s kernels: {what}")


@dataclass(frozen=True)
class ExpertWeights:
    """What a server holds of experts: w13 (experts, 2N, K) and w2 (experts, K, N), their biases (experts, 2N) and
    (experts, K), or none, and, of e4m3, f32 scales of blocks of 128 x 128 for both, else none. `tokens` is the element
    type of what goes in and comes out, that of weights of 16 bits. `weighed` says where router weights are
    multiplied with: what experts make ("output"), as most have it; tokens ("permute"); or tokens before they come
    ("before"), so that what experts make is added up alone."""

    w13: torch.Tensor
    w2: torch.Tensor
    tokens: torch.dtype
    biases: tuple[torch.Tensor, ...] = ()
    scales: tuple[torch.Tensor, ...] = ()
    weighed: str = "output"

    def problem(self, lib: Library) -> str:
        """Why these are none of experts that kernels of `lib` compute; empty if they may be."""
        w13, w2 = self.w13, self.w2
        for name, weight in zip(NAMES, (w13, w2), strict=True):
            if problem := stack_problem(lib, weight):
                return f"of {name}, {problem}"
        experts, wide, k = w13.shape
        if tuple(w2.shape) != (experts, k, wide // 2) or wide % 2 or w2.dtype != w13.dtype:
            return f"weights of shapes {tuple(w13.shape)} and {tuple(w2.shape)} are no gate, up and down"
        if w13.element_size() != 2 and not self.scales:
            return f"weights of {w13.dtype} are not of 16 bits"
        if w13.dtype != (torch.float8_e4m3fn if self.scales else self.tokens):
            return f"weights are {w13.dtype}, and tokens {self.tokens}"
        for name, weight, scale in zip(NAMES, (w13, w2), self.scales, strict=False):
            blocks = (experts, *(-(-extent // SCALE_BLOCK) for extent in weight.shape[1:]))
            if scale.dtype != torch.float32 or tuple(scale.shape) != blocks or not scale.is_contiguous():
                return f"scales of {name} are {scale.dtype} {tuple(scale.shape)}, not f32 {blocks} of blocks"
        return self.bias_problem()

    def bias_problem(self) -> str:
        """Why these are no biases of the two; empty if they are, or if there are none."""
        for name, extents, bias in zip(NAMES, self.extents(), self.biases, strict=False):
            if bias.dtype != self.tokens or tuple(bias.shape) != extents[:2] or not bias.is_contiguous():
                return f"the bias of {name} is no {extents[:2]} of the tokens' type"
        return ""

    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(experts, 2N, K) and (experts, K, N), the last perhaps in units of two."""
        return tuple(self.w13.shape), tuple(self.w2.shape)

    def signatures(self, top_k: int, activation: str, global_experts: int) -> tuple[list[Any], list[Any], list[Any]]:
        """Those whose M counts tokens; those whose M counts rows, of which there are `top_k` times as many; and one of
        the latter kind that takes the place of two of these where the archive has it."""
        (experts, wide, k), d = self.w13.shape, dtype_name(self.tokens)
        a, scaling = dtype_name(self.w13.dtype), "block" if self.scales else "none"
        gate, down = self.epilogues(activation)
        of_rows: list[Any] = [
            GroupedGemm(a, a, d, experts, wide, k, gate, OVERLAP_OF_EXPERTS, scaling),
            GroupedGemm(a, a, d, experts, k, wide // 2, down, OVERLAP_OF_EXPERTS, scaling),
        ]
        better: list[Any] = []
        if self.scales:
            of_rows.append(Quantise(d, a, wide // 2, scaling, experts))
            better.append(GroupedGemm(a, a, a, experts, wide, k, gate, OVERLAP_OF_EXPERTS, scaling))
        return self.of_tokens(top_k, k, global_experts, scaling), of_rows, better

    def epilogues(self, activation: str) -> tuple[str, str]:
        """Of both grouped GEMMs."""
        gate, down = (e._replace(bias=bool(self.biases)).word() for e in (Epilogue.of(activation), Epilogue()))
        return gate, down

    def of_tokens(self, top_k: int, k: int, global_experts: int, scaling: str = "none") -> list[Any]:
        """The signatures whose M counts tokens."""
        experts, d = len(self.w13), dtype_name(self.tokens)
        of_permute, of_combine = ("f32" if self.weighed == where else "none" for where in ("permute", "output"))
        permute = MoePermute(d, experts, top_k, k, global_experts, scaling, of_permute)
        return [permute, MoeCombine(d, d, top_k, k, of_combine)]


def decide(
    lib: Library, weights: ExpertWeights, top_k: int, activation: str, expert_map: Any = None, global_experts: int = 0
) -> ExpertsDecision:
    """What `lib` has for experts with these weights; only kernels that were found right on a GPU. `activation` is a
    gated epilogue of grouped_gemm, which says how rows of gate and up lie; `expert_map` (global experts), i32, is there
    where ids are of more experts than these, and `global_experts` says how many there are where no map does."""
    if problem := weights.problem(lib):
        return left(problem)
    if expert_map is not None and (expert_map.dtype != torch.int32 or expert_map.dim() != 1):
        return left(f"the map of experts is {expert_map.dtype} {tuple(expert_map.shape)}")
    globally = 0 if expert_map is None else expert_map.shape[0]
    of_tokens, of_rows, better = weights.signatures(top_k, activation, globally)
    experts, _, _ = weights.extents()[0]
    is_elsewhere = (globally or global_experts) > experts  # some of them, as `expected_rows` has it
    found: dict[int, dict[str, None]] = {}
    for signature in of_tokens + of_rows + better:
        try:
            entry = lib.entry(signature)
        except AotError as error:  # there is none, or nothing for this GPU, or a table that makes no sense
            if signature in better:
                continue
            return left(str(error).partition("\n")[0])
        if entry.state != "tuned":
            return left(f"{entry.signature.key()} is {entry.state}, never run on a GPU; run: aot tune")
        rows = top_k if signature in of_rows + better else 1
        if isinstance(signature, GroupedGemm) and is_elsewhere:
            rows = 0
        found.setdefault(rows, {})[entry.signature.key()] = None
    return ExpertsDecision(EXPERTS, by_rows={rows: tuple(keys) for rows, keys in found.items()})


def stack_problem(lib: Library, weight: Any) -> str:
    """Why no kernel reads this weight (experts, N, K), whatever its shape; empty if one may."""
    if len(getattr(weight, "shape", ())) != 3:
        return "the weight is no stack of matrices"
    if not weight.is_contiguous():
        return f"the weight has strides {tuple(weight.stride())}"
    return weight_problem(lib, weight.data.view(-1, weight.shape[2]))


@dataclass(frozen=True)
class Buffers:
    """What the launches keep between them, for T tokens: `wide`, as many elements as `wide_elements` says, and
    `inner`, T * top_k * N, both of the tokens' type, contiguous, and apart from each other and all else."""

    wide: torch.Tensor
    inner: torch.Tensor

    def between(self, hidden: torch.Tensor, top_k: int, experts: int, n: int, quantises: bool) -> Between:
        """Views for tokens (T, K) and so many experts, which make rows of N = `n` between their GEMMs; of rows in e4m3
        too if the launches are to quantise."""
        tokens, k = hidden.shape
        count, ints = tokens * top_k, _ints(tokens, top_k, experts)
        rows, inner = self.wide[: count * k].view(-1, k), self.inner.view(-1)[: count * n].view(-1, n)
        numbers = self.wide[len(self.wide) - 4 * ints // self.wide.element_size() :].view(torch.int32)
        found = Between(rows, inner, numbers[:experts], numbers[ints - count :].view(tokens, top_k))
        if not quantises:
            return found
        octets = self.wide.view(torch.uint8)
        # Tokens in 8 bits lie where rows will, which are made when nobody reads them any more.
        behind = octets[len(octets) - 4 * ints - _narrow_bytes(count, n) :]
        return found._replace(scaling="block", narrow=(_narrow(octets, count, k), _narrow(behind, count, n)))


@dataclass(frozen=True)
class Made:
    """What experts made for tokens: rows (T * top_k, K), where each assignment's row is, and weights, f32, (T, top_k),
    or None.

    A view of `Buffers.wide`, and so valid until that is written again."""

    rows: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor | None


class Operands(NamedTuple):
    """What launches take of a layer besides the weights that a call gives: `biases` and `scales` as `ExpertWeights` has
    them; and weights of 4 bits as they were `prepared`, w13 and w2, whatever a call gives."""

    biases: tuple[torch.Tensor, ...] = ()
    scales: tuple[torch.Tensor, ...] = ()
    prepared: tuple[PreparedWeight, ...] = ()


@dataclass(frozen=True)
class Launches:
    """The experts of one layer: three launches of `lib` that make rows, or, of weights in e4m3, for which rows are
    quantised (`quantises`), four, and one more that adds them up. `operands` gives what the layer holds at a call, as a
    server may load weights again; with `on_input` tokens come times their weights."""

    lib: Library
    activation: str
    operands: Callable[[], Operands] = Operands
    on_input: bool = False
    quantises: bool = False

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
            KernelMiss: the archive lacks a function for one of them.
            ArgumentError: the tensors do not go together.
        """
        held = self.operands()
        of = (held.prepared[0].b, held.prepared[1].b) if held.prepared else (bare(w13), bare(w2))
        expected = expected_rows(ids, of[0], expert_map)
        gates, downs = {"epilogue": self.activation, **_words(held, 0, expected)}, _words(held, 1, expected)
        sort = {} if expert_map is None else {"expert_map": expert_map}
        between = buffers.between(hidden, ids.shape[1], len(of[0]), columns_of(of[1]), self.quantises)
        make_rows(self.lib, hidden, ids.to(torch.int32).contiguous(), of, between, gates, downs, sort)
        of_rows = None if self.on_input else weights.to(torch.float32).contiguous()
        return Made(between.rows, between.positions, of_rows)

    def wide(self, w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights as the server's kernels read them, which cannot read prepared ones: those are made anew in bf16."""
        prepared = self.operands().prepared
        if not prepared:
            return w13, w2
        of_w13, of_w2 = map(widened, prepared)
        return of_w13, of_w2

    def combine(self, made: Made, out: torch.Tensor) -> None:
        """Add up to `out` (T, K) what the experts of each token made; raises as `make` does."""
        weights = () if made.weights is None else (made.weights,)
        self.lib.call("moe_combine", made.rows, made.positions, *weights, out=out)


def _words(held: Operands, at: int, expected: int) -> dict[str, Any]:
    """Those of the grouped GEMM of w13, or of w2, for so many rows."""
    words: dict[str, Any] = {"overlap": OVERLAP_OF_EXPERTS, "expected_rows": expected}
    if held.biases:
        words["bias"] = bare(held.biases[at])
    if held.prepared or held.scales:
        words["scale_b"] = held.prepared[at].scale_b if held.prepared else bare(held.scales[at])
    return words


def wide_elements(rows: int, width: int, experts: int, element_bytes: int, narrow: int = 0) -> int:
    """How many elements `Buffers.wide` has for so many rows, T * top_k, of `width` elements, K or more: the rows;
    behind them, at a multiple of 16 bytes, of weights in e4m3 rows of N = `narrow` in 8 bits and their scales; and
    where experts end and where rows are."""
    of_rows = _whole(rows * width * element_bytes) + (_narrow_bytes(rows, narrow) if narrow else 0)
    return (of_rows + 4 * _ints(rows, 1, experts)) // element_bytes


def _narrow(octets: torch.Tensor, rows: int, width: int) -> Narrow:
    """Rows (rows, width) in e4m3, and their scales, at the beginning of `octets`."""
    shape = scale_shape("block", rows, width)
    begin = _whole(rows * width)
    scales = octets[begin : begin + 4 * shape[0] * shape[1]].view(torch.float32)
    return octets[: rows * width].view(torch.float8_e4m3fn).view(rows, width), scales.view(shape)


def _narrow_bytes(rows: int, width: int) -> int:
    """What `_narrow` needs; never more than as many elements of 16 bits."""
    return _whole(rows * width) + _whole(4 * rows * -(-width // SCALE_BLOCK))


def _whole(count_bytes: int) -> int:
    """The next multiple of 16."""
    return -(-count_bytes // 16) * 16


def _ints(tokens: int, top_k: int, experts: int) -> int:
    """How many i32 are at the end of `Buffers.wide`: `experts`, and then, at a multiple of 16 bytes, the positions."""
    return -(-experts // _INTS) * _INTS + tokens * top_k
