"""What a library counted, as a snapshot to print, to keep as JSON, or to show to Prometheus.

Knows nothing of how it was counted; `runtime.serve.counters` says how exact it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from ..named_tuple import NamedTuple


class ArchiveInfo(NamedTuple):
    """An archive that serves: its path and the SHA-256 that names it."""

    path: str
    digest: str


class Refusal(NamedTuple):
    """GEMMs that no kernel served: how often (`misses`), and how often torch computed them instead (`fallbacks`).

    `reason` is "no entry", "not tuned", "not batch-invariant", "no kernel runs", "damaged", or what is wrong with how
    a tensor lies in memory.
    """

    signature: str
    reason: str
    misses: int
    fallbacks: int


class Stats(NamedTuple):
    """What a library has done since it was loaded, reloads included, and what it holds now.

    - `launches`: calls of `gemm` and of functions whose kernels were launched, by name of the function in
      `launches_by_function`. Exact: each call counts once, when the driver has taken its last kernel. Replays of CUDA
      graphs are not seen, nor counted.
    - `refusals`: see `Refusal`, those most often missed first. Calls that are wrong in themselves are not counted.
    - `given_to_torch`: calls of `gemm` that torch computed because it was measured to be faster (`on_slower="torch"`),
      which are no misses; graphs are not seen here either.
    - `damaged`: functions that now serve nothing, since their bytes in the file are damaged (`on_damage="torch"`).
    - `kernels_loaded`, `kernel_bytes`: cubins on the device now, and their bytes, with those that were replaced and not
      yet dropped; `loads`, `load_seconds`, `longest_load_seconds`: how many were ever loaded, and the time it took to
      read, load and check them.
    - `plans_made`: how often a launch program was evaluated and kept; `plans_held`: shapes that are ready now.
    - `workspaces`, `workspace_bytes`: device memory held besides; `shared_workspace_bytes` of it is what captures share
      (`capture_workspaces="shared"`).
    - `archives`: the base first; `digest` covers them all; `reloads` that changed something; `replaced`: archives'
      contents that were replaced and are still loaded (`Library.drop_old`).
    - `gpu`: which kind of GPU this is, such as "NVIDIA H200 (132 SMs, 4800 GB/s)", None before the first use;
      `tuned_for`: on which kinds the entries that serve here were tuned.
    - `native`: whether native code was found and is in use; where it was not, launches take longer.
    """

    archives: tuple[ArchiveInfo, ...]
    digest: str
    reloads: int
    replaced: int
    launches: int
    launches_by_function: dict[str, int]
    refusals: tuple[Refusal, ...]
    given_to_torch: int
    damaged: tuple[str, ...]
    kernels_loaded: int
    kernel_bytes: int
    loads: int
    load_seconds: float
    longest_load_seconds: float
    plans_made: int
    plans_held: int
    workspaces: int
    workspace_bytes: int
    shared_workspace_bytes: int
    native: bool
    gpu: str | None
    tuned_for: tuple[str, ...]

    @property
    def misses(self) -> int:
        """Calls that no kernel served."""
        return sum(refusal.misses for refusal in self.refusals)

    @property
    def fallbacks(self) -> int:
        """Of those, the ones that torch computed."""
        return sum(refusal.fallbacks for refusal in self.refusals)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, words and numbers."""
        found = self._asdict() | {"misses": self.misses, "fallbacks": self.fallbacks}
        for name in ("archives", "refusals"):
            found[name] = [item._asdict() for item in found[name]]
        found["tuned_for"], found["damaged"] = list(self.tuned_for), list(self.damaged)
        return found


Sample = tuple[dict[str, str], "int | float"]  # labels, and the value


class Metric(NamedTuple):
    """A figure as Prometheus takes it: `kind` is "counter" or "gauge"."""

    name: str
    kind: str
    what: str
    samples: list[Sample]


# Name without its prefix, type, what it says, and its samples.
_METRICS: tuple[tuple[str, str, str, Any], ...] = (
    (
        "archive_info",
        "gauge",
        "An archive that serves; layer 0 is the base.",
        lambda s: [
            ({"layer": str(i), "archive": os.path.basename(a.path), "digest": a.digest}, 1)
            for i, a in enumerate(s.archives)
        ],
    ),
    ("reloads_total", "counter", "Reloads that changed something.", lambda s: [({}, s.reloads)]),
    ("replaced", "gauge", "Contents that were replaced and are still loaded.", lambda s: [({}, s.replaced)]),
    (
        "launches_total",
        "counter",
        "Calls that launched a function's kernels; replays of CUDA graphs are not seen.",
        lambda s: [({"function": name}, n) for name, n in s.launches_by_function.items()],
    ),
    ("misses_total", "counter", "Calls that no kernel served.", lambda s: _refused(s, "misses")),
    ("fallbacks_total", "counter", "Calls that torch computed instead.", lambda s: _refused(s, "fallbacks")),
    (
        "given_to_torch_total",
        "counter",
        "Calls that torch computed because it was measured to be faster.",
        lambda s: [({}, s.given_to_torch)],
    ),
    ("damaged", "gauge", "Functions whose bytes in the file are damaged.", lambda s: [({}, len(s.damaged))]),
    ("kernels_loaded", "gauge", "Cubins on the device.", lambda s: [({}, s.kernels_loaded)]),
    ("kernel_bytes", "gauge", "Bytes of the cubins on the device.", lambda s: [({}, s.kernel_bytes)]),
    ("loads_total", "counter", "Cubins that were loaded.", lambda s: [({}, s.loads)]),
    (
        "load_seconds_total",
        "counter",
        "Time to read, load and check cubins.",
        lambda s: [({}, s.load_seconds)],
    ),
    ("longest_load_seconds", "gauge", "The longest load of a cubin.", lambda s: [({}, s.longest_load_seconds)]),
    ("plans_total", "counter", "Shapes that were planned.", lambda s: [({}, s.plans_made)]),
    ("plans_held", "gauge", "Shapes that are ready to launch.", lambda s: [({}, s.plans_held)]),
    ("workspaces", "gauge", "Workspaces on the device.", lambda s: [({}, s.workspaces)]),
    ("workspace_bytes", "gauge", "Bytes of the workspaces on the device.", lambda s: [({}, s.workspace_bytes)]),
    (
        "shared_workspace_bytes",
        "gauge",
        "Bytes of those that captures of CUDA graphs share.",
        lambda s: [({}, s.shared_workspace_bytes)],
    ),
    (
        "gpu_info",
        "gauge",
        "The kind of GPU that is served, once it was used.",
        lambda s: [] if s.gpu is None else [({"gpu": s.gpu}, 1)],
    ),
    (
        "tuned_for_info",
        "gauge",
        "A kind of GPU that entries which serve here were tuned on.",
        lambda s: [({"gpu": kind}, 1) for kind in s.tuned_for],
    ),
    ("native", "gauge", "1 where native code is in use, 0 where Python launches.", lambda s: [({}, int(s.native))]),
)


def metrics(stats: Stats) -> list[Metric]:
    """The figures of one library; counters' names end in "_total"."""
    return [Metric(f"cute_aot_{name}", kind, what, samples(stats)) for name, kind, what, samples in _METRICS]


def prometheus_text(libraries: Mapping[str, Stats]) -> str:
    """The libraries' figures in Prometheus' text format 0.0.4, each under its name as the label `library`."""
    lines = []
    for name, kind, what, samples in _METRICS:
        lines += [f"# HELP cute_aot_{name} {what}", f"# TYPE cute_aot_{name} {kind}"]
        for library, stats in libraries.items():
            lines += _lines(f"cute_aot_{name}", library, samples(stats))
    return "\n".join(lines) + "\n"


def _lines(name: str, library: str, samples: Iterable[Sample]) -> Iterable[str]:
    for labels, value in samples:
        words = ",".join(f'{label}="{_escaped(word)}"' for label, word in {"library": library, **labels}.items())
        yield f"{name}{{{words}}} {value!r}"


def _refused(stats: Stats, what: str) -> list[Sample]:
    return [({"signature": r.signature, "reason": r.reason}, getattr(r, what)) for r in stats.refusals]


def _escaped(word: str) -> str:
    return word.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
