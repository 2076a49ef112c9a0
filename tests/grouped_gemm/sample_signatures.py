"""Grouped GEMMs that the oracle samples: plain ones of every element type; of one, with a gate, with a bias, and both;
of 8 bits both scalings, with a gate or a bias too, and D in 8 bits; of those of 16 bits also with gathered rows and
with masked ones, and of 8 bits one of each scaling with masked ones; of weights in 4 bits both formats, with gates in
turn and gates in the first half."""

from __future__ import annotations

from runtime.grouped_gemm import ROWS, Signature

FORMS = (
    *(("e4m3", d, "none", "none") for d in ("bf16", "f16")),
    *((dtype, dtype, "none", "none") for dtype in ("bf16", "f16")),
    *(("bf16", "bf16", of, "none") for of in ("swiglu_interleaved", "bias+swiglu_clamped_interleaved", "bias")),
    *(("e4m3", "bf16", of, "row_column") for of in ("none", "swiglu", "bias")),
    *(("e4m3", "f16", of, "block") for of in ("none", "swiglu", "bias")),
    *(("e4m3", "e4m3", of, "block") for of in ("none", "bias+swiglu")),
)
OF_4_BITS = (
    *(("e2m1", of, "mxfp4_weight") for of in ("none", "bias+swiglu_clamped_interleaved", "swiglu")),
    ("u4", "bias", "int4_weight"),
)
MASKED = (("bias", "row_column"), ("swiglu", "block"))


def _rows(epilogue: str, scaling: str) -> tuple[str, ...]:
    return ROWS if scaling == "none" else ROWS[:2] if (epilogue, scaling) in MASKED else ROWS[:1]


SIGNATURES = tuple(
    Signature(t, t, d, 64, 4096, 4096, epilogue, "weights", scaling, rows)
    for t, d, epilogue, scaling in FORMS
    for rows in (_rows(epilogue, scaling) if t != d or scaling == "none" else ROWS[:1])
) + tuple(Signature("bf16", b, "bf16", 64, 4096, 4096, of, "weights", scaling) for b, of, scaling in OF_4_BITS)
