"""Operations besides GEMM on a real GPU: what tuning finds of an archive's entries. pytest -m gpu --archive=X."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runtime
from aot.pack import tables
from runtime import Library
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.gemm.operation import GEMM
from runtime.tables.dispatch import serves

torch = pytest.importorskip("torch")

from aot.tune import measure  # noqa: E402  # needs torch
from aot.tune.operation import is_tuned, tuning  # noqa: E402

pytestmark = pytest.mark.gpu

M_VALUES = 1, 3, 17, 333, 2048


def launcher(library: Library, name: str) -> Callable[[Any], None]:
    return lambda o: library.functions[name](*o.arguments(), stream=torch.cuda.current_stream())


def test_entries_of_other_operations_are_right_at_any_m(tuned_archive: Path) -> None:
    """By the very check of tuning, whatever the operation."""
    with Archive.open(tuned_archive) as archive:
        entries = [e for e in tables.operation_entries(archive) if e.signature.operation != GEMM.name]
    mine = [e for e in entries if serves(e.target, Driver().compute_capability) and is_tuned(e.signature)]
    if not mine:
        pytest.skip("the archive has no entries of other operations for this GPU")
    with runtime.load(tuned_archive) as library:
        for entry in mine:
            s, launches = entry.signature, {name: launcher(library, name) for name in entry.names}
            for m in M_VALUES:
                found = measure.check(s, m, tuning(s).measures().weights(s, m, 0, m), launches)
                assert {name: why for name, why in found.items() if isinstance(why, str)} == {}, (s.key(), m)
        torch.cuda.synchronize()
