"""What the plugin replaces and reads of SGLang, in one table, and the functions that put the replacements in place.

Knows names and parameters, and nothing of what the replacements do. Nothing of SGLang is imported until a hook is
looked up.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentError
from ..plugin.hooks import Hook, Make, is_hooked, is_marked, look_up, mark, wrapped

__all__ = ["Hook", "Make", "is_hooked", "is_marked", "look_up"]

# Releases whose sources `HOOKS` and `READ` were compared with: tests/test_sglang_hooks.py does that.
KNOWN_VERSIONS = ("0.5.13",)

_LAYERS = "sglang.srt.layers"
_QUANTIZATION = f"{_LAYERS}.quantization"
FP8 = f"{_QUANTIZATION}.fp8_utils"

# Wrapped in every process that loads plugins: where a model is loaded, a scheduler's arguments are first seen.
MODEL_LOADED = Hook("sglang.srt.model_executor.model_runner", "ModelRunner", "load_model", ("self",))
# Replaced in a scheduler whose arguments name an archive.
LINEAR = Hook(f"{_QUANTIZATION}.unquant", "UnquantizedLinearMethod", "apply", ("self", "layer", "x", "bias"))
HEAD = Hook(
    f"{_LAYERS}.logits_processor",
    "LogitsProcessor",
    "_compute_lm_head",
    ("self", "hidden_states", "lm_head", "embedding_bias"),
)
# One scale for the weight, or one for each of its columns.
FP8_LINEAR = Hook(
    FP8,
    "",
    "apply_fp8_linear",
    (
        *("input", "weight", "weight_scale", "input_scale", "input_scale_ub", "bias", "cutlass_fp8_supported"),
        *("use_per_token_if_dynamic", "pad_output", "compressed_tensor_quant"),
    ),
)
# One scale for each block: what `dispatch_w8a8_block_fp8_linear` chooses from, on Hopper.
_BLOCK = ("input", "weight", "block_size", "weight_scale", "input_scale", "bias")
FP8_BLOCKS = tuple(
    Hook(FP8, "", name, _BLOCK)
    for name in (
        "deepgemm_w8a8_block_fp8_linear_with_fallback",
        "cutlass_w8a8_block_fp8_linear_with_fallback",
        "flashinfer_deepgemm_w8a8_block_fp8_linear_with_fallback",
        "triton_w8a8_block_fp8_linear",
    )
)
# What models call with a layer's weight themselves.
DEEP_GEMM = Hook(f"{_LAYERS}.deep_gemm_wrapper.entrypoint", "", "gemm_nt_f8f8bf16", ("lhs", "rhs", "out"))

# Replaced in a scheduler that is recorded. What runs a batch of requests, and nothing that warms up or captures; what
# replays a graph of a whole step, in decoding; what makes a batch of prefill as large as its pieces, of both kinds; and
# what calls the head.
_RUNNER = MODEL_LOADED.module
STEP = Hook(
    _RUNNER,
    "ModelRunner",
    "_forward_raw",
    ("self", "forward_batch", "pp_proxy_tensors", "reinit_attn_backend", "split_forward_count"),
)
REPLAY = Hook(
    "sglang.srt.model_executor.cuda_graph_runner",
    "CudaGraphRunner",
    "replay",
    ("self", "forward_batch", "pp_proxy_tensors"),
)
PIECES = Hook(
    "sglang.srt.model_executor.piecewise_cuda_graph_runner",
    "PiecewiseCudaGraphRunner",
    "replay_prepare",
    ("self", "forward_batch", "kwargs"),
)
LOGITS = Hook(
    HEAD.module,
    HEAD.owner,
    "_get_logits",
    ("self", "hidden_states", "lm_head", "logits_metadata", "embedding_bias"),
)

_RECORDING = STEP, REPLAY, PIECES, LOGITS
HOOKS = (MODEL_LOADED, LINEAR, HEAD, FP8_LINEAR, *FP8_BLOCKS, DEEP_GEMM, *_RECORDING)

# Which part of a model sees a row for each token.
LANGUAGE_MODEL = Hook(_RUNNER, "", "resolve_language_model", ("model",))

# Of the activation that GEMMs of gates may compute; looked at where a model was loaded.
ACTIVATION = Hook(f"{_LAYERS}.activation", "SiluAndMul", "forward_native", ("self", "x"))
# What a forward of an MLP may use besides its layers: a batch without rows, and what the plugin refuses to serve.
HARMLESS = frozenset({"tp_size", "shape", "get_global_server_args", "rl_on_policy_target", "bfloat16"})
# How SGLang quantises activations, which the plugin does in its place.
QUANTISED = (
    Hook(f"{_QUANTIZATION}.fp8_kernel", "", "static_quant_fp8", ("x", "x_s", "repeat_scale")),
    Hook(f"{_QUANTIZATION}.fp8_kernel", "", "sglang_per_token_quant_fp8", ("x", "dtype")),
    Hook(
        f"{_QUANTIZATION}.fp8_kernel",
        "",
        "scaled_fp8_quant",
        ("input", "scale", "num_token_padding", "use_per_token_if_dynamic"),
    ),
    Hook(
        f"{_QUANTIZATION}.fp8_kernel",
        "",
        "sglang_per_token_group_quant_fp8",
        (
            *("x", "group_size", "eps", "column_major_scales", "scale_tma_aligned", "scale_ue8m0"),
            *("fuse_silu_and_mul", "masked_m", "enable_v2"),
        ),
    ),
)
# Classes whose layers come by `FP8_LINEAR` or `FP8_BLOCKS`: their modules and the methods that call these.
FP8_METHODS = {
    "Fp8LinearMethod": (f"{_QUANTIZATION}.fp8", "apply"),
    "W8A8Fp8LinearMethod": (f"{_QUANTIZATION}.w8a8_fp8", "apply"),
    "ModelOptFp8LinearMethod": (f"{_QUANTIZATION}.modelopt_quant", "apply"),
    "FBGEMMFp8LinearMethod": (f"{_QUANTIZATION}.fpgemm_fp8", "apply"),
    "CompressedTensorsW8A8Fp8": (
        f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w8a8_fp8",
        "apply_weights",
    ),
}
# Of a layer of experts: its methods whose runner may be given another function, the one of them in fp8, the runner that
# calls it, what it is handed, and what it gives back. Nothing of these is replaced but the function, in an object.
_MOE = f"{_LAYERS}.moe"
FP8_EXPERTS = "Fp8MoEMethod"
EXPERTS_METHODS = {"UnquantizedFusedMoEMethod": f"{_QUANTIZATION}.unquant", FP8_EXPERTS: f"{_QUANTIZATION}.fp8"}
RUNNER = Hook(f"{_MOE}.moe_runner.runner", "MoeRunner", "run", ("self", "dispatch_output", "quant_info", "lora_info"))
COMBINE_INPUT = (f"{_MOE}.token_dispatcher.standard", "StandardCombineInput")

# Weights of several elements in one, as AWQ, GPTQ, GGUF, compressed-tensors and Marlin name them.
PACKED = ("qweight", "weight_packed", "B")
PACKED_EXPERTS = ("w13_qweight", "w13_weight_packed")

# Names that are read, by module: variables, and fields of classes as "Class.field".
READ = {
    "sglang.srt.server_args": tuple(
        f"ServerArgs.{name}"
        for name in (
            *("json_model_override_args", "cpu_offload_gb", "offload_group_size", "torchao_config"),
            *("enable_deterministic_inference", "rl_on_policy_target", "enable_lora", "enable_fp32_lm_head"),
            "forward_hooks",
            *("enable_two_batch_overlap", "enable_pdmux", "fp8_gemm_runner_backend"),
            *("disable_cuda_graph", "cuda_graph_bs", "speculative_num_draft_tokens"),
            *("disable_piecewise_cuda_graph", "piecewise_cuda_graph_tokens"),
            *("enable_torch_compile", "enable_symm_mem"),
            *("enable_dp_attention", "moe_a2a_backend", "moe_dense_tp_size", "enable_attn_tp_input_scattered"),
            "attn_cp_size",
        )
    ),
    "sglang.srt.model_executor.model_runner": ("ModelRunnerOutput.can_run_graph",),
    "sglang.srt.model_executor.forward_batch_info": ("ForwardBatch.input_ids",),
    f"{_MOE}.moe_runner.base": tuple(
        f"MoeRunnerConfig.{name}"
        for name in (
            *("num_experts", "activation", "is_gated", "apply_router_weight_on_input", "no_combine"),
            *("routed_scaling_factor", "gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit"),
        )
    ),
    f"{_MOE}.moe_runner.triton": tuple(
        f"TritonMoeQuantInfo.{name}" for name in ("w13_weight", "w2_weight", "use_fp8_w8a8", "w13_scale", "w2_scale")
    ),
    f"{_MOE}.token_dispatcher.standard": (
        *("StandardDispatchOutput.hidden_states", "StandardDispatchOutput.topk_output"),
        "StandardCombineInput.hidden_states",
    ),
    f"{_MOE}.topk": ("StandardTopKOutput.topk_weights", "StandardTopKOutput.topk_ids"),
    FP8: (),
}


def is_block(function: Any) -> bool:
    """Whether it is one of `FP8_BLOCKS`, replaced or not."""
    return getattr(function, "__name__", "") in {hook.method for hook in FP8_BLOCKS}


_REGISTRY = "sglang.srt.plugins.hook_registry"


def begin(make: Make) -> None:
    """Register the one wrapper that every process gets, unless that was done; SGLang puts it around the method, or
    what another plugin replaces that or its class by, when all plugins have registered theirs.

    Raises:
        ArgumentError: SGLang has no such method, or it has other parameters.
    """

    def around(method: Any, *args: Any, **kwargs: Any) -> Any:
        return make(method)(*args, **kwargs)

    ((runner, _),) = look_up([MODEL_LOADED])
    if not is_marked(runner):
        _register(MODEL_LOADED, around, "AROUND")
        mark(runner)


def install(makers: Mapping[Hook, Make]) -> None:
    """Replace each of these, unless it is replaced already. Where one cannot be, none does anything: all that they do
    follows from what layers are marked with.

    Raises:
        ArgumentError: SGLang lacks one, it has other parameters, or another plugin hooked it; the message names each.
    """
    fresh = [
        (hook, owner, method)
        for hook, (owner, method) in zip(makers, look_up(makers), strict=True)
        if not is_marked(method)
    ]
    for hook, _, method in fresh:
        _register(hook, wrapped(method, makers[hook], hook), "REPLACE")
    importlib.import_module(_REGISTRY).HookRegistry.apply_hooks()  # passes over what it hooked before
    hooked = []
    for hook, owner, method in fresh:
        now = vars(owner)[hook.method]
        if now is method:
            hooked.append(str(hook))
        else:
            mark(now)
    if hooked:
        raise ArgumentError(
            f"another plugin of SGLang's has hooked {', '.join(hooked)}; SGLANG_PLUGINS=cute_aot loads this one alone"
        )


def _register(hook: Hook, function: Any, kind: str) -> None:
    registry = importlib.import_module(_REGISTRY)
    source = registry.HookSource("cute_aot", "cute-aot")  # as SGLang's log names who hooked what
    registry.HookRegistry.register(str(hook), function, registry.HookType[kind], source=source)
