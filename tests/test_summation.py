"""Which functions are said to give equal bits: no more than was measured, or than compiled code shows."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aot import build, selection
from aot.search.legal import legal_variants, of_name, summation
from aot.search.targets import TARGETS
from aot.search.variants import Variant
from runtime.gemm.signature import Signature

BITS = Path(__file__).parent.parent / "benchmarks" / "results" / "bits_h200.json"
PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 6144, 4096)
FAMILIES = "cutlass_operators.sm90_static_persistent", "own.sm90_persistent", "own.sm90_small_m"


def variants(of: Signature = PLAIN, target: str = "sm_90a") -> list[Variant]:
    return [v for provider in ("cutlass_operators", "own") for v in legal_variants(provider, target, of)]


def family(v: Variant) -> str:
    return f"{v.provider}.{v.family}"


@cache
def measured() -> list[tuple[int, list[list[Variant]]]]:
    """K, and the groups of functions that gave equal bits at every M, of each signature."""
    found, document = [], json.loads(BITS.read_text())
    functions = [of_name(f"{family}.{rest}") for family, names in document["functions"].items() for rest in names]
    for result in document["results"]:
        groups = [[v for place in group if (v := functions[place]) is not None] for group in result["groups"]]
        assert sum(map(len, groups)) == sum(map(len, result["groups"])), "all are variants"
        signature = Signature.of_key(result["signature"])
        assert signature is not None
        found.append((signature.k, groups))
    return found


def test_functions_of_one_word_were_measured_to_give_equal_bits() -> None:
    for k, groups in measured():
        places: dict[str, set[int]] = {}
        for place, group in enumerate(groups):
            for v in group:
                if (word := summation(v, k)) is not None:
                    places.setdefault(word, set()).add(place)
        assert all(len(at) == 1 for at in places.values())


def test_functions_that_gave_equal_bits_have_one_word_and_those_that_share_tiles_none() -> None:
    """So nothing that was measured is left out."""
    for k, groups in measured():
        for group in groups:
            words = {summation(v, k) for v in group}
            assert len(words) == 1
            assert (words == {None}) is all(v.options.get("stream_k", False) for v in group)


def test_each_way_to_cut_k_that_shares_a_word_was_measured_in_its_family() -> None:
    """A word that a function shares with another is of a family and a cut of which some were compared."""
    compared = {(family(v), v.options.get("split_k")) for _, groups in measured() for g in groups for v in g}
    words = {v: word for v in variants() if (word := summation(v, 4096)) is not None}
    several = Counter(words.values())
    shared = {(family(v), v.options.get("split_k")) for v, word in words.items() if several[word] > 1}
    assert shared <= compared
    assert {name for name, _ in shared} == set(FAMILIES)


def test_what_was_not_compared_is_like_nothing_else() -> None:
    others = [
        Signature("e4m3", "e4m3", "bf16", "f32", "none", 4096, 4096),
        Signature("e4m3", "e4m3", "bf16", "f32", "none", 4096, 4096, scaling="row_column"),
        Signature("bf16", "bf16", "bf16", "f32", "none", 4096, 4096, batch=4),
        Signature("bf16", "bf16", "bf16", "f32", "none", 4096, 4096, b_major="n"),
    ]
    for of in others:
        found = [v for v in variants(of) if not v.options.get("stream_k")]
        assert found
        assert [summation(v, of.k) for v in found] == [v.name() for v in found], of.key()
    for target in set(TARGETS) - {"sm_90a"}:
        found = variants(target=target)
        assert [summation(v, 4096) for v in found] == [v.name() for v in found], target
    eight = [v for v in variants() if v.options.get("split_k", 1) == 8]
    four = [v for v in variants() if v.options.get("split_k", 1) == 4 and v.family == "sm90_persistent"]
    assert eight
    assert [summation(v, 4096) for v in eight + four] == [v.name() for v in eight + four]
    assert summation(Variant("nowhere", "new", "sm_90a", (), ("bf16",) * 3, operation="gemm")) is None


@cache
def by_cut() -> dict[tuple[str, int, int], Variant]:
    """A variant for each family, number of slices, and columns of a stage."""
    found: dict[tuple[str, int, int], Variant] = {}
    for v in variants():
        if v.provider == "own" and not v.options.get("stream_k", False):
            few = v.family == "sm90_small_m" and v.integer("tile_m") <= 64
            found.setdefault((v.family, v.integer("split_k"), 128 if few else 64), v)
    return found


def slices(key: tuple[str, int, int], k: int) -> list[int]:
    """Where each slice of K but the first begins, as `small_m` has it, or `persistent`."""
    name, split, columns = key
    stages = -(-k // columns)
    if name == "sm90_small_m":
        return [stages * rank // split * columns for rank in range(1, split)]
    persistent = pytest.importorskip("aot.kernels.sm90.persistent.scheduler", reason="the DSL is not installed")
    plan = SimpleNamespace(split_k=split, k_tile_multiple=1)
    return [persistent.slice_of(plan, max(stages, split), rank).first * columns for rank in range(1, split)]


@pytest.mark.parametrize("k", [8, 64, 72, 128, 136, 192, 256, 4096, 4160, 8320, 11008, 14336, 14400])
def test_functions_of_one_word_cut_k_at_the_same_columns(k: int) -> None:
    for (a, v), (b, w) in combinations(by_cut().items(), 2):
        if summation(v, k) == summation(w, k):
            assert slices(a, k) == slices(b, k), (a, b)


def test_without_k_words_are_the_same_only_where_they_are_for_every_k() -> None:
    alike = [(v, w) for v, w in combinations(by_cut().values(), 2) if summation(v) == summation(w)]
    assert len(alike) == 3, "those that do not cut K"
    for v, w in alike:
        assert all(summation(v, k) == summation(w, k) for k in range(8, 3000, 8)), (v.name(), w.name())


# --- what is compiled ---

EPILOGUES = ("bias+gelu_tanh+residual", "bias+swiglu+residual", "silu+residual+scale")
QUICK = [("bias+swiglu+residual", 2)]  # the others take as long each
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", re.MULTILINE)
# What a value of D takes. Where a tile is takes a few more of these (the tile scheduler), fewer than there are values.
_OF_VALUES = "FADD", "FFMA", "FMUL", "MUFU.EX2", "MUFU.RCP", "FSEL", "FSETP.GT.AND", "FSETP.GE.AND"


def per_value(code: str) -> dict[str, int]:
    """How many instructions of each kind there are for each value that is converted, two at a time."""
    counts = Counter(_INSTRUCTION.findall(code))
    values = 2 * sum(count for name, count in counts.items() if name.startswith("F2FP"))
    assert values > 0
    return {name: counts[name] // values for name in _OF_VALUES}


@pytest.mark.parametrize(
    ("epilogue", "split"),
    [
        pytest.param(epilogue, split, marks=[pytest.mark.long] * ((epilogue, split) not in QUICK))
        for epilogue in EPILOGUES
        for split in (1, 2)
    ],
)
def test_epilogues_of_both_families_are_the_same_operations(epilogue: str, split: int, tmp_path: Path) -> None:
    """The compiler fuses a multiplication into an addition where it likes, which rounds once and not twice: it must do
    so alike. Gates, residuals and activations leave it the choice."""
    pytest.importorskip("cutlass")
    program = next(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"), None)
    if program is None:
        pytest.skip("nvdisasm is not installed")
    from aot.compile.lower import lower

    d = "e4m3" if "scale" in epilogue else "bf16"
    of = Signature("bf16", "bf16", d, "f32", epilogue, 6144, 4096)
    wanted: list[Mapping[str, Any]] = [
        {"tile_m": 16, "tile_n": 64, "ctas_per_sm": 1},
        {"tile_m": 128, "tile_n": 128, "ctas_per_sm": 1},
        {"schedule": "cooperative", "swap": False, "stream_k": False},
        {"schedule": "pingpong", "swap": False},
        {"swap": True, "stream_k": False},
    ]
    found: dict[str, dict[str, int]] = {}
    for options in wanted:
        alike = {"split_k": split, "overlap": "serial", **options}
        suited = [v for v in variants(of) if alike.items() <= v.options.items()]
        if suited:  # swapped gates and pingpong do not split K, and 8-bit output is not swapped
            variant = min(suited, key=lambda v: abs(v.integer("tile_m") * v.integer("tile_n") - 128**2))
            (tmp_path / "kernel.cubin").write_bytes(lower(variant).cubin)
            run = subprocess.run([program, "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True)
            found[variant.name()] = per_value(run.stdout)
    assert len({name.split(".")[1] for name in found}) == 2
    (one, *others) = found.values()
    assert one["FFMA"] > 0, "there is something to fuse"
    assert all(other == one for other in others), found


# --- what the builder makes of it ---


FEW_MANY_HALVES = ("sm90_small_m", 1, 128), ("sm90_small_m", 1, 64), ("sm90_small_m", 2, 64)


def compiled(
    ranked: tuple[tuple[int, tuple[Variant, ...]], ...],
) -> tuple[selection.Candidates, list[tuple[int, list[str]]]]:
    """Candidates, and their names where all of them compile."""
    return selection.Candidates(PLAIN, "sm_90a", ranked), [(m, [v.name() for v in of]) for m, of in ranked]


def test_a_build_names_functions_of_one_word_for_equal_bits() -> None:
    """The best at each M of those ranked, whatever is ranked before them."""
    streamed = next(v for v in variants() if v.options.get("stream_k", False))
    uncut, other, halves = (by_cut()[key] for key in FEW_MANY_HALVES)
    ranked = ((1, (streamed, uncut)), (64, (streamed, halves, other)), (512, (streamed, other, uncut)))
    row = build._row(*compiled(ranked))
    assert row.ranges == [(None, streamed.name())]
    assert row.invariant == [(1, uncut.name()), (None, other.name())]
    assert build._row(*compiled(((1, (streamed,)),))).invariant is None
