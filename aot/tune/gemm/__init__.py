"""GEMM as tuning knows it: random operands, references, tolerances, and what torch runs in its place."""
