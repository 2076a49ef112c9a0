"""Serve kernels that were compiled and tuned ahead of time: load an archive, look a GEMM up, launch it.

Importing this package imports neither torch nor a compiler and does not touch the driver.
"""

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
from .library import Function, Library, load
from .stats import Stats

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
]
