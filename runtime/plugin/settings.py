"""What a server's setting says to the plugin: which archive, and how strictly the server's version is taken.

Knows no server, nor where it keeps the setting; `place` is what its user calls that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from ..packaged import universal

KEY = "cute_aot"  # what the setting is called wherever a server keeps it


@dataclass(frozen=True)
class Settings:
    """`paths` are as `runtime.load` takes them, the base first; `strict` refuses unknown versions of the server."""

    paths: tuple[str, ...]
    strict: bool = True


def read(found: Any, place: str) -> Settings:
    """The settings that a value of "cute_aot" stands for.

    It is the path of an archive, "universal" for that of the package, a list of these, the base first, or
    {"archive": any of these, "strict": false}.

    Raises:
        ArgumentError: the value is none of that.
    """
    words = dict(found) if isinstance(found, dict) else {"archive": found}
    archive, strict = words.pop("archive", None), words.pop("strict", True)
    if words:
        raise ArgumentError(f"{place} has archive and strict, found {', '.join(map(str, words))}")
    if type(strict) is not bool:
        raise ArgumentError(f"strict of {place} must be true or false, found {strict!r:.50}")
    paths = archive if isinstance(archive, list) else [archive]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        what = "must be a path, 'universal', or a list of these"
        raise ArgumentError(f"the archive of {place} {what}, found {archive!r:.80}")
    return Settings(tuple(str(universal()) if path == "universal" else path for path in paths), strict)
