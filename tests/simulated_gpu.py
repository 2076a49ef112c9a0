"""A GPU that is none: it answers with made-up times, so that all of the tuner runs on a CPU.

`Truth` bends the tuner's own estimates, trees and all, so that it says nothing for or against these: the true time of a
function is its estimate times what is its own, a smooth function of log M and a step for each few waves of tiles. What
is measured is that with noise. Everything follows from a seed.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from aot.search.h200 import LOAD
from aot.tune.halving import Bench
from aot.tune.jobs import Answer, Job
from aot.tune.options import TuneOptions
from aot.tune.pool import Pool
from aot.tune.roofline import expected_us
from aot.tune.run import Machine
from aot.tune.timing import Timing
from aot.tune.worker import Announce, Setup, do
from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.errors import AotError
from runtime.gemm.signature import Signature
from runtime.program.record import Record
from runtime.tables.dispatch import Entry

from .recording_driver import gemm_record

BASELINE = "torch.mm"
_TWINS = 0.4  # of its bias, what a function has of its own besides its twin's
GPU = Gpu("made up", 132, 4800)
ENVIRONMENT = {"gpu": "made up", "compute_capability": "9.0", "gpu_id": "1"}
TimeOf = Callable[[str, Signature, int], float]  # true microseconds of a function, or of the baseline


def pool_of(entries: Sequence[Entry]) -> Pool:
    """All functions that entries name, which take what a plain GEMM of bf16 does."""
    names = {name for e in entries for name in e.names}
    return Pool("sm_90a", names, lambda name: Record.from_json(gemm_record(name)), entries)


class Truth:
    """What each function really takes, in microseconds."""

    def __init__(self, pool: Pool, seed: int = 0, bias: float = 0.04, waves: float = 0.01) -> None:
        self.pool, self.seed, self.bias, self.waves = pool, seed, bias, waves

    def __call__(self, name: str, signature: Signature, m: int) -> float:
        if name == BASELINE:
            return expected_us(signature, m) * (1.3 + 0.1 * math.sin(1.7 * math.log2(m)))
        variant, smooth = self.pool.variant(name), 0.0
        for share, of in self._shares(name):
            amplitude, phase, speed = self._own(of, signature)
            smooth += share * self.bias * amplitude * math.sin(speed * math.log2(m) + phase)
        tiles = math.ceil(m / (variant.integer("tile_m", 128) if variant else 128))
        return self._estimates(signature)(name, m) * math.exp(smooth + self._step(name, signature, tiles // 4))

    @cache  # noqa: B019
    def _shares(self, name: str) -> list[tuple[float, str]]:
        """Whose own a function's bias is: that of its twin, where it has the minor choices, and some of its own.

        Of 65 pairs that were timed on H200s the log ratios of time to estimate differ by 2.7%, of any two by 9.6%.
        """
        twin = name.replace(".nonpersistent", "")
        return [(1.0, name)] if twin == name else [(1.0, twin), (_TWINS, name)]

    @cache  # noqa: B019
    def _estimates(self, signature: Signature) -> Callable[[str, int], float]:
        return self.pool.estimates(signature)

    @cache  # noqa: B019
    def _own(self, name: str, signature: Signature) -> tuple[float, float, float]:
        chance = random.Random(f"{self.seed} {name} {signature.key()}")
        return chance.gauss(0, 1.4), chance.uniform(0, 2 * math.pi), chance.uniform(0.4, 1.2)

    @cache  # noqa: B019
    def _step(self, name: str, signature: Signature, wave: int) -> float:
        return random.Random(f"{self.seed} {name} {signature.key()} {wave}").gauss(0, self.waves)


@dataclass
class SimulatedGpu:
    """A backend whose times are `time_of` with `noise` (of a sample of a millisecond); `wrong` says what checks find.

    `lucky` are functions whose first, brief times are a third too low. `busy_us` is how long a GPU would have measured.
    """

    time_of: TimeOf
    noise: float = 0.005
    wrong: Callable[[Signature, str], str | None] = lambda signature, name: None
    lucky: Collection[str] = ()
    bound: bool = False
    sustained: Mapping[str, float] = field(default_factory=dict)  # by function, how much longer it takes under load
    careful: bool = False
    busy_us: float = 0.0
    loads: list[int] = field(default_factory=list)  # the M at which functions were timed under sustained load
    announce: Announce = lambda name, m: None

    def environment(self) -> dict[str, Any]:
        return dict(ENVIRONMENT)

    def check(self, signature: Signature, m: int, names: Sequence[str]) -> dict[str, str]:
        found = {}
        for name in names:
            self.announce(name, m)
            if reason := self.wrong(signature, name):
                found[name] = reason
        return found

    @contextlib.contextmanager
    def bench(self, signature: Signature, m: int) -> Iterator[Bench]:
        yield SimulatedBench(self, signature, m)


class SimulatedBench:
    baseline = BASELINE

    def __init__(self, gpu: SimulatedGpu, signature: Signature, m: int) -> None:
        self.gpu, self.signature, self.m, self.power_bound = gpu, signature, m, gpu.bound
        self._turn = 0

    def time(self, names: Collection[str], repeats: int, graph_us: float, settle_us: float = 0.0) -> dict[str, Timing]:
        self._turn += 1
        self.gpu.busy_us += settle_us if self.power_bound else 0.0
        found = {}
        for name in names:
            self.gpu.announce("" if name == BASELINE else name, self.m)
            chance = random.Random(f"{name} {self.signature.key()} {self.m} {self._turn}")
            us = self.gpu.time_of(name, self.signature, self.m)
            least = max(graph_us, 2 * us)
            self.gpu.busy_us += (repeats + 2) * least
            noise = self.gpu.noise * math.sqrt(1_000 / least)
            screened = self._turn == 1 and repeats < 4
            luck = 0.67 if name in self.gpu.lucky and screened else 1.0
            found[name] = Timing.of([us * luck * math.exp(chance.gauss(0, noise)) for _ in range(repeats)])
        return found

    def sustained(self, us: Mapping[str, float]) -> dict[str, Timing]:
        self.gpu.busy_us += LOAD.us(len(us))
        self.gpu.loads.append(self.m)
        true = {name: self.gpu.time_of(name, self.signature, self.m) for name in us}
        return {name: Timing(t * self.gpu.sustained.get(name, 1.0), 0.01) for name, t in true.items()}


class Inline:
    """An executor that does jobs in this process, one by one; `before` is asked first and may raise."""

    width = 1

    def __init__(
        self, gpu: SimulatedGpu, options: TuneOptions, before: Callable[[Job], None] = lambda job: None
    ) -> None:
        self.gpu, self.options, self.before = gpu, options, before
        self.done: list[Job] = []
        self._waiting: deque[Job] = deque()

    def environment(self) -> dict[str, Any]:
        return self.gpu.environment()

    def submit(self, job: Job) -> None:
        self._waiting.append(job)

    def answers(self) -> Iterator[tuple[Job, Answer]]:
        job = self._waiting.popleft()
        self.before(job)
        self.done.append(job)
        return iter([(job, do(self.gpu, job, self.options))])

    def close(self) -> None:
        self._waiting.clear()


def machine(
    gpu: SimulatedGpu, before: Callable[[Job], None] = lambda job: None, kind: Gpu = GPU, done: list[Job] | None = None
) -> Machine:
    """A machine with that GPU; `done` gets the jobs that are done."""

    def executor(setup: Setup) -> Inline:
        made = Inline(gpu, setup.options, before)
        if done is not None:
            made.done = done
        return made

    return Machine((9, 0), kind, executor)


# --- in processes of their own ---


def crashing(setup: Setup, announce: Announce) -> SimulatedGpu:
    """A backend of which functions do what their names say: "dies", "poisons", "hangs"; memory is used up at the first
    launch of "crowded", and at each of "full". Each start leaves a file."""
    Path(setup.details, str(os.getpid())).touch()
    if setup.archive.exists():
        with Archive.open(setup.archive) as archive:
            assert "poisons" in archive.functions

    def time_of(name: str, signature: Signature, m: int) -> float:
        return {"quick": 2.0, "slow": 2.2, BASELINE: 2.5}.get(name, 1.0)

    def wrong(signature: Signature, name: str) -> str | None:
        if name == "dies":
            os._exit(7)
        if name == "poisons":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if name == "hangs":
            time.sleep(600)
        crowded = Path(setup.details, "crowded")
        if name == "full" or (name == "crowded" and not crowded.exists()):
            crowded.touch()
            raise type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")
        return "relative error 1.0" if name == "wrong" else None

    return SimulatedGpu(time_of, wrong=wrong, announce=announce)


def dies_in_replays(setup: Setup, announce: Announce) -> SimulatedGpu:
    """A backend whose "late" function ends the process while several are replayed, which nothing announces."""
    gpu = crashing(setup, announce)
    usual = gpu.time_of

    def time_of(name: str, signature: Signature, m: int) -> float:
        if name == "late":
            announce(name if gpu.careful else "", m)
            os._exit(9)
        return usual(name, signature, m)

    gpu.time_of = time_of
    return gpu


def begins_once(setup: Setup, announce: Announce) -> SimulatedGpu:
    """A backend of a GPU that is of no more use once it has failed."""
    if any(path.name.isdigit() for path in Path(setup.details).iterdir()):
        raise RuntimeError("a product of ones is wrong here")
    return crashing(setup, announce)


def broken(setup: Setup, announce: Announce) -> SimulatedGpu:
    """A backend that cannot begin."""
    raise RuntimeError("CUDA error: out of memory")


def baseline_dies(setup: Setup, announce: Announce) -> SimulatedGpu:
    """A backend whose baseline ends the process."""
    gpu = crashing(setup, announce)
    usual = gpu.time_of
    gpu.time_of = lambda name, s, m: os._exit(5) if name == BASELINE else usual(name, s, m)
    return gpu


def refuses(setup: Setup, announce: Announce) -> SimulatedGpu:
    """A backend that says what is wrong."""
    gpu = crashing(setup, announce)

    def time_of(name: str, signature: Signature, m: int) -> float:
        raise AotError("torch cannot compute it")

    gpu.time_of = time_of
    return gpu
