"""Sizes of Hopper that the GEMM kernels of this folder count with, in bytes, rows and threads.

Pure arithmetic: imports no compiler, and knows of no kernel.
"""

WARP = 32  # threads
WARP_GROUP = 128
WGMMA_ROWS = 64  # of an instruction's M side
SWIZZLE_ATOM_ROWS = 8  # of 128 bytes
SWIZZLE_ATOM_BYTES = 128
SHARED_BYTES_PER_SM = 228 << 10
SHARED_BYTES_PER_CTA = 227 << 10
RESERVED_BYTES_PER_CTA = 1 << 10  # what CUDA keeps of an SM's shared memory for each CTA
STATIC_BYTES = 1 << 10  # of a CTA's, what every kernel of the DSL declares
BARRIER_BYTES = 1 << 10  # room for every mbarrier, and for aligning what comes before them
