"""What documentation, comments and docstrings name exists: files, modules, sections, commands and options."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from aot.cli import commands
from runtime.program import operation

from .command_line import read_as_aot_does

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    p
    for folder in ("aot", "benchmarks", "examples", "manifests", "runtime", "scripts")
    for p in (ROOT / folder).rglob("*.*")
]
TEXTS = [*PAGES, *sorted(p for p in SOURCES if p.suffix in (".py", ".yaml", ".c", ".h"))]

# A folder ends in a slash, and a star stands for what a folder has.
NAMED = re.compile(
    r"(?<![\w./-])(?:aot|benchmarks|docs|manifests|runtime|scripts|tests)/"
    r"(?:[\w./*-]*\.(?:py|c|h|md|json|yaml|txt|xz)\b|(?:[\w*-]+/)*(?![\w*-]))"
)
QUOTED = re.compile(r"`([^`\n]+)`")
SOURCE = re.compile(r"[\w*][\w./*-]*(?:\.(?:py|pyi|c|h)|\w/)")  # a source file or a folder
DOTTED = re.compile(r"(?<![\w./*-])(?:aot|runtime)(?:\.[A-Za-z_]\w*)+\b(?![\w/-])")
RESULT = re.compile(r"`(\w+\.(?:json|txt|json\.xz))`")  # as pages name results, without their folder
LINK = re.compile(r"\]\(([\w./-]*\w)?(?:#([\w-]+))?\)")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"--[a-z][a-z-]*")
NO_RESULTS = {"config.json", "policy.json", "COMMIT"}  # files that others have


def _each(paths: list[Path]) -> Any:
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


@_each(TEXTS)
def test_files_and_folders_that_are_named_exist(path: Path) -> None:
    assert [name for name in NAMED.findall(path.read_text()) if not any(ROOT.glob(name.rstrip("/")))] == []


@_each(PAGES)
def test_sources_that_pages_name_are_named_from_the_root(path: Path) -> None:
    quoted = [name for name in QUOTED.findall(path.read_text()) if SOURCE.fullmatch(name)]
    assert [name for name in quoted if not any(ROOT.glob(name.rstrip("/")))] == []


@_each(TEXTS)
def test_modules_and_what_is_in_them_are_named_as_they_are(path: Path) -> None:
    assert [name for name in DOTTED.findall(path.read_text()) if not is_there(name)] == []


@_each(PAGES)
def test_results_that_pages_name_exist(path: Path) -> None:
    folders = (ROOT / "benchmarks" / "results", ROOT / "benchmarks")
    named = [name for name in RESULT.findall(path.read_text()) if name not in NO_RESULTS]
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


@_each(PAGES)
def test_links_lead_somewhere(path: Path) -> None:
    for name, section in LINK.findall(path.read_text()):
        target = path.parent / name if name else path
        assert target.exists(), name
        if section:
            assert section in sections(target), f"{name}#{section}"


def test_the_policy_of_the_security_page_admits_what_the_page_signs() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    ((name, version),) = re.findall(r"^aot sign (\w+)\.aot .*--version (\d+)", text, re.MULTILINE)
    (policy,) = [json.loads(block) for language, block in FENCED.findall(text) if language == "json"]
    assert policy["archives"] == {name: int(version)}


@_each(PAGES)
def test_commands_of_pages_can_be_called(path: Path) -> None:
    text = path.read_text()
    lines = [line for language, block in FENCED.findall(text) if language == "bash" for line in block.splitlines()]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in lines:
        program, *words = shlex.split(line, comments=True) or [""]
        if program == "aot":
            read_as_aot_does(words)
        elif program == "make":
            assert set(words) <= set(targets), line
        elif program == "python" and words[0].startswith("scripts/"):
            assert set(OPTION.findall(" ".join(words))) <= options_of_scripts(), line


@_each(PAGES)
def test_commands_and_options_that_sentences_name_exist(path: Path) -> None:
    text = FENCED.sub("", path.read_text())
    for quoted in QUOTED.findall(text):
        words = quoted.split()
        if words[0] == "aot" and len(words) > 1:
            found: Any = commands.command()
            for word in words[1:]:
                found = getattr(found, "commands", {}).get(word, found)
            assert found.name in words, quoted
            assert set(OPTION.findall(quoted)) <= options_of(found), quoted
        elif OPTION.match(words[0]):
            assert words[0] in options_of(commands.command()) | options_of_scripts(), quoted


def options_of(command: Any) -> set[str]:
    """Every option of a command and of those under it."""
    own = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
    return own.union(*map(options_of, getattr(command, "commands", {}).values()))


@cache
def options_of_scripts() -> frozenset[str]:
    return frozenset(o for script in (ROOT / "scripts").rglob("*.py") for o in OPTION.findall(script.read_text()))


def sections(path: Path) -> set[str]:
    """The names by which links lead to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_there(name: str) -> bool:
    """Whether a dotted name leads to a module, or to something that one defines or imports."""
    parts = name.split(".")
    length = next(n for n in range(len(parts), 0, -1) if body_of(".".join(parts[:n])) is not None)
    body = body_of(".".join(parts[:length])) or []
    for part in parts[length:]:
        found = [node for node in body if part in names_of(node)]
        if not found:
            return False
        if not isinstance(found[0], ast.ClassDef):
            return True  # of values nothing more is known
        body = list(flat(found[0].body))
    return True


@cache
def body_of(module: str) -> list[ast.stmt] | None:
    """The statements of a module, but for those in functions and classes; None where there is no such module."""
    path = ROOT / module.replace(".", "/")
    for file in (path / "__init__.py", path.with_suffix(".py"), path.with_suffix(".pyi")):
        if file.exists():
            return list(flat(ast.parse(file.read_text()).body))
    return None


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those in branches of them."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from flat([*node.body, *node.orelse])


def names_of(node: ast.stmt) -> set[str]:
    """What a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name) for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


# --- rooms ---

# Those of a line import only those of earlier lines, and themselves; what is in one line does not import each other.
# Modules of `aot` may import any of `runtime` but its bindings to torch and servers; none of `runtime` one of `aot`.
# Operations are rooms.
OPERATIONS = list(dict.fromkeys(place.partition(":")[0].split(".")[1] for place in operation._OWN.values()))
ROOMS = {
    "aot": (
        ("extras", "files", "suggest", "version"),
        ("search", "kernels"),
        ("spec",),
        ("providers",),
        ("compile", "problem"),
        ("pack",),
        ("tune", "sign"),
        ("repack", "selection", "verify"),
        ("build", "inspect", "report"),
        ("cli",),
        ("__main__", "__init__"),
    ),
    "runtime": (
        ("errors", "limits", "named_tuple", "packaged"),
        ("numbers",),
        ("container", "native"),
        ("device", "signing"),
        ("program",),
        ("tables",),
        tuple(OPERATIONS),
        ("serve",),
        ("torch", "__init__"),
        ("plugin",),
        ("sglang", "vllm"),
    ),
}
BINDINGS = (["torch"], ["plugin"], ["sglang"], ["vllm"])  # to other packages, of `runtime`
MODULES = sorted(p for package in ROOMS for p in (ROOT / package).rglob("*.py"))


@_each(MODULES)
def test_a_module_imports_only_rooms_under_its_own(path: Path) -> None:
    """By the statements `import` anywhere in it, those for types too; providers, which are imported by name, are not
    seen."""
    package, *_ = module_of(path)
    own = room_of(package, module_of(path))
    heights = {name: height for height, line in enumerate(ROOMS[package]) for name in line}

    def is_under(other: list[str]) -> bool:
        if other[0] != package:
            return package == "aot" and other[1:2] not in BINDINGS
        room = room_of(package, other)
        return room == own or heights.get(room, 0) < heights.get(own, 0)

    above = [".".join(other) for other in imports_of(path) if not is_under(other)]
    assert above == []


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_are_those_that_there_are(package: str) -> None:
    there = {room_of(package, module_of(path)) for path in MODULES if module_of(path)[0] == package}
    assert there == {name for line in ROOMS[package] for name in line}


@pytest.mark.parametrize("package", ROOMS)
def test_architecture_lists_rooms_from_the_top(package: str) -> None:
    """Folders and modules in the first column of its tables, where one row stands for all operations but GEMM."""
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    listed = [
        Path(name).relative_to(package).stem for row in rows for name in QUOTED.findall(row) if is_room(package, name)
    ]
    heights = {name: height for height, line in enumerate(ROOMS[package]) for name in line}
    assert sorted(listed) == sorted(set(heights) - {"__init__", "__main__", *OPERATIONS[1:]})
    assert [heights[name] for name in listed] == sorted((heights[name] for name in listed), reverse=True)


def is_room(package: str, name: str) -> bool:
    """Whether a path in a page is that of a room: a folder of `package`, or a module that stands there alone."""
    return Path(name).parent == Path(package) and name.endswith(("/", ".py"))


def module_of(path: Path) -> list[str]:
    """The dotted name of a file's module, in parts."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def room_of(package: str, module: list[str]) -> str:
    """The room of a module, or "__init__" for what `package` itself defines."""
    path = ROOT.joinpath(package, *module[1:2])
    return module[1] if len(module) > 1 and (path.is_dir() or path.with_suffix(".py").exists()) else "__init__"


def imports_of(path: Path) -> Iterator[list[str]]:
    """What a module imports of this project, each as the parts of a dotted name."""
    here = list(path.relative_to(ROOT).parts)[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[list[str]] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = here[: len(here) - node.level + 1] if node.level else []
            start = start + (node.module.split(".") if node.module else [])
            names = [[*start, alias.name] for alias in node.names]
        yield from (name for name in names if name[0] in ROOMS)


@pytest.mark.parametrize("name", ["vllm.md", "sglang.md"])
def test_servers_get_no_compiler_of_ours(name: str) -> None:
    """vLLM and SGLang need another nvidia-cutlass-dsl than `build` does, which is installed apart."""
    page = (ROOT / "docs" / name).read_text()
    assert "pip install . " in page
    assert "pip install '.[build]'" not in page
    assert "\naot build" not in page
