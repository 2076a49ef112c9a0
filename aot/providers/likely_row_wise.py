"""Which choices of the kernels that work row by row are worth compiling: what won somewhere on an H200, of each choice.

An opinion: who names a variant that is left out here gets it. Nothing here decides the code of a kernel, so a change
compiles nothing anew.
"""

from __future__ import annotations

RMSNORM: dict[str, tuple[int, ...]] = {"threads": (128, 256, 512)}
QUANTISE: dict[str, tuple[int, ...]] = {"threads": (128, 256, 512)}
MOE_PERMUTE: dict[str, tuple[int, ...]] = {"threads": (128, 256)}
MOE_COMBINE: dict[str, tuple[int, ...]] = {"threads": (128, 256), "at_once": (8, 4, 2)}
