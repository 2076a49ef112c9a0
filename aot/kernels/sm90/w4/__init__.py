"""GEMM of 4-bit weights for few tokens on Hopper: D = epilogue(A @ dequantise(B)^T), accumulated in f32."""
