"""Which targets can be compiled for here: the DSL has a compiler for each major version of CUDA, in its own wheel."""

from __future__ import annotations

from importlib import metadata

import pytest

from aot.search.targets import TARGETS, USUAL_TARGETS


def needed(target: str) -> list[pytest.MarkDecorator]:
    """Marks that skip a test, visibly, where no compiler of the installed DSL knows the target."""
    cuda = TARGETS[target].compiler_cuda
    wheel = f"nvidia-cutlass-dsl-libs-cu{cuda}"
    if target in USUAL_TARGETS:
        return []
    try:
        metadata.version(wheel)
    except metadata.PackageNotFoundError:
        return [pytest.mark.skip(reason=f"{target} needs {wheel}, which is not installed")]
    return []
