"""What tuning asks of a GPU, and the answers, as plain data: they go to other processes and into files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from runtime.container import canonical

from .halving import Measured
from .timing import Timing


@dataclass(frozen=True)
class Job:
    """Functions to look at for one signature: to check at each M of `check`, and to time at `m` where that is not 0;
    `sustained`: under sustained load too, where that is asked for and power bounds. `glances` has M at which a few of
    them are timed briefly in turns with the baseline.
    """

    signature: Any  # of any operation
    names: tuple[str, ...]
    check: tuple[int, ...] = ()
    m: int = 0
    sustained: bool = False
    glances: tuple[tuple[int, tuple[str, ...]], ...] = ()

    def key(self) -> str:
        """The same for equal jobs and only for them."""
        of = self.signature.operation, self.signature.to_json()
        asked = list(self.names), list(self.check), self.m, self.sustained, [[m, list(n)] for m, n in self.glances]
        return canonical.digest([*of, *asked])

    def at(self, m: int) -> str:
        """Where a function is launched for `m` rows, for messages."""
        return f"{self.signature.key()} M={m}"

    def without(self, names: Mapping[str, str]) -> Job:
        """The job without these functions."""
        glances = tuple((m, tuple(n for n in of if n not in names)) for m, of in self.glances)
        return replace(self, names=tuple(n for n in self.names if n not in names), glances=glances)


@dataclass(frozen=True)
class Answer:
    """Functions that may not serve, with the reason, and what timing the others found, if something was timed; of
    each glance the microseconds by name, the baseline's among them."""

    rejected: Mapping[str, str] = field(default_factory=dict)
    measured: Measured | None = None
    glances: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that `from_json` reads; samples are left out."""
        found = self.measured
        return {
            "rejected": dict(self.rejected),
            "glances": [[m, dict(us)] for m, us in self.glances.items()],
            "measured": None
            if found is None
            else {
                "m": found.m,
                "times": [[name, _timing(t)] for name, t in found.times],
                "baseline": found.baseline,
                "baseline_time": _timing(found.baseline_time),
                "candidates": found.candidates,
                "sustained": {name: _timing(t) for name, t in found.sustained.items()},
                "screened": dict(found.screened),
            },
        }

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> Answer:
        """Read what `to_json` wrote; what else there may be is the journal's matter."""
        found, glances = obj["measured"], dict(obj["glances"])
        if found is None:
            return cls(obj["rejected"], None, glances)
        times = tuple((name, Timing(**t)) for name, t in found["times"])
        sustained = {name: Timing(**t) for name, t in found["sustained"].items()}
        baseline = Timing(**found["baseline_time"])
        return cls(
            obj["rejected"],
            Measured(**found | {"times": times, "sustained": sustained, "baseline_time": baseline}),
            glances,
        )


def _timing(timing: Timing) -> dict[str, Any]:
    found = asdict(timing)
    del found["samples"]
    return found
