"""The plugin in one process of SGLang's: what its hooks do, from a scheduler's arguments to the call of a layer.

Whatever goes wrong before a model runs is one line of the log, and SGLang's own kernels serve.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..plugin.log import log_to, words
from ..plugin.served import OVERLAP_SUFFIX, PLAIN, Served, Server
from ..plugin.settings import Settings
from ..serve.library import Library
from ..serve.load import load
from . import hooks
from .recording import Recording, engine_and_rank, gated
from .settings import PLACE, required, settings_of

if TYPE_CHECKING:
    from ..plugin.activations import Fused

_log = logging.getLogger("sglang.cute_aot")


def register() -> None:
    """Let a scheduler whose arguments name an archive be served by it; SGLang calls this where it loads plugins.

    Never raises: where SGLang is not as it is known, that is one line of the log.
    """
    install(Plugin())


def install(plugin: Plugin) -> None:
    """Let `plugin` see models being loaded; where one already does, nothing changes."""
    try:
        hooks.begin(plugin.around_model)
    except Exception as error:  # whatever importing another release of SGLang raises
        plugin.refuse(error)


class Plugin(Served):
    """What one process serves; `load` opens an archive, as `runtime.load` does."""

    _recording: Recording

    def __init__(self, load: Callable[..., Library] = load) -> None:
        super().__init__(Server("SGLang", hooks.KNOWN_VERSIONS, PLACE), _log, Recording(), load)
        self._experts_left = ""  # why SGLang computes all experts, empty where each layer is asked for

    def around_model(self, load_model: Callable[..., Any]) -> Callable[..., Any]:
        """Of `ModelRunner.load_model`: hooks are in place before layers are made, and kernels are loaded before SGLang
        measures memory and captures graphs."""

        def load_model_and_preload(runner: Any, *args: Any, **kwargs: Any) -> Any:
            # A draft model is served by what its target was given; SGLang may have changed the arguments since.
            if not runner.is_draft_worker:
                self.start(runner)
            found = load_model(runner, *args, **kwargs)
            if not runner.is_draft_worker:
                self._recording.read_model(runner)
            self.loaded(runner)
            return found

        return load_model_and_preload

    def start(self, runner: Any) -> None:
        """Open the archive that the arguments of the runner's server name, if any, and put the hooks in place; begin to
        record, if they say so."""
        self._begin(
            required(runner.server_args),
            lambda: settings_of(runner.server_args),
            lambda folder: self._recording.begin(folder, runner),
            lambda settings: self._serve(settings, runner.server_args),
            lambda: engine_and_rank(runner),
        )

    def _serve(self, settings: Settings, server_args: Any) -> Library:
        """The library that serves this scheduler, once all hooks are in place."""
        _check_server(server_args)
        lib = self._open(settings, _workspaces(server_args))
        hooks.install(self._makers(server_args))
        self._sizes = _sizes(server_args)
        self._experts_left = _experts_left(server_args, settings.experts)
        return lib

    def _makers(self, server_args: Any) -> dict[hooks.Hook, hooks.Make]:
        from . import fp8  # SGLang has imported torch by now

        blocks: dict[hooks.Hook, hooks.Make] = dict.fromkeys(hooks.FP8_BLOCKS, fp8.around_block)
        return {
            hooks.LINEAR: self.around_apply,
            hooks.HEAD: self.around_head,
            hooks.FP8_LINEAR: fp8.around_linear,
            **blocks,
            hooks.DEEP_GEMM: fp8.around_deep_gemm,
        }

    def around_head(self, computed: Callable[..., Any]) -> Callable[..., Any]:
        """Of `LogitsProcessor._compute_lm_head`, which multiplies by the head's weight and adds no bias."""
        from ..torch.operator import GEMM

        def _compute_lm_head(processor: Any, hidden_states: Any, lm_head: Any, embedding_bias: Any = None) -> Any:
            number = getattr(lm_head, PLAIN, None)
            if number is None or processor.use_fp32_lm_head or hidden_states.dim() < 2:
                return computed(processor, hidden_states, lm_head, embedding_bias)
            weight = lm_head.weight
            x = hidden_states.to(weight.dtype).contiguous()
            return GEMM(number, x, weight, overlap=getattr(lm_head, PLAIN + OVERLAP_SUFFIX))

        return _compute_lm_head

    # --- its model is loaded ---

    def loaded(self, runner: Any) -> None:
        """Let the archive compute the layers of this model that it has checked kernels for, and their activations where
        it can; load and plan these kernels, and say which layers they are.

        If kernels cannot be loaded, all layers are left.
        """
        if self.lib is None:
            return
        try:
            from . import experts

            server_args, dtype = runner.server_args, runner.model_config.dtype
            for layer in runner.model.modules():
                if getattr(layer, "quant_method", None) is None:
                    continue
                if experts.is_experts(layer):
                    self._decide_experts(layer, dtype)
                elif getattr(layer, "weight", None) is not None:
                    self._decide(layer, runner)
                    if self.lib is None:
                        return  # and that was said
                else:
                    self._note_packed(layer, runner)
            for mlp in gated(runner.model, server_args):
                self._fuse_one(mlp)
            self.report([layer for layer in runner.model.modules() if layer in self._decisions])
        except Exception as error:
            self._give_up(error)

    def _decide(self, layer: Any, runner: Any) -> None:
        from ..plugin.linears import is_embedding
        from . import fp8

        fp8.leave(layer)
        if is_embedding(layer) and not _has_logits(runner):  # nobody multiplies with it
            self._leave(layer)
        elif fp8.is_fp8(layer):
            self._decide_fp8(layer, runner.server_args.fp8_gemm_runner_backend, runner.model_config.dtype)
        elif is_embedding(layer):
            self._decide_head(layer, runner.server_args)
        else:
            self.decide(layer.quant_method, layer)

    def _note_packed(self, layer: Any, runner: Any) -> None:
        """Say of a layer whose weights are packed that SGLang computes it."""
        from ..plugin.experts import EXPERTS
        from ..plugin.linears import INT4, Decision, is_embedding, kind_of

        if any(hasattr(layer, name) for name in hooks.PACKED_EXPERTS):
            kind = EXPERTS
        elif any(hasattr(layer, name) for name in hooks.PACKED) and (not is_embedding(layer) or _has_logits(runner)):
            kind = kind_of(layer) if is_embedding(layer) else INT4
        else:  # such as what scales a KV cache
            return
        self._decisions[layer] = Decision(kind, reason=f"{type(layer.quant_method).__name__} computes it")

    def _decide_head(self, layer: Any, server_args: Any) -> None:
        from ..plugin.linears import decide

        assert self.lib is not None
        self._leave(layer)
        decision = decide(self.lib, layer)
        if server_args.enable_fp32_lm_head:
            decision = dataclasses.replace(decision, plain="", reason="--enable-fp32-lm-head asks for f32")
        self._take(layer, dataclasses.replace(decision, biased="", with_bias=False))

    def _decide_fp8(self, layer: Any, backend: str, dtype: Any) -> None:
        from ..plugin.linears import FP8, Decision, weight_problem
        from . import fp8

        assert self.lib is not None
        log_to(self.lib, _log)
        key, besides = "", ()
        try:
            signature = fp8.wanted(layer, dtype, backend)
            reason = weight_problem(self.lib, fp8.matrix(layer, signature.scaling)) or self.ask(signature)
            if not reason:
                way, besides = self.unquantised(signature) if fp8.is_dynamic(layer) else (None, ())
                key = signature.key()
                fp8.take(layer, fp8.Weight(self._number(), signature.scaling, dtype, way))
        except Exception as error:  # whatever it is, SGLang computes the layer
            reason = words(error)
        self._decisions[layer] = Decision(FP8, key, reason=reason, binding=True, besides=besides)

    def _decide_experts(self, layer: Any, dtype: Any) -> None:
        from ..plugin.experts import left
        from . import experts

        assert self.lib is not None
        try:
            self._leave(layer)
            hooks.look_up([hooks.RUNNER])
            found = left(self._experts_left) if self._experts_left else experts.decision(self.lib, layer, dtype)
            if found.keys:
                experts.take(self.lib, layer, _log)
        except Exception as error:  # a layer that is not as it is known
            found = left(words(error))
        self._decisions[layer] = found

    def _leave(self, layer: Any) -> Fused | None:
        from . import experts, fp8

        if experts.is_experts(layer):
            experts.leave(layer)
        fp8.leave(layer)
        return super()._leave(layer)

    def _give_up(self, error: Exception) -> None:
        for layer in list(self._decisions):
            self._leave(layer)  # also in fp8: nothing was traced yet
        super()._give_up(error)


def _check_server(server_args: Any) -> None:
    if server_args.enable_deterministic_inference:
        raise ArgumentError("--enable-deterministic-inference asks for kernels of SGLang's own")
    if server_args.rl_on_policy_target is not None:
        raise ArgumentError("--rl-on-policy-target asks for kernels of SGLang's own")
    if server_args.torchao_config:
        raise ArgumentError("--torchao-config replaces weights after the model was loaded")
    if server_args.cpu_offload_gb > 0 or server_args.offload_group_size > 0:
        raise ArgumentError("weights are offloaded to the CPU, where no kernel of an archive reads them")


def _has_logits(runner: Any) -> bool:
    """Whether a scheduler computes logits, perhaps with an embedding: the last ranks of a pipeline do, of models that
    generate."""
    return bool(runner.is_generation and runner.pp_rank == runner.pp_size - 1)


def _experts_left(server_args: Any, wanted: bool) -> str:
    """Why SGLang computes all experts, empty where it need not."""
    if not wanted:
        return "the setting leaves experts to it"
    if server_args.enable_lora:  # wrapped once the model is loaded
        return "--enable-lora computes them with adapters"
    if server_args.enable_torch_compile:
        return "--enable-torch-compile traces them"
    if server_args.enable_symm_mem:
        return "--enable-symm-mem wants what they make in memory of its own"
    return ""


def _workspaces(server_args: Any) -> str:
    """`capture_workspaces` of `runtime.load`: SGLang replays one graph after the other, unless two streams compute two
    batches at once."""
    return "own" if server_args.enable_two_batch_overlap or server_args.enable_pdmux else "shared"


def _sizes(server_args: Any) -> list[int]:
    """The numbers of tokens that SGLang captures graphs for: batches in decoding, times the tokens that are verified at
    once, and pieces of prefill."""
    sizes: set[int] = set()
    if not server_args.disable_cuda_graph:
        sizes |= {
            batch * tokens
            for batch in server_args.cuda_graph_bs or ()
            for tokens in (1, server_args.speculative_num_draft_tokens or 1)
        }
    if not server_args.disable_piecewise_cuda_graph:
        sizes |= set(server_args.piecewise_cuda_graph_tokens or ())
    return sorted(sizes)
