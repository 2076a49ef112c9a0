"""A model's config.json: reading the file, and its fields one by one, each checked.

Every mistake is a `ManifestError` that names the config, the field and the fix. Knows nothing of what fields mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from ..manifest import MAX_EXTENT, ManifestError, read_text

MAX_CONFIG_BYTES = 1 << 20

# What a family may say of a field in place of a number.
_RULES = {
    "heads": lambda found: found["num_attention_heads"],
    "hidden_size / heads": lambda found: found["hidden_size"] // found["num_attention_heads"],
}


class Fields:
    """The fields of a config, or of a part of one, and `used`: the numbers that were read, in that order.

    `source` is what messages call the config, and `where` the part, such as "text_config.". `defaults` are what fields
    are that the config leaves out or has as null: a value, or the name of a rule.
    """

    def __init__(self, config: Mapping[str, Any], source: str, where: str = "") -> None:
        self.config, self.source, self.where = config, source, where
        self.defaults: Mapping[str, int | str] = {}
        self.used: dict[str, int] = {}

    def fail(self, complaint: str) -> NoReturn:
        """Raise a `ManifestError` that names the config."""
        raise ManifestError(f"{self.source}: {complaint}")

    def name(self, field: str) -> str:
        """How messages name a field."""
        return f"field {self.where + field!r}"

    def has(self, field: str) -> bool:
        """Whether the config has the field, and not as null."""
        return self.config.get(field) is not None

    def says(self, field: str) -> bool:
        """Whether a field that must be there is not null."""
        if field not in self.config:
            self.fail(f"{self.name(field)} is missing; add it, or null, from the published config")
        return self.has(field)

    def one_of(self, fields: tuple[str, ...]) -> str:
        """The first of several names of one field that the config has; the first where it has none."""
        return next((field for field in fields if self.has(field)), fields[0])

    def integer(self, field: str, most: int = MAX_EXTENT, least: int = 1) -> int:
        """A number that shapes follow from."""
        value: Any = self.config.get(field)
        if value is None:
            value = self._default(field)
        if type(value) is not int or not least <= value <= most:
            self.fail(f"{self.name(field)} must be an integer from {least} to {most}, found {short(value)}")
        self.used[field] = value
        return value

    def _default(self, field: str) -> int:
        default = self.defaults.get(field)
        if default is None:
            self.fail(f"{self.name(field)} is missing; add it from the published config")
        if default == "hidden_size / heads" and self.used["hidden_size"] % self.used["num_attention_heads"]:
            self.fail(f"{self.name(field)} is missing and hidden_size does not divide by the heads; add it")
        return _RULES[default](self.used) if isinstance(default, str) else default

    def flag(self, field: str) -> bool:
        """A field that is true or false, which a default of 1 makes true where it is left out."""
        value = self.config.get(field)
        if value is not None and not isinstance(value, bool):
            self.fail(f"{self.name(field)} must be true or false, found {short(value)}; check the config")
        return bool(self.defaults.get(field)) if value is None else bool(value)

    def listed_layers(self, field: str, depth: int) -> list[int]:
        """Layers of `depth`, by number from 0; none where the field is left out."""
        listed = self.config.get(field) or []
        if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < depth for i in listed):
            self.fail(f"{self.name(field)} must list layers from 0 to {depth - 1}, found {short(listed)}")
        return listed

    def inside(self, field: str) -> Fields:
        """The fields of an object in this one."""
        found = self.config.get(field)
        if not isinstance(found, dict):
            self.fail(f"{self.name(field)} must be an object, found {short(found)}; check the config")
        return Fields(found, self.source, f"{self.where}{field}.")


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a config.json.

    Raises:
        ManifestError: it cannot be read, is not JSON, or is not an object.
    """
    name = os.fspath(path)
    text = read_text(name, "a model's config.json", MAX_CONFIG_BYTES)
    try:
        config = json.loads(text, object_pairs_hook=_distinct)
    except json.JSONDecodeError as error:
        raise ManifestError(f"{name}:{error.lineno}: not JSON: {error.msg}; give a model's config.json") from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{name}: not the JSON of a model's config.json: {error}; check the file") from None
    if not isinstance(config, dict):
        raise ManifestError(f"{name}: must hold a JSON object, found {short(config)}; give a model's config.json")
    return config


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {short(twice)} is given twice")
    return result


def is_integer(value: object, most: int) -> bool:
    """Whether this is an integer from 1 to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def short(value: object) -> str:
    """How messages show a value that was found."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
