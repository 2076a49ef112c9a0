"""GEMM for many tokens on Hopper: D = epilogue(scale(A (M, K) @ B (N, K)^T)), accumulated in f32.

A persistent grid: the tile scheduler gives each cluster tile after tile of D, in a raster order that keeps neighbours'
rows and columns in L2. One producer warp issues TMA loads, two consumer warp groups run WGMMA and store by TMA.
"cooperative": both share each tile. "pingpong": each takes every other tile, and ordered barriers put one's epilogue
under the other's mainloop. The CTAs of a cluster that read the same rows of A or B load a share each and multicast it.
Ragged M, N and K are TMA's: zeros past the edge, no stores there. With `split_k` a cluster's CTAs multiply slices of K
of its tiles and reduce them; with `stream_k` any clusters do, and with the tiles of the last wave only. With `overlap`
the next launch begins as SMs come free, and waits for the end of this one before it reads or writes (programmatic
dependent launch).

Rows and columns in this package are those of WGMMA's M and N sides: A's and B's rows, or with `swap` B's and A's, where
D is stored transposed. 8-bit products are accumulated by the tensor core for a stage or two only, and then in f32
registers.

`choices`, `form` and `plan` are pure arithmetic and import no compiler, nor does this file; `kernel` holds the kernel.
"""
