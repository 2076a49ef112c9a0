"""What quantises rows on a real GPU: functions of an archive against references, bit by bit.

pytest -m gpu tests/quantise --archive=X, for an archive of benchmarks/moe_fp8.yaml, or any with these operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime import Library
from runtime.moe.permute import Signature as Permute
from runtime.quantise import Signature as Quantise

from ..moe.functions import functions_of

torch = pytest.importorskip("torch")

from aot.tune import measure  # noqa: E402  # needs torch
from aot.tune.operation import tuning  # noqa: E402

from ..gpu_library import library_of_module as library_of_module  # noqa: E402

pytestmark = pytest.mark.gpu

ROWS = 1, 2, 7, 33, 129, 1000
EXTENTS = 16, 128, 400, 768, 2048, 7168
SCALINGS = "block", "row_column"


@pytest.fixture(scope="module")
def functions(tuned_archive: Path) -> dict[Any, list[str]]:
    """Functions of both operations, by a signature that they compute."""
    wanted: list[Any] = [
        *(Quantise(x, "e4m3", 256, s, groups) for x in ("bf16", "f16") for s in SCALINGS for groups in (0, 8)),
        *(Quantise(x, "e4m3", 256, s, activation="swiglu") for x in ("bf16", "f16") for s in SCALINGS),
        *(
            Permute(x, 16, 4, 256, every, s, weights)
            for x in ("bf16", "f16")
            for s in SCALINGS
            for every in (0, 64)
            for weights in ("none", "f32")
        ),
    ]
    found = {s: functions_of(tuned_archive, s.operation, s) for s in wanted}
    for s, names in found.items():
        gated = getattr(s, "activation", "none") != "none"
        found[s] = [n for n in names if f".{s.scaling}_scaled." in n and (".swiglu." in n) == gated]
    found = {s: names for s, names in found.items() if names}
    if not found:
        pytest.skip("the archive has nothing that quantises for this GPU")
    return found


def launcher(library: Library, name: str) -> Callable[[Any], None]:
    return lambda o: library.functions[name](*o.arguments(), stream=torch.cuda.current_stream())


def weights_of(s: Any, m: int) -> Any:
    return tuning(s).measures().weights(s, m, 0, m)


def of_extent(s: Any, k: int) -> Any:
    return replace(s, k=k)


def exactly(x: Any, scaling: str) -> tuple[Any, Any]:
    """What becomes of rows, as kernels compute it. torch divides by a number, and a number by a tensor, by a product
    with an inverse, and so not as exactly as a tensor by a tensor."""
    rows, k = x.shape
    width = 128 if scaling == "block" else k
    blocks = -(-k // width)
    wide = torch.nn.functional.pad(x.float(), (0, blocks * width - k)).view(rows, blocks, width)
    amax = wide.abs().amax(-1).clamp_min(1e-10)
    largest = torch.full_like(amax, 448.0)
    y = (wide * (largest / amax)[..., None]).view(rows, -1)[:, :k].to(torch.float8_e4m3fn)
    scale = amax / largest
    return y, scale if scaling == "block" else scale[:, 0]


def same_bits(found: Any, wanted: Any) -> bool:
    kind = torch.uint8 if found.element_size() == 1 else torch.int32
    return torch.equal(found.contiguous().view(kind), wanted.contiguous().view(kind))


@pytest.mark.parametrize("m", ROWS)
def test_every_function_is_right_by_the_check_of_tuning(
    functions: dict[Any, list[str]], library: Library, m: int
) -> None:
    """Rows of all magnitudes and of zeros, guards behind each output, and rows of no group, which are left alone."""
    for s, names in functions.items():
        for of in (of_extent(s, k) for k in EXTENTS):
            weights = weights_of(of, m)
            found = measure.check(of, m, weights, {name: launcher(library, name) for name in names})
            assert {name: why for name, why in found.items() if isinstance(why, str)} == {}, (of.key(), m)


def test_bits_are_those_of_a_product_with_the_inverse_of_the_scale(
    functions: dict[Any, list[str]], library: Library
) -> None:
    """But of what gates make, which is not exact."""
    plain = [s for s in functions if s.operation == "quantise" and s.activation == "none"]
    for s, names in ((s, functions[s]) for s in plain):
        for of in (of_extent(s, k) for k in EXTENTS):
            (o, *_) = weights_of(of, 65).operands(65)
            for name in names:
                launcher(library, name)(o)
                y, scale = exactly(o.x, of.scaling)
                assert same_bits(o.y, y), (name, of.key())
                assert same_bits(o.scale, scale), (name, of.key())


def test_rows_of_experts_have_the_bits_of_their_tokens(functions: dict[Any, list[str]], library: Library) -> None:
    for s, names in functions.items():
        for of in (of_extent(s, k) for k in EXTENTS if s.operation == "moe_permute"):
            weights = weights_of(of, 33)
            o = weights.made(torch.randint(-2, of.experts + 2, (33, of.top_k), device="cuda"))
            for name in names:
                launcher(library, name)(o)
                places = (o.positions >= 0).nonzero()
                x = o.x[places[:, 0]]
                if o.weights is not None:
                    x = (x.float() * o.weights[places[:, 0], places[:, 1], None]).to(x.dtype)
                y, scale = exactly(x, of.scaling)
                rows = o.positions[places[:, 0], places[:, 1]].long()
                assert same_bits(o.rows[rows].view(torch.uint8), y.view(torch.uint8)), (name, of.key())
                assert same_bits(o.scale[rows], scale), (name, of.key())


@pytest.mark.parametrize("end", [-5, 0, 1, 64, 1 << 30, -(1 << 31)])
def test_no_end_makes_a_kernel_write_outside_its_outputs(
    functions: dict[Any, list[str]], library: Library, end: int
) -> None:
    for s, names in functions.items():
        if s.operation != "quantise" or not s.groups:
            continue
        (o, *_) = weights_of(s, 64).operands(64)
        o.ends[-1] = end
        kept = min(max(end, 0), 64)
        for name in names:
            y, scale = (torch.full_like(t.float(), 7.0).to(t.dtype) for t in (o.y, o.scale))
            launcher(library, name)(replace(o, y=y, scale=scale))
            assert bool((y[kept:].float() == 7).all()), name
            assert bool((scale[kept:] == 7).all()), name
            assert same_bits(y[:kept], exactly(o.x, s.scaling)[0][:kept]), name
