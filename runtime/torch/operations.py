"""`Library.call` as operators of torch's, which graphs can hold: `cute_aot::NAME` and `cute_aot::NAME_out` for each
operation that there is, those of other packages too.

An operator takes what the operation's `ask` does: tensors by place; by keyword numbers, words, and tensors that may be
left out; and `out`. Knows no operation by name.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError
from ..program.operation import Operation, names
from ..program.operation import operation as operation_named
from ..program.record import TensorView
from ..serve.library import Library
from .direct_calls import DIRECT, Direct
from .operator import (
    OPERATORS,
    TAGS,
    bare,
    description,
    library_of,
    number_of,
    refuse_gradient,
    tell_inductor,
)

_log = logging.getLogger(__name__)
_APART = 1 << 40  # bytes between tensors that have no address yet
_SCHEMA_TYPES = {type(None): "Tensor?", bool: "bool", int: "int", float: "float", str: "str"}  # by that of a default


class _Operators(NamedTuple):
    """The operators of an operation: what returns a new tensor, and what writes to `out`."""

    functional: Any
    to_out: Any


def call(lib: Library, operation: str, *tensors: torch.Tensor, out: torch.Tensor | None = None, **words: Any) -> Any:
    """`lib.call(operation, ...)` on torch's current stream, in eager mode and inside torch.compile (fullgraph, dynamic
    M).

    Arguments and errors are those of `Library.call`, but that what is no argument of the operator is a RuntimeError of
    torch's. `out` is written and returned.

    Raises:
        ArgumentError: also where the operation has no operator, or a gradient would have to be recorded, which the
            archive's kernels do not do.
    """
    known = operators_of(operation)
    number = number_of(lib)
    refuse_gradient(operation, [*tensors, *(x for x in words.values() if isinstance(x, torch.Tensor))])
    if out is None:
        return known.functional(number, *tensors, **words)
    known.to_out(number, *tensors, out, **words)
    return out


def operators_of(operation: str) -> Any:
    """The operators of an operation: `functional`, which returns a new tensor, and `to_out`.

    Raises:
        ArgumentError: it has none.
    """
    if operation not in _operators:
        raise ArgumentError(_why_none(operation))
    return _operators[operation]


def _why_none(name: str) -> str:
    of = operation_named(name)  # says what is wrong where there is no such operation, or it cannot be imported
    return (
        f"torch's schemas cannot say what {of.name} takes, so `call` has no operator for it; see what runtime.torch has"
    )


def _schema(of: Operation) -> tuple[list[str], list[str]] | None:
    """The tensors that an operation is asked with by place, and what it takes by keyword, as a schema says that; None
    where a schema cannot."""
    _, *parameters = inspect.signature(of.ask).parameters.values()
    tensors = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    rest = [p for p in parameters if p.name not in (*tensors, "out", *getattr(of, "beyond_operator", ()))]
    typed = [
        f"Tensor? {p.name}=None"
        if p.default is None
        else f"{_SCHEMA_TYPES.get(type(p.default))} {p.name}={p.default!r}"
        for p in rest
        if p.kind is p.KEYWORD_ONLY and (p.default is None or type(p.default) in _SCHEMA_TYPES)
    ]
    takes_out = any(p.name == "out" and p.kind is p.KEYWORD_ONLY for p in parameters)
    return (tensors, typed) if tensors and takes_out and len(typed) == len(rest) else None


def _define(of: Operation) -> _Operators | None:
    """The operators of an operation, if a schema can say what it takes."""
    schema, name = _schema(of), of.name
    if schema is None:
        return None
    tensors, words = schema
    given = ", ".join(f"Tensor {tensor}" for tensor in tensors)
    keywords = f", *, {', '.join(words)}" if words else ""
    OPERATORS.define(f"{name}(int library, {given}{keywords}) -> Tensor", tags=TAGS)
    OPERATORS.define(f"{name}_out(int library, {given}, Tensor(a!) out{keywords}) -> ()", tags=TAGS)

    def functional(library: int, *given: torch.Tensor, **more: Any) -> Any:
        return library_of(library).call(name, *map(bare, given), **more)

    def to_out(library: int, *given: torch.Tensor, **more: Any) -> None:
        *inputs, out = map(bare, given)
        library_of(library).call(name, *inputs, out=out, **more)

    def fake(library: int, *given: torch.Tensor, **more: Any) -> Any:
        tell_inductor()
        return _result(of, tensors[0], given, None, more)

    def fake_to_out(library: int, *given: torch.Tensor, **more: Any) -> None:
        *inputs, out = given
        _result(of, tensors[0], inputs, out, more)

    for key in ("CUDA", "CPU"):  # the CPU too, where the library itself says what is wrong
        OPERATORS.impl(name, functional, key)
        OPERATORS.impl(f"{name}_out", to_out, key)
    torch.library.register_fake(f"cute_aot::{name}", fake, lib=OPERATORS)
    torch.library.register_fake(f"cute_aot::{name}_out", fake_to_out, lib=OPERATORS)
    found = _Operators(getattr(torch.ops.cute_aot, name).default, getattr(torch.ops.cute_aot, f"{name}_out").default)
    DIRECT[found.functional] = Direct(f"{__package__}.direct", "call", (name, len(tensors)))
    return found


def _result(of: Operation, first: str, tensors: Any, out: torch.Tensor | None, words: dict[str, Any]) -> Any:
    """What a call would return, made as the call makes it; its extents may be symbols. Raises as `Library.call` does,
    for shapes and types."""
    places = itertools.count(1)

    def view(x: torch.Tensor, name: str, writable: bool) -> TensorView:
        return description(name, x, tensors[0], first)._replace(pointer=_APART * next(places))

    return of.ask(view, *tensors, out=out, **words).result


def _define_all() -> dict[str, _Operators]:
    """The operators of all operations that have them; a graph that comes from a file may name any."""
    found = {}
    for name in names():
        try:
            defined = _define(operation_named(name))
        except ArgumentError as error:
            _log.warning("no operator: %s", error)
            continue
        if defined is not None:
            found[name] = defined
    return found


_operators = _define_all()
