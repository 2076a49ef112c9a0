"""One variant to a record and a cubin, in this process: trace, compile, extract, check.

Runs in worker processes that were told their architecture before the DSL was imported (`aot.compile.compiler` sees to
it), and in the oracle. Knows nothing of caches, processes or archives.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from runtime.errors import AotError
from runtime.program.record import Kernel, Record, RecordSource

from ..search.provider import Compilable, buildable
from . import cubin as cubins
from .host.ir import extract, host_function_text

# What is passed to cute.compile besides the architecture; part of every cache key.
COMPILE_OPTIONS = ("KeepCUBIN",)


class LoweringError(AotError):
    """A variant compiles, but to something that must not be shipped."""


@dataclass(frozen=True)
class Lowered:
    """A compiled variant: its record, its cubin, and the DSL's own compiled object for whoever checks the two. `ptx` is
    what ptxas was given, empty where nobody asked for it."""

    record: dict[str, Any]
    cubin: bytes
    compiled: Any
    host_text: str
    ptx: str = ""


def lower(variant: Compilable, keep_ptx: bool = False) -> Lowered:
    """Compile `variant` for its target and extract its launch program.

    Raises:
        AotError: the provider, the DSL or the extraction refuses; the message says which and why.
    """
    from cutlass import cute
    from cutlass.base_dsl.compiler import DumpDir, KeepPTX

    given = buildable(variant)
    # KeepCUBIN writes the cubin to a directory, and `__cubin__` reads it from there.
    with tempfile.TemporaryDirectory(prefix="aot-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = (cute.GPUArch(variant.target), cute.KeepCUBIN(True), DumpDir(scratch), *given.options)
        options += (KeepPTX(True),) if keep_ptx else ()
        try:
            compiled = cute.compile[options](given.function, *given.arguments)
        except Exception as error:
            if given.explain is None:
                raise
            raise given.explain(error) from None
        binary, ptx = compiled.__cubin__, compiled.__ptx__ if keep_ptx else ""
    if not isinstance(binary, bytes):
        raise LoweringError(f"{variant.name()}: the DSL kept no cubin, or more than one")
    text = host_function_text(compiled.ir_module)
    host = extract(text, given.tree, given.symbols)
    found = cubins.kernels(binary)
    if set(found) != set(host.kernels):
        raise LoweringError(
            f"{variant.name()}: the host launches {sorted(host.kernels)}, the cubin has {sorted(found)}"
        )
    if not given.local_memory and (reason := _spills(found.values())):
        raise LoweringError(f"{variant.name()}: {reason}")
    for launch in host.program.launches:
        kernel = found[host.kernels[launch.kernel]]
        sizes = tuple(p.size for p in launch.parameters)
        if sizes != kernel.parameter_sizes:
            raise LoweringError(
                f"{variant.name()}: the host passes parameters of {sizes} bytes, "
                f"the kernel takes {kernel.parameter_sizes}"
            )
    resources = [found[symbol] for symbol in host.kernels]
    record = RecordSource(
        name=variant.name(),
        target=variant.target,
        family=f"{variant.provider}.{variant.family}",
        cubin=sha256(binary).hexdigest(),
        arguments=given.tree,
        symbols=given.symbols,
        kernels=[Kernel(k.symbol, k.registers, k.shared_bytes, k.local_bytes) for k in resources],
        program=host.program,
    ).to_json()
    Record.from_json(record)  # what the reader would refuse is never written
    return Lowered(record, binary, compiled, text, ptx)


def _spills(kernels: Iterable[cubins.CubinKernel]) -> str | None:
    """Why a cubin is too slow to be shipped whatever it computes: local memory, which is where registers spill to."""
    for kernel in kernels:
        if kernel.local_bytes:
            return (
                f"{kernel.symbol} keeps {kernel.local_bytes} bytes a thread in local memory beside its "
                f"{kernel.registers} registers; kernels that spill are not shipped, choose a smaller tile"
            )
    return None
