"""The experts of models of Hugging Face transformers 5, computed by `moe`: an entry of its `ALL_EXPERTS_FUNCTIONS`.

Imports transformers when something is registered. A module of experts says by its attributes how its weights lie, and
by its class which gate of its own it has.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..errors import ArgumentError
from ..grouped_gemm import OVERLAP_OF_EXPERTS
from ..numbers.epilogue import CLAMPED, CLAMPED_ALPHA, CLAMPED_LIMIT
from ..numbers.scaling import SCALE_BLOCK
from ..serve.library import Library
from .experts import moe
from .operator import register

# The gates of grouped_gemm that are these activations of transformers and torch, by the name of their class.
_GATES = {
    **dict.fromkeys(("SiLU", "SiLUActivation"), "swiglu"),
    **dict.fromkeys(("GELU", "GELUActivation"), "geglu"),
    **dict.fromkeys(("GELUTanh", "NewGELUActivation"), "geglu_tanh"),
}

# Classes whose own gate is `CLAMPED`, each with its attributes that have the factor of the sigmoid and the limit.
_CLAMPED_GATES = {
    "GptOssExperts": ("alpha", "limit"),
    "OpenAIPrivacyFilterExperts": ("alpha", "limit"),
    "MiniMaxM3VLExperts": ("swiglu_alpha", "swiglu_limit"),
}

_WEIGHTS = "gate_up_proj", "down_proj"
_FP8 = "FP8Experts"  # the class of transformers' experts with weights in e4m3


def register_experts(lib: Library, name: str = "cute_aot", *, overlap: str = OVERLAP_OF_EXPERTS) -> None:
    """Let `lib` compute the experts of every model whose `experts_implementation` is `name`.

    After it, `model.set_experts_implementation(name)` or `from_pretrained(..., experts_implementation=name)` chooses it
    as transformers' own ones are chosen. Experts must have gate and up in `gate_up_proj` (experts, 2N, K), or taking
    turns there where the model says so, `down_proj` (experts, K, N), and SiLU, GELU or GPT-OSS's gate; biases may be
    there. Weights may be in e4m3 with scales of blocks of 128 x 128, as of DeepSeek's and Qwen3's FP8 checkpoints.
    Others raise ArgumentError at their first call, and what the archive lacks raises KernelMiss. Models that keep
    weights as (experts, K, N), as GPT-OSS does, need `transpose_experts` once. transformers' ids are int64, and some
    models' weights not float32: `moe` converts them, a launch each. `overlap` is as `moe` takes it. Another library
    under the same name takes the place of the first.

    Raises:
        ArgumentError: transformers is not installed, or older than 5; or `lib` is no open library.
    """
    register(lib)
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ArgumentError(
            f"transformers has no ALL_EXPERTS_FUNCTIONS here ({error}); pip install 'transformers>=5'"
        ) from None

    def experts(
        module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        activation = _activation(module)
        w13, w2 = (_weight(module, name) for name in _WEIGHTS)
        of_w13, of_w2 = (
            getattr(module, f"{name}_bias") if getattr(module, "has_bias", False) else None for name in _WEIGHTS
        )
        of_13, of_2 = _scales(module)
        words: Any = {"activation": activation, "overlap": overlap, "w13_scale": of_13, "w2_scale": of_2}
        given = hidden_states, w13, w2, top_k_index, top_k_weights
        return moe(lib, *given, w13_bias=of_w13, w2_bias=of_w2, **words)

    ALL_EXPERTS_FUNCTIONS.register(name, experts)
    with contextlib.suppress(ImportError):  # releases before it compute no experts in fp8 by implementations
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

        ALL_FP8_EXPERTS_FUNCTIONS.register(name, experts)


@torch.inference_mode(False)
@torch.no_grad()
def transpose_experts(model: torch.nn.Module) -> int:
    """Lay weights of experts that a model keeps as (experts, K, N), as GPT-OSS does, in memory as (experts, N, K),
    which kernels read; how many tensors that moved. Those that lie so already stay where they are.

    Parameters stay the same objects, of the same shape and values: only their strides change. So the model's state is
    saved and loaded as before, and transformers' own experts compute the same. Call it once, when the weights are
    loaded. They are copied one after the other, so that memory is needed for one weight of one layer more (4.2 GB of
    GPT-OSS-120B in bf16), and none afterwards.

    Raises:
        ArgumentError: the model has no such experts, or they are quantised.
    """
    found = [module for module in model.modules() if getattr(module, "is_transposed", False)]
    weights = [getattr(module, name, None) for module in found for name in _WEIGHTS]
    parameters = [w for w in weights if isinstance(w, torch.nn.Parameter) and w.dim() == 3]
    if not found or len(parameters) < len(weights):
        raise ArgumentError(
            f"{type(model).__name__} has no experts with weights (experts, K, N) to transpose; a quantised checkpoint, "
            "as GPT-OSS's in mxfp4, has to be loaded with dequantize=True in its quantization_config"
        )
    moved = [w for w in parameters if not w.mT.is_contiguous()]
    for weight in moved:
        weight.data = weight.data.mT.contiguous().mT
    return len(moved)


def _weight(module: Any, name: str) -> torch.Tensor:
    """A weight of a module of experts, (experts, N, K) as kernels read it.

    Raises:
        ArgumentError: it lies transposed.
    """
    weight: torch.Tensor = getattr(module, name)
    if not getattr(module, "is_transposed", False):
        return weight
    if not weight.mT.is_contiguous():
        raise ArgumentError(
            f"{name} of {type(module).__name__} lies in memory as (experts, K, N), which no kernel reads; call "
            "runtime.torch.transpose_experts(model) once, when its weights are loaded"
        )
    return weight.mT


def _is_fp8(module: Any) -> bool:
    return _FP8 in {base.__name__ for base in type(module).__mro__}


def _scales(module: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Those of both weights, or None where these are of 16 bits.

    Raises:
        ArgumentError: weights in 8 bits have none of blocks of 128 x 128, or rows are not quantised as they come.
    """
    if not _is_fp8(module) or module.gate_up_proj.element_size() > 1:
        return None, None
    scales = tuple(getattr(module, f"{name}_scale_inv") for name in _WEIGHTS)
    found = module.gate_up_proj.dtype, tuple(module.block_size or ()), module.activation_scheme, scales[0].dtype
    if found != (torch.float8_e4m3fn, (SCALE_BLOCK, SCALE_BLOCK), "dynamic", torch.float32):
        raise ArgumentError(
            f"{type(module).__name__} has weights in {found[0]} with scales of blocks {found[1]} in {found[3]} and "
            f"{found[2]} activations; this archive's experts have float8_e4m3fn, 128 x 128, float32 and dynamic"
        )
    return scales[0], scales[1]


def _activation(module: Any) -> str:
    """The gate of grouped_gemm that a module of experts has.

    Raises:
        ArgumentError: its experts are none that `moe` computes.
    """
    apply_gate = getattr(type(module), "_apply_gate", None)
    if not getattr(module, "has_gate", True):
        gate, problem = "", "no gate"
    elif _is_fp8(module):
        gate, problem = _gate_of_fp8(module)
    elif apply_gate is not None and apply_gate.__module__ != "transformers.integrations.moe":
        gate, problem = _gate_of_its_own(module)
    else:
        gate, problem = _usual_gate(module)
    if problem:
        raise ArgumentError(
            f"{type(module).__name__} has {problem}, which this archive's experts do not compute; choose another "
            "experts_implementation for this model"
        )
    return gate if getattr(module, "is_concatenated", True) else f"{gate}_interleaved"


def _usual_gate(module: Any) -> tuple[str, str]:
    """The gate that transformers gives a module of experts by its activation, and what it has instead of one."""
    act_fn = getattr(module, "act_fn", None)
    if isinstance(act_fn, torch.nn.GELU) and act_fn.approximate == "tanh":
        return "geglu_tanh", ""
    gate = _GATES.get(type(act_fn).__name__, "")
    return gate, "" if gate else f"activation {type(act_fn).__name__}"


def _gate_of_fp8(module: Any) -> tuple[str, str]:
    """The gate of transformers' experts in e4m3, which have that of the model, and what they have instead of one."""
    alpha, limit = module.swiglu_alpha, module.swiglu_limit
    if (alpha, limit) == (CLAMPED_ALPHA, CLAMPED_LIMIT):
        return CLAMPED, ""
    if (alpha, limit) != (None, None):
        return "", f"a gate clamped at {limit} with alpha {alpha}, not at {CLAMPED_LIMIT} with {CLAMPED_ALPHA}"
    return _usual_gate(module)


def _gate_of_its_own(module: Any) -> tuple[str, str]:
    """The gate that the class of a module of experts brings, and what it has instead of one."""
    attributes = _CLAMPED_GATES.get(type(module).__name__)
    if attributes is None:
        return "", "a gate of its own"
    alpha, limit = (getattr(module, name) for name in attributes)
    if (alpha, limit) != (CLAMPED_ALPHA, CLAMPED_LIMIT):
        return "", f"a gate clamped at {limit} with alpha {alpha}, not at {CLAMPED_LIMIT} with {CLAMPED_ALPHA}"
    return CLAMPED, ""
