"""RMSNorm's kernels, built: from a manifest, which sources they are compiled anew for, and that a server calls them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from aot.problem.manifest import loads
from aot.providers import own
from runtime import Library
from runtime.container.archive import Archive

from ..command_line import ROOT, Run
from ..recording_driver import FakeTensor, FakeTorch, RecordingDriver, kernels_of
from ..shared import built_once

MANIFEST = """
format: 1
model: norms
source: made up
tokens: [1, 64]
targets: [sm_90a]
operations:
  rmsnorm:
    - {name: input_norm, x: bf16, weight: bf16, y: bf16, n: 4096}
"""


@pytest.fixture(scope="session")
def norms(request: pytest.FixtureRequest) -> Path:
    """The archive of the manifest."""
    return built_once(request, "norms", MANIFEST) / "norms.aot"


def test_example_of_other_operations_of_the_page_belongs_to_a_manifest() -> None:
    example, few, more = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "manifests.md").read_text(), re.DOTALL)
    assert [use.name for use in loads(example + more).uses] == ["input_norm"]
    of_few = loads(example[: example.index("gemms:")] + few)
    assert [item.name for item in of_few.items()] == ["qkv", "qkv.few", "qkv.behind", "qkv_quantise"]


def test_what_a_manifest_asks_is_built_listed_and_served(run: Run, norms: Path, torch: FakeTorch) -> None:
    assert "input_norm  bf16_bf16_bf16_rmsnorm_n4096  sm_90a  ranked" in run("ls", norms).out
    assert run("verify", norms).status == 0
    assert "takes: x bf16 (M, 4096), weight bf16 (4096), y bf16 (M, 4096)" in run("show", norms, "input_norm").out
    with Archive.open(norms) as archive:
        assert len(archive.functions) == 6
        for name in archive.functions:
            assert [a["name"] for a in archive.record(name)["arguments"]] == ["x", "weight", "y", "eps", "stream"]
        driver = RecordingDriver(kernels=kernels_of(archive))
        library = Library(archive, driver)
        x, weight, y = FakeTensor((64, 4096)), FakeTensor((4096,)), FakeTensor((64, 4096))
        assert library.call("rmsnorm", x, weight, out=y) is y
        assert driver.launches[-1].grid == (64, 1, 1)
        library.close()


@pytest.mark.parametrize("source", ["kernels/rmsnorm.py", "providers/builders/rmsnorm.py"])
def test_its_kernel_alone_decides_whether_it_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    shutil.copytree(ROOT / "aot", tmp_path / "aot", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(own, "_AOT", tmp_path / "aot")
    ours = own.Own()
    before = {family: ours.source_digest(family) for family in ours.families}
    kernel = tmp_path / "aot" / source
    kernel.write_bytes(kernel.read_bytes() + b"\n")
    assert {f for f in before if before[f] != ours.source_digest(f)} == {"rmsnorm_row"}
