"""What a server's setting says to the plugin: which archive, where to record what the model runs, and how strictly the
server's version is taken.

Knows no server, nor where it keeps the setting; `place` is what its user calls that.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from ..packaged import universal

KEY = "cute_aot"  # what the setting is called wherever a server keeps it
ARCHIVE, LAYERS = "archive", "layers"  # without which a server is not to start
_WORDS = "archive", "experts", "record", "require_signed", "required", "strict"


@dataclass(frozen=True)
class Settings:
    """`paths` are as `runtime.load` takes them, the base first, and none where nothing is to be served; `strict`
    refuses unknown versions of the server; `record` is the folder that workers write what they run to, empty for none;
    `experts` lets the archive compute experts of mixtures; `require_signed` is as `runtime.load` takes it;
    `required` is what the function of this name says.
    """

    paths: tuple[str, ...]
    strict: bool = True
    record: str = ""
    experts: bool = True
    require_signed: str | None = None
    required: str = ""


def value_of(words: Mapping[str, Any]) -> Any:
    """The value of "cute_aot", or of "cute-aot", as the distribution is called; None where there is neither."""
    return words.get(KEY, words.get(KEY.replace("_", "-")))


def required(found: Any) -> str:
    """Of a value of "cute_aot", whatever else it says: ARCHIVE if the server is not to start where nothing is served,
    LAYERS if neither where a layer is left to it, else empty. Another word, and a misspelt "required", mean ARCHIVE."""
    words = found if isinstance(found, dict) else {}
    word = words.get("required") or ""
    nearest = [difflib.get_close_matches(str(name), _WORDS, 1) for name in words if name not in _WORDS]
    if word in ("", ARCHIVE, LAYERS) and ["required"] not in nearest:
        return str(word)
    return LAYERS if word == LAYERS else ARCHIVE


def read(found: Any, place: str) -> Settings:
    """The settings that a value of "cute_aot" stands for.

    It is the path of an archive, "universal" for that of the package, a list of these, the base first, or {"archive":
    any of these, "experts": false, "strict": false, "require_signed": a folder of keys, "required": "archive" or
    "layers", "record": a folder, beside "archive" or alone}.

    Raises:
        ArgumentError: the value is none of that.
    """
    words = dict(found) if isinstance(found, dict) else {"archive": found}
    archive, strict = words.pop("archive", None), words.pop("strict", True)
    record, experts = words.pop("record", ""), words.pop("experts", True)
    keys, must = words.pop("require_signed", None), words.pop("required", "")
    if words:
        known = f"{', '.join(_WORDS[:-1])} and {_WORDS[-1]}"
        raise ArgumentError(f"{place} has {known}, found {', '.join(map(str, words))}")
    for name, value in (("strict", strict), ("experts", experts)):
        if type(value) is not bool:
            raise ArgumentError(f"{name} of {place} must be true or false, found {value!r:.50}")
    if not isinstance(record, str):
        raise ArgumentError(f"record of {place} must be a folder's path, found {record!r:.50}")
    if keys is not None and not (isinstance(keys, str) and keys):
        raise ArgumentError(f"require_signed of {place} must be the path of a folder of keys, found {keys!r:.50}")
    if must not in ("", ARCHIVE, LAYERS):
        raise ArgumentError(f"required of {place} must be '{ARCHIVE}' or '{LAYERS}', found {must!r:.50}")
    if archive is None and record and not must:
        return Settings((), strict, record, experts, keys)
    paths = archive if isinstance(archive, list) else [archive]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        what = "must be a path, 'universal', or a list of these"
        raise ArgumentError(f"the archive of {place} {what}, found {archive!r:.80}")
    files = tuple(str(universal()) if path == "universal" else path for path in paths)
    return Settings(files, strict, record, experts, keys, must)
