"""Whether a function can be what an entry says of it, asked before it is in a table."""

from __future__ import annotations

from typing import Any

from runtime.errors import ArgumentError
from runtime.gemm.operation import GEMM
from runtime.program.operation import operation
from runtime.program.record import Record
from runtime.tables.dispatch import record_mismatch


def refusal(record: Record, signature: Any) -> str | None:
    """Why the function of a record cannot be called for a signature, or None.

    Of GEMM only its arguments are looked at: which extents a function takes is a rule of its family.
    """
    if mismatch := record_mismatch(signature, record):
        return f"it {mismatch}"
    if signature.operation == GEMM.name:
        return None
    try:
        numbers = {argument.name: 1 for argument in record.device_arguments}
        record.bind(operation(signature.operation).arguments(signature, 1, 0), numbers)
    except ArgumentError as error:
        return str(error)
    return None
