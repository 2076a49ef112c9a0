"""Canonical JSON: one byte string for one value, so that equal things have equal names.

Keys sorted, no spaces, UTF-8, no NaN or infinity; integers of 64 bits, signed or unsigned; no more values and no deeper
than `runtime.limits` has it. Knows nothing of what the values mean.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import orjson

from ..limits import MAX_JSON_DEPTH, MAX_JSON_VALUES
from ..named_tuple import NamedTuple

# What may be a float that orjson and `dumps` write differently: one with an exponent, or a small one.
_SPELLED_TWO_WAYS = re.compile(rb"(?:^|[:,\[])-?(?:[0-9.]+e|0\.000)")
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # of integers


def dumps(obj: Any) -> bytes:
    """Encode `obj`; tuples become lists, and a key that is not a string is refused rather than turned into one.

    Raises:
        ValueError: NaN, infinity, a lone surrogate, an integer of more than 64 bits, or a value that refers to itself.
        TypeError: a key that is not a string, or a value that JSON has no form for.
    """
    _require_plain(obj)
    return _encode(obj)


def loads(data: bytes) -> Any:
    """Decode bytes that `dumps` could have written, and no others.

    Raises:
        ValueError: not JSON, JSON written in any other way, or too much of it; the message says which.
    """
    _require_few(data)
    if not _SPELLED_TWO_WAYS.search(data) and (found := _round_trip(data)) is not None:
        return found.obj
    try:
        text = data.decode("utf-8")
        obj = json.loads(text, parse_constant=_refuse_constant, parse_int=_integer)
        _require_shallow(obj)
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
    _require_few(data)
    found = _round_trip(data)
    return loads(data) if found is None else found.obj  # it says why, or knows better: of small floats, for instance


class _Read(NamedTuple):
    obj: Any


def _round_trip(data: bytes) -> _Read | None:
    """What orjson reads, if it would write it in the same bytes; None where it would not."""
    try:
        obj = orjson.loads(data)
        return _Read(obj) if orjson.dumps(obj, option=orjson.OPT_SORT_KEYS) == data else None
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None


def digest(obj: Any) -> str:
    """The SHA-256 of `dumps(obj)`, in hexadecimal."""
    return hashlib.sha256(dumps(obj)).hexdigest()


def _encode(obj: Any, check_circular: bool = True) -> bytes:
    style = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
    return json.dumps(obj, check_circular=check_circular, **style).encode("utf-8")  # type: ignore[arg-type]


def _require_plain(obj: Any) -> None:
    """Refuse keys that are no strings, and integers that `loads` would not read."""
    stack, seen = [(obj,)], set()
    while stack:
        for item in stack.pop():
            kind = type(item)
            if kind is str or kind is float:
                continue
            if kind is int:
                if not _LEAST <= item <= _MOST:
                    raise ValueError(f"it holds {item!s:.30}, an integer of more than 64 bits")
            elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
                seen.add(id(item))
                if isinstance(item, dict):
                    for key in item:
                        if not isinstance(key, str):
                            raise TypeError(f"a key of canonical JSON must be a string, found {key!r}")
                    item = item.values()
                stack.append(item)


def _require_few(data: bytes) -> None:
    """Refuse what would become more objects than memory is for, before any is made."""
    if len(data) <= MAX_JSON_VALUES:
        return
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > MAX_JSON_VALUES:
        raise ValueError(f"it holds about {values} values, at most {MAX_JSON_VALUES} are read")


def _require_shallow(obj: Any) -> None:
    """Refuse what is nested so deep that Python cannot walk it; orjson refuses it by itself."""
    level = [obj]
    for _ in range(MAX_JSON_DEPTH):
        level = [item for x in level if isinstance(x, (dict, list)) for item in (x.values() if type(x) is dict else x)]
        if not level:
            return
    raise ValueError(f"it nests more than {MAX_JSON_DEPTH} deep")


def _integer(digits: str) -> int:
    """An integer that orjson takes for one as well; it makes a float of what has more bits."""
    number = int(digits) if len(digits) <= 20 else _MOST + 1
    if not _LEAST <= number <= _MOST:
        raise ValueError(f"it holds {digits:.30}, an integer of more than 64 bits")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which JSON does not have")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    obj: dict[str, Any] = {}
    for key, value in pairs:
        if key in obj:
            raise ValueError(f"the key {key!r} occurs twice in one object")
        obj[key] = value
    return obj
