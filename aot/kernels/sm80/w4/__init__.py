"""GEMM of 4-bit weights for few tokens by mma.sync: D = epilogue(A @ dequantise(B)^T), accumulated in f32."""
