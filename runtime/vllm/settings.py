"""What an engine's `additional_config` says to the plugin: which archive, where to record what the model runs, and how
strictly vLLM's version is taken.

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
    """`paths` are as `runtime.load` takes them, the base first, and none where nothing is to be served; `strict`
    refuses unknown versions of vLLM; `record` is the folder that workers write what they run to, empty for none."""

    paths: tuple[str, ...]
    strict: bool = True
    record: str = ""


def settings_of(additional_config: Any) -> Settings | None:
    """The plugin's settings, or None where the engine has none and all stays vLLM's.

    The value of "cute_aot" is the path of an archive, "universal" for that of the package, a list of these, the base
    first, or {"archive": any of these, "record": a folder, "strict": false}, of which "archive" or "record" must be
    there.

    Raises:
        ArgumentError: the value is none of that.
    """
    if not isinstance(additional_config, dict) or (found := additional_config.get(KEY)) is None:
        return None
    words = dict(found) if isinstance(found, dict) else {"archive": found}
    archive, strict, record = words.pop("archive", None), words.pop("strict", True), words.pop("record", "")
    if words:
        known = "archive, record and strict"
        raise ArgumentError(f"additional_config['{KEY}'] has {known}, found {', '.join(map(str, words))}")
    if type(strict) is not bool:
        raise ArgumentError(f"strict of additional_config['{KEY}'] must be true or false, found {strict!r:.50}")
    if not isinstance(record, str):
        raise ArgumentError(f"record of additional_config['{KEY}'] must be a folder's path, found {record!r:.50}")
    if archive is None and record:
        return Settings((), strict, record)
    paths = archive if isinstance(archive, list) else [archive]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        what = "must be a path, 'universal', or a list of these"
        raise ArgumentError(f"the archive of additional_config['{KEY}'] {what}, found {archive!r:.80}")
    return Settings(tuple(str(universal()) if path == "universal" else path for path in paths), strict, record)
