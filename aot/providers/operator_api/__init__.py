"""Operators of NVIDIA's CUTLASS Operator API as host functions of our own, each kind of operands in its own module."""
