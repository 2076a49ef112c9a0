"""SGLang's experts of mixtures by an archive: which layers, and the function that runs one in the place of Triton's.

Each layer has a runner, with a function for what its dispatcher hands over; that of a layer that is taken is ours, an
attribute of one object. Router ids are of the experts on this rank by then, and -1 of others. What the launches cannot
do at a call, SGLang's function does.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError, KernelMiss
from ..plugin import hooks as marks
from ..plugin.experts import ExpertsDecision, ExpertWeights, decide, left, say_refused
from ..serve.library import Library
from ..torch.experts import moe
from . import hooks

_GATES = {"silu": "swiglu", "gelu": "geglu"}  # of grouped_gemm, by SGLang's word
_LIMITS = "gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit"  # of a gate, None where it has the usual one


def is_experts(layer: Any) -> bool:
    """Whether a module is a layer of routed experts."""
    return hasattr(layer, "w13_weight") and hasattr(layer, "w2_weight")


def decision(lib: Library, layer: Any, dtype: Any) -> ExpertsDecision:
    """What becomes of a layer of experts whose weights are loaded, of a model of that type."""
    method = layer.quant_method
    kind, runner = type(method).__name__, getattr(method, "runner", None)
    if kind not in hooks.EXPERTS_METHODS or runner is None:
        return left(f"{kind} computes experts")
    config, fp8 = runner.config, kind == hooks.FP8_EXPERTS
    gate = _GATES.get(config.activation) if config.is_gated else None
    reasons = {
        f"SGLang computes them by {runner.runner_backend.value}": not runner.runner_backend.is_triton(),
        "SGLang computes them by flashinfer_cutlass": getattr(method, "use_flashinfer_cutlass", False),
        "their dispatcher hands over pieces": runner.fused_func is None,
        f"activation {config.activation}": gate is None,
        "the gate has limits of its own": any(getattr(config, name) is not None for name in _LIMITS),
        "rows of experts are wanted apart": config.no_combine,
        "biases are in f32": getattr(layer, "w13_weight_bias", None) is not None,
        "weights in fp8 have no scales of blocks of 128": fp8 and method.quant_config.weight_block_size != [128, 128],
        "tokens have static scales": getattr(layer, "w13_input_scale", None) is not None,
    }
    reason = next((words for words, found in reasons.items() if found), "")
    if reason or gate is None:
        return left(reason)
    scales = tuple(getattr(layer, f"{name}_weight_scale_inv").data for name in ("w13", "w2")) if fp8 else ()
    weighed = "permute" if config.apply_router_weight_on_input else "output"
    weights = ExpertWeights(layer.w13_weight, layer.w2_weight, dtype, (), scales, weighed)
    return decide(lib, weights, layer.top_k, gate, global_experts=config.num_experts or 0)


def take(lib: Library, layer: Any, log: logging.Logger) -> None:
    """Let the archive compute a layer that was decided so."""
    runner = layer.quant_method.runner
    runner.fused_func = _function(lib, runner.fused_func, log)


def leave(layer: Any) -> None:
    """Let SGLang compute a layer, whether it was taken or not."""
    runner = getattr(layer.quant_method, "runner", None)
    function = getattr(runner, "fused_func", None)
    if marks.is_marked(function):
        runner.fused_func = function.instead  # type: ignore[union-attr]


def _function(lib: Library, instead: Callable[..., Any], log: logging.Logger) -> Callable[..., Any]:
    """What a runner calls with what was dispatched; `instead` is SGLang's, which it calls where it cannot."""
    combined = importlib.import_module(hooks.COMBINE_INPUT[0]).StandardCombineInput

    def fused(dispatch_output: Any, quant_info: Any, runner_config: Any) -> Any:
        weights, ids = dispatch_output.topk_output[:2]
        words: dict[str, Any] = {"activation": _GATES[runner_config.activation]}
        if quant_info.use_fp8_w8a8:
            words |= {"w13_scale": quant_info.w13_scale, "w2_scale": quant_info.w2_scale}
        if (runner_config.num_experts or 0) > len(quant_info.w13_weight):
            words["global_experts"] = runner_config.num_experts
        if runner_config.apply_router_weight_on_input:
            words["apply_router_weight_on_input"] = True
        given = dispatch_output.hidden_states, quant_info.w13_weight, quant_info.w2_weight
        try:
            made = moe(lib, *given, ids, weights, **words)
        except (KernelMiss, ArgumentError) as error:
            say_refused(log, "SGLang", error)
            return instead(dispatch_output, quant_info, runner_config)
        if runner_config.routed_scaling_factor not in (None, 1.0):
            made *= runner_config.routed_scaling_factor
        return combined(hidden_states=made)

    fused.instead = instead  # type: ignore[attr-defined]
    marks.mark(fused)
    return fused
