"""Canonical JSON: one byte string for one value, so that equal things have equal names.

Keys sorted, no spaces, UTF-8, no NaN or infinity. Knows nothing of what the values mean.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import orjson


def dumps(obj: Any) -> bytes:
    """Encode `obj`; tuples become lists, and a key that is not a string is refused rather than turned into one.

    Raises:
        ValueError: NaN, infinity, a lone surrogate, or a value that refers to itself.
        TypeError: a key that is not a string, or a value that JSON has no form for.
    """
    _require_string_keys(obj)
    return _encode(obj)


def loads(data: bytes) -> Any:
    """Decode bytes that `dumps` could have written, and no others.

    Raises:
        ValueError: not JSON, or JSON written in any other way; the message says which.
    """
    try:
        text = data.decode("utf-8")
        obj = json.loads(text, parse_constant=_refuse_constant)
        if _encode(obj, check_circular=False) != data:
            json.loads(text, object_pairs_hook=_refuse_duplicates)
            raise ValueError("it is not canonical JSON: keys out of order, spaces, or needless escapes")
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    return obj


def loads_for_serving(data: bytes) -> Any:
    """`loads` in a third of the time, for a reader that makes nothing of how a number is spelled.

    It also takes small floats as orjson writes them, where that is otherwise than `dumps` does (1e-7 for 1e-07).

    Raises:
        ValueError: as `loads`.
    """
    try:
        obj = orjson.loads(data)
        if orjson.dumps(obj, option=orjson.OPT_SORT_KEYS) == data:
            return obj
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        pass
    return loads(data)  # it says why, or knows better: of integers beyond 64 bits, for instance


def digest(obj: Any) -> str:
    """The SHA-256 of `dumps(obj)`, in hexadecimal."""
    return hashlib.sha256(dumps(obj)).hexdigest()


def _encode(obj: Any, check_circular: bool = True) -> bytes:
    style = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
    return json.dumps(obj, check_circular=check_circular, **style).encode("utf-8")  # type: ignore[arg-type]


def _require_string_keys(obj: Any) -> None:
    stack, seen = [obj], set()
    while stack:
        item = stack.pop()
        if not isinstance(item, (dict, list, tuple)) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise TypeError(f"a key of canonical JSON must be a string, found {key!r}")
            stack.extend(item.values())
        else:
            stack.extend(item)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which JSON does not have")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    obj: dict[str, Any] = {}
    for key, value in pairs:
        if key in obj:
            raise ValueError(f"the key {key!r} occurs twice in one object")
        obj[key] = value
    return obj
