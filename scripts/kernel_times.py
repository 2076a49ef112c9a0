"""What a GPU's kernels were for, and how long they took, by a trace of torch's profiler; needs neither torch nor a GPU.

A kernel counts for as long as it runs after all that began before it have ended: one that begins early and waits counts
nothing for that.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

OURS = "this project's"
# What the first of these that is in a kernel's name is for; norms and activations also quantise what they make. Names
# are those of vLLM's kernels, of FlashAttention, of what Inductor makes, with the operations that it fused, and of
# libraries.
PURPOSES = (
    ("norms", r"aotkernels.?rmsnorm"),
    ("quantising", r"aotkernels.?quantise"),
    (OURS, r"aotkernels|cutlassoperators"),
    ("attention", r"flash(?!infer)|attn|attention|fmha|flashinfer.*(decode|prefill|mla)|reshape_and_cache"),
    ("norms", r"norm|rsqrt"),
    ("activations", r"silu|gelu|act_and_mul|sigmoid"),
    ("quantising", r"quant|to_fp8|float8|abs_clamp"),
    ("experts", r"moe|expert|topk_softmax|topkgating"),
    ("GEMMs", r"nvjet|gemm|cutlass|cublas|splitk|matmul|deep_gemm|_mm_|marlin"),
    ("positions", r"rotary|rope"),
    ("copies", r"^memcpy|^memset"),
)
OTHERS, WAITING = "others", "no kernel"
# Inductor's kernels that are no GEMMs, and operators that it only calls, and yet names these by.
_MADE = "triton_poi_", "triton_red_", "triton_per_"
_CALLED = r"(quantising_|scaled_)?gemm|(cutlass_)?scaled_mm"


class Ran(NamedTuple):
    """A kernel: its name, and when it began and ended, in microseconds."""

    name: str
    begin: float
    end: float


def read(trace: Path) -> list[Ran]:
    """All kernels, copies and fills of a trace, in the order in which they began."""
    events = json.loads(trace.read_text())["traceEvents"]
    of_gpu = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted((Ran(e["name"], e["ts"], e["ts"] + e["dur"]) for e in of_gpu), key=lambda ran: ran[1:])


def purpose(name: str) -> str:
    """What a kernel is for."""
    if name.startswith(_MADE):
        name = re.sub(_CALLED, "", name)
    return next((what for what, pattern in PURPOSES if re.search(pattern, name, re.IGNORECASE)), OTHERS)


def by_purpose(kernels: Iterable[Ran], steps: int) -> dict[str, float]:
    """Microseconds of each of `steps`, by what kernels are for."""
    found: defaultdict[str, float] = defaultdict(float)
    ended = float("-inf")
    for ran in kernels:
        found[purpose(ran.name)] += max(0.0, ran.end - max(ran.begin, ended))
        ended = max(ended, ran.end)
    return _of_each_step(found, steps)


def longest(kernels: Iterable[Ran], steps: int, count: int = 12) -> dict[str, float]:
    """Microseconds of each of `steps` of the kernels that ran longest, with what they wait, by the beginning of their
    names."""
    found: defaultdict[str, float] = defaultdict(float)
    for ran in kernels:
        found[ran.name[:60]] += ran.end - ran.begin
    return _of_each_step(found, steps, count)


def waits(kernels: Iterable[Ran], steps: int, count: int = 12) -> dict[str, float]:
    """Microseconds of each of `steps` in which no kernel ran, `WAITING` in all, and those before the kernels that were
    waited for longest, by the beginning of their names: what the host took before it launched them."""
    found: defaultdict[str, float] = defaultdict(float)
    ended = float("inf")
    for ran in kernels:
        found[ran.name[:60]] += max(0.0, ran.begin - ended)
        ended = ran.end if ended == float("inf") else max(ended, ran.end)
    return {WAITING: round(sum(found.values()) / steps, 2), **_of_each_step(found, steps, count)}


def _of_each_step(found: Mapping[str, float], steps: int, count: int | None = None) -> dict[str, float]:
    """The most first."""
    most = sorted(found.items(), key=lambda item: -item[1])[:count]
    return {what: round(us / steps, 2) for what, us in most}
