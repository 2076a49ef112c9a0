"""Which of this project's files a kernel is made of: what its module imports. Reads files, and imports nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PARTS = "body", "orelse", "finalbody", "handlers", "cases"  # of a statement: where another may stand


def made_of(module: Path, within: Path) -> list[Path]:
    """`module` and all that it imports, itself or through others, anywhere in their code, of the package whose folder
    is `within`; sorted. The `__init__.py` of the folders between belong to it.

    Raises:
        OSError: a file cannot be read.
    """
    found: set[Path] = set()
    ahead = [module]
    while ahead:
        file = ahead.pop()
        if file not in found:
            found.add(file)
            ahead += _packages(file, within)
            ahead += _imported(file, within)
    return sorted(found)


def built_by(module: Path, providers: Path) -> list[Path]:
    """What prepares a kernel: `module` and what it imports of the package of providers, whose folder is `providers`,
    and what these import of `runtime` beside it, such as what says which operands an operation has; sorted. Of an
    `__init__.py`, which only says what its package is for, no kernel is made.

    Raises:
        OSError: a file cannot be read.
    """
    ours = made_of(module, providers)
    root = providers.parents[1]
    names = {
        name for file in ours for level, name in _names(file.read_bytes()) if not level and name[:1] == ("runtime",)
    }
    theirs = {root.joinpath(*name).with_suffix(".py") for name in names}
    return sorted(path for path in (*ours, *theirs) if path.name != "__init__.py" and path.is_file())


def _packages(file: Path, within: Path) -> Iterator[Path]:
    for folder in file.relative_to(within).parents:
        if (package := within / folder / "__init__.py").is_file():
            yield package


def _imported(file: Path, within: Path) -> Iterator[Path]:
    """The files in `within` that `file` imports."""
    of_within = _package(within)
    here = [*of_within, *file.parent.relative_to(within).parts]
    for level, name in _names(file.read_bytes()):
        whole = (*(here[: len(here) + 1 - level] if level else ()), *name)
        if list(whole[: len(of_within)]) == of_within:
            path = within.joinpath(*whole[len(of_within) :])
            yield from (p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file())


@cache  # kernels have most of their files in common
def _names(source: bytes) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """What a module imports, by its parts, and how many dots stand before it."""
    found: dict[tuple[int, tuple[str, ...]], None] = {}
    ahead: list[ast.AST] = [ast.parse(source)]
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Import):
            found |= {(0, tuple(alias.name.split("."))): None for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            found |= {(node.level, of): None for of in (base, *((*base, alias.name) for alias in node.names))}
        else:
            ahead += (x for part in _PARTS for x in getattr(node, part, ()))
    return tuple(found)


def _package(folder: Path) -> list[str]:
    """The name of the package in `folder`, by its parts."""
    parts: list[str] = []
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return parts
