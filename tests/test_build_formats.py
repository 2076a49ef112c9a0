"""The script that builds models in every format: which formats there are, and which target serves which."""

from __future__ import annotations

import sys

import pytest

from runtime.numbers.scaling import SCALINGS

from .command_line import ROOT
from .model_configs import CONFIGS

sys.path.insert(0, str(ROOT / "scripts"))
import build_formats


def targets(model: str, dtype: str, scaling: str) -> tuple[str, ...] | None:
    found = build_formats.manifest_of(CONFIGS / f"{model}.json", build_formats.Format(dtype, scaling), (1, 64))
    return None if found is None else tuple(found.targets)


def test_every_scaling_is_of_a_format() -> None:
    assert {of.scaling for of in build_formats.formats()} == set(SCALINGS)


@pytest.mark.parametrize(
    ("model", "dtype", "scaling", "served"),
    [
        ("llama-3.1-8b", "e4m3", "block", ("sm_90a",)),
        ("llama-3.1-8b", "e2m1", "nvfp4", ("sm_100a", "sm_103a")),
        ("llama-3.1-8b", "bf16", "none", ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a")),
        ("llama-3.1-8b", "bf16", "block", None),
        ("gpt-oss-120b", "bf16", "mxfp4_weight", ("sm_80", "sm_90a", "sm_120a")),
    ],
)
def test_targets_are_those_with_a_kernel_in_the_format(
    model: str, dtype: str, scaling: str, served: tuple[str, ...] | None
) -> None:
    assert targets(model, dtype, scaling) == served


def test_experts_that_have_no_such_scaling_are_left_out() -> None:
    found = build_formats.manifest_of(CONFIGS / "gpt-oss-120b.json", build_formats.Format("e4m3", "tensor"), (64,))
    assert found is not None
    assert (found.uses, {gemm.name for gemm in found.gemms} >= {"qkv", "o"}) == ((), True)
