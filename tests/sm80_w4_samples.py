"""Functions of `sm80_w4` and `sm80_grouped_w4` in an archive, named one by one: builds for Hopper, which can run them
too, choose none. An archive for tests on a GPU whose machine has no DSL:

python -m tests.sm80_w4_samples sm80_w4 sm80_grouped_w4 --target sm_90a -o sm80_w4.aot
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import pytest

from aot.compile.cache import Cache, default_directory
from aot.compile.compiler import compile_variants
from aot.pack.write import Package
from aot.search.legal import illegal
from aot.search.provider import families
from aot.search.targets import TARGETS
from aot.search.variants import Variant
from aot.search.variants import choices as config
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.numbers.scaling import SCALINGS
from runtime.numbers.weights import FORMATS

PLAIN = "sm80_w4"
FAMILY = families("own")[PLAIN]
FULL = "bias+gelu+residual+scale"
GROUPED = "sm80_grouped_w4"  # whose choices are the same
EPILOGUES = "none", FULL
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


def variant(options: dict[str, Any], scaling: str, target: str, epilogue: str = "none", family: str = PLAIN) -> Variant:
    """The legal variant of these words."""
    found = variant_of(options, scaling, target, epilogue, family)
    assert illegal(found) is None, illegal(found)
    return found


def samples(family: str, target: str) -> list[Variant]:
    """What tests on a GPU run of a family."""
    if family == GROUPED:
        return variants_of_groups(target)
    return [variant(c, word, target, epilogue, family) for c in CHOICES for word in FORMATS for epilogue in EPILOGUES]


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
    """An archive of these functions in a folder, which is the cache of their build too."""
    return write(variants, folder / "functions.aot", Cache(folder / "cache"), jobs=1)


def write(variants: list[Variant], path: Path, cache: Cache, jobs: int | None = None) -> Path:
    """An archive of these functions, without a table that names them."""
    report = compile_variants(variants, cache, jobs)
    assert not report.failures, report.failures
    package = Package()
    for kernel in report.kernels.values():
        package.add_function(kernel.record, kernel.cubin)
    package.write(path)
    return path


def packed_samples(family: str, given: str | None, folder: Path) -> tuple[Path, list[Variant]]:
    """An archive that has a family's samples for this machine's GPU, and them. It is the one that is given; where none
    is, they are compiled into `folder`, for which the DSL must be there."""
    capability = Driver().compute_capability
    target = next((t for t in families("own")[family].targets if capability in TARGETS[t].serves), None)
    if target is None:
        pytest.skip("the family has no target for this GPU")
    variants = samples(family, target)
    if given is None:
        pytest.importorskip("cutlass", reason="needs the DSL, or --archive PATH, of python -m tests.sm80_w4_samples")
        return pack(variants, folder), variants
    with Archive.open(given) as archive:
        if absent := {v.name() for v in variants} - set(archive.functions):
            pytest.skip(f"the archive lacks {len(absent)} of {len(variants)} samples of {family}")
    return Path(given), variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", choices=(PLAIN, GROUPED))
    parser.add_argument("--target", required=True, choices=FAMILY.targets)
    parser.add_argument("-o", dest="path", type=Path, required=True)
    args = parser.parse_args()
    variants = [v for family in args.families for v in samples(family, args.target)]
    print(f"compiling what of {len(variants)} functions is not in the cache", flush=True)
    write(variants, args.path, Cache(default_directory()))


if __name__ == "__main__":
    main()
