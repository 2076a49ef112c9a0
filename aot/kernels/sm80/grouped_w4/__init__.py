"""Grouped GEMM of 4-bit weights by mma.sync: rows of A by groups of any size, each times a dequantised B of its own.

D[r] = epilogue(A[r] @ dequantise(B[e])^T) for the rows r of group e, which end where `ends[e]` on the device says. A
tile is made as the GEMM of 4-bit weights makes it (`aot.kernels.sm80.w4`); which tiles there are, each CTA finds out as
in other grouped GEMMs (`aot.kernels.groups`), and makes one after another.
"""
