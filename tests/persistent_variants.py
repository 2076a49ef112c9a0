"""Variants of `aot.kernels.sm90.persistent` by signature, and their plans, for the tests of its parts."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from aot.kernels.sm90.persistent.form import Form
from aot.kernels.sm90.persistent.plan import Plan
from aot.search.legal import illegal, legal_variants
from aot.search.variants import Variant, choices
from runtime.gemm.signature import Signature

from .legal_samples import drawn

FAMILY = "sm90_persistent"
PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 6144, 4096)
FP8 = Signature("e4m3", "e4m3", "bf16", "f32", "none", 6144, 4096, scaling="row_column")
BLOCK = Signature("e4m3", "e4m3", "bf16", "f32", "swiglu", 6144, 4096, scaling="block")
SIGNATURES = (
    PLAIN,
    FP8,
    BLOCK,
    Signature("f16", "f16", "f16", "f32", "bias+gelu+residual+scale", 4096, 4096),
    Signature("bf16", "bf16", "bf16", "f32", "bias+swiglu_interleaved", 4096, 4096),
    Signature("bf16", "bf16", "bf16", "f32", "none", 4096, 4096, batch=3),
    Signature("bf16", "bf16", "bf16", "f32", "none", 4096, 4096, b_major="n"),
    Signature("e4m3", "e4m3", "e4m3", "f32", "geglu+scale", 4096, 4096, scaling="tensor"),
)


def variants(signature: Signature) -> list[Variant]:
    return [v for v in legal_variants("own", "sm_90a", signature) if v.family == FAMILY]


@cache
def legal_plans(signature: Signature) -> list[Plan]:
    """Of some of what is legal, likely or not, each once."""
    return list(dict.fromkeys(Plan.of(v.options, form(signature)) for v in drawn(signature, FAMILY)))


def form(signature: Signature) -> Form:
    return Form(signature.a, signature.d, signature.scaling, signature.epilogue, signature.b_major)


def plain(**options: Any) -> Variant:
    """A variant of the plain form, legal by name; of what is not given the least."""
    least = {"split_k": 1, "stream_k": False, "nonpersistent": False, "order": "rows", "overlap": "serial"}
    found = variants(PLAIN)[0]
    v = dataclasses.replace(found, config=choices(**{**found.options, **least, **options}))
    assert illegal(v) is None
    return v


def plain_form(_: Variant) -> Form:
    return form(PLAIN)
