"""A worker that is recorded: the hooks that see its layers and count its steps, and when its file is written.

`runtime.vllm.record` has the file. Serves nothing, and leaves all that vLLM computes as it is.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..plugin.served import words
from . import hooks
from .periodic import Periodic

if TYPE_CHECKING:
    from .record import Recorder

_log = logging.getLogger("vllm.cute_aot")


class Recording:
    """That of the worker that was made last in this process, if its engine asks for one."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._writing: Periodic | None = None

    def begin(self, folder: str, vllm_config: Any, rank: int) -> None:
        """Record a worker in `folder`; raises OSError where that cannot be made, and ArgumentError as `Recorder`."""
        from .record import Recorder  # vLLM has imported torch by now

        version = str(importlib.import_module("vllm").__version__)
        self._recorder = Recorder(folder, vllm_config, rank, version)

    def end(self) -> None:
        """Write the file a last time: the worker ends, or another begins."""
        if self._writing is not None:
            self._writing.stop()
        self._writing = self._recorder = None

    def give_up(self, error: Exception) -> None:
        """Record nothing, and say why."""
        self._recorder = None
        _log.warning("cute-aot %s records nothing: %s", __version__, words(error))

    def read_model(self, worker: Any) -> None:
        """Note the layers of its model, count its steps from here on, and write the file now and then."""
        if self._recorder is None:
            return
        try:
            import torch

            capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
            self._recorder.read(worker.get_model(), capability)
            hook = hooks.of_runner(worker.model_runner)
            hooks.install({hook: self._around_step(hook)})
            self._writing = Periodic(self._recorder.write, "writes no record")
            _log.info("cute-aot %s records what the model runs in %s", __version__, self._recorder.path)
        except Exception as error:
            self.give_up(error)

    def wrappers(self) -> dict[hooks.Hook, hooks.Make]:
        """What goes around the worker's methods, besides the one that loads the model."""

        def around_warm_up(warm_up: Callable[..., Any]) -> Callable[..., Any]:
            def compile_or_warm_up_model(worker: Any) -> Any:
                found = warm_up(worker)
                if self._recorder is not None:
                    self._recorder.warm()
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

    def _count(self, count: Callable[[Recorder], None]) -> None:
        """Count a call, if the worker is recorded; whatever goes wrong must not reach the server."""
        try:
            if self._recorder is not None:
                count(self._recorder)
        except Exception as error:
            self.give_up(error)

    def _around_step(self, hook: hooks.Hook) -> hooks.Make:
        from .record import rows_of_step

        def around_step(run: Callable[..., Any]) -> Callable[..., Any]:
            def step(runner: Any, *args: Any, **kwargs: Any) -> Any:
                self._count(lambda of: of.step(rows_of_step(hook, args, kwargs)))
                return run(runner, *args, **kwargs)

            return step

        return around_step
