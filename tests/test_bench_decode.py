"""scripts/bench_decode.py: what it calls of an archive, and archives that plugins run uniformly; on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import bench_decode

from aot.pack import build_table, tables
from aot.tune import in_graph, measure, replay
from aot.tune.block import blocks
from aot.tune.options import GraphOptions
from runtime.container.archive import Archive

from .simulated_gpu import ENVIRONMENT, GPU
from .test_tune_in_graph import EVERY, FUSED, PLAIN, early, made, served
from .torch_stand_in import library

MODEL = build_table.Model("m", None, None, [build_table.Problem(n, s.key()) for n, s in PLAIN.items()])


def test_archive_is_called_as_plugins_call_it(tmp_path: Path) -> None:
    (block,) = blocks([MODEL], EVERY)
    lib = library(tmp_path, [s.to_json() for s in EVERY], apart=[(2, 2)])
    layers = [replay.Layer(block, "cpu", torch.Generator().manual_seed(0))]
    calls, apart = [], list[Any]()

    def activation(x: torch.Tensor) -> torch.Tensor:
        apart.append(x.shape)
        return replay.Neighbours().gated(x)

    for m in (2, 3):
        step = replay.Step(block, layers, m, GraphOptions(context=4), replay.Neighbours(gated=activation))
        runs = bench_decode.runs_at(step, lib, lib, block)
        expected = runs["all serial"](None)
        del lib.calls[:], lib.overlaps[:], apart[:]
        found = runs["archive"](None)
        assert (found - expected).float().norm() < 0.02 * expected.float().norm()
        assert set(lib.overlaps) == {"weights"}
        calls.append((lib.calls[2][2], list(apart)))
    n = PLAIN["gate_up"].n
    assert calls == [("none", [(2, n)]), ("swiglu", [])]  # apart, it is the same kernel as in all other steps


def served_entries(archive: Archive) -> dict[Any, Any]:
    return in_graph.tuned_here(tables.operation_entries(archive), (9, 0), GPU)


@pytest.mark.parametrize(
    ("name", "overlap", "apart"),
    [
        ("all_serial", False, ((1, 512),)),
        ("all_overlap", True, ((1, 512),)),
        ("all_fused", False, ()),
        ("all_fused_overlap", True, ()),
    ],
)
def test_uniform_archives_are_run_uniformly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, overlap: bool, apart: Any
) -> None:
    source = made(tmp_path / "tuned.aot", EVERY)
    monkeypatch.setattr(bench_decode, "entries_of", served_entries)
    monkeypatch.setattr(measure, "environment", lambda: dict(ENVIRONMENT))
    bench_decode.write_uniform(source, tmp_path)
    (tmp_path / f"{name}.aot").rename(tmp_path / "served.aot")
    found = served(source)
    assert found[early(FUSED)].apart == apart
    run = [early(PLAIN["qkv"]), early(PLAIN["down"]), early(FUSED) if not apart else early(PLAIN["gate_up"])]
    assert [found[s].best(16).endswith("_weights") for s in run] == [overlap] * 3
    assert not found[early(PLAIN["qkv"])].best(4096).endswith("_weights")
