"""Launch every GEMM and RMSNorm of an archive once or twice on ragged shapes; needs a GPU. For memory checkers:

compute-sanitizer --tool memcheck --report-api-errors no python scripts/launch_all.py build/coverage.aot

(API errors: the runtime asks the driver for one kernel parameter past the last, to see that it is the last.)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import report  # noqa: F401  # puts the checkout on the path
import torch

import runtime
from aot.operands import TORCH_DTYPES
from runtime.dispatch import serves
from runtime.record import TensorArgument

EXTENTS = {"m": (3, 77), "n": (288,), "p": (144,), "k": (528,), "kb": (5,), "nb": (3,), "l": (2,)}


def operand(t: TensorArgument, m: int) -> torch.Tensor:
    """A random tensor that fits the description, for `m` rows."""
    shape = [m if e == "m" else EXTENTS[e][0] if isinstance(e, str) else e for e in t.shape]
    transposed = len(shape) > 1 and t.strides[-2] == 1  # an N-major B
    if transposed:
        shape[-2:] = reversed(shape[-2:])
    values = torch.randn(shape, device="cuda").to(TORCH_DTYPES[t.dtype])
    return values.transpose(-1, -2) if transposed else values


def main() -> int:
    """Launch, and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    options = parser.parse_args()
    library = runtime.load(options.archive)
    launched = 0
    for function in library.functions.values():
        if not serves(function.target, torch.cuda.get_device_capability()):
            continue
        tensors = [a for a in function.record.leaves() if isinstance(a, TensorArgument)]
        for m in EXTENTS["m"]:
            given: list[object] = [operand(t, m) for t in tensors]
            given += [1e-5] if "rmsnorm" in function.name else []
            function(*given)
            launched += 1
    torch.cuda.synchronize()
    print(f"{launched} launches of {len(library.functions)} functions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
