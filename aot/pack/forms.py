"""The table "universal" of an archive: its forms, and the functions that they name.

`runtime.gemm.universal` writes and reads it. Knows nothing of what is chosen for a signature.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from runtime.container.archive import Archive
from runtime.gemm.signature import Signature
from runtime.gemm.universal import WORDS, Universal, UniversalForm

from ..search.universal import form_word
from .fields import naming

TABLE = "universal"


class FormRow(NamedTuple):
    """A form of the table: its words (`runtime.gemm.universal.WORDS`), whether it is batched, its functions, and the
    place of its cost program in the table."""

    words: tuple[str, ...]
    batched: bool
    form: UniversalForm
    program: int

    @property
    def name(self) -> str:
        """The key of its signatures with stars for what they differ in."""
        return form_word(self.signature(2, 1))

    def signature(self, n: int, k: int) -> Signature:
        """One of its signatures, with a batch of 2 where it is batched."""
        return self.form.signature(n, k)

    def to_json(self) -> dict[str, Any]:
        """Its words by name, and `batched`."""
        return dict(zip(WORDS, self.words, strict=True)) | {"batched": self.batched}


def read(archive: Archive) -> Universal | None:
    """The table, or None where the archive has none.

    Raises:
        RecordError: it is malformed; cost programs are not looked at.
    """
    if TABLE not in archive.tables:
        return None
    with naming(archive):
        return Universal.from_json(archive.table(TABLE), archive.functions.targets_by_name())


def names(archive: Archive) -> set[str]:
    """The functions of the archive's forms; raises as `read` does."""
    there = read(archive)
    return set() if there is None else {f.name for _, form in there.forms for f in form.functions}


def signature_of(key: str) -> Signature | None:
    """The signature whose key this is, if forms are of its operation; else None."""
    return Signature.of_key(key)


def rows(archive: Archive, table: Universal | None) -> list[FormRow]:
    """The forms of the archive's table, in its order."""
    if table is None:
        return []
    programs = [row["program"] for row in archive.table(TABLE)["forms"]]
    return [
        FormRow(key[: len(WORDS)], key[len(WORDS)], form, program)
        for (key, form), program in zip(table.forms, programs, strict=True)
    ]
