"""What an engine's `additional_config` says to the plugin: which archive serves it, and where it is recorded.

Knows nothing of vLLM beyond that `additional_config` is a dictionary, which reaches every worker and is part of the key
of vLLM's compile cache.
"""

from __future__ import annotations

from typing import Any

from ..plugin import settings
from ..plugin.settings import KEY, Settings, read, value_of

PLACE = f"additional_config['{KEY}']"


def settings_of(additional_config: Any) -> Settings | None:
    """The plugin's settings, or None where the engine has none and all stays vLLM's.

    Raises:
        ArgumentError: the value of "cute_aot" is none that `runtime.plugin.settings.read` knows.
    """
    found = _value(additional_config)
    return None if found is None else read(found, PLACE)


def required(additional_config: Any) -> str:
    """What must be served for the engine to start; see `runtime.plugin.settings.required`."""
    return settings.required(_value(additional_config))


def _value(additional_config: Any) -> Any:
    return value_of(additional_config) if isinstance(additional_config, dict) else None
