import ast
import dataclasses
import hashlib
import itertools
import json
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot import files
from aot.compile import compiler
from aot.compile.cache import Cache, Entry
from aot.compile.compiler import SOURCES, BuildReport, CompileError, Event, Kernel, compile_variants
from aot.compile.toolchain import Toolchain, ToolchainError
from aot.search.provider import Compilable, provider
from aot.search.variants import Variant, choices
from runtime.gemm.signature import Signature
from runtime.program.record import Record

from .command_line import hear_control_c
from .made_up_kernel import kernel as made_up

ROOT = Path(__file__).resolve().parents[1]
SIGNATURE = Signature("bf16", "bf16", "bf16", "f32", "none", 512, 512)

# Stands in for aot.compile.lower in workers; a variant's config says what is to happen.
FAKE = """
import json, os, signal, sys, time
from types import SimpleNamespace
from runtime.errors import AotError
from tests.made_up_kernel import kernel

def lower(variant):
    print("some noise on", "standard output", flush=True)
    match variant.options["do"]:
        case "refuse": raise AotError("this cannot be")
        case "raise": raise ValueError("a long story\\n  whose end matters  \\n\\n")
        case "leave": sys.exit("no reason")
        case "exit": os._exit(7)
        case "crash":
            print("Fatal: the wings fell off", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "killed once":
            if not os.path.exists(os.environ["KILLED_BEFORE"]):
                open(os.environ["KILLED_BEFORE"], "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            print("hanging in", os.getpid(), flush=True)
            time.sleep(600)
        case "fill": raise ValueError("what was written is not there")
        case "temporary":
            import tempfile
            raise ValueError("cannot write " + tempfile.mkdtemp() + "/x")
    environment = {n: v for n, v in os.environ.items() if n.startswith("CU")}
    said = json.dumps({"pid": os.getpid(), "environment": environment})
    family = f"{variant.provider}.{variant.family}"
    record, cubin = kernel(variant.name(), variant.target, family, said.encode() + b"|")
    return SimpleNamespace(record=record, cubin=cubin)
"""

Compile = Callable[..., BuildReport]


def fake(do: str = "well", number: int = 0, target: str = "sm_90a") -> Variant:
    return Variant("own", "sm90_small_m", target, choices(do=do, number=number), ("bf16",) * 3, operation="gemm")


def heard(kernel: Kernel) -> dict[str, Any]:
    """What FAKE says of the process that it ran in."""
    text = kernel.cubin[kernel.cubin.index(b'{"pid"') :].partition(b"|")[0]
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def compile_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    """`compile_variants` with FAKE in the workers."""
    (tmp_path / "fake_lowering.py").write_text(FAKE)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.syspath_prepend(tmp_path)
    cache = Cache(tmp_path / "cache")

    def run(variants: list[Variant], jobs: int = 1, cache: Cache = cache, **options: Any) -> BuildReport:
        return compile_variants(variants, cache, jobs, lowering="fake_lowering", **options)

    return run


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


# --- the real compiler ---


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Variant], Cache, BuildReport]:
    variants = provider("cutlass_operators").variants("sm_90a", SIGNATURE)[:2]
    cache = Cache(tmp_path_factory.mktemp("real") / "cache")
    return variants, cache, compile_variants(variants, cache, jobs=2)


def test_variants_compile_in_workers(real: tuple[list[Variant], Cache, BuildReport]) -> None:
    variants, _, report = real
    assert report.failures == {}
    assert (report.compiled, report.cached) == (2, 0)
    assert list(report.kernels) == variants
    for variant, kernel in report.kernels.items():
        assert Record.from_json(kernel.record).name == variant.name()
        assert hashlib.sha256(kernel.cubin).hexdigest() == kernel.record["cubin"]


def test_a_rebuild_compiles_nothing(real: tuple[list[Variant], Cache, BuildReport]) -> None:
    variants, cache, report = real
    again = compile_variants(variants, cache, lowering="no_such_module")
    assert (again.compiled, again.cached, again.failures) == (0, 2, {})
    assert again.kernels == report.kernels


def test_an_illegal_variant_is_reported_and_stops_nobody(real: tuple[list[Variant], Cache, BuildReport]) -> None:
    variants, cache, _ = real
    illegal = dataclasses.replace(variants[0], config=choices(tile_m=7))
    report = compile_variants([illegal, *variants], cache, jobs=1)
    assert list(report.kernels) == variants
    assert list(report.failures) == [illegal]
    assert report.failures[illegal].startswith("cannot build ")


# --- the key ---


def test_the_key_follows_wheels_providers_sources_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(contents: str = "4.8.1 ab") -> str:
        return compiler._key_maker(Toolchain({"anything": "1"}, {"nvidia-cutlass-dsl": contents}), {})(fake())

    keys = [key(), key("4.8.1 ac")]
    monkeypatch.setattr(compiler.lower, "COMPILE_OPTIONS", ("Other",))
    keys.append(key())
    monkeypatch.setattr(compiler.ir, "EXTRACTION_VERSION", 999)
    keys.append(key())
    monkeypatch.setattr(compiler, "SOURCES", SOURCES[1:])
    keys.append(key())
    monkeypatch.setattr("aot.providers.own.Own.source_digest", lambda self, family: "other")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def _imports(file: Path) -> set[Path]:
    """The files of this project that `file` imports anywhere in it."""
    package = file.parent.relative_to(ROOT).parts
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) + 1 - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            names += [base, *([*base, alias.name] for alias in node.names)]
    paths = (ROOT.joinpath(*name) for name in names)
    files = {file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()}
    files.discard(ROOT / "runtime/__init__.py")  # which only gathers names
    return {file for file in files if len(ast.parse(file.read_text()).body) > 1}


def test_every_file_of_this_project_that_a_worker_runs_is_in_the_key() -> None:
    found, new = set[Path](), {ROOT / "aot/compile/lower.py"}
    while new:
        found |= new
        new = {imported for file in new for imported in _imports(file)} - found
    names = {file.relative_to(ROOT).as_posix() for file in found}
    assert {name for name in names if not name.startswith("aot/providers/")} - {"runtime/errors.py"} == set(SOURCES)


def test_without_the_dsl_nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("aot.compile.toolchain.distributions", lambda: [])
    with pytest.raises(ToolchainError, match="pip install"):
        compile_variants([fake()], Cache(tmp_path))


# --- workers ---


def test_workers_know_their_architecture_and_see_no_gpu(
    compile_fakes: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    variants = [fake(target=t) for t in ("sm_90a", "sm_100a")]
    report = compile_fakes(variants)
    for variant, kernel in report.kernels.items():
        environment = heard(kernel)["environment"]
        assert environment["CUTE_DSL_ARCH"] == variant.target
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        assert "CUTE_DSL_LINEINFO" not in environment


def test_a_worker_compiles_for_one_target_only(compile_fakes: Compile) -> None:
    variants = [fake(number=i, target=t) for t in ("sm_80", "sm_90a", "sm_100a") for i in range(8)]
    report = compile_fakes(variants, jobs=2)
    assert list(report.kernels) == variants
    pids: dict[str, set[int]] = {}
    for variant, kernel in report.kernels.items():
        pids.setdefault(variant.target, set()).add(heard(kernel)["pid"])
    assert not any(a & b for a, b in itertools.combinations(pids.values(), 2))
    assert sum(map(len, pids.values())) <= 6  # a worker starts only where it is worth its start


def test_kernels_of_others_are_compiled_in_a_process_of_their_own(
    compile_fakes: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "source_digest", lambda variant: "ab")
    others = [dataclasses.replace(fake(number=i), provider="others") for i in (2, 3)]
    report = compile_fakes([fake(number=1), *others], jobs=1)
    first, second, third = (heard(kernel)["pid"] for kernel in report.kernels.values())
    assert first != second == third


def test_a_variant_given_twice_is_compiled_once(compile_fakes: Compile) -> None:
    assert compile_fakes([fake(), fake()]).compiled == 1


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("refuse", "this cannot be"),
        ("raise", "ValueError: whose end matters"),
        ("leave", "SystemExit: no reason"),
        ("exit", "its worker ended with exit status 7; its last words: some noise on standard output"),
        ("crash", "its worker was killed by SIGSEGV; its last words: Fatal: the wings fell off"),
        ("temporary", "ValueError: cannot write ..."),
    ],
)
def test_what_goes_wrong_with_a_variant_is_its_own_affair(compile_fakes: Compile, do: str, reason: str) -> None:
    variants = [fake(number=0), fake(do), fake(number=1)]
    report = compile_fakes(variants)
    assert list(report.kernels) == [variants[0], variants[2]]
    assert list(report.failures) == [variants[1]]
    assert report.failures[variants[1]].startswith(reason)


def test_a_hanging_variant_is_given_up(compile_fakes: Compile) -> None:
    report = compile_fakes([fake("hang"), fake()], timeout_s=1.0)
    assert list(report.kernels) == [fake()]
    assert report.failures[fake("hang")].startswith("no result after 1 s")


def test_failures_are_tried_again_next_time(compile_fakes: Compile) -> None:
    assert compile_fakes([fake("refuse")]).failures
    assert compile_fakes([fake("refuse")]).failures


def test_a_variant_whose_worker_was_killed_is_given_to_another_once(
    compile_fakes: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a system that was short of memory, which says nothing about the variant."""
    monkeypatch.setenv("KILLED_BEFORE", str(tmp_path / "killed"))
    once, always = fake("killed once"), fake("killed")
    report = compile_fakes([once, always])
    assert set(report.kernels) == {once}
    assert set(report.failures) == {always}
    assert report.failures[always].startswith("its worker was killed by SIGKILL")


def test_a_refusal_costs_no_worker_and_a_crash_costs_one(compile_fakes: Compile) -> None:
    def pids(do: str) -> set[int]:
        variants = [fake(number=1), fake(do), fake(number=2)]
        return {heard(k)["pid"] for k in compile_fakes(variants, cache=Cache(f"{do}-cache")).kernels.values()}

    assert len(pids("refuse")) == 1
    assert len(pids("raise")) == 2


def _forge(cache: Cache, entry: Entry) -> None:
    """Put what is under the key of `fake()` there, as whoever may write to the directory can."""
    tools = compiler.toolchain(Cache(None))
    cache.put(compiler._key_maker(tools, {})(fake()), entry)


def _made_for(variant: Variant, **changes: Any) -> Entry:
    record, cubin = made_up(variant.name(), variant.target, f"{variant.provider}.{variant.family}")
    return Entry(record | changes, cubin)


def test_an_entry_made_for_the_variant_is_served(compile_fakes: Compile, tmp_path: Path) -> None:
    _forge(Cache(tmp_path / "cache"), _made_for(fake()))
    assert compile_fakes([fake()]).cached == 1


@pytest.mark.parametrize(
    "entry",
    [
        _made_for(fake(number=1)),
        _made_for(fake(target="sm_100a")),
        _made_for(fake(), name=fake(number=1).name()),
        _made_for(fake(), target="sm_100a"),
        _made_for(fake(), family="own.other"),
        _made_for(fake(), cubin="0" * 64),
        _made_for(fake(), kernels=[{"symbol": "other", "registers": 32, "shared_bytes": 0, "local_bytes": 0}]),
        _made_for(fake(), program={}),
        dataclasses.replace(_made_for(fake()), record={"block": 1}),
        Entry(_made_for(fake()).record | {"cubin": hashlib.sha256(b"no cubin").hexdigest()}, b"no cubin"),
    ],
)
def test_an_entry_of_something_else_is_reported_once_and_compiled_again(
    compile_fakes: Compile, tmp_path: Path, entry: Entry
) -> None:
    said: list[str] = []
    cache = Cache(tmp_path / "cache", said.append)
    _forge(cache, entry)
    report = compile_fakes([fake()], cache=cache)
    assert (report.compiled, report.cached, list(report.failures)) == (1, 0, [])
    assert Record.from_json(report.kernels[fake()].record).name == fake().name()
    assert len(said) == 1
    assert "it was removed" in said[0]
    assert compile_fakes([fake()]).cached == 1


def test_a_damaged_entry_is_reported_and_compiled_again(compile_fakes: Compile, tmp_path: Path) -> None:
    variants, events, said = [fake(), fake(number=1)], list[Event](), list[str]()
    compile_fakes(variants)
    path = sorted((tmp_path / "cache").rglob("*.kernel"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    again = compile_fakes(variants, cache=Cache(tmp_path / "cache", said.append), on_event=events.append)
    assert (again.compiled, again.cached) == (1, 1)
    assert sorted(e.outcome for e in events) == ["cached", "compiled"]
    assert len(said) == 1
    assert compile_fakes(variants).cached == 2


def test_without_a_cache_that_works_kernels_are_compiled_all_the_same(compile_fakes: Compile, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").touch()
    for cache in (Cache(tmp_path / "file", said.append), Cache(None, said.append)):
        report = compile_fakes([fake(number=i) for i in range(3)], cache=cache)
        assert (report.compiled, len(report.kernels)) == (3, 3)
    assert len(said) == 2


def test_every_variant_ends_in_one_event(compile_fakes: Compile) -> None:
    compile_fakes([fake()])
    events: list[Event] = []
    compile_fakes([fake(), fake(number=1), fake("raise")], on_event=events.append)
    assert {e.variant: e.outcome for e in events} == {
        fake(): "cached",
        fake(number=1): "compiled",
        fake("raise"): "failed",
    }


def test_a_build_says_once_what_it_will_compile(compile_fakes: Compile) -> None:
    said: list[tuple[int, int]] = []
    variants = [fake(number=i) for i in range(3)]
    for _ in range(2):
        compile_fakes(variants, jobs=2, on_start=lambda *numbers: said.append(numbers))
    compile_fakes([*variants, fake(number=4)], jobs=2, on_start=lambda *numbers: said.append(numbers))
    assert said == [(3, 2), (1, 1)]


def test_two_builders_may_share_a_cache(compile_fakes: Compile, tmp_path: Path) -> None:
    variants = [fake(number=i) for i in range(10)]
    reports: list[BuildReport] = []
    builders = [threading.Thread(target=lambda: reports.append(compile_fakes(variants))) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert [list(r.kernels) for r in reports] == [variants, variants]
    assert {p.suffix for p in (tmp_path / "cache").rglob("*") if p.is_file()} == {".kernel", ".contents"}
    assert compile_fakes(variants).cached == 10


def test_an_interrupted_build_keeps_what_it_has_and_leaves_no_process(compile_fakes: Compile) -> None:
    variants = [fake(number=i) for i in range(6)]
    finished: list[Compilable] = []

    def interrupt(event: Event) -> None:
        finished.append(event.variant)
        if len(finished) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_fakes(variants, on_event=interrupt)
    report = compile_fakes(variants)
    assert report.cached >= 3
    assert list(report.kernels) == variants
    pids = {heard(k)["pid"] for k in report.kernels.values()}
    assert not any(_alive(pid) for pid in pids)


def test_control_c_ends_a_build_at_once(tmp_path: Path) -> None:
    (tmp_path / "fake_lowering.py").write_text(FAKE)
    program = f"""
        import sys
        sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]
        from tests.test_compiler import fake
        from aot.compile.cache import Cache
        from aot.compile.compiler import compile_variants
        variants = [fake(), fake("hang"), fake("hang", 1)]
        say = lambda event: print(event.outcome, flush=True)
        compile_variants(variants, Cache("cache"), 2, say, lowering="fake_lowering")
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_control_c,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "compiled\n"
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)
        assert time.monotonic() - begun < 2.0
        assert process.returncode == -signal.SIGINT
    assert len(list((tmp_path / "cache").rglob("*.kernel"))) == 1


# --- room ---


def test_a_failure_where_there_is_no_room_ends_the_build_and_names_the_folder_and_what_is_left(
    compile_fakes: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler does not say that a disk is full: it writes what fits."""
    asked: list[Path] = []

    def refusal(folder: Path, prefix: str) -> str | None:
        asked.append(folder)
        return None if len(asked) == 1 else "No space left on device"

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(files, "refusal", refusal)
    with pytest.raises(CompileError) as error:
        compile_fakes([fake(), fake("fill"), fake(number=1)])
    assert re.match(rf"{tmp_path}: .* \(No space left on device; [\d,]+ bytes are left there\)", str(error.value))
    assert "set TMPDIR to a folder that takes it" in str(error.value)
    assert [folder.parent for folder in asked] == [tmp_path.parent, tmp_path]
    assert not list(tmp_path.glob("aot-build-*"))


def test_a_failure_where_there_is_room_is_the_variants_own(compile_fakes: Compile) -> None:
    assert list(compile_fakes([fake(), fake("fill")]).failures) == [fake("fill")]


@pytest.mark.parametrize("name", ["none", "file"])
def test_a_scratch_folder_that_cannot_be_is_an_error_before_the_work(
    compile_fakes: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    with pytest.raises(CompileError, match=f"{tmp_path / name}: a file of .* cannot be written to compile in"):
        compile_fakes([fake()])


def test_a_rebuild_needs_no_scratch_folder(compile_fakes: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_fakes([fake()])
    monkeypatch.setenv("TMPDIR", "/none")
    assert compile_fakes([fake()]).cached == 1


def test_where_python_finds_no_folder_for_temporary_files_it_says_what_helps(
    compile_fakes: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(compiler.tempfile, "tempdir", None)
    monkeypatch.setattr(compiler.tempfile, "_candidate_tempdir_list", lambda: ["/none"])
    with pytest.raises(CompileError, match=r"No usable temporary directory .*; set TMPDIR to"):
        compile_fakes([fake()])


# --- a killed builder ---


def test_workers_of_a_killed_builder_end_and_its_scratch_folder_is_collected(
    compile_fakes: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    program = f"""
        import sys
        sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]
        from tests.test_compiler import fake
        from aot.compile.cache import Cache
        from aot.compile.compiler import compile_variants
        compile_variants([fake("hang"), fake("hang", 1)], Cache(None), 1, lowering="fake_lowering")
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)]) as builder:
        worker = None
        while worker is None and builder.poll() is None:
            time.sleep(0.02)
            logs = "".join(log.read_text() for log in scratch.rglob("worker-*.log"))
            worker = re.search(r"hanging in (\d+)\n", logs)
        builder.kill()
    assert worker is not None
    given_up = time.monotonic() + 60.0
    while _alive(int(worker[1])):  # in the middle of what takes it ten minutes
        assert time.monotonic() < given_up, "the worker goes on without its builder"
        time.sleep(0.02)
    assert len(list(scratch.iterdir())) == 1
    compile_fakes([fake()])
    assert not list(scratch.iterdir())


def test_a_worker_whose_parent_is_gone_already_ends() -> None:
    program = "from aot.compile.worker import serve; serve(0, 'aot.compile.compiler', 1234567)"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE) as worker:
        assert worker.wait(timeout=60) == 0  # though nobody closes the connection


def test_the_builder_itself_imports_neither_torch_nor_the_dsl() -> None:
    program = (
        "import sys, aot.cli.commands, aot.build, aot.compile.compiler, aot.inspect.show; "
        "print([m for m in ('torch', 'cutlass', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
