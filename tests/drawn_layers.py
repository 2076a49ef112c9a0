"""Times that GPUs of two kinds were tuned with at layers of models, of products in 16 bits without gates."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from aot.search import universal
from aot.search.universal import Measured
from aot.tune import times
from runtime.gemm.signature import Signature

GPUS = "h200", "h100"
PARTS = 5  # in which the N x K are, to leave one out

_BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@cache
def layers() -> dict[str, list[tuple[Signature, Measured]]]:
    """By GPU what was timed."""
    form = universal.likeness(Signature("bf16", "bf16", "bf16", "f32", "none", 256, 512))
    kept = {gpu: times.load(_BENCHMARKS / f"drawn_{gpu}.json.xz", "sm_90a") for gpu in GPUS}
    return {gpu: [(s, at) for s, at in of if universal.likeness(s) == form] for gpu, of in kept.items()}


@cache
def part_of() -> dict[tuple[int, int], int]:
    """The part of each N x K: that of its place, in an order which says nothing of it."""
    sizes = {(s.n, s.k) for of in layers().values() for s, _ in of}
    ordered = sorted(sizes, key=lambda size: hashlib.sha256(f"{size[0]}x{size[1]}".encode()).hexdigest())
    return {size: i % PARTS for i, size in enumerate(ordered)}


def others(part: int) -> list[Measured]:
    """What was timed, on both GPUs, at N x K that are not of a part."""
    return [at for of in layers().values() for s, at in of if part_of()[s.n, s.k] != part]
