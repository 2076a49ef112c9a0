"""Plans: the launches of one function for one shape, complete but for pointers; and how many of them are kept.

Knows nothing of how they come about.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from ..device.driver import Driver
from ..device.launch import Launch
from ..device.prepared_launch import PreparedLaunch
from ..device.workspace import Need, Workspaces

# Shapes whose plans are kept; the oldest goes first. A plan takes 2-4 KB.
MAX_PLANS = 4096


class LaunchPlan:
    """The launches of one function for one shape, which made `values` of its program; `counter` counts its calls.

    `launch` makes them with pointers, which must have been checked, on a stream; any number of threads may. `direct`
    has them for those who write the pointers and launch by themselves.
    """

    __slots__ = ("direct", "launch", "values")

    def __init__(
        self,
        driver: Driver,
        launches: Sequence[tuple[Any, Launch]],
        values: tuple[int, ...],
        pointers: int,
        counter: Any,
        like: tuple[PreparedLaunch, ...] = (),
    ) -> None:
        """`like` has launches that were prepared for other shapes, from which these differ as `Driver.prepare` says."""
        self.values = values
        self.direct = tuple(
            [
                driver.prepare(kernel, launch, pointers, before)
                for (kernel, launch), before in zip(launches, like or (None,) * len(launches), strict=True)
            ]
        )
        self.launch = _counted([ready.launch for ready in self.direct], counter.add)


_Launch = Callable[[Sequence[int], int], None]


def _counted(launches: Sequence[_Launch], count: Callable[[], None]) -> _Launch:
    """All of them, counted as one call."""
    if len(launches) == 1:
        (only,) = launches

        def one(pointers: Sequence[int], stream: int) -> None:
            only(pointers, stream)
            count()

        return one

    def several(pointers: Sequence[int], stream: int) -> None:
        for launch in launches:
            launch(pointers, stream)
        count()

    return several


class WorkspacePlan:
    """A plan whose launches need workspaces, which depend on the stream: their pointers follow the tensors'."""

    __slots__ = ("_needs", "_plan", "_workspaces", "values")

    direct = ()

    def __init__(self, plan: LaunchPlan, workspaces: Workspaces, needs: tuple[Need, ...]) -> None:
        self._plan, self._workspaces, self._needs, self.values = plan, workspaces, needs, plan.values

    def launch(self, pointers: tuple[int, ...], stream: int) -> None:
        """Find the stream's workspaces, write the pointers and launch."""
        self._plan.launch((*pointers, *self._workspaces.pointers(stream, self._needs)), stream)


AnyPlan = LaunchPlan | WorkspacePlan


def remember(plans: OrderedDict[Any, Any], key: Any, plan: Any) -> None:
    """Keep a plan, at the price of the oldest; the caller holds the lock."""
    while len(plans) >= MAX_PLANS:
        plans.popitem(last=False)
    plans[key] = plan
