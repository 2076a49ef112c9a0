"""How Inductor lowers the operators of `cute_aot`: to calls of `direct`, whose results Inductor allocates.

An operator that torch has no lowering for is called through torch's dispatcher and allocates its result in Python. A
lowered one is an external kernel as `mm` is: its result is one of Inductor's buffers, whose memory is planned and used
again, and generated code calls a function that it got once, when it was loaded. Importing this imports Inductor, which
takes seconds. It ran with torch 2.11 and 2.13. Where a release lacks what is used of Inductor, and in generated C++,
the operator is called.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from torch._inductor import ir, lowering
from torch._inductor.utils import convert_shape_to_inductor
from torch._inductor.virtualized import V

from .direct_calls import DIRECT, Direct

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_lowered: set[Any] = set()  # operators, those that could not be too


def install() -> None:
    """Let Inductor know how to lower each operator in `DIRECT`; once for each, however often it is called."""
    if len(_lowered) == len(DIRECT):
        return
    with _lock:
        for operator, direct in DIRECT.items():
            if operator not in _lowered:
                _lowered.add(operator)
                try:
                    lower = _lowering(operator, direct)
                    lowering.register_lowering(operator, type_promotion_kind=None)(lower)
                except Exception as error:  # whatever another release of torch makes of it
                    _say_once(str(operator), str(error))


def _lowering(operator: Any, direct: Direct) -> Callable[..., Any]:
    """What Inductor is to do with `operator`."""
    dispatched = lowering.fallback_handler(operator, add_to_fallback_set=False)

    def lower(*args: Any, **kwargs: Any) -> Any:
        graph = V.graph
        if graph.cpp_wrapper or getattr(graph, "fx_wrapper", False):  # which call no Python, or operators only
            return dispatched(*args, **kwargs)
        try:
            return ir.TensorBox.create(_node(operator, direct, args, kwargs))
        except Exception as error:  # likewise; nothing of it is in the graph yet but operands, which stay
            _say_once(str(operator), str(error))
            return dispatched(*args, **kwargs)

    return lower


@functools.lru_cache(64)
def _say_once(operator: str, error: str) -> None:
    _log.warning("compiled code calls %s through torch's dispatcher, which takes longer: %s", operator, error)


class _Call(ir.ExternKernelOut):
    """A call of a function that the code before it makes, by `definition`."""

    definition: tuple[str, ...]

    def codegen(self, wrapper: Any) -> None:
        """Write the definition, once in a file, and the call."""
        for line in self.definition:
            wrapper.add_import_once(line)
        super().codegen(wrapper)


def _node(operator: Any, direct: Direct, args: Any, kwargs: Any) -> Any:
    """The node of a call with these arguments, whose tensors are lowered."""
    found = V.graph.current_node.meta["val"]
    arguments = operator._schema.arguments
    given = dict(zip((x.name for x in arguments), args, strict=False)) | kwargs
    inputs = {x.name: _in_place(given[x.name]) for x in arguments if isinstance(given.get(x.name), ir.IRNode)}
    words = {
        x.name: given[x.name]
        for x in arguments
        if x.name in given and x.name not in inputs and not (x.has_default_value() and given[x.name] == x.default_value)
    }
    by_place = [words.pop("library"), *direct.arguments, *inputs]
    said = [*map(repr, by_place), *(f"{name}={word!r}" for name, word in words.items())]
    of = operator._schema.name.replace("::", "_")
    name = f"{of}_{hashlib.sha256(' '.join(said).encode()).hexdigest()[:12]}"  # the same wherever that is the same
    sizes, strides = (convert_shape_to_inductor(extents) for extents in (found.size(), found.stride()))
    layout = ir.FixedLayout(found.device, found.dtype, sizes, strides)
    node = _Call(layout=layout, inputs=list(inputs.values()), python_kernel_name=name, op_overload=operator)
    node.definition = (f"from {direct.module} import {direct.function} as {of}", f"{name} = {of}({', '.join(said)})")
    return node


def _in_place(x: Any) -> Any:
    """An operand as it lies in memory, where it is computed to if it was not before. That stays so, since what the
    archive has is decided by how operands lie in the graph."""
    x = ir.ExternKernel.realize_input(x)
    if ir.is_storage_and_layout(x):
        ir.as_storage_and_layout(x, freeze=True)
    return x
