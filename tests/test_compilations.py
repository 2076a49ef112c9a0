"""What `scripts/compilations.py` counts as a compilation, and as whose; in processes of their own, as a hook stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .command_line import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import compilations

RUNTIME = ROOT / "runtime" / "serve" / "library.py"  # a file in whose name code of these tests runs

PROLOGUE = f"""
import ctypes, json, multiprocessing, os, subprocess, sys
sys.path[:0] = [{str(ROOT / "scripts")!r}, {str(ROOT)!r}]
import compilations

def run(source, file, name, **names):
    "Run code as if it stood in this file of this module."
    space = {{"__name__": name, "run": run, "subprocess": subprocess, "os": os, "ctypes": ctypes, **names}}
    exec(compile(source, file, "exec"), space)
    return space

RUNTIME = {str(RUNTIME)!r}
GCC = "def f(): subprocess.run(['gcc', '--version'], stdout=-3)"

def of_runtime(source=GCC, **names):
    return run(source, RUNTIME, "runtime.serve.library", **names)["f"]

def of(module, call=None, source=GCC):
    "A function of a module of another package, which starts a compiler or makes a call."
    return run(source if call is None else "def f(): call()", "/site-packages/it.py", module, call=call)["f"]
"""


def python(code: str, watched: bool = True) -> Any:
    """What code prints as JSON, in a process that is watched or not."""
    source = f"{PROLOGUE}\n{'compilations.watch()' if watched else ''}\n{code}"
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def counted(code: str) -> dict[str, dict[str, int]]:
    """What was counted of some code, by whose it is."""
    found = python(f"{code}\nprint(json.dumps(compilations.counted()))")
    assert found["ours"] == sum(found["by"].get("ours", {}).values())
    return dict(found["by"])


def test_a_compiler_that_code_of_the_runtime_starts_is_ours() -> None:
    assert python("of_runtime()(); print(json.dumps(compilations.counted()))") == {
        "ours": 1,
        "by": {"ours": {"gcc": 1}},
    }


def test_a_compiler_that_other_code_starts_is_not() -> None:
    assert counted("of('vllm.worker')(); of('flashinfer.jit')(); of('vllm.compilation')()") == {
        "flashinfer": {"gcc": 1},
        "vllm": {"gcc": 2},
    }
    assert counted("of('__main__')()") == {"other": {"gcc": 1}}


def test_nothing_is_counted_where_nothing_compiles() -> None:
    assert counted('of_runtime(\'def f(): subprocess.run([sys, "-c", "0"])\', sys=sys.executable)()') == {}


@pytest.mark.parametrize("package", ["torch._inductor.codecache", "triton.backends.nvidia", "cutlass.base_dsl", "aot"])
def test_what_compiles_for_others_is_theirs_who_asked(package: str) -> None:
    """The innermost frames are the standard library's, then those of such a package, then of who called it."""
    assert counted(f"of_runtime('def f(): call()', call=of({package!r}))()") == {"ours": {"gcc": 1}}
    assert counted(f"of('vllm.compilation', of({package!r}))()") == {"vllm": {"gcc": 1}}
    assert counted(f"of('vllm.worker', of_runtime('def f(): call()', call=of({package!r})))()") == {"ours": {"gcc": 1}}


def test_what_another_package_compiles_is_its_own_though_the_runtime_called_it() -> None:
    assert counted("of_runtime('def f(): call()', call=of('vllm.worker'))()") == {"vllm": {"gcc": 1}}


def test_code_that_no_module_holds_is_its_callers() -> None:
    code = "generated = {'subprocess': subprocess}; exec(GCC, generated)"
    code += "; of_runtime('def f(): call()', call=generated['f'])()"
    assert counted(code) == {"ours": {"gcc": 1}}


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("os.system('true; PATH=/bin /opt/x86_64-linux-gnu-g++-12 -v 2>/dev/null')", "g++"),
        ("subprocess.run('cc --version', shell=True, stdout=-3)", "cc"),
        ("subprocess.run(['/nowhere/ptxas-blackwell', '-v'])", "ptxas"),
        ("subprocess.run(['/nowhere/gcc'], close_fds=False)", "gcc"),  # which is an event of `os.posix_spawn` too
        ("os.posix_spawn('/nowhere/nvcc', ['nvcc'], {})", "nvcc"),
        ("os.execv('/nowhere/clang-18', ['clang'])", "clang"),
        ("os.spawnv(os.P_WAIT, '/nowhere/ninja', ['ninja'])", "ninja"),
        ("ctypes.CDLL('/nowhere/libnvrtc.so.13')", "libnvrtc.so.13"),
        ("ctypes.CDLL('libnvJitLink.so.13')", "libnvJitLink.so.13"),
        ("__import__('aot.nowhere')", "import of aot"),
        ("__import__('cutlass.nowhere')", "import of cutlass"),
        ("subprocess.run(['/sbin/ldconfig', '-p'], stdout=-3)", ""),
        ("ctypes.CDLL('/nowhere/libcuda.so.1')", ""),
        ("__import__('this_is_not_there')", ""),
    ],
)
def test_each_way_to_compile_is_seen_once(call: str, what: str) -> None:
    source = f"def f():\n    try: {call}\n    except (OSError, ImportError): pass"
    assert counted(f"of_runtime({source!r})()") == ({"ours": {what: 1}} if what else {})


@pytest.mark.parametrize(
    "importing", ["import aot.search.targets", "__import__('importlib').import_module('aot.search')"]
)
def test_importing_the_builder_is_one_event_of_who_imports_it(importing: str) -> None:
    """Its modules import each other, which is not counted."""
    assert counted(f"of_runtime({'def f(): ' + importing!r})()") == {"ours": {"import of aot": 1}}


def test_a_further_module_of_a_builder_that_another_imported_is_seen() -> None:
    code = "of('vllm.worker', source='def f(): import aot')(); of_runtime('def f(): import aot.suggest')()"
    assert counted(code) == {"ours": {"import of aot": 1}, "vllm": {"import of aot": 1}}


def test_a_folder_of_that_name_in_another_package_is_no_builder(tmp_path: Path) -> None:
    (tmp_path / "other" / "cutlass").mkdir(parents=True)
    (tmp_path / "other" / "cutlass" / "__init__.py").touch()
    assert counted(f"sys.path.append({str(tmp_path)!r}); of_runtime('def f(): import other.cutlass')()") == {}


def test_what_importing_torch_loads_is_not_its_importers() -> None:
    load = "call = ctypes.CDLL; sys = __import__('sys')\ntry: call('libnvrtc.so.nowhere')\nexcept OSError: pass"
    code = f'of_runtime(\'def f(): run(load, "/site-packages/torch/__init__.py", "torch")\', load={load!r})()'
    assert counted(code) == {"torch": {"libnvrtc.so.nowhere": 1}}


FORKS = """
def child(pipe):
    of_runtime()()
    pipe.send(compilations.counted_by_worker(None))

def of_child(method):
    mine, its = multiprocessing.Pipe()
    process = multiprocessing.get_context(method).Process(target=child, args=(its,))
    process.start()
    found = mine.recv()
    process.join()
    return found
"""


def test_a_forked_process_is_watched_and_seen_from_here_too() -> None:
    code = f"{FORKS}\nof('vllm.worker')()\nprint(json.dumps([of_child('fork'), compilations.counted()]))"
    by = {"ours": 1, "by": {"ours": {"gcc": 1}, "vllm": {"gcc": 1}}}
    assert python(code) == [by, by]


def test_a_spawned_process_says_that_nobody_watched(tmp_path: Path) -> None:
    file = tmp_path / "spawns.py"
    ends = "compilations.watch()\n    print(json.dumps([of_child('spawn'), compilations.counted()]))"
    file.write_text(f"{PROLOGUE}\n{FORKS}\nif __name__ == '__main__':\n    {ends}")
    found = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(found.stdout) == [None, {"ours": 0, "by": {}}]


def test_without_watching_there_is_no_count() -> None:
    assert python("of_runtime()(); print(json.dumps(compilations.counted()))", watched=False) is None


def test_watching_twice_counts_once() -> None:
    assert counted("compilations.watch(); of_runtime()()") == {"ours": {"gcc": 1}}


def test_processes_that_share_no_count_are_added_up() -> None:
    one = {"ours": 1, "by": {"ours": {"gcc": 1}, "triton": {"ptxas": 2}}}
    other = {"ours": 0, "by": {"triton": {"ptxas": 3, "gcc": 1}}}
    by = {"ours": {"gcc": 1}, "triton": {"ptxas": 5, "gcc": 1}}
    assert compilations.together([one, other]) == {"ours": 1, "by": by}
    assert compilations.together([one, None]) is None
    assert compilations.together([]) is None
    assert compilations.said(one).startswith("compilations: 1 for this project's kernels")
    assert "not counted" in compilations.said(None)
