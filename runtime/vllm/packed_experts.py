"""Experts whose weights vLLM has in MXFP4 or int4: prepared for an archive's kernels in the place of vLLM's own layout.

vLLM lays such weights out for a class of experts that it chose, and then nothing else reads them. So layers are decided
about before that, when weights are as a checkpoint has them. What is taken is, to vLLM, experts with weights of 16 bits
and a kernel of the plugin's class.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError
from ..grouped_gemm import OVERLAP_OF_EXPERTS
from ..grouped_gemm import Signature as GroupedGemm
from ..numbers.weights import BLOCK_ROWS, FORMATS, WeightFormat
from ..plugin.experts import NAMES, ExpertsDecision, ExpertWeights, Launches, Operands, decide, left, stack_problem
from ..program.tensor import dtype_name
from ..serve.library import Library
from ..torch.weights import PreparedWeight, check_scales, prepare_in_place
from . import experts, hooks


@dataclass(frozen=True)
class PackedExperts(ExpertWeights):
    """Experts whose w13 and w2 are as a `layout` of `runtime.torch.prepare_weight` has them, with their `scales`, and
    their `zeros` or none."""

    layout: str = "mxfp4"
    zeros: tuple[torch.Tensor, ...] = ()

    @property
    def form(self) -> WeightFormat:
        """What kernels call such weights."""
        return FORMATS[
            "mxfp4_weight" if self.layout == "mxfp4" else "int4_zero_weight" if self.zeros else "int4_weight"
        ]

    def extents_problem(self) -> str:
        """Why kernels have no w13 and w2 of these extents; empty if they may."""
        (count, wide, k), down = self.extents()
        if wide % 2 or down != (count, k, wide // 2):
            return f"packed weights of extents {(count, wide, k)} and {down} are no gate, up and down"
        for name, (_, n, columns) in zip(NAMES, self.extents(), strict=True):
            if n % BLOCK_ROWS or columns % self.form.multiple:
                return f"N {n} and K {columns} of {name} are no multiples of {BLOCK_ROWS} and {self.form.multiple}"
        return ""

    def tokens_problem(self) -> str:
        """Why no kernel takes these tokens; empty if some do."""
        if self.tokens == torch.bfloat16:
            return ""
        return f"tokens are {self.tokens}, and kernels for weights in 4 bits take bf16; serve with --dtype bfloat16"

    def signatures(self, top_k: int, activation: str, global_experts: int) -> tuple[list[Any], list[Any], list[Any]]:
        """As those of other experts."""
        ((count, wide, k), _), d = self.extents(), dtype_name(self.tokens)
        (gate, down), codes, of = self.epilogues(activation), self.form.codes, (OVERLAP_OF_EXPERTS, self.form.word)
        of_rows = [
            GroupedGemm(d, codes, d, count, wide, k, gate, *of),
            GroupedGemm(d, codes, d, count, k, wide // 2, down, *of),
        ]
        return self.of_tokens(top_k, k, global_experts), of_rows, []

    def check(self) -> None:
        """Read all scales.

        Raises:
            ArgumentError: a kernel would overflow.
        """
        for scale in self.scales:
            check_scales(scale, self.layout)

    def prepare(self) -> tuple[PreparedWeight, ...]:
        """Both as kernels read them, in the memory that they have, but for scales with zero points; nothing else can
        read that from then on."""
        of = zip((self.w13, self.w2), self.scales, self.zeros or (None, None), strict=True)
        return tuple(
            prepare_in_place(weight.data, scale.data, self.layout, None if zeros is None else zeros.data)
            for weight, scale, zeros in of
        )


@dataclass(frozen=True)
class Mxfp4Experts(PackedExperts):
    """In MXFP4: w13 (experts, 2N, K / 2) and w2 (experts, K, N / 2), two elements in each uint8, the first in the low
    bits, and scales (experts, 2N, K / 32) and (experts, K, N / 32), ue8m0 in uint8."""

    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By the weights."""
        found = [(*weight.shape[:2], 2 * weight.shape[2]) for weight in (self.w13, self.w2)]
        return found[0], found[1]

    def problem(self, lib: Library) -> str:
        """Why these are none of experts that kernels of `lib` compute; empty if they may be."""
        if problem := self.tokens_problem() or self.extents_problem():
            return problem
        for name, weight, scale in zip(NAMES, (self.w13, self.w2), self.scales, strict=True):
            of = (*weight.shape[:2], 2 * weight.shape[2] // self.form.group)
            if {weight.dtype, scale.dtype} != {torch.uint8} or tuple(scale.shape) != of or not scale.is_contiguous():
                return f"weights and scales of {name} are {weight.dtype}, {scale.dtype} {tuple(scale.shape)}, not uint8"
            if problem := stack_problem(lib, weight):
                return f"of {name}, {problem}"
        return self.bias_problem()


@dataclass(frozen=True)
class Int4Experts(PackedExperts):
    """In int4: w13 and w2 of int32, in a layout whose rows are of K: "awq", (experts, K, 2N / 8), or "gptq" and
    "gptq_v2", (experts, K / 8, 2N), and w2 alike; scales (experts, K / 128, 2N) and (experts, N / 128, K) in bf16; and
    zeros (experts, K / 128, 2N / 8) and alike, or none."""

    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By the scales."""
        found = [(len(scale), scale.shape[2], scale.shape[1] * self.form.group) for scale in self.scales]
        return found[0], found[1]

    def problem(self, lib: Library) -> str:
        """As `Mxfp4Experts.problem`."""
        if any(scale.dim() != 3 for scale in self.scales):
            return "scales are not of experts, groups along K and rows"
        if problem := self.tokens_problem() or self.extents_problem():
            return problem
        of_zeros = self.zeros or (None, None)
        for name, weight, scale, zeros, (count, n, k) in zip(
            NAMES, (self.w13, self.w2), self.scales, of_zeros, self.extents(), strict=True
        ):
            packed = (count, k, n // 8) if self.layout == "awq" else (count, k // 8, n)
            wanted = [(weight, torch.int32, packed), (scale, torch.bfloat16, tuple(scale.shape))]
            if zeros is not None:
                wanted.append((zeros, torch.int32, (count, k // self.form.group, n // 8)))
            for tensor, dtype, shape in wanted:
                if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape) or not tensor.is_contiguous():
                    return f"of {name}, a tensor is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}"
            if problem := stack_problem(lib, weight):
                return f"of {name}, {problem}"
        return self.bias_problem()


# --- a layer of vLLM's ---

_CHOSEN = "_cute_aot_chosen"  # of a method: the class that vLLM chose
_WEIGHTS, _SCALES = ("w13_weight", "w2_weight"), ("_cute_aot_w13_scale", "_cute_aot_w2_scale")  # of a layer, prepared


class _Int4(NamedTuple):
    """How a method of vLLM's has int4: what parameters are called behind "w13_" and "w2_", and their layout."""

    weights: str
    scales: str
    zeros: str
    layout: str


_INT4 = {
    "AutoAWQMoEMethod": _Int4("qweight", "scales", "qzeros", "awq"),
    "AutoGPTQMoEMethod": _Int4("qweight", "scales", "", "gptq"),
    "CompressedTensorsWNA16MarlinMoEMethod": _Int4("weight_packed", "weight_scale", "weight_zero_point", "gptq_v2"),
}


def restore(method: Any) -> None:
    """Let vLLM's own choice stand again, where weights are loaded anew."""
    if hasattr(method, _CHOSEN):
        method.experts_cls, method.moe_kernel = getattr(method, _CHOSEN), None
        delattr(method, _CHOSEN)


def weights_of(method: Any, layer: Any) -> PackedExperts:
    """Those of a layer as they were loaded.

    Raises:
        ArgumentError: columns are in another order, or codes are of other numbers.
    """
    tokens, biases, weighed = method.moe.in_dtype, experts.biases_of(method, layer), experts.weighed(layer)
    names = next((_INT4[base.__name__] for base in type(method).__mro__ if base.__name__ in _INT4), None)
    if names is None:
        scales = layer.w13_weight_scale, layer.w2_weight_scale
        return Mxfp4Experts(layer.w13_weight, layer.w2_weight, tokens, biases, scales, weighed)
    zeros = _zeros(method, names)
    w13, w2, *scales_and_zeros = (
        getattr(layer, f"{of}_{name}")
        for name in (names.weights, names.scales, *([names.zeros] if zeros else []))
        for of in ("w13", "w2")
    )
    of_scales, of_zeros = tuple(scales_and_zeros[:2]), tuple(scales_and_zeros[2:])
    return Int4Experts(w13, w2, tokens, biases, of_scales, weighed, names.layout, of_zeros)


def _zeros(method: Any, names: _Int4) -> bool:
    """Whether int4 has zero points.

    Raises:
        ArgumentError: as `weights_of`.
    """
    if names.layout == "awq":
        if not method.quant_config.zero_point:
            raise ArgumentError("weights of AWQ have no zero points")
        return True
    if names.layout == "gptq":
        if method.quant_config.desc_act or not method.quant_config.is_sym:
            raise ArgumentError("weights of GPTQ are in another order (act-order), or have zero points")
        return False
    if getattr(method.actorder, "value", method.actorder) == "group":
        raise ArgumentError("columns of K are in another order (act-order)")
    return not method.symmetric


def decision(lib: Library, method: Any, layer: Any, weights: PackedExperts) -> ExpertsDecision:
    """What becomes of a layer whose weights are loaded, and not laid out yet."""
    parallel = method.moe.moe_parallel_config
    reasons = {
        "tokens are exchanged between ranks": parallel.use_all2all_kernels,
        "experts move between ranks": parallel.enable_eplb,
    }
    if reason := experts.problem(method, layer) or next((words for words, found in reasons.items() if found), ""):
        return left(reason)
    return decide(lib, weights, layer.top_k, experts.gate_of(layer), layer.expert_map)


def kernel_of(method: Any, layer: Any, log: logging.Logger) -> tuple[Any, Any]:
    """vLLM's kernel of the plugin's class of experts, and how it is described to vLLM; nothing is changed.

    Raises:
        ArgumentError: vLLM makes it in another way.
    """
    (oracle, make), (_, describe) = hooks.look_up(hooks.MADE)
    described = describe(*(experts.biases_of(method, layer) or (None, None)))
    kernel = make(
        quant_config=described,
        moe_config=method.moe,
        backend=oracle.UnquantizedMoeBackend.TRITON,
        experts_cls=experts.ours(experts.base(), log),
        routing_tables=layer._expert_routing_tables(),
    )
    return kernel, described


def take(lib: Library, method: Any, layer: Any, weights: PackedExperts, kernel: Any, described: Any) -> None:
    """Prepare the weights where they are, and let the kernel launch the archive's functions with them.

    All that graphs read is a parameter or a buffer of the layer: what vLLM loads again it copies to the memory of these
    by their names, and what was made of it meanwhile it drops."""
    prepared = weights.prepare()
    for name, scale, weight in zip(_WEIGHTS, _SCALES, prepared, strict=True):
        if isinstance(weights, Int4Experts):  # whose rows are of K; vLLM reads the number of rows of N from shapes
            setattr(layer, name, torch.nn.Parameter(weight.b.view(torch.uint8), requires_grad=False))
        layer.register_buffer(scale, weight.scale_b, persistent=False)
    held = _held(layer, weights.biases, [(weight.b.dtype, weight.b.shape) for weight in prepared])
    on_input = layer.apply_router_weight_on_input
    kernel.fused_experts.launches = Launches(lib, experts.gate_of(layer), held, on_input)
    setattr(method, _CHOSEN, method.experts_cls)
    method.experts_cls, method.moe_kernel, method.moe_quant_config = type(kernel.fused_experts), kernel, described


def _held(
    layer: Any, biases: tuple[Any, ...], forms: Sequence[tuple[torch.dtype, torch.Size]]
) -> Callable[[], Operands]:
    """What gives a layer's operands at a call; weights are of these types and shapes."""
    of, names = weakref.ref(layer), experts.BIASES if biases else ()

    def held() -> Operands:
        layer = of()
        prepared = [
            PreparedWeight(getattr(layer, name).data.view(dtype).view(shape), getattr(layer, scale))
            for name, scale, (dtype, shape) in zip(_WEIGHTS, _SCALES, forms, strict=True)
        ]
        return Operands(tuple([getattr(layer, name).data for name in names]), prepared=tuple(prepared))

    return held
