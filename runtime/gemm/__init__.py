"""GEMM as an operation: signatures, tables of which function serves which problem, and the call that is looked up."""
