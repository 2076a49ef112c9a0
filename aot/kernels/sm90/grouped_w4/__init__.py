"""Grouped GEMM of 4-bit weights on Hopper: rows of A by groups of any size, each times a dequantised B of its own.

D[r] = epilogue(A[r] @ dequantise(B[e])^T) for the rows r of group e, which end where `ends[e]` on the device says. It
is the GEMM of 4-bit weights (`aot.kernels.sm90.w4`: its loads, mainloop and dequantising, and the few-token GEMM's
epilogue), made persistent, with the grouped GEMM's way to find a tile's group (`aot.kernels.groups`).

A tile begins at a row of its group and may end behind it. What is loaded and multiplied of the next group is not staged
and not stored: threads store rows one by one.
"""
