"""Launch every function of an archive once or twice on ragged shapes; needs a GPU. For memory checkers:

compute-sanitizer --tool memcheck --report-api-errors no python scripts/launch_all.py build/coverage.aot

(API errors: the runtime asks the driver for one kernel parameter past the last, to see that it is the last.)

compute-sanitizer --tool racecheck --report-api-errors no python scripts/launch_all.py --schedules build/coverage.aot

takes one function of each schedule, as racecheck is slow. `--large` has two to three tiles of 128 x 128 for each SM, so
that CTAs go on to a second one; with it racecheck takes minutes, and `--only` names a part of them, such as
sm90_small_m. `--deep` has so many stages of K that rings of stages come around, in each slice of a split K too.

Functions of operations besides GEMM, and of GEMMs with prepared weights, get what the operation is measured with, at
the signatures that the archive's tables have for them: of their extents only M is chosen here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from report import ends  # also puts the checkout on the path

import runtime
from aot.pack.tables import operation_entries
from aot.tune import measure
from aot.tune.elements import TORCH_DTYPES
from aot.tune.gemm.prepared_weights import prepared
from aot.tune.operation import is_tuned, tuning, unusual
from runtime.container.archive import Archive
from runtime.gemm.operation import GEMM
from runtime.numbers.dtypes import DTYPES
from runtime.program.record import Record, SuppliedArgument, TensorArgument
from runtime.tables.dispatch import serves

SCHEDULES = (
    *("cooperative", "pingpong", "swap", "share_b", "stream_k", "nonpersistent", "quads"),
    *("launch", "weights", "overlap", "block_scaled", "two_launches", "sliced_k2"),
)
Extents = Mapping[str, tuple[int, ...]]
EXTENTS: Extents = {"m": (3, 77), "n": (288,), "p": (144,), "k": (528,), "kb": (5,), "nb": (3,), "l": (2,)}
DEEP: Extents = {"m": (77,), "n": (288,), "p": (144,), "k": (14416,), "kb": (113,), "nb": (3,), "l": (2,)}
LARGE: Extents = {"m": (333,), "n": (12672,), "p": (6336,), "k": (2112,), "kb": (17,), "nb": (99,), "l": (2,)}


def operand(t: TensorArgument, m: int, extents: Extents, device: str) -> torch.Tensor:
    """A random tensor that fits the description, for `m` rows."""
    shape = [m if e == "m" else extents[e][0] if isinstance(e, str) else e for e in t.shape]
    transposed = len(shape) > 1 and t.strides[-2] == 1  # an N-major B
    if transposed:
        shape[-2:] = reversed(shape[-2:])
    values = torch.randn(shape, device=device).to(TORCH_DTYPES[t.dtype])
    return values.transpose(-1, -2) if transposed else values


def others(path: Path) -> dict[str, list[Any]]:
    """The signatures that an archive has functions for, of operations besides GEMM, and of GEMMs with prepared weights,
    whose extents are none of those that a record names."""
    with Archive.open(path) as archive:
        entries = operation_entries(archive)
    found: dict[str, list[Any]] = {}
    for entry in entries:
        signature = entry.signature
        plain = signature.operation == GEMM.name and not prepared(signature.scaling)
        for name in () if plain or not is_tuned(signature) else entry.names:
            found.setdefault(name, []).append(signature)
    return found


def given(
    record: Record, signatures: Sequence[Any], m: int, extents: Extents, device: str = "cuda"
) -> Iterator[tuple[Any, ...]]:
    """What to launch a function with at `m` rows: one set of tensors for a GEMM, and for another operation those of
    each of the signatures, also such as are seldom drawn. Of what no table has nobody knows what else it takes, nor how
    weights of less than a byte were prepared: nothing."""
    for signature in signatures:
        weights = tuning(signature).measures().weights(signature, m, 0, m, device)
        yield from (o.arguments() for o in (weights.operands(m)[0], *unusual(weights, m)))
    taken = [a for a in record.leaves() if not isinstance(a, SuppliedArgument)]
    tensors = [a for a in taken if isinstance(a, TensorArgument)]
    known = all(isinstance(e, int) or e == "m" or e in extents for t in tensors for e in t.shape)
    known = known and all(DTYPES[t.dtype].bits >= 8 for t in tensors)
    if not signatures and known and taken == tensors:
        yield tuple(operand(t, m, extents, device) for t in tensors)


def schedule(name: str) -> str:
    """What of a function's name says how its threads work together: neither extents nor what D becomes.

    Of extents it is whether CTAs share what they load and split K, whether there are many tokens, and whether D has an
    odd number of 8 columns in a tile, which is stored without a swizzle, or of groups a tile has fewer rows of B than
    WGMMA multiplies; of scales those of blocks, which are loaded on the way, or of D in 8 bits of groups, which warp
    groups make together; and the type of weights in 4 bits.
    """
    provider, family, types, *words, _ = name.split(".")
    kept = [provider, family, "8" if types.startswith("e") else "16"]
    _, b, d, *_ = (*types.split("_"), "", "")
    kept += ["quantises"] if "grouped" in family and d == "e4m3" else []
    kept += [b] if b in DTYPES and DTYPES[b].bits == 4 else []
    gated = any("glu" in word for word in words)
    for word in words:
        if word.startswith("tile"):
            rows, columns = map(int, word[4:].split("x")[:2])
            kept += ["many"] if family == "sm90_small_m" and rows > 64 else []
            odd = family == "sm90_persistent" and "swap" not in words and columns // (2 if gated else 1) % 16 == 8
            kept += ["odd"] if odd else []
            by_groups = family in ("sm90_grouped", "sm90_masked", "sm90_gathered") and "swap" in words
            kept += ["ragged"] if by_groups and columns // (2 if gated else 1) % 64 else []
        elif word.startswith("cluster"):
            kept += ["shared"] if any(c in "248" for c in word) else []
        elif word.startswith("split_k"):
            kept += ["split"] if word != "split_k1" else []
        elif word in SCHEDULES:
            kept.append(word)
    return ".".join(kept)


def one_of_each(names: Iterable[str]) -> list[str]:
    """The first function of each schedule."""
    found: dict[str, str] = {}
    for name in sorted(names):
        found.setdefault(schedule(name), name)
    return list(found.values())


def main() -> int:
    """Launch, and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--schedules", action="store_true", help="one function of each schedule, and name it")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--large", action="store_true", help="on extents that take more than one wave")
    size.add_argument("--deep", action="store_true", help="on a K that takes a hundred stages and more")
    parser.add_argument("--only", default="", help="a part of the names of the functions to launch")
    options = parser.parse_args()
    extents = LARGE if options.large else DEEP if options.deep else EXTENTS
    library = runtime.load(options.archive)
    launched, left = 0, 0
    names = [name for name in library.functions if options.only in name]
    if not names:
        parser.error(f"{options.archive} has no function whose name holds {options.only!r}; aot ls lists what it has")
    if options.schedules:
        names = one_of_each(names)
    measure.environment()  # or there is no GPU
    signatures = others(options.archive)
    for function in (library.functions[name] for name in names):
        if not serves(function.target, torch.cuda.get_device_capability()):
            continue
        before = launched
        for m in extents["m"]:
            for arguments in given(function.record, signatures.get(function.name, ()), m, extents):
                function(*arguments)
                launched += 1
        left += launched == before
        if options.schedules:
            torch.cuda.synchronize()
            print(function.name, flush=True)
    torch.cuda.synchronize()
    print(f"{launched} launches of {len(names) - left} functions")
    if left:
        print(f"{left} functions were not launched: no table says what they take; list them in a manifest's operations")
    return 0


if __name__ == "__main__":
    sys.exit(ends(main))
