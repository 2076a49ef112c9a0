"""A compiled variant on the emulated GPU, held against the reference of its operation as `aot tune` holds it."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from aot.compile.lower import Lowered, LoweringError, lower
from aot.search.legal import legal_variants, of_name, unsuited
from aot.search.provider import provider_names
from aot.search.variants import Variant
from aot.tune import measure
from aot.tune.operation import tuning
from runtime.gemm.signature import Signature
from runtime.grouped_gemm import Signature as Grouped
from runtime.moe.combine import Signature as Combine
from runtime.moe.permute import Signature as Permute
from runtime.quantise import Signature as Quantise
from runtime.rmsnorm import Signature as RmsNorm

from .launcher import launcher

_TRIES = 6  # some legal variants spill registers


class Case(NamedTuple):
    """A signature, of small extents, and rows of A."""

    signature: Any
    m: int


def _gemm(a: str, b: str, d: str, n: int, k: int, **more: Any) -> Signature:
    return replace(Signature(a, b, d, "f32", "none", n, k), **more)


# Rows, N and K that fill no tile, and of everything that kernels may have besides A, B and D something.
CASES = (
    Case(_gemm("bf16", "bf16", "bf16", 264, 520), 77),
    Case(_gemm("bf16", "bf16", "bf16", 264, 520, epilogue="bias+gelu_tanh+residual"), 45),
    Case(_gemm("f16", "f16", "f16", 272, 328, epilogue="swiglu", overlap="weights"), 33),
    Case(_gemm("bf16", "bf16", "bf16", 136, 200, b_major="n"), 65),
    Case(_gemm("bf16", "bf16", "bf16", 136, 200, batch=3), 17),
    Case(_gemm("bf16", "bf16", "e4m3", 144, 264, epilogue="scale"), 40),
    Case(_gemm("e4m3", "e4m3", "bf16", 264, 528, scaling="row_column"), 70),
    Case(_gemm("e4m3", "e4m3", "f16", 264, 528, scaling="tensor", epilogue="bias"), 21),
    Case(_gemm("e4m3", "e4m3", "bf16", 264, 400, scaling="block"), 100),
    Case(_gemm("bf16", "e2m1", "bf16", 272, 576, scaling="mxfp4_weight", epilogue="bias"), 19),
    Case(_gemm("bf16", "u4", "bf16", 272, 640, scaling="int4_weight"), 35),
    Case(Grouped("bf16", "bf16", "bf16", 5, 136, 200), 61),
    Case(Grouped("bf16", "bf16", "bf16", 4, 256, 136, epilogue="swiglu"), 50),
    Case(Grouped("e4m3", "e4m3", "bf16", 5, 256, 272, scaling="row_column"), 61),
    Case(Grouped("e4m3", "e4m3", "e4m3", 3, 512, 256, epilogue="swiglu", scaling="block"), 40),
    Case(Grouped("bf16", "bf16", "bf16", 3, 144, 136, rows="masked"), 30),
    Case(Grouped("f16", "f16", "f16", 4, 144, 136, rows="gathered"), 50),
    Case(Permute("bf16", 8, 2, 264), 37),
    Case(Combine("bf16", "bf16", 3, 264), 37),
    Case(Quantise("bf16", "e4m3", 272, "block"), 37),
    Case(RmsNorm("bf16", "bf16", "bf16", 520), 5),
    Case(_gemm("e4m3", "e4m3", "bf16", 288, 544, scaling="mxfp8"), 140),
    Case(_gemm("e2m1", "e2m1", "bf16", 288, 544, scaling="mxfp4"), 140),
    Case(_gemm("e2m1", "e2m1", "f16", 288, 544, scaling="nvfp4"), 140),
    Case(_gemm("bf16", "i8", "bf16", 272, 528), 70),
    Case(_gemm("e4m3", "e4m3", "bf16", 288, 544), 300),
    Case(_gemm("bf16", "i4", "bf16", 256, 640, scaling="int4_group128"), 70),
    Case(Grouped("bf16", "e2m1", "bf16", 5, 288, 320, "bias+swiglu_clamped_interleaved", scaling="mxfp4_weight"), 61),
    Case(Grouped("bf16", "e2m1", "bf16", 5, 288, 320, "swiglu", scaling="mxfp4_weight"), 40),
    Case(Grouped("bf16", "u4", "bf16", 5, 144, 384, "bias", scaling="int4_weight"), 61),
    Case(_gemm("bf16", "bf16", "bf16", 272, 328, epilogue="swiglu_clamped"), 33),
    # Groups end in every part of a tile of 128 or 256 rows.
    Case(Grouped("e4m3", "e4m3", "bf16", 3, 272, 272, scaling="block", rows="masked"), 90),
    Case(Grouped("e4m3", "e4m3", "bf16", 3, 144, 272, scaling="block"), 300),
    Case(_gemm("bf16", "u4", "bf16", 272, 640, scaling="int4_zero_weight"), 35),
    Case(Grouped("bf16", "u4", "bf16", 5, 144, 384, "bias", scaling="int4_zero_weight"), 61),
    Case(_gemm("bf16", "e4m3", "bf16", 288, 656, epilogue="swiglu", scaling="block_weight"), 37),
    Case(_gemm("bf16", "e4m3", "bf16", 16, 6160, scaling="block_weight"), 3),
    Case(_gemm("bf16", "e4m3", "bf16", 144, 912, epilogue="bias", scaling="column_weight"), 21),
    # So much of K that rings of stages go around, with loads of a few times as much under way.
    Case(_gemm("bf16", "e2m1", "bf16", 16, 3264, scaling="mxfp4_weight"), 9),
    Case(Grouped("bf16", "e2m1", "bf16", 2, 16, 3264, scaling="mxfp4_weight"), 9),
    # Gates in whole atoms of 64, as swapped ones are, and a last tile that is not full.
    Case(_gemm("bf16", "bf16", "bf16", 640, 328, epilogue="bias+swiglu_interleaved"), 45),
    Case(_gemm("f16", "f16", "f16", 384, 136, epilogue="geglu"), 21),
    Case(_gemm("e4m3", "e4m3", "bf16", 640, 528, scaling="row_column", epilogue="swiglu"), 70),
    Case(Quantise("bf16", "e4m3", 272, "row_column", activation="swiglu"), 37),
    Case(Quantise("f16", "e4m3", 400, "block", activation="swiglu"), 19),
    Case(RmsNorm("bf16", "bf16", "bf16", 520, "bf16"), 5),
    Case(RmsNorm("bf16", "bf16", "e4m3", 1296, "bf16", "block"), 7),
    Case(RmsNorm("f16", "f16", "e4m3", 1296, scaling="row_column"), 7),
    Case(_gemm("bf16", "e4m3", "bf16", 288, 656, epilogue="swiglu", scaling="column_weight"), 11),
    # Columns of D that are no multiple of those of ragged tiles, nor of a WGMMA atom, and groups of few rows.
    Case(Grouped("bf16", "bf16", "bf16", 4, 200, 136), 13),
    Case(Grouped("bf16", "bf16", "bf16", 4, 400, 136, epilogue="swiglu"), 13),
    Case(Grouped("f16", "f16", "f16", 4, 400, 136, epilogue="bias+swiglu_clamped_interleaved"), 13),
    Case(Grouped("e4m3", "e4m3", "bf16", 4, 200, 272, scaling="row_column"), 13),
    Case(Grouped("e4m3", "e4m3", "bf16", 4, 400, 272, epilogue="swiglu", scaling="row_column"), 13),
    Case(Grouped("bf16", "bf16", "bf16", 3, 200, 136, epilogue="bias", rows="masked"), 9),
    Case(Grouped("bf16", "bf16", "bf16", 3, 400, 136, epilogue="swiglu", rows="masked"), 9),
    Case(Grouped("bf16", "bf16", "bf16", 3, 200, 136, rows="gathered"), 9),
)


# So many rows and so much of K that rings of stages go around twice for each of two slices, and tiles of a cluster are
# of different rows and columns.
LARGER = (
    Case(_gemm("bf16", "bf16", "bf16", 264, 2184), 170),
    Case(_gemm("e4m3", "e4m3", "bf16", 264, 4368, scaling="row_column"), 170),
    Case(_gemm("e4m3", "e4m3", "bf16", 264, 4368, scaling="block"), 170),
)


def drawn(name: str, rng: random.Random, cases: tuple[Case, ...] = CASES) -> Iterator[tuple[list[Variant], Case]]:
    """For each case, and every family that computes it on the target `name`, a few legal variants, drawn.

    The first that compiles to what may be shipped is to be tried.
    """
    for case in cases:
        by_family: dict[tuple[str, str], list[Variant]] = {}
        for provider in provider_names():
            for variant in legal_variants(provider, name, case.signature):
                by_family.setdefault((provider, variant.family), []).append(variant)
        for _, variants in sorted(by_family.items()):
            yield rng.sample(variants, min(len(variants), _TRIES)), case


def named(names: Iterable[str], cases: tuple[Case, ...] = CASES) -> Iterator[tuple[list[Variant], Case]]:
    """Legal variants by name, which builds need not choose, each with the cases that it computes."""
    for name in names:
        variant = of_name(name)
        assert variant is not None, name
        yield from (([variant], case) for case in cases if unsuited(variant, case.signature) is None)


# What makes a kernel wrong, by what it forgets: patterns of PTX and what comes in their place.
BROKEN = {
    "waits at mbarriers": (r"mbarrier\.try_wait\S* ([%\w]+), [^;]*;", r"setp.eq.b32 \1, 0, 0;"),
    "waits for copies": (r"cp\.async\.wait_group\s+\d+;", "cp.async.wait_group 99;"),
    "waits for products": (r"wgmma\.wait_group\.sync\.aligned\s+\d+;", "wgmma.wait_group.sync.aligned 99;"),
    "products of a step": (r"(wgmma\.mma_async[^;]*;)(.*?)wgmma\.mma_async[^;]*;", r"\1\2"),
}


def broken(ptx: str, what: str) -> str:
    """PTX of a kernel that forgets something."""
    pattern, instead = BROKEN[what]
    found, count = re.subn(pattern, instead, ptx, flags=re.S)
    assert count, f"the kernel has no {what}"
    return found


def lowered_first(variants: Iterable[Variant]) -> tuple[Variant, Lowered]:
    """The first that compiles to what may be shipped, with its PTX."""
    refused: list[str] = []
    for variant in variants:
        try:
            return variant, lower(variant, keep_ptx=True)
        except LoweringError as error:
            refused.append(str(error))
    raise LoweringError(refused[-1])


@contextmanager
def launching(
    variant: Variant, lowered: Lowered, clusters: int = 2, seed: int = 0, forgets: str = ""
) -> Iterator[Callable[[Any], None]]:
    """What launches a variant on an operand set, on a GPU that holds so many clusters; `forgets` is one of `BROKEN`."""
    cluster = [variant.options[name] for name in ("cluster_m", "cluster_n", "cluster") if name in variant.options]
    kernel = replace(lowered, ptx=broken(lowered.ptx, forgets)) if forgets else lowered
    with launcher(kernel, clusters * math.prod(map(int, cluster)) + 1, seed) as launch:
        yield lambda operands: launch(operands.arguments(), operands.outputs().values())


def check(
    variant: Variant, lowered: Lowered, case: Case, clusters: int = 2, seed: int = 0, forgets: str = ""
) -> float | str:
    """The relative error of what a variant computes on a GPU that holds so many clusters, or what is wrong with it;
    `forgets` is one of `BROKEN`."""
    with launching(variant, lowered, clusters, seed, forgets) as launch:
        weights = tuning(case.signature).measures().weights(case.signature, case.m, 0, seed, device="cpu")
        return measure.check(case.signature, case.m, weights, {variant.name(): launch})[variant.name()]


def check_hostile(variant: Variant, lowered: Lowered, case: Case, seed: int = 0) -> float | str:
    """The same of a grouped GEMM at ends of groups that fall, are negative or lie behind A's rows: each counts as the
    largest so far, and as no less than 0 and no more than all rows; of masked rows each count is a group's own. Where
    an access lies outside of the tensors, or writes to one that is not D, the machine raises."""
    s, m = case
    wrong = [m // 2, -5, 1 << 30, 3, -(1 << 31), (1 << 31) - 1]
    found: float | str = 0.0
    with launching(variant, lowered, seed=seed) as launch:
        for turn in range(3):
            measures = tuning(s).measures()
            o: Any = measures.weights(s, m, 0, seed, device="cpu").operands(m)[0]
            ends = [wrong[(turn + group * (turn + 1)) % len(wrong)] for group in range(s.groups)]
            if turn == 2:  # no group has the last rows
                ends = [min(end, m // 2) for end in ends]
            o.ends.copy_(o.ends.new_tensor(ends))
            launch(o)
            masked = s.rows == "masked"
            taken = [min(max(end, 0), o.a.shape[1] if masked else m) for end in ends]
            o.ends.copy_(o.ends.new_tensor(taken if masked else list(itertools.accumulate(taken, max))))
            wanted = measures.reference(s, o)["d"]
            if not bool((o.d.isnan() == wanted.isnan()).all()):
                return f"ends {ends}: other rows are written than the groups have"
            there = ~wanted.isnan()
            error = float((o.d[there].double() - wanted[there]).norm() / wanted[there].norm().clamp_min(1e-30))
            if error > measures.max_error(s, "d"):
                return f"ends {ends}: the relative error is {error:.1e}"
            found = max(error, float(found))
    return found
