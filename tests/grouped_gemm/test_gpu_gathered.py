"""Gathered rows of a grouped GEMM on a real GPU, besides what `test_gpu` says of every grouped GEMM: against the kernel
that takes rows that were gathered before, and with indices that no caller should pass. pytest -m gpu --archive=X, an
archive of tests/data/gathered.yaml."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aot.pack import tables
from aot.search.legal import of_name
from aot.search.variants import Variant
from runtime import ArgumentError, Library
from runtime.container.archive import Archive
from runtime.grouped_gemm import Signature

torch = pytest.importorskip("torch")

from aot.tune.grouped_gemm.measures import OperandSet, Weights  # noqa: E402  # needs torch

from ..gpu_library import library_of_module as library_of_module  # noqa: E402

pytestmark = pytest.mark.gpu

POISON = 8  # rows behind D
NAN = float("nan")


@pytest.fixture(scope="module")
def variants(tuned_archive: Path) -> list[Variant]:
    """The archive's functions of grouped GEMMs for Hopper, as variants."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("rows are gathered on Hopper")
    with Archive.open(tuned_archive) as archive:
        found = [of_name(name) for name in sorted(archive.functions)]
    return [v for v in found if v is not None and v.family in ("sm90_gathered", "sm90_grouped")]


@pytest.fixture(scope="module")
def gathered(variants: list[Variant]) -> list[Variant]:
    found = [v for v in variants if v.family == "sm90_gathered"]
    if not found:
        pytest.skip("the archive gathers no rows")
    return found


@pytest.fixture(scope="module")
def served(tuned_archive: Path, gathered: list[Variant]) -> list[Signature]:
    """What the archive has entries for."""
    with Archive.open(tuned_archive) as archive:
        signatures = [entry.signature for entry in tables.operation_entries(archive)]
    return [s for s in signatures if isinstance(s, Signature) and s.rows == "gathered"]


def signature(v: Variant, groups: int, n: int, k: int) -> Signature:
    return Signature(v.a, v.b, v.d, groups, n, k, v.epilogue, rows="gathered")


def launcher(library: Library, v: Variant) -> Callable[[Any], None]:
    return lambda o: library.functions[v.name()](*o.arguments(), stream=torch.cuda.current_stream())


def made(s: Signature, m: int, seed: int) -> OperandSet:
    return Weights(s, m, 0, seed).operands(m)[0]


def chosen(o: OperandSet, indices: Any) -> OperandSet:
    """The same with other indices, whatever these are."""
    return replace(o, indices=torch.as_tensor(indices, dtype=torch.int32, device="cuda"))


def test_bits_are_those_of_the_same_tile_over_rows_gathered_before(variants: list[Variant], library: Library) -> None:
    """What gathers reads the same rows into the same places, so D has equal bits, at ragged K too."""

    def tile(v: Variant) -> tuple[Any, ...]:
        return v.a, v.epilogue, *(v.options[name] for name in ("tile_m", "tile_n", "swap", "schedule"))

    contiguous = {tile(v): v for v in variants if v.family == "sm90_grouped"}
    pairs = [(v, contiguous[tile(v)]) for v in variants if v.family == "sm90_gathered" and tile(v) in contiguous]
    if not pairs:
        pytest.skip("the archive has no tile for both gathered and contiguous rows")
    for v, other in pairs:
        for m, k in ((5, 1024), (300, 1000), (3000, 72)):
            o = made(signature(v, 32, 512, k), m, k)
            expected = torch.full_like(o.d, NAN)
            launcher(library, other)(replace(o, a=o.rows(), indices=None, d=expected))
            launcher(library, v)(o)
            assert torch.equal(o.d, expected), (v.name(), m, k)


def test_repeats_give_equal_bits(gathered: list[Variant], library: Library) -> None:
    for v in gathered:
        for m in (40, 3000):
            o = made(signature(v, 32, 1024, 1536), m, 3)
            launcher(library, v)(o)
            first = o.d.clone()
            for _ in range(50):
                o.d.fill_(NAN)
                launcher(library, v)(o)
                assert torch.equal(o.d, first), (v.name(), m)


def test_rows_that_are_nan_spoil_their_own_rows_of_d_alone(gathered: list[Variant], library: Library) -> None:
    """Stages that held NaN are zeros behind K, and what lies behind K in memory is not read: else NaN times B's zeros
    would be NaN in other rows."""
    for v in gathered:
        for k in (72, 8, 136, 1000):
            s = signature(v, 8, 256, k)
            o = made(s, 2000, k)
            wide = torch.full((250, k + 64), NAN, dtype=o.a.dtype, device="cuda")
            wide[1::2, :k] = o.a[1::2]
            o = replace(o, a=wide[:, :k])
            launcher(library, v)(o)
            assert o.indices is not None
            spoilt = o.indices % 2 == 0
            assert bool(torch.isnan(o.d[spoilt]).all()), (v.name(), k)
            assert not bool(torch.isnan(o.d[~spoilt]).any()), (v.name(), k)


def test_indices_outside_a_are_its_first_and_last_row_and_nothing_else_is_read_or_written(
    gathered: list[Variant], library: Library
) -> None:
    """A lies between rows of NaN, which would be in D if they were read, and D between rows that stay as they are."""
    m, tokens, k = 70, 9, 128
    for v in gathered:
        s = signature(v, 6, 256, k)
        o = made(s, m, 0)
        around = torch.full((tokens + 2 * POISON, k), NAN, dtype=o.a.dtype, device="cuda")
        around[POISON:-POISON] = torch.randn((tokens, k), device="cuda").to(o.a.dtype)
        whole = torch.full((m + 2 * POISON, s.columns), NAN, dtype=o.d.dtype, device="cuda")
        o = replace(o, a=around[POISON:-POISON], d=whole[POISON:-POISON])
        right = torch.arange(m) % tokens
        for wild in (-1, -9, tokens, tokens + 5, (1 << 31) - 1, -(1 << 31)):
            hostile = right.clone()
            hostile[::3] = wild
            whole.fill_(NAN)
            launcher(library, v)(chosen(o, hostile))
            wanted = torch.empty_like(o.d)
            launcher(library, v)(replace(chosen(o, hostile.clamp(0, tokens - 1)), d=wanted))
            assert torch.equal(o.d, wanted), (v.name(), wild)
            assert not bool(torch.isnan(o.d).any()), (v.name(), wild)
            assert bool(torch.isnan(whole[:POISON]).all()), (v.name(), wild)
            assert bool(torch.isnan(whole[-POISON:]).all()), (v.name(), wild)


def test_no_ends_make_a_kernel_write_outside_its_output(gathered: list[Variant], library: Library) -> None:
    """Ends that fall, are negative, or lie behind D's rows, with indices that are as wild."""
    m = 70
    for v in gathered:
        s = signature(v, 6, 256, 128)
        o = made(s, m, 0)
        whole = torch.full((m + 2 * POISON, s.columns), NAN, dtype=o.d.dtype, device="cuda")
        o = replace(chosen(o, torch.randint(-(1 << 31), (1 << 31) - 1, (m,))), d=whole[POISON:-POISON])
        for ends in ([30, 10, 50, 20, 70, 70], [-5, 3, 1 << 30, -(1 << 31), 60, (1 << 31) - 1], [500] * 6, [-1] * 6):
            o.ends.copy_(torch.tensor(ends, dtype=torch.int32))
            launcher(library, v)(o)
            assert bool(torch.isnan(whole[:POISON]).all()), (v.name(), ends)
            assert bool(torch.isnan(whole[-POISON:]).all()), (v.name(), ends)
    torch.cuda.synchronize()


def test_calls_check_what_the_host_can_see(served: list[Signature], library: Library) -> None:
    o = made(served[0], 20, 0)
    assert o.indices is not None
    with pytest.raises(ArgumentError, match="indices of type i32"):
        library.call("grouped_gemm", o.a, o.b, o.ends, indices=o.indices.long(), out=o.d)
    with pytest.raises(ArgumentError, match="out must have the shape"):
        library.call("grouped_gemm", o.a, o.b, o.ends, indices=o.indices[:-1], out=o.d)
