"""Experts whose weights vLLM has in MXFP4: prepared for an archive's kernels in the place of vLLM's own layout.

vLLM lays such weights out for a class of experts that it chose, and then nothing else reads them. So layers are decided
about before that. What is taken is, to vLLM, experts with weights of 16 bits and a kernel of the plugin's class.
"""

from __future__ import annotations

import logging
from typing import Any

from ..plugin.experts import ExpertsDecision, Launches, decide, left
from ..plugin.packed_experts import Mxfp4Experts
from ..serve.library import Library
from . import experts, hooks

_CHOSEN = "_cute_aot_chosen"  # of a method: the class that vLLM chose


def restore(method: Any) -> None:
    """Let vLLM's own choice stand again, where weights are loaded anew."""
    if hasattr(method, _CHOSEN):
        method.experts_cls, method.moe_kernel = getattr(method, _CHOSEN), None
        delattr(method, _CHOSEN)


def weights_of(method: Any, layer: Any) -> Mxfp4Experts:
    """Those of a layer as they were loaded."""
    scales = layer.w13_weight_scale, layer.w2_weight_scale
    biases = experts.biases_of(method, layer)
    return Mxfp4Experts(layer.w13_weight, layer.w2_weight, method.moe.in_dtype, biases, scales, experts.weighed(layer))


def decision(lib: Library, method: Any, layer: Any, weights: Mxfp4Experts) -> ExpertsDecision:
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


def take(lib: Library, method: Any, layer: Any, weights: Mxfp4Experts, kernel: Any, described: Any) -> None:
    """Prepare the weights where they are, and let the kernel launch the archive's functions with them."""
    of = weights.biases, (), layer.apply_router_weight_on_input
    kernel.fused_experts.launches = Launches(lib, experts.gate_of(layer), *of, prepared=weights.prepare())
    setattr(method, _CHOSEN, method.experts_cls)
    method.experts_cls, method.moe_kernel, method.moe_quant_config = type(kernel.fused_experts), kernel, described
