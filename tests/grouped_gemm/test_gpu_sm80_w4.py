"""The grouped GEMM of 4-bit weights by mma.sync on a real GPU, by the tests of every grouped GEMM: pytest -m gpu.
--archive=X has it, of python -m tests.sm80_w4_samples; without one it is compiled here, by the DSL. A Hopper GPU can
run it too, though builds for one choose another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import runtime
from aot.search.variants import Variant
from runtime import Library
from runtime.grouped_gemm import Signature

from ..sm80_w4_samples import GROUPED, packed_samples

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
def samples(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Variant]]:
    return packed_samples(GROUPED, request.config.getoption("--archive"), tmp_path_factory.mktemp(GROUPED))


@pytest.fixture(scope="module")
def library(samples: tuple[Path, list[Variant]]) -> Iterator[Library]:
    with runtime.load(samples[0]) as library:
        yield library


@pytest.fixture(scope="module")
def functions(samples: tuple[Path, list[Variant]]) -> dict[Signature, list[str]]:
    """All samples, by what they compute, whose extents are none."""
    found: dict[Signature, list[str]] = {}
    for v in samples[1]:
        a, b, d = v.elements
        found.setdefault(Signature(a, b, d, 2, 512, 512, v.epilogue, scaling=v.scaling), []).append(v.name())
    return found
