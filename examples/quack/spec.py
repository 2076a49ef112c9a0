"""quack's RMSNorm and cross-entropy, which this project did not write: `aot build --spec examples/quack/spec.py`.

Written for quack-kernels 0.6.5, whose import needs triton, which CUDA builds of torch bring. Each kernel is made for
one number of columns and serves any number of rows.
"""

from __future__ import annotations

from typing import Any

from aot.spec import Constant, Function, Scalar, Stream, Tensor

COLUMNS = (4096, 8192)
CLASSES = (32_000, 128_256)
TARGETS = ("sm_90a", "sm_100a", "sm_120a")


def rmsnorm(columns: int) -> Function:
    """y = x / sqrt(mean(x^2) + eps) * weight over rows of bf16."""

    def make() -> Any:
        import cutlass
        from quack.rmsnorm import RMSNorm

        return RMSNorm(cutlass.BFloat16, columns)

    def reference(x: Any, weight: Any, eps: float) -> Any:
        wide = x.double()
        return wide * (wide.square().mean(1, keepdim=True) + eps).rsqrt() * weight.double()

    return Function(
        name=f"quack.rmsnorm.bf16.n{columns}",
        source="quack.rmsnorm:RMSNorm",
        make=make,
        arguments=[
            Tensor("x", "bf16", ("m", columns), alignment=16),
            Tensor("weight", "bf16", (columns,), alignment=16),
            *(Constant(name, None) for name in ("bias", "residual")),
            Tensor("y", "bf16", ("m", columns), alignment=16, role="out"),
            *(Constant(name, None) for name in ("residual_out", "rstd", "mean")),
            Scalar("eps", "f32", value=1e-5),
            Stream(),
        ],
        targets=TARGETS,
        reference=reference,
    )


def cross_entropy(classes: int) -> Function:
    """loss = log(sum(exp(logits))) - logits[target] of each row, 0 where the target is `ignored`."""

    def make() -> Any:
        import cutlass
        from quack.cross_entropy import CrossEntropy

        return CrossEntropy(cutlass.BFloat16, classes)

    def reference(logits: Any, target: Any, ignored: int) -> Any:
        import torch

        wide = logits.double()
        loss = torch.nn.functional.cross_entropy(wide, target, reduction="none", ignore_index=int(ignored))
        return loss, wide.logsumexp(1)

    return Function(
        name=f"quack.cross_entropy.bf16.n{classes}",
        source="quack.cross_entropy:CrossEntropy",
        make=make,
        arguments=[
            Tensor("logits", "bf16", ("m", classes), alignment=16),
            Tensor("target", "i64", ("m",), values=(0, classes)),
            Constant("target_logit", None),
            Tensor("loss", "f32", ("m",), role="out"),
            Tensor("lse", "f32", ("m",), role="out"),
            *(Constant(name, None) for name in ("dlogits", "weight")),
            Scalar("ignored", "i32", value=7),
            Stream(),
        ],
        targets=TARGETS,
        reference=reference,
    )


functions = [*map(rmsnorm, COLUMNS), *map(cross_entropy, CLASSES)]
