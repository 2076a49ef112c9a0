"""How thoroughly `aot tune` measures, as data: read by the command line, which imports no torch for it."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import AotError

MAX_SEED = 2**32 - 1  # torch takes 64 bits, and M is added
MAX_CONTEXT = 1 << 20


class TuneError(AotError):
    """An archive cannot be tuned here; the message says why."""


@dataclass(frozen=True)
class TuneOptions:
    """How thoroughly to measure: functions that reach the interleaved comparison, its repeats, and whether those that
    power bounds are compared under sustained load too, which tells less than its noise (`docs/kernels/choosing.md`).
    `tolerance` is the share of the best time by which another function may be slower that serves elsewhere anyway:
    fewer kernels to load and to keep. `history`: whether what was seen is kept in the archive, for people; servers do
    not read it."""

    finalists: int = 4
    repeats: int = 5
    seed: int = 0
    sustained: bool = False
    tolerance: float = 0.01
    history: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance <= 1:
            raise TuneError(f"the tolerance must be 0 to 1, a share of the best time, found {self.tolerance}")


@dataclass(frozen=True)
class GraphOptions:
    """What is replayed: each sequence has `context` tokens in its cache, and `layers` are enough that each step finds
    all weights outside L2. `seed` draws weights and tokens."""

    context: int = 512
    layers: int = 8
    seed: int = 0
