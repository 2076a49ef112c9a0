"""The plugin in one process of vLLM's: what its hooks do, from the worker's settings to the call of a layer.

Whatever goes wrong before a model runs is one line of the log, and vLLM's own kernels serve.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import AotError, ArgumentError
from ..serve.library import Library, load
from . import hooks, metrics
from .periodic import Periodic, words
from .recording import Recording
from .settings import Settings, settings_of

_log = logging.getLogger("vllm.cute_aot")  # under vLLM's own logger, which is the one that it configures
# Of a layer that is served: the library's number, and the weight's type. vLLM's class of weights hides attributes
# behind `__torch_function__`, which a trace need not go through.
_PLAIN, _BIASED, _DTYPE = "_cute_aot_plain", "_cute_aot_biased", "_cute_aot_dtype"
_FUSED = "_cute_aot_fused"  # of one that computes its activation too


def register() -> None:
    """Let a worker whose engine names an archive be served by it; vLLM calls this in every process, maybe twice.

    Never raises: where vLLM is not as it is known, that is one line of the log.
    """
    install(Plugin())


def install(plugin: Plugin) -> None:
    """Let `plugin` see the settings of workers; where one already does, nothing changes."""
    try:
        hooks.install({hooks.WORKER: plugin.around_worker})
    except Exception as error:  # whatever importing another release of vLLM raises
        _refuse(error)


class Plugin:
    """What one process serves; `load` opens an archive, as `runtime.load` does."""

    def __init__(self, load: Callable[..., Library] = load) -> None:
        self._load = load
        self.lib: Library | None = None  # of the worker that was made last
        self._digest = ""  # of what it serves
        # Layers and graphs of earlier workers hold numbers of theirs, so libraries stay open as long as the process.
        self._opened: dict[str, Library] = {}
        self._sizes: list[int] = []  # numbers of tokens that vLLM captures graphs for
        self._fp8_ready: set[str] = set()  # signatures whose kernels are loaded
        self._fp8_left: Counter[str] = Counter()  # layers that vLLM computes, by the reason
        self._fused: list[Any] = []  # the MLPs whose activations GEMMs compute
        self._decisions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by layer, or fp8 GEMM
        self._recording = Recording()
        self._exporting: Periodic | None = None

    # --- a worker begins ---

    def around_worker(self, made: Callable[..., None]) -> Callable[..., None]:
        """Of `WorkerBase.__init__`."""

        def __init__(worker: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            made(worker, vllm_config, *args, **kwargs)
            given = dict(zip(hooks.WORKER.parameters[2:], args, strict=False)) | kwargs
            self.start(vllm_config, given["rank"])

        return __init__

    def start(self, vllm_config: Any, rank: int = 0) -> None:
        """Open the archive that the engine's settings name, if any, and put the hooks in place; begin to record, if
        they say so."""
        self._recording.end()
        if self._exporting is not None:
            self._exporting.stop()
        self._exporting = self.lib = None
        self._digest = ""
        self._fp8_ready.clear()
        self._fp8_left.clear()
        self._fused.clear()
        self._decisions.clear()  # an earlier engine's, whose layers go on as they are
        try:
            settings = settings_of(vllm_config.additional_config)
            if settings is not None:
                _check_version(settings)
                if settings.record:
                    self._record(settings.record, vllm_config, rank)
            if settings is not None and settings.paths:
                _check_engine(vllm_config)
                lib = self._open(settings, _workspaces(vllm_config.parallel_config))
                hooks.install(self._wrappers())
                self._sizes = sorted(set(vllm_config.compilation_config.cudagraph_capture_sizes or ()))
                if vllm_config.quant_config is not None:
                    hooks.put_first(self._fp8_classes)
                self.lib, self._digest = lib, lib.digest
        except Exception as error:  # the server goes on with vLLM's kernels, whatever it is
            _refuse(error)
        self._export(vllm_config, rank)

    def _record(self, folder: str, vllm_config: Any, rank: int) -> None:
        try:
            self._recording.begin(folder, vllm_config, rank)
            hooks.install({hooks.MODEL_LOADED: self._around_model} | self._recording.wrappers())
        except Exception as error:
            self._recording.give_up(error)

    def _export(self, vllm_config: Any, rank: int) -> None:
        """Show the library's figures in the server's /metrics, where the server asks for them."""
        lib = self.lib
        if lib is None or not metrics.wanted():
            return
        try:
            labels = {"engine": str(vllm_config.parallel_config.data_parallel_index), "rank": str(rank)}
            exporter = metrics.Exporter(labels)
        except Exception as error:  # no prometheus_client, or another release of it
            _log.warning("%s has no metrics: %s", _self(lib), words(error))
        else:
            self._exporting = Periodic(lambda: exporter.update(lib.stats()), "writes no metrics")

    def _open(self, settings: Settings, workspaces: str) -> Library:
        """The library of these files; the one that this process already has of the same contents."""
        lib = self._load(settings.paths, on_miss="torch", on_slower="torch", capture_workspaces=workspaces)
        known = self._opened.setdefault(f"{lib.digest} {workspaces}", lib)
        if known is not lib:
            lib.close()
        return known

    def _wrappers(self) -> dict[hooks.Hook, hooks.Make]:
        from ..torch.operator import GEMM  # vLLM has imported torch by now
        from .activations import EPILOGUE, swiglu

        def around_loaded(loaded: Callable[..., None]) -> Callable[..., None]:
            def process_weights_after_loading(method: Any, layer: Any) -> None:
                loaded(method, layer)
                self.decide(method, layer)

            return process_weights_after_loading

        # What torch.compile traces: no more than attributes, and the operator.
        def around_apply(computed: Callable[..., Any]) -> Callable[..., Any]:
            def apply(method: Any, layer: Any, x: Any, bias: Any = None) -> Any:
                number = getattr(layer, _FUSED, None)
                if number is not None:
                    if x.dim() < 2 or x.dtype != getattr(layer, _DTYPE):
                        return swiglu(computed(method, layer, x, bias))
                    return GEMM(number, x.contiguous(), layer.weight, epilogue=EPILOGUE)
                number = getattr(layer, _PLAIN if bias is None else _BIASED, None)
                if number is None or x.dim() < 2 or x.dtype != getattr(layer, _DTYPE):
                    return computed(method, layer, x, bias)
                return GEMM(number, x.contiguous(), layer.weight, bias=bias)

            return apply

        def around_key(compute_hash: Callable[..., str]) -> Callable[..., str]:
            def compute_own_hash(vllm_config: Any) -> str:
                return self.cache_key(compute_hash(vllm_config))

            return compute_own_hash

        return {
            hooks.CACHE_KEY: around_key,
            hooks.LINEAR_LOADED: around_loaded,
            hooks.LINEAR: around_apply,
            hooks.HEAD_LOADED: around_loaded,
            hooks.HEAD: around_apply,
            hooks.MODEL_LOADED: self._around_model,
        }

    def _around_model(self, load_model: Callable[..., None]) -> Callable[..., None]:
        def load_model_and_preload(worker: Any, *args: Any, **kwargs: Any) -> None:
            load_model(worker, *args, **kwargs)
            self._recording.read_model(worker)
            self.loaded(worker)

        return load_model_and_preload

    def _fp8_classes(self, scaled: type, block: type) -> tuple[type, type]:
        from .fp8 import classes

        return classes(scaled, block, self.ask_fp8, self.made_fp8)

    # --- its model is made and loaded ---

    def ask_fp8(self, config: Any) -> tuple[bool, str | None]:
        """Whether the archive computes an fp8 layer that vLLM describes so, and if not why not; loads its kernels."""
        if self.lib is None:
            return False, "serves nothing"
        try:
            from ..torch.layers import choose
            from .fp8 import wanted

            signature, reason = choose(self.lib, wanted(config))
            if signature is not None and signature.key() not in self._fp8_ready:
                _preload(self.lib, {signature.key()}, self._sizes)  # now, as later there is no way back
                self._fp8_ready.add(signature.key())
        except Exception as error:  # whatever it is, vLLM asks its own classes next
            signature, reason = None, words(error)
        if signature is None:
            self._fp8_left[reason] += 1
            return False, reason
        return True, None

    def made_fp8(self, gemm: Any, config: Any) -> int:
        """Note an fp8 GEMM that vLLM made of one of the archive's classes; the library's number."""
        from ..torch.operator import register as number_of
        from .fp8 import wanted
        from .linears import FP8, Decision

        assert self.lib is not None  # it was asked before
        self._decisions[gemm] = Decision(FP8, wanted(config).key())
        return number_of(self.lib, identity=f"vllm {self.lib.digest}")

    def decide(self, method: Any, layer: Any) -> None:
        """Let the archive compute a layer whose weight is in place, if it has a checked kernel for it."""
        self._leave(layer)
        if self.lib is None:
            return
        try:
            from ..torch.operator import register as number_of
            from .linears import Decision, decide

            if hooks.is_hooked(type(method), "apply"):
                decision = decide(self.lib, layer)
            else:
                decision = Decision("linear layer", reason=f"{type(method).__name__} has an apply of its own")
            # Not `Library.identity`: a graph may come from the cache of a process on another device.
            number = number_of(self.lib, identity=f"vllm {self.lib.digest}")
            for name, key in ((_PLAIN, decision.plain), (_BIASED, decision.biased)):
                if key:
                    setattr(layer, name, number)
                    setattr(layer, _DTYPE, layer.weight.dtype)
            self._decisions[layer] = decision
        except Exception as error:  # a layer, or a device, that is not as it is known
            self._give_up(error)

    def loaded(self, worker: Any) -> None:
        """Let GEMMs compute the activations that they can, load and plan the kernels of the layers that were taken, and
        say which these are.

        Called before vLLM measures memory and captures graphs. If kernels cannot be loaded, all layers are left.
        """
        if self.lib is None:
            return
        try:
            from .linears import FP8, Decision, summary

            self._fuse(worker.get_model())
            decisions = list(self._decisions.values())
            decisions += [Decision(FP8, reason=reason) for reason in self._fp8_left.elements()]
            keys = {key for each in decisions for key in each.keys}
            planned = _preload(self.lib, keys, self._sizes) if keys else 0
            what = f"{len(keys)} signatures preloaded, for {planned} numbers of tokens planned"
            _log.info("%s %s (%s)", _self(self.lib), summary(decisions), what)
        except Exception as error:
            self._give_up(error)

    def _fuse(self, model: Any) -> None:
        """Let layers of gates compute their activations, where the archive has kernels for both together."""
        from ..torch.operator import register as number_of
        from .activations import EPILOGUE, mlps
        from .linears import fused

        assert self.lib is not None  # `loaded` saw it
        for mlp in mlps(model):
            layer, decision = mlp.gate_up, self._decisions.get(mlp.gate_up)
            if decision is None or not hooks.is_hooked(type(layer.quant_method), "apply"):
                continue
            if key := fused(self.lib, layer, decision, EPILOGUE):
                setattr(layer, _FUSED, number_of(self.lib, identity=f"vllm {self.lib.digest}"))
                setattr(layer, _DTYPE, layer.weight.dtype)
                self._decisions[layer] = dataclasses.replace(decision, fused=key)
                self._fused.append(mlp)
                mlp.leave_to_gemm()

    def _give_up(self, error: Exception) -> None:
        """Let vLLM compute every layer that was not quantised, which it still can: nothing was traced yet."""
        from .linears import FP8

        self.lib = None
        for mlp in self._fused:
            mlp.restore()
        for layer, decision in list(self._decisions.items()):
            if decision.kind != FP8:  # whose kernels are loaded
                self._leave(layer)
        _refuse(error)

    def _leave(self, layer: Any) -> None:
        """Let vLLM compute a layer."""
        for name in (_PLAIN, _BIASED, _DTYPE, _FUSED):
            if name in vars(layer):
                delattr(layer, name)
        self._decisions.pop(layer, None)

    # --- its graphs are compiled ---

    def cache_key(self, key: str) -> str:
        """vLLM's key of a compiled graph, changed by what the archive does in it: version, digest, layers taken."""
        taken = [(at, each) for at, each in self._decisions.items() if each.keys]
        if not taken:
            return key
        layers = sorted(f"{getattr(at, 'prefix', '')} {' '.join(sorted(each.keys))}" for at, each in taken)
        factors = [key, __version__, _sources(), self._digest, *layers]
        return hashlib.sha256("\n".join(factors).encode()).hexdigest()[: len(key)]


def _preload(lib: Library, keys: set[str], sizes: list[int]) -> int:
    """Load the kernels of these signatures, and plan for as many numbers of tokens as plans are kept."""
    try:
        lib.preload(sizes, only=keys)
    except ArgumentError:  # too many plans: the least numbers of tokens are those of most graphs
        lib.preload(only=keys)
        return 0
    return len(sizes)


def _check_version(settings: Settings) -> None:
    found = str(importlib.import_module("vllm").__version__)
    if settings.strict and found.partition("+")[0] not in hooks.KNOWN_VERSIONS:
        raise ArgumentError(
            f"this plugin knows vLLM {', '.join(hooks.KNOWN_VERSIONS)}, found {found}; to use it all the same, say "
            "'strict': false in additional_config['cute_aot']"
        )


def _workspaces(parallel_config: Any) -> str:
    """`capture_workspaces` of `runtime.load`: vLLM replays one graph after the other, unless it splits batches and has
    two streams compute their halves."""
    return "own" if parallel_config.enable_dbo or parallel_config.ubatch_size > 1 else "shared"


def _check_engine(vllm_config: Any) -> None:
    if importlib.import_module("vllm.envs").VLLM_BATCH_INVARIANT:
        raise ArgumentError("VLLM_BATCH_INVARIANT asks for kernels of vLLM's own")
    offload = vllm_config.offload_config
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        raise ArgumentError("weights are offloaded to the CPU, where no kernel of an archive reads them")


def _sources() -> str:
    """A digest of the code that decides what a graph calls."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    of_torch = (here.parent / "torch" / f"{name}.py" for name in ("operator", "direct", "lowering"))
    for path in (*sorted(here.glob("*.py")), *of_torch):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _self(lib: Library | None = None) -> str:
    if lib is None:
        return f"cute-aot {__version__}"
    names = ", ".join(Path(archive.path).name for archive in lib.stats().archives)
    return f"cute-aot {__version__}: {names} ({lib.digest[:12]})"


def _refuse(error: Exception) -> None:
    _log.warning("%s serves nothing, vLLM's kernels do: %s", _self(), words(error))
    if not isinstance(error, AotError):
        _log.debug("cute-aot", exc_info=error)
