"""A compiled function under a library whose driver is the emulated GPU, called with CPU tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from aot.compile.lower import Lowered
from aot.inspect.kinds import capability
from aot.pack.write import Package
from aot.search.targets import target
from runtime import Library
from runtime.container.archive import Archive

from ..recording_driver import sizes_of
from .driver import EmulatingDriver, as_on_gpu, small_gpu
from .parse import parse

_parsed = lru_cache(8)(parse)


@contextmanager
def launcher(
    lowered: Lowered, multiprocessors: int, seed: int = 0
) -> Iterator[Callable[[Sequence[Any], Iterable[Any]], None]]:
    """What launches a function, which was lowered with its PTX, on its arguments in the order of its record. Of these
    kernels may read all, and write those that are given once more; on a GPU of so many SMs."""
    record = lowered.record
    driver = EmulatingDriver(
        kernels={lowered.cubin: sizes_of(record)},
        ptx={lowered.cubin: _parsed(lowered.ptx)},
        kind=small_gpu(multiprocessors),
        capability=capability(record["target"]),
        # What a cubin of sm_90 and later calls static has the KiB that CUDA reserves: only a GPU can tell whether a
        # kernel fits that has all the rest besides.
        shared_bytes=target(record["target"]).shared_bytes_per_block + 1024,
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        package = Package()
        package.add_function(record, lowered.cubin)
        package.write(Path(folder) / "one.aot")
        with Library([Archive.open(Path(folder) / "one.aot")], driver) as library:
            function = library.functions[record["name"]]

            def launch(arguments: Sequence[Any], outputs: Iterable[Any]) -> None:
                written = {tensor.data_ptr() for tensor in outputs}
                given = []
                for x in arguments:
                    if hasattr(x, "data_ptr"):
                        driver.give(x, writable=x.data_ptr() in written)
                        x = as_on_gpu(x)
                    given.append(x)
                with np.errstate(all="ignore"):  # infinities are what they are
                    function(*given, stream=0)

            yield launch
