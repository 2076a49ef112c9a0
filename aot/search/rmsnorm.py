"""RMSNorm as building knows it: all variants of its element types, which nothing puts in order."""

from __future__ import annotations

from .quantise import ScaledBuilding

RMSNORM = ScaledBuilding("rmsnorm", "norms")
