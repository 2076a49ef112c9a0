"""Plain GEMMs of the Operator API with an epilogue of ours, written in its language of epilogues (EFC).

The package offers this kernel with epilogues that it traces, in the element type of D. Here the epilogue is a function
of the same language over f32, in the order of `runtime.numbers.epilogue.Epilogue`: what is added or multiplied comes by
TMA, vectors with a stride of 0 along the axis that they do not have, so rows and columns past the edge of D read zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from runtime.numbers.epilogue import Epilogue
from runtime.program.arguments import Argument, DeviceArgument, StreamArgument, TensorArgument

from ...search.provider import Buildable
from ...search.variants import Variant
from ..arguments import ALIGNMENT_BYTES, stand_ins
from ..gemm_arguments import gemm_tensors
from . import dense
from .operator import Design, design_of, find

# The operator class, and whether its kernel stores D with TMA.
OPERATORS = {"sm100_static_persistent_efc": ("PersistentDenseGemmEFCOperator", True)}

_SQRT_HALF = 0.7071067811865476
_TWO_SQRT_2_OVER_PI = 1.5957691216057308
_GELU_CUBE = 0.044715  # of the tanh form: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016


def build(variant: Variant) -> Buildable:
    """Prepare `variant`; see `CutlassOperators.build`."""
    import torch

    operator = find(variant, dense.arguments(torch, variant), design(variant))
    return _wrap(variant, operator.impl)


def design(variant: Variant) -> Design:
    """The operator that `variant` describes."""
    return design_of(variant, *OPERATORS[variant.family])


def _wrap(variant: Variant, offered: Any) -> Buildable:
    """A host function over all tensors of the GEMM, the device's cluster count and a stream, calling a kernel like the
    one that is `offered` but for its epilogue."""
    import cutlass
    from cutlass import cute

    symbols, operands = gemm_tensors(variant)
    tensors = [_for_tma(a) for a in operands if isinstance(a, TensorArgument)]
    outputs = tensors[2:]  # D, and what follows it
    kernel = type(offered)(
        offered.acc_dtype,
        cutlass.Float32,
        offered.use_2cta_instrs,
        offered.mma_tiler_mn,
        offered.cluster_shape_mn,
        epilogue_of(Epilogue.of(variant.epilogue), outputs),
    )
    kernel.efc.compile(*stand_ins(outputs, symbols))
    cluster_m, cluster_n = offered.cluster_shape_mn
    clusters = DeviceArgument("max_active_clusters", "max_active_clusters", cluster_m * cluster_n)
    tree: list[Argument] = [*tensors, clusters, StreamArgument("stream")]

    @cute.jit
    def gemm(a: Any, b: Any, *rest: Any) -> None:
        *epilogue_tensors, count, stream = rest
        b_as_k_by_n = cute.make_tensor(b.iterator, cute.select(b.layout, [1, 0]))
        kernel(a, b_as_k_by_n, count, stream, *epilogue_tensors)

    return Buildable(gemm, stand_ins(tree, symbols), tree, symbols)


def _for_tma(tensor: TensorArgument) -> TensorArgument:
    """With the alignment that TMA needs; single numbers are read by themselves."""
    return tensor if tensor.shape == (1,) else tensor._replace(alignment=max(tensor.alignment, ALIGNMENT_BYTES))


def epilogue_of(parts: Epilogue, tensors: Sequence[TensorArgument]) -> Callable[..., None]:
    """The epilogue as a function of the package's language over these tensors: D, and what goes into it."""
    from cutlass.operators.providers.cutedsl.evt import efc

    def epilogue(config: Any, d: Any, *others: Any) -> None:
        loaded = {of.name: _load(of, x) for of, x in zip(tensors[1:], others, strict=True)}
        y = config.accum()
        for scale in ("scale_a", "scale_b"):
            y = y * loaded[scale] if scale in loaded else y
        y = y + loaded["bias"] if parts.bias else y
        y = _activate(config, parts.activation, y)
        y = y + loaded["residual"] if parts.residual else y
        d.store(y * loaded["scale_d"] if parts.scale else y)

    found: Callable[..., None] = efc.create_named_epilogue(["efc_config", *(a.name for a in tensors)], epilogue)
    return found


def _load(of: TensorArgument, x: Any) -> Any:
    """What a tensor has for each element of D: a matrix its own, a vector along M or N, or a single number, the same
    along all else."""
    if len(of.shape) == 2:
        return x.load()
    every = slice(None)
    modes = {"m": (0, every, every), "n": (every, 0, every), 1: (every, every, every)}[of.shape[0]]
    return x.remap_modes[modes].load()


def _activate(config: Any, name: str, x: Any) -> Any:
    """The activation `name`, one of `runtime.numbers.epilogue.ACTIVATIONS`, of f32 numbers."""
    if name == "relu":
        return config.where(x < 0.0, config.full_like(x, 0.0), x)  # what is no number stays none
    if name == "silu":
        return x * _sigmoid(config, x)
    if name == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        return x * _sigmoid(config, _TWO_SQRT_2_OVER_PI * (x + _GELU_CUBE * x * x * x))
    if name == "gelu":
        return 0.5 * x * (1.0 + config.erf(x * _SQRT_HALF))
    return x


def _sigmoid(config: Any, x: Any) -> Any:
    return 1.0 / (1.0 + config.exp(-x, fastmath=True))
