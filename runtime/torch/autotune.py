"""An archive's kernels among the choices that Inductor's autotuning measures.

Knows what is offered and what became of it; how Inductor is given a choice is `extern_kernel`'s.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ..errors import ArgumentError
from ..gemm.signature import Signature
from ..serve.library import Library
from . import layers, products
from .layers import check_overlap
from .operator import register
from .products import MATMULS, Operand


class GemmChoices:
    """What Inductor's autotuning was offered of an archive, and what it chose; printable.

    `offered` and `chosen` count products of compiled graphs by the key of their signature, `left` those that the
    archive's kernel was not offered for, by the reason, and `failed` measurements that ended in an error of this
    package. A graph that Inductor takes from its cache is not compiled and not counted again. The fastest product need
    not be chosen: Inductor may take a slower Triton kernel with the elementwise operations that follow fused in. On a
    GPU it may part a bias from its product, and then asks for the signature without one. With `autotune_in_subproc` it
    measures Triton's kernels in other processes, and the archive's in this one, as ATen's.
    """

    def __init__(self, lib: Library, overlap: str) -> None:
        check_overlap(overlap, ("serial", "launch"))  # any matrix may be B, so nothing is promised of weights
        self.lib, self.overlap, self.number = lib, overlap, register(lib)
        self.offered: Counter[str] = Counter()
        self.chosen: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Mark the products of a graph that is about to be lowered, as a pass of Inductor's."""
        from . import extern_kernel

        extern_kernel.install()  # again, for who has cleared what autotuning calls
        for node in graph.nodes:
            if node.op == "call_function" and node.target in MATMULS:
                node.meta[extern_kernel.MARK] = self

    def uuid(self) -> str:
        """What decides the choices of a graph: these sources, the archive's digest, device and options."""
        from torch._inductor.custom_graph_pass import get_hash_for_files

        from . import extern_kernel

        modules = (products, layers, extern_kernel)
        sources = get_hash_for_files((__file__, *(str(module.__file__) for module in modules))).hex()
        return f"cute_aot choices {sources} {self.number} {self.lib.identity} {self.overlap}"

    def __deepcopy__(self, _memo: Any) -> GemmChoices:
        """Inductor copies its options; the counts, and the library, are those of the one object."""
        return self

    def __str__(self) -> str:
        lines = [f"{self.chosen.total()} of {self.offered.total()} products that the archive was measured for are its"]
        lines += [f"  {self.chosen[key]} of {count} x {key}" for key, count in self.offered.most_common()]
        lines += [f"  {count} x failed: {reason}" for reason, count in self.failed.most_common()]
        lines += [f"  {count} x not offered: {reason}" for reason, count in self.left.most_common()]
        return "\n".join(lines)

    def match(self, node: torch.fx.Node, d: Operand, a: Operand, b: Operand) -> tuple[Signature | None, str]:
        """The signature to offer for a product whose operands are lowered so, or None and why there is none."""
        biases = [products.value_of(x) for x in node.args[:-2]]
        known = [Operand.of(x) for x in biases if x is not None]
        if len(known) != len(biases):
            return None, "its shapes are not known"
        scaled = products.is_scaled(node)
        return products.match(self.lib, self.overlap, d, a, b, known[0] if known else None, scaled)

    def count(self, node: torch.fx.Node, signature: Signature | None, reason: str) -> None:
        """Count a product that `signature` is offered for, or nothing, for this reason."""
        if signature is None:
            self.left[f"{MATMULS[node.target]}: {reason}"] += 1
        else:
            self.offered[signature.key()] += 1


def autotune_choices(lib: Library, *, mode: str = "max-autotune", overlap: str = "serial") -> dict[str, Any]:
    """Options for `torch.compile(model, options=...)`: those of `mode`, with `lib` as one more choice of autotuning.

    Inductor measures the archive's kernel beside its own choices for each mm, addmm and bmm that the archive has a
    checked kernel for (of a tuned entry, or predicted by a table whose functions were checked), and keeps the fastest.
    What was offered and chosen is in `options["post_grad_custom_post_pass"]`, a `GemmChoices`, printable.

    Raises:
        ArgumentError: `lib` is no open library, `mode` is neither "max-autotune" nor "max-autotune-no-cudagraphs", or
            `overlap` is neither "serial" nor "launch".
    """
    modes = ("max-autotune", "max-autotune-no-cudagraphs")
    if mode not in modes:
        raise ArgumentError(f"mode must be one of {', '.join(modes)}, found {mode!r:.50}")
    choices = GemmChoices(lib, overlap)
    # Here, since importing Inductor takes seconds.
    import torch._inductor
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from . import extern_kernel

    extern_kernel.install()  # also for graphs that come from a cache, whose code calls it by name
    CustomGraphPass.register(GemmChoices)
    # After Inductor's own passes: what is marked is what is lowered.
    return {**torch._inductor.list_mode_options(mode), "post_grad_custom_post_pass": choices}
