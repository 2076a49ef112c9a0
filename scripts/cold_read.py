"""What reading some megabytes out of memory takes at least, by the fastest of a few kernels that do no more.

It is the floor of a GEMM of few tokens, which must read B: `bench_gemm.py` times these kernels in turn with ours. Some
load to registers, others copy to shared memory in bulk. Run alone, this checks that each reads every byte, and times
sizes of 2 to 1,024 MiB on cold L2. Needs a GPU of compute capability 9.0 or later.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import cuda_probe
import torch
from report import ends, out_argument, write

from aot.tune import measure

_SOURCE = rb"""
template <int UNROLL>
__device__ void load_all(const uint4* data, long long count, unsigned* sum, int add) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    unsigned seen = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += UNROLL * stride) {
        uint4 v[UNROLL];
#pragma unroll
        for (int j = 0; j < UNROLL; ++j) {
            v[j] = make_uint4(0, 0, 0, 0);
            if (i + j * stride < count)
                asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w) : "l"(data + i + j * stride));
        }
#pragma unroll
        for (int j = 0; j < UNROLL; ++j) seen += v[j].x + v[j].y + v[j].z + v[j].w;
    }
    if (add || seen == 0x9e3779b9) atomicAdd(sum, seen);
}
extern "C" __global__ void __launch_bounds__(1024) load_4(const uint4* data, long long bytes, unsigned* sum, int add) {
    load_all<4>(data, bytes / 16, sum, add);
}
extern "C" __global__ void __launch_bounds__(1024) load_8(const uint4* data, long long bytes, unsigned* sum, int add) {
    load_all<8>(data, bytes / 16, sum, add);
}

extern __shared__ __align__(128) char ring[];

template <int PIECE, int STAGES>
__device__ void copy_all(const char* data, long long bytes, unsigned* sum, int add) {
    __shared__ __align__(8) unsigned long long full[STAGES];
    const unsigned ring_at = (unsigned)__cvta_generic_to_shared(ring);
    const unsigned full_at = (unsigned)__cvta_generic_to_shared(full);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(full_at + 8 * s));
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    if (threadIdx.x != 0 && !add) return;
    const long long pieces = (bytes + PIECE - 1) / PIECE;
    const long long mine = blockIdx.x < pieces ? (pieces - blockIdx.x - 1) / gridDim.x + 1 : 0;
    auto fetch = [&](long long i) {
        const long long from = (blockIdx.x + i * gridDim.x) * (long long)PIECE;
        const unsigned size = (unsigned)(bytes - from < PIECE ? bytes - from : PIECE), stage = (unsigned)(i % STAGES);
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full_at + 8 * stage), "r"(size));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(ring_at + stage * PIECE), "l"(data + from), "r"(size), "r"(full_at + 8 * stage) : "memory");
    };
    if (threadIdx.x == 0)
        for (long long i = 0; i < mine && i < STAGES; ++i) fetch(i);
    unsigned seen = 0;
    for (long long i = 0; i < mine; ++i) {
        const unsigned stage = (unsigned)(i % STAGES), phase = (unsigned)(i / STAGES) & 1;
        unsigned there = 0;
        while (!there)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(there) : "r"(full_at + 8 * stage), "r"(phase) : "memory");
        if (add) {
            const long long left = bytes - (blockIdx.x + i * gridDim.x) * (long long)PIECE;
            const unsigned* words = (const unsigned*)(ring + stage * PIECE);
            for (int w = threadIdx.x; w < (left < PIECE ? left : PIECE) / 4; w += blockDim.x) seen += words[w];
            __syncthreads();
        }
        if (threadIdx.x == 0 && i + STAGES < mine) fetch(i + STAGES);
    }
    if (add) atomicAdd(sum, seen);
}
extern "C" __global__ void copy_4k(const char* data, long long bytes, unsigned* sum, int add) {
    copy_all<4096, 50>(data, bytes, sum, add);
}
extern "C" __global__ void copy_8k(const char* data, long long bytes, unsigned* sum, int add) {
    copy_all<8192, 25>(data, bytes, sum, add);
}
extern "C" __global__ void copy_16k(const char* data, long long bytes, unsigned* sum, int add) {
    copy_all<16384, 12>(data, bytes, sum, add);
}
"""
# Threads of a CTA, bytes of its ring, and how many of such fit into an SM of Hopper.
_SHAPES = {
    "load_4": (1024, 0, 2),
    "load_8": (1024, 0, 1),
    "copy_4k": (32, 50 << 12, 1),
    "copy_8k": (32, 25 << 13, 1),
    "copy_16k": (32, 12 << 14, 1),
}
_SIZES_MIB = (2, 4, 8, 16, 20, 32, 48, 56, 112, 224, 448, 1024)
_REPEATS, _GRAPH_US = 7, 1000.0
_BYTES_PER_US = 4.8e6  # what the fastest memory of a Hopper GPU gives, for sizing graphs

Reader = Callable[[torch.Tensor], None]


@functools.cache
def readers() -> dict[str, Reader]:
    """Kernels that read a tensor, by name; none on a GPU before Hopper, which copies nothing in bulk."""
    if torch.cuda.get_device_capability() < (9, 0):
        return {}
    unused = torch.zeros(1, dtype=torch.int32, device="cuda")
    return {name: functools.partial(_read, name, found, unused, False) for name, found in _kernels().items()}


@functools.cache
def _kernels() -> dict[str, Any]:
    return {n: cuda_probe.kernels(_SOURCE, [n], shared)[0] for n, (_, shared, _) in _SHAPES.items()}


def _read(name: str, kernel: Any, total: torch.Tensor, add: bool, data: torch.Tensor) -> None:
    """Read all of `data`, a whole number of 16 bytes; add its words to `total` if asked to."""
    threads, shared, ctas_per_sm = _SHAPES[name]
    ctas = torch.cuda.get_device_properties(data.device).multi_processor_count * ctas_per_sm
    size = data.numel() * data.element_size()
    given = [cuda_probe.pointer(data), (size, ctypes.c_longlong), cuda_probe.pointer(total), (int(add), ctypes.c_int)]
    cuda_probe.launch(kernel, ctas, threads, shared, given)


def unread(data: torch.Tensor) -> list[str]:
    """The readers that do not read every word of `data`."""
    words = data.flatten().view(torch.int32)
    expected = int(words.to(torch.int64).sum().item()) & 0xFFFFFFFF
    missing = []
    for name, kernel in _kernels().items():
        total = torch.zeros(1, dtype=torch.int32, device="cuda")
        _read(name, kernel, total, True, data)
        if int(total.item()) & 0xFFFFFFFF != expected:
            missing.append(name)
    return missing


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    out_argument(parser)
    options = parser.parse_args()
    environment = measure.environment()
    if not readers():
        parser.error("copies in bulk are of GPUs from Hopper on")
    results = []
    for mib in _SIZES_MIB:
        count = max(2, -(-3 * environment["l2_bytes"] // (mib << 20)))
        sets = [torch.randint(-(2**31), 2**31, (mib << 18,), dtype=torch.int32, device="cuda") for _ in range(count)]
        if missing := unread(sets[0]) + unread(sets[1][: (mib << 18) - 20]):  # a last piece that is not whole
            print(f"{', '.join(missing)} did not read all of {mib} MiB", file=sys.stderr)
            return 1
        contenders: dict[str, Any] = dict(readers())
        operands: Any = sets
        times = measure.time_interleaved(contenders, operands, (mib << 20) / _BYTES_PER_US, _REPEATS, _GRAPH_US)
        best = min(times, key=lambda name: times[name].us)
        row = {"mib": mib, "us": round(times[best].us, 3), "spread": round(times[best].spread, 4), "reader": best}
        results.append(row | {"all_us": {name: round(t.us, 3) for name, t in times.items()}})
        print(" ".join(f"{k}={v}" for k, v in results[-1].items()), flush=True)
    write(options.out, environment, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(ends(main))
