"""Canonical JSON: one spelling for each value, and no other is read."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.container import canonical

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('aé\n"\\😀'),
    lambda children: st.lists(children) | st.dictionaries(st.text("ab😀\ue000"), children),
)


@given(JSON)
def test_canonical_json_reads_back(obj: Any) -> None:
    data = canonical.dumps(obj)
    assert canonical.loads(data) == obj
    assert canonical.dumps(canonical.loads_for_serving(data)) == data  # 1 is not 1.0, nor True


SPELLED_OTHERWISE = [
    b'{"a":1,"a":2}',
    b'{"b":1,"a":2}',
    b'{"a": 1}',
    b'["\\u0061"]',
    b'["\\/"]',
    b"[1.0e1]",
    b"[-0]",
    b"[01]",
    b"[NaN]",
    b"[1] ",
    b'["\xff"]',
    b"[" * 100_000,
    b"",
]


@pytest.mark.parametrize("data", SPELLED_OTHERWISE)
def test_json_spelled_otherwise_is_refused(data: bytes) -> None:
    for loads in (canonical.loads, canonical.loads_for_serving):
        with pytest.raises(ValueError):
            loads(data)


@pytest.mark.parametrize(
    "data", [b"[1e-7]", b"-1e-7", b'{"a":1e-7}', b"[0.00001]", b"[-0.00002]", b'[1,{"a":0.00003}]']
)
def test_only_the_strict_reader_minds_how_a_small_float_is_written(data: bytes) -> None:
    assert canonical.loads_for_serving(data) == json.loads(data)
    with pytest.raises(ValueError, match="not canonical"):
        canonical.loads(data)


def test_canonical_json_is_sorted_dense_utf8() -> None:
    assert canonical.dumps({"b": [1, 2.5, (True, None)], "a": "é"}) == '{"a":"é","b":[1,2.5,[true,null]]}'.encode()


def test_digest_is_the_sha256_of_the_canonical_bytes() -> None:
    assert canonical.digest({"a": 1}) == hashlib.sha256(b'{"a":1}').hexdigest()


@pytest.mark.parametrize("obj", [float("nan"), [float("inf")], {"a": "\ud800"}])
def test_canonical_json_refuses_what_json_cannot_say(obj: Any) -> None:
    with pytest.raises(ValueError):
        canonical.dumps(obj)


@pytest.mark.parametrize("obj", [{1: 2}, [{None: 1}], b"bytes", {1, 2}])
def test_canonical_json_refuses_what_would_change(obj: Any) -> None:
    with pytest.raises(TypeError):
        canonical.dumps(obj)


def test_canonical_json_refuses_a_value_inside_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError):
        canonical.dumps(loop)
