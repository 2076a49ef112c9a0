"""Grouped GEMM on Hopper: rows of A by groups of any size, each multiplied with a B of its own. For experts.

D[r] = epilogue(A[r] @ B[e]^T) for the rows r of group e, which end where `ends[e]` on the device says; so one launch,
captured in a CUDA graph, serves whatever a router decides. It is the persistent GEMM (`aot.kernels.sm90.persistent`:
its mainloop, epilogue, and who does what in a CTA) with a tile scheduler of its own, `scheduler`, that finds the group
of a tile: each CTA adds up once how many tiles the groups before have.

A tile begins at a row of its group, and may end in the next one. Where a group has a tile's rows or more, its last tile
begins earlier, ends with the group, and makes some rows twice, with the same bits; so whole tiles are stored by TMA. Of
a group with fewer rows than a tile, rows are stored one by one, and what is multiplied of the next group is dropped.

`choices` and `plan` are pure arithmetic and import no compiler, nor does this file; `kernel` holds the kernel.
"""
