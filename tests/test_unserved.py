"""What is said of a problem that nothing computes on a target: what of it no family has, and where some has all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aot.search.unserved import computing, variants, why_none
from runtime.gemm.signature import Signature

from .row_scale.operation import Signature as RowScale

pytestmark = pytest.mark.usefixtures("row_scale")

PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 1024, 512)
FP8 = replace(PLAIN, a="e4m3", b="e4m3")
MXFP8 = replace(FP8, scaling="mxfp8")


@pytest.mark.parametrize(
    ("target", "signature", "reason", "where"),
    [
        (
            "sm_80",
            replace(PLAIN, epilogue="bias"),
            "sm80_tensorop, the nearest for sm_80, lacks the epilogue bias",
            "sm_90a, sm_100a, sm_103a, sm_107a, sm_110a can",
        ),
        ("sm_90a", MXFP8, "none for sm_90a has the scaling mxfp8", "sm_100a, sm_103a, sm_107a can"),
        (
            "sm_120a",
            replace(FP8, scaling="block"),
            "none for sm_120a has the element types e4m3, e4m3, bf16 and the scaling block",
            "sm_90a can",
        ),
        ("sm_100a", replace(PLAIN, b_major="n"), "none for sm_100a has a B that is N-major", "sm_90a can"),
        (
            "sm_100a",
            replace(FP8, d="f16", batch=2),
            "sm100_persistent, the nearest for sm_100a, lacks the element types e4m3, e4m3, f16",
            "sm_90a, sm_107a can",
        ),
        (
            "sm_103a",
            replace(MXFP8, n=1040),
            "sm100_block_scaled: N must be a multiple of 32, found 1040",
            "no target can",
        ),
        (
            "sm_103a",
            replace(PLAIN, b="i8"),
            "the package has weights of 8 bits for sm_100a and sm_110a alone",
            "sm_100a, sm_110a can",
        ),
        (
            "sm_90a",
            RowScale("bf16", "f16", "bf16", 64),
            "none for sm_90a has the element types bf16, f16",
            "no target can",
        ),
    ],
)
def test_a_reason_names_what_is_lacking_and_who_has_it(target: str, signature: Any, reason: str, where: str) -> None:
    said = why_none(target, signature)
    assert variants(target, signature) == []
    assert said.startswith(reason)
    assert said.endswith(f"; {where}")


def test_targets_that_compute_a_problem_are_those_with_variants() -> None:
    assert computing(replace(PLAIN, epilogue="swiglu")) == ["sm_90a"]
    assert computing(RowScale("f16", "f16", "f16", 64)) == ["sm_90a"]
