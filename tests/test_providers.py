"""Providers: what they offer is what is installed, and builds with no GPU.

A process compiles for one architecture, so compilations run in processes of their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aot.compile import compiler
from aot.compile.toolchain import Toolchain
from aot.problem.manifest import Gemm, Manifest
from aot.providers import cutlass_operators, own
from aot.providers.arguments import digest
from aot.providers.operator_api import dense
from aot.providers.operator_api.operator import found_design
from aot.providers.sources import made_of
from aot.search.legal import illegal, legal_functions, legal_variants, of_name, unsuited
from aot.search.provider import PROVIDERS, ProviderError, provider
from aot.search.targets import TARGETS
from aot.search.variants import Family, Variant, choices
from aot.selection import select
from runtime.errors import AotError
from runtime.gemm.signature import Signature

from .compilers import needed
from .shared import made_once

ROOT = Path(__file__).parents[1]
TYPES = {"bf16": ("bf16",) * 3, "f16": ("f16",) * 3, "e4m3": ("e4m3", "e4m3", "bf16")}


def signature(types: str = "bf16", batch: int = 1) -> Signature:
    return Signature(*TYPES[types], "f32", "none", 4096, 4096, batch)


def variant(target: str, family: str, types: str = "bf16", batch: int = 1, **options: Any) -> Variant:
    for v in (v for name in PROVIDERS for v in provider(name).variants(target, signature(types, batch))):
        if v.family == family and options.items() <= v.options.items():
            return v
    raise AssertionError("no such variant")


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("types", list(TYPES))
def test_table_of_families_agrees_with_the_operator_api(target: str, types: str) -> None:
    ops = pytest.importorskip("cutlass.operators")
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = provider("cutlass_operators").variants(target, signature(types))
    ours = [dense.design(v) for v in given]
    families = {name for name, _ in dense.OPERATORS.values()}
    if target not in ("sm_80", "sm_120a"):
        families.remove("Sm80TensorOpGemmOperator")  # it runs there, far below what the GPU can do
    with FakeTensorMode():
        any_variant = Variant("", "", target, (), TYPES[types], operation="gemm")
        found = ops.get_operators(dense.arguments(torch, any_variant), target_sm=target.removeprefix("sm_"))
    theirs = [found_design(o.metadata) for o in found]
    # Its kernel cannot compile a tile_n of 64 for row-major D.
    theirs = [o for o in theirs if o[0] in families and (o[0] != "Sm80TensorOpGemmOperator" or o[1][1] != 64)]
    assert len(set(ours)) == len(ours)
    assert sorted(map(str, ours)) == sorted(map(str, theirs))


COMPILE = """
import hashlib, json, os, sys
target, variants = sys.argv[1], json.load(sys.stdin)
os.environ["CUTE_DSL_ARCH"] = target
from aot.search.provider import provider
from aot.search.variants import Variant
from runtime.program import arguments
import cutlass.utils
from cutlass import cute

def no_driver(*_):
    raise AssertionError("the device was asked")

cutlass.utils.HardwareInfo = no_driver
results = []
for obj in variants:
    variant = Variant.from_json(obj)
    built = provider(variant.provider).build(variant)
    options = cute.compile[cute.GPUArch(target), cute.KeepCUBIN(True)]
    compiled = options(built.function, *built.arguments)
    cubin = hashlib.sha256(compiled.__cubin__).hexdigest()
    tree, symbols = arguments.to_json(built.tree), arguments.symbols_to_json(built.symbols)
    results.append([[a.name for a in built.tree], tree, symbols, len(compiled.kernel_info), cubin])
assert cutlass.utils.HardwareInfo is no_driver
print("RESULT" + json.dumps(results))
"""


def compile_all(variants: list[Variant]) -> list[Any]:
    """Argument names, tree, symbols, number of kernels and cubin digest of each, compiled in one fresh process."""
    # The DSL leaves cubins in the directory that it was imported in.
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [sys.executable, "-c", COMPILE, variants[0].target],
            input=json.dumps([v.to_json() for v in variants]),
            capture_output=True,
            text=True,
            cwd=scratch,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[Any] = json.loads(done.stdout.split("RESULT")[1])
    return results


SMALL_M = variant("sm_90a", "sm90_small_m", tile_m=32, tile_n=48, split_k=4)
BATCHED = variant("sm_90a", "sm90_static_persistent", "bf16", 3)
PREFERRED = variant("sm_100a", "sm100_preferred_cluster", scheduler="static", cluster_m=4, cluster_n=2)
CASES = {
    "sm_80": [
        variant("sm_80", "sm80_tensorop", tile_m=64),
        variant("sm_80", "sm80_tensorop", tile_m=128),
        variant("sm_80", "sm80_tensorop", "f16", 3, tile_m=64),
    ],
    "sm_90a": [
        *(
            dataclasses.replace(SMALL_M, config=choices(**{**SMALL_M.options, "overlap": overlap}))
            for overlap in ("launch", "weights")
        ),
        BATCHED,
        variant("sm_90a", "sm90_static_persistent", tile_m=128, tile_n=256, cluster_m=2),
        variant("sm_90a", "sm90_static_persistent", "f16", tile_m=64, tile_n=64, cluster_m=1, cluster_n=1),
        variant("sm_90a", "sm90_static_persistent", "e4m3", 4, tile_m=128, tile_n=128, cluster_m=2, cluster_n=2),
        variant("sm_90a", "sm90_small_m", tile_m=8, tile_n=96, split_k=8),
        variant("sm_90a", "sm90_small_m", "f16", tile_m=64, tile_n=128, split_k=1, cluster_n=4),
        variant("sm_90a", "sm90_small_m", tile_m=128, tile_n=104, split_k=2, cluster_n=4),
    ],
    "sm_100a": [
        variant("sm_100a", "sm100_persistent", tile_m=256, tile_n=256, scheduler="clc", two_cta=True),
        variant("sm_100a", "sm100_persistent", "e4m3", 2, scheduler="static", cluster_m=16),
        PREFERRED,
        variant("sm_100a", "sm100_preferred_cluster", "f16", scheduler="static", cluster_m=4, cluster_n=4),
        variant("sm_100a", "sm100_tgv", tile_m=8),
    ],
    "sm_103a": [
        variant("sm_103a", "sm100_preferred_cluster", "bf16", 2, scheduler="clc", two_cta=True),
        variant("sm_103a", "sm100_tgv", "f16", 2, tile_m=32),
    ],
    "sm_107a": [
        variant("sm_107a", "sm107_dense", "e4m3", tile_m=512, two_cta=True, b_reuse=True),
        variant("sm_107a", "sm107_dense", "e4m3", 2, tile_m=128),
    ],
    "sm_110a": [variant("sm_110a", "sm100_persistent", tile_m=256, tile_n=256, scheduler="clc", two_cta=True)],
    "sm_120a": [variant("sm_120a", "sm80_tensorop", tile_m=64)],
}


@pytest.fixture
def compiled(request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """What `compile_all` gives for a target's cases and then for a function of each operation that is no GEMM; compiled
    once for all tests."""
    pytest.importorskip("cutlass")

    def of(target: str) -> list[Any]:
        def make(folder: Path) -> None:
            one_of_each = {v.operation: v for v in provider("own").functions(target)}
            results = compile_all([*CASES[target], *one_of_each.values()])
            (folder / "results.json").write_text(json.dumps(results))

        results: list[Any] = json.loads((made_once(request, target, make) / "results.json").read_text())
        return results

    return of


# Of the other targets, all families are those of one of these, or sm_80's own, which the oracle compiles.
QUICK = "sm_90a", "sm_100a"


@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=[pytest.mark.long] * (t not in QUICK) + needed(t)) for t in TARGETS]
)
def test_variants_of_every_family_compile_with_no_device(compiled: Callable[[str], list[Any]], target: str) -> None:
    results = compiled(target)
    cubins = [cubin for *_, cubin in results]
    assert len(set(cubins)) == len(cubins), "two variants compiled to the same kernel"
    for names, tree, symbols, kernels, _ in results[: len(CASES[target])]:
        assert names[:3] == ["a", "b", "d"]
        assert names[-1] == "stream"
        assert all(n.startswith("max_active_clusters_") for n in names[3:-1])
        assert kernels == 1
        assert_consistent(tree, symbols)
    for names, tree, symbols, kernels, _ in results[len(CASES[target]) :]:
        assert names[-1] == "stream"
        assert kernels == 1 + ("ids" in names), "a permutation for many tokens ranks, and then copies"
        assert_consistent(tree, symbols)


def assert_consistent(tree: list[dict[str, Any]], symbols: dict[str, dict[str, int]]) -> None:
    used = {e for node in tree for part in ("shape", "strides") for e in node.get(part, []) if isinstance(e, str)}
    assert used == set(symbols)
    for node in tree:
        if node["kind"] == "tensor":
            assert len(node["shape"]) == len(node["strides"])
            assert node["strides"][-1] == 1
            for stride in set(node["strides"][:-1]) - set(node["shape"]):  # those are of contiguous rows
                assert symbols[stride]["width"] == 64
                assert symbols[stride]["divisibility"] > 1


def test_preferred_clusters_ask_for_both_counts(compiled: Callable[[str], list[Any]]) -> None:
    names, tree, *_ = compiled("sm_100a")[CASES["sm_100a"].index(PREFERRED)]
    assert names == ["a", "b", "d", "max_active_clusters_8", "max_active_clusters_2", "stream"]
    devices = [n for n in tree if n["kind"] == "device"]
    assert [(n["property"], n["cluster_size"]) for n in devices] == [
        ("max_active_clusters", 8),
        ("max_active_clusters", 2),
    ]


def test_batched_tensors_have_batch_strides_of_their_own(compiled: Callable[[str], list[Any]]) -> None:
    _, tree, symbols, *_ = compiled("sm_90a")[CASES["sm_90a"].index(BATCHED)]
    a, b, d = tree[:3]
    assert (a["shape"], a["strides"]) == (["l", "m", "k"], ["batch_stride_a", "lda", 1])
    assert (b["shape"], b["strides"]) == (["l", "n", "k"], ["batch_stride_b", "ldb", 1])
    assert (d["shape"], d["strides"]) == (["l", "m", "n"], ["batch_stride_d", "ldd", 1])
    assert symbols["k"] == {"width": 32, "divisibility": 8}
    assert symbols["lda"] == {"width": 64, "divisibility": 8}


def test_build_refuses_an_illegal_variant() -> None:
    wrong = dataclasses.replace(variant("sm_90a", "sm90_static_persistent"), target="sm_80")
    assert illegal(wrong)
    with pytest.raises(ProviderError, match="not made for sm_80"):
        provider("cutlass_operators").build(wrong)


def test_unknown_provider_lists_the_known_ones() -> None:
    with pytest.raises(AotError, match="cutlass_operators"):
        provider("nobody")


@pytest.mark.parametrize("name", list(PROVIDERS))
def test_source_digests_are_the_same_in_another_process_and_directory(name: str, tmp_path: Path) -> None:
    families = list(provider(name).families)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from aot.search.provider import provider; "
        f"print(*(provider({name!r}).source_digest(family) for family in {families!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.split() == [provider(name).source_digest(family) for family in families]


@pytest.mark.parametrize("name", list(PROVIDERS))
def test_a_family_that_there_is_not_has_no_source_digest(name: str) -> None:
    with pytest.raises(ProviderError, match=f"{name} has no family 'sm90_magic'; its families are "):
        provider(name).source_digest("sm90_magic")


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `aot/` whose files are the sources of our provider."""
    shutil.copytree(ROOT / "aot", tmp_path / "aot", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(own, "_AOT", tmp_path / "aot")
    return tmp_path / "aot"


def _changed(*files: Path, of: str = "own") -> set[str]:
    """The families of a provider that are compiled anew when these files change."""
    ours = provider(of)
    before = {family: ours.source_digest(family) for family in ours.families}
    for file in files:
        file.write_bytes(file.read_bytes() + b"\n")
    return {family for family, digest in before.items() if digest != ours.source_digest(family)}


OF_GEMMS = {name for name in own.FAMILIES if name.startswith(("sm80_", "sm90_"))}


@pytest.mark.parametrize(
    ("pattern", "families"),
    [
        ("sm90/grouped/*.py", {"sm90_gathered", "sm90_grouped", "sm90_masked"}),
        ("sm90/persistent/*.py", {"sm90_gathered", "sm90_grouped", "sm90_masked", "sm90_persistent"}),
        ("groups.py", {"sm80_grouped_w4", "sm90_gathered", "sm90_grouped", "sm90_grouped_w4", "sm90_masked"}),
        ("sm90/grouped_w4/*.py", {"sm90_grouped_w4"}),
        ("sm90/small_m/*.py", {"sm90_grouped_w4", "sm90_small_m", "sm90_w4"}),
        ("sm90/w4/*.py", {"sm90_grouped_w4", "sm90_w4"}),
        ("sm80/w4/*.py", {"sm80_grouped_w4", "sm80_w4"}),
        ("sm80/grouped_w4/*.py", {"sm80_grouped_w4"}),
        ("w4/*.py", {"sm80_grouped_w4", "sm80_w4", "sm90_grouped_w4", "sm90_w4"}),
        ("finish.py", {"sm80_grouped_w4", "sm80_w4", "sm90_grouped_w4", "sm90_small_m", "sm90_w4"}),
        ("activations.py", {*OF_GEMMS, "quantise", "moe_permute"}),
        ("sm90/h200.py", {"sm90_gathered", "sm90_grouped", "sm90_masked", "sm90_persistent"}),
        ("sm90/*/choices.py", set()),
    ],
)
def test_kernels_that_change_are_compiled_anew_and_no_others(copied: Path, pattern: str, families: set[str]) -> None:
    """Of those families that there are: an operation may be taken out, with its own."""
    assert _changed(*(copied / "kernels").glob(pattern)) == families & set(own.FAMILIES)


@pytest.mark.parametrize(
    ("pattern", "operations"),
    [
        ("arguments.py", {family.operation for family in own.FAMILIES.values()}),
        ("gemm_arguments.py", {"gemm"}),
        ("builders/gemm.py", {"gemm"}),
        ("grouped_arguments.py", {"grouped_gemm"}),
        ("builders/grouped_gemm.py", {"grouped_gemm"}),
        ("builders/moe.py", {"moe_permute", "moe_combine"}),
        ("builders/quantise.py", {"moe_permute", "moe_combine", "quantise", "rmsnorm"}),
        ("builders/__init__.py", set()),
    ],
)
def test_what_prepares_one_operations_kernels_compiles_no_others_anew(
    copied: Path, pattern: str, operations: set[str]
) -> None:
    assert _changed(*(copied / "providers").glob(pattern)) == {
        name for name, family in own.FAMILIES.items() if family.operation in operations
    }


@pytest.mark.parametrize("name", ["own", "cutlass_operators"])
def test_what_says_which_operands_an_operation_has_compiles_its_kernels_anew(
    copied: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(cutlass_operators, "_PROVIDERS", copied / "providers")
    described = copied.parent / "runtime" / "grouped_gemm.py"
    described.parent.mkdir()
    described.write_text("")
    grouped = {name for name, family in provider(name).families.items() if family.operation == "grouped_gemm"}
    assert _changed(described, of=name) == grouped


BLOCK_SCALED = {"sm100_block_scaled", "sm107_block_scaled"}
OTHERWISE_WRAPPED = {*BLOCK_SCALED, "sm100_grouped", "sm100_mixed_input"}


@pytest.mark.parametrize(
    ("pattern", "families"),
    [
        ("operator_api/dense.py", set(cutlass_operators.FAMILIES) - OTHERWISE_WRAPPED),
        ("operator_api/mixed_input.py", {"sm100_mixed_input"}),
        ("operator_api/fused.py", {"sm100_static_persistent_efc"}),
        ("operator_api/block_scaled.py", BLOCK_SCALED),
        ("operator_api/tensor_scale.py", BLOCK_SCALED),
        ("operator_api/grouped.py", {"sm100_grouped"} & set(cutlass_operators.FAMILIES)),
        ("operator_api/operator.py", set(cutlass_operators.FAMILIES)),
        ("arguments.py", set(cutlass_operators.FAMILIES)),
        ("gemm_arguments.py", set(cutlass_operators.FAMILIES) - {"sm100_grouped"}),
        ("grouped_arguments.py", {"sm100_grouped"} & set(cutlass_operators.FAMILIES)),
        ("cutlass_operators.py", set()),
    ],
)
def test_operators_are_compiled_anew_where_what_wraps_them_changes(
    copied: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, families: set[str]
) -> None:
    monkeypatch.setattr(cutlass_operators, "_PROVIDERS", copied / "providers")
    assert _changed(*(copied / "providers").glob(pattern), of="cutlass_operators") == families


def test_every_family_of_operators_is_wrapped_by_one_module() -> None:
    assert set(cutlass_operators._BUILT_BY) == set(cutlass_operators.FAMILIES)


def test_every_file_of_a_kernel_but_which_choices_are_legal_is_in_the_digest_of_a_family() -> None:
    """Other rules make no other code of a variant that stays legal."""
    kernels = ROOT / "aot/kernels"
    found = {file for made in own._MADE.values() for file in made_of(kernels / made.kernel, kernels)}
    assert found == set(kernels.rglob("*.py")) - set(kernels.rglob("*choices.py"))


def test_an_estimate_or_an_opinion_that_changes_compiles_nothing_anew(copied: Path) -> None:
    others = [path for path in (copied / "providers").glob("*.py") if not path.name.endswith("arguments.py")]
    assert {"likely_persistent.py", "estimate_small_m.py", "summation.py", "own.py"} < {path.name for path in others}
    assert _changed(*others, *(copied / "search").glob("*.py")) == set()


def test_a_file_that_is_imported_within_a_function_or_by_its_whole_name_belongs_to_a_kernel(copied: Path) -> None:
    lazily, wholly, last = (copied / "kernels" / f"{name}.py" for name in ("lazily", "wholly", "last"))
    lazily.write_text("import aot.kernels.wholly")
    wholly.write_text("from . import last")
    last.write_text("")
    kernel = copied / "kernels/sm90/small_m/weight_tiles.py"
    kernel.write_text(kernel.read_text() + "\n\ndef late():\n    from ...lazily import anything\n")
    assert _changed(lazily) == _changed(wholly) == _changed(last) == {"sm90_grouped_w4", "sm90_small_m", "sm90_w4"}


def test_the_cache_key_of_a_variant_follows_its_own_familys_sources(copied: Path) -> None:
    ours = [*provider("own").variants("sm_90a", signature()), *provider("own").functions("sm_90a")]
    one_of_each = list({v.family: v for v in ours}.values())

    def keys() -> dict[str, str]:
        key = compiler._key_maker(Toolchain({"anything": "1"}, {"nvidia-cutlass-dsl": "4.8.1 ab"}), {})
        return {v.family: key(v) for v in one_of_each}

    before = keys()
    (copied / "kernels/sm90/persistent/gpc.py").write_text("")
    after = keys()
    assert {family for family in before if before[family] != after[family]} == {"sm90_persistent"}


def test_digest_depends_on_every_name_and_byte_and_not_on_order() -> None:
    items = [("a", b"12"), ("b", b"3")]
    assert digest(items) == digest(items[::-1])
    others = [[("a", b"12")], [("a", b"12"), ("b", b"4")], [("a", b"1"), ("2b", b"3")], [("ab", b"12"), ("", b"3")]]
    assert digest(items) not in map(digest, others)


def _made_up_rule(v: Variant) -> str | None:
    return "split_k needs tile_n 64" if v.integer("split_k") > 1 and v.integer("tile_n") > 64 else None


def _made_up_limit(v: Variant, s: Signature) -> str | None:
    return "K is too short to split" if s.k < 128 * v.integer("split_k") else None


MADE_UP: dict[str, Family] = {
    "swap_ab": Family(
        "gemm",
        ("sm_90a",),
        (TYPES["bf16"],),
        {"tile_n": (64, 128), "tile_m": (8, 16), "split_k": (1, 2)},
        _made_up_rule,
        limit=_made_up_limit,
        access_bytes=4,
        traits={"tile_k": 128},
    ),
    "one_size": Family("gemm", ("sm_80", "sm_90a"), (TYPES["bf16"],), {"warps": (4, 8)}, batched=(False,)),
    "integers": Family("gemm", ("sm_90a",), (("i8", "i8", "i32"),), {"tile_m": (64,)}, accumulator="i32"),
    "softmax": Family("softmax", ("sm_90a",), (("f32", "f32", "f32"),), {"threads": (128,)}, batched=(True,)),
}


class MadeUp:
    """All that a new provider has to say before it builds anything."""

    name = "made_up"
    families = MADE_UP

    def variants(self, target: str, signature: Signature) -> list[Variant]:
        return legal_variants(self.name, target, signature)

    def functions(self, target: str) -> list[Variant]:
        return legal_functions(self.name, target)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """A new provider: one module and one line of registration."""
    module = ModuleType("aot.providers.made_up")
    module.MadeUp = MadeUp  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(PROVIDERS, "made_up", f"{module.__name__}:MadeUp")
    return MadeUp()


def test_a_new_provider_has_its_legal_variants_enumerated_and_named(made_up: MadeUp) -> None:
    gemms = provider("made_up").variants("sm_90a", signature())
    functions = provider("made_up").functions("sm_90a")
    assert [v.name().removeprefix("made_up.") for v in gemms + functions] == [
        "swap_ab.bf16_bf16_bf16_f32.tile8x64.split_k1.sm_90a",
        "swap_ab.bf16_bf16_bf16_f32.tile8x64.split_k2.sm_90a",
        "swap_ab.bf16_bf16_bf16_f32.tile16x64.split_k1.sm_90a",
        "swap_ab.bf16_bf16_bf16_f32.tile16x64.split_k2.sm_90a",
        "swap_ab.bf16_bf16_bf16_f32.tile8x128.split_k1.sm_90a",
        "swap_ab.bf16_bf16_bf16_f32.tile16x128.split_k1.sm_90a",
        "one_size.bf16_bf16_bf16_f32.warps4.sm_90a",
        "one_size.bf16_bf16_bf16_f32.warps8.sm_90a",
        "softmax.f32_f32_f32_f32.batched.threads128.sm_90a",
    ]
    assert [illegal(v) for v in gemms + functions] == [None] * 9
    assert [Variant.from_json(json.loads(v.key())) for v in gemms + functions] == gemms + functions
    assert {v.family for v in made_up.variants("sm_90a", signature(batch=3))} == {"swap_ab"}
    integers = Signature("i8", "i8", "i32", "i32", "none", 4096, 4096)
    assert [(v.family, v.accumulator) for v in made_up.variants("sm_90a", integers)] == [("integers", "i32")]


@pytest.mark.parametrize("elements", [("f32",), ("bf16", "f32"), ("bf16", "bf16", "f32", "i32", "f16")])
def test_a_family_has_as_many_element_types_as_its_operation_has_operands(
    made_up: MadeUp, monkeypatch: pytest.MonkeyPatch, elements: tuple[str, ...]
) -> None:
    of = Family("softmax", ("sm_90a",), (elements,), {"threads": (128,)}, batched=(False,))
    monkeypatch.setattr(made_up.__class__, "families", {"any": of})
    (variant,) = provider("made_up").functions("sm_90a")
    assert variant.name() == f"made_up.any.{'_'.join(elements)}_f32.threads128.sm_90a"
    assert of_name(variant.name()) == Variant.from_json(json.loads(variant.key())) == variant
    assert (illegal(variant), variant.elements) == (None, elements)


def test_rules_and_limits_of_a_new_provider_are_asked(made_up: MadeUp) -> None:
    split = made_up.variants("sm_90a", signature())[1]
    assert illegal(dataclasses.replace(split, config=choices(tile_m=8, tile_n=128, split_k=2))) == (
        "split_k needs tile_n 64"
    )
    assert unsuited(split, dataclasses.replace(signature(), k=128)) == "K is too short to split"
    assert unsuited(split, dataclasses.replace(signature(), n=4098)) is None
    assert unsuited(split, dataclasses.replace(signature(), n=4097)) == (
        "n = 4097 is not a multiple of 2, which 4-byte access to bf16 needs"
    )


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.usefixtures("made_up")
def test_a_new_provider_is_ranked_and_planned_beside_the_others(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library:
        monkeypatch.setitem(sys.modules, "nvMatmulHeuristics", None)
    everything = {v for name in PROVIDERS for v in provider(name).variants("sm_90a", signature())}
    manifest = Manifest("m", "s", (1, 512), ("sm_90a",), (Gemm("g", signature(), 1, (1, 512)),))
    planned = select([manifest], limit=len(everything), functions=["softmax"])
    assert [v.family for v in planned.functions] == ["softmax"]
    by_tokens = dict(planned.problems[0].by_tokens)
    assert all(set(by_tokens[m]) == everything for m in manifest.tokens)
    short = dict(select([manifest], limit=5).problems[0].by_tokens)
    leaders = {"sm90_static_persistent", "sm90_small_m", "sm90_persistent", "swap_ab", "one_size"}
    for candidates in (short[m] for m in manifest.tokens):
        assert {v.family for v in candidates} == leaders
