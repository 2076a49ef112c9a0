"""An operator of the CUTLASS Operator API: which one a variant describes, and the function that it would compile.

Common to the modules beside this one that wrap operators, each for one kind of operands. Only what is called here
imports the package and the DSL. Nothing asks for a GPU or touches the driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

from runtime.program.arguments import DeviceArgument

from ...search.provider import ProviderError
from ...search.targets import TARGETS
from ...search.variants import Variant

DISTRIBUTION = "nvidia-cutlass-operators"
VERSION = "0.3.0"  # the version whose operators, arguments and limits were read

_SCHEDULERS: dict[Any, str] = {
    None: "NoneType",
    "clc": "CLCDynamicPersistentTileSchedulerMetadata",
    "static": "StaticPersistentTileSchedulerMetadata",
}


class Design(NamedTuple):
    """What tells operators for the same arguments apart, as their metadata says it."""

    operator_class: str
    tile_shape: Any
    cluster_shape: Any
    fallback_cluster_shape: Any
    num_smem_stages: Any
    use_2cta_mma: Any
    use_tma_store: Any
    enable_breuse: Any  # each MMA multiplies two tiles of A by a B that it keeps
    tile_scheduler: str  # the name of its class


def design_of(variant: Variant, operator_class: str, tma_store: bool | None) -> Design:
    """What the choices of a variant say, of an operator of this class, which stores D with TMA or does not say."""
    options = variant.options
    return Design(
        operator_class,
        tuple(options[f"tile_{mode}"] for mode in "mnk"),
        (options.get("cluster_m", 1), options.get("cluster_n", 1), 1),
        (options["fallback_m"], options["fallback_n"], 1) if "fallback_m" in options else None,
        options.get("stages"),
        options.get("two_cta", None if tma_store is None else False),
        tma_store,
        options.get("b_reuse"),
        _SCHEDULERS[options.get("scheduler")],
    )


def found_design(operator: Any) -> Design:
    """The same of an operator's metadata."""
    words = [getattr(operator.design, name, None) for name in Design._fields[1:-1]]
    scheduler = getattr(operator.design, Design._fields[-1], None)
    return Design._make([operator.operator_class.__name__, *words, type(scheduler).__name__])


def find(variant: Variant, args: Any, wanted: Design) -> Any:
    """The one operator for `args` of this design.

    Raises:
        ProviderError: there is none, or the installed package is another than this was made for.
    """
    import cutlass.operators as ops

    installed = metadata.version(DISTRIBUTION)
    if installed != VERSION:
        raise ProviderError(f"{DISTRIBUTION} {installed} is installed, this provider was made for {VERSION}")
    found = ops.get_operators(
        args, metadata_filter=lambda m: found_design(m) == wanted, target_sm=variant.target.removeprefix("sm_")
    )
    if len(found) != 1:
        names = [o.metadata.operator_name for o in found]
        raise ProviderError(f"{DISTRIBUTION} {installed} has {len(found)} operators for {variant.name()}: {names}")
    return found[0]


class MaxActiveClusters(int):
    """What the stand-in for the device answered, so that it can be found among an operator's compile arguments."""

    cluster_size: int


class _HardwareInfo:
    """Stands in for `cutlass.utils.HardwareInfo`: answers for a target, with no driver."""

    def __init__(self, multiprocessors: int) -> None:
        self._multiprocessors = multiprocessors

    def get_max_active_clusters(self, cluster_size: int) -> int:
        """An estimate; compiled code takes the number as an argument and does not keep this one."""
        answer = MaxActiveClusters(self._multiprocessors // cluster_size)
        answer.cluster_size = cluster_size
        return answer


@contextlib.contextmanager
def _device_of(target: str) -> Iterator[None]:
    """Answer questions about the device for `target`, in this process, for as long as the context lasts."""
    import cutlass.utils

    real = cutlass.utils.HardwareInfo
    cutlass.utils.HardwareInfo = lambda *_: _HardwareInfo(TARGETS[target].multiprocessors)
    try:
        yield
    finally:
        cutlass.utils.HardwareInfo = real


def capture(operator: Any, args: Any, variant: Variant) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function and the argument values that `operator` would compile, taken just before it does."""
    captured: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def cute_compile(entry: Callable[..., None], *values: Any, target_sm: Any = None) -> None:
        captured.append((entry, values))

    operator.cute_compile = cute_compile
    with _device_of(variant.target):
        operator.compile(args, target_sm=variant.target.removeprefix("sm_"))
    if len(captured) != 1:
        raise ProviderError(f"the operator for {variant.name()} compiles {len(captured)} functions, expected one")
    return captured[0]


class Wrapped:
    """A captured function, to be called with tensors, cluster counts and a stream by name."""

    def __init__(self, variant: Variant, entry: Callable[..., None], values: tuple[Any, ...], tensors: dict[int, str]):
        """`values` are what `entry` is called with, of which `tensors` names some by their identity.

        Raises:
            ProviderError: it takes others than these tensors and a stream besides.
        """
        from cutlass.cute.runtime import make_fake_stream

        self._entry, self._values = entry, values
        self.clusters: list[DeviceArgument] = []  # the counts that it takes, in order
        self._roles: list[str | None] = []
        for value in values:
            role = tensors.get(id(value)) or ("stream" if isinstance(value, type(make_fake_stream())) else None)
            if isinstance(value, MaxActiveClusters):
                size = value.cluster_size
                role = f"max_active_clusters_{size}"
                self.clusters.append(DeviceArgument(role, "max_active_clusters", size))
            self._roles.append(role)
        taken = [role for role in self._roles if role and not role.startswith("max")]
        if sorted(taken) != sorted([*tensors.values(), "stream"]):
            raise ProviderError(f"the operator for {variant.name()} takes unexpected arguments: {self._roles}")

    def __call__(self, counts: tuple[Any, ...], **given: Any) -> None:
        """Call it with these tensors and the stream, and with the counts of `clusters`."""
        given |= {argument.name: count for argument, count in zip(self.clusters, counts, strict=True)}
        self._entry(*(given[role] if role else value for role, value in zip(self._roles, self._values, strict=True)))
