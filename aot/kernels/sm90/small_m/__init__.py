"""GEMM for few tokens on Hopper: D = epilogue(scale(A @ B^T)), accumulated in f32. Its time is that of reading B once.

A CTA owns `tile_n` rows of B (weights), `tile_m` tokens and one of `split_k` slices of K. Up to 64 tokens the operands
are swapped: weights take WGMMA's M side and tokens its N side, so a tile of 8 tokens wastes nothing. Above, tokens take
the M side, and weights need not fill 64 rows. The CTAs of a cluster that differ in the slice only reduce a share of the
tokens each, in the order of the slices, from partial sums that the others push into its shared memory: the result is
always the same, and there is no workspace. `cluster_n` neighbours along N load a share of A each and multicast it. A is
loaded in TMA boxes of 8 or 16 rows, and those past M are left out.

One producer warp issues TMA loads, one or more consumer warp groups run WGMMA. Either tile may be any multiple of 8, so
that bytes can be spread evenly over the SMs: WGMMA then reads rows past the tile, whose products nobody looks at. K
tails and rows past M and N are zeros from TMA; stores are predicated. Any M up to 65535 tiles is right, one row of the
grid a tile.

Hopper's tensor cores add 8-bit products in about 14 bits, so every 256 columns the accumulators are promoted to f32
registers.

`overlap` says what may happen before the kernel before this one on the stream has ended, where both were compiled for
it: "serial" nothing, "launch" everything but reads and writes of tensors, "weights" also reading B. Every kernel but a
"serial" one lets the next begin as soon as it has begun itself.

`choices`, `form` and `plan` are pure arithmetic and import no compiler, nor does this file; `kernel` holds the kernel.
"""
