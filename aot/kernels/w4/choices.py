"""Which weights there are kernels for, as pure arithmetic: of these decides no choice.

Imports no compiler.
"""

from __future__ import annotations

from .form import SLAB_ROWS, Form


def limit(form: Form, n: int, k: int) -> str | None:
    """Why no kernel of this form takes weights of N rows and K columns, or None."""
    if n % SLAB_ROWS:
        return f"N must be a multiple of {SLAB_ROWS}, found {n}"
    if k % form.format.columns:
        return f"K must be a multiple of {form.format.columns}, found {k}"
    return None
