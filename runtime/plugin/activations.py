"""SwiGLU in a server's model, computed where its gates are: which MLPs have it, and how one is left to the GEMM.

An MLP qualifies if its forward uses `gate_up_proj`, `act_fn` and `down_proj`, in this order, and nothing else of it,
and its activation is the server's `SiluAndMul`. That is then replaced by a module that does nothing, and `gate_up_proj`
gives what `down_proj` takes. Knows what MLPs look like, and nothing of archives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

EPILOGUE = "swiglu"  # silu(gate) * up, gates in the first half of N, as servers stack them
_USED = ("gate_up_proj", "act_fn", "down_proj")


class Mlp(NamedTuple):
    """An MLP whose activation its first GEMM may compute."""

    module: Any
    activation: Any

    @property
    def gate_up(self) -> Any:
        """The layer of gates and what they gate, one weight."""
        return self.module.gate_up_proj

    @property
    def kernel(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The activation as the server computes it outside compiled graphs, in one kernel where it has one."""
        found: Callable[[torch.Tensor], torch.Tensor] = getattr(self.activation, "forward_cuda", self.activation)
        return found

    def leave_to_gemm(self) -> None:
        """Let `gate_up` give the activation's result."""
        self.module.act_fn = nn.Identity()

    def restore(self) -> None:
        """Let the module compute it again."""
        self.module.act_fn = self.activation


class Fused(NamedTuple):
    """An MLP whose activation its first GEMM computes, which this does not keep alive."""

    module: weakref.ref[Any]
    activation: Any

    @classmethod
    def of(cls, mlp: Mlp) -> Fused:
        """What is known of `mlp`."""
        return cls(weakref.ref(mlp.module), mlp.activation)

    def mlp(self) -> Mlp | None:
        """It, if it is still there."""
        module = self.module()
        return None if module is None else Mlp(module, self.activation)


def mlps(model: Any, silu_and_mul: type, besides: frozenset[str] = frozenset()) -> Iterator[Mlp]:
    """Those of a model that qualify, where `silu_and_mul` is the server's class of that activation, and `besides` are
    names that a forward may use before all others without changing what it computes."""
    for module in model.modules():
        activation = getattr(module, "act_fn", None)
        if type(activation) is not silu_and_mul or not _uses_no_more(module, besides):
            continue
        gates = module.gate_up_proj
        if not (_is_watched(activation) or _is_watched(gates) or getattr(gates, "gather_output", False)):
            yield Mlp(module, activation)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """What the activation gives for x (..., 2 D): (..., D)."""
    gate, up = x.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def _uses_no_more(module: Any, besides: frozenset[str]) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    if "forward" in vars(module) or code is None:
        return False
    before, used = code.co_names[: -len(_USED)], code.co_names[-len(_USED) :]
    return used == _USED and besides.issuperset(before)


def _is_watched(module: Any) -> bool:
    """Whether hooks expect to see it run."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
