"""DeepGEMM's grouped GEMMs: block-scaled e4m3 on Hopper, rows contiguous or masked.

Rows of a group must fill whole tiles of M, and so must the room for masked ones: its operands are copies that are
padded to that, which no measurement contains, nor does what lays out scales. Of masked rows it is told how many a group
has on average.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from aot.tune.grouped_gemm.measures import OperandSet
from aot.tune.measure import Launch
from runtime.grouped_gemm import Signature

from .base import Settings, versions_of
from .deep_gemm import import_module

_NOBODY = -1  # the group of a row that only fills a tile


class GroupedDeepGemm:
    """The peer, as `base.Peer` but for grouped GEMMs."""

    name = "deep_gemm"
    search = "m_grouped_fp8_gemm_nt_contiguous and _masked, with and without programmatic dependent launch"

    def __init__(self, settings: Settings) -> None:
        # Read when it is imported; what the caller has set stays.
        os.environ.setdefault("DG_JIT_CACHE_DIR", str(settings.cache / self.name))
        self._module = import_module()

    def versions(self) -> dict[str, str]:
        """The versions of its packages."""
        return versions_of("deep_gemm", "vllm")

    def refuse(self, signature: Signature) -> str | None:
        """Why it cannot compute `signature`; None if it can."""
        if signature.scaling != "block":
            return "its grouped GEMMs of e4m3 take scales of blocks"
        if (signature.d, signature.epilogue) != ("bf16", "none") or signature.rows == "gathered":
            return "its grouped GEMMs of e4m3 write bf16, fuse nothing and gather nothing"
        return None

    def launches(self, signature: Signature, m: int) -> Mapping[str, Launch]:
        """Its candidates for `signature` at `m` rows. Launch one on every operand set before it is captured."""
        kept: dict[int, _Given] = {}  # by the address of A, which an operand set holds; candidates share them
        made = {False: _Launched(self._module, signature, m, kept)}
        if hasattr(self._module, "set_pdl"):
            made[True] = _Launched(self._module, signature, m, kept, pdl=True)
        return {"pdl" if pdl else "plain": launch for pdl, launch in made.items()}


@dataclass(frozen=True)
class _Given:
    """What it is given for one operand set: A and its scales, as it wants them, those of B, D, and what says which rows
    are of which group; `rows` is where each of our rows is in D, or where masked, which are any group's."""

    of: OperandSet  # kept, so that its addresses stay its own
    a: tuple[torch.Tensor, torch.Tensor]
    b: tuple[torch.Tensor, torch.Tensor]
    d: torch.Tensor
    groups: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class _Launched:
    """A launch into a D of its own."""

    module: Any
    signature: Signature
    m: int
    kept: dict[int, _Given]
    pdl: bool = field(default=False)

    def __call__(self, o: OperandSet) -> None:
        """Launch; the result is not where `o` says."""
        self._launch(self._given(o))

    def into(self, o: OperandSet) -> None:
        """Launch and copy the rows of groups to where `o` says; others stay as they are."""
        given = self._given(o)
        self._launch(given)
        if self.signature.rows == "masked":
            o.d[given.rows] = given.d[:, : given.rows.shape[1]][given.rows]
        else:
            o.d[: len(given.rows)] = given.d[given.rows]

    def _launch(self, given: _Given) -> None:
        if hasattr(self.module, "set_pdl"):
            self.module.set_pdl(self.pdl)
        if self.signature.rows == "masked":
            self.module.m_grouped_fp8_gemm_nt_masked(
                given.a, given.b, given.d, given.groups, max(self.m, 1), disable_ue8m0_cast=True
            )
        else:
            self.module.m_grouped_fp8_gemm_nt_contiguous(
                given.a, given.b, given.d, given.groups, disable_ue8m0_cast=True
            )

    def _given(self, o: OperandSet) -> _Given:
        found = self.kept.get(o.a.data_ptr())
        if found is None or found.of.a is not o.a:
            make = self._masked if self.signature.rows == "masked" else self._padded
            found = self.kept[o.a.data_ptr()] = make(o)
        return found

    def _masked(self, o: OperandSet) -> _Given:
        tile = self.module.get_mk_alignment_for_contiguous_layout()
        (groups, room, k), scale_a = o.a.shape, o.extras["scale_a"]
        more = -room % tile  # its last tile of a group is stored whole
        counts = o.ends.clamp(0, room)
        there = torch.arange(room, device=o.a.device)[None, :] < counts[:, None]
        a = torch.cat((o.a.view(torch.uint8), o.a.new_zeros((groups, more, k), dtype=torch.uint8)), 1)
        scale = torch.cat((scale_a, scale_a.new_zeros((groups, more, scale_a.shape[2]))), 1)
        scale = self.module.get_mn_major_tma_aligned_tensor(scale)
        d = o.d.new_empty((groups, room + more, o.d.shape[2]))
        return _Given(o, (a.view(o.a.dtype), scale), self._b(o), d, counts, there)

    def _padded(self, o: OperandSet) -> _Given:
        tile = self.module.get_mk_alignment_for_contiguous_layout()
        groups, rows = padded_rows(o.ends, tile)
        a = torch.zeros((len(groups), o.a.shape[1]), dtype=torch.uint8, device=o.a.device)
        a[rows] = o.a[: len(rows)].view(torch.uint8)
        scale_a = o.extras["scale_a"]
        scale = torch.zeros((len(groups), scale_a.shape[1]), device=o.a.device)
        scale[rows] = scale_a[: len(rows)]
        scale = self.module.get_mn_major_tma_aligned_tensor(scale)
        d = torch.empty((len(groups), o.d.shape[1]), dtype=o.d.dtype, device=o.d.device)
        return _Given(o, (a.view(o.a.dtype), scale), self._b(o), d, groups, rows)

    def _b(self, o: OperandSet) -> tuple[torch.Tensor, torch.Tensor]:
        return o.b, o.extras["scale_b"].contiguous()


def padded_rows(ends: torch.Tensor, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The group of each row (i32) where each group's rows fill whole tiles, or -1 of a row that only fills one; and for
    each row of a group, in their order, where it is there. `ends` (groups) ascend."""
    counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())
    wide = (counts + tile - 1) // tile * tile
    groups = torch.full((max(int(wide.sum()), tile),), _NOBODY, dtype=torch.int32, device=ends.device)
    number = torch.repeat_interleave(torch.arange(len(ends), device=ends.device), counts)
    begins, wide_begins = ends.long() - counts, wide.cumsum(0) - wide
    rows = torch.arange(len(number), device=ends.device) - begins[number] + wide_begins[number]
    groups[rows] = number.to(torch.int32)
    return groups, rows
