"""What a server's setting says to the plugin: which archive, where to record what the model runs, and how strictly the
server's version is taken.

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
    """`paths` are as `runtime.load` takes them, the base first, and none where nothing is to be served; `strict`
    refuses unknown versions of the server; `record` is the folder that workers write what they run to, empty for none;
    `experts` lets the archive compute experts of mixtures; `require_signed` is as `runtime.load` takes it.
    """

    paths: tuple[str, ...]
    strict: bool = True
    record: str = ""
    experts: bool = True
    require_signed: str | None = None


def read(found: Any, place: str, records: bool = False) -> Settings:
    """The settings that a value of "cute_aot" stands for.

    It is the path of an archive, "universal" for that of the package, a list of these, the base first, or {"archive":
    any of these, "experts": false, "strict": false, "require_signed": a folder of keys}. Of vLLM, whose plugin
    `records`, it may also have "record": a folder, beside "archive" or alone.

    Raises:
        ArgumentError: the value is none of that.
    """
    words = dict(found) if isinstance(found, dict) else {"archive": found}
    archive, strict = words.pop("archive", None), words.pop("strict", True)
    record, experts = words.pop("record", "") if records else "", words.pop("experts", True)
    keys = words.pop("require_signed", None)
    if words:
        known = "archive, experts, record, require_signed" if records else "archive, experts, require_signed"
        raise ArgumentError(f"{place} has {known} and strict, found {', '.join(map(str, words))}")
    for name, value in (("strict", strict), ("experts", experts)):
        if type(value) is not bool:
            raise ArgumentError(f"{name} of {place} must be true or false, found {value!r:.50}")
    if not isinstance(record, str):
        raise ArgumentError(f"record of {place} must be a folder's path, found {record!r:.50}")
    if keys is not None and not (isinstance(keys, str) and keys):
        raise ArgumentError(f"require_signed of {place} must be the path of a folder of keys, found {keys!r:.50}")
    if archive is None and record:
        return Settings((), strict, record, experts, keys)
    paths = archive if isinstance(archive, list) else [archive]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        what = "must be a path, 'universal', or a list of these"
        raise ArgumentError(f"the archive of {place} {what}, found {archive!r:.80}")
    files = tuple(str(universal()) if path == "universal" else path for path in paths)
    return Settings(files, strict, record, experts, keys)
