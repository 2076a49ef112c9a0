"""What tuning measures grouped GEMMs by, on the CPU: operands, the reference row by row, what checks notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from aot.tune import measure  # noqa: E402  # needs torch
from aot.tune.gemm.prepared_weights import dequantised  # noqa: E402
from aot.tune.grouped_gemm.measures import GroupedMeasures, OperandSet, Weights, scaled  # noqa: E402
from aot.tune.grouped_gemm.rows import ROOM  # noqa: E402
from aot.tune.operation import tuning  # noqa: E402
from runtime.grouped_gemm import (  # noqa: E402
    GROUPED_GEMM,
    Signature,
    active_groups,
)
from runtime.program.tensor import in_elements  # noqa: E402

PLAIN = Signature("bf16", "bf16", "bf16", 7, 48, 64)
GATED = dataclasses.replace(PLAIN, epilogue="swiglu_interleaved")
BIASED = dataclasses.replace(PLAIN, epilogue="bias+swiglu_clamped_interleaved")
ROW_WISE = dataclasses.replace(PLAIN, a="e4m3", b="e4m3", scaling="row_column")
BLOCKS = dataclasses.replace(ROW_WISE, n=160, k=272, scaling="block", epilogue="bias")
QUANTISED = dataclasses.replace(ROW_WISE, d="e4m3", n=512, k=272, scaling="block", epilogue="bias+swiglu")
MXFP4 = dataclasses.replace(BIASED, b="e2m1", k=192, scaling="mxfp4_weight")
INT4 = dataclasses.replace(PLAIN, b="u4", k=256, scaling="int4_weight", epilogue="swiglu")
OF_4_BITS = [MXFP4, INT4]
GATHERED = dataclasses.replace(PLAIN, rows="gathered")
MASKED = [dataclasses.replace(s, rows="masked") for s in (PLAIN, BIASED, ROW_WISE, BLOCKS)]
SPLIT = [PLAIN, GATED, BIASED, ROW_WISE, BLOCKS, QUANTISED, GATHERED, *OF_4_BITS]  # by ends of groups
BY_ENDS = pytest.mark.parametrize("s", SPLIT, ids=lambda s: s.key())
EVERY = pytest.mark.parametrize("s", [*SPLIT, *MASKED], ids=lambda s: s.key())
MEASURES = GroupedMeasures()


def rolled(x: Any) -> Any:
    """`x` with its last group before the others; torch does not move units of 4 bits."""
    return x.view(torch.uint8).roll(1, 0).view(x.dtype) if x.element_size() == 1 else x.roll(1, 0)


def made(s: Signature, m: int = 33, seed: int = 0) -> OperandSet:
    return Weights(s, m, 0, seed, device="cpu").operands(m)[0]


@EVERY
def test_operands_are_those_of_the_signature(s: Signature) -> None:
    o = made(s)
    tensors: list[Any] = list(o.arguments())
    views = GROUPED_GEMM.arguments(s, ROOM * 33 if s.rows == "masked" else 33, 0)
    if s.rows == "gathered":
        assert tensors[0].shape[0] == 5, "eight experts take a token"
        views = (views[0]._replace(shape=(5, s.k)), *views[1:])
    shapes = [in_elements(v.dtype, tuple(t.shape), t.stride(), "") for t, v in zip(tensors, views, strict=True)]
    assert [shape for shape, _ in shapes] == [v.shape for v in views]
    strides = [
        (found, v.strides) for (_, found), v, of in zip(shapes, views, s.operands(), strict=True) if of.layout != "free"
    ]
    assert all(found == wanted for found, wanted in strides)
    assert [measure.name_of(t) for t in tensors] == [v.dtype for v in views]
    assert bool(torch.isnan(o.d.float()).all())


@pytest.mark.parametrize("m", [1, 5, 33, 700])
def test_groups_ascend_and_have_every_row(m: int) -> None:
    weights = Weights(PLAIN, m, 0, 1, device="cpu")
    *usual, short = *weights.operands(m), *weights.unusual(m)
    for o, rows in (*((o, m) for o in usual), (short, m * 2 // 3)):
        ends = o.ends.tolist()
        assert ends == sorted(ends)
        assert (len(ends), ends[-1]) == (PLAIN.groups, rows)
    one, few = (o.ends.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist() for o in usual[-2:])
    assert sorted(one) == [0] * (PLAIN.groups - 1) + [m]
    assert set(few[:-1]) <= {0, 1}


def test_rows_behind_the_last_group_are_checked_to_stay_as_they_are() -> None:
    weights = Weights(PLAIN, 33, 0, 1, device="cpu")

    def product(o: OperandSet) -> None:
        o.d.copy_(MEASURES.reference(PLAIN, o)["d"])

    def writes_on(o: OperandSet) -> None:
        product(o)
        o.d.nan_to_num_(7.0)

    found = measure.check(PLAIN, 33, weights, {"product": product, "writes on": writes_on})
    assert isinstance(found["product"], float)
    assert found["writes on"] == "it writes what it must leave as it is"


def test_every_other_set_has_groups_of_equal_chances() -> None:
    """The others as routers load experts: the busiest of seven has about twice as many rows as the mean."""
    weights = Weights(PLAIN, 70_000, 0, 1, device="cpu")
    weights.b = weights.b[:1] * 6
    busiest = [
        int(o.ends.diff(prepend=torch.zeros(1, dtype=torch.int32)).max()) / 10_000 for o in weights.operands(70_000)
    ]
    assert max(busiest[1::2]) < 1.05
    assert min(busiest[::2]) > 1.2


def test_the_reference_is_what_each_group_multiplies() -> None:
    o = made(PLAIN)
    found, begin = MEASURES.reference(PLAIN, o)["d"], 0
    for group, end in enumerate(o.ends.tolist()):
        for row in range(begin, end):
            torch.testing.assert_close(found[row], o.b[group].double() @ o.a[row].double())
        begin = end


def test_the_reference_of_gathered_rows_is_that_of_the_rows_that_indices_name() -> None:
    o = made(GATHERED)
    assert o.indices is not None
    assert sorted(set(o.indices.tolist())) == list(range(5)), "each of several rows, some of them twice"
    plain = OperandSet(torch.stack([o.a[i] for i in o.indices.tolist()]), o.b, o.ends, o.d)
    assert torch.equal(MEASURES.reference(GATHERED, o)["d"], MEASURES.reference(PLAIN, plain)["d"])


def test_a_check_notices_rows_that_are_not_those_that_indices_name() -> None:
    def right(o: OperandSet) -> None:
        o.d.copy_(MEASURES.reference(GATHERED, o)["d"])

    def neighbours(o: OperandSet) -> None:
        assert o.indices is not None
        o.d.copy_(MEASURES.reference(GATHERED, dataclasses.replace(o, indices=(o.indices + 1) % o.a.shape[0]))["d"])

    weights = Weights(GATHERED, 33, 0, 0, device="cpu")
    found = measure.check(GATHERED, 33, weights, {"right": right, "neighbours": neighbours})
    assert [name for name, why in found.items() if isinstance(why, str)] == ["neighbours"]


def test_a_gate_is_applied_to_what_it_gates() -> None:
    o = made(GATED)
    sums = MEASURES.reference(dataclasses.replace(GATED, epilogue="none"), o)["d"]
    gate, up = sums[:, 0::2], sums[:, 1::2]
    torch.testing.assert_close(MEASURES.reference(GATED, o)["d"], gate * torch.sigmoid(gate) * up)


def test_a_bias_is_its_groups_and_added_before_gates_are_clamped() -> None:
    o = made(BIASED, 200)
    sums = MEASURES.reference(dataclasses.replace(BIASED, epilogue="none"), o)["d"]
    group_of = torch.searchsorted(o.ends, torch.arange(200, dtype=torch.int32), right=True)
    sums = sums + o.extras["bias"][group_of]
    gate, up = sums[:, 0::2].clamp(max=7.0), sums[:, 1::2].clamp(min=-7.0, max=7.0)
    assert int((gate == 7.0).sum()) > 20
    torch.testing.assert_close(MEASURES.reference(BIASED, o)["d"], (up + 1) * gate * torch.sigmoid(gate * 1.702))


def test_scales_of_rows_multiply_what_each_row_and_channel_sums_up() -> None:
    o = made(ROW_WISE)
    found, begin = MEASURES.reference(ROW_WISE, o)["d"], 0
    scale_a, scale_b = o.extras["scale_a"], o.extras["scale_b"]
    for group, end in enumerate(o.ends.tolist()):
        for row in range(begin, end):
            sums = o.b[group].double() @ o.a[row].double()
            torch.testing.assert_close(found[row], sums * scale_a[row].double() * scale_b[group].double())
        begin = end


def test_scales_of_blocks_multiply_the_sums_of_each_128_of_k() -> None:
    o = made(BLOCKS)
    found, begin = MEASURES.reference(BLOCKS, o)["d"], 0
    scale_a, scale_b = o.extras["scale_a"].double(), o.extras["scale_b"].double()
    assert scale_b.shape == (7, 2, 3)
    for group, end in enumerate(o.ends.tolist()):
        for row in range(begin, end):
            wanted = o.extras["bias"][group].double()
            for block in range(3):
                k = slice(128 * block, 128 * (block + 1))
                sums = o.b[group][:, k].double() @ o.a[row][k].double()
                of_n = torch.cat([scale_b[group, :1, block].expand(128), scale_b[group, 1:, block].expand(32)])
                wanted = wanted + sums * scale_a[row, block] * of_n
            torch.testing.assert_close(found[row], wanted)
        begin = end


@pytest.mark.parametrize("s", [ROW_WISE, BLOCKS], ids=lambda s: s.key())
@pytest.mark.parametrize(("name", "dim"), [("scale_a", 0), ("scale_b", 0), ("scale_b", 1)])
def test_a_check_notices_a_scale_of_another_row_or_group(s: Signature, name: str, dim: int) -> None:
    def wrong(o: OperandSet) -> None:
        extras = {**o.extras, name: o.extras[name].roll(1, dim)}
        o.d.copy_(MEASURES.reference(s, dataclasses.replace(o, extras=extras))["d"])

    found = measure.check(s, 33, Weights(s, 33, 0, 0, device="cpu"), {"f": wrong})
    assert isinstance(found["f"], str)


@pytest.mark.parametrize("s", [ROW_WISE, BLOCKS], ids=lambda s: s.key())
def test_dequantising_makes_the_operands_that_sums_are_made_of(s: Signature) -> None:
    o = made(s)
    a, b = (scaled(x, o.extras[f"scale_{of}"], torch.float64) for x, of in ((o.a, "a"), (o.b, "b")))
    wide = dataclasses.replace(o, a=a, b=b, extras={n: t for n, t in o.extras.items() if n == "bias"})
    plain = dataclasses.replace(s, scaling="none")
    torch.testing.assert_close(MEASURES.reference(plain, wide)["d"], MEASURES.reference(s, o)["d"])


@pytest.mark.parametrize("s", MASKED, ids=lambda s: s.key())
@pytest.mark.parametrize("m", [1, 33])
def test_masked_rows_are_those_of_each_group_and_the_others_are_left(s: Signature, m: int) -> None:
    for o in (made(s, m), *Weights(s, m, 0, 0, device="cpu").unusual(m)):
        found = MEASURES.reference(s, o)["d"]
        counts = o.ends.tolist()
        assert all(0 <= count <= ROOM * m for count in counts)
        assert any(counts)
        for group, count in enumerate(counts):
            assert bool(found[group, count:].isnan().all())
            if not count:
                continue
            extras = {n: t[group] if n == "scale_a" else t[group : group + 1] for n, t in o.extras.items()}
            extras |= {n: t[:count] for n, t in extras.items() if n == "scale_a"}
            ends = torch.tensor([count], dtype=torch.int32)
            alone = OperandSet(o.a[group, :count], o.b[group : group + 1], ends, o.d[group, :count], extras)
            one = dataclasses.replace(s, rows="contiguous", groups=1)
            torch.testing.assert_close(found[group, :count], MEASURES.reference(one, alone)["d"])


@pytest.mark.parametrize("count", [-3, 1 << 20])
def test_a_count_that_is_none_means_no_rows_or_all(count: int) -> None:
    o = made(MASKED[0])
    o.ends[2] = count
    written = ~MEASURES.reference(MASKED[0], o)["d"][2].isnan()
    assert bool(written.all()) if count > 0 else not bool(written.any())


@pytest.mark.parametrize("s", MASKED, ids=lambda s: s.key())
def test_a_check_notices_masked_rows_that_are_written(s: Signature) -> None:
    def right(o: OperandSet) -> None:
        o.d.copy_(MEASURES.reference(s, o)["d"])

    def one_more(o: OperandSet) -> None:
        o.d.copy_(MEASURES.reference(s, dataclasses.replace(o, ends=o.ends + 1))["d"])

    def one_less(o: OperandSet) -> None:
        o.d.copy_(MEASURES.reference(s, dataclasses.replace(o, ends=o.ends - 1))["d"])

    weights = Weights(s, 33, 0, 0, device="cpu")
    found = measure.check(s, 33, weights, {"right": right, "more": one_more, "less": one_less})
    assert isinstance(found["right"], float)
    assert found["more"] == "it writes what it must leave as it is"
    assert "unwritten" in str(found["less"])


def test_a_check_notices_another_groups_bias_and_gates_that_are_not_clamped() -> None:
    def next_bias(o: OperandSet) -> None:
        other = dataclasses.replace(o, extras={"bias": o.extras["bias"].roll(1, 0)})
        o.d.copy_(MEASURES.reference(BIASED, other)["d"])

    def swiglu(o: OperandSet) -> None:
        o.d.copy_(MEASURES.reference(dataclasses.replace(BIASED, epilogue="bias+swiglu_interleaved"), o)["d"])

    found = measure.check(BIASED, 33, Weights(BIASED, 33, 0, 0, device="cpu"), {"bias": next_bias, "gate": swiglu})
    assert all(isinstance(why, str) for why in found.values())


@BY_ENDS
def test_a_check_takes_what_is_right_and_notices_a_group_that_is_another(s: Signature) -> None:
    def write(o: OperandSet, **changed: Any) -> None:
        for name, value in MEASURES.reference(s, dataclasses.replace(o, **changed)).items():
            o.outputs()[name].copy_(value)

    def right(o: OperandSet) -> None:
        write(o)

    def next_group(o: OperandSet) -> None:
        write(o, b=rolled(o.b))

    def one_row_more(o: OperandSet) -> None:
        write(o, ends=(o.ends + 1).clamp_max(o.a.shape[0]))

    weights = Weights(s, 33, 0, 0, device="cpu")
    found = measure.check(s, 33, weights, {"right": right, "next": next_group, "more": one_row_more})
    assert [name for name, why in found.items() if isinstance(why, str)] == ["next", "more"]


def test_a_check_sees_groups_that_are_seldom_drawn() -> None:
    def wrong_alone(o: OperandSet) -> None:
        """Right unless one group has all rows."""
        ends = o.ends.tolist()
        one = any(end - begin == len(o.a) for begin, end in zip([0, *ends], ends, strict=False))
        o.d.copy_(MEASURES.reference(PLAIN, o)["d"] * (0 if one else 1))

    found = measure.check(PLAIN, 33, Weights(PLAIN, 33, 0, 0, device="cpu"), {"f": wrong_alone})
    assert isinstance(found["f"], str)


def test_active_groups_are_those_that_have_a_row() -> None:
    assert active_groups(1, 5) == 1.0
    assert active_groups(128, 1) == pytest.approx(1.0)
    assert active_groups(4, 2) == pytest.approx(4 * (1 - 0.75**2))
    masked = tuning(PLAIN).work(MASKED[0], 2)
    assert masked.flops == 2 * 7 * tuning(PLAIN).work(PLAIN, 1).flops, "M is what each group has"
    work = tuning(PLAIN).work(PLAIN, 1)
    assert work.flops == 2 * 48 * 64
    assert work.bytes == 2 * (48 * 64 + 64 + 48)
    assert tuning(PLAIN).work(PLAIN, 80).bytes - tuning(GATHERED).work(GATHERED, 80).bytes == 2 * 64 * 70


@pytest.mark.parametrize("s", OF_4_BITS, ids=lambda s: s.key())
def test_weights_of_4_bits_are_the_numbers_that_each_group_is_prepared_as(s: Signature) -> None:
    o = made(s)
    weights = [dequantised(s.scaling, b, scale) for b, scale in zip(o.b, o.extras["scale_b"], strict=True)]
    plain = dataclasses.replace(s, b="bf16", scaling="none")
    extras = {name: of for name, of in o.extras.items() if name == "bias"}
    of_numbers = dataclasses.replace(o, b=torch.stack(weights).bfloat16(), extras=extras)
    found, wanted = MEASURES.reference(s, o)["d"], MEASURES.reference(plain, of_numbers)["d"]
    torch.testing.assert_close(found, wanted)
    assert 0.1 < float(found.abs().median()) < 10, "results are of the order of 1"


@pytest.mark.parametrize("s", OF_4_BITS, ids=lambda s: s.key())
def test_a_check_notices_scales_of_another_group(s: Signature) -> None:
    def next_scales(o: OperandSet) -> None:
        extras = {**o.extras, "scale_b": o.extras["scale_b"].roll(1, 0)}
        o.d.copy_(MEASURES.reference(s, dataclasses.replace(o, extras=extras))["d"])

    found = measure.check(s, 33, Weights(s, 33, 0, 0, device="cpu"), {"f": next_scales})
    assert isinstance(found["f"], str)
