"""4-bit weights: how they are prepared, what a kernel makes of their bits, and which kernels there are."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aot.kernels.sm90.w4.plan import Plan
from aot.kernels.w4.form import Form
from aot.search.legal import unsuited
from aot.search.provider import provider
from aot.search.targets import TARGETS
from aot.search.variants import Variant
from aot.tune.gemm.prepared_weights import dequantised
from runtime import Library
from runtime.container.archive import Archive
from runtime.errors import ArgumentError, LayoutError
from runtime.gemm.signature import Signature
from runtime.numbers.weights import (
    FORMATS,
    WeightFormat,
    arrange_codes,
    arrange_scales,
    codes_of,
    e2m1_pairs,
    int4_pairs,
    scales_of,
)
from runtime.torch import weights as weights_module
from runtime.torch.weights import prepare_in_place, prepare_weight, widened

from .command_line import ALONE, COMMAND, ROOT
from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, kernels_of
from .shared import made_once

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4, INT4, INT4_ZERO = (FORMATS[word] for word in ("mxfp4_weight", "int4_weight", "int4_zero_weight"))
PLAIN = Signature("bf16", "e2m1", "bf16", "f32", "none", 4096, 4096, scaling="mxfp4_weight")
formats = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.word)


def variants(signature: Signature) -> list[Variant]:
    return [v for v in provider("own").variants("sm_90a", signature) if v.family == "sm90_w4"]


def test_a_stage_is_filled_for_one_slice_of_k() -> None:
    plans = [Plan.of(dict(v.options), Form()) for v in variants(PLAIN)]
    assert any(plan.sliced_k > 1 for plan in plans)
    assert {plan.stages % plan.sliced_k for plan in plans} == {0}


def packed(codes: torch.Tensor, each: int) -> torch.Tensor:
    """Codes (N, K), `each` in an integer, the first in the low bits."""
    whole = sum(codes[:, i::each].long() << (4 * i) for i in range(each))
    assert isinstance(whole, torch.Tensor)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole)


def as_bf16(words: int) -> tuple[float, float]:
    """The two bf16 of a register."""
    low, high = np.array([words & 0xFFFF, words >> 16 & 0xFFFF], np.uint16).view(ml_dtypes.bfloat16)
    return float(low), float(high)


@formats
@given(slabs=st.integers(1, 3), blocks=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_arranging_codes_and_scales_loses_nothing(form: WeightFormat, slabs: int, blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, k = 16 * slabs, form.multiple * blocks
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.int32)
    scales = torch.rand((n, k // form.group * (2 if form.zeros else 1)), generator=generator)
    assert torch.equal(codes_of(arrange_codes(codes, form), form), codes)
    assert torch.equal(scales_of(arrange_scales(scales, form), form), scales)


@formats
def test_a_word_becomes_the_rows_and_columns_that_wgmma_wants(form: WeightFormat) -> None:
    """PTX ISA, registers of wgmma's A: a0 and a1 of row l / 4, a2 and a3 of the row 8 below; a4 to a7 8 columns on."""
    n, k = 16, form.columns
    codes = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(0))
    words = arrange_codes(codes, form)
    table = [*E2M1, *(-x for x in E2M1)] if form is MXFP4 else [float(x) for x in range(16)]
    for lane in range(32):
        for step in range(4):
            pairs = (e2m1_pairs if form is MXFP4 else int4_pairs)(int(words[0, 0, lane, step]))
            found = [x * 2.0**form.code_exponent for pair in pairs for x in as_bf16(pair & 0xFFFFFFFF)]
            row, column = lane // 4, 16 * step + lane % 4 * 2
            places = [(row + 8 * (i // 2 % 2), column + i % 2 + 8 * (i // 4)) for i in range(8)]
            assert found == [table[int(codes[place])] for place in places], (lane, step)


@pytest.mark.parametrize("scale", [0, 24, 90, 127, 150])
def test_each_code_of_mxfp4_times_its_scale_is_exact_in_bf16(scale: int) -> None:
    byte = scale + MXFP4.scale_exponent
    factor, _ = as_bf16(byte << 7)
    for code in range(16):
        word = int(arrange_codes(torch.full((16, 64), code), MXFP4)[0, 0, 0, 0])
        for number, _ in map(as_bf16, e2m1_pairs(word)):
            exact = E2M1[code & 7] * (-1.0) ** (code >> 3) * 2.0 ** (scale - 127)
            product = float(np.array(number * factor).astype(ml_dtypes.bfloat16))
            assert product == number * factor or abs(exact) < 2.0**-100
            assert product * 2.0**MXFP4.exponent == pytest.approx(exact, abs=2.0**-110)


@pytest.mark.parametrize("scale", [1.0, -0.0123, 1e-6, 4000.0])
def test_each_code_of_int4_times_its_scale_is_rounded_once(scale: float) -> None:
    held = float(np.array(scale * 2.0**INT4.scale_exponent).astype(ml_dtypes.bfloat16))
    shift = float(np.array(held * -(2.0**-130)).astype(ml_dtypes.bfloat16))
    for code in range(16):
        word = int(arrange_codes(torch.full((16, 64), code), INT4)[0, 0, 0, 0])
        for number, _ in map(as_bf16, int4_pairs(word)):
            found = float(np.array(number * held + shift).astype(ml_dtypes.bfloat16)) * 2.0**INT4.exponent
            exact = (code - 8) * held * 2.0**-INT4.scale_exponent
            assert found == float(np.array(exact).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("scale", [1.0, -0.0123, 1e-6, 4000.0])
@pytest.mark.parametrize("point", [0, 1, 7, 15, 16])
def test_each_code_less_its_zero_point_times_its_scale_is_rounded_once(scale: float, point: int) -> None:
    held = float(np.array(scale * 2.0**INT4_ZERO.scale_exponent).astype(ml_dtypes.bfloat16))
    below, _ = as_bf16(0x8000 | point)
    for code in range(16):
        word = int(arrange_codes(torch.full((16, 64), code), INT4_ZERO)[0, 0, 0, 0])
        for number, _ in map(as_bf16, int4_pairs(word)):
            difference = float(np.array(number + below).astype(ml_dtypes.bfloat16))
            assert difference * 2.0**INT4_ZERO.code_exponent == code - point
            found = float(np.array(difference * held).astype(ml_dtypes.bfloat16)) * 2.0**INT4_ZERO.exponent
            exact = (code - point) * held * 2.0**-INT4_ZERO.scale_exponent
            assert found == float(np.array(exact).astype(ml_dtypes.bfloat16))


def test_blocks_of_gpt_oss_are_prepared_without_a_change_of_value() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (48, 8, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(90, 140, (48, 8), dtype=torch.uint8, generator=generator)
    weight = prepare_weight(blocks, scales, "mxfp4")
    elements = blocks.flatten(1).numpy().view(np.uint8)
    numbers = np.stack([elements & 15, elements >> 4], -1).reshape(48, 256)
    values = torch.from_numpy(numbers.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    wanted = values * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    assert torch.equal(dequantised("mxfp4_weight", *weight), wanted)
    assert weight.b.shape == (48, 128)


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
def test_int4_of_checkpoints_is_prepared_without_a_change_of_value(layout: str) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (32, 256), generator=generator)
    scales = torch.randn((32, 2), generator=generator) * 0.01
    if layout == "gptq":
        weight = prepare_weight(packed(codes, 8).int().t().contiguous(), scales.t().contiguous(), layout)
    else:
        weight = prepare_weight(packed(codes, 8).int(), scales, layout)
    rounded = scales.bfloat16().float().repeat_interleave(128, 1)
    assert torch.equal(dequantised("int4_weight", *weight), ((codes - 8) * rounded).bfloat16().float())


def in_awq_order(codes: torch.Tensor) -> torch.Tensor:
    """Columns as AutoAWQ packs them: of a word's eight places, from the low bits on, columns 0, 2, 4, 6, 1, 3, 5, 7."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return packed(codes.unflatten(1, (-1, 8))[..., order].flatten(1), 8).int()


def of_checkpoint(layout: str, codes: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (N, K) and zero points (N, K / 128), both from 0 to 15, as a checkpoint has them."""
    if layout == "awq":
        return in_awq_order(codes.t()), in_awq_order(points.t())
    if layout == "compressed-tensors":
        return packed(codes, 8).int(), packed(points.t(), 8).int().t()
    points = points - 1 if layout == "gptq" else points
    return packed(codes, 8).int().t(), packed(points.t(), 8).int()


LAYOUTS_WITH_ZEROS = ("compressed-tensors", "gptq", "gptq_v2", "awq")


def asymmetric(layout: str, experts: int = 0) -> tuple[dict[str, Any], torch.Tensor]:
    """What `prepare_weight` takes of a weight (32, 256), or of experts, and the numbers that it is."""
    generator = torch.Generator().manual_seed(2)
    given, numbers = [], []
    for _ in range(experts or 1):
        codes = torch.randint(0, 16, (32, 256), generator=generator)
        points = torch.randint(1, 16, (32, 2), generator=generator)
        scales = torch.randn((32, 2), generator=generator) * 0.01
        whole, zeros = of_checkpoint(layout, codes, points)
        given.append((whole, scales if layout == "compressed-tensors" else scales.t(), zeros))
        differences = codes - points.repeat_interleave(128, 1)
        numbers.append((differences * scales.bfloat16().float().repeat_interleave(128, 1)).bfloat16())
    tensors = [torch.stack(x) if experts else x[0] for x in zip(*given, strict=True)]
    names = "packed", "scales", "zeros"
    return dict(zip(names, tensors, strict=True)) | {"layout": layout}, torch.stack(numbers)


@pytest.mark.parametrize("layout", LAYOUTS_WITH_ZEROS)
def test_weights_with_zero_points_are_prepared_without_a_change_of_value(layout: str) -> None:
    given, (numbers,) = asymmetric(layout)
    weight = prepare_weight(**given)
    assert (weight.b.shape, weight.scale_b.shape) == ((32, 128), (4, 32))
    assert torch.equal(dequantised("int4_zero_weight", *weight), numbers.float())
    assert torch.equal(widened(weight), numbers)


@pytest.mark.parametrize("layout", LAYOUTS_WITH_ZEROS)
def test_weights_of_experts_have_zero_points_too(layout: str) -> None:
    given, numbers = asymmetric(layout, experts=3)
    weight = prepare_weight(**given)
    assert weight.scale_b.shape == (3, 4, 32)
    assert torch.equal(widened(weight), numbers)
    with pytest.raises(ArgumentError, match="of as many experts"):
        prepare_weight(**(given | {"zeros": given["zeros"][:2]}))


@pytest.mark.parametrize("layout", LAYOUTS_WITH_ZEROS)
def test_weights_that_are_arranged_a_few_rows_at_a_time_are_the_same(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, _ = asymmetric(layout)
    at_once = prepare_weight(**given)
    monkeypatch.setattr(weights_module, "_CODES_AT_ONCE", 1)  # 16 rows of 32
    in_parts = prepare_weight(**given)
    assert torch.equal(at_once.b.view(torch.uint8), in_parts.b.view(torch.uint8))


def test_nothing_is_written_in_place_where_the_last_experts_zero_point_is_refused() -> None:
    given, _ = asymmetric("gptq", experts=3)
    given["zeros"][-1, -1, -1] = -1
    before = given["packed"].clone()
    with pytest.raises(ArgumentError, match="is 15 there"):
        prepare_in_place(**given)
    assert torch.equal(given["packed"], before)


@pytest.mark.parametrize(
    ("layout", "zeros", "reason"),
    [
        ("mxfp4", torch.zeros(16, 4, dtype=torch.int32), "has no zero points; leave `zeros` out"),
        ("awq", None, "has zero points; pass them as `zeros`"),
        ("awq", torch.zeros(1, 4, dtype=torch.int64), "in an int32 matrix, found torch.int64"),
        (
            "awq",
            torch.zeros(4, 1, dtype=torch.int32),
            r"as many as scales, \(16, 1\) by rows and groups; found \(8, 4\)",
        ),
        ("gptq", torch.full((1, 2), -1, dtype=torch.int32), 'is 15 there: .* pass layout "gptq_v2"'),
    ],
)
def test_zero_points_that_are_not_of_a_layout_are_refused(layout: str, zeros: torch.Tensor | None, reason: str) -> None:
    weights = {
        "mxfp4": (torch.zeros(16, 64, dtype=torch.uint8), torch.full((16, 4), 127, dtype=torch.uint8)),
        "awq": (torch.zeros(128, 2, dtype=torch.int32), torch.ones(1, 16)),
        "gptq": (torch.zeros(16, 16, dtype=torch.int32), torch.ones(1, 16)),
    }
    with pytest.raises(ArgumentError, match=reason):
        prepare_weight(*weights[layout], layout, zeros)


@pytest.mark.parametrize(
    ("layout", "arguments", "reason"),
    [
        ("q4_k", {}, "layout must be one of mxfp4, compressed-tensors, gptq"),
        ("mxfp4", {"packed": torch.zeros(40, 64, dtype=torch.uint8)}, "N in multiples of 16 and K of 64"),
        ("mxfp4", {"packed": torch.zeros(16, 64, dtype=torch.int32)}, "uint8 .N, K / 2., found torch.int32"),
        ("mxfp4", {"scales": torch.full((16, 3), 127, dtype=torch.uint8)}, "one for each 1 x 32"),
        ("mxfp4", {"scales": torch.full((16, 4), 151, dtype=torch.uint8)}, r"is 2\^24 or not a number"),
        ("compressed-tensors", {"scales": torch.zeros(16, 1, dtype=torch.int32)}, "a matrix of floats"),
        ("compressed-tensors", {"scales": torch.full((16, 1), 5000.0)}, "below 4096"),
    ],
)
def test_what_is_no_weight_of_a_layout_is_refused(layout: str, arguments: dict[str, Any], reason: str) -> None:
    mxfp4 = layout in ("mxfp4", "q4_k")
    usual = {
        "packed": torch.zeros(16, 64, dtype=torch.uint8) if mxfp4 else torch.zeros(16, 16, dtype=torch.int32),
        "scales": torch.full((16, 4), 127, dtype=torch.uint8) if mxfp4 else torch.ones(16, 1),
    }
    with pytest.raises(ArgumentError, match=reason):
        prepare_weight(**(usual | arguments), layout=layout)


def test_stages_fill_the_shared_memory_of_an_sm_and_no_more() -> None:
    for v in variants(PLAIN):
        plan = Plan.of(v.options, Form(v.scaling, v.epilogue))
        found = plan.memory
        a_cta = 2048 + found.block + 4 * plan.epilogue_terms  # 1 KB static, 1 KB for barriers
        of_a_cta = TARGETS["sm_90a"].shared_bytes_per_block if v.integer("ctas_per_sm") == 1 else (228 << 9) - 1024
        assert a_cta <= of_a_cta, v.name()
        more = found.stages + plan.sliced_k  # stages come in whole rounds of slices
        assert a_cta + plan.sliced_k * (found.m_side + found.n_side) > of_a_cta or more > 32, v.name()


def test_a_form_has_no_more_variants_than_are_listed_quickly() -> None:
    assert 100 < len(variants(PLAIN)) < 800


def test_extents_that_fill_no_block_are_refused() -> None:
    one = variants(PLAIN)[0]
    for n, k, reason in ((4104, 4096, "N must be a multiple of 16"), (4096, 4128, "K must be a multiple of 64")):
        assert reason in (unsuited(one, dataclasses.replace(PLAIN, n=n, k=k)) or "")


# --- what a server is given ---

MANIFEST = """
format: 1
model: w4
source: made up
tokens: [16]
targets: [sm_80, sm_90a]
gemms:
  - {name: mxfp4, n: 512, k: 1088, dtypes: {a: bf16, b: e2m1, d: bf16}, scaling: mxfp4_weight}
  - {name: int4, n: 512, k: 1152, dtypes: {a: bf16, b: u4, d: bf16}, scaling: int4_weight}
  - {name: zeros, n: 512, k: 1152, dtypes: {a: bf16, b: u4, d: bf16}, scaling: int4_zero_weight}
"""


@pytest.fixture(scope="module")
def archive(request: pytest.FixtureRequest) -> Path:
    """A compiled kernel of each format and target."""
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    return made_once(request, "w4", build) / "w4.aot"


def build(folder: Path) -> None:
    (folder / "w4.yaml").write_text(MANIFEST)
    options = ["--candidates", "1", "--cache", "cache", "--no-tune", *ALONE]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*COMMAND, "build", "w4.yaml", "-o", "w4.aot", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["sm_80", "sm_90a"])
def library(archive: Path, torch: FakeTorch, request: pytest.FixtureRequest) -> Iterator[Library]:
    with Archive.open(archive) as opened:
        capability = TARGETS[request.param].compute_capability
        with Library(opened, RecordingDriver(kernels=kernels_of(opened), capability=capability)) as made:
            yield made


def call(form: WeightFormat, m: int) -> dict[str, Any]:
    if form is MXFP4:
        b, scale_b = FakeTensor((512, 544), "float4_e2m1fn_x2"), FakeTensor((17, 1024), "float8_e8m0fnu")
    else:
        b, scale_b = FakeTensor((512, 576), "uint4"), FakeTensor((18 if form.zeros else 9, 512), "bfloat16")
    return {"a": FakeTensor((m, 2 * b.shape[1])), "b": b, "scale_b": scale_b, "out": FakeTensor((m, 512))}


@formats
@pytest.mark.parametrize("m", [1, 17, 4097])
def test_a_prepared_weight_is_served_at_any_m(library: Library, form: WeightFormat, m: int) -> None:
    given = call(form, m)
    assert library.gemm(**given) is given["out"]
    library.gemm(**call(form, m))  # as planned


@formats
def test_a_weight_that_is_not_prepared_is_refused(library: Library, form: WeightFormat) -> None:
    given = call(form, 16)
    of_checkpoint = FakeTensor((512, given["a"].shape[1] // form.group), str(given["scale_b"].dtype).split(".")[-1])
    with pytest.raises(ArgumentError, match="prepare_weight makes b and scale_b"):
        library.gemm(**(given | {"scale_b": of_checkpoint}))
    b = given["b"]
    apart = FakeTensor(b.shape, str(b.dtype).split(".")[-1], (2 * b.shape[1], 1))
    with pytest.raises(LayoutError, match=r"b of shape .* must be contiguous"):
        library.gemm(**(given | {"b": apart}))


@formats
@pytest.mark.parametrize("name", ["a", "b", "scale_b", "out"])
def test_an_operand_that_does_not_start_at_16_bytes_is_refused_before_and_after_a_plan(
    library: Library, form: WeightFormat, name: str
) -> None:
    given = call(form, 17)
    off = call(form, 17)[name]
    off.pointer += 8
    for _ in range(2):
        with pytest.raises(LayoutError, match="must start at a multiple of"):
            library.gemm(**(given | {name: off}))
        library.gemm(**given)
