"""Kernels made of what Ampere has, which later GPUs have too: cp.async, ldmatrix and mma.sync of a warp."""
