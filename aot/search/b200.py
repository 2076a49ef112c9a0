"""What models of tcgen05 GEMMs take a B200 for: estimates, none of which was measured or fitted here.

From NVIDIA's data sheet (4.5 PFLOP/s in 16 bits with sparsity, so half of that of dense products; 8 TB/s), the PTX ISA
(tensor memory of 512 columns) and, where neither says it, from an H200's in `h200`. Knows nothing of kernels.
"""

from __future__ import annotations

from .rates import Tcgen05Rates

MULTIPROCESSORS = 148
TCGEN05 = Tcgen05Rates(
    cycles_per_us=1850,
    macs_per_cycle={16: 4096, 8: 8192, 6: 8192, 4: 16384},
    shared_bytes_per_cycle=128,
    tensor_memory_columns=512,
    scale_columns=64,
    brought_bytes_per_us=0.118e6,  # 64 bytes a cycle
    l2_bytes_per_us=20e6,
    memory_bytes_per_us=7.2e6,  # nine tenths, as much as an H200 gives of its peak
    start_us=3.0,
    epilogue_cycles_of_column=6,
    resident_clusters={1: 148, 2: 74, 4: 36, 8: 16, 16: 8},
)
