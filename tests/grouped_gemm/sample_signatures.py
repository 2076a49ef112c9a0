"""Grouped GEMMs that the oracle samples: plain ones of every element type; of one, with a gate, with a bias, and both;
of 8 bits both scalings, with a gate or a bias too."""

from __future__ import annotations

from runtime.grouped_gemm import Signature

FORMS = (
    *((dtype, dtype, "none", "none") for dtype in ("bf16", "f16")),
    *(("bf16", "bf16", of, "none") for of in ("swiglu_interleaved", "bias+swiglu_clamped_interleaved", "bias")),
    *(("e4m3", "bf16", of, "row_column") for of in ("none", "swiglu", "bias")),
    *(("e4m3", "f16", of, "block") for of in ("none", "swiglu", "bias")),
)
SIGNATURES = tuple(
    Signature(t, t, d, 64, 4096, 4096, epilogue, "weights", scaling) for t, d, epilogue, scaling in FORMS
)
