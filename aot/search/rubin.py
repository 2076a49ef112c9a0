"""What models of tcgen05 GEMMs take a Rubin GPU for: what NVIDIA announced of it, and else a B200's. Nothing of it was
measured.

224 SMs, 22 TB/s of memory and 17.5 PFLOP/s of dense products in 8 bits (https://developer.nvidia.com/blog/
inside-the-nvidia-rubin-platform-six-new-chips-one-ai-supercomputer); 576 columns of tensor memory, as the DSL says.
"""

from __future__ import annotations

from dataclasses import replace

from . import b200

MULTIPROCESSORS = 224
TCGEN05 = replace(
    b200.TCGEN05,
    macs_per_cycle={16: 4096, 8: 16384, 6: 16384, 4: 32768},
    tensor_memory_columns=576,
    l2_bytes_per_us=b200.TCGEN05.l2_bytes_per_us * MULTIPROCESSORS / b200.MULTIPROCESSORS,
    memory_bytes_per_us=20e6,
    resident_clusters={1: 224, 2: 112, 4: 54, 8: 26, 16: 12},
)
