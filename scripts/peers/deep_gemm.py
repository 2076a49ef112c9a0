"""DeepGEMM: block-scaled e4m3 on Hopper, compiled for each shape when it is first launched; it picks its own kernel.

It comes with vLLM's wheel, or as a package of its own. It compiles with the CUDA toolkit's nvcc, into a cache.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aot.tune.gemm.operands import OperandSet
from aot.tune.measure import Launch
from runtime.gemm.signature import Signature

from .base import Problem, Settings, versions_of

_MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")  # a package of its own is likely the newer


class DeepGemm:
    """The peer; see `base.Peer`."""

    name = "deep_gemm"
    search = "the kernel that fp8_gemm_nt picks for the shape"

    def __init__(self, settings: Settings) -> None:
        # Read when it is imported; what the caller has set stays.
        os.environ.setdefault("DG_JIT_CACHE_DIR", str(settings.cache / self.name))
        self._gemm: Callable[..., Any] = import_module().fp8_gemm_nt

    def versions(self) -> dict[str, str]:
        """The versions of its packages."""
        return versions_of("deep_gemm", "vllm")

    def refuse(self, signature: Signature) -> str | None:
        """Why it cannot compute `signature`; None if it can."""
        if signature.scaling != "block":
            return "its GEMMs of e4m3 take scales of blocks"
        if (signature.d, signature.epilogue) != ("bf16", "none"):
            return "its GEMMs of e4m3 write bf16 and fuse nothing"
        return None

    def prepare(self, problems: Sequence[Problem], expired: Callable[[], bool]) -> None:
        """Nothing: it compiles for a shape when that is launched."""

    def launches(self, signature: Signature, m: int) -> Mapping[str, Launch]:
        """One candidate. Launch it on every operand set before it is captured: the first launch lays out scales.

        On Hopper it takes scales of A as they are, each column of them padded to four rows, and those of B without
        padding. Those are weights, laid out once where a model is loaded, so that this is not part of a launch.
        """
        laid_out: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # with the tensor, so that its address stays its own

        def launch(o: OperandSet) -> None:
            scale_b = o.extras["scale_b"]
            if scale_b.data_ptr() not in laid_out:
                laid_out[scale_b.data_ptr()] = scale_b, scale_b.contiguous()
            dense = laid_out[scale_b.data_ptr()][1]
            self._gemm((o.a, o.extras["scale_a"]), (o.b, dense), o.d, disable_ue8m0_cast=True)

        return {"fp8_gemm_nt": launch}


def import_module() -> Any:
    """The module, wherever it is.

    Raises:
        ImportError: it is in none of the places.
    """
    reasons = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    raise ImportError("; ".join(reasons))
