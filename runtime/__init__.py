"""Serve kernels that were compiled and tuned ahead of time: load an archive, look a GEMM up, launch it.

Importing this package imports neither torch nor a compiler and does not touch the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import (
    AotError,
    ArchiveError,
    ArgumentError,
    DeviceError,
    KernelMiss,
    LayoutError,
    ProgramError,
    RecordError,
    WorkspaceError,
)
from .packaged import universal
from .serve.library import Function, Library, load
from .serve.stats import Stats

__all__ = [
    "AotError",
    "ArchiveError",
    "ArgumentError",
    "DeviceError",
    "Function",
    "KernelMiss",
    "LayoutError",
    "Library",
    "ProgramError",
    "RecordError",
    "Stats",
    "WorkspaceError",
    "load",
    "universal",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """`__version__`, found out when it is asked for: what finds it takes longer to import than all of this."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import metadata

        try:
            return metadata.version("cute-aot")
        except metadata.PackageNotFoundError:  # running from its source tree
            return "0+unknown"
