"""Numbers in the code of GEMM kernels of this folder that were chosen on an H200: raster orders, stages and slices of K
that are worth their cost, and where clusters lie.

They are among the sources by whose digests the build cache knows these kernels, so a change here compiles them anew.
That is why they stand apart from `aot.search.h200`, whose estimates of times are in no kernel. Kernels are right on any
Hopper GPU, whatever is here. Pure data: imports no compiler.
"""

# The raster order "rows": so many rows stay in L2 while columns pass, which is 1-3% faster than 1024 or 512.
RASTER_ROWS = 2048
# Clusters' tiles, of one column or row, that follow each other in the other raster orders.
RASTER_SWIZZLES = {"two_rows": 2, "columns": 8, "quads": 8}

ENOUGH_STAGES = 5  # of 64 K: for so many, epilogue tiles are made narrower
LEAST_SLICE, MOST_SLICES = 4, 12  # of K, that stream-K cuts a tile into: stages, and how many to a tile

# The order in which clusters of two are given to GPCs, as it was seen on two H200s ("SMs of a GPC" in
# benchmarks/results/studies_h200.json): four to one of them, then one to each of eight, four times, then one to each of
# seven, four times, and two. Chips differ in a few clusters.
QUAD = 4  # clusters of a GPC whose requests for a line L2 serves at once
ROUNDS = (8, 7)  # GPCs that are given a cluster each in a round, `QUAD` rounds of each
