"""What the estimates of kernels by mma.sync take a GPU for: an A100, of which nothing was measured or fitted here.

From NVIDIA's A100 whitepaper (1410 MHz, 1024 multiply-adds of 16 bits an SM and cycle, 64 warps and 164 KB of shared
memory an SM) and, where it does not say, round numbers. Knows nothing of kernels.
"""

from __future__ import annotations

from .rates import MmaSyncRates

MMA_SYNC = MmaSyncRates(
    cycles_per_us=1410,
    schedulers=4,
    macs_per_cycle=1024,
    shared_bytes_per_cycle=128,
    shared_bytes={"sm_80": 164 << 10, "sm_90a": 228 << 10, "sm_120a": 100 << 10},
    warps=64,
    registers=1 << 16,
    dequantise_instructions={"mxfp4_weight": 64, "int4_weight": 48, "int4_zero_weight": 64},
    stage_cycles=250,
    block_cycles=160,
    latency_cycles=900,
    memory_share=0.85,
    l2_bytes_per_us_of_sm=45e3,
    start_us=2.0,
    store_sums_per_us=6000,
    rest=0.15,
)
