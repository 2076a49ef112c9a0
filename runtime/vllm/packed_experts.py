"""Experts whose weights vLLM has in MXFP4 or int4: prepared for an archive's kernels in the place of vLLM's own layout.

vLLM lays such weights out for a class of experts that it chose, and then nothing else reads them. So layers are decided
about before that. What is taken is, to vLLM, experts with weights of 16 bits and a kernel of the plugin's class.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError
from ..plugin.experts import ExpertsDecision, Launches, decide, left
from ..plugin.packed_experts import Int4Experts, Mxfp4Experts, PackedExperts
from ..serve.library import Library
from . import experts, hooks

_CHOSEN = "_cute_aot_chosen"  # of a method: the class that vLLM chose


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
    """Prepare the weights where they are, and let the kernel launch the archive's functions with them."""
    of, prepared = (weights.biases, (), layer.apply_router_weight_on_input), weights.prepare()
    kernel.fused_experts.launches = Launches(lib, experts.gate_of(layer), *of, prepared=prepared)
    if isinstance(weights, Int4Experts):  # whose rows are of K; vLLM reads the number of rows of N from shapes
        for name, weight in zip(("w13_weight", "w2_weight"), prepared, strict=True):
            setattr(layer, name, torch.nn.Parameter(weight.b.view(torch.uint8), requires_grad=False))
    setattr(method, _CHOSEN, method.experts_cls)
    method.experts_cls, method.moe_kernel, method.moe_quant_config = type(kernel.fused_experts), kernel, described
