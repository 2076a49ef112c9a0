"""What the sources of a server define, read and not imported."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

import pytest

from runtime.plugin.hooks import Hook

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def folder_of(request: pytest.FixtureRequest, package: str, title: str) -> Path:
    """The folder of a package: that which the option of its name says, or the installed one; skips where neither is."""
    path = request.config.getoption(f"--{package}")
    if path is None:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"needs --{package} FOLDER, {title}'s package as its wheel holds it, or an installed {title}")
        path = spec.submodule_search_locations[0]
    if not (Path(path) / "__init__.py").exists():
        pytest.exit(f"--{package} {path} holds no __init__.py; name the folder `{package}` of an unpacked wheel", 2)
    return Path(path)


@cache
def body_of(package: Path, module: str) -> list[ast.stmt]:
    """The statements of a module; empty where there is no such module."""
    path = package.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text()).body if file.exists() else []


def class_of(package: Path, module: str, name: str) -> list[ast.stmt]:
    """The statements of a class that a module defines; empty where it does not."""
    found = [node.body for node in body_of(package, module) if isinstance(node, ast.ClassDef) and node.name == name]
    return found[0] if found else []


def flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements, and those under `if`."""
    branches = [flat([*node.body, *node.orelse]) for node in body if isinstance(node, ast.If)]
    return [*body, *(node for branch in branches for node in branch)]


def problem_of(package: Path, hook: Hook) -> str:
    """What is missing, or differs from the table; empty if nothing does."""
    body = class_of(package, hook.module, hook.owner) if hook.owner else flat(body_of(package, hook.module))
    found = [node for node in body if isinstance(node, FUNCTIONS) and node.name == hook.method]
    if not found:
        return f"{hook} is not there"
    arguments = found[0].args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None]
    if tuple(names) != hook.parameters:
        return f"{hook} has the parameters {', '.join(names)}"
    return ""


def assigned(body: list[ast.stmt]) -> set[str]:
    """The names that statements give a value or a type, those under `if` too."""
    found = set()
    for node in flat(body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def calls_of(function: ast.AST) -> list[str]:
    """The last names of what is called in a function, in the order of its lines."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return [getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls]


def write(folder: Path, module: str, text: str) -> Path:
    """A package with this one module, in `folder`."""
    path = folder.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder / module.partition(".")[0]
