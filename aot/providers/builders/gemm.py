"""GEMMs: of few tokens and persistent ones on Hopper, and of 4-bit weights there and on other GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runtime.numbers.dtypes import DTYPES
from runtime.program.arguments import DeviceArgument, StreamArgument, WorkspaceArgument

from ...kernels.sm90.persistent.form import Form as PersistentForm
from ...kernels.sm90.persistent.plan import Plan
from ...kernels.sm90.small_m.form import Form as SmallMForm
from ...kernels.w4.form import Form as W4Form
from ...search.provider import Buildable
from ...search.variants import Variant
from ..arguments import stand_ins_by_name
from ..gemm_arguments import gemm_tensors

# In the order that kernels take them.
_ARGUMENTS = (
    *("a", "b", "d", "scale_a", "scale_b", "bias", "residual", "scale_d"),
    *("partials", "counters", "max_active_clusters", "stream"),
)


def small_m_form(variant: Variant) -> SmallMForm:
    """What of a variant, besides its choices, the few-token GEMM depends on."""
    return SmallMForm(DTYPES[variant.b].bytes, variant.scaling, variant.b_major, variant.epilogue, variant.batched)


def w4_form(v: Variant) -> W4Form:
    """What of a variant, besides its choices, the GEMM of 4-bit weights depends on."""
    return W4Form(v.scaling, v.epilogue)


def persistent_form(v: Variant) -> PersistentForm:
    """What of a variant, besides its choices, the persistent GEMM depends on."""
    return PersistentForm(v.a, v.d, v.scaling, v.epilogue, v.b_major)


def small_m(variant: Variant) -> Buildable:
    """A GEMM for few tokens, over the tensors of its form and a stream."""
    from ...kernels.sm90.small_m.kernel import SmallM

    symbols, tree = gemm_tensors(variant)
    tree.append(StreamArgument("stream"))
    arguments = stand_ins_by_name(tree, symbols, _ARGUMENTS)
    for persistent in ("max_active_clusters", "counters", "partials"):
        del arguments[_ARGUMENTS.index(persistent)]
    return Buildable(SmallM(variant.options, small_m_form(variant)), arguments, tree, symbols)


def w4(variant: Variant) -> Buildable:
    """A GEMM of 4-bit weights by WGMMA, over the tensors of its form and a stream."""
    from ...kernels.sm90.w4.kernel import W4

    return _of_weights(W4, variant)


def sm80_w4(variant: Variant) -> Buildable:
    """The same by mma.sync."""
    from ...kernels.sm80.w4.kernel import W4

    return _of_weights(W4, variant)


def _of_weights(kernel: Callable[[Mapping[str, Any], W4Form], Any], variant: Variant) -> Buildable:
    symbols, tree = gemm_tensors(variant)
    tree.append(StreamArgument("stream"))
    names = ("a", "b", "d", "scale_b", "bias", "residual", "scale_d", "stream")
    arguments = stand_ins_by_name(tree, symbols, names)
    return Buildable(kernel(variant.options, w4_form(variant)), arguments, tree, symbols)


def persistent(variant: Variant) -> Buildable:
    """A GEMM over all operands that its form has, the number of clusters that the device holds, and a stream."""
    from ...kernels.sm90.persistent.kernel import Persistent

    plan = Plan.of(variant.options, persistent_form(variant))
    symbols, tree = gemm_tensors(variant, plan.n_multiple)
    clusters = DeviceArgument("max_active_clusters", "max_active_clusters", plan.cluster)
    if plan.stream_k:
        tree.append(WorkspaceArgument("partials", plan.partials_bytes, each=clusters.name, zeroed=False))
        tree.append(WorkspaceArgument("counters", plan.counters_bytes, each=clusters.name, zeroed=True))
    tree += [clusters, StreamArgument("stream")]
    return Buildable(Persistent(plan), stand_ins_by_name(tree, symbols, _ARGUMENTS), tree, symbols)
