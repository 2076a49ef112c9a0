"""The grouped GEMM of 4-bit weights by mma.sync: which kernels there are, that they compile for every target, and how
many CTAs a launch has. What they compute is seen in `tests.test_ptx`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from aot.compile.cache import Cache
from aot.compile.compiler import compile_variants
from aot.kernels.group_sizes import GROUPS_BYTES, MOST_GROUPS
from aot.kernels.sm80.grouped_w4.plan import Plan
from aot.kernels.w4.form import Form
from aot.problem.model_config import default_targets
from aot.search.grouped_gemm import GROUPED_GEMM
from aot.search.legal import legal_variants, of_name, unsuited
from aot.search.provider import families
from aot.search.targets import TARGETS
from aot.search.variants import Variant
from runtime import Library
from runtime.container.archive import Archive
from runtime.grouped_gemm import EPILOGUES_OF_GROUPS, Signature
from runtime.numbers.weights import FORMATS

from ..model_configs import config, manifest
from ..recording_driver import FakeTensor, RecordingDriver
from ..sm80_w4_samples import CHOICES, GROUPED, pack, variant, variant_of, variants_of_groups

FAMILY = families("own")[GROUPED]
MXFP4 = Signature("bf16", "e2m1", "bf16", 128, 5760, 2880, "bias+swiglu_clamped_interleaved", scaling="mxfp4_weight")
INT4 = Signature("bf16", "u4", "bf16", 128, 1536, 2048, "swiglu", scaling="int4_weight")
every = pytest.mark.parametrize("s", [MXFP4, INT4], ids=lambda s: s.key())


def variants(target: str, s: Signature) -> list[Variant]:
    return [v for v in legal_variants("own", target, s) if v.family == GROUPED]


@every
def test_builds_choose_it_where_nothing_better_multiplies(s: Signature) -> None:
    for target in ("sm_80", "sm_120a"):
        assert 50 < len(variants(target, s)) < 300
        shortlist = GROUPED_GEMM.shortlist({s: (1, 64, 4096)}, target, 4)
        for _, chosen in shortlist.by_signature[s]:
            assert [v.family for v in chosen] == [GROUPED] * 4
    assert variants("sm_90a", s) == []
    named = dataclasses.replace(variants("sm_80", s)[0], target="sm_90a")
    assert of_name(named.name()) == named
    assert "sm90_grouped_w4" in (FAMILY.likely.unlikely(named) or "")


def test_a_manifest_of_such_experts_is_for_all_targets_that_have_it() -> None:
    assert default_targets((MXFP4, INT4)) == ("sm_80", "sm_90a", "sm_120a")
    assert FAMILY.epilogues == set(EPILOGUES_OF_GROUPS)


def test_experts_of_a_config_are_served_on_ampere() -> None:
    asked = manifest(config("gpt-oss-120b"), targets=("sm_80",), scaling="mxfp4_weight")
    wanted = [use.signature for use in asked.uses if use.signature.operation == "grouped_gemm"]
    assert [bool(variants("sm_80", s)) for s in wanted] == [True, True]


@every
def test_few_rows_are_estimated_to_take_the_memorys_time_and_many_the_tensor_cores(s: Signature) -> None:
    found = variants("sm_80", s)
    assert FAMILY.estimate_us is not None
    best = {m: min(FAMILY.estimate_us(v, s, m) for v in found) for m in (1, 32, 1024, 65536)}
    assert sorted(best, key=best.__getitem__) == list(best)
    of_one = s.n * s.k * 0.53 / 4e6  # of one group's weights at 4 TB/s
    assert of_one < best[1] < of_one + 40
    assert best[65536] > 2 * 65536 * s.n * s.k / 990e6  # which an H200's tensor cores multiply


@every
def test_a_cta_has_no_more_of_a_gpu_than_there_is(s: Signature) -> None:
    for v in variants("sm_80", s):
        plan = Plan.of(v.options, Form(v.scaling, v.epilogue))
        assert plan.shared_bytes == plan.tile_bytes + GROUPS_BYTES
        assert plan.shared_bytes + 1024 <= TARGETS["sm_80"].shared_bytes_per_block


def test_a_tile_has_whole_slabs_of_gates_and_of_ups_where_they_stand_in_halves() -> None:
    for tile_n, halves, interleaved in ((16, None, "16"), (32, "32", "32"), (48, None, "48")):
        options = CHOICES[0] | {"tile_n": tile_n}
        for epilogue, legal in (("swiglu", halves), ("swiglu_interleaved", interleaved)):
            name = variant_of(options, "mxfp4_weight", "sm_80", epilogue, GROUPED).name()
            assert (of_name(name) is not None) == (legal is not None), name


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"n": 5768, "epilogue": "bias"}, "N must be a multiple of 16, found 5768"),
        ({"n": 5776, "epilogue": "swiglu"}, "half of the rows of B are gates, so N must be a multiple of 32"),
        ({"k": 2912}, "K must be a multiple of 64, found 2912"),
        ({"groups": MOST_GROUPS + 1}, "room for 512 groups"),
    ],
)
def test_extents_that_no_kernel_takes_are_refused(changed: dict[str, Any], reason: str) -> None:
    of = dataclasses.replace(MXFP4, **changed)
    v = variants("sm_80", dataclasses.replace(MXFP4, epilogue=of.epilogue))[0]
    assert reason in (unsuited(v, of) or "")


# --- compiled ---


def kernels_of(archive: Archive) -> dict[bytes, dict[str, tuple[int, ...]]]:
    """The kernel of each cubin, which spills nothing, and its parameters' sizes."""
    found = {}
    for name in archive.functions:
        record = archive.record(name)
        (launch,), (kernel,) = record["program"]["launches"], record["kernels"]
        assert kernel["local_bytes"] == 0
        assert "128i64div128i64div4" in kernel["symbol"], "offsets into codes have 64 bits"
        found[archive.cubin(name)] = {kernel["symbol"]: tuple(p["size"] for p in launch["parameters"])}
    return found


@pytest.mark.parametrize("target", FAMILY.targets)
def test_a_launch_has_a_cta_for_each_tile_that_may_be_or_as_many_as_the_gpu_holds(target: str, tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    v = variant(CHOICES[4], "mxfp4_weight", target, "swiglu", GROUPED)  # tiles of 16 x 64
    with Archive.open(pack([v], tmp_path)) as archive:
        driver = RecordingDriver(kernels=kernels_of(archive), capability=TARGETS[target].compute_capability)
        with Library(archive, driver) as library:
            for groups, m, tiles in ((5, 33, 8), (5, 3, 4), (5, 4000, None)):
                n, k = 288, 320
                library.functions[v.name()](
                    FakeTensor((m, k)),
                    FakeTensor((groups, n, k // 2), "float4_e2m1fn_x2"),
                    FakeTensor((groups,), "int32"),
                    FakeTensor((m, n // 2)),
                    FakeTensor((groups, k // 64, n * 2), "float8_e8m0fnu"),
                    stream=0,
                )
                assert driver.launches[-1].grid == (driver.active_clusters if tiles is None else tiles * 5, 1, 1)


@pytest.mark.long
@pytest.mark.parametrize("target", FAMILY.targets)
def test_all_samples_compile_without_spilled_registers(target: str, tmp_path: Path) -> None:
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    samples = variants_of_groups(target)
    assert len(samples) > len(CHOICES) * len(FORMATS)
    assert compile_variants(samples, Cache(tmp_path / "cache"), jobs=1).failures == {}
