"""Serve kernels that were compiled and tuned ahead of time: load an archive, look a GEMM up, launch it.

Importing this package imports neither torch nor a compiler and does not touch the driver; what serves is imported when
it is asked for, since what only looks at archives needs none of it.
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
    SignatureError,
    WorkspaceError,
)
from .packaged import universal

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
    "SignatureError",
    "Stats",
    "WorkspaceError",
    "load",
    "universal",
]

if TYPE_CHECKING:
    from .serve.function import Function
    from .serve.library import Library
    from .serve.load import load
    from .serve.stats import Stats

    __version__: str
else:
    _SERVING = {"Function": "function", "Library": "library", "load": "load", "Stats": "stats"}  # modules by name

    def __getattr__(name: str) -> object:
        """What serves; and `__version__`, as what finds that out takes longer to import than all of this."""
        import importlib

        if name in _SERVING:
            found = globals()[name] = getattr(importlib.import_module(f".serve.{_SERVING[name]}", __name__), name)
            return found
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import metadata

        try:
            return metadata.version("cute-aot")
        except metadata.PackageNotFoundError:  # running from its source tree
            return "0+unknown"
