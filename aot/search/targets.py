"""The GPUs that kernels are compiled for, and the few numbers of them that kernels and rankings depend on.

Knows nothing of kernels or providers. A target's name is the architecture that CuTe DSL compiles for.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import AotError

from ..suggest import did_you_mean


@dataclass(frozen=True)
class Target:
    """One architecture to compile for.

    `serves` lists the compute capabilities its cubins load on. `multiprocessors` is that of the common GPU: it orders
    candidates and stands in for a device where a provider asks for one, and never reaches a kernel.
    `shared_bytes_per_block` is the most shared memory a block may opt in to on every GPU that the target serves.
    """

    name: str
    compute_capability: tuple[int, int]
    serves: tuple[tuple[int, int], ...]
    multiprocessors: int
    shared_bytes_per_block: int
    compiler_cuda: int = 12  # the oldest major version of CUDA whose assembler knows it; the DSL brings one of its own


# Shared memory: what an SM has, less the 1 KB that CUDA reserves for each block. NVIDIA states it in cuda/__device/
# arch_traits.h of CCCL and in SMEM_CAPACITY_MAP of nvidia-cutlass-dsl 4.8.1: 164 KB on 8.0, 100 KB on 8.6, 8.9 and
# 12.0, 228 KB on 9.0, 10.0, 10.3 and 11.0, 328 KB on 10.7. A cubin for sm_80 also loads on 8.6 and 8.9, so the smaller
# limit holds for it.
#
# Multiprocessors of Blackwell: a B200 has 74 of 80 on each of its two dies
# (https://chipsandcheese.com/p/nvidias-b200-keeping-the-cuda-juggernaut). The 148 of a B300 SXM6 is what those who
# measured on one state, and unverified; NVIDIA states the 160 of the full chip only
# (https://developer.nvidia.com/blog/inside-nvidia-blackwell-ultra-the-chip-powering-the-ai-factory-era). Of Rubin it
# states 224 (https://developer.nvidia.com/blog/inside-the-nvidia-rubin-platform-six-new-chips-one-ai-supercomputer), of
# a Jetson T5000 2560 cores, which are 20 (Jetson Thor data sheet).
TARGETS = {
    t.name: t
    for t in (
        Target("sm_80", (8, 0), ((8, 0), (8, 6), (8, 9)), 108, 99 << 10),  # A100 (Ampere whitepaper, table 1)
        Target("sm_90a", (9, 0), ((9, 0),), 132, 227 << 10),  # H100 and H200 SXM; so says an H200's driver
        Target("sm_100a", (10, 0), ((10, 0),), 148, 227 << 10),  # B200
        Target("sm_103a", (10, 3), ((10, 3),), 148, 227 << 10),  # B300 SXM6
        Target("sm_107a", (10, 7), ((10, 7),), 224, 327 << 10, compiler_cuda=13),  # Rubin
        Target("sm_110a", (11, 0), ((11, 0),), 20, 227 << 10, compiler_cuda=13),  # Jetson T5000
        Target("sm_120a", (12, 0), ((12, 0),), 170, 99 << 10),  # RTX 5090 (RTX Blackwell whitepaper)
    )
}

# What an install of the DSL compiles for without more: whoever names no target means some of these.
USUAL_TARGETS = tuple(t.name for t in TARGETS.values() if t.compiler_cuda == 12)


def target_for(capability: tuple[int, int]) -> str | None:
    """The target whose code a GPU of a compute capability runs; None where there is none."""
    return next((t.name for t in TARGETS.values() if capability in t.serves), None)


def target(name: str) -> Target:
    """The target called `name`.

    Raises:
        AotError: there is none.
    """
    try:
        return TARGETS[name]
    except KeyError:
        raise AotError(f"unknown target {name!r:.80}; {did_you_mean(name[:64], TARGETS)}") from None
