"""Random operands of a moe_permute, what it must make of them, and what torch runs in its place.

Needs torch; on the GPU for measurements, on the CPU for tests of this file. Knows nothing of kernels or archives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from runtime.moe.permute import Signature
from runtime.numbers.quantised import scale_shape

from ..elements import TORCH_DTYPES, poisoned
from ..measure import Launch, MeasureError, tolerance
from ..operand_sets import FieldOperands, RandomOperands, baseline_of
from ..operation import Measures
from ..quantise.measures import drawn, quantised

_OF_NONE = 1 / 3  # of ids, where nobody says how many experts are elsewhere


@dataclass(frozen=True)
class OperandSet(FieldOperands):
    """One x, ids, perhaps an expert map, perhaps weights, rows, ends, positions, and perhaps scales."""

    written = ("rows", "ends", "positions", "scale")

    x: torch.Tensor
    ids: torch.Tensor
    expert_map: torch.Tensor | None
    weights: torch.Tensor | None
    rows: torch.Tensor
    ends: torch.Tensor
    positions: torch.Tensor
    scale: torch.Tensor | None = None

    def outputs(self) -> Mapping[str, torch.Tensor]:
        """What is written, of which scales may be absent."""
        return {name: tensor for name, tensor in super().outputs().items() if tensor is not None}

    def writing(self, outputs: Mapping[str, torch.Tensor]) -> OperandSet:
        """The same with other outputs."""
        return replace(self, **outputs)

    def local(self) -> torch.Tensor:
        """The expert here of each assignment (T, top_k), or -1."""
        found = self.ids.long()
        if self.expert_map is not None:
            there = (found >= 0) & (found < len(self.expert_map))
            found = torch.where(there, self.expert_map.long()[found.clamp(0, len(self.expert_map) - 1)], -1)
        return torch.where((found >= 0) & (found < len(self.ends)), found, -1)


class Weights(RandomOperands[Signature]):
    """Random tokens and experts of a signature; so many that using them in turn finds L2 cold."""

    def operands(self, m: int) -> list[OperandSet]:
        """Fresh tokens, each with experts that differ where there are enough, all of them here; poisoned outputs."""
        return [self.made(self._drawn(m)) for _ in range(self.count)]

    def unusual(self, m: int) -> list[OperandSet]:
        """The same with one expert that has all, and with experts elsewhere, which have their share of ids."""
        s = self.signature
        every = torch.full((m, s.top_k), s.experts // 3, device=self.device)
        share = 1 - s.experts / s.global_experts if s.global_experts else 0.0
        return [self.made(every), self.made(self._drawn(m), share or _OF_NONE)]

    def made(self, experts: torch.Tensor, elsewhere: float = 0.0) -> OperandSet:
        """Operands of tokens with these experts (T, top_k), by their number here, of which any may be out of range; a
        share of them replaced by those `elsewhere`."""
        s, of_map, (m, top_k) = self.signature, None, experts.shape
        others = torch.tensor([-1], device=self.device)
        if s.global_experts:
            of_map, experts = self._mapped(experts)
            others = torch.cat([others, (of_map < 0).nonzero().flatten()])[-max(s.global_experts - s.experts, 1) :]
        if elsewhere:
            of_others = others[torch.randint(len(others), experts.shape, **self.random)]
            experts = torch.where(torch.rand(experts.shape, **self.random) < elsewhere, of_others, experts)
        scaled, rows = s.scaling != "none", m * top_k
        x = drawn((m, s.k), self.random) if scaled else torch.randn((m, s.k), **self.random)
        return OperandSet(
            x.to(TORCH_DTYPES[s.x]),
            experts.to(torch.int32),
            of_map,
            None if s.weights == "none" else torch.randn((m, top_k), **self.random),
            poisoned((rows, s.k), s.rows, self.device),
            poisoned((s.experts,), "i32", self.device),
            poisoned((m, top_k), "i32", self.device),
            poisoned(scale_shape(s.scaling, rows, s.k), "f32", self.device) if scaled else None,
        )

    def _drawn(self, m: int) -> torch.Tensor:
        s = self.signature
        if s.top_k > s.experts:
            return torch.randint(s.experts, (m, s.top_k), **self.random)
        return torch.rand((m, s.experts), **self.random).topk(s.top_k).indices

    def _mapped(self, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A random map from global experts to those here, and the global ids of experts by their number here."""
        s = self.signature
        if s.global_experts < s.experts:
            raise MeasureError(f"{s.key()} has more experts than there are in all")
        globals_ = torch.rand(s.global_experts, **self.random).argsort()[: s.experts]
        of_map = torch.full((s.global_experts,), -1, dtype=torch.int32, device=self.device)
        of_map[globals_] = torch.arange(s.experts, dtype=torch.int32, device=self.device)
        here = (experts >= 0) & (experts < s.experts)
        return of_map, torch.where(here, globals_[experts.clamp(0, s.experts - 1)], experts)


def _weighed(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows times the weight of each, of their type."""
    return (rows.float() * weights[:, None]).to(rows.dtype)


class PermuteMeasures(Measures):
    """See `aot.tune.operation.Measures`."""

    def weights(self, signature: Signature, m: int, l2_bytes: int, seed: int, device: str = "cuda") -> Weights:
        """Random operands."""
        return Weights(signature, m, l2_bytes, seed, device)

    def reference(self, signature: Signature, operands: OperandSet) -> Mapping[str, torch.Tensor]:
        """The outputs; rows behind the last group's, which no function writes, are NaN."""
        local = operands.local().flatten()
        order = torch.where(local < 0, signature.experts, local).sort(stable=True).indices
        sizes = torch.bincount(local[local >= 0], minlength=signature.experts)
        here = int(sizes.sum())
        of_row, positions = order[:here] // signature.top_k, torch.full_like(local, -1)
        positions[order[:here]] = torch.arange(here, device=local.device)
        x, scale = operands.x[of_row], None
        if operands.weights is not None:
            x = _weighed(x, operands.weights.flatten()[order[:here]])
        if signature.scaling != "none":
            x, scale = quantised(x, signature.rows, signature.scaling)
        each = {"rows": x.float()} if scale is None else {"rows": x, "scale": scale}
        made = {name: of.new_full((len(local), *of.shape[1:]), float("nan")) for name, of in each.items()}
        for name, of in each.items():
            made[name][:here] = of
        return made | {
            "ends": sizes.cumsum(0).double(),
            "positions": positions.view(operands.ids.shape).double(),
        }

    def max_error(self, signature: Signature, output: str) -> float:
        """The relative error that an output may have: none, since all is copied, or counted; of rows that are
        quantised and their scales their own rounding."""
        if signature.scaling == "none" or output not in ("rows", "scale"):
            return 0.0
        return tolerance(signature.rows if output == "rows" else "f32")

    def baseline(self, signature: Signature, example: OperandSet) -> tuple[str, Launch]:
        """A stable sort of ids, a gather of rows, and what says where groups end and rows went to; where rows are
        quantised, of tokens that one compiled kernel made of x before, or of weighed rows afterwards."""
        narrow, weighed = self._narrow(signature), signature.weights != "none"
        experts = torch.arange(signature.experts, dtype=torch.int32, device=example.ids.device)

        def permute(o: OperandSet) -> tuple[torch.Tensor, ...]:
            ids = o.ids.flatten() if o.expert_map is None else o.expert_map[o.ids.flatten()]
            ids, order = ids.sort(stable=True)
            made = [of.index_select(0, order // signature.top_k) for of in (narrow(o.x) if not weighed else (o.x,))]
            if o.weights is not None:
                made = list(narrow(_weighed(made[0], o.weights.flatten()[order])))
            ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
            count = torch.arange(len(order), dtype=torch.int32, device=order.device)
            positions = torch.empty_like(count).scatter_(0, order, count)
            return made[0], ends, positions, *made[1:]

        name = "torch.sort, index_select, searchsorted and scatter_"
        name += ", product" if weighed else ""
        name += "" if signature.scaling == "none" else ", torch.compile'd amax and quotient"
        return baseline_of(signature, name, permute, example)

    def _narrow(self, signature: Signature) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
        """What of tokens is gathered, as torch makes it."""
        if signature.scaling == "none":
            return lambda x: (x,)
        torch._dynamo.reset()

        def narrow(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rows, scale = quantised(x, signature.rows, signature.scaling)
            return rows.to(TORCH_DTYPES[signature.rows]), scale

        return torch.compile(narrow, dynamic=True)
