"""Functions of `sm80_w4` and `sm80_grouped_w4` in an archive, named one by one: builds for Hopper, which can run them
too, choose none."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from aot.compile.cache import Cache
from aot.compile.compiler import compile_variants
from aot.pack.write import Package
from aot.search.legal import illegal
from aot.search.provider import families
from aot.search.variants import Variant
from aot.search.variants import choices as config
from runtime.numbers.scaling import SCALINGS
from runtime.numbers.weights import FORMATS

FAMILY = families("own")["sm80_w4"]
FULL = "bias+gelu+residual+scale"
GROUPED = "sm80_grouped_w4"  # whose choices are the same
# Of groups: GPT-OSS's, gates in the first half of all rows, and neither.
EPILOGUES_OF_GROUPS = "bias+swiglu_clamped_interleaved", "bias+swiglu", "none"


def choices(tile: tuple[int, int, int], warp_n: int, sliced_k: int, stages: int) -> dict[str, Any]:
    """Choices by name, of tokens, rows of B and columns of a tile and the rest."""
    return dict(zip(FAMILY.options, (*tile, warp_n, sliced_k, stages), strict=True))


# Every way to share a tile among warps; the sizes of the first ones divide little.
CHOICES = (
    choices((8, 16, 128), 16, 1, 2),
    choices((24, 48, 384), 16, 3, 3),
    choices((40, 96, 128), 32, 1, 2),
    choices((8, 16, 1024), 16, 8, 3),
    choices((16, 64, 256), 16, 2, 4),
    choices((32, 64, 256), 32, 2, 3),
    choices((64, 128, 128), 32, 1, 3),
)


def variant(
    options: dict[str, Any], scaling: str, target: str, epilogue: str = "none", family: str = "sm80_w4"
) -> Variant:
    """The legal variant of these words."""
    found = variant_of(options, scaling, target, epilogue, family)
    assert illegal(found) is None, illegal(found)
    return found


def variants_of_groups(target: str) -> list[Variant]:
    """The legal ones of all samples, formats and epilogues."""
    named = itertools.product(CHOICES, FORMATS, EPILOGUES_OF_GROUPS)
    found = [variant_of(options, word, target, epilogue, GROUPED) for options, word, epilogue in named]
    return [v for v in found if illegal(v) is None]


def variant_of(options: dict[str, Any], scaling: str, target: str, epilogue: str, family: str) -> Variant:
    """The variant of these words, legal or not."""
    (b,) = SCALINGS[scaling].of_b
    elements = "bf16", b, "bf16"
    return Variant(
        *("own", family, target),
        *(config(**options), elements),
        epilogue=epilogue,
        scaling=scaling,
        operation=families("own")[family].operation,
    )


def pack(variants: list[Variant], folder: Path) -> Path:
    """An archive of these functions, without a table that names them."""
    report = compile_variants(variants, Cache(folder / "cache"), jobs=1)
    assert not report.failures, report.failures
    package = Package()
    for kernel in report.kernels.values():
        package.add_function(kernel.record, kernel.cubin)
    package.write(folder / "functions.aot")
    return folder / "functions.aot"
