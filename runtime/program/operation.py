"""What an operation is to archives and libraries, and the operations that there are, by name.

An operation owns its signatures, that is, what of a problem is known before a call; and an archive's table of its name
says which function serves which M of a signature. Importing this imports no operation: `operation` does, when asked for
one. Others than this package's come by entry points in the group "cute_aot.operations", each the name of an operation
and where it is (`package.module:object`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ..errors import ArgumentError
from ..named_tuple import NamedTuple
from ..numbers.scaling import extent_of
from .entry_points import find, places_of
from .geometry import contiguous_strides
from .record import TensorView

GROUP = "cute_aot.operations"
_NOWHERE = 1 << 40  # an aligned address for tensors that do not exist yet
_OTHER_TABLES = {"build", "tuning", "history", "universal"}  # of archives, which need no search for entry points
_OWN = {
    "gemm": "runtime.gemm.operation:GEMM",
    "rmsnorm": "runtime.rmsnorm:RMSNORM",
    "grouped_gemm": "runtime.grouped_gemm:GROUPED_GEMM",
    "quantise": "runtime.quantise:QUANTISE",
    "moe_permute": "runtime.moe.permute:MOE_PERMUTE",
    "moe_combine": "runtime.moe.combine:MOE_COMBINE",
}
_NEEDED = ("name", "read", "of_key", "differences", "distance", "arguments", "ask")


# What a caller promises about the kernels before this one on the stream: "serial" nothing; "launch" that this one may
# begin, though not read, while they still run; "weights" also that none that may still run writes weights: B, scale_b
# or bias. That is not the kernel before alone: one that lets this one begin early may itself have begun before its
# predecessor ended, and so on back to the last kernel that overlaps nothing. Constant weights are safe.
OVERLAPS = ("serial", "launch", "weights")


class Operand(NamedTuple):
    """A tensor that a kernel takes: its name, element type, and axes.

    Axes are words. "M" is the extent that a signature leaves open, "M/128" the number of blocks of 128 along it (the
    last perhaps short), "1" an extent of one, as any number is of itself, "T" one that no signature says and nothing is
    chosen by, such as the rows that others are gathered from; what the others are at a signature its `extents` says.
    The innermost stride is 1, unless `layout` is "columns" (the one before it is) or "free" (none need be); of "tiles"
    it is a matrix without a gap, or several. Functions are asked for it by name, or by place alone where it is one of
    the first `by_place` of its operation.
    """

    name: str
    dtype: str
    axes: tuple[str, ...]
    layout: str = "rows"


class Signature(Protocol):
    """What of a problem is known before a call: a value that can be hashed, and written as `key` and as JSON."""

    @property
    def operation(self) -> str:
        """The name of the operation that it is of."""

    def key(self) -> str:
        """One readable word, the same for equal signatures and only for them."""

    def operands(self) -> tuple[Operand, ...]:
        """The tensors that kernels take, in order."""

    def numbers(self) -> tuple[tuple[str, str], ...]:
        """The numbers that kernels take after these, each with its type."""

    def extents(self) -> Mapping[str, int]:
        """The extent of each axis of `operands` that does not depend on M."""

    def to_json(self) -> dict[str, Any]:
        """What the operation's `read` reads."""


class Asked(NamedTuple):
    """What a call asks for: a signature, M, what functions take (views and numbers), and what the caller gets."""

    signature: Any
    m: int
    arguments: tuple[Any, ...]
    result: Any


class Operation(Protocol):
    """An operation; its table in an archive has its name."""

    name: str
    fields: tuple[str, ...] = ()  # of its signatures, all of which `read` takes; none where it alone knows them
    usual: Mapping[str, Any] = {}  # of fields that manifests may leave out
    predictions: str | None = None  # the table that says what serves signatures that the first has not, if any does
    by_place: Mapping[str, str] = {}  # operands that functions may call what they like, and how messages call them
    beyond_operator: tuple[str, ...] = ()  # keywords of `ask` that change what it gives: torch's operator has none

    def read(self, obj: Any) -> Any:
        """The signature that `Signature.to_json` wrote.

        Raises:
            RecordError: it is malformed.
        """

    def of_key(self, key: str) -> Any:
        """The signature whose `key` this is, or None."""

    def differences(self, have: Any, wanted: Any) -> list[str]:
        """How two signatures differ, in words, for people."""

    def distance(self, have: Any, wanted: Any) -> float:
        """How far apart two signatures are, to name the nearest ones."""

    def relying_on_less(self, signature: Any) -> Iterable[Any]:
        """Signatures whose functions compute the same and rely on less of the caller, the most first. They serve
        `signature` where the table has no entry of its own."""
        return ()

    def arguments(self, signature: Any, m: int, device: int) -> tuple[Any, ...]:
        """What a function takes for contiguous operands at `m` rows: views at made-up addresses, and numbers."""

    def ask(self, view: Callable[[Any, str, bool], TensorView], *tensors: Any, **words: Any) -> Asked:
        """What `Library.call` asks for with these arguments; `view(x, name, writable)` looks at a caller's tensor.

        Raises:
            ArgumentError: they make no sense, or the library has a method of its own for this operation.
            LayoutError: no function takes a tensor as it lies in memory.
        """
        raise ArgumentError(f"{self.name} is not called by its name; Library.{self.name} is the way")


def extents_at(signature: Signature, m: int) -> dict[str, int]:
    """The extent of each axis of the operands of a signature at `m` rows, "T" being as many."""
    extents = {**signature.extents(), "M": m, "T": m}
    for operand in signature.operands():
        for axis in operand.axes:
            if axis not in extents:
                extents[axis] = extent_of(axis, extents)
    return extents


def contiguous(signature: Signature, m: int, device: int) -> tuple[TensorView, ...]:
    """The operands of a signature at `m` rows as kernels take them, contiguous, at made-up addresses."""
    extents = extents_at(signature, m)
    views = []
    for number, operand in enumerate(signature.operands()):
        shape = tuple([extents[axis] for axis in operand.axes])
        strides = contiguous_strides(shape)
        if operand.layout == "columns":
            strides = (*strides[:-2], 1, shape[-2])
        views.append(TensorView(_NOWHERE * (number + 1), operand.dtype, shape, strides, device))
    return tuple(views)


def operation(name: str) -> Operation:
    """The operation called `name`.

    Raises:
        ArgumentError: there is none here, there are two, or what an entry point names is none or cannot be imported.
    """
    found = _found(name)
    if found is None:
        raise ArgumentError(f"unknown operation {name!r:.80}; the operations are {', '.join(sorted(names()))}")
    return found


def is_operation(table: str) -> bool:
    """Whether a table of an archive is that of an operation that is here; others are for people, or unknown."""
    return table in _OWN or (table not in _OTHER_TABLES and _found(table) is not None)


def names() -> tuple[str, ...]:
    """The names of all operations that there are here."""
    return tuple({**_OWN, **places_of(GROUP)})


@functools.cache
def _found(name: str) -> Operation | None:
    found: Operation | None = find(name, _OWN, GROUP, _NEEDED, ArgumentError)
    return found
