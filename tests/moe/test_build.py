"""moe_permute, quantise and moe_combine, built: from a manifest, what is launched, which sources compile them anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aot.pack import tables
from aot.providers import own
from runtime import Library
from runtime.container.archive import Archive

from ..command_line import ROOT, Run, unwrapped
from ..recording_driver import FakeTensor, FakeTorch, RecordingDriver, kernels_of
from ..shared import built_once
from ..simulated_gpu import BASELINE
from ..simulated_tuning import scripted, tuned

MANIFEST = """
format: 1
model: around experts
source: made up
tokens: [1, 1024]
targets: [sm_90a]
operations:
  moe_permute:
    - {name: permute, x: bf16, experts: 16, top_k: 4, k: 256}
    - {name: permute_ep, x: bf16, experts: 16, top_k: 4, k: 256, global_experts: 64}
    - {name: permute_fp8, x: bf16, experts: 16, top_k: 4, k: 256, scaling: block}
  quantise:
    - {name: quantise, x: bf16, y: e4m3, k: 256, scaling: block, experts: {count: 16, top_k: 4}}
  moe_combine:
    - {name: combine, rows: bf16, y: bf16, top_k: 4, n: 256}
"""


@pytest.fixture(scope="session")
def around(request: pytest.FixtureRequest) -> Path:
    """The archive of the manifest."""
    return built_once(request, "around", MANIFEST) / "around.aot"


def test_what_a_manifest_asks_is_built_verified_and_served(run: Run, around: Path, torch: FakeTorch) -> None:
    assert run("verify", around).status == 0
    shown = unwrapped(run("show", around, "permute_ep").out)
    assert "expert_map i32 (64), rows bf16 (4*M, 256), ends i32 (16), positions i32 (M, 4)" in shown
    with Archive.open(around) as archive:
        for name in archive.functions:
            assert all(kernel["local_bytes"] == 0 for kernel in archive.record(name)["kernels"]), "it spills"
        driver = RecordingDriver(kernels=kernels_of(archive))
        library = Library(archive, driver)
        for m, grids in ((1, [(2, 1, 1)]), (1024, [(1, 1, 1), (1024, 1, 1)])):
            driver.launches.clear()
            ids = FakeTensor((m, 4), dtype="int32")
            rows, _, positions = library.call("moe_permute", FakeTensor((m, 256)), ids, experts=16)
            assert [launch.grid for launch in driver.launches] == grids
            rows, ends, _, scale = library.call("moe_permute", FakeTensor((m, 256)), ids, experts=16, scaling="block")
            assert (rows.shape, scale.shape) == ((4 * m, 256), (4 * m, 2))
            library.call("quantise", FakeTensor((4 * m, 256)), ends, scaling="block")
            assert driver.launches[-1].grid == (-(-8 * m // 16), 1, 1)
            rows = FakeTensor((4 * m, 256))
            y = library.call("moe_combine", rows, positions, FakeTensor((m, 4), dtype="float32"))
            assert (y.shape, driver.launches[-1].grid) == ((m, 256), (m, 1, 1))
        library.close()


def test_tuning_keeps_what_is_fastest_on_the_gpu(around: Path, tmp_path: Path) -> None:
    with Archive.open(around) as archive:
        names = sorted(archive.functions)
    fast: dict[str, str] = {}  # one for each list of element types
    for name in names:
        if ".overlap." in name:
            fast[name.split(".")[2]] = name
    us = {name: 2.0 if name in fast.values() else 3.0 for name in names} | {BASELINE: 4.0}
    tuned(around, tmp_path / "tuned.aot", scripted(us))
    with Archive.open(tmp_path / "tuned.aot") as archive:
        found = {e.signature.key(): (e.state, e.ranges) for e in tables.operation_entries(archive)}
    assert len(found) == 5
    for state, ranges in found.values():
        assert state == "tuned"
        assert {name for _, name in ranges} <= set(fast.values())


def test_its_kernels_alone_decide_whether_it_is_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "aot", tmp_path / "aot", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(own, "_AOT", tmp_path / "aot")
    ours = own.Own()

    def changed_by(name: str) -> set[str]:
        before = {family: ours.source_digest(family) for family in ours.families}
        kernel = tmp_path / "aot/kernels" / name
        kernel.write_bytes(kernel.read_bytes() + b"\n")
        return {f for f in before if before[f] != ours.source_digest(f)}

    assert changed_by("moe_permute.py") == {"moe_permute"}
    assert changed_by("moe_combine.py") == {"moe_combine"}
    assert changed_by("quantise.py") == {"moe_permute", "quantise", "sm90_small_m", "sm90_w4"}
    assert changed_by("amax.py") > {"moe_permute", "quantise", "sm90_grouped"}
    assert changed_by("moe_sizes.py") == {"moe_permute", "moe_combine"}
    assert changed_by("moe_choices.py") == set()
