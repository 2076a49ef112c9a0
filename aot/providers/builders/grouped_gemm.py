"""Grouped GEMMs on Hopper: of rows that lie by groups, of masked ones, of rows that are gathered, and of 4-bit
weights; the last on other GPUs too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from runtime.numbers.weights import BLOCK_ROWS
from runtime.program.arguments import DeviceArgument, StreamArgument

from ...kernels.group_sizes import GROUPS_BYTES
from ...kernels.sm80.grouped_w4.plan import Plan as Sm80W4Plan
from ...kernels.sm90.grouped.plan import plan_of
from ...kernels.sm90.grouped_w4.plan import Plan as W4Plan
from ...kernels.sm90.persistent.form import Form
from ...kernels.sm90.persistent.plan import Plan
from ...kernels.w4.form import Form as W4Form
from ...search.provider import Buildable
from ...search.variants import Variant
from ..arguments import stand_ins_by_name
from ..grouped_arguments import grouped_tensors

ROWS = {"sm90_grouped": "contiguous", "sm90_masked": "masked", "sm90_gathered": "gathered"}  # by family
# In the order that kernels take them.
_ARGUMENTS = (
    "a",
    "b",
    "indices",
    "ends",
    "d",
    "scale_a",
    "scale_b",
    "bias",
    "scale_d",
    "max_active_clusters",
    "stream",
)


def grouped_form(v: Variant) -> Form:
    """What of a variant, besides its choices, the grouped GEMM depends on."""
    rows = ROWS[v.family]
    words = v.a, v.d, v.scaling, v.epilogue
    return Form(*words, scheduler_bytes=GROUPS_BYTES, masked=rows == "masked", gathered=rows == "gathered")


@functools.cache  # tuning asks for estimates at thousands of M
def grouped_plan(v: Variant) -> Plan:
    """What follows from a variant's choices and its form."""
    return plan_of(v.options, grouped_form(v))


def grouped_w4_form(v: Variant) -> W4Form:
    """What of a variant, besides its choices, the grouped GEMM of 4-bit weights depends on."""
    return W4Form(v.scaling, v.epilogue)


@functools.cache
def grouped_w4_plan(v: Variant) -> W4Plan:
    """What follows from such a variant's choices and its form."""
    return W4Plan.of(v.options, grouped_w4_form(v))


@functools.cache
def sm80_grouped_w4_plan(v: Variant) -> Sm80W4Plan:
    """The same of one by mma.sync."""
    return Sm80W4Plan.of(v.options, grouped_w4_form(v))


def grouped_w4(variant: Variant) -> Buildable:
    """A grouped GEMM of 4-bit weights by WGMMA, over the operands that its form has, the number of CTAs that the device
    holds, and a stream."""
    from ...kernels.sm90.grouped_w4.kernel import GroupedW4

    return _of_weights(GroupedW4, variant)


def sm80_grouped_w4(variant: Variant) -> Buildable:
    """The same by mma.sync."""
    from ...kernels.sm80.grouped_w4.kernel import GroupedW4

    return _of_weights(GroupedW4, variant)


def _of_weights(kernel: Callable[[Mapping[str, Any], W4Form], Any], variant: Variant) -> Buildable:
    form = grouped_w4_form(variant)
    n_multiple = 2 * BLOCK_ROWS if form.halves else 1
    symbols, tree = grouped_tensors(variant, n_multiple=n_multiple)
    tree += [DeviceArgument("max_active_clusters", "max_active_clusters", 1), StreamArgument("stream")]
    names = ("a", "b", "ends", "d", "scale_b", "bias", "max_active_clusters", "stream")
    return Buildable(kernel(variant.options, form), stand_ins_by_name(tree, symbols, names), tree, symbols)


def grouped(variant: Variant) -> Buildable:
    """A grouped GEMM over the operands that its form has, the number of clusters that the device holds, and a
    stream."""
    from ...kernels.sm90.grouped.kernel import Grouped

    plan = grouped_plan(variant)
    symbols, tree = grouped_tensors(variant, ROWS[variant.family], plan.n_multiple)
    tree += [DeviceArgument("max_active_clusters", "max_active_clusters", plan.cluster), StreamArgument("stream")]
    names = tuple("counts" if name == "ends" and plan.form.masked else name for name in _ARGUMENTS)
    kernel = Grouped(variant.options, grouped_form(variant))
    return Buildable(kernel, stand_ins_by_name(tree, symbols, names), tree, symbols)
