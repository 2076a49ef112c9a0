"""What one worker runs, as a small file: its layers with their signatures, the norms between them, and how often each M
came, which `aot manifest from-server` makes a manifest of.

Layers are read from the model once, since their code does not run where graphs are compiled and replayed. Numbers of
tokens are counted at each step, as layers see them: padded to the size of the CUDA graph. Loads no archive, and knows
no server.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..gemm.signature import Signature
from ..numbers.epilogue import Epilogue
from .log import words

SCHEMA = 1  # raised when what a field of the file means changes
SignatureOf = Callable[[Any, Epilogue], Signature]  # of a layer, with what comes after the sum


class Worker(NamedTuple):
    """Whose file it is: `server` with its version, `engine` counts engines of data parallelism, and `rank` is that in
    its engine."""

    server: str
    model: str
    engine: int
    rank: int
    tensor_parallel: int
    pipeline_parallel: int


class Recorder:
    """One worker's file, `worker-ENGINE-RANK.json` in `folder`."""

    def __init__(self, folder: str, worker: Worker) -> None:
        """Make the folder; raises OSError where that cannot be."""
        os.makedirs(folder, exist_ok=True)
        self.path = Path(folder) / f"worker-{worker.engine}-{worker.rank}.json"
        whose = worker._asdict()
        written_by = f"cute-aot {__version__} in {whose.pop('server')}"
        self._worker: dict[str, Any] = {"schema": SCHEMA, "written_by": written_by, **whose}
        self._layers: list[dict[str, str]] = []
        self._left: Counter[str] = Counter()  # layers that are in no manifest, by the reason
        self._names: dict[int, str] = {}  # of modules, by id
        self._heads: dict[int, dict[str, str]] = {}
        self._norms: list[dict[str, str]] = []
        self._begin()

    def _begin(self) -> None:
        self._tokens: Counter[int] = Counter()
        self._logits: Counter[int] = Counter()
        self._written: Any = None

    def read(
        self,
        model: Any,
        layers: Iterable[tuple[Any, Epilogue]],
        signature: SignatureOf,
        capability: tuple[int, int] | None,
    ) -> None:
        """Note these layers of a model, whose weights are in place, in their order; before activations are fused.

        `signature` raises where a layer has none; `capability` is the compute capability of the GPU.
        """
        self._worker["capability"] = capability
        self._signature = signature
        self._names = {id(module): name for name, module in model.named_modules()}
        self._layers, self._left, self._heads, self._norms = [], Counter(), {}, []
        for layer, epilogue in layers:
            self._note(layer, epilogue, self._layers)

    def read_norms(self, norms: Iterable[tuple[Any, str]]) -> None:
        """Note the norms of the model that was read, each with the key of its signature."""
        self._norms = [{"name": self._names[id(norm)], "signature": key} for norm, key in norms if self.has(norm)]

    def _note(self, layer: Any, epilogue: Epilogue, to: list[dict[str, str]]) -> None:
        try:
            key = self._signature(layer, epilogue).key()
            to.append({"name": self._names.get(id(layer), "lm_head"), "signature": key})
        except Exception as error:  # whatever is odd about one layer, the others are recorded
            self._left[words(error)] += 1

    def has(self, module: Any) -> bool:
        """Whether a module is one of the model's."""
        return id(module) in self._names

    def warm(self) -> None:
        """Forget what was counted: from here on it is requests that run."""
        self._begin()

    def step(self, m: int) -> None:
        """Count a step in which layers see so many rows."""
        if m > 0:
            self._tokens[m] += 1

    def logits(self, head: Any, m: int, bias: bool) -> None:
        """Count a call of the head with so many rows."""
        if m > 0:
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
        if self._norms:
            found["norms"] = self._norms
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(json.dumps(found, indent=1) + "\n")
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)
        self._written = counted
