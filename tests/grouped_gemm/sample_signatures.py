"""Grouped GEMMs that the oracle samples: plain ones of every element type, and gated ones of one."""

from __future__ import annotations

from runtime.grouped_gemm import Signature

FORMS = (("bf16", "none"), ("f16", "none"), ("bf16", "swiglu_interleaved"))
SIGNATURES = tuple(Signature(t, t, t, 64, 4096, 4096, epilogue, "weights") for t, epilogue in FORMS)
