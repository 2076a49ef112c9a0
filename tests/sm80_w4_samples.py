"""Functions of `sm80_w4` in an archive, named one by one: builds for Hopper, which can run them too, choose none."""

from __future__ import annotations

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

FAMILY = families("own")["sm80_w4"]
FULL = "bias+gelu+residual+scale"


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


def variant(options: dict[str, Any], scaling: str, target: str, epilogue: str = "none") -> Variant:
    """The legal variant of these words."""
    (b,) = SCALINGS[scaling].of_b
    elements = "bf16", b, "bf16"
    found = Variant(
        *("own", "sm80_w4", target),
        *(config(**options), elements),
        epilogue=epilogue,
        scaling=scaling,
        operation="gemm",
    )
    assert illegal(found) is None, illegal(found)
    return found


def pack(variants: list[Variant], folder: Path) -> Path:
    """An archive of these functions, without a table that names them."""
    report = compile_variants(variants, Cache(folder / "cache"), jobs=1)
    assert not report.failures, report.failures
    package = Package()
    for kernel in report.kernels.values():
        package.add_function(kernel.record, kernel.cubin)
    package.write(folder / "functions.aot")
    return folder / "functions.aot"
