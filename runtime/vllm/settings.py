"""What an engine's `additional_config` says to the plugin: which archive, and how strictly vLLM's version is taken.

Knows nothing of vLLM beyond that `additional_config` is a dictionary, which reaches every worker and is part of the key
of vLLM's compile cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from ..packaged import universal

KEY = "cute_aot"  # of `additional_config`


@dataclass(frozen=True)
class Settings:
    """`paths` are as `runtime.load` takes them, the base first; `strict` refuses unknown versions of vLLM."""

    paths: tuple[str, ...]
    strict: bool = True


def settings_of(additional_config: Any) -> Settings | None:
    """The plugin's settings, or None where the engine has none and all stays vLLM's.

    The value of "cute_aot" is the path of an archive, "universal" for that of the package, a list of these, the base
    first, or {"archive": any of these, "strict": false}.

    Raises:
        ArgumentError: the value is none of that.
    """
    if not isinstance(additional_config, dict) or (found := additional_config.get(KEY)) is None:
        return None
    words = dict(found) if isinstance(found, dict) else {"archive": found}
    archive, strict = words.pop("archive", None), words.pop("strict", True)
    if words:
        raise ArgumentError(f"additional_config['{KEY}'] has archive and strict, found {', '.join(map(str, words))}")
    if type(strict) is not bool:
        raise ArgumentError(f"strict of additional_config['{KEY}'] must be true or false, found {strict!r:.50}")
    paths = archive if isinstance(archive, list) else [archive]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        what = "must be a path, 'universal', or a list of these"
        raise ArgumentError(f"the archive of additional_config['{KEY}'] {what}, found {archive!r:.80}")
    return Settings(tuple(str(universal()) if path == "universal" else path for path in paths), strict)
