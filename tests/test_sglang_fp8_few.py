"""SGLang's fp8 layers whose archive quantises few tokens itself; on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from . import sglang_stand_in
from .recording_driver import signature
from .sglang_stand_in import E4M3, Start, scaled
from .test_sglang_fp8 import LAYERS_OF, SERVED, K, N, close, compiled_with_any_m, exact, linear
from .torch_stand_in import OnCpu, tensors

start = sglang_stand_in.start  # a fixture

MOST = 4  # tokens that kernels quantise
FEW = [signature(N, K, b="e4m3", scaling=scaling, overlap="weights") for scaling in ("block_weight", "column_weight")]


@pytest.fixture
def begin(start: Start, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a scheduler whose library computes both products, and notes which and for how many tokens."""

    def gemm(
        self: Any, a: Any, b: Any, *, scale_b: Any, scale_a: Any = None, dtype: Any = None, overlap: str = "serial"
    ) -> Any:
        self.calls.append((a.shape[0], a.dtype == E4M3, overlap))
        return ((a.float() if scale_a is None else scaled(a, scale_a)) @ scaled(b, scale_b).T).to(dtype)

    monkeypatch.setattr(OnCpu, "gemm", gemm)
    return lambda: start([*SERVED, *FEW], tuned_to=MOST)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["block", "columns", "columns, compressed"])
def test_few_tokens_come_to_kernels_as_they_are(begin: Any, kind: str, bias: bool) -> None:
    server = begin()
    (layer,) = server.serve(linear(server, **LAYERS_OF[kind], bias=bias)).model
    for m in (1, MOST, MOST + 1):
        (x,) = tensors((m, K))
        assert close(layer(x[None])[0], exact(layer, x) + (layer.bias.float() if bias else 0))
    assert server.lib.calls == [(1, False, "weights"), (MOST, False, "weights"), (MOST + 1, True, "serial")]
    assert "serves 1 of 1 fp8 layers (2 signatures preloaded" in server.lines[0]


@pytest.mark.parametrize("kind", ["columns, static", "tensor", "tensor, compressed"])
def test_activations_with_static_scales_are_quantised_by_sglang(begin: Any, kind: str) -> None:
    server = begin()
    (layer,) = server.serve(linear(server, **LAYERS_OF[kind])).model
    (x,) = tensors((2, K))
    assert close(layer(x), exact(layer, x))
    assert server.lib.calls == [(2, True, "serial")]


@pytest.mark.parametrize("kind", ["block", "columns"])
def test_compiled_code_calls_one_operator_with_any_m(begin: Any, kind: str) -> None:
    server = begin()
    (layer,) = server.serve(linear(server, **LAYERS_OF[kind])).model
    called = compiled_with_any_m(layer, (3, 7))
    assert sum("cute_aot.quantising_gemm" in target for target in called) == 1
    assert [m for m, quantised, _ in server.lib.calls if not quantised] == [3, 3]  # compiled, and not
