"""The libraries that know signatures, which a plain install lacks: without them nothing counts as signed."""

from __future__ import annotations

from ..errors import SignatureError


def require_libraries() -> None:
    """Import what reads keys and envelopes, so that whoever calls this may do so too.

    Raises:
        SignatureError: a library is missing, or too old.
    """
    try:
        import cryptography.hazmat.primitives.serialization  # noqa: F401
        import securesystemslib.dsse  # noqa: F401
    except ImportError as error:
        raise SignatureError(
            f"signatures need securesystemslib and cryptography ({error}); pip install 'securesystemslib[crypto]'"
        ) from None
