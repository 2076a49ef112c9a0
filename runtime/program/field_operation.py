"""Operations whose signatures are dataclasses of element types, words and extents: what follows from these fields
alone, so that a further operation says only what its operands are and what a call of it means."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from ..container.fields import is_int
from ..errors import RecordError
from ..limits import MAX_EXTENT
from ..numbers.dtypes import DTYPES
from .operation import Operand, Operation, contiguous

_MINOR, _MAJOR = 10.0, 1000.0  # of distances: doublings of an extent that count as much as another word


@dataclass(frozen=True)
class FieldSignature(ABC):
    """What such signatures have alike; see `runtime.program.operation.Signature`.

    A field of type `str` is an element type by short name, or one of the `words` of its `FieldOperation`; one of type
    `int` is an extent. One with a default may be left out by manifests and keys, and by tables too if it is `added`.
    """

    operation: ClassVar[str]  # the name of the operation that it is of
    added: ClassVar[tuple[str, ...]] = ()  # fields that tables do not mention where they are as before there were such

    @abstractmethod
    def key(self) -> str:
        """One readable word, the same for equal signatures and only for them."""

    @abstractmethod
    def operands(self) -> tuple[Operand, ...]:
        """The tensors that kernels take, in order."""

    @abstractmethod
    def extents(self) -> Mapping[str, int]:
        """The extent of each axis of `operands` that does not depend on M."""

    def numbers(self) -> tuple[tuple[str, str], ...]:
        """The numbers that kernels take after the operands, each with its type: none."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """What `FieldOperation.read` reads: all fields, but those that were `added` only where they are not usual."""
        usual = defaults(type(self))
        return {name: value for name, value in asdict(self).items() if name not in self.added or value != usual[name]}


def defaults(signature: type[FieldSignature]) -> dict[str, Any]:
    """The fields that have a default, each with that."""
    return {field.name: field.default for field in fields(signature) if field.default is not MISSING}


S = TypeVar("S", bound=FieldSignature)


class FieldOperation(Operation, Generic[S]):
    """An operation of such signatures; see `runtime.program.operation.Operation`."""

    signature: type[S]
    pattern: re.Pattern[str]  # of keys, a group for each field; those with a default may be absent
    labels: Mapping[str, str] = {}  # what people call fields, where not as code does
    words: Mapping[str, tuple[str, ...]] = {}  # of fields that are no element types
    minor: tuple[str, ...] = ()  # fields that tell signatures apart less than types and words do, and more than extents
    _integers: tuple[str, ...] = ()
    _types: tuple[str, ...] = ()

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        kinds = {field.name: field.type for field in fields(cls.signature)}
        cls.fields, cls.usual = tuple(kinds), defaults(cls.signature)
        cls._integers = tuple(name for name, kind in kinds.items() if kind in ("int", int))
        cls._types = tuple(name for name in kinds if name not in (*cls._integers, *cls.words))

    def read(self, obj: Any) -> S:
        """The signature that `to_json` wrote; what was `added` may be absent. An extent that is usually 0 may be.

        Raises:
            RecordError: it is malformed.
        """
        if isinstance(obj, dict):
            obj = {name: self.usual[name] for name in self.signature.added} | obj
        if not isinstance(obj, dict) or set(obj) != set(self.fields):
            names = sorted(self.fields)
            raise RecordError(f"a signature of {self.name} needs exactly the fields {names}, found {obj!r:.200}")
        for name in self._types:
            if not isinstance(obj[name], str) or obj[name] not in DTYPES:
                raise RecordError(f"signature field {name!r}: unknown element type {obj[name]!r:.50}")
        for name, known in self.words.items():
            if obj[name] not in known:
                raise RecordError(
                    f"signature field {name!r} must be one of {', '.join(known)}, found {obj[name]!r:.50}"
                )
        for name in self._integers:
            least = min(self.usual.get(name, 1), 1)
            if not is_int(obj[name], least, MAX_EXTENT):
                raise RecordError(f"signature field {name!r} must be {least} to {MAX_EXTENT}, found {obj[name]!r:.50}")
        return self.signature(**obj)

    def of_key(self, key: str) -> S | None:
        """The signature whose `key` this is, or None."""
        parts = self.pattern.fullmatch(key)
        if parts is None:
            return None
        found = {**self.usual, **{name: part for name, part in parts.groupdict().items() if part is not None}}
        try:
            signature = self.read(found | {name: int(found[name]) for name in self._integers})
        except RecordError:
            return None
        return signature if signature.key() == key else None

    def differences(self, have: S, wanted: S) -> list[str]:
        """How two signatures differ, in words, for people."""
        return [
            f"{self.labels.get(name, name)} is {getattr(have, name)}, wanted {getattr(wanted, name)}"
            for name in self.fields
            if getattr(have, name) != getattr(wanted, name)
        ]

    def distance(self, have: S, wanted: S) -> float:
        """How far apart two signatures are: types and words before those that are minor, and these before extents."""
        differ = {name for name in self.fields if getattr(have, name) != getattr(wanted, name)}
        extents = differ.intersection(self._integers).difference(self.minor)
        minor = differ.intersection(self.minor)
        ratios = (getattr(have, name) / getattr(wanted, name) for name in extents)
        of_words = _MAJOR * len(differ - extents - minor) + _MINOR * len(minor)
        return of_words + math.fsum(abs(math.log2(ratio)) for ratio in ratios)

    def arguments(self, signature: S, m: int, device: int) -> tuple[Any, ...]:
        """What a function takes for contiguous operands at `m` rows, at made-up addresses."""
        return contiguous(signature, m, device)
