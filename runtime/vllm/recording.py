"""A worker of vLLM's that is recorded: the hooks that see its layers and count its steps, and how layers are read."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError
from ..gemm.signature import Signature
from ..numbers.epilogue import Epilogue
from ..plugin.record import Recorder, Worker
from ..plugin.recording import Capability
from ..plugin.recording import Recording as AnyRecording
from . import hooks

_log = logging.getLogger("vllm.cute_aot")


class Recording(AnyRecording):
    """That of the worker that was made last in this process, if its engine asks for one."""

    def __init__(self) -> None:
        super().__init__(_log)

    def begin(self, folder: str, vllm_config: Any, rank: int, around_model: hooks.Make) -> None:
        """Record a worker in `folder`; `around_model` lets `read_model` be called when its model is loaded."""
        makers = {hooks.MODEL_LOADED: around_model, **self._makers()}
        self._begin(folder, lambda: _worker(vllm_config, rank), lambda: hooks.install(makers))

    def read_model(self, worker: Any) -> None:
        """Note the layers of its model, count its steps from here on, and write the file now and then."""

        def read(recorder: Recorder, capability: Capability) -> None:
            from ..plugin.activations import mlps
            from ..plugin.recorded_layers import layers_of

            ((silu_and_mul, _),) = hooks.look_up([hooks.ACTIVATION])
            model = worker.get_model()
            # Of a model with encoders, those of its language model, since an encoder sees other rows.
            within = model.get_language_model() if hasattr(model, "get_language_model") else model
            recorder.read(model, layers_of(within, mlps(within, silu_and_mul)), _signature, capability)
            recorder.read_norms(_norms(within))
            hook = hooks.of_runner(worker.model_runner)
            hooks.install({hook: self._around_step(hook)})

        self._read(read)

    def _makers(self) -> dict[hooks.Hook, hooks.Make]:
        """What goes around the worker's methods, besides the one that loads the model."""

        def around_warm_up(warm_up: Callable[..., Any]) -> Callable[..., Any]:
            def compile_or_warm_up_model(worker: Any) -> Any:
                found = warm_up(worker)
                self._count(lambda of: of.warm())
                return found

            return compile_or_warm_up_model

        def around_shutdown(shut_down: Callable[..., None]) -> Callable[..., None]:
            def shutdown(worker: Any) -> None:
                self.end()
                shut_down(worker)

            return shutdown

        def around_logits(compute: Callable[..., Any]) -> Callable[..., Any]:
            def _get_logits(processor: Any, hidden_states: Any, lm_head: Any, embedding_bias: Any) -> Any:
                self._count(lambda of: of.logits(lm_head, hidden_states.shape[0], embedding_bias is not None))
                return compute(processor, hidden_states, lm_head, embedding_bias)

            return _get_logits

        return {hooks.WARM: around_warm_up, hooks.SHUTDOWN: around_shutdown, hooks.LOGITS: around_logits}

    def _around_step(self, hook: hooks.Hook) -> hooks.Make:
        def around_step(run: Callable[..., Any]) -> Callable[..., Any]:
            def step(runner: Any, *args: Any, **kwargs: Any) -> Any:
                self._count(lambda of: of.step(_rows_of_step(hook, args, kwargs)))
                return run(runner, *args, **kwargs)

            return step

        return around_step


def _norms(model: Any) -> list[tuple[Any, str]]:
    """The norms of a model, with the keys of signatures; none where vLLM's class is not as it is known."""
    from . import norms

    try:
        ((rms_norm, _),) = hooks.look_up([hooks.NORM])
    except ArgumentError:
        return []
    return [(module, key) for module in norms.norms(model, rms_norm) if (key := norms.key_of(module))]


def _worker(vllm_config: Any, rank: int) -> Worker:
    """Whose record it is; raises ArgumentError where counts would mean nothing."""
    parallel = vllm_config.parallel_config
    if parallel.enable_dbo or parallel.ubatch_size > 1:
        raise ArgumentError("with dual-batch overlap a layer sees parts of a batch, which are not counted")
    return Worker(
        f"vLLM {importlib.import_module('vllm').__version__}",
        str(vllm_config.model_config.model),
        parallel.data_parallel_index,
        rank,
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
    )


def _rows_of_step(hook: hooks.Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many rows layers see, from the arguments of one of `hooks.STEPS`, without self."""
    given = dict(zip(hook.parameters[1:], args, strict=False)) | kwargs
    if hook is hooks.STEP_V2:
        return int(given["batch_desc"].num_tokens)
    return int(given["positions"].shape[-1])  # (tokens), or (3 or 4, tokens)


def _signature(layer: Any, epilogue: Epilogue) -> Signature:
    """What the plugin would ask an archive for; in fp8 the product alone.

    Raises:
        ArgumentError: there is none: it is no GEMM, or scaled as no kernel is.
    """
    from ..plugin.recorded_layers import unquantised
    from .fp8 import wanted

    for holder in (layer.quant_method, getattr(layer, "scheme", None)):
        for value in list(getattr(holder, "__dict__", {}).values()):
            if hasattr(config := getattr(value, "config", None), "activation_quant_key"):
                return wanted(config)
    return unquantised(layer, epilogue)
