"""A scheduler of SGLang's that is recorded: the hooks that count its steps, and how the layers of its model are read.

Serves nothing. A step is counted when it has run, by the rows that its layers saw: those of its batch, or of the CUDA
graph that was replayed for it, in which the head ran too.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArgumentError
from ..gemm.signature import Signature
from ..numbers.epilogue import Epilogue
from ..plugin.record import Recorder, SignatureOf, Worker
from ..plugin.recording import Capability
from ..plugin.recording import Recording as AnyRecording
from . import hooks

_log = logging.getLogger("sglang.cute_aot")


@dataclass
class _Step:
    """A step that runs: the rows that layers see, the heads that were called with how many rows, and whether a CUDA
    graph was replayed."""

    rows: int
    heads: list[tuple[Any, int]] = field(default_factory=list)
    replayed: bool = False


class Recording(AnyRecording):
    """That of the scheduler whose model was loaded last in this process, if its server asks for one."""

    def __init__(self) -> None:
        super().__init__(_log)
        self._step: _Step | None = None
        self._head: Any = None  # of the model, which graphs call without a word

    def begin(self, folder: str, runner: Any) -> None:
        """Record the scheduler with this model runner in `folder`, whose model is about to be loaded."""
        self._step = self._head = None
        self._begin(folder, lambda: _worker(runner), lambda: hooks.install(self._makers()))

    def read_model(self, runner: Any) -> None:
        """Note the layers of its model, and write the file now and then."""

        def read(recorder: Recorder, capability: Capability) -> None:
            from ..plugin.recorded_layers import layers_of

            ((_, language_model),) = hooks.look_up([hooks.LANGUAGE_MODEL])
            within = runner.model
            if hasattr(within, "model") or hasattr(within, "language_model"):  # an encoder sees other rows
                within = language_model(within)
            layers = layers_of(within, gated(within, runner.server_args))
            recorder.read(runner.model, layers, _signature_of(runner), capability)

        self._read(read)

    # --- it runs ---

    def _makers(self) -> dict[hooks.Hook, hooks.Make]:
        return {
            hooks.STEP: self._around_step,
            hooks.REPLAY: self._around_replay,
            hooks.PIECES: self._around_pieces,
            hooks.LOGITS: self._around_logits,
        }

    def _around_step(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Of `ModelRunner._forward_raw`, which runs a batch of requests, and nothing that warms up or captures."""

        def _forward_raw(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._count(lambda of: self._enter(runner, forward_batch))
            try:
                found = run(runner, forward_batch, *args, **kwargs)
            finally:
                step, self._step = self._step, None
            if step is not None:
                self._count(lambda of: _count(of, step, found.can_run_graph))
            return found

        return _forward_raw

    def _enter(self, runner: Any, forward_batch: Any) -> None:
        if not runner.is_draft_worker:
            self._step = _Step(len(forward_batch.input_ids))

    def _around_replay(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Of `CudaGraphRunner.replay`, of whole steps; it may capture graphs anew before."""

        def replay(graphs: Any, *args: Any, **kwargs: Any) -> Any:
            found = run(graphs, *args, **kwargs)
            self._count(lambda of: self._replayed(graphs.bs * graphs.num_tokens_per_bs))
            return found

        return replay

    def _replayed(self, rows: int) -> None:
        if self._step is not None:
            self._step = _Step(rows, [] if self._head is None else [(self._head, rows)], True)

    def _around_pieces(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Of `PiecewiseCudaGraphRunner.replay_prepare`; the head runs outside of the pieces."""

        def replay_prepare(graphs: Any, *args: Any, **kwargs: Any) -> Any:
            found = prepare(graphs, *args, **kwargs)
            self._count(lambda of: self._pieces(len(found.input_ids)))
            return found

        return replay_prepare

    def _pieces(self, rows: int) -> None:
        if self._step is not None:
            self._step.rows, self._step.replayed = rows, True

    def _around_logits(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Of `LogitsProcessor._get_logits`, also while graphs are captured; what torch.compile traces is left alone."""
        import torch  # SGLang has imported it by now

        def _get_logits(processor: Any, hidden_states: Any, lm_head: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._count(lambda of: self._logits(of, lm_head, hidden_states.shape[0]))
            return compute(processor, hidden_states, lm_head, *args, **kwargs)

        return _get_logits

    def _logits(self, recorder: Recorder, head: Any, rows: int) -> None:
        if recorder.has(head):  # and not a draft's
            self._head = head
            if self._step is not None:
                self._step.heads.append((head, rows))


def _count(recorder: Recorder, step: _Step, by_graph: bool) -> None:
    """Count a step that has run."""
    if by_graph != step.replayed:
        raise ArgumentError("a CUDA graph was replayed in a way that the plugin does not know")
    recorder.step(step.rows)
    for head, rows in step.heads:
        recorder.logits(head, rows, False)


# --- what is read of its model ---


def _worker(runner: Any) -> Worker:
    """Whose record it is; raises ArgumentError where counts would mean nothing."""
    of = runner.server_args
    reasons = {
        "layers see parts of a batch, or several": of.enable_two_batch_overlap or of.enable_pdmux,
        "layers see other rows than requests have tokens": of.enable_dp_attention
        or of.moe_a2a_backend != "none"
        or of.moe_dense_tp_size is not None
        or of.enable_attn_tp_input_scattered
        or of.attn_cp_size > 1,
        "--torchao-config replaces weights after the model was loaded": bool(of.torchao_config),
    }
    for reason, found in reasons.items():
        if found:
            raise ArgumentError(reason)
    return Worker(
        f"SGLang {importlib.import_module('sglang').__version__}",
        str(runner.model_config.model_path),
        *engine_and_rank(runner),
        runner.tp_size,
        runner.pp_size,
    )


def engine_and_rank(runner: Any) -> tuple[int, int]:
    """Which of the engines of data parallelism a model runner is of, and its rank in that."""
    return runner.dp_rank or 0, runner.pp_rank * runner.tp_size + runner.tp_rank


def gated(model: Any, server_args: Any) -> Iterable[Any]:
    """The MLPs whose activations the plugin leaves to a GEMM, if the archive has it: none where adapters of gates are
    added before the activation, or hooks are to see what gates give."""
    from ..plugin.activations import mlps

    if server_args.enable_lora or server_args.forward_hooks:
        return ()
    ((silu_and_mul, _),) = hooks.look_up([hooks.ACTIVATION])
    return mlps(model, silu_and_mul, hooks.HARMLESS)


def _signature_of(runner: Any) -> SignatureOf:
    """What says what the plugin would ask an archive for; in fp8 the product alone."""
    from ..plugin.linears import is_embedding
    from ..plugin.recorded_layers import product, unquantised
    from . import fp8

    server_args, dtype = runner.server_args, runner.model_config.dtype

    def signature(layer: Any, epilogue: Epilogue) -> Signature:
        if fp8.is_fp8(layer):
            return fp8.wanted(layer, dtype, server_args.fp8_gemm_runner_backend, hooks.is_block)
        if not is_embedding(layer):
            return unquantised(layer, epilogue)
        if server_args.enable_fp32_lm_head:
            raise ArgumentError("--enable-fp32-lm-head asks for f32")
        return product(layer, epilogue)  # whatever its method is, its weight is what SGLang multiplies by

    return signature
