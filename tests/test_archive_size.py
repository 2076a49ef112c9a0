"""What opening an archive of a thousand functions costs."""

from __future__ import annotations

import gc
import hashlib
from pathlib import Path

import pytest

from aot.pack import write as pack
from runtime.container.archive import Archive

from .pace import assert_takes_less_than


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pack.Package()
    for number in range(1000):
        cubin = number.to_bytes(4, "little") * 8
        name = f"cutlass_operators.sm90_static_persistent.bf16_bf16_bf16_f32.tile128x256x64.cluster1x2.{number}"
        package.add_function({"name": name, "target": "sm_90a", "cubin": hashlib.sha256(cubin).hexdigest()}, cubin)
    path = tmp_path_factory.mktemp("thousand") / "many.aot"
    package.write(path, level=1)
    return path


def test_opening_a_thousand_functions_takes_under_four_ms(thousand: Path) -> None:
    assert_takes_less_than(0.004, lambda: Archive.open(thousand).close())


def test_opening_makes_too_little_to_wake_the_garbage_collector(thousand: Path) -> None:
    Archive.open(thousand).close()
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        with Archive.open(thousand):
            assert gc.get_count()[0] - before < 200
    finally:
        gc.enable()
