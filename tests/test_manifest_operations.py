"""Operations besides GEMM that a manifest asks for: read, mistakes told with their lines, built, listed and served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aot.pack.write import Package
from aot.problem import manifest
from aot.selection import select
from runtime import Library
from runtime.container.archive import Archive
from runtime.tables.dispatch import Dispatch

from .command_line import Run
from .recording_driver import FakeTorch, RecordingDriver, cubin, kernels_of
from .row_scale.archives import MANIFEST, OF, record, tensors
from .row_scale.operation import ROW_SCALE, Signature

pytestmark = pytest.mark.usefixtures("row_scale")


def test_extents_of_other_operations_are_those_that_the_operation_takes() -> None:
    most = 2**31 - 1
    (scale, _) = manifest.loads(MANIFEST.replace("n: 4096", f"n: {most}")).uses
    assert scale.signature == replace(OF, n=most) == ROW_SCALE.read(scale.signature.to_json())
    with pytest.raises(manifest.ManifestError, match=f"must be an integer from 1 to {most}, found {most + 1}"):
        manifest.loads(MANIFEST.replace("n: 4096", f"n: {most + 1}"))


def test_manifest_with_other_operations_is_read_back() -> None:
    found = manifest.loads(MANIFEST)
    assert [(u.name, u.signature, u.tokens) for u in found.uses] == [
        ("input_scale", OF, (1, 64)),
        ("q", Signature("f16", "f16", "f16", 128), (1, 32)),
    ]
    assert found.gemms == ()
    assert manifest.loads(manifest.dump(found)) == found


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ("row_scale:", "softmax:", r":8: field 'operations.softmax': unknown; .*known: (\w+, )*row_scale"),
        ("row_scale:", "gemm:", r"field 'operations.gemm': unknown"),
        ("n: 4096", "n: 0", r":9: field 'operations.row_scale\[0\].n': must be an integer from 1"),
        ("x: bf16", "x: bf17", r":9: field 'operations.row_scale\[0\]': .*unknown element type 'bf17'"),
        (", n: 4096", "", r":9: field 'operations.row_scale\[0\].n': missing; add `n:`"),
        ("weight: bf16", "wieght: bf16", r":9: .*row_scale\[0\].wieght': unknown; did you mean 'weight'\? known: name"),
        ("tokens: [1, 32]", "token: [1]", r":10: .*row_scale\[1\].token': unknown; did you mean 'tokens'\?"),
        (
            "name: q",
            "name: input_scale",
            r":10: .*row_scale\[1\].name': 'input_scale' is already taken on line 9",
        ),
        (
            "operations:",
            "gemms: [{name: q, n: 64, k: 64, dtypes: {a: bf16, b: bf16, d: bf16}}]\noperations:",
            r":11: field 'operations.row_scale\[1\].name': 'q' is already taken on line 7; give each its own name",
        ),
        ("name: input_scale, ", "", r"field 'operations.row_scale\[0\].name': missing"),
        ("operations:", "gemms:", "must be a list"),
    ],
)
def test_mistakes_in_other_operations_are_told_with_their_line(before: str, after: str, match: str) -> None:
    with pytest.raises(manifest.ManifestError, match=match):
        manifest.loads(MANIFEST.replace(before, after, 1))


def test_what_a_manifest_asks_of_an_operation_is_built_listed_and_served(
    run: Run, scales: Path, torch: FakeTorch
) -> None:
    """The operation, its kernels and their compilation are all of another package."""
    listed = run("ls", scales)
    assert listed.status == 0
    assert listed.out.split()[:3] == ["row_scales", "signature", "target"]
    assert f"input_scale  {OF.key()}  sm_90a  ranked" in listed.out
    assert run("verify", scales).status == 0
    shown = run("show", scales, "input_scale").out
    assert shown.startswith(f"{OF.key()} on sm_90a: ranked\nrow_scales: input_scale\ntakes: ")
    assert "takes: x bf16 (M, 4096), weight bf16 (4096), y bf16 (M, 4096)" in shown
    with Archive.open(scales) as archive:
        assert {f"row_scales.row.bf16_bf16_bf16_f32.threads{n}.sm_90a" for n in (128, 256)} < set(archive.functions)
        driver = RecordingDriver(kernels=kernels_of(archive))
        library = Library(archive, driver)
        x, weight, y = tensors(64)
        assert library.call("row_scale", x, weight, out=y) is y
        assert driver.launches[-1].grid == (64, 1, 1)
        library.close()


def test_a_base_keeps_its_entries_of_other_operations(scales_folder: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(MANIFEST.replace("4096", "8192").replace("name: q", "name: k"))
    base, cache = scales_folder / "scales.aot", scales_folder / "cache"
    arguments = ("--base", base, "-o", tmp_path / "both.aot", "--cache", cache, "--no-tune")
    result = run("build", tmp_path / "more.yaml", *arguments)
    assert result.status == 0, result.err
    with Archive.open(tmp_path / "both.aot") as archive:
        table = Dispatch.from_json(archive.table("row_scale"), ROW_SCALE, archive.functions.targets_by_name())
    assert {entry.signature.n for entry in table.entries} == {128, 4096, 8192}


def test_forms_are_of_gemms_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "scales.yaml").write_text(MANIFEST)
    result = run("build", tmp_path / "scales.yaml", "--universal", "-o", tmp_path / "x.aot")
    assert result.status == 2
    assert "manifest of scales: forms are of gemms, and it asks for row_scale too; build these without" in result.err


def test_a_base_whose_records_this_version_does_not_read_is_refused(
    scales_folder: Path, run: Run, tmp_path: Path
) -> None:
    package = Package()
    package.add_function(record("old") | {"schema": 2}, cubin("old"))
    package.write(tmp_path / "old.aot")
    (tmp_path / "scales.yaml").write_text(MANIFEST)
    arguments = ("--base", tmp_path / "old.aot", "--cache", scales_folder / "cache", "--no-tune")
    result = run("build", tmp_path / "scales.yaml", "-o", tmp_path / "x.aot", *arguments)
    assert result.status == 2
    assert f"{tmp_path / 'old.aot'}: " in result.err
    assert "reads schema 1, found schema 2" in result.err


def test_a_table_of_another_schema_is_refused_with_the_name_of_its_file(run: Run, tmp_path: Path) -> None:
    package = Package()
    package.set_table("gemm", {"schema": 2, "entries": []})
    package.write(tmp_path / "later.aot")
    assert run("ls", tmp_path / "later.aot").err.startswith(f"error: {tmp_path / 'later.aot'}: gemm table")


def test_extents_that_no_kernel_takes_are_told(scales_folder: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text(MANIFEST.replace("n: 4096", "n: 4100"))
    cache = scales_folder / "cache"
    result = run("build", tmp_path / "odd.yaml", "-o", tmp_path / "odd.aot", "--cache", cache, "--no-tune")
    assert result.status == 1
    assert (
        "bf16_bf16_bf16_row_scale_n4100 on sm_90a: no kernel takes it: x.extent[1] must be a multiple of 8, found 4100"
        in result.err
    )


def test_a_build_of_which_no_kernel_takes_anything_is_refused_and_writes_nothing(
    scales_folder: Path, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "odd.yaml").write_text(MANIFEST.replace("n: 4096", "n: 4097").replace("n: 128", "n: 129"))
    odd = ("build", tmp_path / "odd.yaml", "-o", tmp_path / "odd.aot", "--cache", scales_folder / "cache", "--no-tune")
    result = run(*odd)
    assert (result.status, result.out) == (2, "")
    assert (
        f"error: {tmp_path / 'odd.yaml'}:9: input_scale: bf16_bf16_bf16_row_scale_n4097 on sm_90a: no kernel takes it: "
        "x.extent[1] must be a multiple of 8, found 4097; nor is there a kernel for the other 1" in result.err
    )
    assert not (tmp_path / "odd.aot").exists()
    assert run(*odd, "--function", "row_scale").status == 1, "its functions can be called by name"
    assert (tmp_path / "odd.aot").exists()


def test_gemms_and_other_operations_of_one_manifest_are_all_planned_for_each_target() -> None:
    gemms = "gemms: [{name: up, n: 256, k: 512, dtypes: {a: bf16, b: bf16, d: bf16}}]\noperations:"
    work = select([manifest.loads(MANIFEST.replace("operations:", gemms))], targets=["sm_90a", "sm_100a"], limit=1)
    asked = {(problem.signature.operation, problem.target) for problem in work.problems}
    assert asked == {(of, target) for of in ("gemm", "row_scale") for target in ("sm_90a", "sm_100a")}


def test_every_kernel_of_an_operation_is_built_where_it_is_named_without_a_manifest() -> None:
    found = select([], ["sm_90a"], functions=["row_scale"]).functions
    assert {variant.name() for variant in found} == {
        f"row_scales.row.{t}_{t}_{t}_f32.threads{n}.sm_90a" for t in ("bf16", "f16") for n in (128, 256)
    }
