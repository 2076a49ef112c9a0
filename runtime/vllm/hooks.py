"""What the plugin wraps and reads of vLLM, in one table, and the function that puts the wrappers in place.

Knows names and parameters, and nothing of what the wrappers do. Nothing of vLLM is imported until a hook is looked up.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError

# Releases whose sources `HOOKS` and `READ` were compared with: tests/test_vllm_hooks.py does that.
KNOWN_VERSIONS = ("0.25.0",)


@dataclass(frozen=True)
class Hook:
    """A method of vLLM's that the plugin wraps; `parameters` are the names that it must have, `self` among them."""

    module: str
    owner: str
    method: str
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.owner}.{self.method}"


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
MODEL_LOADED = Hook("vllm.v1.worker.gpu_worker", "Worker", "load_model", ("self", "load_dummy_weights"))

HOOKS = (WORKER, CACHE_KEY, LINEAR_LOADED, LINEAR, HEAD_LOADED, HEAD, MODEL_LOADED)

# Names that are read, by module: variables, and fields of classes as "Class.field".
READ = {
    "vllm.envs": ("VLLM_BATCH_INVARIANT",),
    "vllm.config.vllm": ("VllmConfig.additional_config", "VllmConfig.compilation_config", "VllmConfig.offload_config"),
    "vllm.config.compilation": ("CompilationConfig.cudagraph_capture_sizes",),
    "vllm.config.offload": (
        "OffloadConfig.uva",
        "OffloadConfig.prefetch",
        "UVAOffloadConfig.cpu_offload_gb",
        "PrefetchOffloadConfig.offload_group_size",
    ),
}

_MARK = "_cute_aot_hook"
Make = Callable[[Callable[..., Any]], Callable[..., Any]]  # of what a method was, its wrapper


def install(wrappers: Mapping[Hook, Make]) -> None:
    """Wrap each of these methods, unless one of this plugin's wrappers is in its place already; all of them or none.

    Raises:
        ArgumentError: vLLM lacks one, or it has other parameters; the message names each.
    """
    missing, found = [], []
    for hook, make in wrappers.items():
        try:
            owner = getattr(importlib.import_module(hook.module), hook.owner)
            method = vars(owner)[hook.method]
            parameters = tuple(inspect.signature(method).parameters)
        except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
            missing.append(f"{hook} is not there ({type(error).__name__}: {error})")
            continue
        if parameters != hook.parameters:
            missing.append(f"{hook} has the parameters {', '.join(parameters)}, not {', '.join(hook.parameters)}")
        elif getattr(method, _MARK, None) is None:
            found.append((hook, owner, method, make))
    if missing:
        raise ArgumentError("; ".join(missing))
    for hook, owner, method, make in found:
        wrapper = functools.wraps(method)(make(method))
        setattr(wrapper, _MARK, hook)
        setattr(owner, hook.method, wrapper)


def is_hooked(owner: type, method: str) -> bool:
    """Whether `owner.method`, inherited or not, is one of the plugin's wrappers, and not a method that hides it."""
    return getattr(getattr(owner, method, None), _MARK, None) is not None
