"""A pass of Inductor's that routes the matrix products of what torch.compile compiles to an archive.

Knows the operator, and nothing of models.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ..gemm.signature import Signature
from ..serve.library import Library
from .layers import check_overlap
from .operator import GEMM, register
from .products import MATMULS, Operand, is_scaled, match, value_of


class GemmPass:
    """A pass of Inductor's over the graph after autograd: mm, addmm and bmm that an archive serves become the operator.

    N, K, batch and element types must be known and have a checked kernel (of a tuned entry, or predicted by a table
    whose functions were checked); M may be a symbol. B is transposed from a row-major (N, K), as for linear layers, or
    is a row-major (K, N). addmm is taken with alpha and beta 1 and a bias of one dimension. `routed` counts what was
    replaced by the key of its signature, `left` the rest by the reason; a graph that Inductor takes from its cache does
    not come by here and is not counted again.
    """

    def __init__(self, lib: Library, overlap: str = "serial") -> None:
        check_overlap(overlap, ("serial", "launch"))  # any matrix may be B, so nothing is promised of weights
        self.lib, self.overlap, self.number = lib, overlap, register(lib)
        self.routed: Counter[str] = Counter()
        self.left: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Replace in `graph` what can be."""
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in MATMULS:
                continue
            *bias, a, b = node.args
            signature, reason = self._match(node, a, b, bias[0] if bias else None)
            if signature is None:
                self.left[f"{MATMULS[node.target]}: {reason}"] += 1
            else:
                self.routed[signature.key()] += 1
                self._put(graph, node, signature, bias)

    def uuid(self) -> str:
        """What decides the graphs that this pass makes: its own sources, the archive's digest, device and options."""
        from torch._inductor.custom_graph_pass import get_hash_for_files

        names = ("inductor", "products", "layers", "direct", "lowering")
        sources = get_hash_for_files(tuple(str(Path(__file__).with_name(f"{name}.py")) for name in names)).hex()
        return f"cute_aot {sources} {self.number} {self.lib.identity} {self.overlap}"

    def __deepcopy__(self, _memo: Any) -> GemmPass:
        """Inductor copies its options; the counts, and the library, are those of the one pass."""
        return self

    def __str__(self) -> str:
        lines = [f"{sum(self.routed.values())} matrix products go to the archive, {sum(self.left.values())} do not"]
        lines += [f"  {count} x {key}" for key, count in self.routed.most_common()]
        lines += [f"  {count} x left: {reason}" for reason, count in self.left.most_common()]
        return "\n".join(lines)

    def _match(self, node: Any, a: Any, b: Any, bias: Any) -> tuple[Signature | None, str]:
        """The signature of a matrix product, a (..., M, K) and b (..., K, N), or why there is none."""
        values = [value_of(x) for x in (node, a, b, bias) if x is not None]
        known = [Operand.of(x) for x in values if x is not None]
        if len(known) != len(values):
            return None, "its shapes are not known"
        d, of_a, of_b, *of_bias = known
        return match(self.lib, self.overlap, d, of_a, of_b, of_bias[0] if of_bias else None, is_scaled(node))

    def _put(self, graph: torch.fx.Graph, node: Any, signature: Signature, bias: list[Any]) -> None:
        """Put the operator in the place of `node`; its result is laid out as the product's was."""
        *_, a, b = node.args
        dims = [1, 0] if b.meta["val"].dim() == 2 else [0, 2, 1]
        with graph.inserting_before(node):
            if b.op == "call_function" and b.target is torch.ops.aten.permute.default and list(b.args[1]) == dims:
                weight = b.args[0]
            else:
                weight = graph.call_function(torch.ops.aten.permute.default, (b, dims))
                weight.meta["val"] = b.meta["val"].permute(dims)
            options = {"bias": bias[0]} if bias else {}
            new = graph.call_function(GEMM, (self.number, a, weight), options | {"overlap": signature.overlap})
        new.meta.update(node.meta)
        # What Inductor keeps strides by: a computed operand would else be laid out anew.
        new.meta["eager_input_vals"] = map_aggregate((new.args, new.kwargs), _value)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        if not b.users and b.op == "call_function":
            graph.erase_node(b)


def _value(x: Any) -> Any:
    return x.meta["val"] if isinstance(x, torch.fx.Node) else x


def inductor_options(lib: Library, *, overlap: str = "serial") -> dict[str, Any]:
    """Options for `torch.compile(model, options=...)` that let `lib` compute the products which it has kernels for.

    What was routed, and why the rest was not, is in `options["post_grad_custom_pre_pass"]`, a `GemmPass`, printable.

    Raises:
        ArgumentError: `lib` is no open library, or `overlap` is neither "serial" nor "launch".
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    # Before Inductor's own passes, one of which parts a bias from its product where something elementwise follows.
    CustomGraphPass.register(GemmPass)  # here, since importing Inductor takes seconds
    return {"post_grad_custom_pre_pass": GemmPass(lib, overlap)}
