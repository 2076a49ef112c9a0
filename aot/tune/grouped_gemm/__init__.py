"""Grouped GEMM as tuning knows it: random groups and operands, the reference, its tolerance, what torch has."""
