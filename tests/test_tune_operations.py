"""What tuning writes of operations besides GEMM, with the GPU replaced by a simulated one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from aot.pack import tables
from aot.pack.write import Package
from aot.search.legal import unsuited
from aot.search.provider import provider
from aot.tune import history, times
from aot.tune.options import TuneError
from aot.tune.write import TuneReport
from aot.verify import archive as verify
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature as GemmSignature
from runtime.tables.dispatch import Entry

from .command_line import Run
from .distributions import TUNING, install
from .recording_driver import cubin, entry, gemm_record, signature, table
from .row_scale.archives import MANIFEST, OF
from .row_scale.archives import record as scale_record
from .simulated_gpu import BASELINE, GPU
from .simulated_tuning import scripted, tuned, wrong_are

KNOWN = pytest.mark.usefixtures("tuned_row_scale")
US = {"narrow": 3.0, "wide": 2.0, "bad": 1.0, "quick": 2.0, "slow": 2.2, BASELINE: 4.0}


def archive_of(path: Path, gemms: bool = True) -> Path:
    """An archive with candidates for row-wise scaling at two N, and with `gemms` for one GEMM."""
    package = Package()
    for record in [scale_record("narrow"), scale_record("wide"), scale_record("bad"), gemm_record("quick")]:
        package.add_function(record, cubin(record["name"]))
    package.set_table("gemm", table([ranked(signature(512, 512), ["quick"])] if gemms else []))
    scales = [ranked(dataclasses.replace(OF, n=n).to_json(), ["narrow", "wide", "bad"]) for n in (4096, 128)]
    package.set_table("row_scale", table(scales))
    package.write(path)
    return path


def ranked(of: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return entry(of, [(None, names[0])], candidates=[[16, names], [256, names]], state="ranked")


def tuned_archive(source: Path, destination: Path, **more: Any) -> TuneReport:
    return tuned(source, destination, scripted(US, wrong=wrong_are("bad"), **more))


def entries(path: Path) -> dict[str, Entry]:
    with Archive.open(path) as archive:
        return {e.signature.key(): e for e in tables.operation_entries(archive)}


@KNOWN
def test_entries_of_every_operation_are_checked_and_timed(tmp_path: Path) -> None:
    report = tuned_archive(archive_of(tmp_path / "in.aot"), tmp_path / "tuned.aot")
    found = entries(tmp_path / "tuned.aot")
    assert {e.state for e in found.values()} == {"tuned"}
    assert len(found) == 3
    scale = found[OF.key()]
    assert (scale.gpu, scale.ranges, scale.candidates) == (GPU, ((None, "wide"),), ())
    first = scale.timings[0]
    assert (first["m"], first["function"], first["us"], first["baseline_us"]) == (16, "wide", 2.0, 4.0)
    assert first["runner_up"] == "narrow"
    assert list(report.rejected) == ["bad"]
    assert report.unserved == report.unknown == []
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert set(archive.functions) == {"wide", "quick"}
        assert [f for f in verify.verify(archive) if not f.ok and not f.subject.startswith("function")] == []


@KNOWN
def test_torch_takes_no_calls_of_operations_that_it_does_not_serve(tmp_path: Path) -> None:
    us = US | {BASELINE: 0.5}
    tuned(archive_of(tmp_path / "in.aot"), tmp_path / "tuned.aot", scripted(us, wrong=wrong_are("bad")))
    found = entries(tmp_path / "tuned.aot")
    assert found[OF.key()].torch_faster == ()
    assert [e.torch_faster for e in found.values() if e.signature.operation == "gemm"] == [((16, None),)]


@KNOWN
def test_an_operation_whose_functions_are_all_wrong_has_no_table_left(tmp_path: Path) -> None:
    gpu = scripted(US, wrong=lambda s, name: "relative error 1.0" if s.operation == "row_scale" else None)
    report = tuned(archive_of(tmp_path / "in.aot"), tmp_path / "tuned.aot", gpu)
    assert len(report.unserved) == 2
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert "row_scale" not in archive.tables
        assert set(archive.functions) == {"quick"}


@KNOWN
def test_functions_of_one_operation_are_tried_for_no_other(tmp_path: Path) -> None:
    source, asked = archive_of(tmp_path / "in.aot"), set[tuple[str, str]]()
    tuned(source, tmp_path / "t.aot", scripted(US, wrong=lambda s, name: asked.add((s.operation, name))))
    assert {name for of, name in asked if of == "gemm"} == {"quick"}
    assert {name for of, name in asked if of == "row_scale"} == {"narrow", "wide", "bad"}


@KNOWN
def test_the_history_names_operations_and_times_of_gemms_are_read_from_it(tmp_path: Path) -> None:
    tuned_archive(archive_of(tmp_path / "in.aot"), tmp_path / "tuned.aot")
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert [row.get("operation") for row in history.tunings(archive)] == [None, "row_scale", "row_scale"]
        assert [history.operation_of(row) for row in history.tunings(archive)] == ["gemm", "row_scale", "row_scale"]
    assert times.load(tmp_path / "tuned.aot", "sm_90a") == []  # of made-up functions, which are no variants


@KNOWN
def test_progress_and_messages_name_signatures_of_any_operation(tmp_path: Path) -> None:
    report = tuned_archive(archive_of(tmp_path / "in.aot"), tmp_path / "tuned.aot")
    assert report.rejected == {"bad": f"{OF.key()} M=1: relative error 1.0"}
    assert {key for key, _ in report.measured} >= {OF.key(), dataclasses.replace(OF, n=128).key()}


@KNOWN
def test_what_was_built_from_a_manifest_is_tuned_listed_and_shown(scales: Path, tmp_path: Path, run: Run) -> None:
    """With functions that providers know as variants: 256 threads are the fastest."""

    def us(name: str, s: Any, m: int) -> float:
        return {BASELINE: 4.0}.get(name, 2.0 if ".threads256." in name else 3.0)

    report = tuned(scales, tmp_path / "tuned.aot", scripted(us))
    assert (report.rejected, report.unserved, report.unknown) == ({}, [], [])
    for e in entries(tmp_path / "tuned.aot").values():
        assert (e.state, e.invariant) == ("tuned", None)
        assert [".threads256." in name for _, name in e.ranges] == [True]
    (line,) = (line for line in run("ls", tmp_path / "tuned.aot").out.splitlines() if "input_scale" in line)
    assert line.split()[-2:] == ["2.00x", "2.00x"]
    assert re.search(r"  tuned +0 of ", line)
    shown = run("show", tmp_path / "tuned.aot", "input_scale").out
    assert shown.startswith(f"{OF.key()} on sm_90a, made up (132 SMs, 4800 GB/s): tuned")
    assert re.search(r"^ ?64 +2\.0 +0\.0% +4\.0 +0\.0% +2\.00x +3\.0 ", shown, re.MULTILINE)
    assert run("verify", tmp_path / "tuned.aot").status == 0
    (tmp_path / "scales.yaml").write_text(MANIFEST)
    again = run("build", tmp_path / "scales.yaml", "-o", tmp_path / "tuned.aot", "--no-tune")
    assert "holds 2 tuned entries, which a build would replace" in again.err


# --- operations of other packages ---


@KNOWN
def test_an_operation_of_another_package_is_tuned_like_those_here(tmp_path: Path) -> None:
    report = tuned_archive(archive_of(tmp_path / "in.aot"), tmp_path / "tuned.aot")
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert "row_scale" in archive.tables
    assert {e.state for e in entries(tmp_path / "tuned.aot").values()} == {"tuned"}
    assert report.unknown == []


@pytest.mark.usefixtures("row_scale")
def test_entries_that_nobody_knows_how_to_check_stay_and_are_told(tmp_path: Path) -> None:
    report = tuned_archive(archive_of(tmp_path / "in.aot"), tmp_path / "tuned.aot")
    assert report.unknown == [f"{dataclasses.replace(OF, n=n).key()} on sm_90a" for n in (4096, 128)]
    found = entries(tmp_path / "tuned.aot")
    assert [e.state for e in found.values()] == ["tuned", "ranked", "ranked"]
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert {"narrow", "wide", "bad"} <= set(archive.functions)


@pytest.mark.usefixtures("row_scale")
def test_an_archive_of_nothing_else_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    archive_of(tmp_path / "in.aot", gemms=False)
    with pytest.raises(TuneError, match=r"functions of row_scale are checked is not known here; .* cute_aot\.tuning"):
        tuned_archive(tmp_path / "in.aot", tmp_path / "tuned.aot")


@pytest.mark.usefixtures("row_scale")
@pytest.mark.parametrize(
    ("points", "match"),
    [
        (["broken_tuning:ROW_SCALE"], "cannot be imported .*nothing_of_this_name"),
        (
            ["json:dumps"],
            r"json:dumps, in the group cute_aot\.tuning, lacks work, form, .*, looks_between; mend it",
        ),
        (["one:X", "two:Y"], r"(one:X and two:Y|two:Y and one:X) are in the group cute_aot\.tuning; uninstall all but"),
    ],
)
def test_what_does_not_say_how_an_operation_is_tuned_is_refused(
    site: Path, tmp_path: Path, points: list[str], match: str
) -> None:
    (site / "broken_tuning.py").write_text("import nothing_of_this_name")
    for number, point in enumerate(points):
        install(site, f"tuning-{number}", {TUNING: f"row_scale = {point}"})
    with pytest.raises(TuneError, match=f"operation row_scale: .*{match}"):
        tuned_archive(archive_of(tmp_path / "in.aot"), tmp_path / "tuned.aot")


@pytest.mark.usefixtures("row_scale")
def test_variants_suit_signatures_of_their_own_operation_and_element_types() -> None:
    gemm = GemmSignature("bf16", "bf16", "bf16", "f32", "none", 4096, 4096)
    of_scales = provider("row_scales").functions("sm_90a")
    of_gemms = provider("own").variants("sm_90a", gemm)
    suited = {v.d for v in of_scales if unsuited(v, OF) is None}
    assert (suited, {v.d for v in of_scales}) == ({"bf16"}, {"bf16", "f16"})
    assert {unsuited(v, gemm) for v in of_scales} == {"row computes row_scale, not gemm"}
    assert all(str(unsuited(v, OF)).endswith(" computes gemm, not row_scale") for v in of_gemms)
