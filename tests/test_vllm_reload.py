"""Weights that vLLM's own code loads again, of modules shaped like vLLM's: graphs read the memory of before.

`pytest tests/test_vllm_reload.py --vllm FOLDER`, as `tests/test_vllm_hooks.py` says; skipped where there is none.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from . import test_vllm_experts, test_vllm_mxfp4, vllm_stand_in
from .sources import folder_of
from .test_vllm_activations import DOWN, GATE_UP, SWIGLU, expected, mlp_of
from .test_vllm_experts import FOUR, close, kernel_of, wanted_of
from .test_vllm_int4_experts import AWQ, GPTQ, QUANTISED, of_int4, signatures
from .torch_stand_in import HIDDEN, near, tensors
from .vllm_stand_in import Start

start, serve = vllm_stand_in.start, test_vllm_experts.serve  # fixtures


@pytest.fixture
def layerwise(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type], Any]]:
    """vLLM's module of layerwise reloading, with methods of this class and stand-ins for the rest of vLLM."""
    folder = Path(folder_of(request, "vllm", "vLLM")) / "model_executor/model_loader/reload"

    def copied(param: Any, loaded: torch.Tensor) -> None:
        param.data.copy_(loaded)

    def load(base: type) -> Any:
        attention = {name: type(name, (nn.Module,), {}) for name in ("Attention", "MLAAttention")}
        of_vllm: dict[str, dict[str, Any]] = {
            "config": {"ModelConfig": object},
            "logger": {"init_logger": logging.getLogger},
            "model_executor.layers.attention": attention,
            "model_executor.layers.quantization.base_config": {"QuantizeMethodBase": base},
            "model_executor.model_loader.weight_utils": {"default_weight_loader": copied},
        }
        for name, names in of_vllm.items():
            module = ModuleType(f"vllm.{name}")
            vars(module).update(names)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        package = ModuleType("vllm_reload")
        package.__path__ = [str(folder)]
        for name in [name for name in sys.modules if name.startswith(package.__name__)]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package.__name__, package)
        found = importlib.import_module(f"{package.__name__}.layerwise")
        torch.set_default_device("cpu")  # where it puts what it loads
        return found

    yield load
    torch.set_default_device(None)


def load_again(layerwise: Any, model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """What `reload_weights` and `finish_weight_update` do with a checkpoint's weights, by parameters' names."""
    layerwise.initialize_layerwise_reload(model)
    for name, param in list(model.named_parameters()):
        param.weight_loader(param, weights[name])
    layerwise.finalize_layerwise_reload(model, None)


@pytest.mark.parametrize("have", [[SWIGLU, DOWN], [GATE_UP, SWIGLU, DOWN]], ids=["fused-alone", "both"])
def test_an_mlp_computes_its_activation_once(
    start: Start, layerwise: Callable[[type], Any], have: list[dict[str, Any]]
) -> None:
    server = start(have)
    mlp = mlp_of(server)
    of_vllm = layerwise(server.modules["vllm.model_executor.layers.linear"].UnquantizedLinearMethod)
    of_vllm.record_metadata_for_reloading(mlp)
    server.serve(mlp)
    before = [param.data_ptr() for param in mlp.parameters()]
    weights = {name: torch.randn_like(param.data) for name, param in mlp.named_parameters()}
    load_again(of_vllm, mlp, weights)
    assert [param.data_ptr() for param in mlp.parameters()] == before
    (x,) = tensors((5, HIDDEN))
    assert near(mlp(x), expected(mlp, x))
    assert all(torch.equal(param.data, weights[name]) for name, param in mlp.named_parameters())


@pytest.mark.parametrize(("method", "scaling"), [(AWQ, "int4_zero_weight"), (GPTQ, "int4_weight")])
def test_experts_in_int4_are_launched_with_the_memory_of_before(
    serve: Any, layerwise: Callable[[type], Any], method: str, scaling: str
) -> None:
    server = serve(signatures(scaling))
    layer = of_int4(server, method)
    of_vllm = layerwise(type(layer.quant_method))
    of_vllm.record_metadata_for_reloading(layer)
    weights = {name: param.data.clone() for name, param in layer.named_parameters()}
    server.serve(layer, **QUANTISED)
    before = kernel_of(layer).launches.operands().prepared
    old = [each.scale_b.float().clone() for each in before]
    load_again(of_vllm, layer, {n: w * 2 if "scales" in n else w for n, w in weights.items()})
    after = kernel_of(layer).launches.operands().prepared
    for one, other, was in zip(before, after, old, strict=True):
        assert (one.b.data_ptr(), one.scale_b.data_ptr()) == (other.b.data_ptr(), other.scale_b.data_ptr())
        assert not torch.equal(one.scale_b.float(), was)


def test_experts_in_mxfp4_compute_with_new_weights_and_biases(serve: Any, layerwise: Callable[[type], Any]) -> None:
    server = serve(test_vllm_mxfp4.OF_MXFP4)
    layer, given = test_vllm_mxfp4.of_mxfp4(server), test_vllm_mxfp4.tokens()
    of_vllm = layerwise(type(layer.quant_method))
    of_vllm.record_metadata_for_reloading(layer)
    weights = {name: param.data.clone() for name, param in layer.named_parameters()}
    server.serve(layer, **QUANTISED | test_vllm_mxfp4.QUANTISED)
    before = [param.data_ptr() for param in layer.parameters()]
    for name in ("w13", "w2"):
        weights[f"{name}_weight_scale"] += 1  # exponents of 2
        weights[f"{name}_bias"] *= 2
        layer.numbers[name] *= 2
    load_again(of_vllm, layer, weights)
    assert [param.data_ptr() for param in layer.parameters()] == before
    close(layer(*given), wanted_of(layer, *given))
    assert server.lib.calls == FOUR
