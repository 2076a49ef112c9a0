"""Tests of RMSNorm, and of nothing else: they go where the operation goes."""
