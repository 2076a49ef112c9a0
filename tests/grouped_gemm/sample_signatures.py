"""Grouped GEMMs that the oracle samples: plain ones of every element type; of one, with a gate, with a bias, and both;
of 8 bits both scalings, with a gate or a bias too; of those of 16 bits also with gathered rows."""

from __future__ import annotations

from runtime.grouped_gemm import ROWS, Signature

FORMS = (
    *((dtype, dtype, "none", "none") for dtype in ("bf16", "f16")),
    *(("bf16", "bf16", of, "none") for of in ("swiglu_interleaved", "bias+swiglu_clamped_interleaved", "bias")),
    *(("e4m3", "bf16", of, "row_column") for of in ("none", "swiglu", "bias")),
    *(("e4m3", "f16", of, "block") for of in ("none", "swiglu", "bias")),
)
SIGNATURES = tuple(
    Signature(t, t, d, 64, 4096, 4096, epilogue, "weights", scaling, rows)
    for t, d, epilogue, scaling in FORMS
    for rows in (ROWS if scaling == "none" else ("contiguous",))
)
