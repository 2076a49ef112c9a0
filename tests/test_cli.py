import dataclasses
import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aot import build, selection
from aot.cli import commands
from aot.compile import cache
from aot.compile.compiler import BuildReport
from aot.pack import build_table
from aot.problem import manifest
from aot.problem.manifest import Manifest
from aot.search import m_values
from aot.search.targets import TARGETS
from aot.search.variants import Variant
from aot.tune import run as run_of_tune
from aot.tune.options import TuneOptions
from aot.tune.write import TuneReport
from runtime.container.archive import Archive
from runtime.gemm.operation import GEMM
from runtime.tables.dispatch import Dispatch

from .command_line import ALONE, COMMAND, DOWN, MANIFEST, ROOT, UP, Result, Run, hear_control_c


@pytest.fixture
def build_again(run: Run, folder: Path, tmp_path: Path) -> Run:
    """Build tiny.yaml into tmp_path, from the cache."""

    def call(*options: object) -> Result:
        arguments = ["build", folder / "tiny.yaml", "-o", tmp_path / "again.aot", "--candidates", 1]
        return run(*arguments, "--cache", folder / "cache", *options)

    return call


def _cpu_time_of_children_s() -> float:
    """Of those that have ended; unlike the time that passes it is the same on a machine that others share."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- build ---


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
        table = opened.table("build")
    assert table["models"][0]["model"] == "tiny"
    assert [g["name"] for g in table["models"][0]["gemms"]] == ["up", "down"]
    assert set(table["ranking"]) == {"sm_90a"}
    assert {"nvidia-cutlass-dsl", "nvidia-cutlass-operators", "cute-aot", "python", "zstd"} <= set(table["tools"])
    families = ["cutlass_operators.sm90_static_persistent", "own.sm90_persistent", "own.sm90_small_m"]
    assert list(table["providers"]) == families
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
    assert ": none for sm_120a has the element types e4m3, e4m3, bf16; sm_90a, sm_100a, sm_103a can; " in result.err
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


def test_the_cache_is_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_directory() == tmp_path / "cute-aot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.default_directory() == Path("/home/somebody/.cache/cute-aot")


def test_without_a_home_nothing_is_cached_and_the_build_goes_on(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert cache.default_directory() is None
    monkeypatch.setattr(build, "build", _asks_the_cache)
    result = run("build", folder / "tiny.yaml", "-o", tmp_path / "x.aot")
    assert result.err.splitlines() == [
        "warning: cache: there is no home directory to keep it in, and the build goes on without a cache; "
        "name a directory",
        "error: asked",
    ]


def _asks_the_cache(work: Any, output: Path, cache: Any, *_: Any) -> None:
    for _again in range(2):
        cache.get("ab" * 32)
    raise selection.BuildError("asked")


def test_a_cache_that_cannot_be_written_is_one_warning_and_the_archive_is_the_same(
    run: Run, folder: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that lacks an entry, on a read-only file system."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    shutil.copytree(folder / "cache", tmp_path / "cache")
    for entry in [*(tmp_path / "cache").rglob("*.contents"), *sorted((tmp_path / "cache").rglob("*.kernel"))[:2]]:
        entry.unlink()
    arguments = ["--candidates", 1, "--cache", tmp_path / "cache", "--no-tune"]
    monkeypatch.setattr("aot.compile.cache.Cache._make", refuse)
    result = run("build", folder / "tiny.yaml", "-o", tmp_path / "again.aot", *arguments)
    assert result.status == 0
    warnings = [line for line in result.err.splitlines() if not line.startswith("compiling ")]
    assert len(warnings) == 1
    assert re.fullmatch(r"warning: cache: .* cannot be written \(Read-only .*\), and the build goes on .*", warnings[0])
    assert (tmp_path / "again.aot").read_bytes() == archive.read_bytes()


def test_a_cache_that_is_named_and_no_folder_is_an_error(build_again: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = build_again("--no-tune", "--cache", tmp_path / "file")
    assert (result.status, result.out) == (2, "")
    assert result.err == f"error: {tmp_path / 'file'}: cannot be the build cache: it is no folder; name a folder\n"


def test_a_cache_that_others_may_write_to_is_refused(build_again: Run, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "cache", tmp_path / "cache")
    (tmp_path / "cache").chmod(0o775)
    result = build_again("--no-tune", "--cache", tmp_path / "cache")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {tmp_path / 'cache'}: ")
    assert f"chmod -R go-w {tmp_path / 'cache'}" in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "again.aot").exists()


def _build_in(scratch: Path, folder: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["build", folder / "tiny.yaml", "-o", tmp_path / "x.aot", "--cache", tmp_path / "cache", "--no-tune"]
    environment = os.environ | {"TMPDIR": str(scratch)}
    command = [*COMMAND, *map(str, arguments), "--candidates", "1"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB; making one takes root."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(path)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_scratch_folder_without_space_ends_a_build_that_writes_nothing(
    folder: Path, tmp_path: Path, small_disk: Path
) -> None:
    (small_disk / "large").write_bytes(bytes(5 << 20))
    done = _build_in(small_disk, folder, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {small_disk}: a file of 4,194,304 bytes cannot be written to compile in (No space")
    assert re.search(r"; 1,0\d\d,\d{3} bytes are left there\)", last)
    assert not (tmp_path / "x.aot").exists()
    assert os.listdir(small_disk) == ["large"]


def test_a_scratch_folder_that_is_none_ends_a_build_that_writes_nothing(folder: Path, tmp_path: Path) -> None:
    done = _build_in(tmp_path / "none", folder, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {tmp_path / 'none'}: a file of 4,194,304 bytes cannot be written to compile in" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x.aot").exists()


def test_control_c_says_how_far_it_came_and_keeps_it(folder: Path, tmp_path: Path) -> None:
    arguments = ["build", str(folder / "tiny.yaml"), "-o", str(tmp_path / "x.aot"), "--cache", str(tmp_path / "cache")]
    with subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_control_c,
    ) as process:
        while process.poll() is None and not list(tmp_path.rglob("*.kernel")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, "")
    first, *_, last = err.splitlines()
    assert first.startswith("compiling ")
    assert re.fullmatch(r"error: interrupted with \d+ of \d+ kernels done; the same command continues there", last)
    assert list(tmp_path.rglob("*.kernel"))
    assert not (tmp_path / "x.aot").exists()


def test_termination_is_like_control_c_and_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    arguments = ["build", str(folder / "tiny.yaml"), "-o", str(tmp_path / "x.aot"), "--cache", str(tmp_path / "cache")]
    environment = os.environ | {"TMPDIR": str(tmp_path / "scratch")}
    with subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not list(tmp_path.rglob("worker-*.log")):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 143
    assert b"error: interrupted with " in err
    assert b"Traceback" not in err
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("what", ["missing", "text", "damaged"])
def test_tune_says_what_is_wrong_with_its_input_before_it_imports_torch(
    run: Run, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setitem(sys.modules, "aot.tune.run", None)
    source = tmp_path / "in.aot"
    if what == "text":
        source.write_text("not an archive, but long enough to be read as one\n" * 9)
    elif what == "damaged":
        data = bytearray(archive.read_bytes())
        data[100] ^= 1
        source.write_bytes(data)
    result = run("tune", source, "-o", tmp_path / "tuned.aot")
    assert (result.status, result.out) == (2, "")
    said = {"missing": "cannot be opened", "text": "begins with ", "damaged": "block 0 "}[what]
    assert result.err.startswith(f"error: {source}: {said}")
    assert not (tmp_path / "tuned.aot").exists()


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
    result = run("tune", archive, "-o", tmp_path / "t.aot", "--tolerance", "0.05", "--finalists", "7", "--no-sustained")
    assert "2.000x the baseline" in result.out
    assert run("tune", archive, "-o", tmp_path / "t.aot").status == 0
    assert [(o.tolerance, o.finalists, o.sustained) for o in seen] == [(0.05, 7, False), (0.01, 4, True)]


def test_control_c_while_selecting_is_quiet(build_again: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def select(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(selection, "select", select)
    assert build_again() == (130, "", "")


def test_a_cache_without_a_name_is_refused(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("build", folder / "tiny.yaml", "-o", tmp_path / "x.aot", "--cache", "")
    assert (result.status, result.out) == (2, "")
    assert "the cache directory has no name" in result.err


# --- manifests and the command itself ---


def test_from_config_writes_a_manifest(run: Run, tmp_path: Path) -> None:
    config = ROOT / "tests/data/configs/llama-3.1-8b.json"
    arguments = ["--tp", 2, "--tokens", "1,16", "--target", "sm_90a", "--model", "half", "--source", "someone/llama"]
    result = run("manifest", "from-config", config, *arguments)
    written: Manifest = manifest.loads(result.out)
    assert (result.status, written.model, written.tokens, written.targets) == (0, "half", (1, 16), ("sm_90a",))
    assert run("manifest", "from-config", config, *arguments, "-o", tmp_path / "m.yaml").out == ""
    assert (tmp_path / "m.yaml").read_text() == result.out


def test_from_config_keeps_the_machines_path_out_and_names_the_model(run: Run, tmp_path: Path) -> None:
    config = ROOT / "tests/data/configs/llama-3.1-8b.json"
    (tmp_path / "Mine").mkdir()
    (tmp_path / "Mine" / "config.json").write_bytes(config.read_bytes())
    for path, model in ((config, "llama-3.1-8b-tp8"), (tmp_path / "Mine" / "config.json", "mine-tp8")):
        written = manifest.loads(run("manifest", "from-config", path, "--tp", 8, "--tokens", 1).out)
        assert written.model == model
        assert written.source.startswith(f"{path.name} at tp 8: ")


def test_from_config_targets_what_has_kernels_of_the_type(run: Run) -> None:
    config = ROOT / "tests/data/configs/llama-3.1-8b.json"
    result = run("manifest", "from-config", config, "--tp", 1, "--tokens", 1, "--dtype", "e4m3", "--scaling", "none")
    assert manifest.loads(result.out).targets == ("sm_90a", "sm_100a", "sm_103a")


def test_from_config_fuses_and_scales(run: Run) -> None:
    config = ROOT / "tests/data/configs/llama-3.1-8b.json"
    arguments = ["--tp", 1, "--tokens", 1, "--target", "sm_90a", "--dtype", "e4m3", "--scaling", "block", "--fuse"]
    written = manifest.loads(run("manifest", "from-config", config, *arguments).out)
    assert written.model == "llama-3.1-8b-e4m3-fused"
    assert [g.signature.epilogue for g in written.gemms] == ["none", "residual", "swiglu", "residual", "none"]
    assert {g.signature.scaling for g in written.gemms} == {"block", "none"}


@pytest.fixture
def from_config(run: Run) -> Run:
    """Write the manifest of a small config."""
    config = ROOT / "tests/data/configs/llama-3.1-8b.json"
    arguments = ["--tp", 1, "--tokens", 1, "--target", "sm_90a", "--dtype", "bf16"]
    return lambda *options: run("manifest", "from-config", config, *arguments, *options)


def test_from_config_replaces_a_file_only_by_force(from_config: Run, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("mine")
    refused = from_config("-o", path)
    assert (refused.status, refused.out) == (2, "")
    assert refused.err == f"error: {path}: is there already; --force replaces it, or name another output\n"
    assert path.read_text() == "mine"
    assert from_config("-o", path, "--force").status == 0
    assert manifest.load(path).model == "llama-3.1-8b"
    assert os.listdir(tmp_path) == ["m.yaml"]


def test_from_config_leaves_the_file_that_was_there_when_writing_fails(
    from_config: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("mine")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("aot.problem.manifest.writer.os.replace", full)
    result = from_config("-o", path, "--force")
    assert (result.status, result.out) == (2, "")
    assert "cannot be written (No space left on device)" in result.err
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["m.yaml"]


def test_from_config_prints_where_the_output_is_a_dash(
    from_config: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_config("-o", "-").out == from_config().out != ""
    assert os.listdir() == []


def test_from_config_spreads_experts_over_ranks(run: Run) -> None:
    config = ROOT / "tests/data/configs/qwen3-30b-a3b.json"
    result = run("manifest", "from-config", config, "--tp", 2, "--ep", 4, "--tokens", 1, "--dtype", "bf16")
    written = manifest.loads(result.out)
    assert (result.status, result.err, written.model) == (0, "", "qwen3-30b-a3b-tp2-ep4")
    assert {use.signature.groups for use in written.uses if use.signature.operation == "grouped_gemm"} == {32}


def test_from_config_warns_of_experts_on_standard_error(run: Run) -> None:
    config = ROOT / "tests/data/configs/qwen3-30b-a3b.json"
    result = run("manifest", "from-config", config, "--no-experts", "--tokens", 1, "--dtype", "bf16")
    assert (result.status, manifest.loads(result.out).layers) == (0, 48)
    assert result.err.startswith("warning: qwen3-30b-a3b.json: the experts are left out")
    assert result.err.count("\n") == 1


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
        ["ls", "x.aot", "two\nlines"],
        ["manifest", "from-config", "c.json", "--tp", "1", "--tokens", "1;2"],
    ],
)
def test_a_wrong_call_has_status_2(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.status == 2
    assert "Traceback" not in result.err
    if arguments:
        assert result.err.startswith("error: ")
        assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "x.aot", "qkv", "--m", "16", "--m", "0"], "'--m' must be at least 1, found '0'"),
        (["show", "x.aot", "qkv", "--m", "3000000000"], "'--m' must be at most 2147483647, found '3000000000'"),
        (["show", "x.aot", "qkv", "--m", "1,16"], "'--m' must be an integer, found '1,16'"),
        (["tune", "x.aot", "-o", "y.aot", "--tolerance", "1%"], "'--tolerance' must be a number, found '1%'"),
    ],
)
def test_a_number_that_cannot_be_is_named_with_what_it_may_be(run: Run, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    shown = f"error: {message}; `aot {arguments[0]} --help` shows how to call it\n"
    assert result == (2, "", shown)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--finalists", "0", "'--finalists'"),
        ("--repeats", "0", "'--repeats'"),
        ("--seed", "-1", "'--seed'"),
        ("--seed", "99999999999999999999", "'--seed'"),
        ("--tolerance", "1.5", "'--tolerance'"),
        ("--tolerance", "nan", "tolerance"),
    ],
)
def test_an_option_of_tune_that_makes_no_sense_is_named(
    run: Run, archive: Path, tmp_path: Path, option: str, value: str, message: str
) -> None:
    result = run("tune", archive, "-o", tmp_path / "x.aot", option, value)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "sm_90"], "unknown target 'sm_90'; did you mean 'sm_90a'? known: sm_80, "),
        (["--target", "SM90A"], "unknown target 'SM90A'; did you mean 'sm_90a'? known: sm_80, "),
        (["--target", "gfx942"], "unknown target 'gfx942'; known: sm_80, "),
        (["-o", "no/such/folder/x.aot"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_built_has_status_2(build_again: Run, options: list[str], message: str) -> None:
    result = build_again(*options)
    assert (result.status, result.out) == (2, "")
    assert message in result.err


def test_manifest_and_base_are_told_apart(build_again: Run, folder: Path, tmp_path: Path, archive: Path) -> None:
    result = build_again("--base", folder / "tiny.yaml")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {folder / 'tiny.yaml'}: is a manifest, not an archive; ")
    result = build_again(archive)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {archive}: is an archive, not a manifest; give it to `aot build --base`")


def test_a_build_that_can_serve_nothing_names_what_and_where(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "fused.yaml").write_text(MANIFEST.replace("defaults:\n", "defaults:\n  epilogue: swiglu\n"))
    arguments = ["-o", tmp_path / "x.aot", "--target", "sm_80", "--cache", folder / "cache"]
    result = run("build", tmp_path / "fused.yaml", *arguments)
    assert (result.status, result.out) == (2, "")
    assert f"error: {tmp_path / 'fused.yaml'}:10: up: bf16_bf16_bf16_f32_swiglu_" in result.err
    assert "on sm_80: no kernel family computes it: none for sm_80 has the epilogue swiglu; sm_90a can" in result.err
    assert result.err.endswith("; nor is there a kernel for the other 1\n")


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
