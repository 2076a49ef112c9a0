"""The backend that measures on a GPU: needs torch, and runs in a process of its own (`aot.tune.worker`)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.errors import DeviceError
from runtime.program.operation import Signature
from runtime.serve.library import Library

from . import measure
from .measure import Launch
from .operation import OperandSet, tuning
from .timing import Timing
from .worker import Announce, Setup

_ALONE_SETTLE_US = 25e3
_SOUND = 256  # rows and columns, a sum that bf16 holds
_BASELINES = 4  # that are kept: jobs of a few signatures come in turns


def require_sound(device: str) -> None:
    """Refuse a device that does not multiply ones: in a process that begins after another failed that is no function's
    fault, and no other would do better there.

    Raises:
        RuntimeError: it gives another product; or torch's own error.
    """
    ones = torch.ones((_SOUND, _SOUND), dtype=torch.bfloat16, device=device)
    if not bool((ones @ ones == _SOUND).all()):  # waits for it
        raise RuntimeError("a product of ones is wrong here")


class GpuBackend:
    """Checks and times functions of an archive on the GPU that torch sees first."""

    recovered_at = 0.0  # by the monotonic clock: when the GPU's clock has come back from a sustained load

    def __init__(self, setup: Setup, announce: Announce) -> None:
        self.careful = False
        self.seed = setup.options.seed
        self.announce = announce
        self._environment = measure.environment()
        require_sound("cuda")
        self.l2_bytes = self._environment["l2_bytes"]
        self.library = Library(Archive.open(setup.archive), Driver())
        self.baselines: dict[Signature, tuple[str, Launch]] = {}  # the last ones: to compile one takes seconds

    def environment(self) -> dict[str, Any]:
        """The machine and the versions behind a measurement."""
        return self._environment

    def launch(self, name: str, m: int) -> Launch:
        """A launch of one function on torch's current stream, which is announced."""
        function = self.library.functions[name]

        def launch(o: OperandSet) -> None:
            capturing = torch.cuda.is_current_stream_capturing()
            if not capturing:
                self.announce(name, m)
            try:
                function(*o.arguments(), stream=torch.cuda.current_stream())
            except DeviceError:
                if not capturing:
                    torch.cuda.synchronize()  # raises where the context is of no more use
                raise

        return launch

    def check(self, signature: Any, m: int, names: Sequence[str]) -> dict[str, str]:
        """The functions that compute something wrong at `m` on fresh random operands, with what is wrong."""
        weights = tuning(signature).measures().weights(signature, m, 0, self.seed + m)
        found = measure.check(signature, m, weights, {name: self.launch(name, m) for name in names})
        self.announce("", m)
        return {name: result for name, result in found.items() if isinstance(result, str)}

    @contextlib.contextmanager
    def bench(self, signature: Any, m: int) -> Iterator[GpuBench]:
        """What takes times at `m`, on operands that together are more than three times what L2 holds."""
        measures = tuning(signature).measures()
        operands = measures.weights(signature, m, self.l2_bytes, self.seed).operands(m)
        if signature not in self.baselines:
            self.baselines[signature] = measures.baseline(signature, operands[0])
        for other in list(self.baselines)[:-_BASELINES]:
            del self.baselines[other]
        bench = GpuBench(self, signature, m, operands)
        try:
            yield bench
        finally:
            bench.graphs.clear()
            self.library.forget_captures()  # their graphs are gone


class GpuBench:
    """Takes times of functions, and of torch's baseline, for one signature at one M."""

    def __init__(self, backend: GpuBackend, signature: Any, m: int, operands: Sequence[OperandSet]) -> None:
        self._backend, self._operands, self._m = backend, operands, m
        self._floor_us = measure.expected_us(signature, m)
        self.power_bound = measure.power_bound(signature, m)
        self.baseline, self._torch = backend.baselines[signature]
        self.graphs: dict[str, measure.Contender] = {}  # where power bounds

    def time(self, names: Collection[str], repeats: int, graph_us: float, settle_us: float = 0.0) -> dict[str, Timing]:
        """Time launches in turn, where power bounds after so long a load; or where that failed before, one after the
        other, each after a load of its own."""
        time.sleep(max(0.0, self._backend.recovered_at - time.monotonic()))
        if not self._backend.careful:
            if self.power_bound:
                return self._under_load(names, repeats, graph_us, settle_us)
            launches = self._launches(names)
            return measure.time_interleaved(launches, self._operands, self._floor_us, repeats, graph_us, self._captured)
        found: dict[str, Timing] = {}
        for name in names:
            alone = self._launches([name])
            found |= measure.time_interleaved(
                alone, self._operands, self._floor_us, repeats, graph_us, settle_us=_ALONE_SETTLE_US * self.power_bound
            )
        return found

    def _under_load(self, names: Collection[str], repeats: int, graph_us: float, settle_us: float) -> dict[str, Timing]:
        """`time` with graphs that are kept from one call to the next, since the clock rises in a pause to capture."""
        new = [name for name in dict.fromkeys((*names, self.baseline)) if name not in self.graphs]
        least_us = max(graph_us, len(self._operands) * self._floor_us)  # of a graph, which reads all operands
        self.graphs |= measure.capture(self._launches(new), self._operands, self._floor_us, least_us)
        self._captured()
        graphs = {name: self.graphs[name] for name in names if name in self.graphs}
        return measure.time_in_turn(graphs, repeats, settle_us, math.ceil(graph_us / self._floor_us), warm_up=0)

    def sustained(self, us: Mapping[str, float]) -> dict[str, Timing]:
        """Time launches for long enough to meet the clock that their power leaves them."""
        launches = self._launches(list(us))
        found = measure.time_sustained(launches, self._operands, self._floor_us, us, self._captured)
        self._backend.recovered_at = time.monotonic() + measure.RECOVER_S
        return found

    def _captured(self) -> None:
        self._backend.announce("", self._m)

    def _launches(self, names: Collection[str]) -> Mapping[str, Launch]:
        ours = {name: self._backend.launch(name, self._m) for name in names if name != self.baseline}
        return ours | ({self.baseline: self._launch_baseline} if self.baseline in names else {})

    def _launch_baseline(self, o: OperandSet) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._captured()  # what fails now is no function's fault
        self._torch(o)
