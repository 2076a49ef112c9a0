"""What a GEMM costs by its tiles: models that no measurement stands behind, so only what must hold is tested."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from aot.search.gemm import GEMM
from aot.search.shape import Shape
from aot.search.targets import target
from aot.search.tile_waves import Tcgen05Tiles, TileWaves, model_of
from runtime.gemm.signature import Signature

BF16 = Signature("bf16", "bf16", "bf16", "f32", "none", 8192, 8192)
MXFP8 = dataclasses.replace(BF16, a="e4m3", b="e4m3", scaling="mxfp8")
TILE = Shape(128, 128, 64, 2, 1, 4, 1, 64, two_cta=False, swap_ab=False)
B200 = model_of(target("sm_100a"))


def us(shape: Shape, signature: Signature = BF16, m: int = 8192) -> float:
    return B200.cost(shape, signature, m)


def test_blackwell_has_a_model_of_its_own_that_says_it_was_not_measured() -> None:
    assert isinstance(B200, Tcgen05Tiles)
    assert isinstance(model_of(target("sm_103a")), Tcgen05Tiles)
    assert type(model_of(target("sm_120a"))) is TileWaves
    assert model_of(target("sm_100a"), "no library").source == "model of tcgen05 tiles, not measured (no library)"


@pytest.mark.parametrize("tile_n", [32, 64, 128])
def test_two_ctas_that_share_a_tile_are_faster_where_reads_of_b_are_what_is_slow(tile_n: int) -> None:
    alone = TILE._replace(tile_n=tile_n)
    assert us(alone._replace(two_cta=True)) < us(alone)


def test_only_the_largest_tiles_of_two_ctas_keep_the_tensor_cores_busy() -> None:
    ideal_us = BF16.flops(8192) / 2 / 148 / (4096 * 1850)
    assert us(TILE._replace(tile_n=256, two_cta=True)) < 1.2 * ideal_us
    assert us(TILE._replace(tile_n=256)) > 1.3 * ideal_us


def test_an_epilogue_shows_where_tensor_memory_has_no_room_for_two_tiles() -> None:
    wide = TILE._replace(tile_n=256, two_cta=True)
    hidden = us(wide, dataclasses.replace(MXFP8, scaling="none"))
    assert us(wide, MXFP8) > 1.01 * hidden
    assert us(TILE, MXFP8) == us(TILE, dataclasses.replace(MXFP8, scaling="none"))


def test_no_tile_is_faster_than_memory_or_the_tensor_cores() -> None:
    shapes = [TILE._replace(tile_n=n, two_cta=two_cta) for n in (32, 64, 128, 256) for two_cta in (True, False)]
    for m in (1, 8192):
        assert min(us(shape, m=m) for shape in shapes) > max(BF16.flops(m) / 2.5e9, BF16.bytes(m) / 8e6)


@pytest.mark.parametrize("n", [2048, 6144, 28672])
def test_every_m_has_a_candidate_that_is_about_as_good_as_all(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model itself: of what is ranked for tokens from 1 to 8192, something is right between them."""
    monkeypatch.setitem(sys.modules, "nvMatmulHeuristics", None)
    signature = dataclasses.replace(BF16, n=n, k=4096)
    ranked = GEMM.shortlist({signature: (1, 8192)}, "sm_100a", 8).by_signature[signature]
    candidates = {v for _, found in ranked for v in found}
    everything = GEMM.variants("sm_100a", signature)
    assert len(candidates) < len(everything) / 4
    for m in (3, 20, 50, 70, 100, 150, 210, 300, 500, 900, 1111, 2100, 3333, 5000, 7000):
        few, all_ = (min(B200.cost(Shape.of(v), signature, m) for v in found) for found in (candidates, everything))
        assert few < 1.02 * all_, m
