"""What options leave to torch and to functions that give equal bits, on a real GPU: pytest -m gpu
tests/test_gpu_options.py --archive model.aot. The archive is packed again as if torch were faster everywhere, and as if
all functions that give equal bits took turns."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import runtime
from aot.pack import ranges
from aot.pack.tables import Row, table
from aot.pack.write import Package
from aot.search.legal import of_name, summation
from aot.tune.gemm.operands import OperandSet, Weights, gemm_options, put_zeros
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.gemm.call import EXTRAS
from runtime.gemm.fallback import one_call, torch_runs
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.program.record import Record
from runtime.tables.dispatch import Dispatch, Entry, serves, workspaces_of

pytestmark = pytest.mark.gpu


TURNS_UP_TO = (3, 16, 40, 100, 200, 400, 700, 4096)


def alike(archive: Archive, entry: Entry) -> list[list[str]]:
    """The functions of an entry, by what gives equal bits."""
    found: dict[str, list[str]] = {}
    for name in entry.names:
        variant = of_name(name)
        word = None if variant is None else summation(variant, entry.signature.k)
        if word is not None and not workspaces_of(Record.from_json(archive.record(name))):
            found.setdefault(word, []).append(name)
    return list(found.values())


@pytest.fixture(scope="module")
def packed(tuned_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("options") / "model.aot"
    with Archive.open(tuned_archive) as archive:
        package, targets = Package(), archive.functions.targets_by_name()
        package.add_archive(archive)
        rows = []
        for entry in Dispatch.from_json(archive.table("gemm"), GEMM, targets).entries:
            most = max(alike(archive, entry), key=len, default=list[str]())
            turns = list(zip(TURNS_UP_TO, cycle(most), strict=False))
            everywhere = [(1, None)] if torch_runs(entry.signature) else []
            equal = ranges.ranges(turns) if turns else None
            row = replace(Row.of(entry), torch_faster=everywhere, invariant=equal)
            rows.append(row)
        package.set_table("gemm", table(rows, GEMM, targets))
        package.write(path)
    return path


def signatures(path: Path) -> list[Signature]:
    driver = Driver()
    with Archive.open(path) as archive:
        entries = Dispatch.from_json(archive.table("gemm"), GEMM).entries_for(driver.compute_capability, driver.gpu)
    return [entry.signature for entry in entries]


def asked(library: runtime.Library, s: Signature, o: OperandSet, **more: Any) -> Any:
    options: dict[str, Any] = {**gemm_options(s, o), "dtype": o.d.dtype, **more}
    return library.gemm(o.a, o.b, **options)


def test_torch_computes_what_it_was_faster_at_with_its_own_call(packed: Path) -> None:
    taken = 0
    with runtime.load(packed, on_slower="torch") as library:
        for s in filter(torch_runs, signatures(packed)):
            run = one_call(s)
            assert run is not None
            for m in (4, 16, 332):
                o = Weights(s, m, 0, m).operands(m)[0]
                before = library.stats().given_to_torch
                found = asked(library, s, o)
                if library.stats().given_to_torch == before:
                    continue  # this torch does not take it on this GPU
                operands = tuple(o.extras.get(name) for name in EXTRAS)
                assert torch.equal(found, run(torch, o.a, o.b, operands, None)), s.key()
                assert asked(library, s, o, out=o.d) is o.d
                assert torch.equal(found, o.d), s.key()
                taken += 1
        torch.cuda.synchronize()
    if not taken:
        pytest.skip("torch takes none of the archive's signatures in one call")


def test_torchs_calls_are_captured_and_replayed(packed: Path) -> None:
    with runtime.load(packed, on_slower="torch") as library:
        for s in [s for s in signatures(packed) if torch_runs(s) and s.a != "e4m3"][:4]:
            o = Weights(s, 16, 0, 0).operands(16)[0]
            wanted = asked(library, s, o)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                asked(library, s, o, out=o.d)
            o.d.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(o.d, wanted), s.key()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether they are equal, negative zeros and what is no number too."""
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def test_a_row_has_the_same_bits_however_many_others_there_are(packed: Path) -> None:
    with runtime.load(packed, batch_invariant=True) as library:
        taking_turns = 0
        for s in [s for s in signatures(packed) if s.batch == 1 and s.scaling != "tensor"]:
            try:
                entry = library.entry(s)
            except runtime.KernelMiss:
                continue  # no function of it is known to give equal bits
            o = Weights(s, 1000, 0, 0).operands(1000)[0]
            put_zeros(o)
            whole, given = asked(library, s, o), set[str]()
            for m in (1, 2, 7, 17, 64, 129, 333, 500, 999):
                by_row = {name: x[:m] if name in ("scale_a", "residual") else x for name, x in o.extras.items()}
                part = asked(library, s, OperandSet(o.a[:m], o.b, o.d[:m], by_row))
                assert same_bits(part, whole[:m]), f"{s.key()} M={m}: {entry.best(m)}, {entry.best(1000)}"
                given.add(entry.best(m))
            taking_turns += len(given) > 2
        torch.cuda.synchronize()
    if not taking_turns:
        pytest.skip("the archive has no signature with functions that are known to give equal bits")


def test_functions_that_are_known_to_give_equal_bits_do(tuned_archive: Path) -> None:
    """Each of all the functions of an entry, whether it was chosen for that or not."""
    capability, several = Driver().compute_capability, 0
    with Archive.open(tuned_archive) as archive, runtime.load(tuned_archive) as library:
        table = Dispatch.from_json(archive.table("gemm"), GEMM, archive.functions.targets_by_name())
        for entry in table.entries:
            for names in alike(archive, entry) if serves(entry.target, capability) else ():
                for m in (1, 17, 333, 1000) if len(names) > 1 else ():
                    (o, *_) = Weights(entry.signature, m, 0, seed=m).operands(m)
                    put_zeros(o)
                    first: torch.Tensor | None = None
                    for name in names:
                        o.d.view(torch.uint8).fill_(0xFF)
                        library.functions[name](*o.arguments(), stream=torch.cuda.current_stream())
                        first = o.d.clone() if first is None else first
                        assert same_bits(o.d, first), f"{entry.signature.key()} M={m}: {names[0]}, {name}"
                several += len(names) > 1
        torch.cuda.synchronize()
    if not several:
        pytest.skip("the archive has no two functions that are known to give equal bits")
