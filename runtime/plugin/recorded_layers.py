"""Which of a model's layers each step runs, and the signatures that a record has of them.

Knows layers of vLLM and SGLang by the attributes and classes that both have, and no module of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..errors import ArgumentError
from ..gemm.signature import Signature
from ..numbers.epilogue import Epilogue
from .activations import EPILOGUE as SWIGLU
from .activations import Mlp
from .linears import is_called_with_bias, is_embedding, signature_of


def layers_of(model: Any, gated: Iterable[Mlp]) -> Iterator[tuple[Any, Epilogue]]:
    """The layers of a model, but for embeddings and heads, with what comes after the sum: `gated` has the MLPs whose
    activations a GEMM may compute."""
    gates = {id(mlp.gate_up) for mlp in gated}
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and not (is_embedding(layer) or "BaseKVCacheMethod" in _classes(method)):
            bias = is_called_with_bias(layer)
            yield layer, Epilogue(SWIGLU if id(layer) in gates and not bias else "none", bias=bias)


def unquantised(layer: Any, epilogue: Epilogue) -> Signature:
    """What a plugin would ask an archive for, of a layer or head whose weight has 16 bits.

    Raises:
        ArgumentError: it is none: it is no GEMM, or quantised.
    """
    method = layer.quant_method
    computes = next((base.__name__ for base in type(method).__mro__ if "apply" in vars(base)), "")
    if computes not in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
        raise ArgumentError(f"{type(layer).__name__} computed by {type(method).__name__}")
    return product(layer, epilogue)


def product(layer: Any, epilogue: Epilogue) -> Signature:
    """The same, whoever computes it.

    Raises:
        ArgumentError: its weight is no matrix, or has a type that no kernel reads.
    """
    if getattr(layer.weight, "ndim", 0) != 2:
        raise ArgumentError(f"{type(layer).__name__} with a weight that is no matrix")
    return replace(signature_of(layer.weight, False), epilogue=epilogue.word())


def _classes(found: Any) -> set[str]:
    return {base.__name__ for base in type(found).__mro__}
