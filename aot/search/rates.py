"""What estimates of families' times, floors of them and tuning must know of a GPU, fitted to times that were measured
there: types of tables.

There is one table for each GPU, such as `h200`. Knows nothing of kernels or providers. Times are in microseconds, and a
rate is so many a microsecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class FloorRates(NamedTuple):
    """What kernels were seen to reach, of which `aot.inspect.floor` makes the least time of a problem: bytes of memory,
    and floating-point operations of the tensor cores by the bits of an element, two for a multiply-add."""

    memory_bytes_per_us: float
    flops_per_us: Mapping[int, float]


class RoofRates(NamedTuple):
    """The least that a problem takes, roughly: bytes to and from memory, operations, and a launch."""

    bytes_per_us: float
    flops_per_us: float
    launch_us: float


class Load(NamedTuple):
    """How long launches run under sustained load, in microseconds: all of them in turn until the clock has settled,
    then each without pause, first to meet the clock that its own power leaves it, then for its samples. `may_win` is
    how many times the least time a function may take that comes out best under load."""

    settle_us: float
    own_us: float
    sample_us: float
    samples: int
    may_win: float

    def us(self, count: int) -> float:
        """What `count` contenders take together."""
        return self.settle_us + count * (self.own_us + self.samples * self.sample_us)


@dataclass(frozen=True)
class ElementRates:
    """What of `PersistentRates` depends on the bytes of an element of A and B."""

    start_us: float
    power_macs_per_us: float  # multiply-adds of an SM while all are busy
    byte_macs: float  # multiply-adds that take as much energy as a byte that WGMMA reads of its columns
    row_bytes: float  # and one of its 64 rows, in bytes of columns
    clock_macs_per_us: float  # multiply-adds of an SM while few are busy
    brought_bytes_per_us: float  # that TMA brings to an SM
    epilogue_us: float  # of 128 x 128 sums by one warpgroup, and
    piece_us: float  # of each piece of it
    seen: float  # of it, and of all that a tile costs besides, the part where no other warpgroup multiplies
    pingpong: float  # power that pingpong takes, against cooperative


@dataclass(frozen=True)
class PersistentRates:
    """A persistent, warp-specialised GEMM, whoever wrote it."""

    by_element_bytes: Mapping[int, ElementRates]
    resident_clusters: Mapping[int, int]  # that run at a time, by their CTAs
    l2_bytes_per_us: float
    memory_bytes_per_us: float
    floor_bytes_per_us: float  # of memory, where there is nothing else
    out_bytes: float  # of memory, that a byte of D costs
    residual_bytes: float  # and one of the residual
    past_m_bytes_per_us: float  # of rows past M, that CTAs receive: one after the other, whoever asks
    meeting_us: float  # of CTAs that split K, before they push sums
    pushed_bytes_per_us: float
    shared_tiles_us: float  # of the CTAs that share a tile through memory
    exchanged_bytes_per_us: float  # that they write and read back
    one_tile: (
        float  # the time of a wave of tiles with a CTA each, where that leaves a stage more, against persistent ones
    )
    one_tile_wave_us: float  # and what each wave behind the first one costs more
    quads: float  # the time of tiles in this order against any other, on average
    overlap_us: float  # what a launch gains that may begin early
    promotion_cycles: float  # of 64 rows of a stage's sums by a warpgroup, besides a sum a cycle
    stage_cycles: float  # from one stage of these to the next, that nothing hides
    residual_us: float  # of 128 x 128 sums by one warpgroup, to which a residual is added

    def resident(self, cluster: int) -> int:
        """Clusters of so many CTAs that run at a time; of a size that was not seen, as many CTAs as of the next one."""
        seen = _seen(self.resident_clusters, cluster)
        return self.resident_clusters[seen] * seen // cluster


@dataclass(frozen=True)
class GroupedRates:
    """A persistent GEMM of groups, whose weights no cache has."""

    read_bytes_per_us: float  # of memory
    loaded_bytes_per_us: float  # into an SM's shared memory, from L2
    cold_bytes_per_us: float  # and from memory, however few other SMs load
    flops_per_us: float  # of all SMs, in 16 bits, at the clock that power leaves
    narrow_flops_per_us: float  # and in 8 bits, whose sums are promoted
    launch_us: float  # to begin and end a kernel
    tile_us: float  # of a tile's epilogue that nothing hides
    pingpong_us: float  # of that, what pingpong hides
    hidden: float  # of the shorter of reading and computing, the part that does not hide behind the longer


@dataclass(frozen=True)
class SmallMRates:
    """A GEMM for few tokens, one CTA a tile and slice of K."""

    start_us: float
    start_of_cta_us: float
    overlap_us: float  # what a launch gains that may begin early
    memory_bytes_per_us: float
    l2_bytes_per_us: float
    past_n_bytes_per_us: float  # of tiles of B, rows past N
    read_again: float  # what another row of tiles of D costs, in reads of B
    cycles_per_us: float
    power_macs_per_us: Mapping[int, float]  # of an SM while all are busy; by bytes of an element
    exact: float  # times as long, to move the sums of 8-bit products to f32 registers
    split_us: float  # of a CTA whose sums meet others'
    split_sums_per_us: float
    store_sums_per_us: float
    spare_elements_per_us: float  # rows past M that a CTA loads, times columns of A
    latency_us: float  # of a load while the memory is busy
    tail: float  # what a wave that is empty would cost, in times of a CTA, for the part of the last one that is
    rest: float  # of the flows that are not the slowest, what is added
    resident_ctas: Mapping[int, tuple[int, int]]  # with one and with two an SM, by the CTAs of a cluster

    def resident(self, cluster: int, per_sm: int) -> int:
        """CTAs that run at a time, of clusters of so many, and `per_sm` of them to an SM; of a size that was not seen,
        as many as of the next one, and of more than two an SM in proportion."""
        return _resident(self.resident_ctas, cluster, per_sm)


@dataclass(frozen=True)
class Tcgen05Rates:
    """A persistent GEMM whose sums are in tensor memory, whoever wrote it."""

    cycles_per_us: float
    macs_per_cycle: Mapping[int, int]  # of an SM, by bits of an element of A
    shared_bytes_per_cycle: int  # that an SM's tensor core reads of A and B
    tensor_memory_columns: int  # of 128 sums, of an SM
    scale_columns: int  # of these, that tiles of scales take where the tensor core applies them
    brought_bytes_per_us: float  # that TMA brings to an SM
    l2_bytes_per_us: float
    memory_bytes_per_us: float
    start_us: float
    epilogue_cycles_of_column: float  # of 128 sums, from tensor memory to D
    resident_clusters: Mapping[int, int]  # that run at a time, by their CTAs


@dataclass(frozen=True)
class W4Rates:
    """A GEMM of 4-bit weights, one CTA a tile and slice of K; names that `SmallMRates` has are the same."""

    start_us: float
    start_of_cta_us: float
    overlap_us: float
    memory_bytes_per_us: float
    l2_bytes_per_us: float
    cycles_per_us: float
    issue_cycles: Mapping[str, float]  # of a warp, to dequantise its rows of 128 columns; by the word of the scaling
    stage_cycles: float  # besides, for each stage
    least_wgmma_cycles: float  # of one with few tokens
    wait_cycles: float  # of a warp group for what it loads from shared memory
    split_us: float
    split_sums_per_us: float
    store_sums_per_us: float
    latency_us: float
    tail: float
    rest: float
    resident_ctas: Mapping[int, tuple[int, int]]

    def resident(self, cluster: int, per_sm: int) -> int:
        """As `SmallMRates.resident`."""
        return _resident(self.resident_ctas, cluster, per_sm)


@dataclass(frozen=True)
class MmaSyncRates:
    """A GEMM of 4-bit weights by mma.sync, one CTA a tile: what an SM has and does, unless it says otherwise."""

    cycles_per_us: float
    schedulers: int
    macs_per_cycle: int  # of 16-bit elements
    shared_bytes_per_cycle: int
    shared_bytes: Mapping[str, int]  # by target
    warps: int
    registers: int
    dequantise_instructions: Mapping[str, int]  # of a warp, of 16 rows by 64 columns; by the word of the scaling
    stage_cycles: float  # that a CTA alone waits at a stage, for its threads and for shared memory
    block_cycles: float  # from the codes of a block of 64 columns to its sums, whatever else a warp does
    latency_cycles: float  # of a load while the memory is busy
    memory_share: float  # of the memory's peak rate, that a kernel gets
    l2_bytes_per_us_of_sm: float
    start_us: float
    store_sums_per_us: float
    rest: float  # of the flows that are not the slowest, what is added


def _resident(ctas: Mapping[int, tuple[int, int]], cluster: int, per_sm: int) -> int:
    one, two = ctas[_seen(ctas, cluster)]
    return one if per_sm == 1 else two * per_sm // 2


def _seen(by_cluster: Mapping[int, object], cluster: int) -> int:
    """The least size of clusters in a table that is not below `cluster`."""
    return min(size for size in by_cluster if size >= cluster)
