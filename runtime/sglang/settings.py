"""Where a server's arguments say which archive serves it, and where it is recorded.

Knows nothing of SGLang beyond that `json_model_override_args` is a JSON text, which reaches every scheduler.
"""

from __future__ import annotations

import json
from typing import Any

from ..errors import ArgumentError
from ..plugin import settings
from ..plugin.settings import KEY, Settings, read, value_of

OPTION = "--json-model-override-args"
PLACE = f"{KEY} of {OPTION}"


def settings_of(server_args: Any) -> Settings | None:
    """The plugin's settings, or None where the server has none and all stays SGLang's.

    Raises:
        ArgumentError: the text is no JSON, or its "cute_aot" is none that `runtime.plugin.settings.read` knows.
    """
    found = _value(server_args)
    return None if found is None else read(found, PLACE)


def required(server_args: Any) -> str:
    """What must be served for the server to start; see `runtime.plugin.settings.required`."""
    try:
        return settings.required(_value(server_args))
    except ArgumentError:
        return ""


def _value(server_args: Any) -> Any:
    text = server_args.json_model_override_args
    if not text or KEY not in text.replace("-", "_"):
        return None
    try:
        words = json.loads(text)
    except ValueError as error:
        raise ArgumentError(f"{OPTION} is no JSON: {error}") from None
    return value_of(words) if isinstance(words, dict) else None
