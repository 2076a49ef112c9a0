"""Sizes of Ampere and of what it multiplies with, that the GEMM kernels of this folder count with: in bytes, rows and
threads.

Pure arithmetic: imports no compiler, and knows of no kernel.
"""

WARP = 32  # threads
MOST_THREADS = 1024  # of a CTA
REGISTERS_PER_SM, MOST_REGISTERS = 1 << 16, 255  # 32 bits each; of a thread
MMA_ROWS, MMA_COLUMNS, MMA_K = 16, 8, 16  # of mma.sync with 16-bit inputs
ACCESS_BYTES = 16  # of a thread's cp.async, and of a row that ldmatrix reads
SWIZZLE_ROWS = 8  # of these that ldmatrix reads at a time, from different banks
# What a CTA may have on every GPU that an sm_80 cubin runs on (`aot.search.targets`), less what the DSL declares.
SHARED_BYTES_PER_CTA = (99 << 10) - (1 << 10)
