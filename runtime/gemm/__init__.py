"""GEMM as an operation: signatures, forms that are served at any N and K, and the call that is looked up."""
