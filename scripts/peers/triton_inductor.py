"""Triton through torch.compile: Inductor's max-autotune with Triton as its only GEMM backend, for each shape apart.

Inductor searches by its own measurement, and what it then runs is the one candidate. It allocates the output. SwiGLU is
left to Inductor, which may fuse it or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor import select_algorithm

from aot.tune.elements import TORCH_DTYPES
from aot.tune.gemm.operands import OperandSet
from aot.tune.measure import Launch
from runtime.gemm.signature import Signature

from .base import Allocating, Problem, Settings

_OPTIONS = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "TRITON",
    "triton.cudagraphs": False,
    "triton.enable_persistent_tma_matmul": True,
}


class TritonInductor:
    """The peer; see `base.Peer`."""

    name = "triton"
    search = "Inductor's own autotuning, max-autotune-no-cudagraphs with TRITON alone and TMA templates on"

    def __init__(self, settings: Settings) -> None:
        inductor_config.compile_threads = settings.workers
        select_algorithm.PRINT_AUTOTUNE = False

    def versions(self) -> dict[str, str]:
        """The versions of its packages."""
        return {"torch": torch.__version__, "triton": triton.__version__}

    def refuse(self, signature: Signature) -> str | None:
        """Why it cannot compute `signature`; None if it can."""
        if (signature.scaling, signature.epilogue) not in (
            ("none", "none"),
            ("row_column", "none"),
            ("none", "swiglu"),
        ):
            return f"not written here for {signature.epilogue} with {signature.scaling} scales"
        return None

    def prepare(self, problems: Sequence[Problem], expired: Callable[[], bool]) -> None:
        """Nothing: it compiles for one shape, in worker processes, when that is launched."""

    def launches(self, signature: Signature, m: int) -> Mapping[str, Launch]:
        """One candidate, compiled and tuned when it is first launched."""
        torch._dynamo.reset()
        out = TORCH_DTYPES[signature.d]

        def plain(a: Tensor, b: Tensor) -> Tensor:
            return torch.mm(a, b.t())

        def row_column(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
            return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=out, use_fast_accum=False)

        def swiglu(a: Tensor, b: Tensor) -> Tensor:
            gate, up = torch.mm(a, b.t()).chunk(2, dim=-1)
            return F.silu(gate) * up

        if signature.scaling == "row_column":
            scaled = torch.compile(row_column, dynamic=False, options=_OPTIONS)

            def compute(o: OperandSet) -> Tensor:
                return scaled(o.a, o.b, o.extras["scale_a"].view(-1, 1), o.extras["scale_b"].view(1, -1))

        else:
            dense = torch.compile(swiglu if signature.parts.gated else plain, dynamic=False, options=_OPTIONS)

            def compute(o: OperandSet) -> Tensor:
                return dense(o.a, o.b)

        return {"max-autotune": Allocating(compute, {})}
