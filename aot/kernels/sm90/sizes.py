"""Sizes of Hopper that the GEMM kernels of this folder count with, in bytes, rows, threads and CTAs.

Pure arithmetic: imports no compiler, and knows of no kernel.
"""

WARP = 32  # threads
WARP_GROUP = 128
THREADS_PER_SM = 2048
WGMMA_ROWS = 64  # of an instruction's M side
# What a tile may have of rows of A or of B: WGMMA's N side comes in 8s up to 256, a swizzle atom has 8 rows, and a TMA
# box 256 at most.
TILE_EXTENTS = tuple(range(8, 264, 8))
PORTABLE_CLUSTER = 8  # CTAs that a launch may put into a cluster without asking for more than every Hopper GPU has
CLUSTER_EXTENTS = tuple(range(1, PORTABLE_CLUSTER + 1))
SWIZZLE_ATOM_ROWS = 8  # of 128 bytes
SWIZZLE_ATOM_BYTES = 128
SHARED_BYTES_PER_SM = 228 << 10
SHARED_BYTES_PER_CTA = 227 << 10
RESERVED_BYTES_PER_CTA = 1 << 10  # what CUDA keeps of an SM's shared memory for each CTA
STATIC_BYTES = 1 << 10  # of a CTA's, what every kernel of the DSL declares
BARRIER_BYTES = 1 << 10  # room for every mbarrier, and for aligning what comes before them
