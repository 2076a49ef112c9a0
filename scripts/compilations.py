"""Counts what the processes of a server compile, and for whom: starts of compilers, loads of their libraries, and
imports of the DSL or of this project's builder, each by the package whose code asked for it.

`watch()` adds an audit hook of CPython's, which forked processes inherit; `counted()` is of all of these together. In a
process that nobody watches, such as one that was spawned and not forked, it is None: 0 means that somebody looked.

Not seen is what native code does with no Python in between, such as torch's own NVRTC, what a started program starts
(so `ninja` counts as a compiler), what code does that only has to call a DSL that another package has imported, and the
workers that Inductor compiles in, unless it has one thread, as in vLLM. The hook costs each audited event, of which a
step of an engine has few, less than a microsecond.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from report import ROOT

import runtime as imported

OURS, OTHER = "ours", "other"
Counted = dict[str, Any]  # {"ours": 0, "by": {"vllm": {"ptxas": 12}}}

_NAMES = (
    *("ptxas", "nvcc", "cicc", "nvlink", "fatbinary", "ninja", "gcc", "cc", "g++", "c++", "clang", "clang++"),
    *("ld", "lld", "ld.lld", "ld.gold", "ld.bfd"),
)
_COMPILER = re.compile(rf"(?:.*-)?({'|'.join(map(re.escape, _NAMES))})(?:-[0-9.]+|-blackwell)?")
_PASSES_ON = {"sh", "bash", "dash", "env", "nice", "ccache", "sccache"}  # programs that start what their words say
_LIBRARY = re.compile(r"nvrtc|nvjitlink|nvvm|llvm|mlir|clang|cute_dsl|cutlass_dsl", re.IGNORECASE)
_BUILDERS = {"cutlass", "aot"}  # top-level packages
_FOR_OTHERS = {"torch", "triton", *_BUILDERS}  # that compile what code outside them asks for
_STARTS = {"subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"}
_EVENTS = {*_STARTS, "ctypes.dlopen", "import", "exec"}
_FOLDERS = tuple(
    f"{each}{os.sep}"
    for path in (ROOT, Path(imported.__file__).parents[1])
    for each in (path / "runtime", path.resolve() / "runtime")
)

_noted: int | None = None  # a file in memory, of a line for each event, that forked processes share


def watch() -> None:
    """Count from now on, in this process and in those that are forked from it; once, however often it is called."""
    global _noted
    if _noted is None:
        _noted = os.memfd_create("compilations")
        sys.addaudithook(_hook)


def counted() -> Counted | None:
    """What was counted since `watch()` in all processes that share it; None where this process is not watched."""
    if _noted is None:
        return None
    try:
        text = os.pread(_noted, os.fstat(_noted).st_size, 0).decode()
    except OSError:  # someone closed all files
        return None
    return _of_events(json.loads(line) for line in text.splitlines())


def counted_by_worker(_model: Any) -> Counted | None:
    """`counted()`, as a function of a worker's model."""
    return counted()


def together(each: Iterable[Counted | None]) -> Counted | None:
    """The sum of what processes counted that do not share it; None where there is none, or one was not watched."""
    events: list[tuple[str, str]] = []
    found = list(each)
    for one in found:
        if one is None:
            return None
        for who, of in one["by"].items():
            events += [(who, what) for what, count in of.items() for _ in range(count)]
    return _of_events(events) if found else None


def said(found: Counted | None) -> str:
    """In one line, what was counted."""
    if found is None:
        return "compilations: not counted, as a process of the engine is not watched"
    return f"compilations: {found[OURS]} for this project's kernels; {json.dumps(found['by'])}"


def _of_events(events: Iterable[Iterable[str]]) -> Counted:
    by: dict[str, Counter[str]] = {}
    for who, what in events:
        by.setdefault(who, Counter())[what] += 1
    return {OURS: sum(by.get(OURS, {}).values()), "by": {who: dict(of) for who, of in sorted(by.items())}}


# --- an event ---


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _EVENTS:
        return
    frame = sys._getframe(1)
    what = _what(event, arguments, frame)
    if what and _noted is not None:
        with contextlib.suppress(OSError):  # where someone closed all files `counted` says so
            os.write(_noted, f"{json.dumps([_who(frame), what])}\n".encode())


def _what(event: str, arguments: tuple[Any, ...], frame: FrameType) -> str:
    """What an event compiles with; empty if nothing."""
    if event in ("import", "exec"):
        top = _imported(event, arguments[0], frame)
        return f"import of {top}" if top else ""
    if event == "ctypes.dlopen":
        name = os.path.basename(_text(arguments[0]))
        return name if _LIBRARY.search(name) else ""
    if event == "os.system":
        return _compiler(_text(arguments[0]))
    if event == "os.posix_spawn" and frame.f_globals.get("__name__") == "subprocess":
        return ""  # of `subprocess.Popen`, which was an event of its own
    program, words = arguments[:2]
    if os.path.basename(_text(program)) in _PASSES_ON:
        return _compiler(" ".join(map(_text, words)))
    return _compiler(_text(program))


def _imported(event: str, what: Any, frame: FrameType) -> str:
    """The package of `_BUILDERS` that an event is the import of, by code outside it; empty if it is none.

    A package is first imported when its code runs, however that came about: `importlib.import_module` has no event of
    its own. Later a statement may import another of its modules.
    """
    if event == "exec":
        file = what.co_filename if isinstance(what, CodeType) and what.co_name == "<module>" else ""
        return next((top for top in _BUILDERS if file and file == _file_of(top)), "")
    top = str(what).partition(".")[0]
    nested = frame.f_globals.get("__name__") == "importlib._bootstrap"  # of a package before its module
    if top not in _BUILDERS or top not in sys.modules or nested:
        return ""
    return top if next((name.partition(".")[0] for name, _ in _askers(frame)), "") != top else ""


def _file_of(module: str) -> str:
    return getattr(sys.modules.get(module), "__file__", None) or ""


def _compiler(text: str) -> str:
    """The first compiler that a command names, by any of its words; empty if there is none."""
    names = (os.path.basename(word) for word in re.split(r"[\s;&|()'\"`$=]+", text))
    return next((found[1] for found in map(_COMPILER.fullmatch, names) if found), "")


def _text(value: Any) -> str:
    return os.fsdecode(value) if isinstance(value, str | bytes | os.PathLike) else str(value)


# --- who asked for it ---


def _who(frame: FrameType) -> str:
    """Whose code asked: the first frame, from the innermost one outwards, of neither the standard library nor a package
    that compiles for others."""
    for name, code in _askers(frame):
        if _is_ours(code):
            return OURS
        top = name.partition(".")[0]
        if name in _FOR_OTHERS and code.co_name == "<module>":
            return top  # it is being imported, and loads libraries for itself
        if top not in _FOR_OTHERS:
            return OTHER if top.startswith("__") else top  # of a script
    return OTHER


def _askers(frame: FrameType | None) -> Iterator[tuple[str, CodeType]]:
    """Modules by name and code, outwards, without the standard library and code that no module holds."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__") or "")
        if _is_ours(frame.f_code) or (name and name.partition(".")[0] not in sys.stdlib_module_names):
            yield name, frame.f_code
        frame = frame.f_back


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_FOLDERS)
