"""The experts of models of Hugging Face transformers 5, computed by `moe`: an entry of its `ALL_EXPERTS_FUNCTIONS`.

Imports transformers when something is registered. Knows nothing of models: a module of experts says by its attributes
how its weights lie.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from ..serve.library import Library
from .experts import moe
from .operator import register

# The gates of grouped_gemm that are these activations of transformers and torch, by the name of their class.
_GATES = {
    **dict.fromkeys(("SiLU", "SiLUActivation"), "swiglu"),
    **dict.fromkeys(("GELU", "GELUActivation"), "geglu"),
    **dict.fromkeys(("GELUTanh", "NewGELUActivation"), "geglu_tanh"),
}

# What transformers' decorator says of a module, and what it says by default.
_USUAL = {"is_transposed": False, "has_bias": False, "has_gate": True, "is_concatenated": True}


def register_experts(lib: Library, name: str = "cute_aot", *, overlap: str = "serial") -> None:
    """Let `lib` compute the experts of every model whose `experts_implementation` is `name`.

    After it, `model.set_experts_implementation(name)` or `from_pretrained(..., experts_implementation=name)` chooses it
    as transformers' own ones are chosen. Experts must have gate and up in `gate_up_proj` (experts, 2N, K), or taking
    turns there where the model says so, `down_proj` (experts, K, N), no bias, and SiLU or GELU; others raise
    ArgumentError at their first call, and what the archive lacks raises KernelMiss. transformers' ids are int64, and
    some models' weights not float32: `moe` converts them, a launch each. `overlap` is as `moe` takes it. Another
    library under the same name takes the place of the first.

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
        weights = module.gate_up_proj, module.down_proj
        return moe(
            lib, hidden_states, *weights, top_k_index, top_k_weights, activation=_activation(module), overlap=overlap
        )

    ALL_EXPERTS_FUNCTIONS.register(name, experts)


def _activation(module: Any) -> str:
    """The gate of grouped_gemm that a module of experts has.

    Raises:
        ArgumentError: its experts are none that `moe` computes.
    """
    of = type(module).__name__
    has = {name: bool(getattr(module, name, usual)) for name, usual in _USUAL.items()}
    found = [name for name in ("is_transposed", "has_bias") if has[name]]
    if not has["has_gate"]:
        found.append("no gate")
    apply_gate = getattr(type(module), "_apply_gate", None)
    if apply_gate is not None and apply_gate.__module__ != "transformers.integrations.moe":
        found.append("a gate of its own")
    act_fn = getattr(module, "act_fn", None)
    gate = _GATES.get(type(act_fn).__name__)
    if isinstance(act_fn, torch.nn.GELU) and act_fn.approximate == "tanh":
        gate = "geglu_tanh"
    if gate is None:
        found.append(f"activation {type(act_fn).__name__}")
    if gate is None or found:
        raise ArgumentError(
            f"{of} has {' and '.join(found)}, which this archive's experts do not compute; choose another "
            "experts_implementation for this model"
        )
    return gate if has["is_concatenated"] else f"{gate}_interleaved"
