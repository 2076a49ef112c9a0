"""What tests with the real torch on the CPU share: a library that computes with torch, tensors, layers and a model.

The library is a real one, with a gemm table, on a driver that only records; its `gemm` computes with torch in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runtime import DeviceError, Library
from runtime.container.archive import Archive
from runtime.gemm.fallback import apply_activation
from runtime.numbers.epilogue import Epilogue
from runtime.serve.options import Options

from .recording_driver import RecordingDriver, entry, operands_record, signature, write_archive

HIDDEN, INNER, HEADS, HEAD, KV, VOCAB = 64, 96, 4, 16, 32, 160
TOLERANCE = 2e-2  # of bf16 models' outputs, against the largest: a few roundings

ONE = signature(HIDDEN, HIDDEN)
PLAIN = [
    ONE,
    signature(KV, HIDDEN),
    signature(INNER, HIDDEN),
    signature(HIDDEN, INNER),
    signature(VOCAB, HIDDEN),
    signature(HIDDEN, HIDDEN, epilogue="bias"),
    signature(HIDDEN, HIDDEN, b_major="n"),
    signature(HIDDEN, HIDDEN, batch=3),
]
GATED = signature(2 * INNER, HIDDEN, epilogue="swiglu")
QKV = signature(HIDDEN + 2 * KV, HIDDEN)


class OnCpu(Library):
    """Computes in float32 what the archive would, and records what was asked."""

    @property
    def device(self) -> str:
        return "cpu"

    def __enter__(self) -> OnCpu:
        return self

    @property
    def calls(self) -> list[tuple[int, int, str]]:
        return vars(self).setdefault("_calls", [])

    @property
    def overlaps(self) -> list[str]:
        """What was promised, call by call."""
        return vars(self).setdefault("_overlaps", [])

    def gemm(self, a: Any, b: Any, *, out: Any = None, stream: Any = None, **more: Any) -> Any:
        self._refuse_if_closed()
        epilogue, dtype = more.get("epilogue", "none"), more.get("dtype") or a.dtype
        self.calls.append((b.shape[-2], b.shape[-1], ("bias+" if more.get("bias") is not None else "") + epilogue))
        self.overlaps.append(more.get("overlap", "serial"))
        value = a.float() @ b.float().transpose(-1, -2)
        if more.get("bias") is not None:
            value = value + more["bias"].float()
        value = apply_activation(torch, Epilogue.of(epilogue), value)
        if more.get("residual") is not None:
            value = value + more["residual"].float()
        if out is None:
            return value.to(dtype)
        return out.copy_(value)


def library(
    folder: Path,
    signatures: list[dict[str, Any]],
    state: str = "tuned",
    *,
    apart: Any = (),
    tuned_to: int | None = None,
    **options: Any,
) -> OnCpu:
    """`apart` is of all entries with a gate."""
    records = [operands_record(f"f{i}", s) for i, s in enumerate(signatures)]
    gated = [apart if s["epilogue"] == "swiglu" else () for s in signatures]
    entries = [
        entry(s, [(None, f"f{i}")], state=state, apart=gated[i], tuned_to=tuned_to) for i, s in enumerate(signatures)
    ]
    kernels = write_archive(folder / "model.aot", records, entries)
    return OnCpu(Archive.open(folder / "model.aot"), RecordingDriver(kernels=kernels), Options(**options))


class Graphs(list[Any]):
    """A backend for torch.compile that runs graphs as they are, and keeps them."""

    def __call__(self, graph: Any, _inputs: Any) -> Any:
        self.append(graph)
        return graph.forward

    def called(self) -> list[str]:
        """The functions that the only one calls."""
        (graph,) = self
        return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def tensors(*shapes: tuple[int, ...]) -> list[Any]:
    return [torch.randn(shape).bfloat16() for shape in shapes]


def near(found: Any, wanted: Any) -> bool:
    found, wanted = found.float(), wanted.float()
    return found.shape == wanted.shape and bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


def linear(n: int = HIDDEN, k: int = HIDDEN, **more: Any) -> Any:
    return nn.Linear(k, n, **({"bias": False, "dtype": torch.bfloat16} | more)).eval()


# --- a model as Hugging Face writes it (modeling_llama), without what does not matter here ---


class Attention(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD, bias=bias)
        self.k_proj = nn.Linear(HIDDEN, KV, bias=bias)
        self.v_proj = nn.Linear(HIDDEN, KV, bias=bias)
        self.o_proj = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)

    def forward(self, hidden_states: Any, states_of_keys: Any = None) -> Any:
        shape = (*hidden_states.shape[:-1], -1, HEAD)
        others = hidden_states if states_of_keys is None else states_of_keys
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(others).view(shape).transpose(1, 2)
        value = self.v_proj(others).view(shape).transpose(1, 2)
        key, value = (x.repeat_interleave(HEADS * HEAD // KV, dim=1) for x in (key, value))
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(found.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1).contiguous())


class MLP(nn.Module):
    def __init__(self, act_fn: Any = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)
        self.act_fn = act_fn or nn.SiLU()

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OtherMLP(MLP):
    """Has the names and computes something else."""

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Block(nn.Module):
    def __init__(self, mlp: type[MLP] = MLP) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), mlp()

    def forward(self, x: Any) -> Any:
        x = x + self.self_attn(x)
        return x + self.mlp(x)


class Llama(nn.Module):
    def __init__(self, layers: int = 2, mlp: type[MLP] = MLP) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(mlp) for _ in range(layers))
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def llama(**more: Any) -> Llama:
    return Llama(**more).bfloat16().eval()


def tokens(rows: int = 2, columns: int = 5) -> Any:
    return torch.randint(0, VOCAB, (rows, columns))


@pytest.fixture
def lib(tmp_path: Path) -> Iterator[OnCpu]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with library(tmp_path, [*PLAIN, GATED, QKV]) as lib:
        yield lib


def device_is_gone(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """From now on this attribute of a library raises, as it does without a device; `entry` as a mistake would."""

    def fail(*_: Any, **__: Any) -> Any:
        raise (ValueError if what == "entry" else DeviceError)("the device\nis gone")

    monkeypatch.setattr(OnCpu, what, property(fail) if what == "device" else fail)


def key(n: int, k: int, epilogue: str = "none") -> str:
    """That of a signature in bf16."""
    return f"bf16_bf16_bf16_f32_{epilogue}_n{n}_k{k}"


def logged(log: pytest.LogCaptureFixture, name: str) -> list[str]:
    """What a plugin logged under this name, apart from details for debugging."""
    return [record.getMessage() for record in log.records if record.name == name and record.levelno > logging.DEBUG]
