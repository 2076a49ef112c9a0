"""A library's figures in the /metrics of vLLM and SGLang: written by workers, read by a server in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("prometheus_client")

from runtime.plugin import periodic
from runtime.serve.stats import ArchiveInfo, Refusal, Stats, metrics

from . import sglang_stand_in, vllm_stand_in
from .command_line import ROOT
from .torch_stand_in import HIDDEN

start_vllm, start_sglang = vllm_stand_in.start, sglang_stand_in.start  # fixtures
Start = Callable[[], Any]

FOLDER = "PROMETHEUS_MULTIPROC_DIR"

WORKER = """
import sys
from runtime.plugin.metrics import Exporter
from tests.test_plugin_metrics import stats
exporter = Exporter({"engine": "0", "rank": sys.argv[1]})
for launches in map(int, sys.argv[2:]):
    exporter.update(stats(launches))
"""
SERVER = """
import json
from prometheus_client import CollectorRegistry, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(json.dumps([[one.name, one.labels, one.value] for of in registry.collect() for one in of.samples]))
"""


@pytest.fixture(params=["vllm", "sglang"])
def start(request: pytest.FixtureRequest) -> Start:
    """Makes a server of either kind."""
    found: Start = request.getfixturevalue(f"start_{request.param}")
    return found


def stats(launches: int) -> Stats:
    """With a counter and a gauge that change."""
    archives = (ArchiveInfo("/models/model.aot", "d1"),)
    refusals = (Refusal("bf16", "no entry", launches + 1, launches),)
    zeros: dict[str, Any] = dict.fromkeys(Stats._fields, 0)
    return Stats(
        **zeros
        | {"archives": archives, "digest": "d1", "launches_by_function": {"f": launches}, "refusals": refusals}
        | {
            "plans_made": 2 * launches,
            "plans_held": 100 - launches,
            "native": True,
            "gpu": "H200",
            "tuned_for": (),
            "damaged": (),
        }
    )


def served(folder: Path) -> dict[tuple[str, str], Any]:
    """What a server shows, by name and rank."""
    found = subprocess.run(
        [sys.executable, "-c", SERVER], env=os.environ | {FOLDER: str(folder)}, check=True, capture_output=True
    )
    return {(name, labels["rank"]): (labels, value) for name, labels, value in json.loads(found.stdout)}


def test_figures_of_two_workers_reach_a_server_that_is_another_process(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, *words], cwd=ROOT, env=os.environ | {FOLDER: str(tmp_path)})
        for words in (["0", "3", "5"], ["1", "7", "7"])
    ]
    assert [worker.wait(120) for worker in workers] == [0, 0]
    found = served(tmp_path)
    for rank, launches in (("0", 5), ("1", 7)):
        labels = {"engine": "0", "rank": rank}
        assert found["cute_aot_launches_total", rank] == (labels | {"function": "f"}, launches)
        refused = labels | {"signature": "bf16", "reason": "no entry"}
        assert found["cute_aot_misses_total", rank] == (refused, launches + 1)
        assert found["cute_aot_plans_total", rank] == (labels, 2 * launches)
        assert found["cute_aot_plans_held", rank] == (labels, 100 - launches)
        archive = labels | {"layer": "0", "archive": "model.aot", "digest": "d1"}
        assert found["cute_aot_archive_info", rank] == (archive, 1)
    with_samples = {metric.name for metric in metrics(stats(5)) if metric.samples}
    assert {name for name, _ in found} == with_samples


@pytest.mark.parametrize("seconds", [0.01, 1e6])
def test_a_worker_writes_what_its_library_counts_now_and_then_and_when_it_ends(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
) -> None:
    class Kept:
        def __init__(self, labels: dict[str, str]) -> None:
            assert labels == {"engine": "0", "rank": "0"}

        def update(self, stats: Stats) -> None:
            written.append(stats)

    written: list[Stats] = []
    monkeypatch.setenv(FOLDER, "a folder")
    monkeypatch.setattr("runtime.plugin.metrics.Exporter", Kept)
    monkeypatch.setattr(periodic.Periodic.__init__, "__defaults__", (seconds,))
    server = start()
    server.serve(server.linear(HIDDEN, HIDDEN))
    server.lib._counters.planned()
    while seconds < 1 and server.lib.stats() not in written:
        time.sleep(0.01)
    server.lib._counters.planned()
    without: Any = {"setting": "{}"} if isinstance(server, sglang_stand_in.Server) else {"config": {}}
    server.serve(**without)  # the next worker of this process, without an archive
    assert written[-1] == server.lib.stats()
    assert written[-1].plans_made >= 2


def test_nothing_is_written_where_no_server_asks(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    server = start()
    monkeypatch.setattr("runtime.plugin.metrics.Exporter", None)
    server.serve(server.linear(HIDDEN, HIDDEN))
    assert "serves 1 of 1" in server.lines[0]


def test_a_worker_without_prometheus_client_serves_all_the_same(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    server = start()
    server.serve(server.linear(HIDDEN, HIDDEN))
    assert "has no metrics: ModuleNotFoundError" in server.lines[0]
    assert "serves 1 of 1" in server.lines[1]


def test_schedulers_are_told_apart_by_data_parallelism_and_rank(
    start_sglang: sglang_stand_in.Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setenv(FOLDER, "a folder")
    monkeypatch.setattr("runtime.plugin.metrics.Exporter", found.append)
    server = start_sglang()
    ranks = {"tp_rank": 1, "tp_size": 2, "pp_rank": 3, "pp_size": 4, "dp_rank": 5}
    server.serve(server.linear(HIDDEN, HIDDEN), ranks=ranks)
    assert found == [{"engine": "5", "rank": "7"}]
    server.serve(setting="{}")  # or a thread would go on, and write to the log of another test


def test_a_server_whose_ranks_are_not_as_they_are_known_serves_all_the_same(
    start_sglang: sglang_stand_in.Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, "a folder")
    server = start_sglang()
    server.serve(server.linear(HIDDEN, HIDDEN), ranks={"tp_size": None})
    assert "has no metrics: TypeError" in server.lines[0]
    assert "serves 1 of 1" in server.lines[1]
