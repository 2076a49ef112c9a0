"""What the plugin wraps and reads of vLLM, in one table, and the function that puts the wrappers in place.

Knows names and parameters, and nothing of what the wrappers do. Nothing of vLLM is imported until a hook is looked up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import ArgumentError
from ..plugin.hooks import Hook, Make, is_hooked, is_marked, look_up, mark, wrapped

__all__ = ["Hook", "Make", "is_hooked", "look_up"]

# Releases whose sources `HOOKS` and `READ` were compared with: tests/test_vllm_hooks.py does that.
KNOWN_VERSIONS = ("0.25.0",)


_LAYERS = "vllm.model_executor.layers"
_APPLY, _LOADED = ("self", "layer", "x", "bias"), ("self", "layer")

# Wrapped in every process that vLLM loads plugins in: the first place that an engine's settings are seen.
WORKER = Hook(
    "vllm.v1.worker.worker_base",
    "WorkerBase",
    "__init__",
    ("self", "vllm_config", "local_rank", "rank", "distributed_init_method", "is_driver_worker"),
)
# Wrapped in a worker whose engine names an archive.
CACHE_KEY = Hook("vllm.config.vllm", "VllmConfig", "compute_hash", ("self",))
LINEAR_LOADED = Hook(f"{_LAYERS}.linear", "UnquantizedLinearMethod", "process_weights_after_loading", _LOADED)
LINEAR = Hook(f"{_LAYERS}.linear", "UnquantizedLinearMethod", "apply", _APPLY)
HEAD_LOADED = Hook(
    f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod", "process_weights_after_loading", _LOADED
)
HEAD = Hook(f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod", "apply", _APPLY)
# Wrapped besides where experts may be served; a vLLM that has other ones computes them itself.
_MOE = f"{_LAYERS}.fused_moe"
EXPERTS_LOADED = Hook(
    f"{_MOE}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod", "process_weights_after_loading", _LOADED
)
# And where a model is quantised.
FP8_EXPERTS_LOADED = Hook(f"{_LAYERS}.quantization.fp8", "Fp8MoEMethod", "process_weights_after_loading", _LOADED)
_MXFP4 = f"{_LAYERS}.quantization.mxfp4"
MXFP4_EXPERTS_LOADED = tuple(
    Hook(_MXFP4, owner, "process_weights_after_loading", _LOADED)
    for owner in ("GptOssMxfp4MoEMethod", "Mxfp4MoEMethod")
)
INT4_EXPERTS_LOADED = tuple(
    Hook(f"{_LAYERS}.quantization.{module}", owner, "process_weights_after_loading", _LOADED)
    for module, owner in (
        ("auto_awq", "AutoAWQMoEMethod"),
        ("auto_gptq", "AutoGPTQMoEMethod"),
        (
            "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16_marlin",
            "CompressedTensorsWNA16MarlinMoEMethod",
        ),
    )
)
PACKED_EXPERTS_LOADED = *MXFP4_EXPERTS_LOADED, *INT4_EXPERTS_LOADED
MODEL_LOADED = Hook("vllm.v1.worker.gpu_worker", "Worker", "load_model", ("self", "load_dummy_weights"))

# Wrapped in a worker that is recorded, with `MODEL_LOADED`. Requests begin when it is warm.
WARM = Hook("vllm.v1.worker.gpu_worker", "Worker", "compile_or_warm_up_model", ("self",))
SHUTDOWN = Hook("vllm.v1.worker.gpu_worker", "Worker", "shutdown", ("self",))
LOGITS = Hook(
    f"{_LAYERS}.logits_processor",
    "LogitsProcessor",
    "_get_logits",
    ("self", "hidden_states", "lm_head", "embedding_bias"),
)
# Of the two model runners, what a step of requests calls once with the number of tokens that layers see, and a run that
# warms up or profiles does not; the one that the worker has is wrapped.
STEP_V1 = Hook(
    "vllm.v1.worker.gpu_model_runner",
    "GPUModelRunner",
    "_model_forward",
    ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds", "model_kwargs"),
)
STEP_V2 = Hook(
    "vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "prepare_inputs", ("self", "scheduler_output", "batch_desc")
)
STEPS = (STEP_V1, STEP_V2)

_SERVING = LINEAR_LOADED, LINEAR, HEAD_LOADED, HEAD, EXPERTS_LOADED, FP8_EXPERTS_LOADED, MODEL_LOADED
HOOKS = (WORKER, CACHE_KEY, *_SERVING, *PACKED_EXPERTS_LOADED, WARM, SHUTDOWN, LOGITS, *STEPS)

# Of the classes that the plugin's fp8 GEMMs are derived from; looked at where a model is quantised.
_FP8 = "vllm.model_executor.kernels.linear"
_SCALED, _BLOCK = f"{_FP8}.scaled_mm.ScaledMMLinearKernel", f"{_FP8}.scaled_mm.BlockScaledMMLinearKernel"
_QUANTISER = "vllm.model_executor.layers.quantization.input_quant_fp8"  # of the attribute quant_fp8 of both
FILLED = (
    Hook(_QUANTISER, "QuantFP8", "forward_cuda", ("self", "x", "scale", "scale_ub", "use_triton")),
    Hook(_SCALED, "FP8ScaledMMLinearKernel", "__init__", ("self", "c", "layer_param_names")),
    Hook(
        _SCALED,
        "FP8ScaledMMLinearKernel",
        "apply_scaled_mm",
        ("self", "A", "B", "out_dtype", "As", "Bs", "bias", "output_shape"),
    ),
    Hook(_BLOCK, "Fp8BlockScaledMMLinearKernel", "__init__", ("self", "config")),
    Hook(_BLOCK, "Fp8BlockScaledMMLinearKernel", "apply_block_scaled_mm", ("self", "A", "B", "As", "Bs")),
)
# And of the class that its int4 GEMMs are derived from; with what brings a parameter's axes in order.
_MIXED = f"{_FP8}.mixed_precision.MPLinearKernel"
_NAMES = "w_q_param_name", "w_s_param_name", "w_zp_param_name", "w_gidx_param_name"
FILLED_INT4 = (
    Hook(_MIXED, "MPLinearKernel", "__init__", ("self", "c", *_NAMES)),
    Hook(_MIXED, "MPLinearKernel", "get_min_capability", ("cls",)),
    Hook(_MIXED, "MPLinearKernel", "can_implement", ("cls", "c")),
    Hook(_MIXED, "MPLinearKernel", "process_weights_after_loading", _LOADED),
    Hook(_MIXED, "MPLinearKernel", "apply_weights", _APPLY),
    Hook(_MIXED, "MPLinearKernel", "_get_weight_params", _LOADED),
    Hook(_MIXED, "MPLinearKernel", "_transform_param", ("self", "layer", "name", "fn")),
)
PERMUTE = Hook(
    "vllm.model_executor.parameter", "", "permute_param_layout_", ("param", "input_dim", "output_dim", "kwargs")
)
# vLLM's lists by platform, the first class that answers is taken; with the module and name of the class to derive from.
INT4_LISTS = {"_POSSIBLE_KERNELS": (_MIXED, "MPLinearKernel")}
FP8_LISTS = {
    "_POSSIBLE_FP8_KERNELS": (_SCALED, "FP8ScaledMMLinearKernel"),
    "_POSSIBLE_FP8_BLOCK_KERNELS": (_BLOCK, "Fp8BlockScaledMMLinearKernel"),
}

# Of the classes that the plugin's experts are derived from, the first that of the experts; looked at where a model has
# experts.
_TRITON = f"{_MOE}.experts.triton_moe"
REDUCE = Hook(
    f"{_MOE}.topk_weight_and_reduce",
    "TopKWeightAndReduceNoOP",
    "apply",
    ("self", "output", "fused_expert_output", "topk_weights", "topk_ids", "apply_router_weight_on_input"),
)
_APPLY_EXPERTS = (
    *("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts"),
    *("expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta"),
    "apply_router_weight_on_input",
)
_SIZES = "M", "N", "K", "topk", "global_num_experts", "local_num_experts", "expert_tokens_meta", "activation"
FILLED_EXPERTS = (
    Hook(_TRITON, "TritonExperts", "apply", _APPLY_EXPERTS),
    Hook(_TRITON, "TritonExperts", "workspace_shapes", ("self", *_SIZES)),
    Hook(_TRITON, "TritonExperts", "finalize_weight_and_reduce_impl", ("self",)),
    Hook(_TRITON, "TritonExperts", "expects_unquantized_inputs", ("self",)),
    REDUCE,
)

# What makes a kernel of a class of experts whose weights have 16 bits, which the plugin's are to vLLM where it prepared
# weights of 4 bits; and how it is told of biases.
MAKE_KERNEL = Hook(
    f"{_MOE}.oracle.unquantized",
    "",
    "make_unquantized_moe_kernel",
    ("quant_config", "moe_config", "backend", "experts_cls", "routing_tables"),
)
DESCRIBE = Hook(
    f"{_MOE}.config",
    "",
    "biased_moe_quant_config",
    ("w1_bias", "w2_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"),
)
MADE = MAKE_KERNEL, DESCRIBE

# Of the activation that GEMMs of gates may compute; looked at where a model has one.
ACTIVATION = Hook(f"{_LAYERS}.activation", "SiluAndMul", "forward_native", ("x",))
# Of the norms that an archive may compute; and of what such a module calls.
NORM = Hook(f"{_LAYERS}.layernorm", "RMSNorm", "forward_native", ("self", "x", "residual"))
# What makes a pass over compiled graphs of a function and an identity for caches, and where a config has such a pass.
PASS = Hook("vllm.compilation.passes.inductor_pass", "CallableInductorPass", "__init__", ("self", "callable", "uuid"))
PASS_KEY = Hook("vllm.platforms.interface", "Platform", "pass_key", ("self",))
# Of the model that was loaded.
MODEL = Hook("vllm.v1.worker.gpu_worker", "Worker", "get_model", ("self",))

# Names that are read, by module: variables, and fields of classes as "Class.field".
READ = {
    "vllm.envs": ("VLLM_BATCH_INVARIANT",),
    "vllm.config.vllm": (
        "VllmConfig.additional_config",
        "VllmConfig.compilation_config",
        "VllmConfig.model_config",
        "VllmConfig.offload_config",
        "VllmConfig.parallel_config",
        "VllmConfig.quant_config",
    ),
    "vllm.config.model": ("ModelConfig.model",),
    "vllm.config.parallel": (
        "ParallelConfig.enable_dbo",
        "ParallelConfig.ubatch_size",
        "ParallelConfig.tensor_parallel_size",
        "ParallelConfig.pipeline_parallel_size",
        "ParallelConfig.data_parallel_index",
    ),
    "vllm.v1.worker.gpu.cudagraph_utils": ("BatchExecutionDescriptor.num_tokens",),
    "vllm.config.compilation": (
        "CompilationConfig.cudagraph_capture_sizes",
        "CompilationConfig.inductor_compile_config",
        "CompilationConfig.mode",
        "CompilationConfig.backend",
        "CompilationConfig.pass_config",
        "PassConfig.fuse_allreduce_rms",
        "PassConfig.enable_sp",
        "CompilationMode.VLLM_COMPILE",
    ),
    "vllm.config.offload": (
        "OffloadConfig.uva",
        "OffloadConfig.prefetch",
        "UVAOffloadConfig.cpu_offload_gb",
        "PrefetchOffloadConfig.offload_group_size",
    ),
    f"{_MOE}.config": tuple(
        f"FusedMoEConfig.{name}"
        for name in (
            *("moe_backend", "is_lora_enabled", "has_bias", "experts_per_token", "in_dtype"),
            "moe_parallel_config",
        )
    )
    + ("FusedMoEParallelConfig.enable_eplb",),
    f"{_MOE}.oracle.unquantized": ("UnquantizedMoeBackend.TRITON",),
    f"{_MOE}.activation": tuple(f"MoEActivation.{name}" for name in ("SILU", "GELU", "GELU_TANH", "SWIGLUOAI")),
    _FP8: (*FP8_LISTS, *INT4_LISTS),
    _MIXED: tuple(
        f"MPLinearLayerConfig.{name}"
        for name in (
            *("partition_weight_shape", "weight_type", "act_type", "group_size", "zero_points", "has_g_idx"),
            "out_type",
        )
    ),
    "vllm.scalar_type": ("ScalarType.bias",),
    _SCALED: tuple(
        f"FP8ScaledMMLinearLayerConfig.{name}"
        for name in ("weight_quant_key", "activation_quant_key", "weight_shape", "input_dtype", "out_dtype")
    ),
    "vllm.model_executor.layers.quantization.utils.quant_utils": (
        *(f"QuantKey.{name}" for name in ("dtype", "scale", "scale2", "symmetric")),
        *(f"ScaleDesc.{name}" for name in ("dtype", "static", "group_shape")),
    ),
}


def install(wrappers: Mapping[Hook, Make]) -> None:
    """Wrap each of these methods, unless one of this plugin's wrappers is in its place already; all of them or none.

    Raises:
        ArgumentError: vLLM lacks one, or it has other parameters; the message names each.
    """
    for (hook, make), (owner, method) in zip(wrappers.items(), look_up(wrappers), strict=True):
        if not is_marked(method):
            setattr(owner, hook.method, wrapped(method, make, hook))


def fuses_norms_with_sums(vllm_config: Any) -> bool:
    """Whether vLLM fuses the sum over ranks of tensor parallelism with the norm behind it, as it does where FlashInfer
    is installed, or splits both over the ranks (sequence parallelism); it then must find norms of its own."""
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return False
    passes = vllm_config.compilation_config.pass_config
    return bool(passes.fuse_allreduce_rms or passes.enable_sp)


def of_runner(runner: Any) -> Hook:
    """The one of `STEPS` that a worker's model runner has.

    Raises:
        ArgumentError: it is none that is known.
    """
    names = {(base.__module__, base.__name__) for base in type(runner).__mro__}
    for hook in STEPS:
        if (hook.module, hook.owner) in names:
            return hook
    raise ArgumentError(f"the model runner {type(runner).__module__}.{type(runner).__name__} is none that is known")


def put_first(
    names: Mapping[str, tuple[str, str]], filled: Iterable[Hook], make: Callable[..., tuple[type, ...]]
) -> None:
    """Put the classes that `make` derives from vLLM's before all others in the lists `names` for CUDA, unless they are.

    Raises:
        ArgumentError: vLLM lacks a method of `filled`, or it has other parameters.
        ImportError, AttributeError, KeyError: vLLM has no such lists.
    """
    look_up(filled)
    lists = [getattr(importlib.import_module(_FP8), name) for name in names]
    lists = [next(classes for platform, classes in each.items() if platform.name == "CUDA") for each in lists]
    if not any(is_marked(first) for each in lists for first in each):
        bases = [getattr(importlib.import_module(module), name) for module, name in names.values()]
        for each, ours in zip(lists, make(*bases), strict=True):
            mark(ours)
            each.insert(0, ours)
