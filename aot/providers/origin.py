"""Where a module comes from, and a digest of all that comes with it: found without importing anything of it.

What is digested is the distribution that installed the module; else, as in a checkout, the package that it is in, or
its file. Knows nothing of specs or kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path

from runtime.errors import AotError

from .arguments import digest

_NO_SOURCES = (".dist-info", ".egg-info", ".data")  # folders that installing makes


class NoSuchModule(AotError):
    """There is no such module, or not one with a file."""


@dataclass(frozen=True)
class Origin:
    """Who a module is from: a distribution and its version, or the name of a package or file; what it consists of."""

    name: str
    version: str
    digest: str
    folder: Path  # where the module's own package, or its file, is


def origin(module: str, path: Sequence[str]) -> Origin:
    """Where `module` would be imported from, with `path` for sys.path.

    Raises:
        NoSuchModule: it would not be, or from no file.
    """
    file, root = _find(module, path)
    for distribution in distributions(path=list(path)):
        folder = Path(str(distribution.locate_file(""))).resolve()
        if file.is_relative_to(folder) and _lists(distribution, file.relative_to(folder).as_posix()):
            return Origin(distribution.metadata["Name"], distribution.version, _digest(distribution), file.parent)
    if root == file:
        return Origin(file.name, "", digest([(file.name, file.read_bytes())]), file.parent)
    sources = ((p.relative_to(root).as_posix(), p) for p in root.rglob("*.py"))
    return Origin(root.name, "", digest((name, p.read_bytes()) for name, p in sources), file.parent)


def _lists(distribution: Distribution, name: str) -> bool:
    """Whether it installed the file of that name; all of its files, of which there may be ten thousand, take long."""
    return any(line.startswith(f"{name},") for line in (distribution.read_text("RECORD") or "").splitlines())


def _is_made(parts: Sequence[str]) -> bool:
    return parts[0] == ".." or parts[0].endswith(_NO_SOURCES) or parts[-1].endswith(".pyc")


def _digest(distribution: Distribution) -> str:
    files = ((e.as_posix(), Path(str(e.locate()))) for e in distribution.files or () if not _is_made(e.parts))
    return digest((name, path.read_bytes()) for name, path in files if path.is_file())


def _find(module: str, path: Sequence[str]) -> tuple[Path, Path]:
    """The file of a module, and the folder of its outermost package that has a file, or the file again."""
    where, root = list(path), None
    parts = module.split(".")
    for i in range(len(parts)):
        name = ".".join(parts[: i + 1])
        found: ModuleSpec | None = PathFinder.find_spec(name, where)
        if found is None:
            raise NoSuchModule(f"there is no module {name!r}; install what it is in, or put it beside the spec")
        where = list(found.submodule_search_locations or ())
        if found.origin and root is None:
            root = Path(found.origin).resolve()
            root = root.parent if where else root
        if i < len(parts) - 1 and not where:
            raise NoSuchModule(f"{name!r} is a module, not a package, so it has no {parts[i + 1]!r}")
    if not found or not found.origin or root is None:
        raise NoSuchModule(f"{module!r} is a folder without a file to import; name a module in it")
    return Path(found.origin).resolve(), root
