"""The estimated times of the persistent GEMM: how they grow, and which tiles they put first."""

from __future__ import annotations

import dataclasses
import math

import pytest

from aot.kernels.sm90.persistent.plan import Plan
from aot.providers import estimate_persistent
from aot.search.legal import legal_variants
from aot.search.variants import choices
from runtime.gemm.signature import Signature

from .legal_samples import drawn
from .persistent_variants import BLOCK, FAMILY, FP8, PLAIN, form, plain_form, variants
from .ranking import rank


def test_the_estimate_of_a_tile_that_hangs_over_m_counts_rows_past_it() -> None:
    """Which is so where M is less than a tile: else the last tile begins before its place, and none is past M."""
    for v in variants(PLAIN):
        tiling = estimate_persistent.of_own
        tokens = Plan.of(v.options, form(PLAIN)).tokens
        full, hanging = (tiling(v, plain_form, PLAIN, m) for m in (tokens, tokens - 8))
        assert hanging > full - 0.2
        if not v.options["stream_k"]:
            assert tiling(v, plain_form, PLAIN, 2 * tokens - 8) <= tiling(v, plain_form, PLAIN, 2 * tokens)


@pytest.mark.parametrize("signature", [PLAIN, BLOCK], ids=Signature.key)
def test_every_legal_kernel_has_an_estimate(signature: Signature) -> None:
    clusters = set()
    for v in drawn(signature, FAMILY):
        assert 0 < estimate_persistent.of_own(v, lambda _: form(signature), signature, 300) < 1e4
        clusters.add(Plan.of(v.options, form(signature)).cluster)
    assert clusters >= {1, 2, 3, 4, 6, 8}


@pytest.mark.parametrize("m", [100, 333, 4096])
def test_estimates_grow_with_n_and_k(m: int) -> None:
    for v in variants(PLAIN):
        times = [
            estimate_persistent.of_own(v, plain_form, dataclasses.replace(PLAIN, n=n, k=k), m)
            for n, k in ((4096, 4096), (4096, 8192), (8192, 8192))
        ]
        assert times == sorted(times)
        assert times[0] > 0


def test_estimates_grow_with_m_where_tiles_are_full() -> None:
    full = 2 * math.lcm(*{v.integer("tile_m") for v in variants(PLAIN)})  # and clusters of two
    for v in variants(PLAIN):
        once, twice = (estimate_persistent.of_own(v, plain_form, PLAIN, m) for m in (full, 2 * full))
        assert once < twice


def test_one_tile_a_cta_is_estimated_to_win_where_tiles_are_one_wave_and_to_lose_where_they_are_many() -> None:
    found = [v for v in variants(PLAIN) if v.options["nonpersistent"]]
    assert found
    for v in found:
        persistent = dataclasses.replace(v, config=choices(**{**v.options, "nonpersistent": False}))
        few, many = v.integer("tile_m"), 8000
        of = dataclasses.replace(PLAIN, n=16 * v.integer("tile_n"))
        one, twin = (estimate_persistent.of_own(x, plain_form, of, few) for x in (v, persistent))
        assert one < twin
        one, twin = (estimate_persistent.of_own(x, plain_form, of, many) for x in (v, persistent))
        assert one > twin


def test_what_may_begin_early_comes_before_the_same_that_may_not() -> None:
    for v in variants(dataclasses.replace(PLAIN, overlap="launch")):
        if v.options["overlap"] == "launch":
            late = dataclasses.replace(v, config=choices(**{**v.options, "overlap": "serial"}))
            assert estimate_persistent.of_own(v, plain_form, PLAIN, 512) < estimate_persistent.of_own(
                late, plain_form, PLAIN, 512
            )


@pytest.mark.parametrize(
    ("n", "m", "best"),
    [(6144, 512, (128, 192)), (6144, 1000, (128, 192)), (4096, 512, (128, 128)), (4096, 1000, (256, 128))],
)
def test_scales_of_blocks_leave_the_lead_to_tiles_that_fill_waves(n: int, m: int, best: tuple[int, int]) -> None:
    """On an H200 these were the fastest, 64 x 256 and 128 x 128 as fast as each other."""
    signature = Signature("e4m3", "e4m3", "bf16", "f32", "none", n, 4096, scaling="block")
    alike = [v for v in variants(signature) if v.options["order"] == "rows" and v.integer("tile_n") >= 96]
    first = rank(alike, signature, m, "sm_90a").variants[0]
    assert (first.integer("tile_m"), first.integer("tile_n")) == best


def test_narrow_tiles_wait_for_the_promotion_of_sums_that_have_scales_of_blocks() -> None:
    def us(tile_n: int, promoted_columns: int) -> float:
        tiling = estimate_persistent.Tiling(256, tile_n, 1, 1, bytes_in=1, promoted_columns=promoted_columns)
        return float(estimate_persistent.estimate_us(tiling, FP8, 4096))

    assert us(128, 128) == us(128, 0)
    assert us(64, 64) > 1.03 * us(64, 0)


def test_few_tokens_leave_the_lead_to_the_kernel_for_them() -> None:
    everything = legal_variants("own", "sm_90a", PLAIN)
    assert rank(everything, PLAIN, 8, "sm_90a").variants[0].family == "sm90_small_m"
    assert rank(everything, PLAIN, 4096, "sm_90a").variants[0].family == FAMILY


def test_token_tiles_follow_the_tokens() -> None:
    """333 tokens are 336 in tiles of 112 or 168, and 384 in tiles of 64 or 128."""
    best = rank(variants(PLAIN), PLAIN, 333, "sm_90a").variants[:8]
    assert any(v.options["swap"] for v in best)
