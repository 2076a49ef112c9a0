"""The commands ls, show and verify."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import runtime
from aot.pack.write import Package
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature

from . import recording_driver
from .command_line import DOWN, MANIFEST, UP, Run, unwrapped


def test_ls_lists_layers_and_sizes(run: Run, archive: Path) -> None:
    result = run("ls", archive)
    lines = result.out.splitlines()
    assert result.status == 0
    assert lines[0].split() == ["gemms", "signature", "target", "state"]
    assert [line.split() for line in lines if DOWN in line] == [["down", DOWN, "sm_90a", "ranked"]]
    assert f"{archive.stat().st_size:,} in the file" in lines[-1]


def test_ls_as_json_agrees_with_the_archive(run: Run, archive: Path) -> None:
    found = json.loads(run("ls", archive, "--json").out)
    with Archive.open(archive) as opened:
        assert found["totals"]["functions"] == len(opened.functions)
        assert {r["function"] for e in found["entries"] for r in e["ranges"]} <= set(opened.functions)
    for entry in found["entries"]:
        assert entry["ranges"][0]["m_min"] == 1
        assert entry["ranges"][-1]["m_max"] is None


def _with_timings(archive: Path, destination: Path, timings: list[Any], **tables: Any) -> Path:
    with Archive.open(archive) as opened:
        package = Package()
        package.add_archive(opened)
        table = opened.table("gemm")
        table["entries"][0] |= {"state": "tuned", "timings": timings}
        package.set_table("gemm", table)
        for name, obj in tables.items():
            package.set_table(name, obj)
        package.write(destination)
    return destination


TIMINGS = [
    {"m": 16, "function": "f", "us": 5.0, "baseline_us": 10.0, "spread": 0.012, "runner_up": "g", "runner_up_us": 5.5},
    {"m": 256, "function": "g", "us": 8.0, "baseline_us": 10.0, "sustained_us": 9.0, "baseline_sustained_us": 9.9},
]
H200 = {
    "gpu": "NVIDIA H200",
    "compute_capability": "9.0",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11",
    "cublas": "13.1",
}


def test_ls_and_show_give_times_of_what_was_tuned(run: Run, archive: Path, tmp_path: Path) -> None:
    tuned = _with_timings(archive, tmp_path / "tuned.aot", TIMINGS)
    last = json.loads(run("ls", tuned, "--json").out)["entries"][0]["ranges"][-1]
    assert (last["us"], last["ratio"]) == (8.0, 1.25)
    assert "1.25x" in run("ls", tuned).out
    shown = run("show", tuned, UP).out
    assert "2.00x" in shown
    assert "1.2%" in shown
    assert "5.5" in shown
    assert "1.10x" in shown


def test_ls_and_show_say_which_kind_each_entry_is_for_and_where_torch_was_faster(
    run: Run, archive: Path, tmp_path: Path
) -> None:
    with Archive.open(archive) as opened:
        package = Package()
        package.add_archive(opened)
        table = opened.table("gemm")
        kinds = [{"name": name, "multiprocessors": n, "memory_gbps": 4_000} for name, n in (("H20", 78), ("H200", 132))]
        of, *rest = table["entries"]
        tuned: dict[str, Any] = {"state": "tuned", "timings": TIMINGS, "candidates": [], "invariant": None}
        names = of["functions"]
        tuned |= {"functions": names[:1], "ranges": [[None, 0]]}
        rows: list[dict[str, Any]] = [
            of | tuned | {"gpu": 0, "torch_faster": [[16, 16], [500, None]]},
            of | tuned | {"gpu": 1, "torch_faster": [[1, 400]], "invariant": [[None, 0]]},
        ]
        package.set_table("gemm", {"schema": 1, "gpus": kinds, "entries": [*rows, of, *rest]})
        tuning = [H200 | {"gpu": "H20"}, H200 | {"gpu": "H200"}]
        package.set_table("tuning", {"schema": 1, "environments": tuning})
        package.write(tmp_path / "kinds.aot")
    path = tmp_path / "kinds.aot"
    found = json.loads(run("ls", path, "--json").out)
    assert [entry["gpu"] for entry in found["entries"]] == [*kinds, None, *(None for _ in rest)]
    counts = [(entry["faster_with_torch"], entry["measured"]) for entry in found["entries"]]
    assert counts == [(1, 2), (2, 2), (0, 0), *((0, 0) for _ in rest)]
    assert (found["totals"]["faster_with_torch"], found["totals"]["measured"]) == (3, 4)
    listed = run("ls", path).out
    lines = [line.split() for line in listed.splitlines() if line.startswith(UP)]
    assert [line[1:] for line in lines] == [
        ["H20", "tuned", "1.58x", "1.25x"],
        ["H200", "tuned", "1.58x", "1.25x"],
        ["ranked", "tuned", "entries"],
    ]
    assert "torch was faster at 3 of 4 M values that were measured" in listed
    shown = json.loads(run("show", path, UP, "--json").out)["entries"]
    assert [entry["gpu"] for entry in shown] == [*kinds, None]
    assert shown[0]["torch_faster"] == [{"m_min": 16, "m_max": 16}, {"m_min": 500, "m_max": None}]
    assert [entry["tuning"] for entry in shown] == [tuning[:1], tuning[1:], []]
    assert shown[0]["invariant"] is None
    assert shown[1]["invariant"] == [{"m_min": 1, "m_max": None, "function": names[0]}]
    text = run("show", path, UP).out
    assert f"{UP} on sm_90a, H20 (78 SMs, 4000 GB/s): tuned" in text
    assert "torch was faster at M = 16, 500-: 1 of 2 that were measured" in text
    listed = text[text.index("function, of those that give equal bits at every M") :].splitlines()[1]
    assert listed.split()[0] == "1-"
    assert names[0].endswith(listed.split("...")[-1])
    assert "torch" not in run("ls", archive).out
    (built,) = json.loads(run("show", archive, UP, "--json").out)["entries"]
    ranked = {name for row in built["candidates"] for name in row["functions"]}
    assert {row["function"] for row in built["invariant"]} <= ranked
    assert run("verify", path).status == 0


def test_ls_and_show_say_where_times_are_from(run: Run, archive: Path, tmp_path: Path) -> None:
    other = H200 | {"gpu": "NVIDIA B200", "compute_capability": "10.0"}
    tuning: dict[str, Any] = {"schema": 1, "environments": [H200 | {"cute_aot": "0.1.0", "rejected": {}}, other]}
    tuned = _with_timings(archive, tmp_path / "tuned.aot", TIMINGS, tuning=tuning)
    line = "tuned on NVIDIA H200, driver 580.1, CUDA 13.0, torch 2.11, cuBLAS 13.1, cute-aot 0.1.0 "
    listed, shown = run("ls", tuned).out, run("show", tuned, UP).out
    assert line in unwrapped(listed)
    assert "NVIDIA B200" in listed
    assert line in unwrapped(shown)
    assert "NVIDIA B200" not in shown
    assert json.loads(run("ls", tuned, "--json").out)["tuning"] == tuning["environments"]
    assert json.loads(run("show", tuned, UP, "--json").out)["entries"][0]["tuning"] == tuning["environments"][:1]
    assert "NVIDIA" not in run("show", tuned, DOWN).out
    assert run("verify", tuned).status == 0


def test_a_machine_that_tuned_twice_is_said_once(run: Run, archive: Path, tmp_path: Path) -> None:
    again = H200 | {"candidates": "c1" * 32}
    tuning: dict[str, Any] = {"schema": 1, "environments": [H200, again]}
    tuned = _with_timings(archive, tmp_path / "tuned.aot", TIMINGS, tuning=tuning)
    listed, shown = run("ls", tuned).out, run("show", tuned, UP).out
    assert (listed.count("tuned on"), shown.count("tuned on")) == (1, 1)
    assert json.loads(run("show", tuned, UP, "--json").out)["entries"][0]["tuning"] == [H200, again]
    page = tmp_path / "page.html"
    assert run("report", tuned, "-o", page).status == 0
    assert page.read_text().count("<dd>NVIDIA H200, ") == 2, "in the summary and behind it"


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ({"cute-aot": "1.2", "nvidia-cutlass-dsl": "3.4"}, "built by cute-aot 1.2 with nvidia-cutlass-dsl 3.4"),
        ({"cute-aot": "unknown"}, "built by a cute-aot whose version it does not say"),
        ({}, "built by a cute-aot whose version it does not say"),
    ],
)
def test_ls_says_what_built_an_archive_and_leaves_out_versions_that_nobody_knew(
    run: Run, archive: Path, tmp_path: Path, tools: dict[str, str], said: str
) -> None:
    tuning = {"schema": 1, "environments": [H200 | {"cute_aot": "unknown", "cublas": None}]}
    build = {"schema": 1, "tools": tools}
    made = _with_timings(archive, tmp_path / "made.aot", TIMINGS, build=build, tuning=tuning)
    lines = run("ls", made).out.splitlines()
    assert said in lines
    assert "tuned on NVIDIA H200, driver 580.1, CUDA 13.0, torch 2.11" in lines


def test_ls_of_the_packages_archive_names_the_version_that_built_it(run: Run) -> None:
    listed = run("ls", runtime.universal()).out
    assert re.search(r"^built by cute-aot \d\S* with nvidia-cutlass-dsl \d\S*$", listed, re.MULTILINE)
    assert "unknown" not in listed


GOOD_TIMING = {"m": 16, "function": "f", "us": 5.0, "baseline_us": 10.0}


@pytest.mark.parametrize(
    "timings",
    [
        [1],
        [{"m": 16}],
        [GOOD_TIMING | {"us": 0}],
        [GOOD_TIMING | {"us": 1e-300}],
        [GOOD_TIMING | {"us": "5"}],
        [GOOD_TIMING | {"sustained_us": -1}],
        [GOOD_TIMING | {"m": True}],
        [GOOD_TIMING | {"function": 5}],
        [GOOD_TIMING | {"spread": "wide"}],
        [GOOD_TIMING | {"runner_up": 5}],
        [GOOD_TIMING, GOOD_TIMING],
    ],
)
def test_timings_that_make_no_sense_are_an_error(run: Run, archive: Path, tmp_path: Path, timings: list[Any]) -> None:
    odd = _with_timings(archive, tmp_path / "odd.aot", timings)
    for command in (["ls", odd], ["show", odd, UP]):
        result = run(*command)
        assert result.status == 2
        assert "unreadable timings" in result.err
    result = run("verify", odd)
    assert (result.status, result.err) == (1, "")
    assert f"gemm {UP} on sm_90a: gemm table" in result.out


@pytest.mark.parametrize(
    ("table", "obj"),
    [
        ("build", {"schema": 1, "models": 5}),
        ("build", {"schema": 1, "models": [{"gemms": 5}]}),
        ("build", {"schema": 1, "models": [{"gemms": [{"name": 5, "signature": UP}]}]}),
        ("build", {"schema": 1, "models": [{"gemms": [{"name": "up", "signature": [UP]}]}]}),
        ("build", {"schema": 1, "models": [], "tools": {"cute-aot": 1}}),
        ("tuning", {"schema": 1}),
        ("tuning", {"schema": 1, "environments": 5}),
        ("tuning", {"schema": 1, "environments": [5]}),
        ("tuning", {"schema": 1, "environments": [{"gpu": "x"}]}),
        ("tuning", {"schema": 1, "environments": [H200 | {"compute_capability": "9"}]}),
        ("tuning", {"schema": 1, "environments": [H200 | {"torch": 2}]}),
        ("tuning", {"schema": 1, "environments": [H200 | {"rejected": 5}]}),
    ],
)
def test_tables_that_make_no_sense_are_an_error(run: Run, archive: Path, tmp_path: Path, table: str, obj: Any) -> None:
    odd = _with_timings(archive, tmp_path / "odd.aot", [], **{table: obj})
    result = run("ls", odd)
    assert (result.status, result.out) == (2, "")
    assert f"table {table}: " in result.err
    result = run("verify", odd)
    assert (result.status, result.err) == (1, "")
    assert f"{table} table: " in result.out


def test_names_reach_no_terminal_with_control_characters(run: Run, archive: Path, tmp_path: Path) -> None:
    models = [{"gemms": [{"name": "\x1b[31mup\n", "signature": UP}]}]
    tuning = {"schema": 1, "environments": [H200 | {"gpu": "\x1b]0;H200\x07"}]}
    odd = _with_timings(archive, tmp_path / "odd.aot", TIMINGS, build={"schema": 1, "models": models}, tuning=tuning)
    for result in (run("ls", odd), run("show", odd, UP), run("show", odd, "none"), run("verify", odd)):
        assert all(c.isprintable() or c == "\n" for c in result.out + result.err)
    assert "\\x1b[31mup\\n" in run("ls", odd).out


@pytest.mark.parametrize("name", ["up", UP])
def test_show_finds_a_gemm_by_name_and_by_signature(run: Run, archive: Path, name: str) -> None:
    result = run("show", archive, name)
    assert result.status == 0
    assert result.out.startswith(f"{UP} on sm_90a: ranked\ngemms: up\n")
    assert json.loads(run("show", archive, name, "--json").out)["entries"][0]["key"] == UP


def test_show_lists_the_operands_of_a_gemm(run: Run, archive: Path) -> None:
    out = run("show", archive, "up").out
    assert "\ntakes: a bf16 (M, 512), b bf16 (1024, 512), d bf16 (M, 1024)\n" in out
    assert "\nwith: " not in out


def test_show_says_what_a_fused_gemm_takes(run: Run, tmp_path: Path) -> None:
    of = recording_driver.signature(
        512, 256, dtype="e4m3", d="bf16", scaling="block", epilogue="swiglu+residual", overlap="launch"
    )
    record, row = recording_driver.operands_record("f", of), recording_driver.entry(of, [(None, "f")])
    recording_driver.write_archive(tmp_path / "fused.aot", [record], [row])
    key = Signature.from_json(of).key()
    out = run("show", tmp_path / "fused.aot", key).out
    assert (
        "takes: a e4m3 (M, 256), b e4m3 (512, 256), d bf16 (M, 256), scale_a f32 (M, 2), scale_b f32 (4, 2), "
        "residual bf16 (M, 256) with: epilogue swiglu+residual, scaling block, overlap launch "
    ) in unwrapped(out)
    assert key in run("ls", tmp_path / "fused.aot").out


def test_show_says_how_many_blocks_of_rows_scales_have(run: Run, tmp_path: Path) -> None:
    """The last of them may be short."""
    of = recording_driver.signature(512, 256, dtype="e4m3", d="bf16", scaling="mxfp8")
    record, row = recording_driver.operands_record("f", of), recording_driver.entry(of, [(None, "f")])
    recording_driver.write_archive(tmp_path / "scaled.aot", [record], [row])
    out = run("show", tmp_path / "scaled.aot", Signature.from_json(of).key()).out
    assert "scale_a ue8m0 (ceil(M/128), 1024), scale_b ue8m0 (4, 1024)" in unwrapped(out)


def test_show_describes_a_function(run: Run, archive: Path) -> None:
    with Archive.open(archive) as opened:
        name = next(iter(opened.functions))
        record = opened.record(name)
    function = json.loads(run("show", archive, name, "--json").out)["function"]
    assert function["arguments"] == record["arguments"]
    assert function["launches"][0]["block"][1:] == [1, 1]
    assert function["program"]["nodes"] == len(record["program"]["nodes"])
    out = run("show", archive, name).out
    assert "aligned to 16 bytes" in out
    assert f"sha256 {record['cubin']}" in unwrapped(out)
    assert record["kernels"][0]["symbol"] in out.replace("\n  ", "")


def test_functions_are_shown_by_the_digests_that_are_listed(run: Run, archive: Path) -> None:
    short_names = json.loads(run("ls", archive, "--json").out)["short_names"]
    listed = run("ls", archive, "--functions").out
    for name, short in short_names.items():
        assert run("show", archive, short).out == run("show", archive, name).out
    used = json.loads(run("show", archive, DOWN, "--json").out)["entries"][0]["ranges"][0]["function"]
    assert f"\n{short_names[used]}  serves " in listed
    refused = run("show", archive, short_names[used], "--m", "7")
    assert (refused.status, refused.out) == (2, "")
    assert "is a function, and --m is for signatures" in refused.err


def test_a_manifests_name_comes_before_a_digest(run: Run, archive: Path, tmp_path: Path) -> None:
    short = next(iter(json.loads(run("ls", archive, "--json").out)["short_names"].values()))
    with Archive.open(archive) as opened:
        build = opened.table("build")
    for gemm in build["models"][0]["gemms"]:
        gemm["name"] = short if gemm["name"] == "down" else gemm["name"]
    named = _with_timings(archive, tmp_path / "named.aot", [], build=build)
    assert json.loads(run("show", named, short, "--json").out)["entries"][0]["key"] == DOWN


def test_show_of_an_unknown_name_suggests_the_nearest(run: Run, archive: Path) -> None:
    result = run("show", archive, "dwn")
    assert (result.status, result.out) == (2, "")
    assert "did you mean 'down'?" in result.err


def test_verify_of_a_good_archive_succeeds(run: Run, archive: Path) -> None:
    assert run("verify", archive) == (0, run("verify", archive).out, "")
    found = json.loads(run("verify", archive, "--json").out)
    assert found["ok"]
    assert {c["subject"].split()[0] for c in found["checks"]} == {
        "block",
        "blob",
        "record",
        "table",
        "function",
        "launches",
        "build",
        "tuning",
        "gemm",
    }


def test_verify_of_a_damaged_archive_has_status_1(run: Run, archive: Path, tmp_path: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[len(data) // 4] ^= 1
    (tmp_path / "bad.aot").write_bytes(data)
    result = run("verify", tmp_path / "bad.aot")
    assert (result.status, result.err) == (1, "")
    assert "checks failed" in result.out
    assert result.out.count("\n") == 3
    assert re.search(r"\n  and \d+ checks that need it\n", result.out)
    assert not json.loads(run("verify", tmp_path / "bad.aot", "--json").out)["ok"]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("", "is a folder; name an .aot file in it"),
        ("tiny.yaml", "is a manifest, not an archive; `aot build "),
        ("notes.txt", "begins with b'just tex', not b'CUTEAOT\\x00', so it is no archive; name an .aot file"),
    ],
)
@pytest.mark.parametrize("command", [["verify"], ["verify", "--json"], ["ls"], ["show", "up"], ["tune", "-o", "x.aot"]])
def test_what_is_no_archive_is_told_what_it_is(
    run: Run, tmp_path: Path, command: list[str], file: str, said: str
) -> None:
    (tmp_path / "tiny.yaml").write_text(MANIFEST)
    (tmp_path / "notes.txt").write_text("just text, and no gemms: none\n")
    result = run(command[0], tmp_path / file, *command[1:])
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith(f"error: {tmp_path / file}: {said}")


def test_verify_notices_a_record_that_no_server_would_read(run: Run, archive: Path, tmp_path: Path) -> None:
    with Archive.open(archive) as opened:
        name = next(iter(opened.functions))
        record, cubin = opened.record(name), opened.cubin(name)
    package = Package()
    package.add_function(record | {"program": {}}, cubin)
    package.write(tmp_path / "odd.aot")
    result = run("verify", tmp_path / "odd.aot")
    assert result.status == 1
    assert f"function {name}" in result.out


def _repacked(archive: Path, destination: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of an archive with every record changed."""
    with Archive.open(archive) as opened:
        package = Package()
        for name in opened.functions:
            record = opened.record(name)
            change(record)
            package.add_function(record, opened.cubin(name))
        package.set_table("gemm", opened.table("gemm"))
    package.write(destination)
    return destination


@pytest.mark.parametrize("field", ["registers", "shared_bytes", "local_bytes"])
def test_verify_holds_records_against_cubins(run: Run, archive: Path, tmp_path: Path, field: str) -> None:
    def change(record: dict[str, Any]) -> None:
        record["kernels"][0][field] += 8

    result = run("verify", _repacked(archive, tmp_path / "odd.aot", change))
    assert (result.status, result.err) == (1, "")
    assert f": {field}: " in result.out


def test_verify_notices_kernels_and_parameters_that_a_cubin_does_not_have(
    run: Run, archive: Path, tmp_path: Path
) -> None:
    def rename(record: dict[str, Any]) -> None:
        record["kernels"][0]["symbol"] = "other"

    def grow(record: dict[str, Any]) -> None:
        record["program"]["launches"][0]["parameters"][-1]["size"] += 8

    assert "its record has the kernels other" in run("verify", _repacked(archive, tmp_path / "a.aot", rename)).out
    assert "sizes of parameters" in run("verify", _repacked(archive, tmp_path / "b.aot", grow)).out


def test_verify_holds_gemm_entries_against_the_records_they_name(run: Run, archive: Path, tmp_path: Path) -> None:
    with Archive.open(archive) as opened:
        package = Package()
        package.add_archive(opened)
        table = opened.table("gemm")
    table["entries"][0]["signature"] |= {"a": "f16", "b": "f16"}
    package.set_table("gemm", table)
    package.write(tmp_path / "odd.aot")
    result = run("verify", tmp_path / "odd.aot")
    assert result.status == 1
    assert "takes A as bf16, not f16" in result.out


def test_verify_notices_a_table_that_names_a_function_that_is_not_there(
    run: Run, archive: Path, tmp_path: Path
) -> None:
    with Archive.open(archive) as opened:
        package = Package()
        package.set_table("gemm", opened.table("gemm"))
    package.write(tmp_path / "odd.aot")
    result = run("verify", tmp_path / "odd.aot")
    assert result.status == 1
    assert "is not in the archive" in result.out


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["show", "up"]])
def test_an_archive_that_is_not_there_has_status_2(run: Run, tmp_path: Path, command: list[str]) -> None:
    result = run(command[0], tmp_path / "none.aot", *command[1:])
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {tmp_path / 'none.aot'}: cannot be opened")


def test_an_archive_without_tables_can_be_listed(run: Run, tmp_path: Path) -> None:
    Package().write(tmp_path / "empty.aot")
    assert run("ls", tmp_path / "empty.aot").out.startswith("0 functions for no target")
