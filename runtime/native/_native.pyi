"""What native code offers, a class or function for each part of it."""

from collections.abc import Callable, Sequence
from typing import Any

INTERFACE: int

def parameter_sizes(call: int, kernel: int, /) -> tuple[int, ...] | None: ...
def pointers_fit(checks: tuple[Any, ...], pointers: Sequence[int], /) -> bool: ...

class Launch:
    def __new__(
        cls,
        call: int,
        function: int,
        shape: Sequence[int],
        attributes: Sequence[Sequence[int]],
        parameters: bytes,
        offsets: Sequence[int],
        slots: Sequence[Sequence[int]],
        pointers: int,
        failed: Callable[[Launch, tuple[Any, ...], tuple[int, ...], int, int], None],
        /,
    ) -> Launch: ...
    def launch(self, pointers: Sequence[int], stream: int, /) -> None: ...
    def again(self, grid: tuple[int, int, int], parameters: bytes, /) -> Launch: ...

class Counter:
    def add(self) -> None: ...
    def read(self) -> int: ...

class Table:
    def __new__(
        cls, capsule: Any, types: tuple[type, ...], new_empty: Callable[..., Any], get_current: int, context: int, /
    ) -> Table: ...
    def call(self, tag: int, stream: int | None, a: Any, b: Any, out: Any, /, *operands: Any) -> Any: ...
    def put(
        self,
        tag: int,
        tensors: tuple[Any, ...],
        launches: tuple[Any, ...],
        checks: tuple[Any, ...],
        device: int,
        shape: tuple[int, ...] | None,
        keywords: dict[str, Any] | None,
        counter: Counter,
        offsets: tuple[int, ...] | None = None,
        /,
    ) -> bool: ...
    def clear(self) -> None: ...

class Program:
    @staticmethod
    def read(widths: list[int], nodes: Any, launches: Any, pointers: int, kernels: int, /) -> Program | None: ...
    def evaluate(self, values: tuple[int, ...], /) -> list[tuple[Any, ...]] | tuple[Any, ...]: ...
    def shapes(self) -> list[tuple[Any, ...]]: ...

class Costs:
    def __new__(
        cls, inputs: int, constants: list[float], codes: bytes, operands: list[int], results: list[int], /
    ) -> Costs: ...
    def evaluate(self, values: Sequence[float], /) -> list[float]: ...
    def least(self, values: Sequence[float], places: tuple[int, ...], /) -> int: ...

class Effect:
    def __new__(cls, xs: list[float], values: list[float], reach: float, /) -> Effect: ...
    def times(self, others: tuple[Effect, ...], estimates: list[float], xs: list[float], /) -> list[float]: ...

class Trees:
    def __new__(
        cls, features: int, nodes: list[tuple[int, float, int, int]], leaves: list[float], roots: list[int], /
    ) -> Trees: ...
    def given(self, values: Sequence[float | None], /) -> Trees: ...
    def added(self, values: Sequence[float], /) -> float: ...
