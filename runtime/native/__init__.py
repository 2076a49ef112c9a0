"""`runtime.native._native`, where it was built, and the table of shapes that it keeps for torch tensors.

`loaded` says whether it was built and is used. Knows of a driver only what the table asks it. Importing it warns,
through logging, of native code of another version.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

_log = logging.getLogger(__name__)

_INTERFACE = 11  # that of _native.c, to be raised there and here with every change of what it offers
_native: Any
try:
    from . import _native
except ImportError:  # it was not built: an install without a C compiler
    _native = None
if _native is not None and getattr(_native, "INTERFACE", None) != _INTERFACE:
    _log.warning("%s is of another version and left alone, so launches take longer: install again", _native.__file__)
    _native = None
costs: Any = getattr(_native, "Costs", None)  # what reads and evaluates cost programs, where it was built
effect: Any = getattr(_native, "Effect", None)  # what adds up effects on times
trees: Any = getattr(_native, "Trees", None)  # what adds up regression trees
loaded = _native is not None  # whether native code launches kernels and evaluates their programs


def native_table(driver: Any) -> Any:
    """A `_native.Table` for launches on the driver's device, or False if there can be none; torch is imported.

    torch 2.10 and newer have the exchange API of DLPack that it reads tensors through.
    """
    torch = sys.modules["torch"]
    tensor = getattr(torch, "Tensor", None)
    capsule = getattr(tensor, "__dlpack_c_exchange_api__", None)
    if _native is None or capsule is None:
        return False
    types = (tensor, torch.nn.Parameter)  # and no subclass, whose tensors may not be what they seem
    # The default streams are those of the context that is current, which is the device's where there is one only.
    get_current, context = driver.context_question() if driver.device_count > 1 else (0, 0)
    try:
        return _native.Table(capsule, types, torch.Tensor.new_empty, get_current, context)
    except ValueError:  # an exchange API of a later time
        return False
