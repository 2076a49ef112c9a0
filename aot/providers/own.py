"""Kernels of this project, `aot/kernels/`.

Importing this imports no compiler; `build` does.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from runtime.gemm.signature import EPILOGUES, MAJORS, Signature
from runtime.grouped_gemm import EPILOGUES_OF_GROUPS, SCALINGS_OF_GROUPS
from runtime.numbers.dtypes import DTYPES
from runtime.program.arguments import (
    Argument,
    DeviceArgument,
    ScalarArgument,
    StreamArgument,
    Symbol,
    TensorArgument,
    WorkspaceArgument,
)

from ..kernels import moe_choices
from ..kernels.sm90.grouped import choices as grouped_choices
from ..kernels.sm90.grouped.plan import SCHEDULER_BYTES
from ..kernels.sm90.grouped.plan import plan_of as grouped_plan_of
from ..kernels.sm90.persistent import choices as persistent_choices
from ..kernels.sm90.persistent.form import Form as PersistentForm
from ..kernels.sm90.persistent.plan import Plan
from ..kernels.sm90.small_m import choices as small_m_choices
from ..kernels.sm90.small_m.form import Form as SmallMForm
from ..search.legal import illegal, legal_functions, legal_variants
from ..search.provider import Buildable, ProviderError
from ..search.targets import TARGETS
from ..search.variants import Family, Likely, Variant
from . import (
    estimate_grouped,
    estimate_persistent,
    estimate_small_m,
    likely_grouped,
    likely_persistent,
    likely_small_m,
    summation,
)
from .arguments import digest, gemm_tensors, grouped_tensors, stand_ins
from .sources import made_of

_AOT = Path(__file__).resolve().parents[1]
_BUILT_BY = "own.py", "arguments.py"
_SAME_16_BIT = (("bf16", "bf16", "bf16"), ("f16", "f16", "f16"))
_SCALINGS = ("none", "tensor", "row_column", "block")
_FP8 = (("e4m3", "e4m3", "bf16"), ("e4m3", "e4m3", "f16"), ("e4m3", "e4m3", "e4m3"))


def _persistent_form(v: Variant) -> PersistentForm:
    return PersistentForm(v.a, v.d, v.scaling, v.epilogue, v.b_major)


def _grouped_form(v: Variant) -> PersistentForm:
    masked, gathered = v.family == "sm90_masked", v.family == "sm90_gathered"
    words = v.a, v.d, v.scaling, v.epilogue
    return PersistentForm(*words, scheduler_bytes=SCHEDULER_BYTES, masked=masked, gathered=gathered)


@functools.cache  # tuning asks for estimates at thousands of M
def _grouped_plan(v: Variant) -> Plan:
    return grouped_plan_of(v.options, _grouped_form(v))


FAMILIES: dict[str, Family] = {
    # Few tokens on Hopper: B is read once, K split over a cluster. Right at any M up to 65535 tiles, which the grid
    # holds; meant for M <= 256.
    "sm90_small_m": Family(
        "gemm",
        ("sm_90a",),
        (*_SAME_16_BIT, ("bf16", "bf16", "e4m3"), *(("e4m3", "e4m3", d) for d in ("bf16", "f16", "e4m3"))),
        small_m_choices.OPTIONS,
        lambda v: small_m_choices.rule(v.options, _small_m_form(v)),
        likely=Likely(lambda v: likely_small_m.unlikely(v.options, _small_m_form(v)), likely_small_m.hopeless),
        scalings=_SCALINGS,
        b_majors=MAJORS,
        epilogues=frozenset(EPILOGUES),
        summation=summation.of_small_m,
        estimate_us=lambda v, *of: estimate_small_m.estimate_us(v, _small_m_form, *of),
    ),
    # More tokens on Hopper: warp-specialised and persistent, cooperative or pingpong.
    "sm90_persistent": Family(
        "gemm",
        ("sm_90a",),
        (*_SAME_16_BIT, *_FP8, ("bf16", "bf16", "e4m3"), ("f16", "f16", "e4m3")),
        persistent_choices.OPTIONS,
        lambda v: persistent_choices.rule(v.options, _persistent_form(v)),
        persistent_choices.hopeless,
        Likely(lambda v: likely_persistent.unlikely(v.options, _persistent_form(v)), likely_persistent.hopeless),
        scalings=_SCALINGS,
        b_majors=MAJORS,
        epilogues=frozenset(EPILOGUES),
        limit=lambda v, s: persistent_choices.limit(_persistent_form(v), s.n),
        summation=summation.of_persistent,
        estimate_us=lambda v, *of: estimate_persistent.of_own(v, _persistent_form, *of),
    ),
    # Rows by groups, each with a B of its own, on Hopper.
    "sm90_grouped": Family(
        "grouped_gemm",
        ("sm_90a",),
        (*_SAME_16_BIT, ("e4m3", "e4m3", "bf16"), ("e4m3", "e4m3", "f16")),
        grouped_choices.OPTIONS,
        lambda v: grouped_choices.rule(v.options, _grouped_form(v)),
        likely=Likely(lambda v: likely_grouped.unlikely(v.options, _grouped_form(v))),
        batched=(False,),
        scalings=SCALINGS_OF_GROUPS,
        epilogues=frozenset(EPILOGUES_OF_GROUPS),
        limit=lambda v, s: grouped_choices.limit(v.options, _grouped_form(v), s.groups, s.n),
        estimate_us=lambda v, s, m: estimate_grouped.estimate_us(_grouped_plan(v), s, m),
    ),
    # The same where each group has room for as many rows, and counts on the device say how many are there.
    "sm90_masked": Family(
        "grouped_gemm",
        ("sm_90a",),
        (*_SAME_16_BIT, ("e4m3", "e4m3", "bf16"), ("e4m3", "e4m3", "f16")),
        grouped_choices.OPTIONS,
        lambda v: grouped_choices.rule(v.options, _grouped_form(v)),
        likely=Likely(lambda v: likely_grouped.unlikely(v.options, _grouped_form(v))),
        batched=(False,),
        scalings=SCALINGS_OF_GROUPS,
        epilogues=frozenset(EPILOGUES_OF_GROUPS),
        limit=lambda v, s: grouped_choices.limit(v.options, _grouped_form(v), s.groups, s.n),
        rows="masked",
        estimate_us=lambda v, s, m: estimate_grouped.estimate_us(_grouped_plan(v), s, m),
    ),
    # The same of rows that indices on the device choose from A.
    "sm90_gathered": Family(
        "grouped_gemm",
        ("sm_90a",),
        _SAME_16_BIT,
        grouped_choices.OPTIONS_OF_GATHERED,
        lambda v: grouped_choices.rule(v.options, _grouped_form(v)),
        likely=Likely(lambda v: likely_grouped.unlikely(v.options, _grouped_form(v))),
        batched=(False,),
        epilogues=frozenset(EPILOGUES_OF_GROUPS),
        limit=lambda v, s: grouped_choices.limit(v.options, _grouped_form(v), s.groups, s.n),
        rows="gathered",
        estimate_us=lambda v, s, m: estimate_grouped.estimate_us(_grouped_plan(v), s, m),
    ),
    # One block a row, `threads` threads a block; `overlap` with the kernels before and after, which Ampere cannot.
    "rmsnorm_row": Family(
        "rmsnorm",
        tuple(TARGETS),
        _SAME_16_BIT,
        {"threads": (128, 256, 512), "overlap": (False, True)},
        lambda v: _no_overlap(v.target) if v.options["overlap"] else None,
        batched=(False,),
    ),
    # Around grouped GEMMs of experts: a block for each token, which copies its row to where each expert reads it, or
    # adds up what the experts made. Ids, and what an expert map makes of them, are i32.
    "moe_permute": Family(
        "moe_permute",
        tuple(TARGETS),
        tuple((x, *ids, x, "i32", "i32") for x in ("bf16", "f16", "e4m3") for ids in (("i32",), ("i32", "i32"))),
        {"schedule": ("one_launch", "two_launches"), "threads": (128, 256), "overlap": (False, True)},
        lambda v: _no_overlap(v.target) if v.options["overlap"] else None,
        batched=(False,),
        limit=lambda v, s: moe_choices.limit(s.top_k, s.experts),
    ),
    "moe_combine": Family(
        "moe_combine",
        tuple(TARGETS),
        tuple((x, "i32", "f32", x) for x in ("bf16", "f16")),
        {"threads": (128, 256), "at_once": (8, 4, 2), "overlap": (False, True)},
        lambda v: _no_overlap(v.target) if v.options["overlap"] else None,
        batched=(False,),
        limit=lambda v, s: moe_choices.limit(s.top_k),
    ),
}


def _no_overlap(name: str) -> str | None:
    return None if TARGETS[name].compute_capability >= (9, 0) else "kernels overlap from Hopper on"


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
        """SHA-256 over what builds a family's variants: this provider, and the files that its kernel is made of."""
        if family not in _KERNELS:
            raise ProviderError(f"{self.name} has no family {family!r}; its families are {', '.join(_KERNELS)}")
        kernels = _AOT / "kernels"
        files = [_AOT / "providers" / name for name in _BUILT_BY] + made_of(kernels / _KERNELS[family], kernels)
        return digest((path.relative_to(_AOT).as_posix(), path.read_bytes()) for path in files)

    def build(self, variant: Variant) -> Buildable:
        """Prepare `variant` for `cute.compile`.

        Raises:
            ProviderError: the variant is illegal.
        """
        if reason := illegal(variant):
            raise ProviderError(f"cannot build {variant.name()}: {reason}")
        return _BUILDERS[variant.family](variant)


def _small_m(variant: Variant) -> Buildable:
    """A GEMM for few tokens, over the tensors of its form and a stream."""
    from ..kernels.sm90.small_m.kernel import SmallM

    symbols, tree = gemm_tensors(variant)
    tree.append(StreamArgument("stream"))
    arguments = _gemm_arguments(tree, symbols)
    for persistent in ("max_active_clusters", "counters", "partials"):
        del arguments[_GEMM_ARGUMENTS.index(persistent)]
    return Buildable(SmallM(variant.options, _small_m_form(variant)), arguments, tree, symbols)


def _small_m_form(variant: Variant) -> SmallMForm:
    """What of a variant, besides its choices, the few-token GEMM depends on."""
    return SmallMForm(DTYPES[variant.a].bytes, variant.scaling, variant.b_major, variant.epilogue, variant.batched)


def _persistent(variant: Variant) -> Buildable:
    """A GEMM over all operands that its form has, the number of clusters that the device holds, and a stream."""
    from ..kernels.sm90.persistent.kernel import Persistent

    plan = Plan.of(variant.options, _persistent_form(variant))
    symbols, tree = gemm_tensors(variant)
    clusters = DeviceArgument("max_active_clusters", "max_active_clusters", plan.cluster)
    if plan.stream_k:
        tree.append(WorkspaceArgument("partials", plan.partials_bytes, each=clusters.name, zeroed=False))
        tree.append(WorkspaceArgument("counters", plan.counters_bytes, each=clusters.name, zeroed=True))
    tree += [clusters, StreamArgument("stream")]
    return Buildable(Persistent(plan), _gemm_arguments(tree, symbols), tree, symbols)


def _grouped(variant: Variant) -> Buildable:
    """A grouped GEMM over the operands that its form has, the number of clusters that the device holds, and a
    stream."""
    from ..kernels.sm90.grouped.kernel import Grouped

    plan = _grouped_plan(variant)
    n_multiple = 2 * plan.gates_in_turn if plan.form.gated else 1
    symbols, tree = grouped_tensors(variant, FAMILIES[variant.family].rows, n_multiple)
    tree += [DeviceArgument("max_active_clusters", "max_active_clusters", plan.cluster), StreamArgument("stream")]
    names = tuple("counts" if name == "ends" and plan.form.masked else name for name in _GROUPED_ARGUMENTS)
    return Buildable(Grouped(plan), _all_arguments(tree, symbols, names), tree, symbols)


def _gemm_arguments(tree: list[Argument], symbols: dict[str, Symbol]) -> list[Any]:
    return _all_arguments(tree, symbols, _GEMM_ARGUMENTS)


def _all_arguments(tree: list[Argument], symbols: dict[str, Symbol], names: tuple[str, ...]) -> list[Any]:
    """Stand-ins for a kernel's whole list of arguments, None for each that `tree` does without."""
    found = dict(zip((argument.name for argument in tree), stand_ins(tree, symbols), strict=True))
    return [found.get(name) for name in names]


def _rmsnorm(variant: Variant) -> Buildable:
    """RMSNorm over x (M, N), weight (N), y (M, N), an f32 eps and a stream; rows of x and y may lie apart."""
    from ..kernels.rmsnorm import RmsNorm

    symbols = {
        "m": Symbol(32, 1),
        "n": Symbol(32, 8),
        "ldx": Symbol(64, 8),
        "ldy": Symbol(64, 8),
    }
    x, weight, y = variant.elements
    tree: list[Argument] = [
        TensorArgument("x", x, ("m", "n"), ("ldx", 1), 16),
        TensorArgument("weight", weight, ("n",), (1,), 16),
        TensorArgument("y", y, ("m", "n"), ("ldy", 1), 16),
        ScalarArgument("eps", "f32"),
        StreamArgument("stream"),
    ]
    return Buildable(
        RmsNorm(variant.integer("threads"), bool(variant.options["overlap"])), stand_ins(tree, symbols), tree, symbols
    )


def _moe_permute(variant: Variant) -> Buildable:
    """Over x (m, k), ids (m, top_k), perhaps an expert map, rows (r, k), ends, positions and a stream."""
    from ..kernels.moe_permute import MoePermute

    mapped, pieces = len(variant.elements) == 6, DTYPES[variant.a].filling(16)
    symbols = {
        **dict.fromkeys(("m", "top_k", "r", "experts", *(("global_experts",) if mapped else ())), Symbol(32, 1)),
        "k": Symbol(32, pieces),
        **dict.fromkeys(("ldx", "ldr"), Symbol(64, pieces)),
    }
    tree: list[Argument] = [
        TensorArgument("x", variant.a, ("m", "k"), ("ldx", 1), 16),
        TensorArgument("ids", "i32", ("m", "top_k"), ("top_k", 1), 4),
        *([TensorArgument("expert_map", "i32", ("global_experts",), (1,), 4)] if mapped else []),
        TensorArgument("rows", variant.a, ("r", "k"), ("ldr", 1), 16),
        TensorArgument("ends", "i32", ("experts",), (1,), 4),
        TensorArgument("positions", "i32", ("m", "top_k"), ("top_k", 1), 4),
        StreamArgument("stream"),
    ]
    arguments = stand_ins(tree, symbols)
    if not mapped:
        arguments.insert(2, None)
    made = MoePermute(str(variant.options["schedule"]), variant.integer("threads"), bool(variant.options["overlap"]))
    return Buildable(made, arguments, tree, symbols)


def _moe_combine(variant: Variant) -> Buildable:
    """Over rows (r, n), positions and weights (m, top_k), y (m, n) and a stream; rows of rows and y may lie apart."""
    from ..kernels.moe_combine import MoeCombine

    symbols = {
        **dict.fromkeys(("m", "r", "top_k"), Symbol(32, 1)),
        "n": Symbol(32, 8),
        **dict.fromkeys(("ldr", "ldy"), Symbol(64, 8)),
    }
    rows, *_, y = variant.elements
    tree: list[Argument] = [
        TensorArgument("rows", rows, ("r", "n"), ("ldr", 1), 16),
        TensorArgument("positions", "i32", ("m", "top_k"), ("top_k", 1), 4),
        TensorArgument("weights", "f32", ("m", "top_k"), ("top_k", 1), 4),
        TensorArgument("y", y, ("m", "n"), ("ldy", 1), 16),
        StreamArgument("stream"),
    ]
    made = MoeCombine(variant.integer("threads"), variant.integer("at_once"), bool(variant.options["overlap"]))
    return Buildable(made, stand_ins(tree, symbols), tree, symbols)


# In the order that kernels take them.
_GEMM_ARGUMENTS = (
    *("a", "b", "d", "scale_a", "scale_b", "bias", "residual", "scale_d"),
    *("partials", "counters", "max_active_clusters", "stream"),
)
_GROUPED_ARGUMENTS = ("a", "b", "indices", "ends", "d", "scale_a", "scale_b", "bias", "max_active_clusters", "stream")
_BUILDERS = {
    "moe_combine": _moe_combine,
    "moe_permute": _moe_permute,
    "rmsnorm_row": _rmsnorm,
    "sm90_gathered": _grouped,
    "sm90_masked": _grouped,
    "sm90_grouped": _grouped,
    "sm90_persistent": _persistent,
    "sm90_small_m": _small_m,
}
_KERNELS = {
    "moe_combine": "moe_combine.py",
    "moe_permute": "moe_permute.py",
    "rmsnorm_row": "rmsnorm.py",
    "sm90_gathered": "sm90/grouped/kernel.py",
    "sm90_masked": "sm90/grouped/kernel.py",
    "sm90_grouped": "sm90/grouped/kernel.py",
    "sm90_persistent": "sm90/persistent/kernel.py",
    "sm90_small_m": "sm90/small_m/kernel.py",
}
