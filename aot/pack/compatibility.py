"""Whether a function can be what an entry says of it, asked before it is in a table."""

from __future__ import annotations

from typing import Any

from runtime.program.record import Record
from runtime.tables.dispatch import record_mismatch

from ..search.operation import building


def refusal(record: Record, signature: Any) -> str | None:
    """Why the function of a record cannot be called for a signature, or None: by its arguments, and by what the
    operation asks besides."""
    if mismatch := record_mismatch(signature, record):
        return f"it {mismatch}"
    return building(signature.operation).refusal(record, signature)
