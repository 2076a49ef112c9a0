"""What a peer is to the benchmark: a name, versions, and launches for a signature at one M."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from report import version

from aot.tune.gemm.operands import OperandSet
from aot.tune.measure import Launch
from runtime.errors import AotError
from runtime.gemm.signature import Signature

CACHE = Path(tempfile.gettempdir()) / "cute-aot-peers"  # where peers' compiled kernels are, unless said otherwise
Problem = tuple[Signature, int]  # a signature and its M


class PeerMissing(AotError):
    """A peer is not installed."""


class PeerError(AotError):
    """A peer failed to launch one of its kernels; the message has its own error."""


@dataclass(frozen=True)
class Settings:
    """Where peers compile: `cache` keeps compiled kernels between runs, `workers` is the most processes that compile.

    Without a GPU (`device` is "cpu") peers can only compile, for the H200 that the results are about.
    """

    cache: Path
    workers: int
    device: str = "cuda"


def versions_of(*distributions: str) -> dict[str, str]:
    """The installed version of each."""
    return {name: version(name) for name in distributions}


class Peer(Protocol):
    """One library. `search` says in words which of its kernels compete."""

    name: str
    search: str

    def versions(self) -> dict[str, str]:
        """The versions of its packages."""

    def refuse(self, signature: Signature) -> str | None:
        """Why it cannot compute `signature`; None if it can."""

    def prepare(self, problems: Sequence[Problem], expired: Callable[[], bool]) -> None:
        """Compile what `problems` will need, until `expired()`; what is missing then compiles when it is launched."""

    def launches(self, signature: Signature, m: int) -> Mapping[str, Launch]:
        """Its candidates for `signature` at `m` rows, by the name that results give them."""


@dataclass(frozen=True)
class Allocating:
    """A launch of a library that allocates its own output.

    Outputs are kept until the next launch over the same operands, so that they rotate as operands do.
    """

    compute: Callable[[Any], torch.Tensor]  # of an operand set of any operation
    kept: dict[int, torch.Tensor]

    def __call__(self, o: OperandSet) -> None:
        """Launch; the result is not where `o` says."""
        self.kept[o.a.data_ptr()] = self.compute(o)

    def into(self, o: OperandSet) -> None:
        """Launch and copy the result to where `o` says; of rows by groups those of groups, as others hold anything."""
        made, ends = self.compute(o), getattr(o, "ends", None)
        rows = len(made) if ends is None else int(ends[-1])
        o.d[:rows] = made[:rows]


def guarded(launch: Launch) -> Launch:
    """`launch` with a library's own errors as `PeerError`, so that one candidate's failure is not the run's.

    A failure of the device itself still ends the run: nothing measured after it would mean anything.
    """

    def run(o: OperandSet) -> None:
        try:
            launch(o)
        except (AotError, torch.AcceleratorError):
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise PeerError(f"{type(error).__name__}: {first}") from error

    return run


def written(launch: Launch) -> Launch:
    """`launch` writing its result to `OperandSet.d`, for checking: what it has as `into`, where that is another."""
    found: Launch = getattr(launch, "into", launch)
    return found
