"""Modules shaped like those that the plugin hooks in vLLM, names, parameters and who calls whom; a process with them.

They have no code of vLLM's.
"""

from __future__ import annotations

import enum
import hashlib
import json
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runtime.vllm.plugin import Plugin, install

from .recording_driver import signature
from .torch_stand_in import HIDDEN, INNER, ONE, VOCAB, library, logged
from .vllm_experts_stand_in import contents as experts
from .vllm_mxfp4_stand_in import contents as experts_in_mxfp4

LAYERS = "vllm.model_executor.layers"
FP8 = "vllm.model_executor.kernels.linear"
MIXED = f"{FP8}.mixed_precision.MPLinearKernel"
Contents = dict[str, dict[str, Any]]  # of modules, by their names


def stand_in(version: str = "0.25.0") -> dict[str, types.ModuleType]:
    """Fresh modules by name, for sys.modules."""
    contents: Contents = {"vllm": {"__version__": version}, "vllm.envs": {"VLLM_BATCH_INVARIANT": False}}
    contents |= _engine()
    linear = _linear()
    contents |= _norms() | linear | _mlps(linear[f"{LAYERS}.linear"]["Linear"]) | _embeddings() | _fp8_gemms()
    of_experts = experts()
    contents |= of_experts | experts_in_mxfp4(of_experts)
    modules = {name: types.ModuleType(name) for name in contents}
    for name, names in contents.items():
        vars(modules[name]).update(names)
    return modules


def _compilation(sizes: tuple[int, ...]) -> Any:
    """A `CompilationConfig` for graphs of so many tokens."""
    return types.SimpleNamespace(
        cudagraph_capture_sizes=list(sizes),
        inductor_compile_config={},
        mode=3,
        backend="inductor",
        pass_config=types.SimpleNamespace(fuse_allreduce_rms=False, enable_sp=None),
    )


def _engine() -> Contents:
    class WorkerBase:
        def __init__(
            self,
            vllm_config: Any,
            local_rank: int,
            rank: int,
            distributed_init_method: str,
            is_driver_worker: bool = False,
        ) -> None:
            self.vllm_config = vllm_config

    class Worker(WorkerBase):
        def __init__(self, vllm_config: Any, model: nn.Module) -> None:
            super().__init__(vllm_config=vllm_config, local_rank=0, rank=0, distributed_init_method="")
            self.model, self.model_runner = model, _runner(vllm_config.runner)(model)

        def get_model(self) -> nn.Module:
            return self.model

        def load_model(self, *, load_dummy_weights: bool = False) -> None:
            for module in self.model.modules():
                if hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)

        def compile_or_warm_up_model(self) -> str:
            self.model_runner.step(7)  # the runner for version 2 warms up by steps as of requests
            return "warm"

        def shutdown(self) -> None:
            pass

    class VllmConfig:
        def __init__(self, additional_config: Any, sizes: tuple[int, ...] = (1, 2, 4), quant: Any = None) -> None:
            self.additional_config, self.quant_config, self.runner = additional_config, quant, "v1"
            self.model_config = types.SimpleNamespace(model="org/some-model", runner_type="generate")
            self.compilation_config = _compilation(sizes)
            self.parallel_config = types.SimpleNamespace(
                enable_dbo=False,
                ubatch_size=0,
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_index=0,
            )
            self.offload_config = types.SimpleNamespace(
                uva=types.SimpleNamespace(cpu_offload_gb=0), prefetch=types.SimpleNamespace(offload_group_size=0)
            )

        def compute_hash(self) -> str:
            passes = [made.uuid() for made in self.compilation_config.inductor_compile_config.values()]
            return hashlib.sha256(json.dumps([self.additional_config, passes]).encode()).hexdigest()[:10]

    class CallableInductorPass:
        def __init__(self, callable: Any, uuid: Any = None) -> None:
            self.callable, self._uuid = callable, uuid

        def __call__(self, graph: Any) -> None:
            self.callable(graph)

        def uuid(self) -> Any:
            return self._uuid

    runners = _runners()

    def _runner(version: str) -> Any:
        return runners[_RUNNERS[version]]["GPUModelRunner"]

    return {
        "vllm.config.vllm": {"VllmConfig": VllmConfig},
        "vllm.config.compilation": {"CompilationMode": types.SimpleNamespace(NONE=0, VLLM_COMPILE=3)},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(pass_key="post_grad_custom_post_pass")},
        "vllm.compilation.passes.inductor_pass": {"CallableInductorPass": CallableInductorPass},
        "vllm.v1.worker.worker_base": {"WorkerBase": WorkerBase},
        "vllm.v1.worker.gpu_worker": {"Worker": Worker},
        **runners,
    }


_RUNNERS = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}
PADDED = 8  # numbers of tokens are padded to multiples of this


def _runners() -> Contents:
    """Both model runners; `step` runs one of so many tokens."""

    class GPUModelRunner:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def step(self, tokens: int) -> Any:
            padded = tokens + -tokens % PADDED
            return self._model_forward(input_ids=torch.zeros(padded), positions=torch.zeros(3, padded))

        def _model_forward(
            self,
            input_ids: Any = None,
            positions: Any = None,
            intermediate_tensors: Any = None,
            inputs_embeds: Any = None,
            **model_kwargs: Any,
        ) -> Any:
            return None if positions is None else positions.shape

    first = GPUModelRunner

    class GPUModelRunner:  # type: ignore[no-redef]
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def step(self, tokens: int) -> Any:
            return self.prepare_inputs(None, types.SimpleNamespace(num_tokens=tokens + -tokens % PADDED))

        def prepare_inputs(self, scheduler_output: Any, batch_desc: Any) -> Any:
            return batch_desc

    found = {_RUNNERS["v1"]: {"GPUModelRunner": first}, _RUNNERS["v2"]: {"GPUModelRunner": GPUModelRunner}}
    for name, names in found.items():
        names["GPUModelRunner"].__module__ = name
    return found


def _linear() -> Contents:
    class UnquantizedLinearMethod:
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.processed = True

        def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return nn.functional.linear(x, layer.weight, bias)

    class OwnMethod(UnquantizedLinearMethod):
        def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return 2 * super().apply(layer, x, bias)

    class Weight(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    class Linear(nn.Module):
        def __init__(self, n: int, k: int, bias: bool = False, method: Any = None, dtype: Any = torch.bfloat16) -> None:
            super().__init__()
            self.prefix, self.quant_method = f"model.n{n}", method or UnquantizedLinearMethod()
            self.weight = Weight(torch.randn(n, k).to(dtype), requires_grad=False)
            self.bias = nn.Parameter(torch.randn(n).to(dtype), requires_grad=False) if bias else None

        def forward(self, x: Any) -> Any:
            return self.quant_method.apply(self, x, self.bias)

    return {
        f"{LAYERS}.linear": {
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
            "OwnMethod": OwnMethod,
            "Linear": Linear,
        }
    }


def _norms() -> Contents:
    class RMSNorm(nn.Module):
        has_weight, variance_size_override = True, None

        def __init__(self, hidden_size: int, eps: float = 1e-6, dtype: Any = torch.bfloat16) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(hidden_size).to(dtype), requires_grad=False)
            self.variance_epsilon, self._forward_method = eps, self.forward_native

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self._forward_method(*args, **kwargs)

        def forward_native(self, x: Any, residual: Any = None) -> Any:
            total = x if residual is None else x + residual
            y = nn.functional.rms_norm(total, self.weight.shape, self.weight, self.variance_epsilon)
            return y if residual is None else (y, total)

    class GemmaRMSNorm(RMSNorm):
        pass

    return {f"{LAYERS}.layernorm": {"RMSNorm": RMSNorm, "GemmaRMSNorm": GemmaRMSNorm}}


def _mlps(linear: Any) -> Contents:
    class SiluAndMul(nn.Module):
        @staticmethod
        def forward_native(x: Any) -> Any:
            d = x.shape[-1] // 2
            return nn.functional.silu(x[..., :d]) * x[..., d:]

        def forward(self, x: Any) -> Any:
            return self.forward_native(x)

    class Mlp(nn.Module):
        def __init__(self, inner: int, hidden: int, bias: bool = False) -> None:
            super().__init__()
            self.gate_up_proj, self.act_fn = linear(2 * inner, hidden, bias), SiluAndMul()
            self.down_proj = linear(hidden, inner)

        def forward(self, x: Any) -> Any:
            gate_up = self.gate_up_proj(x)
            x = self.act_fn(gate_up)
            return self.down_proj(x)

    class ScaledMlp(Mlp):
        scale = 2.0

        def forward(self, x: Any) -> Any:
            return self.down_proj(self.act_fn(self.scale * self.gate_up_proj(x)))

    return {
        f"{LAYERS}.activation": {"SiluAndMul": SiluAndMul},
        "vllm.model_executor.models": {"Mlp": Mlp, "ScaledMlp": ScaledMlp},
    }


def _embeddings() -> Contents:
    class UnquantizedEmbeddingMethod:
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.processed = True

        def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return nn.functional.linear(x, layer.weight, bias)

    class VocabParallelEmbedding(nn.Module):
        def __init__(self, n: int, k: int) -> None:
            super().__init__()
            self.quant_method = UnquantizedEmbeddingMethod()
            self.weight = nn.Parameter(torch.randn(n, k).bfloat16(), requires_grad=False)

    class ParallelLMHead(VocabParallelEmbedding):
        def forward(self, x: Any) -> Any:
            return self.quant_method.apply(self, x)

    class LogitsProcessor:
        def __call__(self, lm_head: Any, hidden_states: Any) -> Any:
            return self._get_logits(hidden_states, lm_head, None)

        def _get_logits(self, hidden_states: Any, lm_head: Any, embedding_bias: Any) -> Any:
            return lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)

    return {
        f"{LAYERS}.logits_processor": {"LogitsProcessor": LogitsProcessor},
        f"{LAYERS}.vocab_parallel_embedding": {
            "UnquantizedEmbeddingMethod": UnquantizedEmbeddingMethod,
            "VocabParallelEmbedding": VocabParallelEmbedding,
            "ParallelLMHead": ParallelLMHead,
        },
    }


class Platform(enum.Enum):
    CUDA = enum.auto()
    ROCM = enum.auto()


class QuantFP8:
    """Quantises x (M, K) by `group`, and counts the calls; a trace may not enter `forward_cuda`."""

    def __init__(self, key: Any) -> None:
        self.group, self.calls = key.scale.group_shape, 0

    def __call__(self, x: Any, scale: Any = None, scale_ub: Any = None, use_triton: bool = False) -> tuple[Any, Any]:
        return self.forward_cuda(x, scale, scale_ub, use_triton)

    def forward_cuda(
        self, x: Any, scale: Any = None, scale_ub: Any = None, use_triton: bool = False
    ) -> tuple[Any, Any]:
        self.calls += 1
        if scale is None:
            size = x.shape[1] if self.group[1] < 0 else self.group[1]
            scale = x.float().abs().view(x.shape[0], -1, size).amax(-1) / 448
        return (x.float() / scale.repeat_interleave(x.shape[1] // scale.shape[1], 1)).to(E4M3), scale


def _fp8_gemms() -> Contents:
    class FP8ScaledMMLinearKernel:
        def __init__(self, c: Any, layer_param_names: Any) -> None:
            assert self.can_implement(c)[0]
            self.config = c
            self.quant_fp8 = QuantFP8(c.activation_quant_key)

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            a, scale = self.quant_fp8(x.view(-1, x.shape[-1]), None, layer.scale_ub)
            more = {"As": scale, "Bs": layer.weight_scale, "bias": bias}
            shape = [*x.shape[:-1], layer.weight.shape[1]]
            return self.apply_scaled_mm(A=a, B=layer.weight, out_dtype=x.dtype, output_shape=shape, **more)

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return True, None

        def apply_scaled_mm(
            self, *, A: Any, B: Any, out_dtype: Any, As: Any, Bs: Any, bias: Any, output_shape: Any
        ) -> Any:
            raise NotImplementedError

    class Fp8BlockScaledMMLinearKernel:
        def __init__(self, config: Any) -> None:
            self.config = config
            self.quant_fp8 = QuantFP8(config.activation_quant_key)

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            a, scale = self.quant_fp8(x.view(-1, x.shape[-1]), None, layer.scale_ub, use_triton=False)
            d = self.apply_block_scaled_mm(A=a, B=layer.weight, As=scale, Bs=layer.weight_scale)
            return (d if bias is None else d + bias).view(*x.shape[:-1], layer.weight.shape[0])

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> Any:
            raise NotImplementedError

    mixed = _mixed_gemms()
    ((_, MPLinearKernel),) = mixed[MIXED].items()
    return mixed | {
        FP8: {
            "_POSSIBLE_KERNELS": {p: [MPLinearKernel] for p in Platform},
            "_POSSIBLE_FP8_KERNELS": {p: [FP8ScaledMMLinearKernel] for p in Platform},
            "_POSSIBLE_FP8_BLOCK_KERNELS": {p: [Fp8BlockScaledMMLinearKernel] for p in Platform},
        },
        "vllm.model_executor.layers.quantization.input_quant_fp8": {"QuantFP8": QuantFP8},
        f"{FP8}.scaled_mm.ScaledMMLinearKernel": {"FP8ScaledMMLinearKernel": FP8ScaledMMLinearKernel},
        f"{FP8}.scaled_mm.BlockScaledMMLinearKernel": {"Fp8BlockScaledMMLinearKernel": Fp8BlockScaledMMLinearKernel},
    }


def _mixed_gemms() -> Contents:
    class MPLinearKernel:
        def __init__(
            self,
            c: Any,
            w_q_param_name: str,
            w_s_param_name: str,
            w_zp_param_name: str | None = None,
            w_gidx_param_name: str | None = None,
        ) -> None:
            assert self.can_implement(c)
            self.config = c
            self.w_q_name, self.w_s_name, self.w_zp_name = w_q_param_name, w_s_param_name, w_zp_param_name
            self.w_gidx_name = w_gidx_param_name

        @classmethod
        def get_min_capability(cls) -> int:
            raise NotImplementedError

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            raise NotImplementedError

        def process_weights_after_loading(self, layer: Any) -> None:
            raise NotImplementedError

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            raise NotImplementedError

        def _get_weight_params(self, layer: Any) -> tuple[Any, ...]:
            names = self.w_q_name, self.w_s_name, self.w_zp_name, self.w_gidx_name
            return tuple(getattr(layer, name or "", None) for name in names)

        def _transform_param(self, layer: Any, name: Any, fn: Any) -> None:
            setattr(layer, name, nn.Parameter(fn(getattr(layer, name)).data, requires_grad=False))

    def permute_param_layout_(param: Any, input_dim: int, output_dim: int, **kwargs: Any) -> Any:
        if "packed_dim" in kwargs:
            assert param.packed_dim == (param.input_dim, param.output_dim)[kwargs["packed_dim"]]
        assert (input_dim, output_dim) == (0, 1)
        param.data = param.data.permute(param.input_dim, param.output_dim)
        return param

    return {
        MIXED: {"MPLinearKernel": MPLinearKernel},
        "vllm.model_executor.parameter": {"permute_param_layout_": permute_param_layout_},
    }


# --- a process of it, with a plugin ---

MINE = {"cute_aot": "model.aot"}
SERVED = [ONE, signature(INNER, HIDDEN), signature(HIDDEN, HIDDEN, epilogue="bias"), signature(VOCAB, HIDDEN)]


class Server:
    """A process with the stand-in for vLLM, and a plugin that opens `lib` whatever path is named."""

    def __init__(self, modules: dict[str, Any], lib: Any, log: pytest.LogCaptureFixture) -> None:
        names: dict[str, Any] = {}
        for module in modules.values():
            names |= vars(module)
        self.linear, self.head, self.embedding = (
            names["Linear"],
            names["ParallelLMHead"],
            names["VocabParallelEmbedding"],
        )
        self.own_method, self.config, self._worker = names["OwnMethod"], names["VllmConfig"], names["Worker"]
        self.modules, self.lib, self._log = modules, lib, log
        self.asked: list[Any] = []

    def load(self, paths: Any, **options: str) -> Any:
        self.asked.append((paths, options))
        return self.lib

    def serve(self, *layers: nn.Module, config: Any = MINE, **more: Any) -> Any:
        """A worker whose model has these layers, loaded."""
        config = config if hasattr(config, "compute_hash") else self.config(config, **more)
        worker = self._worker(config, nn.ModuleList(layers))
        worker.load_model()
        return worker

    @property
    def lines(self) -> list[str]:
        """What the plugin logged, apart from details for debugging."""
        return logged(self._log, "vllm.cute_aot")


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Start:
    """Makes servers whose plugin opens an archive of these signatures, or calls `load`."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    caplog.set_level(logging.DEBUG, "vllm.cute_aot")

    def make(signatures: Any = SERVED, version: str = "0.25.0", load: Any = None, **more: Any) -> Server:
        modules = stand_in(version)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        server = Server(modules, library(tmp_path, signatures, **more), caplog)
        install(Plugin(load or server.load))
        return server

    return make


# --- layers in fp8 ---

N, K = 256, 384
TENSOR, TOKEN, CHANNEL, GROUP, BLOCK = (-1, -1), (1, -1), (-1, 1), (1, 128), (128, 128)
GROUPS = {"tensor": (TENSOR, TENSOR), "row_column": (TOKEN, CHANNEL), "block": (GROUP, BLOCK)}
E4M3 = torch.float8_e4m3fn


def quant_key(group: tuple[int, int], static: bool = False, **more: Any) -> Any:
    """How activations or a weight are quantised, as vLLM says it."""
    scale = types.SimpleNamespace(dtype=more.pop("scale", torch.float32), static=static, group_shape=group)
    return types.SimpleNamespace(**{"dtype": E4M3, "scale": scale, "scale2": None, "symmetric": True, **more})


def fp8_layer(scaling: str = "tensor", n: int = N, k: int = K, **more: Any) -> Any:
    """A layer as vLLM describes it."""
    a, b = GROUPS[scaling]
    words = {
        "activation_quant_key": quant_key(a),
        "weight_quant_key": quant_key(b, static=True),
        "weight_shape": (n, k),
    }
    return types.SimpleNamespace(**words | {"input_dtype": torch.bfloat16, "out_dtype": torch.bfloat16} | more)
