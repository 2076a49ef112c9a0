"""The few-token GEMM for Hopper: which forms exist, and what of its arithmetic needs no compiler."""

from __future__ import annotations

import dataclasses

import pytest

from aot.kernels.sm90.small_m.form import Form
from aot.kernels.sm90.small_m.plan import HALF_GROUP, Plan, row_of_b
from aot.search.estimates import Estimates
from aot.search.legal import illegal, unsuited
from aot.search.provider import provider
from aot.search.targets import TARGETS
from aot.search.variants import Variant, choices
from runtime.gemm.signature import Signature
from runtime.numbers.epilogue import EPILOGUES
from runtime.program.operation import OVERLAPS

PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 4096, 4096)
SCALED = Signature("e4m3", "e4m3", "bf16", "f32", "none", 4096, 4096, scaling="row_column")


def variants(signature: Signature) -> list[Variant]:
    return [v for v in provider("own").variants("sm_90a", signature) if v.family == "sm90_small_m"]


@pytest.mark.parametrize("signature", [PLAIN, SCALED], ids=lambda s: s.a)
def test_stages_fill_the_shared_memory_of_an_sm_and_no_more(signature: Signature) -> None:
    form = Form(element_bytes=2 if signature.a == "bf16" else 1, scaling=signature.scaling)
    for v in variants(signature):
        plan = Plan.of(v.options, form)
        found = plan.memory
        stage = found.m_side + found.n_side
        a_cta = 2048 + found.block + 4 * plan.epilogue_terms  # 1 KB static, 1 KB for barriers
        for_a_cta = TARGETS["sm_90a"].shared_bytes_per_block if v.integer("ctas_per_sm") == 1 else (228 << 9) - 1024
        assert a_cta <= for_a_cta, v.name()
        assert a_cta + stage > for_a_cta or found.stages == 32, v.name()
        assert found.staging + found.partial <= found.block, v.name()


def test_a_variant_overlaps_no_more_than_the_signature_promises() -> None:
    one = variants(dataclasses.replace(PLAIN, overlap="weights"))[0]
    for promised, overlap in ((p, o) for p in OVERLAPS for o in OVERLAPS):
        v = dataclasses.replace(one, config=choices(**{**one.options, "overlap": overlap}))
        reason = unsuited(v, dataclasses.replace(PLAIN, overlap=promised))
        assert (reason is None) == (OVERLAPS.index(overlap) <= OVERLAPS.index(promised)), (promised, overlap, reason)


@pytest.mark.parametrize("epilogue", ["swiglu", "geglu_interleaved"])
@pytest.mark.parametrize(("n", "tile_n"), [(4096, 112), (208, 64), (16, 48)])
def test_tiles_of_a_gated_gemm_have_every_gate_eight_rows_before_its_up(epilogue: str, n: int, tile_n: int) -> None:
    form, found = Form(epilogue=epilogue), []
    for tile in range(-(-n // tile_n)):
        for position in (p for p in range(tile_n) if p // HALF_GROUP % 2 == 0):
            gate, up = (row_of_b(tile_n, form, tile, p, n) for p in (position, position + HALF_GROUP))
            assert up - gate == (1 if EPILOGUES[epilogue].interleaved else n // 2)
            found.append(gate)
    column = 2 if EPILOGUES[epilogue].interleaved else 1
    assert found[: n // 2] == [column * i for i in range(n // 2)]


def test_forms_that_the_kernel_does_not_have_say_why() -> None:
    one = variants(PLAIN)[0]
    for change, reason in (
        ({"scaling": "row_column"}, "scales are for 8-bit inputs"),
        ({"b_major": "n", "epilogue": "swiglu"}, "eight by eight"),
        ({"elements": ("e4m3", "e4m3", "bf16"), "b_major": "n"}, "needs 16-bit elements"),
        (
            {"elements": ("e4m3", "e4m3", "bf16"), "scaling": "block", "batched": True},
            "lacks scales or epilogues in a batch",
        ),
    ):
        assert reason in (illegal(dataclasses.replace(one, **change)) or ""), change


def test_no_form_has_so_many_variants_that_listing_them_takes_long() -> None:
    assert 100 < len(variants(PLAIN)) < 350
    assert 100 < len(variants(dataclasses.replace(SCALED, epilogue="swiglu"))) < 350


# us of a router (8 x 6144 in bf16) on an H200, by M and choices: tile M x N, CTAs an SM, split-K.
ROUTER = {
    (256, (16, 56, 2, 4)): 5.71,
    (512, (16, 56, 2, 4)): 9.34,
    (1024, (16, 56, 2, 4)): 14.75,
    (2048, (16, 64, 1, 2)): 25.5,
    (512, (64, 48, 1, 4)): 5.57,
    (1024, (64, 48, 1, 4)): 6.67,
    (2048, (128, 48, 1, 4)): 10.03,
}


@pytest.mark.parametrize(("of", "us"), ROUTER.items(), ids=str)
def test_tiles_that_hang_over_n_are_estimated_by_all_their_rows(of: tuple[int, tuple[int, ...]], us: float) -> None:
    """Rows past N, which TMA fills with zeros, take longer than rows of B do."""
    m, wanted = of
    names = "tile_m", "tile_n", "ctas_per_sm", "split_k"
    router = dataclasses.replace(PLAIN, n=8, k=6144)
    (v,) = (v for v in variants(router) if (*map(v.integer, names), v.integer("cluster_n")) == (*wanted, 1))
    (found,) = Estimates([v]).us(router, m)
    assert found == pytest.approx(us, rel=0.3)
