"""Variants as data, and which of them are legal."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot.providers import cutlass_operators
from aot.search.legal import illegal, legal_functions, legal_variants, of_name, unsuited
from aot.search.provider import PROVIDERS, families
from aot.search.targets import TARGETS, target
from aot.search.variants import Family, Variant, choices
from runtime.errors import AotError, RecordError
from runtime.gemm.signature import Signature

from .legal_samples import drawn, legal_values

TYPES = (("bf16", "bf16", "bf16"), ("f16", "f16", "f16"), ("e4m3", "e4m3", "bf16"))


def signature(types: tuple[str, str, str] = TYPES[0], n: int = 4096, k: int = 4096, batch: int = 1) -> Signature:
    return Signature(*types, "f32", "none", n, k, batch)


def all_variants() -> list[Variant]:
    gemms = [
        v
        for t in TARGETS
        for types in TYPES
        for batch in (1, 2)
        for v in legal_variants("cutlass_operators", t, signature(types, batch=batch))
    ]
    ours = [v for types in TYPES for v in legal_variants("own", "sm_90a", signature(types))]
    return gemms + ours + [v for t in TARGETS for v in legal_functions("own", t)]


ALL = all_variants()
OWN = families("own")
HOPPER = next(v for v in ALL if v.family == "sm90_static_persistent" and v.d == "bf16" and not v.batched)
BLACKWELL = next(v for v in ALL if v.family == "sm100_persistent" and v.options["two_cta"])
SMALL_M = next(v for v in ALL if v.family == "sm90_small_m")
SCALED = legal_variants("cutlass_operators", "sm_100a", dataclasses.replace(signature(TYPES[2]), scaling="mxfp8"))[0]
PREFERRED = next(v for v in ALL if v.family == "sm100_preferred_cluster")


def with_options(variant: Variant, **options: int | str | bool) -> Variant:
    return dataclasses.replace(variant, config=choices(**{**variant.options, **options}))


def test_every_enumerated_variant_is_legal() -> None:
    assert [v for v in ALL if illegal(v)] == []


def test_names_and_keys_are_unique_over_all_targets() -> None:
    assert len({v.name() for v in ALL}) == len({v.key() for v in ALL}) == len(set(ALL)) == len(ALL)


def test_name_reads_as_a_choice_list() -> None:
    variant = with_options(HOPPER, tile_m=128, tile_n=256, cluster_n=2)
    assert (
        variant.name() == "cutlass_operators.sm90_static_persistent.bf16_bf16_bf16_f32.tile128x256x64.cluster1x2.sm_90a"
    )


def test_name_keeps_a_tile_that_has_no_rows() -> None:
    variant = Variant("elsewhere", "new", "sm_90a", choices(tile_n=64, tile_k=32), ("f32",) * 3, operation="gemm")
    assert variant.name() == "elsewhere.new.f32_f32_f32_f32.tile_k32.tile_n64.sm_90a"


@pytest.mark.parametrize(
    ("family_target", "types", "count"),
    [
        ("sm_80", TYPES[0], 2),
        ("sm_80", TYPES[2], 0),
        ("sm_90a", TYPES[1], 24),
        ("sm_90a", TYPES[2], 24),
        ("sm_100a", TYPES[0], 400 + 288 + 3),
        ("sm_103a", TYPES[2], 400 + 288),
        ("sm_120a", TYPES[0], 2),
    ],
)
def test_each_target_offers_its_families(family_target: str, types: tuple[str, str, str], count: int) -> None:
    assert len(legal_variants("cutlass_operators", family_target, signature(types))) == count


def test_every_name_is_read_as_its_variant() -> None:
    assert [v.name() for v in ALL if of_name(v.name()) != v] == []
    forms = (
        Signature("e4m3", "e4m3", "e4m3", "f32", "bias+swiglu_interleaved+scale", 4096, 4096, scaling="row_column"),
        Signature("bf16", "bf16", "bf16", "f32", "none", 4096, 4096, batch=2, b_major="n"),
        Signature("f16", "f16", "f16", "f32", "gelu_tanh", 4096, 4096, overlap="weights"),
    )
    for form in forms:
        found = legal_variants("own", "sm_90a", form)
        assert found
        assert [of_name(v.name()) for v in found] == found


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name.replace("own.", "gone."),
        lambda name: name.replace("sm90_small_m", "sm90_small"),
        lambda name: name.replace("bf16_bf16_bf16_f32", "bf16_bf16_bf16"),
        lambda name: name.replace("bf16_bf16_bf16_f32", "bf16_bf16_f64_f32"),
        lambda name: name.replace("split_k1", "split_k9"),
        lambda name: name.replace("split_k1", "split_k01"),
        lambda name: name.replace("split_k1", "split_k1.split_k1"),
        lambda name: name.replace(".split_k1", ""),
        lambda name: name.replace("split_k1", "split_k" + "1" * 5000),
        lambda name: name.replace("sm_90a", "sm_100a"),
        lambda name: name + ".sm_90a",
        lambda name: name.upper(),
        lambda name: "",
        lambda name: "own.sm90_small_m",
    ],
)
def test_what_is_nearly_a_name_is_none(change: Callable[[str], str]) -> None:
    assert "split_k1" in SMALL_M.name()
    assert of_name(change(SMALL_M.name())) is None


@given(variant=st.sampled_from(ALL), words=st.lists(st.text(max_size=8), max_size=3), cut=st.integers(0, 80))
def test_a_name_that_is_read_is_that_of_the_variant(variant: Variant, words: list[str], cut: int) -> None:
    name = ".".join([variant.name()[:cut], *words, variant.name()[cut:]])
    found = of_name(name)
    assert found is None or found.name() == name


@given(st.sampled_from(ALL))
def test_json_round_trip_keeps_the_variant(variant: Variant) -> None:
    assert Variant.from_json(json.loads(variant.key())) == variant


@given(st.sampled_from(ALL))
def test_reading_the_options_changes_nothing_else(variant: Variant) -> None:
    fresh, read = dataclasses.replace(variant), dataclasses.replace(variant)
    assert dict(read.options) == dict(variant.config)
    assert (read, hash(read), read.key(), read.name()) == (fresh, hash(fresh), fresh.key(), fresh.name())
    assert pickle.loads(pickle.dumps(read)) == fresh  # as it travels to a worker


@given(st.sampled_from(ALL), st.sampled_from(dataclasses.fields(Variant)))
def test_key_depends_on_every_field(variant: Variant, field: dataclasses.Field[Any]) -> None:
    value = getattr(variant, field.name)
    fewer = field.name in ("config", "elements")
    other: Any = not value if field.name == "batched" else value[1:] if fewer else value + "x"
    assert dataclasses.replace(variant, **{field.name: other}).key() != variant.key()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "exactly the fields"),
        ({"accumulator": 16}, "'accumulator' must be a string"),
        ({"elements": "bf16"}, "'elements' must be a list of strings"),
        ({"elements": ["bf16", 16]}, "'elements' must be a list of strings"),
        ({"elements": []}, "'elements' must be a list of strings"),
        ({"batched": 0}, "'batched' must be true or false"),
        ({"config": [["tile_m", 64]]}, "'config' must map"),
        ({"config": {"tile_m": 64.0}}, "'config' must map"),
        ({"config": {"tile_m": None}}, "'config' must map"),
    ],
)
def test_from_json_rejects_wrong_fields(change: dict[str, object], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        Variant.from_json(HOPPER.to_json() | change)


def test_from_json_rejects_a_missing_field_and_a_non_object() -> None:
    without = {k: v for k, v in HOPPER.to_json().items() if k != "elements"}
    wrong: list[Any] = [without, [], None, "x"]
    for obj in wrong:
        with pytest.raises(RecordError):
            Variant.from_json(obj)


def test_config_must_be_sorted() -> None:
    with pytest.raises(ValueError, match="sorted"):
        dataclasses.replace(HOPPER, config=HOPPER.config[::-1])


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        (dataclasses.replace(HOPPER, family="sm90_magic"), "no family"),
        (dataclasses.replace(HOPPER, provider="own"), "no family"),
        (dataclasses.replace(HOPPER, operation="softmax"), "no family"),
        (dataclasses.replace(HOPPER, target="sm_100a"), "not made for sm_100a"),
        (dataclasses.replace(HOPPER, elements=("bf16", "bf16", "f16")), "lacks the element types bf16, bf16, f16"),
        (dataclasses.replace(HOPPER, accumulator="f16"), "does not compute"),
        (dataclasses.replace(HOPPER, epilogue="gelu"), "lacks the epilogue gelu"),
        (dataclasses.replace(HOPPER, config=HOPPER.config[1:]), "exactly the choices"),
        (with_options(HOPPER, stages=4), "exactly the choices"),
        (with_options(HOPPER, tile_n=96), "tile_n must be one of"),
        (with_options(HOPPER, cluster_m=True), "cluster_m must be one of"),
        (with_options(HOPPER, tile_k=128), "tile_k must be 64"),
        (with_options(BLACKWELL, tile_m=64), "128 or 256 with two_cta"),
        (with_options(BLACKWELL, tile_m=256, two_cta=False), "64 or 128 without two_cta"),
        (with_options(BLACKWELL, cluster_m=1), "must be even"),
        (with_options(BLACKWELL, cluster_m=16, cluster_n=2), "exceeds 16"),
        (with_options(PREFERRED, cluster_m=2, cluster_n=1), "larger multiple of fallback"),
        (dataclasses.replace(SCALED, batched=True), "lacks batches"),
        (dataclasses.replace(SMALL_M, batched=True, epilogue="bias"), "lacks scales or epilogues in a batch"),
        (with_options(SMALL_M, tile_m=16, split_k=8, cluster_n=2), "a cluster of 16 CTAs exceeds 8"),
        (with_options(SMALL_M, tile_m=8, cluster_n=2), "groups of 8 tokens, and tile_m has no such share"),
        (with_options(SMALL_M, tile_m=64, tile_n=224, ctas_per_sm=2), "holds 1 stages, fewer than 2"),
    ],
)
def test_illegal_names_the_reason(variant: Variant, reason: str) -> None:
    assert reason in (illegal(variant) or "")


def test_sm80_tiles_fit_the_smallest_shared_memory_of_the_gpus_served() -> None:
    rule = cutlass_operators.FAMILIES["sm80_tensorop"].rule
    largest = next(v for v in ALL if v.family == "sm80_tensorop" and v.options["tile_m"] == 128)
    assert rule(largest) is None
    assert rule(with_options(largest, stages=8)) == "needs 131072 bytes of shared memory, sm_80 has 101376"


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (signature(n=4100), "n = 4100 is not a multiple of 8"),
        (signature(k=4100), "k = 4100 is not a multiple of 8"),
        (signature(TYPES[2], k=4104), "k = 4104 is not a multiple of 16"),
        (signature(TYPES[1]), "not f16"),
        (signature(batch=4), "batched"),
    ],
)
def test_unsuited_names_the_reason(wanted: Signature, reason: str) -> None:
    variant = HOPPER
    if wanted.a == "e4m3":
        variant = dataclasses.replace(with_options(HOPPER, tile_k=128), elements=("e4m3", "e4m3", HOPPER.d))
    assert reason in (unsuited(variant, wanted) or "")


def test_preferred_clusters_that_one_row_cannot_fill_are_not_offered() -> None:
    static = with_options(PREFERRED, scheduler="static", cluster_m=16, cluster_n=1, tile_m=128, tile_n=256)
    assert illegal(static) is None
    assert "nothing would be launched" in (unsuited(static, signature(n=1024)) or "")
    assert unsuited(static, signature(n=2048)) is None
    assert unsuited(with_options(static, scheduler="clc"), signature(n=1024)) is None


def test_a_variant_of_a_foreign_provider_reads_well_and_is_illegal() -> None:
    foreign = Variant.from_json(HOPPER.to_json() | {"provider": "elsewhere"})
    assert foreign.to_json() == HOPPER.to_json() | {"provider": "elsewhere"}
    assert illegal(foreign) == "no family 'sm90_static_persistent' of 'gemm' in provider 'elsewhere'"
    assert legal_variants("elsewhere", "sm_90a", signature()) == legal_functions("elsewhere", "sm_90a") == []


def test_a_family_names_targets_and_element_types_that_exist() -> None:
    with pytest.raises(AotError, match="unknown target 'sm_91'"):
        Family("gemm", ("sm_91",), (), {})
    with pytest.raises(ValueError, match=r"unknown element types \['bfloat16'\]"):
        Family("gemm", ("sm_90a",), (("bf16", "bfloat16", "bf16"),), {})


W4 = Signature("bf16", "e2m1", "bf16", "f32", "none", 4096, 4096, scaling="mxfp4_weight")


@pytest.mark.parametrize(
    ("family", "of"), [("sm90_persistent", signature()), ("sm90_small_m", signature()), ("sm90_w4", W4)]
)
def test_what_is_not_likely_is_legal_for_who_names_it(family: str, of: Signature) -> None:
    """And builds have of what is legal just what is likely."""
    promised = dataclasses.replace(of, overlap="weights")
    found = drawn(promised, family)
    assert [v for v in found if of_name(v.name()) != v] == []
    likely = {v for v in found if OWN[family].likely.unlikely(v) is None}
    assert 0 < len(likely) < len(found)
    assert likely == set(found) & set(legal_variants("own", "sm_90a", promised))


def _tiles_of_n(tile_m: int, schedule: str, epilogue: str = "none") -> list[int]:
    """Columns that a legal persistent tile of so many rows may have."""
    words = f".{epilogue}" if epilogue != "none" else ""
    name = f"own.sm90_persistent.bf16_bf16_bf16_f32{words}.tile{tile_m}x%d.cluster1x1.rows.serial.{schedule}.split_k1"
    return [n for n in range(1, 520) if of_name(f"{name % n}.sm_90a") is not None]


def test_a_persistent_tile_has_as_many_columns_as_wgmma_and_registers_admit() -> None:
    assert _tiles_of_n(128, "cooperative") == list(range(8, 264, 8))
    assert _tiles_of_n(128, "pingpong") == list(range(8, 208, 8)), "200 accumulators a thread"
    assert _tiles_of_n(64, "cooperative") == list(range(16, 272, 16)), "each warp group has half of them"
    assert _tiles_of_n(64, "cooperative", "swiglu") == list(range(32, 288, 32)), "and as many gates as ups"
    assert _tiles_of_n(72, "cooperative") == []


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        (
            "sm90_persistent.bf16_bf16_bf16_f32.tile192x120.cluster1x1.rows.serial.pingpong.split_k1",
            "cluster_n",
            {*range(1, 9)},
        ),
        (
            "sm90_persistent.bf16_bf16_bf16_f32.tile128x120.cluster1x1.rows.serial.pingpong.split_k1",
            "cluster_m",
            {*range(1, 9)},
        ),
        (
            "sm90_persistent.bf16_bf16_bf16_f32.tile128x192.cluster1x1.rows.serial.cooperative.split_k1",
            "split_k",
            {1, 2, 3, 4, 6, 8},
        ),
        (
            "sm90_small_m.bf16_bf16_bf16_f32.tile96x64.cluster_n1.ctas_per_sm1.serial.split_k1",
            "cluster_n",
            {1, 2, 3, 4, 6},
        ),
        (
            "sm90_small_m.bf16_bf16_bf16_f32.tile96x64.cluster_n1.ctas_per_sm1.serial.split_k1",
            "split_k",
            {1, 2, 3, 4, 6, 8},
        ),
        (
            "sm90_small_m.bf16_bf16_bf16_f32.tile8x64.cluster_n1.ctas_per_sm1.serial.split_k1",
            "ctas_per_sm",
            {1, 2, 3, 4, 5},
        ),
    ],
)
def test_a_choice_may_be_whatever_the_kernel_can_do(name: str, option: str, values: set[int]) -> None:
    """The others of a variant stay. Other operations' folders say it of their kernels."""
    assert legal_values(f"own.{name}.sm_90a", option) == values


@pytest.mark.parametrize(
    ("key", "count", "digest"),
    [
        ("bf16_bf16_bf16_f32_none_n4096_k4096_weights", 2022, "39265efaa233e7d6"),
        ("f16_f16_f16_f32_bias+swiglu_interleaved+residual_n4096_k4096", 384, "a98ee8d8d6e47309"),
        ("bf16_bf16_bf16_f32_none_n4096_k4096_b2_n-major", 165, "b874082ed9e4bb2b"),
        ("e4m3_e4m3_bf16_f32_none_n4096_k4096_row_column", 439, "9bf01c04b37fde34"),
        ("e4m3_e4m3_e4m3_f32_swiglu+scale_n4096_k4096_block", 120, "876c218be9875a98"),
    ],
)
def test_builds_for_hopper_choose_from_what_won(key: str, count: int, digest: str) -> None:
    """An opinion that changes changes these, and what archives are made of."""
    of = Signature.of_key(key)
    assert of is not None
    names = [v.name() for p in PROVIDERS for v in legal_variants(p, "sm_90a", of)]
    assert (len(names), sha256("\n".join(names).encode()).hexdigest()[:16]) == (count, digest)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("sm90_small_m", {"tile_m": 64, "tile_n": 64, "cluster_n": 2, "ctas_per_sm": 2}, "with 64 tokens, (split_k,"),
        ("sm90_small_m", {"tile_m": 16, "tile_n": 144, "ctas_per_sm": 2}, "with 2 stages loads stop"),
        ("sm90_small_m", {"tile_m": 16, "tile_n": 72}, "with 16 tokens, tile_n is one of"),
        ("sm90_small_m", {"tile_m": 24}, "tile_m is worth trying as one of (8, 16, 32, 64, 96, 128, 192, 256), not 24"),
        ("sm90_persistent", {"tile_n": 72}, "tile_n is worth trying as one of (64, 80, 96"),
        ("sm90_persistent", {"cluster_n": 8}, "cluster_n is worth trying as one of (1, 2, 4), not 8"),
        ("sm90_small_m", {"tile_m": 16, "tile_n": 64, "split_k": 8, "ctas_per_sm": 2}, "split_k = 8 is for tile_n of"),
        ("sm90_small_m", {"tile_m": 128, "tile_n": 64, "overlap": "weights"}, "load weights early are about 2% behind"),
        ("sm90_small_m", {"tile_m": 32, "tile_n": 224, "split_k": 4}, "for clusters of up to two"),
        ("sm90_persistent", {"tile_m": 192, "tile_n": 64}, "192 rows on WGMMA's M side never won"),
        ("sm90_persistent", {"cluster_m": 2, "cluster_n": 2}, "clusters of four leave SMs idle"),
        ("sm90_persistent", {"stream_k": True, "tile_m": 64, "tile_n": 128}, "other tiles never won by being shared"),
        ("sm90_persistent", {"order": "columns"}, "CTAs side by side load rows together"),
        ("sm90_persistent", {"order": "two_rows"}, "one above the other, load columns together"),
        ("sm90_persistent", {"order": "quads"}, "CTAs of 128 rows and few columns"),
        ("sm90_persistent", {"order": "columns", "cluster_n": 2, "split_k": 1, "swap": True}, "for plain tiles only"),
        (
            "sm90_persistent",
            {"tile_m": 64, "tile_n": 112},
            "epilogue tiles without a swizzle are for tiles of 128 rows",
        ),
    ],
)
def test_unlikely_names_the_reason(family: str, options: dict[str, int | str | bool], reason: str) -> None:
    plain = {"swap": False, "schedule": "cooperative", "tile_m": 128, "tile_n": 64, "stream_k": False, "order": "rows"}
    first = next(v for v in ALL if v.family == family and v.a == "bf16" and not v.batched)
    v = with_options(first, **({**plain, **options} if family == "sm90_persistent" else options))
    assert illegal(v) is None
    assert reason in (OWN[family].likely.unlikely(v) or "")


def test_small_m_overlaps_nothing_that_no_signature_promises() -> None:
    for overlap in ("weights", "launch"):
        early = with_options(SMALL_M, overlap=overlap)
        assert illegal(early) is None
        assert f"relies on overlap {overlap}, promised is serial" in (unsuited(early, signature()) or "")


@pytest.mark.usefixtures("row_scale")
def test_functions_are_not_offered_as_gemms() -> None:
    scale = legal_functions("row_scales", "sm_90a")[0]
    assert scale.operation == "row_scale"
    assert unsuited(scale, signature()) is not None
    assert legal_variants("own", "sm_80", signature()) == []


def test_targets_serve_themselves() -> None:
    for t in TARGETS.values():
        assert t.compute_capability in t.serves
        assert t.name.rstrip("a") == f"sm_{t.compute_capability[0]}{t.compute_capability[1]}"
    served = [c for t in TARGETS.values() for c in t.serves]
    assert len(served) == len(set(served))


def test_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(AotError, match="sm_90a"):
        target("sm_75")


def test_enumerating_imports_no_compiler() -> None:
    code = """
import sys
from aot.search.provider import PROVIDERS, provider
from runtime.gemm.signature import Signature
for name in PROVIDERS:
    provider(name).variants("sm_100a", Signature("bf16", "bf16", "bf16", "f32", "none", 4096, 4096))
    provider(name).functions("sm_100a")
    for family in provider(name).families:
        provider(name).source_digest(family)
heavy = {"torch", "cutlass", "numpy", "nvMatmulHeuristics", "cuda"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- scalings, epilogues, and what is promised ---


@pytest.mark.parametrize(
    ("relied", "promised", "suits"),
    [
        ("serial", "serial", True),
        ("serial", "weights", True),
        ("launch", "serial", False),
        ("launch", "launch", True),
        ("weights", "launch", False),
        ("weights", "weights", True),
    ],
)
def test_variant_may_rely_on_no_more_overlap_than_is_promised(relied: str, promised: str, suits: bool) -> None:
    variant = Variant("elsewhere", "new", "sm_90a", choices(overlap=relied), TYPES[0], operation="gemm")
    reason = unsuited(variant, dataclasses.replace(signature(), overlap=promised))
    assert reason == (None if suits else f"new: relies on overlap {relied}, promised is {promised}")


@pytest.mark.parametrize(("field", "value"), [("epilogue", "silu"), ("scaling", "row_column"), ("b_major", "n")])
def test_variant_computes_what_its_words_say_and_nothing_else(field: str, value: str) -> None:
    variant = Variant("elsewhere", "new", "sm_90a", (), TYPES[0], operation="gemm")
    other: dict[str, Any] = {field: value}
    wanted = dataclasses.replace(signature(), **other)
    assert unsuited(variant, signature()) is None
    assert f"{field} is " in (unsuited(variant, wanted) or "")
    assert f"{field} is " in (unsuited(dataclasses.replace(variant, **other), signature()) or "")
    assert unsuited(dataclasses.replace(variant, **other), wanted) is None
    assert dataclasses.replace(variant, **other).name() != variant.name()
    assert f"lacks the {field} {value}" in (illegal(dataclasses.replace(HOPPER, **other)) or "") or field == "b_major"


def test_columns_of_a_gated_result_must_fill_whole_accesses() -> None:
    variant = Variant("elsewhere", "new", "sm_90a", (), TYPES[0], operation="gemm", epilogue="swiglu")
    assert unsuited(variant, dataclasses.replace(signature(n=4112), epilogue="swiglu")) is None
    reason = unsuited(variant, dataclasses.replace(signature(n=4104), epilogue="swiglu"))
    assert reason == "columns of D = 2052 is not a multiple of 8, which 16-byte access to bf16 needs"
