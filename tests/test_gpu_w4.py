"""Checkpoints' 4-bit weights from `prepare_weight` to `Library.gemm` on a real GPU: pytest -m gpu --archive=X, of an
archive of benchmarks/w4.yaml. tests/test_gpu_kernels.py has each function at extents that fill no tile."""

from __future__ import annotations

from typing import Any

import pytest

from runtime import Library
from runtime.errors import ArgumentError
from runtime.gemm.signature import Signature
from runtime.numbers.weights import FORMATS

from .gpu_library import library as library
from .gpu_library import signatures as signatures
from .gpu_library import torch as torch

pytestmark = pytest.mark.gpu

TOLERANCE = 5e-3
TOKENS = (1, 2, 7, 8, 9, 16, 17, 31, 33, 63, 64, 65, 100, 256)


@pytest.fixture(scope="module")
def weights(signatures: list[Signature]) -> list[Signature]:
    """The smallest two of each format."""
    found = sorted((s for s in signatures if s.scaling in FORMATS and s.epilogue == "none"), key=lambda s: s.n * s.k)
    chosen = [s for word in FORMATS for s in [s for s in found if s.scaling == word][:2]]
    if not chosen:
        pytest.skip("the archive has no GEMM of 4-bit weights")
    return chosen


def checkpoint(torch: Any, s: Signature) -> tuple[dict[str, Any], Any]:
    """Random tensors as a checkpoint has them, as `prepare_weight` takes them, and the numbers (N, K) that they are."""
    generator = torch.Generator(device="cuda").manual_seed(s.n)
    codes = torch.randint(0, 16, (s.n, s.k), device="cuda", generator=generator)
    if s.scaling == "mxfp4_weight":
        scales = torch.randint(115, 124, (s.n, s.k // 32), device="cuda", generator=generator, dtype=torch.uint8)
        values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cuda")
        numbers = values[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        numbers *= torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        return {"packed": packed, "scales": scales, "layout": "mxfp4"}, numbers
    scales = (torch.rand((s.n, s.k // 128), device="cuda", generator=generator) * 0.02 + 0.001).bfloat16()
    packed = sum(codes[:, i::8] << (4 * i) for i in range(8)).to(torch.int32)
    given, points = {"packed": packed, "scales": scales, "layout": "compressed-tensors"}, 8
    if FORMATS[s.scaling].zeros:
        drawn = torch.randint(0, 16, (s.n, s.k // 128), device="cuda", generator=generator)
        given["zeros"] = sum(drawn[i::8] << (4 * i) for i in range(8)).to(torch.int32)
        points = drawn.repeat_interleave(128, 1)
    return given, (codes - points).float() * scales.float().repeat_interleave(128, 1)


def test_weights_of_checkpoints_multiply_as_their_numbers_do(
    torch: Any,
    library: Library,
    weights: list[Signature],
) -> None:
    from runtime.torch.weights import prepare_weight

    for s in weights:
        given, numbers = checkpoint(torch, s)
        weight = prepare_weight(**given)
        for m in TOKENS:
            x = torch.randn((m, s.k), device="cuda", dtype=torch.bfloat16)
            out = torch.full((m, s.n), float("nan"), device="cuda", dtype=torch.bfloat16)
            library.gemm(x, weight.b, scale_b=weight.scale_b, out=out)
            wanted = x.float() @ numbers.T
            error = float((out.float() - wanted).norm() / wanted.norm())
            assert error < TOLERANCE, (s.key(), m, error)


def test_scales_as_a_checkpoint_has_them_are_refused(
    torch: Any,
    library: Library,
    weights: list[Signature],
) -> None:
    from runtime.torch.weights import prepare_weight

    given, _ = checkpoint(torch, weights[0])
    weight, scales = prepare_weight(**given), given["scales"]
    x = torch.randn((4, weights[0].k), device="cuda", dtype=torch.bfloat16)
    unprepared = scales.view(torch.float8_e8m0fnu) if given["layout"] == "mxfp4" else scales
    with pytest.raises(ArgumentError, match="prepare_weight makes b and scale_b"):
        library.gemm(x, weight.b, scale_b=unprepared)


def test_a_weight_is_read_in_a_captured_graph(
    torch: Any,
    library: Library,
    weights: list[Signature],
) -> None:
    from runtime.torch.weights import prepare_weight

    given, _ = checkpoint(torch, weights[0])
    weight = prepare_weight(**given)
    x = torch.randn((16, weights[0].k), device="cuda", dtype=torch.bfloat16)
    y = library.gemm(x, weight.b, scale_b=weight.scale_b)
    out = torch.full_like(y, float("nan"))
    library.gemm(x, weight.b, scale_b=weight.scale_b, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        library.gemm(x, weight.b, scale_b=weight.scale_b, out=out)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out.view(torch.uint16), y.view(torch.uint16))
