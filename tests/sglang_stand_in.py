"""Modules shaped like those that the plugin hooks in SGLang, names, parameters and who calls whom; a process with them.

They have no code of SGLang's.
"""

from __future__ import annotations

import enum
import functools
import importlib
import json
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from runtime.sglang.hooks import MODEL_LOADED
from runtime.sglang.plugin import Plugin, install

from . import sglang_experts_stand_in, sglang_runner_stand_in
from .recording_driver import signature
from .torch_stand_in import HIDDEN, INNER, ONE, VOCAB, library, logged

LAYERS = "sglang.srt.layers"
QUANTIZATION = f"{LAYERS}.quantization"
FP8 = f"{QUANTIZATION}.fp8_utils"
REGISTRY = "sglang.srt.plugins.hook_registry"
Contents = dict[str, dict[str, Any]]  # of modules, by their names
E4M3 = torch.float8_e4m3fn
ARGUMENTS = types.SimpleNamespace(rl_on_policy_target=None)


def get_global_server_args() -> Any:
    """As a forward finds it."""
    return ARGUMENTS


def stand_in(version: str = "0.5.13") -> dict[str, types.ModuleType]:
    """Fresh modules by name, for sys.modules."""
    contents: Contents = {"sglang": {"__version__": version}, REGISTRY: _registry()}
    contents |= _activation() | _layers() | _fp8() | sglang_experts_stand_in.contents()
    contents |= sglang_runner_stand_in.contents()
    modules = {name: types.ModuleType(name) for name in contents}
    for name, names in contents.items():
        vars(modules[name]).update(names)
    return modules


def arguments(setting: str = "{}", **more: Any) -> Any:
    """Those of a server, as its schedulers have them."""
    words: dict[str, Any] = {"json_model_override_args": setting, "cpu_offload_gb": 0, "offload_group_size": -1}
    words |= {"torchao_config": "", "enable_deterministic_inference": False, "rl_on_policy_target": None}
    words |= {"enable_lora": False, "enable_fp32_lm_head": False, "fp8_gemm_runner_backend": "auto"}
    words |= {"enable_two_batch_overlap": False, "enable_pdmux": False, "disable_cuda_graph": False}
    words |= {"cuda_graph_bs": [1, 2, 4], "speculative_num_draft_tokens": None}
    words |= {"disable_piecewise_cuda_graph": True, "piecewise_cuda_graph_tokens": [8, 16]}
    words |= {"enable_torch_compile": False, "enable_symm_mem": False, "attn_cp_size": 1}
    words |= {"enable_dp_attention": False, "moe_a2a_backend": "none", "moe_dense_tp_size": None}
    words |= {"enable_attn_tp_input_scattered": False, "forward_hooks": None}
    assert not set(more) - set(words)
    return types.SimpleNamespace(**words | more)


def _registry() -> dict[str, Any]:
    class HookType(enum.Enum):
        AROUND = "around"
        REPLACE = "replace"

    class HookSource(NamedTuple):
        plugin_name: str
        dist_name: str | None

    class HookRegistry:
        """Applies what was registered for a name once; what comes later for that name is passed over."""

        hooks: dict[str, list[tuple[HookType, Callable[..., Any]]]] = {}  # noqa: RUF012
        patched: set[str] = set()  # noqa: RUF012
        problems: list[str] = []  # noqa: RUF012

        @classmethod
        def register(
            cls, target: str, hook: Callable[..., Any], hook_type: HookType, *, source: HookSource | None = None
        ) -> None:
            before = cls.hooks.setdefault(target, [])
            if hook_type is HookType.REPLACE and any(kind is HookType.REPLACE for kind, _ in before):
                cls.problems.append(f"two replacements of {target}")
            before.append((hook_type, hook))

        @classmethod
        def apply_hooks(cls) -> None:
            of_classes_first = sorted(cls.hooks.items(), key=lambda each: not isinstance(each[1][0][1], type))
            for target, hooks in of_classes_first:
                if target not in cls.patched:
                    cls._apply(target, hooks)
                    cls.patched.add(target)

        @classmethod
        def _apply(cls, target: str, hooks: list[tuple[HookType, Callable[..., Any]]]) -> None:
            path, _, name = target.rpartition(".")
            try:
                owner: Any = importlib.import_module(path)
            except ImportError:
                module, _, holder = path.rpartition(".")
                owner = getattr(importlib.import_module(module), holder)
            original = function = getattr(owner, name)
            for kind, hook in sorted(hooks, key=lambda each: each[0] is not HookType.REPLACE):
                function = hook if isinstance(hook, type) else _wrapper(function, hook, kind is HookType.AROUND)
            setattr(owner, name, function)
            for importer in [m for n, m in sys.modules.items() if n.startswith("sglang")]:
                for key, value in list(vars(importer).items()):
                    if value is original:
                        setattr(importer, key, function)

    def _wrapper(function: Callable[..., Any], hook: Callable[..., Any], around: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return hook(function, *args, **kwargs) if around else hook(*args, **kwargs)

        return wrapper

    HookRegistry.hooks, HookRegistry.patched, HookRegistry.problems = {}, set(), []
    return {"HookType": HookType, "HookSource": HookSource, "HookRegistry": HookRegistry}


def _activation() -> Contents:
    class SiluAndMul(nn.Module):
        def forward_native(self, x: Any) -> Any:
            d = x.shape[-1] // 2
            return nn.functional.silu(x[..., :d]) * x[..., d:]

        def forward(self, x: Any) -> Any:
            return self.forward_native(x)

    return {f"{LAYERS}.activation": {"SiluAndMul": SiluAndMul}}


def _layers() -> Contents:
    class UnquantizedLinearMethod:
        def process_weights_after_loading(self, layer: Any) -> None: ...

        def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return nn.functional.linear(x, layer.weight, bias)

    class OwnMethod(UnquantizedLinearMethod):
        def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return 2 * super().apply(layer, x, bias)

    class UnquantizedEmbeddingMethod:
        def process_weights_after_loading(self, layer: Any) -> None: ...

    class Linear(nn.Module):
        def __init__(self, n: int, k: int, bias: bool = False, method: Any = None) -> None:
            super().__init__()
            self.quant_method = method or UnquantizedLinearMethod()
            self.weight = nn.Parameter(torch.randn(n, k).bfloat16(), requires_grad=False)
            self.bias = nn.Parameter(torch.randn(n).bfloat16(), requires_grad=False) if bias else None

        def forward(self, x: Any) -> Any:
            return self.quant_method.apply(self, x, self.bias), None

    class VocabParallelEmbedding(nn.Module):
        embeds = True

        def __init__(self, n: int, k: int) -> None:
            super().__init__()
            self.quant_method = UnquantizedEmbeddingMethod()
            self.weight = nn.Parameter(torch.randn(n, k).bfloat16(), requires_grad=False)

    class ParallelLMHead(VocabParallelEmbedding): ...

    class LogitsProcessor(nn.Module):
        use_fp32_lm_head = False

        def _compute_lm_head(self, hidden_states: Any, lm_head: Any, embedding_bias: Any = None) -> Any:
            dtype = torch.float32 if self.use_fp32_lm_head else lm_head.weight.dtype
            return torch.matmul(hidden_states.to(dtype), lm_head.weight.to(dtype).T)

        def _get_logits(
            self, hidden_states: Any, lm_head: Any, logits_metadata: Any, embedding_bias: Any = None
        ) -> Any:
            return self._compute_lm_head(hidden_states, lm_head, embedding_bias)

        def forward(self, hidden_states: Any, lm_head: Any) -> Any:
            return self._get_logits(hidden_states, lm_head, None)

    class Mlp(nn.Module):
        def __init__(self, inner: int, hidden: int, bias: bool = False) -> None:
            super().__init__()
            silu_and_mul: Any = vars(sys.modules[f"{LAYERS}.activation"])["SiluAndMul"]
            self.gate_up_proj, self.act_fn = Linear(2 * inner, hidden, bias), silu_and_mul()
            self.down_proj = Linear(hidden, inner)

        def forward(self, x: Any, skip_all_reduce: bool = False) -> Any:
            if get_global_server_args().rl_on_policy_target is not None:
                x = x.bfloat16()
            gate_up, _ = self.gate_up_proj(x)
            x = self.act_fn(gate_up)
            x, _ = self.down_proj(x)
            return x

    class ScaledMlp(Mlp):
        scale = 2.0

        def forward(self, x: Any, skip_all_reduce: bool = False) -> Any:
            scale = self.scale
            gate_up, _ = self.gate_up_proj(x)
            x = self.act_fn(scale * gate_up)
            x, _ = self.down_proj(x)
            return x

    return {
        f"{QUANTIZATION}.unquant": {"UnquantizedLinearMethod": UnquantizedLinearMethod, "OwnMethod": OwnMethod},
        f"{LAYERS}.logits_processor": {"LogitsProcessor": LogitsProcessor},
        f"{LAYERS}.vocab_parallel_embedding": {
            "VocabParallelEmbedding": VocabParallelEmbedding,
            "ParallelLMHead": ParallelLMHead,
        },
        "sglang.srt.models": {"Linear": Linear, "Mlp": Mlp, "ScaledMlp": ScaledMlp},
    }


def scaled(x: Any, scales: Any) -> Any:
    """x in float32, times the scale of each element's group, one element's after another's."""
    rows, columns = (torch.arange(extent) for extent in x.shape)
    matrix = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    row = torch.zeros_like(rows) if matrix.shape[0] == 1 else rows // (x.shape[0] // matrix.shape[0])
    column = torch.zeros_like(columns) if matrix.shape[1] == 1 else columns // 128
    return x.float() * matrix[row][:, column]


def _quantisers() -> dict[str, Any]:
    """What quantises activations, by name."""

    def sglang_per_token_quant_fp8(x: Any, dtype: Any = E4M3) -> Any:
        scales = x.float().abs().amax(-1, keepdim=True) / 448
        return (x.float() / scales).to(dtype), scales

    def static_quant_fp8(x: Any, x_s: Any, repeat_scale: bool = False) -> Any:
        scales = x_s.reshape(1, 1).expand(x.shape[0], 1).contiguous() if repeat_scale else x_s
        return (x.float() / x_s).to(E4M3), scales

    def scaled_fp8_quant(
        input: Any, scale: Any = None, num_token_padding: Any = None, use_per_token_if_dynamic: bool = False
    ) -> Any:
        if scale is None:
            assert use_per_token_if_dynamic
            return sglang_per_token_quant_fp8(input)
        return (input.float() / scale).to(E4M3), scale

    def sglang_per_token_group_quant_fp8(
        x: Any,
        group_size: int,
        eps: float = 1e-10,
        column_major_scales: bool = False,
        scale_tma_aligned: bool = False,
        scale_ue8m0: bool = False,
        fuse_silu_and_mul: bool = False,
        masked_m: Any = None,
        enable_v2: Any = None,
    ) -> Any:
        groups = x.float().reshape(x.shape[0], -1, group_size)
        scales = groups.abs().amax(-1) / 448
        quantised = (groups / scales[..., None]).reshape(x.shape).to(E4M3)
        return quantised, scales.t().contiguous().t() if column_major_scales else scales

    every = (sglang_per_token_quant_fp8, static_quant_fp8, scaled_fp8_quant, sglang_per_token_group_quant_fp8)
    return {each.__name__: each for each in every}


def _linears() -> dict[str, Any]:
    """`apply_fp8_linear`, and the functions for blocks, by name."""

    def apply_fp8_linear(
        input: Any,
        weight: Any,
        weight_scale: Any,
        input_scale: Any = None,
        input_scale_ub: Any = None,
        bias: Any = None,
        cutlass_fp8_supported: bool = True,
        use_per_token_if_dynamic: bool = False,
        pad_output: Any = None,
        compressed_tensor_quant: bool = False,
    ) -> Any:
        """Not scaled by activations: a coarser answer, which tells who computed it."""
        d = input.float() @ scaled(weight.t(), weight_scale.reshape(-1, 1)).t()
        return (d if bias is None else d + bias.float()).to(input.dtype)

    def block(name: str) -> Any:
        def linear(
            input: Any, weight: Any, block_size: Any, weight_scale: Any, input_scale: Any = None, bias: Any = None
        ) -> Any:
            d = input.float() @ scaled(weight, weight_scale).t()
            return (d if bias is None else d + bias.float()).to(input.dtype)

        linear.__name__ = name
        return linear

    fallbacks = (f"{of}_w8a8_block_fp8_linear_with_fallback" for of in ("deepgemm", "cutlass", "flashinfer_deepgemm"))
    names = (*fallbacks, "triton_w8a8_block_fp8_linear", "another_linear")
    return {"apply_fp8_linear": apply_fp8_linear, **{name: block(name) for name in names}}


def _fp8_layers() -> dict[str, Any]:
    """Methods of fp8 layers, and a layer of them, by name."""

    class Fp8LinearMethod:
        chosen = "deepgemm_w8a8_block_fp8_linear_with_fallback"

        def __init__(self) -> None:
            self.w8a8_block_fp8_linear = getattr(sys.modules[FP8], self.chosen)

        def process_weights_after_loading(self, layer: Any) -> None: ...

        def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
            if layer.weight_scale_inv is not None:
                return self.w8a8_block_fp8_linear(
                    input=x,
                    weight=layer.weight,
                    block_size=[128, 128],
                    weight_scale=layer.weight_scale_inv,
                    input_scale=None,
                    bias=bias,
                )
            more: Any = {"use_per_token_if_dynamic": True, "compressed_tensor_quant": True} if layer.compressed else {}
            linear: Any = sys.modules[f"{QUANTIZATION}.fp8"].apply_fp8_linear
            return linear(
                input=x,
                weight=layer.weight,
                weight_scale=layer.weight_scale,
                input_scale=layer.input_scale,
                bias=bias,
                **more,
            )

    class UnknownMethod:
        def process_weights_after_loading(self, layer: Any) -> None: ...

    class Fp8Linear(nn.Module):
        """Of `scaling`, its weight (K, N) unless that is "block"; `static` activations have one scale for all."""

        def __init__(
            self, n: int, k: int, scaling: str, *, static: bool = False, compressed: bool = False, bias: bool = False
        ) -> None:
            super().__init__()
            self.quant_method, self.compressed = Fp8LinearMethod(), compressed
            weight = torch.randn(n, k).to(E4M3)
            self.weight = nn.Parameter(weight if scaling == "block" else weight.t(), requires_grad=False)
            shape = {"tensor": (), "row_column": (n, 1), "block": (n // 128, k // 128)}[scaling]
            scales = nn.Parameter(torch.rand(shape) + 0.5, requires_grad=False)
            self.weight_scale_inv = scales if scaling == "block" else None
            self.weight_scale = None if scaling == "block" else scales
            self.input_scale = nn.Parameter(torch.tensor(0.02), requires_grad=False) if static else None
            self.bias = nn.Parameter(torch.randn(n).bfloat16(), requires_grad=False) if bias else None

        def forward(self, x: Any) -> Any:
            return self.quant_method.apply(self, x, self.bias)

    return {each.__name__: each for each in (Fp8LinearMethod, Fp8Linear, UnknownMethod)}


def _fp8() -> Contents:
    def gemm_nt_f8f8bf16(lhs: Any, rhs: Any, out: Any) -> None:
        out.fill_(7)

    quantised, linears, wrapper = _quantisers(), _linears(), {"gemm_nt_f8f8bf16": gemm_nt_f8f8bf16}
    return {
        f"{QUANTIZATION}.fp8_kernel": quantised,
        FP8: {**quantised, **linears},
        f"{QUANTIZATION}.fp8": {**_fp8_layers(), "apply_fp8_linear": linears["apply_fp8_linear"]},
        f"{LAYERS}.deep_gemm_wrapper": dict(wrapper),
        f"{LAYERS}.deep_gemm_wrapper.entrypoint": wrapper,
    }


# --- a process of it, with a plugin ---

MINE = {"cute_aot": "model.aot"}
SERVED = [ONE, signature(INNER, HIDDEN), signature(HIDDEN, HIDDEN, epilogue="bias"), signature(VOCAB, HIDDEN)]


class Server:
    """A scheduler with the stand-in for SGLang, and a plugin that opens `lib` whatever path is named."""

    def __init__(self, modules: dict[str, Any], lib: Any, log: pytest.LogCaptureFixture) -> None:
        self.modules, self.lib, self._log = modules, lib, log
        models = vars(modules["sglang.srt.models"])
        self.linear, self.mlp, self.scaled_mlp = models["Linear"], models["Mlp"], models["ScaledMlp"]
        heads = vars(modules[f"{LAYERS}.vocab_parallel_embedding"])
        self.head, self.embedding = heads["ParallelLMHead"], heads["VocabParallelEmbedding"]
        self.logits = modules[f"{LAYERS}.logits_processor"].LogitsProcessor()
        self.registry = modules[REGISTRY].HookRegistry
        self.asked: list[Any] = []

    def load(self, paths: Any, **options: str) -> Any:
        self.asked.append((paths, options))
        return self.lib

    def serve(self, *layers: Any, setting: Any = MINE, draft: bool = False, ranks: Any = None, **more: Any) -> Any:
        """A runner whose model has these layers, or what these make when they are called, loaded."""
        runner = self.modules[MODEL_LOADED.module].ModelRunner
        server_args = arguments(setting if isinstance(setting, str) else json.dumps(setting), **more)
        made = lambda: nn.ModuleList(each if isinstance(each, nn.Module) else each() for each in layers)  # noqa: E731
        found = runner(server_args, made, is_draft_worker=draft, **(ranks or {}))
        found.logits = self.logits
        return found

    @property
    def lines(self) -> list[str]:
        """What the plugin logged, apart from details for debugging."""
        return logged(self._log, "sglang.cute_aot")


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Start:
    """Makes schedulers whose plugin opens an archive of these signatures, or calls `load`."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    caplog.set_level(logging.DEBUG, "sglang.cute_aot")

    def make(
        signatures: Any = SERVED,
        version: str = "0.5.13",
        load: Any = None,
        others: Any = (),
        replaces: Callable[[Any], tuple[str, Any]] | None = None,
        **more: Any,
    ) -> Server:
        modules = stand_in(version)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        server = Server(modules, library(tmp_path, signatures, **more), caplog)
        install(Plugin(load or server.load))
        for target, hook in others:  # of another plugin
            server.registry.register(target, hook, modules[REGISTRY].HookType.AROUND)
        if replaces is not None:  # the same, given the runner's class
            target, hook = replaces(modules[MODEL_LOADED.module].ModelRunner)
            server.registry.register(target, hook, modules[REGISTRY].HookType.REPLACE)
        server.registry.apply_hooks()  # as SGLang does when all plugins were called
        return server

    return make
