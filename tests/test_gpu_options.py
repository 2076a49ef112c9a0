"""What options leave to torch and to one function, on a real GPU: pytest -m gpu tests/test_gpu_options.py --archive
model.aot. The archive is packed again as if torch were faster everywhere, with a function for equal bits at every M."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import runtime
from aot.operands import OperandSet, Weights
from aot.pack import Package
from aot.tables import GemmRow, gemm_table
from runtime.archive import Archive
from runtime.call import EXTRAS
from runtime.dispatch import Dispatch, workspaces_of
from runtime.driver import Driver
from runtime.fallback import one_call, torch_runs
from runtime.record import Record
from runtime.signature import Signature

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def packed(tuned_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("options") / "model.aot"
    with Archive.open(tuned_archive) as archive:
        package, targets = Package(), archive.functions.targets_by_name()
        package.add_archive(archive)
        rows = []
        for entry in Dispatch.from_json(archive.table("gemm"), targets).entries:
            alone = [n for n in entry.names if not workspaces_of(Record.from_json(archive.record(n)))]
            everywhere = [(1, None)] if torch_runs(entry.signature) else []
            row = replace(GemmRow.of(entry), torch_faster=everywhere, invariant=alone[0] if alone else None)
            rows.append(row)
        package.set_table("gemm", gemm_table(rows, targets))
        package.write(path)
    return path


def signatures(path: Path) -> list[Signature]:
    driver = Driver()
    with Archive.open(path) as archive:
        entries = Dispatch.from_json(archive.table("gemm")).entries_for(driver.compute_capability, driver.gpu)
    return [entry.signature for entry in entries]


def asked(library: runtime.Library, s: Signature, o: OperandSet, **more: Any) -> Any:
    epilogue = s.parts.activation
    return library.gemm(o.a, o.b, **o.extras, epilogue=epilogue, overlap=s.overlap, dtype=o.d.dtype, **more)


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


def test_a_row_has_the_same_bits_however_many_others_there_are(packed: Path) -> None:
    with runtime.load(packed, batch_invariant=True) as library:
        plain = [s for s in signatures(packed) if s == Signature(s.a, s.b, s.d, s.accumulator, "none", s.n, s.k)]
        if not plain:
            pytest.skip("the archive has no plain GEMM for this GPU")
        for s in plain[:12]:
            o = Weights(s, 1000, 0, 0).operands(1000)[0]
            whole = library.gemm(o.a, o.b, dtype=o.d.dtype)
            for m in (1, 7, 64, 129, 500):
                part = library.gemm(o.a[:m], o.b, dtype=o.d.dtype)
                assert torch.equal(part, whole[:m]), f"{s.key()} M={m}"
        torch.cuda.synchronize()
