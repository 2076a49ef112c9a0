"""A class for vLLM's experts in the place of its Triton ones, of layers that an archive has kernels for.

Knows how vLLM describes such a layer, and the methods of its class by which the launches come to be called. What they
cannot do at a call, vLLM's own kernels do, in the same buffers.
"""

from __future__ import annotations

import functools
import importlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError, KernelMiss
from ..plugin import hooks as marks
from ..plugin.experts import (
    Buffers,
    ExpertsDecision,
    ExpertWeights,
    Launches,
    Made,
    Operands,
    decide,
    left,
    say_refused,
    wide_elements,
)
from ..serve.library import Library
from . import hooks

# The gates of grouped_gemm that are vLLM's activations, by name. The first three have gate in the first half of N; of
# GPT-OSS's, rows of gate and up take turns, and the factor and limit are those of the epilogue.
_GATES = {"SILU": "swiglu", "GELU": "geglu", "GELU_TANH": "geglu_tanh", "SWIGLUOAI": "swiglu_clamped_interleaved"}
BIASES, _SCALES = ("w13_bias", "w2_bias"), ("w13_weight_scale_inv", "w2_weight_scale_inv")  # of layers
_LIMITS = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")  # of a layer's gate, None where it has the usual one


def base() -> type:
    """vLLM's class of Triton experts, which ours is derived from.

    Raises:
        ArgumentError: it lacks a method that is filled, or that has other parameters.
    """
    ((owner, _), *_others) = hooks.look_up(hooks.FILLED_EXPERTS)
    return owner


def decision(lib: Library, method: Any, layer: Any) -> ExpertsDecision:
    """What becomes of a layer of experts whose weights are loaded, and whose kernel vLLM has chosen but not made."""
    moe, chosen = method.moe, method.experts_cls
    reasons = {
        f"vLLM computes them by {getattr(chosen, '__name__', chosen)}": chosen is not base() and not is_ours(chosen),
        "weights in fp8 have no scales of blocks of 128": _is_fp8(method) and method.weight_block_size != [128, 128],
        "tokens have static scales": getattr(layer, "w13_input_scale", None) is not None,
    }
    if reason := problem(method, layer) or next((words for words, found in reasons.items() if found), ""):
        return left(reason)
    tokens = moe.in_dtype if _is_fp8(method) else layer.w13_weight.dtype
    weights = ExpertWeights(
        layer.w13_weight, layer.w2_weight, tokens, biases_of(method, layer), _scales(method, layer), weighed(layer)
    )
    return decide(lib, weights, layer.top_k, gate_of(layer), layer.expert_map)


def problem(method: Any, layer: Any) -> str:
    """Why no launches compute these experts, whatever their weights are; empty if some may."""
    moe = method.moe
    reasons = {
        f"moe_backend is {moe.moe_backend!r}": moe.moe_backend != "auto",
        "of LoRA": moe.is_lora_enabled,
        f"activation {getattr(layer.activation, 'name', layer.activation)}": not gate_of(layer),
        "the gate has limits of its own": any(getattr(layer, name, None) is not None for name in _LIMITS),
    }
    return next((words for words, found in reasons.items() if found), "")


def gate_of(layer: Any) -> str:
    """The epilogue that is a layer's activation; empty if none is."""
    return _GATES.get(getattr(layer.activation, "name", ""), "")


def weighed(layer: Any) -> str:
    """Where router weights are multiplied with, as `ExpertWeights` says it."""
    return "before" if layer.apply_router_weight_on_input else "output"


def launches(lib: Library, method: Any, layer: Any) -> Launches:
    """Those of a layer that was taken."""
    biases, scales = (BIASES if method.moe.has_bias else ()), (_SCALES if _is_fp8(method) else ())
    of = weakref.ref(layer)

    def held() -> Operands:
        layer = of()
        return Operands(*(tuple([getattr(layer, name).data for name in names]) for names in (biases, scales)))

    return Launches(lib, gate_of(layer), held, layer.apply_router_weight_on_input, bool(scales))


def _is_fp8(method: Any) -> bool:
    return hasattr(method, "block_quant")


def _scales(method: Any, layer: Any) -> tuple[Any, ...]:
    """Those of blocks of w13 and w2, or none."""
    if not _is_fp8(method):
        return ()
    return tuple(getattr(layer, name).data for name in _SCALES)


def biases_of(method: Any, layer: Any) -> tuple[Any, ...]:
    """Those of w13 and w2, or none; on ranks of tensor parallelism that add none, vLLM has w2's made of zeros."""
    return tuple(getattr(layer, name) for name in BIASES) if method.moe.has_bias else ()


def is_ours(chosen: Any) -> bool:
    """Whether a class of experts, or an object of one, is the plugin's, and has `launches`."""
    return marks.is_marked(chosen)


@functools.cache
def ours(triton: type, log: logging.Logger) -> type:
    """The class that is derived from `triton`, vLLM's: an object of it computes as that does until it has `launches`.

    It asks for the buffers of both. `apply` multiplies rows; they are added up where vLLM would copy what it made.
    """
    combined = _combined(log)

    class CuteAotExperts(triton):
        """Experts of one layer; `launches` is None where vLLM's kernels compute them."""

        launches: Launches | None = None
        _combine: Any = None

        def workspace_shapes(
            self,
            M: int,
            N: int,
            K: int,
            topk: int,
            global_num_experts: int,
            local_num_experts: int,
            expert_tokens_meta: Any,
            activation: Any,
        ) -> Any:
            meta = global_num_experts, local_num_experts, expert_tokens_meta, activation
            workspace13, workspace2, output = super().workspace_shapes(M, N, K, topk, *meta)
            if self.launches is not None:  # no width of these is less than K, and elements have 16 bits
                narrow = N // 2 if self.launches.quantises else 0
                workspace2 = (wide_elements(M * topk, max(N, K), local_num_experts, 2, narrow),)
            return workspace13, workspace2, output

        @property
        def expects_unquantized_inputs(self) -> bool:
            """Whether vLLM is to pass tokens as they are, which its own kernels then quantise too."""
            quantises = self.launches is not None and self.launches.quantises
            return quantises or bool(super().expects_unquantized_inputs)

        def finalize_weight_and_reduce_impl(self) -> Any:
            found, self._combine = self._combine, None
            return super().finalize_weight_and_reduce_impl() if found is None else found

        def apply(
            self,
            output: Any,
            hidden_states: Any,
            w1: Any,
            w2: Any,
            topk_weights: Any,
            topk_ids: Any,
            activation: Any,
            global_num_experts: int,
            expert_map: Any,
            a1q_scale: Any,
            a2_scale: Any,
            workspace13: Any,
            workspace2: Any,
            expert_tokens_meta: Any,
            apply_router_weight_on_input: bool,
        ) -> None:
            config = activation, global_num_experts, expert_map, a1q_scale, a2_scale
            rest = workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input
            launches, theirs = self.launches, super().apply

            def instead() -> None:
                weights = (w1, w2) if launches is None else launches.wide(w1, w2)
                theirs(output, hidden_states, *weights, topk_weights, topk_ids, *config, *rest)

            self._combine = None
            if launches is None:
                return instead()
            buffers = Buffers(workspace2, workspace13)
            try:
                made = launches.make(hidden_states, w1, w2, topk_ids, topk_weights, expert_map, buffers)
            except (KernelMiss, ArgumentError) as error:
                say_refused(log, "vLLM", error)
                return instead()
            self._combine = combined(launches, made, instead)

    marks.mark(CuteAotExperts)
    return CuteAotExperts


@functools.cache
def _combined(log: logging.Logger) -> type:
    """The class of what vLLM asks to reduce the output of experts, which launches the archive's combination."""
    no_op = importlib.import_module(hooks.REDUCE.module).TopKWeightAndReduceNoOP

    class Combine(no_op):  # type: ignore[misc, valid-type]
        """Adds up what the experts of each token made."""

        def __init__(self, launches: Launches, made: Made, instead: Callable[[], None]) -> None:
            self._launches, self._made, self._instead = launches, made, instead

        def apply(
            self,
            output: Any,
            fused_expert_output: Any,
            topk_weights: Any,
            topk_ids: Any,
            apply_router_weight_on_input: bool,
        ) -> Any:
            to = fused_expert_output if output is None else output
            try:
                self._launches.combine(self._made, to)
            except (KernelMiss, ArgumentError) as error:
                say_refused(log, "vLLM", error)
                self._instead()
                return super().apply(output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input)
            return to

    return Combine
