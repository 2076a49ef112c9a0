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
from runtime.signature import Signature

from . import recording_driver

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
    assert re.fullmatch(r"compiling \d+ kernels? in \d+ process(es)?\n", done.stderr)
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
        assert [m for m, _ in up.candidates] == [16, 32, 64, 96, 128, 160, 192, 224, 256]
        assert up.ranges[-1] == (None, up.candidates[-1][1][0])
        assert up.functions(10_000)[0] == up.candidates[-1][1][0]


def test_the_build_table_says_where_an_archive_is_from_and_not_when_or_where_it_was_made(archive: Path) -> None:
    with Archive.open(archive) as opened:
        table = opened.table("build")
    assert table["models"][0]["model"] == "tiny"
    assert [g["name"] for g in table["models"][0]["gemms"]] == ["up", "down"]
    assert set(table["ranking"]) == {"sm_90a"}
    assert {"nvidia-cutlass-dsl", "cute-aot"} <= set(table["tools"])
    assert list(table["providers"]) == ["own"]
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
    first, last = err.splitlines()
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


@pytest.mark.parametrize(
    ("found", "status", "message"),
    [
        ({"interrupted": True}, 130, "error: interrupted; "),
        ({"unserved": ["s on sm_90a"]}, 1, "warning: s on sm_90a: no candidate computes the right result"),
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
    tune = pytest.importorskip("aot.tune")
    monkeypatch.setattr(tune, "tune_archive", lambda *_: tune.TuneReport({}, **found))
    result = run("tune", archive, "-o", tmp_path / "tuned.aot")
    assert result.status == status
    assert result.err.startswith(message)


def test_control_c_while_planning_is_quiet(build_again: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "plan", plan)
    assert build_again() == (130, "", "")


def _with_import_hook(action: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where importing one of some packages does what `action` says."""
    program = (
        "import sys\n"
        "class Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        {action}\n"
        "sys.meta_path.insert(0, Hook())\n"
        f"sys.argv = {['aot', *arguments]!r}\n"
        "from aot.__main__ import main\n"
        "main()\n"
    )
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)


def test_control_c_while_importing_is_quiet() -> None:
    done = _with_import_hook("if name == 'typer': raise KeyboardInterrupt", "ls", "x.aot")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("typer", ["--version"], "[tune]"),
        ("yaml", ["build", "manifests/llama-3.1-8b.yaml", "-o", "/tmp/never-written.aot"], "[tune]"),
        ("torch", ["tune", "in.aot", "-o", "/tmp/never-written.aot"], "[tune]"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(
    package: str, arguments: list[str], extra: str
) -> None:
    action = f"if name == {package!r}: raise ModuleNotFoundError(name, name=name)"
    done = _with_import_hook(action, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {package} is not installed; pip install 'cute-aot[build]'")
    assert extra in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_extra_that_builds_holds_the_one_that_tunes() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r"build = \[\s*\"cute-aot\[tune\]\"", text)
    assert 'aot = "aot.__main__:main"' in text


# --- outputs ---


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither compiling nor measuring is reached."""

    def reached(*_: object, **__: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(build, "compile_variants", reached)
    monkeypatch.setattr(cli, "_tune", reached)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("command", ["build", "tune"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "is a folder"),
        ("", "is a folder"),
        ("/", "is a folder"),
        ("pipe", "no regular file"),
        ("none/x.aot", "its folder does not exist"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_the_work(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    source = folder / ("tiny.yaml" if command == "build" else "tiny.aot")
    result = run(command, source, "-o", name)
    assert (result.status, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.usefixtures("no_work")
def test_an_output_that_is_an_input_is_refused(run: Run, archive: Path, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(MANIFEST)
    (tmp_path / "link.yaml").symlink_to("m.yaml")
    (tmp_path / "link.aot").symlink_to(archive)
    (tmp_path / "config.json").write_bytes((ROOT / "tests/data/configs/llama-3.1-8b.json").read_bytes())
    before = archive.read_bytes(), (tmp_path / "config.json").read_bytes()
    for arguments in (
        ["build", tmp_path / "m.yaml", "-o", tmp_path / "m.yaml"],
        ["build", tmp_path / "m.yaml", "-o", tmp_path / "link.yaml"],
        ["tune", archive, "-o", archive],
        ["tune", archive, "-o", tmp_path / "link.aot"],
        ["manifest", "from-config", tmp_path / "config.json", "--tp", 1, "--tokens", 1, "-o", tmp_path / "config.json"],
    ):
        result = run(*arguments)
        assert (result.status, result.out) == (2, "")
        assert "is an input too" in result.err
    assert (tmp_path / "m.yaml").read_text() == MANIFEST
    assert (archive.read_bytes(), (tmp_path / "config.json").read_bytes()) == before


def test_a_cache_without_a_name_is_refused(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("build", folder / "tiny.yaml", "-o", tmp_path / "x.aot", "--cache", "")
    assert (result.status, result.out) == (2, "")
    assert "the cache directory has no name" in result.err


@pytest.mark.parametrize("command", [["ls"], ["ls", "--json"], ["verify"]])
def test_a_full_disk_behind_standard_output_is_one_line(archive: Path, command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        arguments = [*COMMAND, command[0], str(archive), *command[1:]]
        done = subprocess.run(arguments, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: standard output cannot be written (No space left on device); redirect it elsewhere\n"
    )


def test_a_closed_standard_output_is_one_line(archive: Path) -> None:
    command = f"{sys.executable} -m aot ls {archive} >&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: standard output is closed")


def test_a_closed_standard_error_keeps_errors_out_of_the_output(tmp_path: Path) -> None:
    command = f"{sys.executable} -m aot ls {tmp_path}/none.aot 2>&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


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
    {"m": 256, "function": "g", "us": 8.0, "baseline_us": 10.0},
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


def test_ls_and_show_say_where_times_are_from(run: Run, archive: Path, tmp_path: Path) -> None:
    other = H200 | {"gpu": "NVIDIA B200", "compute_capability": "10.0"}
    tuning = {"environments": [H200 | {"cute_aot": "0.1.0", "rejected": {}}, other]}
    tuned = _with_timings(archive, tmp_path / "tuned.aot", TIMINGS, tuning=tuning)
    line = "tuned on NVIDIA H200, driver 580.1, CUDA 13.0, torch 2.11, cuBLAS 13.1, cute-aot 0.1.0\n"
    listed, shown = run("ls", tuned).out, run("show", tuned, UP).out
    assert line in listed
    assert "NVIDIA B200" in listed
    assert line in shown
    assert "NVIDIA B200" not in shown
    assert json.loads(run("ls", tuned, "--json").out)["tuning"] == tuning["environments"]
    assert json.loads(run("show", tuned, UP, "--json").out)["gemm"][0]["tuning"] == tuning["environments"][:1]
    assert "NVIDIA" not in run("show", tuned, DOWN).out
    assert run("verify", tuned).status == 0


GOOD_TIMING = {"m": 16, "function": "f", "us": 5.0, "baseline_us": 10.0}


@pytest.mark.parametrize(
    "timings",
    [
        [1],
        [{"m": 16}],
        [GOOD_TIMING | {"us": 0}],
        [GOOD_TIMING | {"us": 10**400}],
        [GOOD_TIMING | {"baseline_us": 10**400}],
        [GOOD_TIMING | {"us": 1e-300}],
        [GOOD_TIMING | {"us": "5"}],
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
        ("build", {"models": 5}),
        ("build", {"models": [{"gemms": 5}]}),
        ("build", {"models": [{"gemms": [{"name": 5, "signature": UP}]}]}),
        ("build", {"models": [{"gemms": [{"name": "up", "signature": [UP]}]}]}),
        ("build", {"models": [], "tools": {"cute-aot": 1}}),
        ("tuning", {}),
        ("tuning", {"environments": 5}),
        ("tuning", {"environments": [5]}),
        ("tuning", {"environments": [{"gpu": "x"}]}),
        ("tuning", {"environments": [H200 | {"compute_capability": "9"}]}),
        ("tuning", {"environments": [H200 | {"torch": 2}]}),
        ("tuning", {"environments": [H200 | {"rejected": 5}]}),
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
    tuning = {"environments": [H200 | {"gpu": "\x1b]0;H200\x07"}]}
    odd = _with_timings(archive, tmp_path / "odd.aot", TIMINGS, build={"models": models}, tuning=tuning)
    for result in (run("ls", odd), run("show", odd, UP), run("show", odd, "none"), run("verify", odd)):
        assert all(c.isprintable() or c == "\n" for c in result.out + result.err)
    assert "\\x1b[31mup\\n" in run("ls", odd).out


@pytest.mark.parametrize("name", ["up", UP])
def test_show_finds_a_gemm_by_name_and_by_signature(run: Run, archive: Path, name: str) -> None:
    result = run("show", archive, name)
    assert result.status == 0
    assert result.out.startswith(f"{UP} on sm_90a: ranked\ngemms: up\n")
    assert json.loads(run("show", archive, name, "--json").out)["gemm"][0]["key"] == UP


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
        "residual bf16 (M, 256)\nwith: epilogue swiglu+residual, scaling block, overlap launch\n"
    ) in out
    assert key in run("ls", tmp_path / "fused.aot").out


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
    if arguments:
        assert result.err.startswith("error: ")
        assert result.err.count("\n") == 1


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


def test_a_build_that_can_serve_nothing_names_what_and_where(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "fused.yaml").write_text(MANIFEST.replace("defaults:\n", "defaults:\n  epilogue: swiglu\n"))
    arguments = ["-o", tmp_path / "x.aot", "--target", "sm_80", "--cache", folder / "cache"]
    result = run("build", tmp_path / "fused.yaml", *arguments)
    assert (result.status, result.out) == (2, "")
    assert "error: no kernel family computes bf16_bf16_bf16_f32_swiglu_" in result.err
    assert "on sm_80, nor for the other 1; choose another target" in result.err


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
