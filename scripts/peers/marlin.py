"""Marlin, as vLLM has it: bf16 by MXFP4 or symmetric int4, for Ampere and later; it picks its own kernel.

vLLM's own functions lay weights and scales out and launch it. Its layouts are made of ours where an operand set is
launched first, which no measurement contains.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from aot.tune import measure
from aot.tune.gemm.operands import OperandSet, Weights
from aot.tune.measure import Launch
from runtime.gemm.signature import Signature
from runtime.numbers.weights import BLOCK_COLUMNS, BLOCK_ROWS, FORMATS, LANES, WORDS, WeightFormat, codes_of, scales_of

from .base import Allocating, PeerError, PeerMissing, Problem, Settings, guarded, versions_of, written

_UTILS = "vllm.model_executor.layers.quantization.utils"
_EXTENSION = "vllm._C_stable_libtorch"
_CODES_OF_WORD, _BITS = 8, 4
_ELEMENTS = {"mxfp4_weight": "e2m1", "int4_weight": "u4"}
_TRIED = 256, 256, 8  # N, K and M of the products that say whether it runs at all


class Vllm(NamedTuple):
    """What of vLLM is called."""

    ops: Any  # vllm._custom_ops
    utils: Any  # ...marlin_utils
    fp4: Any  # ...marlin_utils_fp4
    types: Mapping[str, Any]  # by scaling, what its kernels call the type of weights


class Laid(NamedTuple):
    """A weight as Marlin reads it, (N, K) what it was filled up to with zeros."""

    weight: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int


class Marlin:
    """The peer; see `base.Peer`."""

    name = "marlin"
    search = "the kernel that marlin_gemm picks for the shape"

    def __init__(self, settings: Settings) -> None:
        self._vllm = import_vllm("_C", "marlin_gemm", _EXTENSION)
        n, k, m = _TRIED
        for scaling, b in _ELEMENTS.items():
            s = Signature("bf16", b, "bf16", "f32", "none", n, k, scaling=scaling)
            (launch,) = self.launches(s, m).values()
            must_be_right(Weights, s, m, launch, settings.device)

    def versions(self) -> dict[str, str]:
        """The versions of its packages."""
        return versions_of("vllm")

    def refuse(self, signature: Signature) -> str | None:
        """Why it cannot compute `signature`; None if it can."""
        return refusal(signature)

    def prepare(self, problems: Sequence[Problem], expired: Callable[[], bool]) -> None:
        """Nothing: its kernels are compiled."""

    def launches(self, signature: Signature, m: int) -> Mapping[str, Launch]:
        """One candidate. Launch it on every operand set before it is captured: the first launch lays out weights."""
        product = _Product(self._vllm, FORMATS[signature.scaling], signature.n, signature.k)
        return {"marlin_gemm": Allocating(product, {})}


@dataclass(frozen=True)
class _Product:
    """A (M, K) by a weight (N, K)."""

    vllm: Vllm
    form: WeightFormat
    n: int
    k: int
    laid: dict[int, tuple[torch.Tensor, Laid, dict[str, torch.Tensor]]] = field(default_factory=dict)

    def __call__(self, o: OperandSet) -> torch.Tensor:
        """The product, in memory of its own."""
        kept = self.laid.get(o.b.data_ptr())
        if kept is None or kept[0] is not o.b:
            kept = self.laid[o.b.data_ptr()] = self._made(o)
        _, (weight, scales, *_), more = kept
        given = {"input": o.a, "weight": weight, "weight_scale": scales, **more}
        found: torch.Tensor
        if self.form.word == "mxfp4_weight":
            found = self.vllm.fp4.apply_fp4_marlin_linear(
                **given, weight_global_scale=None, size_n=self.n, size_k=self.k
            )
        else:
            found = self.vllm.utils.apply_gptq_marlin_linear(
                **given,
                wtype=self.vllm.types[self.form.word],
                output_size_per_partition=self.n,
                input_size_per_partition=self.k,
                is_k_full=True,
            )
        return found

    def _made(self, o: OperandSet) -> tuple[torch.Tensor, Laid, dict[str, torch.Tensor]]:
        """B, which keeps its address its own; what is made of it; and what calls want beside."""
        must_not_capture()
        utils, device = self.vllm.utils, o.b.device
        more = {"workspace": utils.marlin_make_workspace_new(device)}
        if self.form.word != "mxfp4_weight":
            none = utils.marlin_make_empty_g_idx(device)
            more |= {"weight_zp": none, "g_idx": none, "g_idx_sort_indices": none}
        return o.b, lay_out(self.vllm, self.form, o.b, o.extras["scale_b"]), more


def refusal(signature: Any) -> str | None:
    """Why no GEMM of Marlin's computes a signature, dense or grouped; None if one does."""
    if signature.scaling not in FORMATS or FORMATS[signature.scaling].zeros:
        return "it is compared for weights of 4 bits without zero points alone"
    if (signature.a, signature.d, signature.epilogue) != ("bf16", "bf16", "none"):
        return "it is compared for bf16 with no epilogue alone"
    return None


def checkpoint_of(form: WeightFormat, b: torch.Tensor, scale_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `runtime.torch.prepare_weight` was given for B and its scales: int32 (K / 8, N) of eight codes each, the
    first along K in the low bits; and scales (K / group, N), bytes of ue8m0 or bf16."""
    n, k = b.shape[0], 2 * b.shape[1]
    words = b.view(torch.uint8).reshape(-1).view(torch.int32)
    codes = codes_of(words.reshape(k // BLOCK_COLUMNS, n // BLOCK_ROWS, LANES, WORDS), form)
    eights = codes.reshape(n, k // _CODES_OF_WORD, _CODES_OF_WORD)
    packed = torch.zeros_like(eights[..., 0])
    for place in range(_CODES_OF_WORD):
        packed |= eights[..., place] << (_BITS * place)
    if form.word == "mxfp4_weight":
        scales = scales_of(scale_b.view(torch.uint8), form) - form.scale_exponent
    else:
        scales = scales_of(scale_b, form) * 2.0**-form.scale_exponent
    return packed.t().contiguous(), scales.t().contiguous()


def lay_out(vllm: Vllm, form: WeightFormat, b: torch.Tensor, scale_b: torch.Tensor) -> Laid:
    """A weight by vLLM's functions."""
    packed, scales = checkpoint_of(form, b, scale_b)
    (k, n), utils = (packed.shape[0] * _CODES_OF_WORD, packed.shape[1]), vllm.utils
    filled_n, filled_k = utils.marlin_padded_nk(n, k, form.group)
    sizes = {"size_n": n, "size_k": k, "padded_n": filled_n, "padded_k": filled_k}
    filled = {"size_n": filled_n, "size_k": filled_k}
    weight = vllm.ops.gptq_marlin_repack(
        utils.marlin_pad_qweight(packed, **sizes), perm=packed.new_empty(0), num_bits=_BITS, **filled
    )
    if form.word == "mxfp4_weight":
        scales = scales.view(torch.float8_e8m0fnu).to(torch.bfloat16)
    scales = utils.marlin_pad_scales(scales, **sizes, group_size=form.group)
    scales = utils.marlin_permute_scales(s=scales, group_size=form.group, **filled)
    if form.word == "mxfp4_weight":
        scales = vllm.fp4.mxfp4_marlin_process_scales(scales)
    return Laid(weight, scales, filled_n, filled_k)


def must_not_capture() -> None:
    """Laying out, captured into a graph, would be timed with the launch.

    Raises:
        PeerError: the current stream captures.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise PeerError("Marlin lays weights out at the first launch, which must come before a capture")


def must_be_right(weights: Callable[..., Any], signature: Any, m: int, launch: Launch, device: str) -> None:
    """Launch once, so that an extension with no kernel for this GPU is known before anything is timed.

    Raises:
        PeerMissing: it cannot be launched, or is wrong.
    """
    try:
        found = measure.check(signature, m, weights(signature, m, 0, 0, device), {"marlin": guarded(written(launch))})[
            "marlin"
        ]
    except RuntimeError as error:  # of the device; the caller ends here
        found = str(error).splitlines()[0]
    if isinstance(found, str):
        raise PeerMissing(f"Marlin of vLLM does not run here ({signature.key()}, M = {m}): {found}")


def import_vllm(namespace: str, operator: str, extension: str) -> Vllm:
    """vLLM's functions, if its `extension` has registered `operator`.

    Raises:
        ImportError: a package or the extension is missing or cannot be loaded.
    """
    importlib.import_module(extension)  # which vLLM itself would go on without
    ops = importlib.import_module("vllm._custom_ops")
    if not hasattr(getattr(torch.ops, namespace), operator):
        raise ImportError(f"{extension} registers no {operator}")
    types = importlib.import_module("vllm.scalar_type").scalar_types
    return Vllm(
        ops,
        importlib.import_module(f"{_UTILS}.marlin_utils"),
        importlib.import_module(f"{_UTILS}.marlin_utils_fp4"),
        {"mxfp4_weight": types.float4_e2m1f, "int4_weight": types.uint4b8},
    )
