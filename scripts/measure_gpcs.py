"""Which SMs are neighbours on the chip, and in which order clusters of two fall to them; needs a GPU and ncu.

Neighbours are SMs whose reads of the same lines at the same time L2 serves once: every pair of one SM of every second
TPC with each other reads the same megabyte, and a hardware counter says whether L2 did so once or twice. Then a kernel
of clusters says on which SMs they are. `persistent_gpc` rests on both.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Sequence

import cuda_probe
import torch
from measure_bounds import counted
from report import out_argument, write

from aot import measure

_SOURCE = rb"""
extern "C" __global__ void where(int* sm_of_cta) {
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    long long began = clock64();
    if (threadIdx.x == 0) {
        sm_of_cta[blockIdx.x] = sm;
        while (clock64() - began < 200000) {}
    }
}
extern "C" __global__ void read(const uint4* data, long long count, int one, int other, unsigned* met, unsigned* sink) {
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    if (sm != one && sm != other) return;
    if (threadIdx.x == 0) {
        atomicAdd(met, 1);
        while (*(volatile unsigned*)met < 2) {}
    }
    __syncthreads();
    unsigned seen = 0;
    for (long long i = threadIdx.x; i < count; i += blockDim.x) {
        uint4 v;
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(data + i));
        seen ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (seen == 0x9e3779b9) *sink = seen;
}
"""
_BYTES = 1 << 20
_SECTOR = 32
_SHARED_BYTES = 200 << 10  # so that an SM has one CTA
_COUNTER = "lts__t_sectors_srcunit_tex.sum"
_READ = "--read"


def sms_of_ctas(ctas: int, cluster: int) -> list[int]:
    """The SM of each CTA of a grid that fits at once."""
    found = torch.full((ctas,), -1, dtype=torch.int32, device="cuda")
    (where,) = cuda_probe.kernels(_SOURCE, ["where"], _SHARED_BYTES)
    cuda_probe.launch(where, ctas, 128, _SHARED_BYTES, [cuda_probe.pointer(found)], cluster)
    return found.tolist()


def read_in_pairs(pairs: Sequence[tuple[int, int]]) -> None:
    """Let each pair of SMs read the same, where the profiler looks."""
    (read,) = cuda_probe.kernels(_SOURCE, ["read"], _SHARED_BYTES)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    data, sink = torch.zeros(_BYTES, dtype=torch.uint8, device="cuda"), torch.zeros(1, device="cuda")
    for one, other in pairs:
        met = torch.zeros(1, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        arguments = [cuda_probe.pointer(data), (_BYTES // 16, ctypes.c_longlong), (one, ctypes.c_int)]
        arguments += [(other, ctypes.c_int), cuda_probe.pointer(met), cuda_probe.pointer(sink)]
        cuda_probe.launch(read, sms, 1024, _SHARED_BYTES, arguments)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def sectors(pairs: Sequence[tuple[int, int]]) -> list[float]:
    """How often L2 was read for each pair, of once for all that it reads."""
    child = [sys.executable, __file__, _READ, ",".join(f"{a}:{b}" for a, b in pairs)]
    rows = counted([_COUNTER], child)
    return [float(row[_COUNTER].replace(",", "")) * _SECTOR / _BYTES for row in rows]


def groups(count: int, pairs: Sequence[tuple[int, int]], times: Sequence[float]) -> list[list[int]]:
    """`count` SMs by whose reads are served once, if a pair's were where L2 was read less than one and a half times.

    SMs 2i and 2i + 1 are of one TPC, and in `pairs` the even ones stand for both.
    """
    group_of = {sm: sm - sm % 2 for sm in range(count)}
    for (one, other), read in zip(pairs, times, strict=True):
        if read < 1.5:
            joined, into = group_of[other], group_of[one]
            group_of = {sm: into if group == joined else group for sm, group in group_of.items()}
    return [[sm for sm in range(count) if group_of[sm] == group] for group in sorted(set(group_of.values()))]


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=16, help="how many SMs to pair with all others")
    parser.add_argument(_READ, dest="read", help=argparse.SUPPRESS)
    out_argument(parser)
    options = parser.parse_args()
    if options.read:
        read_in_pairs([(int(a), int(b)) for a, _, b in (pair.partition(":") for pair in options.read.split(","))])
        return 0
    count = torch.cuda.get_device_properties(0).multi_processor_count
    if torch.cuda.get_device_capability() < (9, 0) or count % 2:
        parser.error("clusters of two, one for each TPC, are of GPUs from Hopper on with an even number of SMs")
    if options.first < 2:
        parser.error("--first: give 2 or more SMs to pair with all others")
    pairs = [(a, b) for a in range(0, options.first, 2) for b in range(a + 2, count, 2)]
    found = groups(count, pairs, sectors(pairs))
    if alone := [sms for sms in found if len(sms) == 2]:
        print(f"no group was found for {alone}; more --first would tell, or they are alone", file=sys.stderr)
    group_of = {sm: group for group, sms in enumerate(found) for sm in sms}
    order = [group_of[sm] for sm in sms_of_ctas(count, 2)[::2]]
    print(f"{len(found)} groups of {[len(sms) for sms in found]} SMs")
    print("clusters of two fall to groups", *order)
    write(options.out, measure.environment(), groups=found, groups_of_clusters=order)
    return 0


if __name__ == "__main__":
    sys.exit(main())
