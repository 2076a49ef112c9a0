"""The GEMM of 4-bit weights by mma.sync on a real GPU: pytest -m gpu. --archive=X has it, of
python -m tests.sm80_w4_samples; without one it is compiled here, by the DSL. A Hopper GPU can run it too, though builds
for one choose another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

import runtime
from runtime.gemm.signature import Signature

from .gpu_library import torch as torch
from .sm80_w4_samples import PLAIN, packed_samples

pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 7, 8, 9, 16, 17, 33, 63, 64, 65, 100, 257)
# Rows and columns of B that are whole tiles of few choices.
EXTENTS = {
    "mxfp4_weight": ((16, 64), (1040, 2880), (2864, 4096)),
    **dict.fromkeys(("int4_weight", "int4_zero_weight"), ((16, 128), (1040, 2048))),
}


@pytest.fixture(scope="module")
def functions(
    torch: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, list[tuple[Signature, Any]]]]:
    """Every function, by name: one for each signature."""
    given = request.config.getoption("--archive")
    path, variants = packed_samples(PLAIN, given, tmp_path_factory.mktemp(PLAIN))
    with runtime.load(path) as library:
        found: dict[str, list[tuple[Signature, Any]]] = {}
        for v in variants:
            plain = Signature(v.a, v.b, v.d, "f32", v.epilogue, 16, 128, scaling=v.scaling)
            shapes = [dataclasses.replace(plain, n=n, k=k) for n, k in EXTENTS[v.scaling]]
            found[v.name()] = [(s, library.functions[v.name()]) for s in shapes]
        yield found
        torch.cuda.synchronize()


def test_each_function_is_right_at_any_m_and_writes_nothing_else(torch: Any, functions: Any) -> None:
    from aot.tune import measure
    from aot.tune.gemm.operands import Weights

    by_signature: dict[Signature, dict[str, Any]] = {}
    for name, of_name in functions.items():
        for s, function in of_name:
            by_signature.setdefault(s, {})[name] = lambda o, function=function: function(
                *o.arguments(), stream=torch.cuda.current_stream()
            )
    for s, launches in by_signature.items():
        for m in TOKENS:
            errors = measure.check(s, m, Weights(s, m, 0, seed=m), launches)
            wrong = {name: e for name, e in errors.items() if isinstance(e, str) or e > measure.tolerance(s.d)}
            assert not wrong, (s.key(), m, wrong)


def test_a_function_gives_equal_bits_again_and_to_a_row_at_any_m(torch: Any, functions: Any) -> None:
    from aot.tune.gemm.operands import Weights

    for name, of_name in functions.items():
        s, function = of_name[-1]
        operands = Weights(s, 257, 0, seed=0).operands(257)[0]
        outputs = []
        for m in (257, 257, 64, 5):
            extras = {k: x[:m] if k == "residual" else x for k, x in operands.extras.items()}
            out = torch.full_like(operands.d[:m], float("nan"))
            function(operands.a[:m], operands.b, out, *extras.values(), stream=torch.cuda.current_stream())
            outputs.append(out)
        torch.cuda.synchronize()
        for out in outputs[1:]:
            assert torch.equal(out, outputs[0][: len(out)]), name
