"""What models of tcgen05 GEMMs take a Jetson T5000 for: its data sheet, and else a B200's. Nothing of it was measured.

20 SMs at 1.57 GHz, and 273 GB/s of memory.
"""

from __future__ import annotations

from dataclasses import replace

from . import b200

MULTIPROCESSORS = 20
TCGEN05 = replace(
    b200.TCGEN05,
    cycles_per_us=1570,
    brought_bytes_per_us=0.1e6,  # 64 bytes a cycle
    l2_bytes_per_us=b200.TCGEN05.l2_bytes_per_us * MULTIPROCESSORS / b200.MULTIPROCESSORS,
    memory_bytes_per_us=0.24e6,
    resident_clusters={1: 20, 2: 10, 4: 4, 8: 2, 16: 1},
)
