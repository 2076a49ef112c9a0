"""What scalings are tried with: a signature of e4m3, a manifest and a variant."""

from __future__ import annotations

from aot.search.variants import Variant, choices
from runtime.gemm.signature import Signature

FP8 = Signature("e4m3", "e4m3", "bf16", "f32", "none", 144, 160)

VARIANT = Variant("own", "sm90_small_m", "sm_90a", choices(tile_m=64), ("e4m3", "e4m3", "bf16"), operation="gemm")

MANIFEST = """
format: 1
model: m
source: s
tokens: [1]
targets: [sm_100a]
gemms: [{{name: g, n: 144, k: 160, dtypes: {{a: {a}, b: {a}, d: bf16}}, scaling: {scaling}}}]
"""
