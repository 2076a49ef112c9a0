"""Operations whose signatures are element types, words and extents: what follows from their fields alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from runtime.errors import RecordError
from runtime.limits import MAX_EXTENT
from runtime.program.field_operation import FieldOperation, FieldSignature
from runtime.program.operation import Operand


@dataclass(frozen=True)
class Sum(FieldSignature):
    """x (M, N) summed by rows into y (M), of a kind, and rounded; with `groups` as many rows at once."""

    operation: ClassVar[str] = "row_sum"
    added: ClassVar[tuple[str, ...]] = ("rounding",)

    x: str
    kind: str
    n: int
    groups: int = 0
    rounding: str = "nearest"

    def key(self) -> str:
        """One word."""
        word = f"{self.x}_{self.kind}_n{self.n}" + (f"_g{self.groups}" if self.groups else "")
        return word if self.rounding == "nearest" else f"{word}_{self.rounding}"

    def operands(self) -> tuple[Operand, ...]:
        """x and y."""
        return Operand("x", self.x, ("M", "N")), Operand("y", "f32", ("M",))

    def extents(self) -> Mapping[str, int]:
        """N."""
        return {"N": self.n}


class RowSum(FieldOperation[Sum]):
    """The sums of rows."""

    name = "row_sum"
    signature = Sum
    pattern = re.compile(
        r"(?P<x>[^_]+)_(?P<kind>[^_]+)_n(?P<n>\d{1,10})(?:_g(?P<groups>\d{1,10}))?(?:_(?P<rounding>zero))?", re.ASCII
    )
    labels: Mapping[str, str] = {"n": "N"}
    words: Mapping[str, tuple[str, ...]] = {"kind": ("plain", "squares"), "rounding": ("nearest", "zero")}
    minor = ("groups",)


SUMS = RowSum()
OF = Sum("bf16", "plain", 64)


@pytest.mark.parametrize(
    "s", [OF, replace(OF, groups=3), replace(OF, rounding="zero"), Sum("f32", "squares", MAX_EXTENT)], ids=Sum.key
)
def test_a_signature_is_read_as_it_is_written(s: Sum) -> None:
    assert SUMS.read(s.to_json()) == SUMS.of_key(s.key()) == s


def test_what_was_added_is_not_mentioned_where_it_is_usual_and_all_else_is() -> None:
    assert SUMS.usual == {"groups": 0, "rounding": "nearest"}
    assert OF.to_json() == {"x": "bf16", "kind": "plain", "n": 64, "groups": 0}
    assert replace(OF, rounding="zero").to_json()["rounding"] == "zero"
    with pytest.raises(RecordError, match="needs exactly the fields"):
        SUMS.read({"x": "bf16", "kind": "plain", "n": 64})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": "bf17"}, "'x': unknown element type 'bf17'"),
        ({"x": 5}, "'x': unknown element type 5"),
        ({"kind": "bf16"}, "'kind' must be one of plain, squares, found 'bf16'"),
        ({"n": 0}, f"'n' must be 1 to {MAX_EXTENT}, found 0"),
        ({"n": True}, "'n' must be 1"),
        ({"groups": -1}, f"'groups' must be 0 to {MAX_EXTENT}, found -1"),
        ({"more": 1}, r"row_sum needs exactly the fields \['groups', 'kind', 'n', 'rounding', 'x'\]"),
    ],
)
def test_a_malformed_signature_is_refused_by_field(change: dict[str, Any], match: str) -> None:
    with pytest.raises(RecordError, match=match):
        SUMS.read(OF.to_json() | change)


@pytest.mark.parametrize("word", ["", "bf16_plain_n064", "bf16_plain_n64_g0", "bf16_cubes_n64", "bf17_plain_n64"])
def test_another_word_is_no_key(word: str) -> None:
    assert SUMS.of_key(word) is None


def test_signatures_differ_by_their_fields_as_people_call_them() -> None:
    assert SUMS.differences(OF, OF) == []
    assert SUMS.differences(replace(OF, x="f16", n=8), OF) == ["x is f16, wanted bf16", "N is 8, wanted 64"]


def test_words_lie_further_apart_than_minor_fields_and_these_than_extents() -> None:
    of = [OF, replace(OF, n=128), replace(OF, n=16), replace(OF, groups=9), replace(OF, kind="squares")]
    assert [SUMS.distance(s, OF) for s in of] == [0, 1, 2, 10, 1000]


def test_made_up_operands_are_contiguous() -> None:
    x, y = SUMS.arguments(OF, 5, 0)
    assert (x.shape, x.strides, y.shape, y.dtype) == ((5, 64), (64, 1), (5,), "f32")
