"""Calls of GEMM, which have a path of their own: plans, those for other rows, and the way from tensors to a launch."""
