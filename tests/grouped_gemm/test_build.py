"""Grouped GEMMs, built: from a manifest, which sources they are compiled anew for, and that a server calls them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from aot.pack import tables
from aot.problem import manifest
from aot.providers import own
from aot.search.operation import building
from runtime import Library
from runtime.container.archive import Archive

from ..command_line import ROOT, Run
from ..recording_driver import FakeTensor, FakeTorch, RecordingDriver, kernels_of
from ..shared import built_once
from ..simulated_gpu import BASELINE
from ..simulated_tuning import scripted, tuned

MANIFEST = """
format: 1
model: experts
source: made up
tokens: [8, 4096]
targets: [sm_90a]
operations:
  grouped_gemm:
    - {name: experts_down, a: bf16, b: bf16, d: bf16, groups: 16, n: 512, k: 256}
"""
GATHERED = MANIFEST.replace("k: 256}", "k: 256, rows: gathered}")


@pytest.fixture(scope="session")
def experts(request: pytest.FixtureRequest) -> Path:
    """The archive of the manifest."""
    return built_once(request, "experts", MANIFEST, "--candidates", "1") / "experts.aot"


@pytest.fixture(scope="session")
def gathered(request: pytest.FixtureRequest) -> Path:
    """The archive of the manifest with rows that are gathered."""
    return built_once(request, "gathered", GATHERED, "--candidates", "1") / "gathered.aot"


def test_what_a_manifest_asks_is_built_verified_and_served(run: Run, experts: Path, torch: FakeTorch) -> None:
    assert run("verify", experts).status == 0
    with Archive.open(experts) as archive:
        assert len(archive.functions) == 2
        for name in archive.functions:
            record = archive.record(name)
            names = ["a", "b", "ends", "d", "max_active_clusters", "stream"]
            assert [a["name"] for a in record["arguments"]] == names
            (kernel,) = record["kernels"]
            assert kernel["local_bytes"] == 0
        driver = RecordingDriver(kernels=kernels_of(archive))
        library = Library(archive, driver)
        b, ends = FakeTensor((16, 512, 256)), FakeTensor((16,), dtype="int32")
        grids = []
        for m in (1, 8, 100_000):
            out = FakeTensor((m, 512))
            assert library.call("grouped_gemm", FakeTensor((m, 256)), b, ends, out=out) is out
            grids.append(driver.launches[-1].grid)
        across = 512 // 128
        assert grids[0] == (2 * across, 1, 1), "the group that has the row, and one that may not be full"
        assert grids[1] == (9 * across, 1, 1)
        assert grids[2] == (driver.multiprocessors, 1, 1), "CTAs are persistent"
        library.close()


def test_gathered_rows_are_built_and_served_with_any_number_of_rows_in_a(
    run: Run, gathered: Path, torch: FakeTorch
) -> None:
    assert run("verify", gathered).status == 0
    with Archive.open(gathered) as archive:
        for name in archive.functions:
            record = archive.record(name)
            names = ["a", "b", "indices", "ends", "d", "max_active_clusters", "stream"]
            assert [a["name"] for a in record["arguments"]] == names
            (kernel,) = record["kernels"]
            assert kernel["local_bytes"] == 0
        driver = RecordingDriver(kernels=kernels_of(archive))
        library = Library(archive, driver)
        b, ends = FakeTensor((16, 512, 256)), FakeTensor((16,), dtype="int32")
        for tokens in (1, 5000):
            for m, clusters in ((1, 2 * 512 // 128), (100_000, driver.active_clusters)):
                indices, out = FakeTensor((m,), dtype="int32"), FakeTensor((m, 512))
                library.call("grouped_gemm", FakeTensor((tokens, 256)), b, ends, indices=indices, out=out)
                assert driver.launches[-1].grid == (clusters, 1, 1), "by rows of D, whatever A has"
        library.close()


@pytest.mark.parametrize("name", ["grouped", "experts_w4"])
def test_the_manifests_of_the_gpu_tests_have_functions_for_all_that_they_ask(name: str) -> None:
    found = manifest.load(ROOT / f"tests/data/{name}.yaml")
    names = set()
    for use in (use for use in found.uses if use.signature.operation == "grouped_gemm"):
        shortlist = building("grouped_gemm").shortlist({use.signature: use.tokens}, "sm_90a", 2)
        by_m = shortlist.by_signature[use.signature]
        assert all(len(variants) == 2 for _, variants in by_m), use.name
        names |= {v.name() for _, variants in by_m for v in variants}
    assert len(names) <= 60


def rows_of_tile(name: str) -> int:
    """How many rows a function's tile has."""
    (rows,) = re.findall(r"\.tile(\d+)x", name)
    return int(rows)


def test_tuning_keeps_what_is_fastest_on_the_gpu(experts: Path, tmp_path: Path) -> None:
    """Nothing of the tuner is of GEMM: estimates are grouped GEMM's own, which ask for groups."""
    with Archive.open(experts) as archive:
        few, many = sorted(archive.functions, key=rows_of_tile)
    us = {few: 3.0, many: 2.0, BASELINE: 4.0}
    tuned(experts, tmp_path / "tuned.aot", scripted(us))
    with Archive.open(tmp_path / "tuned.aot") as archive:
        (entry,) = tables.operation_entries(archive)
    assert (entry.state, entry.ranges) == ("tuned", ((None, many),)), "estimates would have both"


def test_gathered_rows_are_tuned_by_tile(gathered: Path, tmp_path: Path) -> None:
    with Archive.open(gathered) as archive:
        few, many = sorted(archive.functions, key=rows_of_tile)
    times: dict[bool, dict[str, float]] = {True: {few: 2.0, many: 3.0}, False: {few: 3.0, many: 2.0}}
    gpu = scripted(lambda name, s, m: {BASELINE: 4.0, **times[m <= 64]}[name])
    tuned(gathered, tmp_path / "tuned.aot", gpu)
    with Archive.open(tmp_path / "tuned.aot") as archive:
        (entry,) = tables.operation_entries(archive)
    (end, first), last = entry.ranges
    assert (entry.state, first, last) == ("tuned", few, (None, many))
    assert end in range(64, 128), "no M between was timed"


def test_the_kernels_it_is_made_of_decide_whether_it_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "aot", tmp_path / "aot", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(own, "_AOT", tmp_path / "aot")
    ours = own.Own()

    def changed_by(name: str) -> set[str]:
        before = {family: ours.source_digest(family) for family in ours.families}
        kernel = tmp_path / "aot/kernels/sm90" / name
        kernel.write_bytes(kernel.read_bytes() + b"\n")
        return {f for f in before if before[f] != ours.source_digest(f)}

    assert changed_by("grouped/scheduler.py") == {"sm90_gathered", "sm90_grouped", "sm90_masked"}
    assert changed_by("persistent/mainloop.py") == {"sm90_gathered", "sm90_grouped", "sm90_masked", "sm90_persistent"}
