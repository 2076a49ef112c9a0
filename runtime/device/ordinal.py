"""How a caller names a device: an ordinal, a word as torch writes it, or an object of torch's.

Knows which names make sense, and of no driver what devices there are.
"""

from __future__ import annotations

import operator
from typing import Any, Protocol, SupportsIndex

from ..errors import ArgumentError

_LAST_ORDINAL = (1 << 31) - 1  # CUdevice is a C int


class TorchDevice(Protocol):
    """What is read of a `torch.device`."""

    @property
    def type(self) -> str:
        """Such as "cuda"."""

    @property
    def index(self) -> int | None:
        """The ordinal, or None for the device that is current."""


Device = SupportsIndex | str | TorchDevice


def ordinal_of(device: Device | None) -> int | None:
    """The ordinal that `device` names; None where it names the device that is current: None, "cuda", torch's "cuda".

    Raises:
        ArgumentError: it names no CUDA device.
    """
    found: Any = device  # -1 stands for no device
    if isinstance(device, str):
        kind, _, digits = device.partition(":")
        plain = kind == "cuda" and digits.isascii() and digits.isdigit() and len(digits) <= len(str(_LAST_ORDINAL))
        found = None if device == "cuda" else int(digits) if plain else -1
    elif isinstance(getattr(device, "type", None), str):
        found = found.index if found.type == "cuda" else -1
    elif isinstance(device, bool):
        found = -1
    if found is None:
        return None
    try:
        ordinal = operator.index(found)
    except TypeError:
        ordinal = -1
    if not 0 <= ordinal <= _LAST_ORDINAL:
        raise ArgumentError(
            f"device must be an ordinal from 0 up, 'cuda:0' and so on, 'cuda' or a torch.device of CUDA; "
            f"found {device!r:.80}"
        )
    return ordinal
