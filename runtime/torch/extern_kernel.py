"""`Library.gemm` as an external kernel of Inductor's, which its autotuning measures and its generated code calls.

Importing this imports Inductor, which takes seconds. All that is used of Inductor is in torch 2.9 to 2.13.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import config, ir
from torch._inductor.select_algorithm import (
    ExternKernelCaller,
    ExternKernelChoice,
    add_preprocessing_fn,
    get_algorithm_selector_cache,
)
from torch._inductor.utils import convert_shape_to_symint, convert_to_symint
from torch._inductor.virtualized import V

from ..errors import AotError
from ..gemm.signature import Signature
from .operator import bare, library_of
from .products import Operand

if TYPE_CHECKING:
    from .autotune import GemmChoices

MARK = "cute_aot_choices"  # the key of a node's meta where the `GemmChoices` is that may offer for it
# Generated code calls `extern_kernels.<name>`, in other processes too: the name must stay.
_NAME = "cute_aot_gemm"


def _gemm(*operands: torch.Tensor, library: int, overlap: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b, or bias + a @ b, written to `out`; operands are a and b, or bias, a and b, and b is (..., K, N)."""
    *bias, a, b = map(bare, operands)
    more: dict[str, Any] = {}
    if bias:  # (N,) or expanded to (M, N), depending on Inductor's release
        more["bias"] = bias[0] if bias[0].dim() == 1 else bias[0][0]
    d: torch.Tensor = library_of(library).gemm(a, b.transpose(-1, -2), out=out, overlap=overlap, **more)
    return d


class _Caller(ExternKernelCaller):
    """One choice for one product."""

    def __init__(self, choices: GemmChoices, key: str, *args: Any) -> None:
        super().__init__(*args)
        self._choices, self._key = choices, key

    def benchmark(self, *args: Any, out: Any) -> float:
        """The time of a launch in milliseconds; infinite where the library refuses, so that others are chosen."""
        try:
            return float(super().benchmark(*args, out=out))
        except AotError as error:  # which autotuning would take for a failure of all choices
            self._choices.failed[f"{self._key}: {str(error).partition(chr(10))[0]}"] += 1
            return float("inf")

    def output_node(self) -> Any:
        """What Inductor asks for of the choice that it takes, and of no other."""
        self._choices.chosen[self._key] += 1
        return super().output_node()


def install() -> None:
    """Let Inductor know the kernel, and ask for choices; once in a process, however often it is called."""
    _choice()
    if _with_ours not in get_algorithm_selector_cache().preprocessing_fns:
        add_preprocessing_fn(_with_ours)


@functools.lru_cache(None)
def _choice() -> Any:
    choice = ExternKernelChoice(_gemm, name=_NAME)
    choice.ordered_kwargs_for_cpp_kernel = ()  # as its `bind` would, which makes callers of Inductor's own class
    return choice


def _with_ours(choices: list[Any]) -> list[Any]:
    """The choices for what is being lowered, and the archive's where it is a marked product that the archive has."""
    node = getattr(V.graph, "current_node", None)
    ours = node.meta.get(MARK) if node is not None else None
    if ours is None or not choices:
        return choices
    inputs, layout = choices[0].input_nodes, choices[0].layout
    if isinstance(layout, ir.FlexibleLayout):
        layout = ir.FixedLayout(layout.device, layout.dtype, layout.size)
    reason = _not_measured(node, inputs)
    signature: Signature | None = None
    if not reason:
        signature, reason = _match(ours, node, inputs, layout)
    if signature is not None:
        for x in inputs:
            x.freeze_layout()  # what is measured must be what is run, and freezing may pad
        signature, reason = _match(ours, node, inputs, layout)
    ours.count(node, signature, reason)
    if signature is None:
        return choices
    kwargs = {"library": ours.number, "overlap": signature.overlap}
    return [*choices, _Caller(ours, signature.key(), _choice(), inputs, layout, kwargs)]


def _not_measured(node: torch.fx.Node, inputs: list[Any]) -> str:
    """Why Inductor could not measure or run the choice, whatever its shape; empty if it can."""
    if len(inputs) != len(node.args) or not all(map(ir.is_storage_and_layout, inputs)):
        return "Inductor does not lower it as one product"
    if not (config.max_autotune or config.max_autotune_gemm):
        return "max_autotune is off, so nothing is measured"
    if V.graph.cpp_wrapper:
        return "the generated code is C++, which cannot call the library"
    if getattr(config, "pipeline_max_autotune_gemm", False):  # not an option of every release
        return "pipeline_max_autotune_gemm is on: other processes measure, and have no library"
    return ""


def _match(ours: GemmChoices, node: torch.fx.Node, inputs: list[Any], layout: Any) -> tuple[Signature | None, str]:
    d, a, b = map(_operand, (layout, *(x.get_layout() for x in inputs[-2:])))
    return ours.match(node, d, a, b)


def _operand(layout: Any) -> Operand:
    shape, strides = (tuple(convert_shape_to_symint(extents)) for extents in (layout.size, layout.stride))
    return Operand(shape, strides, convert_to_symint(layout.offset), layout.dtype, str(layout.device))
