"""What one worker runs, as a small file: its layers with their signatures, and how often each M came, which
`aot manifest from-server` makes a manifest of.

Layers are read from the model once, since their code does not run where graphs are compiled and replayed. Numbers of
tokens are counted at each step, as layers see them: padded to the size of the CUDA graph. Loads no archive.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ArgumentError
from ..gemm.signature import Signature
from ..numbers.epilogue import Epilogue
from ..plugin.activations import EPILOGUE as SWIGLU
from ..plugin.activations import mlps
from ..plugin.linears import is_called_with_bias, signature_of
from ..plugin.served import words
from . import hooks
from .fp8 import wanted

SCHEMA = 1  # raised when what a field of the file means changes


class Recorder:
    """One worker's file, `worker-ENGINE-RANK.json` in `folder`; ENGINE counts engines of data parallelism."""

    def __init__(self, folder: str, vllm_config: Any, rank: int, version: str) -> None:
        """Make the folder; raises OSError where that cannot be, and ArgumentError where counts would mean nothing."""
        parallel = vllm_config.parallel_config
        if parallel.enable_dbo or parallel.ubatch_size > 1:
            raise ArgumentError("with dual-batch overlap a layer sees parts of a batch, which are not counted")
        os.makedirs(folder, exist_ok=True)
        self.path = Path(folder) / f"worker-{parallel.data_parallel_index}-{rank}.json"
        self._worker = {
            "schema": SCHEMA,
            "written_by": f"cute-aot {__version__} in vLLM {version}",
            "model": str(vllm_config.model_config.model),
            "engine": parallel.data_parallel_index,
            "rank": rank,
            "tensor_parallel": parallel.tensor_parallel_size,
            "pipeline_parallel": parallel.pipeline_parallel_size,
        }
        self._layers: list[dict[str, str]] = []
        self._left: Counter[str] = Counter()  # layers that are in no manifest, by the reason
        self._names: dict[int, str] = {}  # of modules, by id
        self._heads: dict[int, dict[str, str]] = {}
        self._begin()

    def _begin(self) -> None:
        self._tokens: Counter[int] = Counter()
        self._logits: Counter[int] = Counter()
        self._written: Any = None

    def read(self, model: Any, capability: tuple[int, int] | None) -> None:
        """Note a model's layers whose weights are in place, in the order of its modules; before activations are fused.

        `capability` is the compute capability of its GPU.
        """
        self._worker["capability"] = capability
        self._names = {id(module): name for name, module in model.named_modules()}
        self._layers, self._left, self._heads = [], Counter(), {}
        for layer, epilogue in _layers(model):
            self._note(layer, epilogue, self._layers)

    def _note(self, layer: Any, epilogue: Epilogue, to: list[dict[str, str]]) -> None:
        try:
            key = _signature(layer, epilogue).key()
            to.append({"name": self._names.get(id(layer), "lm_head"), "signature": key})
        except Exception as error:  # whatever is odd about one layer, the others are recorded
            self._left[words(error)] += 1

    def warm(self) -> None:
        """Forget what was counted: from here on it is requests that run."""
        self._begin()

    def step(self, m: int) -> None:
        """Count a step in which layers see so many rows."""
        self._tokens[m] += 1

    def logits(self, head: Any, m: int, bias: bool) -> None:
        """Count a call of the head with so many rows."""
        self._logits[m] += 1
        if id(head) not in self._heads:
            found: list[dict[str, str]] = []
            self._note(head, Epilogue(bias=bias), found)
            self._heads[id(head)] = found[0] if found else {}

    def write(self) -> None:
        """Write the file, whole or not at all, if anything was counted since it was written; raises OSError."""
        counted = dict(self._tokens), dict(self._logits)
        if counted == self._written or "capability" not in self._worker:
            return
        heads = [head for head in list(self._heads.values()) if head]
        found: dict[str, Any] = self._worker | {"layers": self._layers, "heads": heads, "left": dict(self._left)}
        for name, counts in zip(("tokens", "logits"), counted, strict=True):
            found[name] = {str(m): counts[m] for m in sorted(counts)}
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(json.dumps(found, indent=1) + "\n")
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)
        self._written = counted


def rows_of_step(hook: hooks.Hook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many rows layers see, from the arguments of one of `hooks.STEPS`, without self."""
    given = dict(zip(hook.parameters[1:], args, strict=False)) | kwargs
    if hook is hooks.STEP_V2:
        return int(given["batch_desc"].num_tokens)
    return int(given["positions"].shape[-1])  # (tokens), or (3 or 4, tokens)


def _layers(model: Any) -> Iterator[tuple[Any, Epilogue]]:
    """The layers that each step runs, but for embeddings and heads, with what comes after the sum: of a model with
    encoders, those of its language model, since an encoder sees other rows."""
    within = model.get_language_model() if hasattr(model, "get_language_model") else model
    ((silu_and_mul, _),) = hooks.look_up([hooks.ACTIVATION])
    gates = {id(mlp.gate_up) for mlp in mlps(within, silu_and_mul)}
    for layer in within.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and not (_is(layer, "VocabParallelEmbedding") or _is(method, "BaseKVCacheMethod")):
            bias = is_called_with_bias(layer)
            gated = id(layer) in gates and not bias
            yield layer, Epilogue(SWIGLU if gated else "none", bias=bias)


def _signature(layer: Any, epilogue: Epilogue) -> Signature:
    """What the plugin would ask an archive for; in fp8 the product alone.

    Raises:
        ArgumentError: there is none: it is no GEMM, or scaled as no kernel is.
    """
    method = layer.quant_method
    for holder in (method, getattr(layer, "scheme", None)):
        for value in list(getattr(holder, "__dict__", {}).values()):
            if hasattr(config := getattr(value, "config", None), "activation_quant_key"):
                return wanted(config)
    computes = next((base.__name__ for base in type(method).__mro__ if "apply" in vars(base)), "")
    if computes not in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
        raise ArgumentError(f"{type(layer).__name__} computed by {type(method).__name__}")
    if getattr(layer.weight, "ndim", 0) != 2:
        raise ArgumentError(f"{type(layer).__name__} with a weight that is no matrix")
    return replace(signature_of(layer.weight, False), epilogue=epilogue.word())


def _is(found: Any, name: str) -> bool:
    """Whether a class of this name is among those of `found`."""
    return name in {base.__name__ for base in type(found).__mro__}
