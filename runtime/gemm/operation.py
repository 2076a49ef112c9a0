"""GEMM as an operation; `signature` says what it computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..program.operation import Operation, contiguous
from ..program.record import TensorView
from .signature import Signature

_LABELS = (
    ("a", "A"),
    ("b", "B"),
    ("d", "D"),
    ("accumulator", "accumulator"),
    ("epilogue", "epilogue"),
    ("scaling", "scaling"),
    ("b_major", "major of B"),
    ("n", "N"),
    ("k", "K"),
    ("batch", "batch"),
    ("overlap", "overlap"),
)


class Gemm(Operation):
    """The operation; see `runtime.program.operation.Operation`."""

    name = "gemm"
    predictions = "universal"
    by_place: Mapping[str, str] = {"a": "A", "b": "B", "d": "D"}

    def read(self, obj: Any) -> Signature:
        """The signature that `Signature.to_json` wrote.

        Raises:
            RecordError: it is malformed.
        """
        return Signature.from_json(obj)

    def of_key(self, key: str) -> Signature | None:
        """The signature whose `key` this is, or None."""
        return Signature.of_key(key)

    def differences(self, have: Signature, wanted: Signature) -> list[str]:
        """How two signatures differ, in words, for people."""
        return [
            f"{label} is {getattr(have, field)}, wanted {getattr(wanted, field)}"
            for field, label in _LABELS
            if getattr(have, field) != getattr(wanted, field)
        ]

    def distance(self, have: Signature, wanted: Signature) -> float:
        """How far apart two signatures are: types and words before batch, overlap and extents."""
        words = ("a", "b", "d", "accumulator", "epilogue", "scaling", "b_major")
        types = sum(getattr(have, f) != getattr(wanted, f) for f in words)
        extents = abs(math.log2(have.n / wanted.n)) + abs(math.log2(have.k / wanted.k))
        batch, overlap = have.batch != wanted.batch, have.overlap != wanted.overlap
        return 1000.0 * types + 100.0 * batch + 10.0 * overlap + extents

    def arguments(self, signature: Signature, m: int, device: int) -> tuple[TensorView, ...]:
        """The operands at `m` rows as a kernel takes them, contiguous, at made-up addresses."""
        return contiguous(signature, m, device)


GEMM = Gemm()
