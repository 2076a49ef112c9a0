"""All that was fitted to an H200, or measured on one, by which variants are put in order and timed: 132 SMs,
power-limited, November 2026.

Nothing here is in a kernel's code, so a better fit compiles nothing anew. Numbers that are in it stand apart, in
`aot.kernels.sm90.h200`; which choices are worth trying is in `aot/providers/likely_*.py`, and how well the estimates
order variants in `rank`. Knows nothing of kernels or providers.
"""

from __future__ import annotations

from runtime.device import gpus

from .costs import Machine
from .rates import ElementRates, FloorRates, GroupedRates, Load, PersistentRates, RoofRates, SmallMRates, W4Rates

NAME, MULTIPROCESSORS, _MEMORY_GBPS = gpus.H200
H200 = Machine(MULTIPROCESSORS, _MEMORY_GBPS)

# Fitted to 170,000 times: of up to 600 functions at powers of two of M, and of 40 for each form at M, N and K drawn at
# random.
PERSISTENT = PersistentRates(
    by_element_bytes={
        2: ElementRates(
            start_us=2.81,
            power_macs_per_us=3.17e6,
            byte_macs=0.612,
            row_bytes=7.38,
            clock_macs_per_us=3.34e6,
            brought_bytes_per_us=0.12e6,
            epilogue_us=0.0,  # neither this nor the next was seen in 16 bits
            piece_us=0.0,
            seen=1.91,
            pingpong=0.936,
        ),
        1: ElementRates(
            start_us=3.13,
            power_macs_per_us=43.3e6,
            byte_macs=252,
            row_bytes=0.844,
            clock_macs_per_us=6.64e6,
            brought_bytes_per_us=0.113e6,
            epilogue_us=0.581,
            piece_us=0.074,
            seen=0.992,
            pingpong=1.0,
        ),
    },
    resident_clusters={1: 132, 2: 66, 4: 30, 8: 15},  # of eight as for `SMALL_M`
    l2_bytes_per_us=14.2e6,
    memory_bytes_per_us=4.17e6,
    floor_bytes_per_us=4.15e6,
    out_bytes=1.75,
    residual_bytes=4.33,
    past_m_bytes_per_us=14.3e6,
    meeting_us=1.06,
    pushed_bytes_per_us=0.0323e6,
    shared_tiles_us=3.54,
    exchanged_bytes_per_us=12.7e6,
    one_tile=0.975,  # this by tiles of `aot.providers.likely_persistent`; the next from 1.4 to 5.6
    one_tile_wave_us=2.5,
    quads=0.98,  # from shape to shape 0.8 to 1.0
    overlap_us=0.91,
    residual_us=2.29,
    promotion_cycles=60,  # this and the next by times of 27 tiles with scales of blocks, M = 512 to 4096
    stage_cycles=240,
)

# The rates of dense GEMMs that its floors are stated by: to grouped GEMMs only what an SM takes in from memory was
# fitted, by three launches of 92 to 96 tiles, which took 1.28 to 1.38 times as long as a cold read.
GROUPED = GroupedRates(
    read_bytes_per_us=4.3e6,
    loaded_bytes_per_us=0.055e6,
    cold_bytes_per_us=0.037e6,
    flops_per_us=720e6,
    narrow_flops_per_us=1100e6,
    launch_us=3.0,
    tile_us=0.6,
    pingpong_us=0.3,
    hidden=0.1,
)

# Fitted to times of `sm90_small_m` over layers of models at M from 1 to 512.
SMALL_M = SmallMRates(
    start_us=1.0,
    start_of_cta_us=1.68,
    overlap_us=0.7,
    memory_bytes_per_us=4.57e6,
    l2_bytes_per_us=11.7e6,
    past_n_bytes_per_us=4.1e6,  # by 1,145 times at N = 8, 128, 256 and 512, M = 1 to 8192
    read_again=0.63,
    cycles_per_us=2200,
    power_macs_per_us={2: 2.4e6, 1: 4.0e6},
    exact=1.12,
    split_us=0.23,
    split_sums_per_us=7100,
    store_sums_per_us=10_900,
    spare_elements_per_us=250_000,
    latency_us=1.51,
    tail=1.34,
    rest=0.08,
    # Clusters of 4 and 8 CTAs do not fill every GPC.
    resident_ctas={1: (132, 264), 2: (132, 264), 4: (120, 248), 8: (120, 240)},
)

# Fitted to times of `sm90_w4` over layers of models at M from 1 to 64.
W4 = W4Rates(
    start_us=1.4,
    start_of_cta_us=1.76,
    overlap_us=0.7,
    memory_bytes_per_us=3.9e6,
    l2_bytes_per_us=9.5e6,
    cycles_per_us=1670,
    issue_cycles={"mxfp4_weight": 159, "int4_weight": 122, "int4_zero_weight": 159},  # of int4 by its instructions
    stage_cycles=48,
    least_wgmma_cycles=24,
    wait_cycles=200,
    split_us=0.45,
    split_sums_per_us=6200,
    store_sums_per_us=14_200,
    latency_us=1.95,
    tail=0.78,
    rest=0.14,
    resident_ctas=SMALL_M.resident_ctas,
)

# Of a graph's launches 1.96 us is the least seen.
ROOF = RoofRates(bytes_per_us=4e6, flops_per_us=800e6, launch_us=2.0)

# With default power limits (docs/moe.md, docs/kernels/sm90_grouped.md): cold reads come near 4.3 TB/s; bf16 is bound by
# power near 720 TFLOP/s, e4m3 near 1400.
FLOOR = FloorRates(memory_bytes_per_us=4.3e6, flops_per_us={16: 720e6, 8: 1400e6})

# The clock is lowered 30 to 100 ms after a load begins that takes more power than it may, at first perhaps further than
# it has to: where each was timed from 140 to 190 ms after its own load began, one of four finalists took 3 to 26%
# longer than its like at 32 of 54 points, and two did at two. In turns of 40 ms clocks are still on their way, in turns
# of 150 ms they are not ("the length of a turn" in benchmarks/results/studies_h200.json). Of 212 finalists at 54 points
# none that was further behind than `may_win` came out best.
LOAD = Load(settle_us=200e3, own_us=110e3, sample_us=10e3, samples=4, may_win=1.03)
