"""Which of a model's layers an archive serves, and the report of what was taken and why the rest was not.

Knows signatures and libraries, and nothing of torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, KernelMiss
from ..gemm.signature import Signature
from ..program.operation import OVERLAPS
from ..serve.library import Library


@dataclass(frozen=True)
class Layer:
    """What became of one linear layer.

    `signature` is the key that its GEMM is looked up by, empty where torch still computes it. `fused_with` names the
    layers that share its GEMM. `reason` says why it was left, or, of a layer that was taken, why it was not fused.
    """

    name: str
    signature: str = ""
    fused_with: tuple[str, ...] = ()
    reason: str = ""

    @property
    def taken(self) -> bool:
        """Whether the archive computes it."""
        return bool(self.signature)


@dataclass(frozen=True)
class Report:
    """What `runtime.torch.replace_linears` did, layer by layer in the model's order; printed, it is a table."""

    layers: tuple[Layer, ...]

    @property
    def signatures(self) -> frozenset[str]:
        """The keys of what the archive computes, as `Library.preload` takes them with `only`."""
        return frozenset(layer.signature for layer in self.layers if layer.taken)

    def __str__(self) -> str:
        taken = sum(layer.taken for layer in self.layers)
        rows = [("layer", "signature", "fused with", "reason")]
        for layer in self.layers:
            with_ = ", ".join(name.rpartition(".")[2] for name in layer.fused_with)
            rows.append((layer.name, layer.signature or "left to torch", with_ or "-", layer.reason or "-"))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        return "\n".join([*lines, f"{taken} of {len(self.layers)} linear layers are served by the archive"])

    def to_json(self) -> list[dict[str, Any]]:
        """One plain dictionary a layer."""
        return [dataclasses.asdict(layer) | {"taken": layer.taken} for layer in self.layers]


def check_overlap(overlap: str, known: tuple[str, ...] = OVERLAPS) -> None:
    """Refuse an unknown promise.

    Raises:
        ArgumentError: `overlap` is none of `known`.
    """
    if overlap not in known:
        raise ArgumentError(f"overlap must be one of {', '.join(known)}, found {overlap!r:.50}")


def choose(lib: Library, wanted: Signature) -> tuple[Signature | None, str]:
    """The signature by which `lib` has a kernel for `wanted` that was found right on a GPU, or None and why not.

    `wanted.overlap` is the most that the caller promises: where the archive has nothing for it, entries that rely on
    less are taken, the strongest first. Tuned entries come before those that a universal table predicts.
    """
    reason, predicted = "", None
    for word in reversed(OVERLAPS[: OVERLAPS.index(wanted.overlap) + 1]):
        signature = dataclasses.replace(wanted, overlap=word)
        try:
            entry = lib.entry(signature)
        except KernelMiss as miss:
            reason = reason or _in_one_line(miss)
            continue
        if entry.state == "tuned":
            return signature, ""
        if lib.checked(entry):
            predicted = predicted or signature
        else:
            reason = reason or f"{signature.key()} is {entry.state}, never run on a GPU; run: aot tune"
    return (None, reason) if predicted is None else (predicted, "")


def _in_one_line(miss: KernelMiss) -> str:
    """What was asked for, and the nearest entry."""
    lines = str(miss).splitlines()
    nearest = next((line.strip() for line in lines if line.startswith("  ")), "")
    return f"{lines[0]}; nearest is {nearest}" if nearest else lines[0]
