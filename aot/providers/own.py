"""Kernels of this project, `aot/kernels/`.

Importing this imports no compiler; `build` does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from runtime.gemm.signature import MAJORS, Signature
from runtime.grouped_gemm import EPILOGUES_OF_GROUPS, SCALINGS_OF_GROUPS
from runtime.numbers.epilogue import EPILOGUES
from runtime.numbers.quantised import NARROW, SCALINGS_OF_ROWS
from runtime.numbers.scaling import QUANTISING, SCALINGS
from runtime.numbers.weights import FORMATS
from runtime.quantise import ACTIVATIONS

from ..kernels import moe_choices
from ..kernels.sm80.grouped_w4 import choices as sm80_grouped_w4_choices
from ..kernels.sm80.w4 import choices as sm80_w4_choices
from ..kernels.sm90.grouped import choices as grouped_choices
from ..kernels.sm90.grouped_w4 import choices as grouped_w4_choices
from ..kernels.sm90.persistent import choices as persistent_choices
from ..kernels.sm90.small_m import choices as small_m_choices
from ..kernels.sm90.w4 import choices as w4_choices
from ..kernels.w4.choices import limit as limit_of_weights
from ..kernels.w4.choices import limit_of_groups
from ..search.legal import illegal, legal_functions, legal_variants
from ..search.provider import Buildable, ProviderError
from ..search.targets import TARGETS
from ..search.variants import Family, Likely, Variant
from . import (
    estimate_grouped,
    estimate_grouped_w4,
    estimate_persistent,
    estimate_sm80_grouped_w4,
    estimate_sm80_w4,
    estimate_small_m,
    estimate_w4,
    likely_grouped,
    likely_persistent,
    likely_row_wise,
    likely_sm80_w4,
    likely_small_m,
    likely_w4,
    summation,
)
from .arguments import digest
from .builders import gemm, grouped_gemm, moe, quantise, rmsnorm
from .sources import built_by, made_of

_AOT = Path(__file__).resolve().parents[1]
_SAME_16_BIT = (("bf16", "bf16", "bf16"), ("f16", "f16", "f16"))
_SCALINGS = ("none", "tensor", "row_column", "block")
_OF_GROUPS = tuple(word for word in SCALINGS_OF_GROUPS if word not in FORMATS)
_OF_8_BITS = ("bf16", "e4m3", "bf16")
_OF_4_BITS = ("bf16", "e2m1", "bf16"), ("bf16", "u4", "bf16")
_IDS = ("i32",), ("i32", "i32")  # of experts, and with a map of them
_WEIGHTS: tuple[tuple[str, ...], ...] = (), ("f32",)  # of experts: none, or one for each of a token
_FROM_HOPPER = tuple(name for name, target in TARGETS.items() if target.compute_capability >= (9, 0))
_UNGATED = frozenset(word for word, of in EPILOGUES.items() if not of.gated)
_FP8 = (("e4m3", "e4m3", "bf16"), ("e4m3", "e4m3", "f16"), ("e4m3", "e4m3", "e4m3"))
_WHOLE_WARPS = tuple(range(32, 1025, 32))  # threads of a block
_LIKELY_GROUPED = Likely(
    lambda v: likely_grouped.unlikely(v.options, grouped_gemm.grouped_form(v)), options=likely_grouped.OPTIONS
)
_LIKELY_BY_MMA_SYNC = Likely(likely_sm80_w4.unlikely, likely_sm80_w4.hopeless, likely_sm80_w4.OPTIONS)


def _no_overlap(v: Variant) -> str | None:
    return "kernels overlap from Hopper on" if v.options["overlap"] and v.target not in _FROM_HOPPER else None


def _rule_of_small_m(v: Variant) -> str | None:
    if reason := small_m_choices.rule(v.options, gemm.small_m_form(v)):
        return reason
    fits = SCALINGS[v.scaling].fits(v.a, v.b)
    return None if fits else f"{v.scaling} does not scale A in {v.a} and B in {v.b}"


def _rule_of_rows(v: Variant, quantised: bool) -> str | None:
    if quantised != (v.scaling != "none"):
        return "rows that are quantised have scales, and no others have"
    if quantised and v.target not in _FROM_HOPPER:
        return f"rows are quantised on {', '.join(_FROM_HOPPER)}"
    return _no_overlap(v)


FAMILIES: dict[str, Family] = {
    # Few tokens on Hopper: B is read once, K split over a cluster. Right at any M up to 65535 tiles, which the grid
    # holds; meant for M <= 256.
    "sm90_small_m": Family(
        "gemm",
        ("sm_90a",),
        (*_SAME_16_BIT, ("bf16", "bf16", "e4m3"), *(("e4m3", "e4m3", d) for d in ("bf16", "f16", "e4m3")), _OF_8_BITS),
        small_m_choices.OPTIONS,
        _rule_of_small_m,
        likely=Likely(
            lambda v: likely_small_m.unlikely(v.options, gemm.small_m_form(v)),
            likely_small_m.hopeless,
            likely_small_m.OPTIONS,
        ),
        scalings=(*_SCALINGS, *QUANTISING.values()),
        b_majors=MAJORS,
        epilogues=frozenset(EPILOGUES),
        summation=summation.of_small_m,
        estimate_us=lambda v, *of: estimate_small_m.estimate_us(v, gemm.small_m_form, *of),
    ),
    # 4-bit weights, which registers feed to WGMMA; else as few tokens are.
    "sm90_w4": Family(
        "gemm",
        ("sm_90a",),
        _OF_4_BITS,
        w4_choices.OPTIONS,
        lambda v: w4_choices.rule(v.options, gemm.w4_form(v)),
        w4_choices.hopeless,
        Likely(
            lambda v: likely_w4.unlikely(v.options, gemm.w4_form(v)),
            likely_w4.hopeless,
            likely_w4.OPTIONS,
        ),
        batched=(False,),
        scalings=tuple(FORMATS),
        epilogues=_UNGATED,
        limit=lambda v, s: limit_of_weights(gemm.w4_form(v), s.n, s.k),
        summation=summation.by_itself,
        estimate_us=lambda v, *of: estimate_w4.estimate_us(v, gemm.w4_form, *of),
    ),
    # The same weights by what Ampere has and later GPUs have too. Legal on Hopper, where none is likely.
    "sm80_w4": Family(
        "gemm",
        ("sm_80", "sm_90a", "sm_120a"),
        _OF_4_BITS,
        sm80_w4_choices.OPTIONS,
        lambda v: sm80_w4_choices.rule(v.options, gemm.w4_form(v)),
        sm80_w4_choices.hopeless,
        _LIKELY_BY_MMA_SYNC,
        batched=(False,),
        scalings=tuple(FORMATS),
        epilogues=_UNGATED,
        limit=lambda v, s: limit_of_weights(gemm.w4_form(v), s.n, s.k),
        summation=summation.by_itself,
        estimate_us=lambda v, *of: estimate_sm80_w4.estimate_us(v, gemm.w4_form, *of),
    ),
    # More tokens on Hopper: warp-specialised and persistent, cooperative or pingpong.
    "sm90_persistent": Family(
        "gemm",
        ("sm_90a",),
        (*_SAME_16_BIT, *_FP8, ("bf16", "bf16", "e4m3"), ("f16", "f16", "e4m3")),
        persistent_choices.OPTIONS,
        lambda v: persistent_choices.rule(v.options, gemm.persistent_form(v)),
        persistent_choices.hopeless,
        Likely(
            lambda v: likely_persistent.unlikely(v.options, gemm.persistent_form(v)),
            likely_persistent.hopeless,
            likely_persistent.OPTIONS,
        ),
        scalings=_SCALINGS,
        b_majors=MAJORS,
        epilogues=frozenset(EPILOGUES),
        limit=lambda v, s: persistent_choices.limit(v.options, gemm.persistent_form(v), s.n),
        summation=summation.of_persistent,
        minor=frozenset(("nonpersistent",)),
        estimate_us=lambda v, *of: estimate_persistent.of_own(v, gemm.persistent_form, *of),
    ),
    # Rows by groups, each with a B of its own, on Hopper.
    "sm90_grouped": Family(
        "grouped_gemm",
        ("sm_90a",),
        (*_SAME_16_BIT, *_FP8),
        grouped_choices.OPTIONS,
        lambda v: grouped_choices.rule(v.options, grouped_gemm.grouped_form(v)),
        likely=_LIKELY_GROUPED,
        batched=(False,),
        scalings=_OF_GROUPS,
        epilogues=frozenset(EPILOGUES_OF_GROUPS),
        limit=lambda v, s: grouped_choices.limit(v.options, grouped_gemm.grouped_form(v), s.groups, s.n),
        estimate_us=lambda v, s, m: estimate_grouped.estimate_us(grouped_gemm.grouped_plan(v), s, m),
    ),
    # The same of weights in 4 bits, which registers feed to WGMMA as those of sm90_w4.
    "sm90_grouped_w4": Family(
        "grouped_gemm",
        ("sm_90a",),
        _OF_4_BITS,
        grouped_w4_choices.OPTIONS,
        lambda v: grouped_w4_choices.rule(v.options, grouped_gemm.grouped_w4_form(v)),
        likely=Likely(
            lambda v: likely_w4.unlikely_plan(grouped_gemm.grouped_w4_plan(v)),
            options=likely_w4.OPTIONS_OF_GROUPS,
        ),
        batched=(False,),
        scalings=tuple(FORMATS),
        epilogues=frozenset(EPILOGUES_OF_GROUPS),
        limit=lambda v, s: limit_of_groups(grouped_gemm.grouped_w4_form(v), s.groups, s.n, s.k),
        estimate_us=lambda v, s, m: estimate_grouped_w4.estimate_us(grouped_gemm.grouped_w4_plan(v), s, m),
    ),
    # The same by what Ampere has, whose tiles are those of sm80_w4. Legal on Hopper, where none is likely.
    "sm80_grouped_w4": Family(
        "grouped_gemm",
        ("sm_80", "sm_90a", "sm_120a"),
        _OF_4_BITS,
        sm80_grouped_w4_choices.OPTIONS,
        lambda v: sm80_grouped_w4_choices.rule(v.options, grouped_gemm.grouped_w4_form(v)),
        sm80_grouped_w4_choices.hopeless,
        _LIKELY_BY_MMA_SYNC,
        batched=(False,),
        scalings=tuple(FORMATS),
        epilogues=frozenset(EPILOGUES_OF_GROUPS),
        limit=lambda v, s: limit_of_groups(grouped_gemm.grouped_w4_form(v), s.groups, s.n, s.k),
        estimate_us=lambda v, s, m: estimate_sm80_grouped_w4.estimate_us(v, grouped_gemm.sm80_grouped_w4_plan, s, m),
    ),
    # Rows by groups where each group has room for as many, and counts on the device say how many are there.
    "sm90_masked": Family(
        "grouped_gemm",
        ("sm_90a",),
        (*_SAME_16_BIT, ("e4m3", "e4m3", "bf16"), ("e4m3", "e4m3", "f16")),
        grouped_choices.OPTIONS,
        lambda v: grouped_choices.rule(v.options, grouped_gemm.grouped_form(v)),
        likely=_LIKELY_GROUPED,
        batched=(False,),
        scalings=_OF_GROUPS,
        epilogues=frozenset(EPILOGUES_OF_GROUPS),
        limit=lambda v, s: grouped_choices.limit(v.options, grouped_gemm.grouped_form(v), s.groups, s.n),
        rows=grouped_gemm.ROWS["sm90_masked"],
        estimate_us=lambda v, s, m: estimate_grouped.estimate_us(grouped_gemm.grouped_plan(v), s, m),
    ),
    # The same of rows that indices on the device choose from A.
    "sm90_gathered": Family(
        "grouped_gemm",
        ("sm_90a",),
        _SAME_16_BIT,
        grouped_choices.OPTIONS_OF_GATHERED,
        lambda v: grouped_choices.rule(v.options, grouped_gemm.grouped_form(v)),
        likely=_LIKELY_GROUPED,
        batched=(False,),
        epilogues=frozenset(EPILOGUES_OF_GROUPS),
        limit=lambda v, s: grouped_choices.limit(v.options, grouped_gemm.grouped_form(v), s.groups, s.n),
        rows=grouped_gemm.ROWS["sm90_gathered"],
        estimate_us=lambda v, s, m: estimate_grouped.estimate_us(grouped_gemm.grouped_plan(v), s, m),
    ),
    # One block a row, `threads` threads a block; `overlap` with the kernels before and after, which Ampere cannot. With
    # and without a residual, and then the sum; y as x is, or in e4m3 with scales.
    "rmsnorm_row": Family(
        "rmsnorm",
        tuple(TARGETS),
        (
            *_SAME_16_BIT,
            *((x,) * 5 for x in ("bf16", "f16")),
            *((x, *added, x, NARROW, "f32", *added) for x in ("bf16", "f16") for added in ((), (x,))),
        ),
        {"threads": _WHOLE_WARPS, "overlap": (False, True)},
        lambda v: _rule_of_rows(v, NARROW in v.elements),
        likely=Likely(options=likely_row_wise.RMSNORM),
        batched=(False,),
        scalings=("none", *SCALINGS_OF_ROWS),
    ),
    # Rows in e4m3 with scales of their blocks of 128, or of whole rows, perhaps of groups that end somewhere; or what
    # gates make of them.
    "quantise": Family(
        "quantise",
        _FROM_HOPPER,
        tuple((x, *ends, "e4m3", "f32") for x in ("bf16", "f16") for ends in ((), ("i32",))),
        {"threads": _WHOLE_WARPS, "overlap": (False, True)},
        lambda v: "rows of groups have no gates" if v.epilogue != "none" and "i32" in v.elements else None,
        likely=Likely(options=likely_row_wise.QUANTISE),
        batched=(False,),
        scalings=SCALINGS_OF_ROWS,
        epilogues=frozenset(ACTIVATIONS),
    ),
    # Around grouped GEMMs of experts: a block for each token, which copies its row to where each expert reads it, or
    # quantises it to there, or adds up what the experts made. Ids, and what an expert map makes of them, are i32.
    "moe_permute": Family(
        "moe_permute",
        tuple(TARGETS),
        (
            *(("e4m3", *ids, "e4m3", "i32", "i32") for ids in _IDS),
            *((x, *ids, *w, x, "i32", "i32") for x in ("bf16", "f16") for ids in _IDS for w in _WEIGHTS),
            *((x, *ids, *w, "e4m3", "i32", "i32", "f32") for x in ("bf16", "f16") for ids in _IDS for w in _WEIGHTS),
        ),
        {"schedule": ("one_launch", "two_launches"), "threads": _WHOLE_WARPS, "overlap": (False, True)},
        lambda v: _rule_of_rows(v, v.elements[-1] == "f32"),
        likely=Likely(options=likely_row_wise.MOE_PERMUTE),
        batched=(False,),
        scalings=("none", *SCALINGS_OF_ROWS),
        limit=lambda v, s: moe_choices.limit(s.top_k, s.experts),
    ),
    "moe_combine": Family(
        "moe_combine",
        tuple(TARGETS),
        tuple((x, "i32", *w, x) for x in ("bf16", "f16") for w in _WEIGHTS),
        {"threads": _WHOLE_WARPS, "at_once": moe_choices.AT_ONCE, "overlap": (False, True)},
        lambda v: _no_overlap(v) or moe_choices.rule_of_combine(v.integer("threads"), v.integer("at_once")),
        likely=Likely(options=likely_row_wise.MOE_COMBINE),
        batched=(False,),
        limit=lambda v, s: moe_choices.limit(s.top_k),
    ),
}


class _Made(NamedTuple):
    """How variants of a family become kernels: what prepares one for `cute.compile`, and its kernel's module."""

    build: Callable[[Variant], Buildable]
    kernel: str


_MADE = {
    "moe_combine": _Made(moe.moe_combine, "moe_combine.py"),
    "moe_permute": _Made(moe.moe_permute, "moe_permute.py"),
    "quantise": _Made(quantise.quantise, "quantise.py"),
    "rmsnorm_row": _Made(rmsnorm.rmsnorm, "rmsnorm.py"),
    "sm80_grouped_w4": _Made(grouped_gemm.sm80_grouped_w4, "sm80/grouped_w4/kernel.py"),
    "sm80_w4": _Made(gemm.sm80_w4, "sm80/w4/kernel.py"),
    "sm90_gathered": _Made(grouped_gemm.grouped, "sm90/grouped/kernel.py"),
    "sm90_masked": _Made(grouped_gemm.grouped, "sm90/grouped/kernel.py"),
    "sm90_grouped": _Made(grouped_gemm.grouped, "sm90/grouped/kernel.py"),
    "sm90_grouped_w4": _Made(grouped_gemm.grouped_w4, "sm90/grouped_w4/kernel.py"),
    "sm90_persistent": _Made(gemm.persistent, "sm90/persistent/kernel.py"),
    "sm90_small_m": _Made(gemm.small_m, "sm90/small_m/kernel.py"),
    "sm90_w4": _Made(gemm.w4, "sm90/w4/kernel.py"),
}


class Own:
    """What `aot/kernels/` holds."""

    name = "own"
    families = FAMILIES

    def variants(self, target: str, signature: Signature) -> list[Variant]:
        """The variants that compute `signature` on `target` and are worth compiling."""
        return legal_variants(self.name, target, signature)

    def functions(self, target: str) -> list[Variant]:
        """The variants for `target` of operations besides GEMM."""
        return legal_functions(self.name, target)

    def source_digest(self, family: str) -> str:
        """SHA-256 over what builds a family's variants: the module that prepares them with what it imports, and the
        files that its kernel is made of."""
        if family not in _MADE:
            raise ProviderError(f"{self.name} has no family {family!r}; its families are {', '.join(_MADE)}")
        kernels, providers, made = _AOT / "kernels", _AOT / "providers", _MADE[family]
        builder = providers / "builders" / f"{made.build.__module__.rpartition('.')[2]}.py"
        files = built_by(builder, providers) + made_of(kernels / made.kernel, kernels)
        return digest((path.relative_to(_AOT.parent).as_posix(), path.read_bytes()) for path in files)

    def build(self, variant: Variant) -> Buildable:
        """Prepare `variant` for `cute.compile`.

        Raises:
            ProviderError: the variant is illegal.
        """
        if reason := illegal(variant):
            raise ProviderError(f"cannot build {variant.name()}: {reason}")
        return _MADE[variant.family].build(variant)
