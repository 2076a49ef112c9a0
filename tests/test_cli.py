import dataclasses
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aot import build, selection
from aot.cli import commands
from aot.compile.compiler import BuildReport
from aot.pack import build_table
from aot.problem import manifest
from aot.search import m_values
from aot.search.targets import TARGETS
from aot.search.variants import Variant
from aot.tune import run as run_of_tune
from aot.tune.options import TuneOptions
from aot.tune.write import TuneReport
from runtime.container.archive import Archive
from runtime.gemm.operation import GEMM
from runtime.tables.dispatch import Dispatch

from .command_line import ALONE, COMMAND, DOWN, MANIFEST, ROOT, UP, Run


def _cpu_time_of_children_s() -> float:
    """Of those that have ended; unlike the time that passes it is the same on a machine that others share."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_build_makes_an_archive_that_serves_the_manifest(archive: Path) -> None:
    with Archive.open(archive) as opened:
        dispatch = Dispatch.from_json(opened.table("gemm"), GEMM, opened.functions.targets_by_name())
        assert [(e.signature.key(), e.target, e.state) for e in dispatch.entries] == [
            (UP, "sm_90a", "ranked"),
            (DOWN, "sm_90a", "ranked"),
        ]
        up = dispatch.entries[0]
        found = [m for m, _ in up.candidates]
        assert found == m_values.points([16, 256])
        assert {16, 32, 64, 128, 256} < set(found)
        assert up.ranges[-1] == (None, up.candidates[-1][1][0])
        assert up.functions(10_000)[0] == up.candidates[-1][1][0]


def test_the_build_table_says_where_an_archive_is_from_and_not_when_or_where_it_was_made(archive: Path) -> None:
    with Archive.open(archive) as opened:
        table, families = opened.table("build"), {".".join(name.split(".")[:2]) for name in opened.functions}
    assert table["models"][0]["model"] == "tiny"
    assert [g["name"] for g in table["models"][0]["gemms"]] == ["up", "down"]
    assert set(table["ranking"]) == {"sm_90a"}
    assert {"nvidia-cutlass-dsl", "nvidia-cutlass-operators", "cute-aot", "python", "zstd"} <= set(table["tools"])
    assert list(table["providers"]) == sorted(families)
    assert (table["failures"], table["unserved"]) == ([], [])
    assert str(archive.parent) not in json.dumps(table)


def test_the_build_table_has_the_traffic_of_a_manifest(run: Run, folder: Path, archive: Path, tmp_path: Path) -> None:
    text = MANIFEST.replace("targets:", "traffic: {16: 7, 256: 1}\ntargets:").replace(
        "tokens: [1]}", "traffic: {1: 3}}"
    )
    (tmp_path / "tiny.yaml").write_text(text)
    arguments = ["build", tmp_path / "tiny.yaml", "-o", tmp_path / "out.aot", "--candidates", 1, "--no-tune"]
    assert run(*arguments, "--cache", folder / "cache").status == 0
    with Archive.open(tmp_path / "out.aot") as opened:
        found = build_table.read(opened)
        assert [problem.traffic for problem in found.models[0].problems] == [[[16, 7], [256, 1]], [[1, 3]]]
        assert build_table.traffic(found) == {UP: {16: 7, 256: 1}, DOWN: {1: 3}}
    assert run("verify", tmp_path / "out.aot").status == 0


def test_a_rebuild_compiles_nothing_and_gives_the_same_bytes(build_again: Run, archive: Path, tmp_path: Path) -> None:
    result = build_again("--no-tune", "--json")
    found = json.loads(result.out)
    assert (result.status, found["compiled"], found["failures"]) == (0, 0, {})
    assert found["cached"] == found["functions"] > 0
    assert (tmp_path / "again.aot").read_bytes() == archive.read_bytes()


def test_a_rebuild_needs_neither_torch_nor_the_dsl(folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'cutlass'])); from aot.cli.commands import main; "
        "sys.argv[0] = 'aot'; main()"
    )
    arguments = ["build", "tiny.yaml", "-o", str(tmp_path / "again.aot"), "--candidates", "1", "--no-tune"]
    command = [sys.executable, "-c", program, *arguments, "--cache", "cache"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    begun_s = _cpu_time_of_children_s()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    assert _cpu_time_of_children_s() - begun_s < 3.0


def test_a_build_says_what_it_did_in_one_line(build_again: Run) -> None:
    result = build_again("--no-tune")
    assert result.status == 0
    assert result.out.count("\n") == 1
    assert "0 compiled, " in result.out
    assert result.err == ""


def test_a_build_says_what_each_kernel_takes_of_an_sm(build_again: Run) -> None:
    result = build_again("--no-tune", "--verbose")
    assert result.status == 0
    kernels = json.loads(build_again("--no-tune", "--json").out)["kernels"]
    assert len(result.err.splitlines()) == len(kernels) > 0
    for line in result.err.splitlines():
        said = re.fullmatch(r"(\S+): (\d+) threads, (\d+) registers, ([\d?]+) bytes of shared memory, 0 spilled", line)
        assert said, line
        (launch,) = kernels[said[1]]
        assert (str(launch["threads"]), str(launch["registers"])) == (said[2], said[3])
        assert launch["registers"] > 0
        assert launch["threads"] >= 128
        assert launch["shared_bytes"] > 1024


def test_manifests_of_several_models_share_an_archive(run: Run, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(MANIFEST.replace("tiny", "other").replace("name: up", "name: wide").replace("[1]", "[1, 8]"))
    out = tmp_path / "both.aot"
    arguments = ["--candidates", 1, "--cache", folder / "cache", "--no-tune", *ALONE]
    assert run("build", folder / "tiny.yaml", other, "-o", out, *arguments).status == 0
    entries = json.loads(run("ls", out, "--json").out)["entries"]
    assert [(e["signature"], e["names"]) for e in entries] == [(UP, ["up", "wide"]), (DOWN, ["down"])]
    assert [row["m"] for row in json.loads(run("show", out, "down", "--json").out)["entries"][0]["candidates"]] == [
        1,
        8,
    ]


def test_what_no_kernel_computes_is_a_warning_and_status_1(run: Run, folder: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text(MANIFEST + "  - {name: fp8, n: 64, k: 64, dtypes: {a: e4m3, b: e4m3, d: bf16}}\n")
    arguments = ["--target", "sm_90a", "--target", "sm_120a", "--candidates", 1, "--cache", folder / "cache"]
    result = run("build", mixed, "-o", tmp_path / "mixed.aot", *arguments, "--no-tune", *ALONE)
    assert result.status == 1
    assert f"{mixed}:11: fp8: e4m3_e4m3_bf16_f32_none_n64_k64 on sm_120a: no kernel family computes it: " in result.err
    assert ": none for sm_120a has the element types e4m3, e4m3, bf16; " in result.err
    assert run("verify", tmp_path / "mixed.aot").status == 0


@pytest.mark.usefixtures("row_scale")
def test_a_function_that_is_no_gemm_can_come_along() -> None:
    small = manifest.loads(MANIFEST)
    without, with_it = selection.select([small]), selection.select([small], functions=["row_scale"])
    added = set(with_it.variants()) - set(without.variants())
    assert {v.operation for v in added if isinstance(v, Variant)} == {"row_scale"}


@pytest.mark.usefixtures("row_scale")
def test_an_unknown_function_is_named_with_the_known_ones(build_again: Run) -> None:
    result = build_again("--function", "row_scales")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("error: unknown function 'row_scales'")
    assert "did you mean 'row_scale'?" in result.err


def test_a_plan_is_the_same_for_the_same_manifests() -> None:
    small = manifest.loads(MANIFEST)
    assert selection.select([small, small], list(TARGETS), 2) == selection.select([small], list(TARGETS), 2)


def test_a_build_of_nothing_is_an_error() -> None:
    with pytest.raises(selection.BuildError, match="name a manifest"):
        selection.select([])


def test_where_a_gpu_is_the_build_goes_on_to_tune(
    build_again: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tuned: list[tuple[Path, Path]] = []

    def tune(source: Path, destination: Path, options: TuneOptions, as_json: bool) -> dict[str, Any]:
        tuned.append((source, destination))
        return {"points": 3}

    monkeypatch.setattr(commands.tune, "tune_archive", tune)
    monkeypatch.setattr(build, "tunable", lambda targets: True)
    assert json.loads(build_again("--json").out)["tuning"] == {"points": 3}
    assert tuned == [(tmp_path / "again.aot", tmp_path / "again.aot")]
    build_again("--no-tune")
    assert len(tuned) == 1


def test_a_build_that_tunes_reports_the_size_of_what_it_leaves(
    build_again: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def tune(source: Path, destination: Path, *_: object) -> dict[str, Any]:
        destination.write_bytes(b"tuned")
        return {"points": 3}

    monkeypatch.setattr(commands.tune, "tune_archive", tune)
    monkeypatch.setattr(build, "tunable", lambda targets: True)
    assert json.loads(build_again("--json").out)["bytes"] == len(b"tuned")


def test_a_build_tunes_only_for_targets_that_it_can_serve(
    build_again: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compile_all = build.compile_variants
    asked: list[tuple[str, ...]] = []

    def compile_variants(variants: list[Variant], *arguments: Any, **named: Any) -> BuildReport:
        return compile_all([v for v in variants if v.target == "sm_90a"], *arguments, **named)

    def tunable(targets: tuple[str, ...]) -> bool:
        asked.append(targets)
        return False

    monkeypatch.setattr(build, "compile_variants", compile_variants)
    monkeypatch.setattr(build, "tunable", tunable)
    result = build_again("--target", "sm_90a", "--target", "sm_120a")
    assert (result.status, asked) == (1, [("sm_90a",)])


@pytest.fixture
def one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate fails to compile that some M of one signature would have; others are near."""
    compile_all = build.compile_variants
    up, down = selection.select([manifest.loads(MANIFEST)], limit=1).problems
    failing = next(v for _, (v,) in up.by_tokens if v not in {v for _, (v,) in down.by_tokens})

    def compile_variants(variants: list[Variant], *arguments: Any, **named: Any) -> BuildReport:
        report = compile_all([v for v in variants if v != failing], *arguments, **named)
        return dataclasses.replace(report, failures={failing: "too many registers"})

    monkeypatch.setattr(build, "compile_variants", compile_variants)


@pytest.mark.usefixtures("one_fails")
def test_a_candidate_that_fails_is_counted(build_again: Run) -> None:
    result = build_again("--no-tune")
    assert (result.status, result.out.count("\n")) == (0, 1)
    assert " from the cache), 1 candidate failed, " in result.out
    found = json.loads(build_again("--no-tune", "--json").out)
    assert (found["failed"], list(found["failures"].values())) == (1, ["too many registers"])


@pytest.mark.usefixtures("one_fails")
@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_strict_build_has_status_1_where_a_candidate_fails(
    build_again: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tuned: bool, options: list[str]
) -> None:
    monkeypatch.setattr(build, "tunable", lambda targets: tuned)
    monkeypatch.setattr(commands.tune, "tune_archive", lambda *_: {"unserved": []})
    result = build_again("--strict", *options)
    assert (result.status, result.err) == (1, "")
    assert (tmp_path / "again.aot").exists()


def test_a_strict_build_of_which_nothing_fails_has_status_0(build_again: Run) -> None:
    result = build_again("--no-tune", "--strict")
    assert result.status == 0
    assert " from the cache), 0 candidates failed, " in result.out


@pytest.mark.parametrize(
    ("found", "status", "message"),
    [
        ({"interrupted": True}, 130, "error: interrupted; "),
        ({"unserved": ["s on sm_90a"]}, 1, "warning: s on sm_90a: no candidate computes the right result"),
        ({"unknown": ["s on sm_90a"]}, 0, "warning: s on sm_90a: left as it was, unchecked: "),
        ({}, 0, ""),
    ],
)
def test_tune_says_what_is_missing_from_its_result(
    run: Run,
    archive: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, Any],
    status: int,
    message: str,
) -> None:
    monkeypatch.setattr(run_of_tune, "tune_archive", lambda *_: TuneReport({}, **found))
    result = run("tune", archive, "-o", tmp_path / "tuned.aot")
    assert result.status == status
    assert result.err.startswith(message)


def test_tune_passes_its_options_on_and_reports_what_serves(
    run: Run, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def tune_archive(source: Path, destination: Path, options: Any, progress: Any) -> Any:
        seen.append(options)
        return TuneReport({}, speedups=[1.0, 4.0])

    monkeypatch.setattr(run_of_tune, "tune_archive", tune_archive)
    result = run("tune", archive, "-o", tmp_path / "t.aot", "--tolerance", "0.05", "--finalists", "7", "--sustained")
    assert "2.000x the baseline" in result.out
    assert run("tune", archive, "-o", tmp_path / "t.aot").status == 0
    assert [(o.tolerance, o.finalists, o.sustained) for o in seen] == [(0.05, 7, True), (0.01, 4, False)]


def test_control_c_while_selecting_is_quiet(build_again: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def select(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(selection, "select", select)
    assert build_again() == (130, "", "")


def test_a_cache_without_a_name_is_refused(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("build", folder / "tiny.yaml", "-o", tmp_path / "x.aot", "--cache", "")
    assert (result.status, result.out) == (2, "")
    assert "the cache directory has no name" in result.err


def test_a_reader_that_leaves_is_no_error(archive: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "ls", str(archive), "--json"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_version_is_one_line(run: Run) -> None:
    result = run("--version")
    assert (result.status, result.out.count("\n")) == (0, 1)
