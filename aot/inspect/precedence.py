"""Which entries of an archive's tables serve on no GPU, since something else of the archive goes before them.

The rules are those of `runtime.tables.dispatch.nearest_kind` and of `runtime.serve`, for one archive: what serves of a
layer depends on the others. Knows nothing of how any of it is shown.
"""

from __future__ import annotations

from typing import Any

from runtime.container.archive import Archive
from runtime.gemm.universal import PredictedEntry, UniversalForm, trusted_to
from runtime.program.operation import operation
from runtime.tables.table import Entry

from ..pack import forms
from ..pack.tables import operation_entries
from .kinds import capability, usual


class Precedence:
    """What serves in place of each entry of an archive."""

    def __init__(self, archive: Archive) -> None:
        """Raises RecordError where a table is malformed."""
        self.entries, self.universal = operation_entries(archive), forms.read(archive)
        self._forms = {id(row.form): row.name for row in forms.rows(archive, self.universal)}
        self._tuned = {(e.signature, e.target) for e in self.entries if e.state == "tuned"}

    def instead_of(self, entry: Entry) -> dict[str, Any] | None:
        """What an entry gives way to on every GPU; None if it serves.

        `state` is "tuned" where that is entries for kinds of GPU, "predicted" where it is a form, whose name is `form`
        and whose functions were checked on the GPUs `checked_on`; in the first case these are None and empty.
        """
        if entry.state == "tuned":
            return None
        if entry.gpu is None and (entry.signature, entry.target) in self._tuned:
            return {"state": "tuned", "form": None, "checked_on": []}
        found = self._checked_form(entry)
        if found is None:
            return None
        return {"state": "predicted", "form": self._forms[id(found)], "checked_on": list(found.checked_on)}

    def predicted_from(self, entry: Entry) -> int | None:
        """The least M at which a tuned entry gives way to what is predicted; None if it never does."""
        last, found = trusted_to(entry), self._checked_form(entry)
        return None if last is None or found is None or found.target != entry.target else last + 1

    def predicted_for(self, entry: Entry) -> PredictedEntry:
        """What is predicted for a tuned entry that has an M from which it gives way to that."""
        where = capability(entry.target)
        found = None
        if self.universal is not None:
            found = self.universal.entry(entry.signature, where, entry.gpu or usual(where))
        assert found is not None, "a form has it"
        return found

    def _checked_form(self, entry: Entry) -> UniversalForm | None:
        """The form that can serve an entry's signature, if its functions were checked on any GPU."""
        if self.universal is None or operation(entry.signature.operation).predictions != forms.TABLE:
            return None
        form = self.universal.form(entry.signature, capability(entry.target))
        return form if form is not None and form.checked_on else None
