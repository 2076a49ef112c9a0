"""The grouped GEMM of 4-bit weights by mma.sync on a real GPU, by the tests of every grouped GEMM: pytest -m gpu. It is
compiled here, so the DSL must be there; a Hopper GPU can run it too, though builds for one choose another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import runtime
from aot.search.legal import of_name
from aot.search.provider import families
from aot.search.targets import TARGETS
from runtime import Library
from runtime.device.driver import Driver
from runtime.grouped_gemm import Signature

from ..sm80_w4_samples import GROUPED, pack, variants_of_groups

pytest.importorskip("torch")

from .test_gpu import (  # needs torch
    test_every_function_is_right_at_groups_of_every_size,
    test_no_ends_make_a_kernel_write_outside_its_output,
    test_repeats_give_equal_bits,
    test_rows_behind_the_last_group_stay_as_they_are,
)

__all__ = [
    "test_every_function_is_right_at_groups_of_every_size",
    "test_no_ends_make_a_kernel_write_outside_its_output",
    "test_repeats_give_equal_bits",
    "test_rows_behind_the_last_group_stay_as_they_are",
]
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """Of all samples."""
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    capability = Driver().compute_capability
    target = next((t for t in families("own")[GROUPED].targets if capability in TARGETS[t].serves), None)
    if target is None:
        pytest.skip("the family has no target for this GPU")
    with runtime.load(pack(variants_of_groups(target), tmp_path_factory.mktemp(GROUPED))) as library:
        yield library


@pytest.fixture(scope="module")
def functions(library: Library) -> dict[Signature, list[str]]:
    """All of them, by what they compute, whose extents are none."""
    found: dict[Signature, list[str]] = {}
    for name in library.functions:
        v = of_name(name)
        assert v is not None
        a, b, d = v.elements
        found.setdefault(Signature(a, b, d, 2, 512, 512, v.epilogue, scaling=v.scaling), []).append(name)
    return found
