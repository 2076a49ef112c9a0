"""Grouped GEMM on a real GPU: functions of an archive against a reference, and calls. pytest -m gpu --archive=X."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot.pack import tables
from aot.search.legal import of_name, unsuited
from runtime import Library
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.grouped_gemm import Signature
from runtime.numbers.weights import BLOCK_ROWS, FORMATS
from runtime.tables.dispatch import serves
from runtime.tables.table import Entry

torch = pytest.importorskip("torch")

from aot.tune import measure  # noqa: E402  # needs torch
from aot.tune.grouped_gemm.measures import GroupedMeasures, Weights  # noqa: E402

from ..gpu_library import library_of_module as library_of_module  # noqa: E402

pytestmark = pytest.mark.gpu

M_VALUES = 1, 2, 7, 33, 64, 130, 1000, 4096
MASKED_M_VALUES = 1, 5, 33, 130, 300  # of each group
# Groups, N and K; extents of D and of K that are no multiples of tiles.
EXTENTS = (1, 256, 512), (5, 264, 72), (64, 512, 1000), (128, 768, 2048), (512, 80, 64)
MEASURES = GroupedMeasures()
POISON = 8  # rows behind D


@pytest.fixture(scope="module")
def entries(tuned_archive: Path) -> list[Entry]:
    """Those of grouped GEMMs for this GPU."""
    with Archive.open(tuned_archive) as archive:
        of_all = tables.operation_entries(archive)
    found = [
        e for e in of_all if e.signature.operation == "grouped_gemm" and serves(e.target, Driver().compute_capability)
    ]
    if not found:
        pytest.skip("the archive has no grouped GEMM for this GPU")
    return found


@pytest.fixture(scope="module")
def functions(entries: list[Entry], tuned_archive: Path) -> dict[Signature, list[str]]:
    """All functions of grouped GEMMs, by what they compute, whose extents are none."""
    with Archive.open(tuned_archive) as archive:
        variants = {name: of_name(name) for name in archive.functions}
    forms = {dataclasses.replace(e.signature, groups=2, n=512, k=512, overlap="weights"): e for e in entries}
    found = {form: sorted(n for n, v in variants.items() if v and unsuited(v, form) is None) for form in forms}
    assert all(found.values()), "functions have names of variants that there are"
    return found


def sized(form: Signature, groups: int, n: int, k: int) -> Signature:
    """A signature of about these extents, which its element types and epilogue have."""
    pieces = 16 if form.a == "e4m3" else 8
    halves_of_blocks = form.scaling == "block" and form.parts.gated and not form.parts.interleaved
    multiple = 256 if halves_of_blocks else 16 if form.parts.gated else 8
    if form.scaling in FORMATS:
        pieces = FORMATS[form.scaling].multiple
        multiple = 2 * BLOCK_ROWS if form.parts.gated else BLOCK_ROWS
        n = max(n, 256) if form.parts.gated else n  # of few columns of D a large one may round by more than the limit
    if form.quantises:
        multiple = 256 if form.parts.gated else 128
    n, k = (max(x - x % each, each) for x, each in ((n, multiple), (k, pieces)))
    return dataclasses.replace(form, groups=groups, n=n, k=k, overlap="serial")


def poison(d: Any) -> None:
    """Fill it with NaN, which torch has no way to for all types of 8 bits."""
    d.copy_(torch.full(d.shape, float("nan"), device="cuda"))


def launcher(library: Library, name: str) -> Callable[[Any], None]:
    return lambda o: library.functions[name](*o.arguments(), stream=torch.cuda.current_stream())


def test_every_function_is_right_at_groups_of_every_size(
    functions: dict[Signature, list[str]], library: Library
) -> None:
    """Ragged M, N and K, empty groups, one that has all rows, and outputs that begin as NaN with guards behind them."""
    for form, names in functions.items():
        for extents in EXTENTS:
            s = sized(form, *extents)
            able = [name for name in names if (v := of_name(name)) and unsuited(v, s) is None]
            for m in MASKED_M_VALUES if form.rows == "masked" else M_VALUES:
                launches = {name: launcher(library, name) for name in able}
                found = measure.check(s, m, Weights(s, m, 0, m + s.n), launches)
                assert {name: why for name, why in found.items() if isinstance(why, str)} == {}, (s.key(), m)


def test_repeats_give_equal_bits(functions: dict[Signature, list[str]], library: Library) -> None:
    """Of D, and of its scales where it has any."""
    for form, names in functions.items():
        s, m = sized(form, 32, 1024, 512), 100 if form.rows == "masked" else 700
        (o, *_) = Weights(s, m, 0, 3).operands(m)
        outputs = o.outputs().values()
        for name in names:
            bits = []
            for _ in range(21):
                for output in outputs:
                    poison(output)
                launcher(library, name)(o)
                bits.append([output.clone().view(torch.uint8) for output in outputs])
            assert all(torch.equal(a, b) for each in bits for a, b in zip(each, bits[0], strict=True)), name


def test_a_captured_launch_serves_whatever_groups_and_indices_are_at_its_replay(
    entries: list[Entry], library: Library
) -> None:
    for e in entries:
        s = e.signature
        for m in (3, 200):
            weights = Weights(s, m, 0, m)
            (o, *_), others = weights.operands(m), weights.unusual(m)
            options = {"epilogue": s.parts.activation_word, "overlap": s.overlap, "indices": o.indices, **o.extras}
            options["masked"] = s.rows == "masked"
            library.call("grouped_gemm", o.a, o.b, o.ends, out=o.d, **options)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                library.call("grouped_gemm", o.a, o.b, o.ends, out=o.d, **options)
            for other in others:
                o.ends.copy_(other.ends)
                if o.indices is not None and other.indices is not None:
                    o.indices.copy_(other.indices)
                poison(o.d)
                graph.replay()
                wanted = MEASURES.reference(s, o)["d"]
                left = wanted.isnan()
                made = o.d.double()
                assert torch.equal(made.isnan(), left), (s.key(), m)
                found, wanted = made[~left], wanted[~left].double()
                error = float((found - wanted).norm() / wanted.norm())
                assert error < MEASURES.max_error(s, "d"), (s.key(), m, error)


def test_no_ends_make_a_kernel_write_outside_its_output(
    functions: dict[Signature, list[str]], library: Library
) -> None:
    """Ends that fall, are negative, or lie behind A's rows: rows of D have some values, and nothing else is written."""
    m = 70
    for form, names in functions.items():
        if form.rows == "masked":
            continue
        s = sized(form, 6, 256, 128)
        (o, *_) = Weights(s, m, 0, 0).operands(m)
        whole = {name: guarded(output) for name, output in o.outputs().items()}
        inside = o.writing({name: of[POISON:-POISON] for name, of in whole.items()})
        hostile = [[30, 10, 50, 20, 70, 70], [-5, 3, 1 << 30, -(1 << 31), 60, (1 << 31) - 1], [500] * 6, [-1] * 6]
        for ends in hostile:
            inside.ends.copy_(torch.tensor(ends, dtype=torch.int32))
            for name in names:
                launcher(library, name)(inside)
                for output, of in whole.items():
                    for guard in (of[:POISON], of[-POISON:]):
                        assert bool(torch.isnan(guard.float()).all()), (name, output, ends)
        torch.cuda.synchronize()


def guarded(output: Any) -> Any:
    """NaN, of an output's shape with `POISON` rows before and behind."""
    shape = (output.shape[0] + 2 * POISON, *output.shape[1:])
    return torch.full(shape, float("nan"), device=output.device).to(output.dtype)


def test_rows_behind_the_last_group_stay_as_they_are(functions: dict[Signature, list[str]], library: Library) -> None:
    for form, names in functions.items():
        if form.rows == "masked":
            continue
        s = sized(form, 6, 256, 128)
        (o, *_) = Weights(s, 100, 0, 0).operands(100)
        o.ends.copy_(torch.tensor([1, 1, 40, 41, 41, 61], dtype=torch.int32))
        for name in names:
            for output in o.outputs().values():
                poison(output)
            launcher(library, name)(o)
            for output in o.outputs().values():
                assert bool(torch.isnan(output[61:].float()).all()), name
                assert not bool(torch.isnan(output[:61].float()).any()), name


def test_counts_that_are_none_write_no_row_or_all_of_their_group_and_nothing_else(
    functions: dict[Signature, list[str]], library: Library
) -> None:
    """Of masked rows, with guards around D, room between groups that is theirs alone, and strides of groups of A and D
    that are not what their rows take."""
    groups, room = 6, 70
    counts = [-1, room + 1, 3, -(1 << 31), (1 << 31) - 1, room]
    for form, names in functions.items():
        if form.rows != "masked":
            continue
        s = sized(form, groups, 256, 128)
        (o, *_) = Weights(s, room // 2, 0, 0).operands(room // 2)
        o.ends.copy_(torch.tensor(counts, dtype=torch.int32))
        whole = o.d.new_full((groups + 2, room + POISON, s.columns), float("nan"))
        apart = o.a.new_zeros((groups, room + POISON, s.k))
        apart[:, :room] = o.a
        inside = dataclasses.replace(o, a=apart[:, :room], d=whole[1:-1, :room])
        wanted = MEASURES.reference(s, o)["d"]
        for name in names:
            whole.fill_(float("nan"))
            launcher(library, name)(inside)
            written = torch.zeros(whole.shape, dtype=torch.bool, device="cuda")
            written[1:-1, :room] = ~wanted.isnan()
            assert torch.equal(~whole.isnan(), written), name
            error = (inside.d[~wanted.isnan()].double() - wanted[~wanted.isnan()].double()).norm()
            assert float(error / wanted[~wanted.isnan()].double().norm()) < MEASURES.max_error(s, "d"), name
