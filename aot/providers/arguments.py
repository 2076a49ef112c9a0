"""What providers share: stand-ins to compile with for a function's arguments, and a digest of sources.

Knows nothing of any operation or provider, and imports no compiler until `stand_ins` is called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.numbers.dtypes import DTYPES
from runtime.program.arguments import (
    Argument,
    DeviceArgument,
    ScalarArgument,
    StreamArgument,
    Symbol,
    TensorArgument,
    WorkspaceArgument,
)

from ..search.provider import ProviderError

ALIGNMENT_BYTES = 16  # of tensors that TMA and vectorised copies read
_WORKSPACE_ALIGNMENT_BYTES = 128  # cuMemAlloc gives at least that


def stand_ins(tree: Iterable[Argument], symbols: Mapping[str, Symbol]) -> list[Any]:
    """What to compile with for the arguments that `tree` describes: fake tensors, pointers and streams, and scalars of
    no matter what value.

    Imports the DSL, so it belongs in a worker process.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor, make_ptr

    types = {name: getattr(cutlass, d.dsl) for name, d in DTYPES.items() if d.dsl}
    free: dict[int | str, Any] = {
        n: cute.sym_int(s.width, divisibility=s.divisibility, symbol=n) for n, s in symbols.items()
    }

    def stand_in(a: Argument) -> Any:
        if isinstance(a, TensorArgument):
            shape, strides = (tuple(free.get(e, e) for e in part) for part in (a.shape, a.strides))
            return make_fake_tensor(types[a.dtype], shape, strides, assumed_align=a.alignment)
        if isinstance(a, ScalarArgument):
            return types[a.dtype](0)
        if isinstance(a, DeviceArgument):
            return cutlass.Int32(1)
        if isinstance(a, WorkspaceArgument):
            return make_ptr(cutlass.Uint8, 0, cute.AddressSpace.gmem, assumed_align=_WORKSPACE_ALIGNMENT_BYTES)
        if isinstance(a, StreamArgument):
            return make_fake_stream()
        raise ProviderError(f"no stand-in for {a}")

    return [stand_in(a) for a in tree]


def stand_ins_by_name(tree: list[Argument], symbols: Mapping[str, Symbol], names: Iterable[str]) -> list[Any]:
    """Stand-ins for a kernel's whole list of arguments, by their names; None for each that `tree` does without."""
    found = dict(zip((argument.name for argument in tree), stand_ins(tree, symbols), strict=True))
    return [found.get(name) for name in names]


def digest(items: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256 over named contents, in the order of their names; no content can pass for another's name."""
    state = hashlib.sha256()
    for name, content in sorted(items):
        for part in (name.encode(), content):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.hexdigest()
