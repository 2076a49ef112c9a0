import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aot import build, cli, manifest
from aot.manifest import Manifest
from aot.pack import Package
from aot.targets import TARGETS
from runtime.archive import Archive
from runtime.dispatch import Dispatch

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "aot"]

MANIFEST = """\
format: 1
model: tiny
source: made up
tokens: [16, 256]
targets: [sm_90a]
defaults:
  dtypes: {a: bf16, b: bf16, d: bf16}
gemms:
  - {name: up, n: 1024, k: 512}
  - {name: down, n: 512, k: 1024, tokens: [1]}
"""
UP, DOWN = "bf16_bf16_bf16_f32_none_n1024_k512", "bf16_bf16_bf16_f32_none_n512_k1024"


class Result(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process."""

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["aot", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return Result(int(exit.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.yaml, the archive tiny.aot built from it, and the cache of that build."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny.yaml").write_text(MANIFEST)
    arguments = ["build", "tiny.yaml", "-o", "tiny.aot", "--candidates", "1", "--cache", "cache", "--no-tune"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*COMMAND, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder


@pytest.fixture
def archive(folder: Path) -> Path:
    return folder / "tiny.aot"


@pytest.fixture
def build_again(run: Run, folder: Path, tmp_path: Path) -> Run:
    """Build tiny.yaml into tmp_path, from the cache."""

    def call(*options: object) -> Result:
        arguments = ["build", folder / "tiny.yaml", "-o", tmp_path / "again.aot", "--candidates", 1]
        return run(*arguments, "--cache", folder / "cache", *options)

    return call


# --- build ---


def test_a_build_makes_an_archive_that_serves_the_manifest(archive: Path) -> None:
    with Archive.open(archive) as opened:
        dispatch = Dispatch.from_json(opened.table("gemm"), {n: e.target for n, e in opened.functions.items()})
        assert [(e.signature.key(), e.target, e.state) for e in dispatch.entries] == [
            (UP, "sm_90a", "ranked"),
            (DOWN, "sm_90a", "ranked"),
        ]
        up = dispatch.entries[0]
        assert [m for m, _ in up.candidates] == [16, 256]
        assert up.ranges[-1] == (None, up.candidates[-1][1][0])
        assert up.functions(10_000)[0] == up.candidates[-1][1][0]


def test_the_build_table_says_where_an_archive_is_from_and_not_when_or_where_it_was_made(archive: Path) -> None:
    with Archive.open(archive) as opened:
        table = opened.table("build")
    assert table["models"][0]["model"] == "tiny"
    assert [g["name"] for g in table["models"][0]["gemms"]] == ["up", "down"]
    assert set(table["ranking"]) == {"sm_90a"}
    assert "nvidia-cutlass-dsl" in table["tools"]
    assert list(table["providers"]) == ["cutlass_operators", "own"]
    assert (table["failures"], table["unserved"]) == ([], [])
    assert str(archive.parent) not in json.dumps(table)


def test_a_rebuild_compiles_nothing_and_gives_the_same_bytes(build_again: Run, archive: Path, tmp_path: Path) -> None:
    result = build_again("--no-tune", "--json")
    found = json.loads(result.out)
    assert (result.status, found["compiled"], found["failures"]) == (0, 0, {})
    assert found["cached"] == found["functions"] > 0
    assert (tmp_path / "again.aot").read_bytes() == archive.read_bytes()


def test_a_rebuild_needs_neither_torch_nor_the_dsl(folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'cutlass'])); from aot.cli import main; "
        "sys.argv[0] = 'aot'; main()"
    )
    arguments = ["build", "tiny.yaml", "-o", str(tmp_path / "again.aot"), "--candidates", "1", "--no-tune"]
    command = [sys.executable, "-c", program, *arguments, "--cache", "cache"]
    begun = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    assert time.monotonic() - begun < 3.0


def test_a_build_says_what_it_did_in_one_line(build_again: Run) -> None:
    result = build_again("--no-tune")
    assert result.status == 0
    assert result.out.count("\n") == 1
    assert "0 compiled, " in result.out
    assert result.err == ""


def test_manifests_of_several_models_share_an_archive(run: Run, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(MANIFEST.replace("tiny", "other").replace("name: up", "name: wide").replace("[1]", "[1, 8]"))
    out = tmp_path / "both.aot"
    arguments = ["--candidates", 1, "--cache", folder / "cache", "--no-tune"]
    assert run("build", folder / "tiny.yaml", other, "-o", out, *arguments).status == 0
    entries = json.loads(run("ls", out, "--json").out)["entries"]
    assert [(e["signature"], e["gemms"]) for e in entries] == [(UP, ["up", "wide"]), (DOWN, ["down"])]
    assert [row["m"] for row in json.loads(run("show", out, "down", "--json").out)["gemm"][0]["candidates"]] == [1, 8]


def test_what_no_kernel_computes_is_a_warning_and_status_1(run: Run, folder: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text(MANIFEST + "  - {name: fp8, n: 64, k: 64, dtypes: {a: e4m3, b: e4m3, d: bf16}}\n")
    arguments = ["--target", "sm_90a", "--target", "sm_120a", "--candidates", 1, "--cache", folder / "cache"]
    result = run("build", mixed, "-o", tmp_path / "mixed.aot", *arguments, "--no-tune")
    assert result.status == 1
    assert "e4m3_e4m3_bf16_f32_none_n64_k64 on sm_120a: no kernel family computes it" in result.err
    assert run("verify", tmp_path / "mixed.aot").status == 0


def test_a_function_that_is_no_gemm_can_come_along(tmp_path: Path) -> None:
    small = manifest.loads(MANIFEST)
    without, with_it = build.plan([small]), build.plan([small], functions=["rmsnorm"])
    added = set(with_it.variants()) - set(without.variants())
    assert {v.operation for v in added} == {"rmsnorm"}


def test_an_unknown_function_is_named_with_the_known_ones(build_again: Run) -> None:
    result = build_again("--function", "rmsnrm")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("error: unknown function 'rmsnrm'")
    assert "did you mean 'rmsnorm'?" in result.err


def test_a_plan_is_the_same_for_the_same_manifests() -> None:
    small = manifest.loads(MANIFEST)
    assert build.plan([small, small], list(TARGETS), 2) == build.plan([small], list(TARGETS), 2)


def test_a_build_of_nothing_is_an_error() -> None:
    with pytest.raises(build.BuildError, match="name a manifest"):
        build.plan([])


def test_where_a_gpu_is_the_build_goes_on_to_tune(
    build_again: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tuned: list[tuple[Path, Path]] = []

    def tune(source: Path, destination: Path, options: dict[str, int], as_json: bool) -> dict[str, Any]:
        tuned.append((source, destination))
        return {"points": 3}

    monkeypatch.setattr(cli, "_tune", tune)
    monkeypatch.setattr(build, "tunable", lambda targets: True)
    assert json.loads(build_again("--json").out)["tuning"] == {"points": 3}
    assert tuned == [(tmp_path / "again.aot", tmp_path / "again.aot")]
    build_again("--no-tune")
    assert len(tuned) == 1


def test_the_cache_is_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli._cache_directory() == tmp_path / "cute-aot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cli._cache_directory() == Path("/home/somebody/.cache/cute-aot")


def test_control_c_says_how_far_it_came_and_keeps_it(folder: Path, tmp_path: Path) -> None:
    arguments = ["build", str(folder / "tiny.yaml"), "-o", str(tmp_path / "x.aot"), "--cache", str(tmp_path / "cache")]
    with subprocess.Popen(
        [*COMMAND, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not list(tmp_path.rglob("*.kernel")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, "")
    assert re.fullmatch(r"error: interrupted with \d+ of \d+ kernels done; the same command continues there\n", err)
    assert list(tmp_path.rglob("*.kernel"))
    assert not (tmp_path / "x.aot").exists()


# --- ls, show, verify ---


def test_ls_lists_ranges_and_sizes(run: Run, archive: Path) -> None:
    result = run("ls", archive)
    lines = result.out.splitlines()
    assert result.status == 0
    assert lines[0].split() == ["signature", "gemms", "target", "state", "M", "function"]
    assert [line.split()[:4] for line in lines if line.startswith(DOWN)] == [[DOWN, "down", "sm_90a", "ranked"]]
    assert f"{archive.stat().st_size:,} in the file" in lines[-1]


def test_ls_as_json_agrees_with_the_archive(run: Run, archive: Path) -> None:
    found = json.loads(run("ls", archive, "--json").out)
    with Archive.open(archive) as opened:
        assert found["totals"]["functions"] == len(opened.functions)
        assert {r["function"] for e in found["entries"] for r in e["ranges"]} <= set(opened.functions)
    for entry in found["entries"]:
        assert entry["ranges"][0]["m_min"] == 1
        assert entry["ranges"][-1]["m_max"] is None


def _with_timings(archive: Path, destination: Path, timings: list[Any]) -> Path:
    with Archive.open(archive) as opened:
        package = Package()
        package.add_archive(opened)
        table = opened.table("gemm")
        table["entries"][0] |= {"state": "tuned", "timings": timings}
        package.set_table("gemm", table)
        package.write(destination)
    return destination


def test_ls_and_show_give_times_of_what_was_tuned(run: Run, archive: Path, tmp_path: Path) -> None:
    timings = [
        {"m": 16, "function": "f", "us": 5.0, "baseline_us": 10.0},
        {"m": 256, "function": "g", "us": 8.0, "baseline_us": 10.0},
    ]
    tuned = _with_timings(archive, tmp_path / "tuned.aot", timings)
    last = json.loads(run("ls", tuned, "--json").out)["entries"][0]["ranges"][-1]
    assert (last["us"], last["ratio"]) == (8.0, 1.25)
    assert "1.25x" in run("ls", tuned).out
    assert "2.00x" in run("show", tuned, UP).out


@pytest.mark.parametrize("timings", [[1], [{"m": 16}], [{"m": 16, "function": "f", "us": 0, "baseline_us": 1}]])
def test_timings_that_make_no_sense_are_an_error(run: Run, archive: Path, tmp_path: Path, timings: list[Any]) -> None:
    odd = _with_timings(archive, tmp_path / "odd.aot", timings)
    result = run("ls", odd)
    assert result.status == 2
    assert "unreadable timings" in result.err
    assert run("verify", odd).status == 1


@pytest.mark.parametrize("name", ["up", UP])
def test_show_finds_a_gemm_by_name_and_by_signature(run: Run, archive: Path, name: str) -> None:
    result = run("show", archive, name)
    assert result.status == 0
    assert result.out.startswith(f"{UP} on sm_90a: ranked\ngemms: up\n")
    assert json.loads(run("show", archive, name, "--json").out)["gemm"][0]["key"] == UP


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
    assert f"sha256 {record['cubin']}" in out
    assert record["kernels"][0]["symbol"] in out


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
        "gemm",
    }


def test_verify_of_a_damaged_archive_has_status_1(run: Run, archive: Path, tmp_path: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[len(data) // 4] ^= 1
    (tmp_path / "bad.aot").write_bytes(data)
    result = run("verify", tmp_path / "bad.aot")
    assert (result.status, result.err) == (1, "")
    assert "checks failed" in result.out
    assert not json.loads(run("verify", tmp_path / "bad.aot", "--json").out)["ok"]


def test_verify_of_what_is_no_archive_has_status_1(run: Run, folder: Path) -> None:
    assert run("verify", folder / "tiny.yaml").status == 1


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


# --- manifests and the command itself ---


def test_from_config_writes_a_manifest(run: Run, tmp_path: Path) -> None:
    config = ROOT / "tests/data/configs/llama-3.1-8b.json"
    arguments = ["--tp", 2, "--tokens", "1,16", "--target", "sm_90a", "--model", "half", "--source", "someone/llama"]
    result = run("manifest", "from-config", config, *arguments)
    written: Manifest = manifest.loads(result.out)
    assert (result.status, written.model, written.tokens, written.targets) == (0, "half", (1, 16), ("sm_90a",))
    assert run("manifest", "from-config", config, *arguments, "-o", tmp_path / "m.yaml").out == ""
    assert (tmp_path / "m.yaml").read_text() == result.out


def test_a_mistake_in_a_manifest_is_named_by_file_and_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(MANIFEST.replace("n: 1024, k: 512", "n: 1023, k: 512"))
    result = run("build", path, "-o", tmp_path / "x.aot")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {path}:9: field 'gemms[0].n'")
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["ls"],
        ["ls", "--nonsense", "x.aot"],
        ["build", "-o", "x.aot"],
        ["build", "m.yaml"],
        ["build", "m.yaml", "-o", "x.aot", "--jobs", "0"],
        ["build", "m.yaml", "-o", "x.aot", "--candidates", "many"],
        ["manifest", "from-config", "c.json", "--tp", "1", "--tokens", "1;2"],
    ],
)
def test_a_wrong_call_has_status_2(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.status == 2
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "sm_99"], "unknown target 'sm_99'"),
        (["-o", "no/such/folder/x.aot"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_built_has_status_2(build_again: Run, options: list[str], message: str) -> None:
    result = build_again(*options)
    assert (result.status, result.out) == (2, "")
    assert message in result.err


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
