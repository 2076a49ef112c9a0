"""Small files that are read whole: keys, policies, envelopes."""

from __future__ import annotations

import os
import stat

from ..errors import SignatureError


def read_small(path: str, what: str, limit_bytes: int, advice: str) -> bytes:
    """The bytes of a regular file that has at most `limit_bytes`.

    Raises:
        SignatureError: it is missing, larger, or something else; the message calls it `what` and ends in `advice`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a named pipe would wait for a writer
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SignatureError(f"{path}: {what} is not a regular file; {advice}")
            data = file.read(limit_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SignatureError(f"{path}: {what} cannot be read ({reason}); {advice}") from None
    if len(data) > limit_bytes:
        raise SignatureError(f"{path}: {what} has more than {limit_bytes} bytes; {advice}")
    return data
