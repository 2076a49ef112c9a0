"""What the kernels around grouped GEMMs have room for. Imports no compiler."""

MOST_EXPERTS = 512  # counts of each in shared memory, for each warp
MOST_TOP_K = 32
