"""Tuning with the GPU replaced by a simulated one, whose times are a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aot.tune.options import TuneOptions
from aot.tune.run import tune_archive
from aot.tune.write import TuneReport
from runtime.gemm.signature import Signature

from .simulated_gpu import BASELINE, SimulatedGpu, machine


def by_m(name: str, s: Signature, m: int) -> float:
    """ "quick" beats "slow" for few rows, "slow" for many; "wrong" would beat both."""
    few = {"wrong": 1.95, "quick": 2.0, "slow": 2.2}
    many = {"wrong": 1.95, "slow": 2.0, "quick": 2.2}
    return {BASELINE: 2.5, **(few if m < 200 else many)}[name]


def scripted(us: Mapping[str, float] | Callable[[str, Signature, int], float] = by_m, **more: Any) -> SimulatedGpu:
    """A GPU without noise, for which "wrong" is wrong where N is 1024."""
    time_of = us if callable(us) else lambda name, s, m: us[name]
    more.setdefault("wrong", lambda s, name: "it is wrong" if name == "wrong" and s.n == 1024 else None)
    return SimulatedGpu(time_of, noise=0.0, **more)


def wrong_are(*names: str) -> Callable[[Signature, str], str | None]:
    return lambda s, name: "relative error 1.0" if name in names else None


def tuned(
    source: Path,
    destination: Path,
    gpu: SimulatedGpu | None = None,
    options: TuneOptions | None = None,
    **of_machine: Any,
) -> TuneReport:
    return tune_archive(source, destination, options, None, machine(gpu or scripted(), **of_machine))
