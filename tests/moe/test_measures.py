"""What tuning measures moe_permute and moe_combine by, on the CPU: operands, references, what checks notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from aot.tune import measure  # noqa: E402  # needs torch
from aot.tune.moe_combine import measures as combine_measures  # noqa: E402
from aot.tune.moe_permute import measures as permute_measures  # noqa: E402
from aot.tune.operation import tuning  # noqa: E402
from runtime.moe.combine import Signature as Combine  # noqa: E402
from runtime.moe.permute import Signature as Permute  # noqa: E402
from runtime.program.operation import operation  # noqa: E402

PERMUTE = Permute("bf16", 12, 4, 32)
MAPPED = replace(PERMUTE, global_experts=30)
COMBINE = Combine("bf16", "bf16", 4, 32)
WEIGHED = replace(PERMUTE, weights="f32")
QUANTISED = replace(MAPPED, weights="f32", scaling="block", k=256)
SIGNATURES = [
    *(PERMUTE, MAPPED, WEIGHED, replace(PERMUTE, x="e4m3"), replace(PERMUTE, experts=2)),
    *(COMBINE, replace(COMBINE, weights="none")),
]


def by_key(s: Any) -> str:
    return str(s.key())


def weights_of(s: Any, m: int, seed: int = 0) -> Any:
    return tuning(s).measures().weights(s, m, 0, seed, "cpu")


def copying(s: Any, change: Callable[[dict[str, Any]], None]) -> Callable[[Any], None]:
    """What writes the reference, changed."""

    def launch(o: Any) -> None:
        wanted = {name: value.clone() for name, value in tuning(s).measures().reference(s, o).items()}
        change(wanted)
        for name, value in wanted.items():
            o.outputs()[name].copy_(value)

    return launch


@pytest.mark.parametrize("s", SIGNATURES, ids=by_key)
@pytest.mark.parametrize("m", [1, 17])
def test_operands_are_those_of_the_signature(s: Any, m: int) -> None:
    (o, *_) = weights_of(s, m).operands(m)
    views = operation(s.operation).arguments(s, m, 0)
    assert [(tuple(t.shape), t.stride()) for t in o.arguments()] == [(v.shape, v.strides) for v in views]
    assert [measure.name_of(t) for t in o.arguments()] == [v.dtype for v in views]


@pytest.mark.parametrize("s", SIGNATURES, ids=by_key)
@pytest.mark.parametrize("m", [1, 17])
def test_a_check_takes_what_is_right_and_notices_what_is_not(s: Any, m: int) -> None:
    def one_more(name: str) -> Callable[[dict[str, Any]], None]:
        return lambda wanted: wanted[name].view(-1)[-1:].add_(1.0)

    launches = {"right": copying(s, lambda wanted: None), "nothing": lambda o: None}
    outputs = ("rows", "ends", "positions") if s.operation == "moe_permute" else ("y",)
    launches |= {name: copying(s, one_more(name)) for name in outputs}
    if s.operation == "moe_permute":

        def behind(o: Any) -> None:
            launches["right"](o)
            o.positions.as_strided((1,), (1,), o.positions.numel()).zero_()

        launches["behind"] = behind
    found = measure.check(s, m, weights_of(s, m), launches)
    right = found.pop("right")
    assert isinstance(right, float), found
    assert right < 2e-3
    assert all(isinstance(why, str) for why in found.values()), found


@pytest.mark.parametrize("s", [PERMUTE, MAPPED], ids=by_key)
def test_the_reference_puts_each_token_where_positions_say(s: Any) -> None:
    weights = weights_of(s, 9)
    experts = torch.randint(-2, s.experts + 3, (9, s.top_k), generator=weights.generator)
    o = weights.made(experts)
    wanted = tuning(s).measures().reference(s, o)
    ends, begin = wanted["ends"].long().tolist(), 0
    for expert, end in enumerate(ends):
        places = [tuple(place) for place in (o.local() == expert).nonzero().tolist()]
        assert [int(wanted["positions"][place]) for place in places] == list(range(begin, end))
        for row, (token, _) in zip(range(begin, end), places, strict=True):
            assert torch.equal(wanted["rows"][row], o.x[token].float())
        begin = end
    assert bool(torch.isnan(wanted["rows"][begin:]).all())
    here = (experts >= 0) & (experts < s.experts)
    if s is PERMUTE:
        assert torch.equal(wanted["positions"] >= 0, here)
    assert begin < experts.numel()


def test_the_sum_is_of_what_positions_name() -> None:
    weights = weights_of(COMBINE, 5)
    (o,) = weights.unusual(5)
    wanted = tuning(COMBINE).measures().reference(COMBINE, o)["y"]
    assert bool((o.positions < 0).any())
    assert bool(torch.isnan(o.rows).any())
    for token in range(5):
        terms = [o.weights[token, j] * o.rows[p].float() for j, p in enumerate(o.positions[token].tolist()) if p >= 0]
        torch.testing.assert_close(wanted[token], sum(terms, torch.zeros(COMBINE.n)))


def test_the_reference_weighs_each_row_by_its_assignment_and_quantises_that() -> None:
    (o, *_) = weights_of(QUANTISED, 9).operands(9)
    wanted = tuning(QUANTISED).measures().reference(QUANTISED, o)
    for token in range(9):
        for slot, row in enumerate(wanted["positions"][token].long().tolist()):
            x = (o.x[token].float() * o.weights[token, slot]).bfloat16().float()
            scales = wanted["scale"][row].repeat_interleave(128)
            torch.testing.assert_close(wanted["rows"][row] * scales, x)
            assert float(wanted["rows"][row][:128].abs().max()) in (0.0, pytest.approx(448.0))


@pytest.mark.parametrize("globally", [0, 30])
@pytest.mark.parametrize("m", [3, 64])
def test_a_check_has_ids_of_experts_elsewhere(globally: int, m: int) -> None:
    s = replace(PERMUTE, global_experts=globally)
    *_, some = weights_of(s, m, 1).unusual(m)
    away = int((some.local() < 0).sum())
    assert 0 < away < some.ids.numel()
    assert bool(torch.isnan(tuning(s).measures().reference(s, some)["rows"][-away:]).all())


@pytest.mark.parametrize("s", [PERMUTE, MAPPED, WEIGHED], ids=by_key)
def test_what_torch_runs_in_the_place_of_a_permutation_is_one(s: Any) -> None:
    of = permute_measures.PermuteMeasures()
    (example, *_) = weights_of(s, 23).operands(23)
    name, launch = of.baseline(s, example)
    assert "sort" in name
    for m in (23, 5, 60):  # one is made for all M
        (o, *_) = weights_of(s, m).operands(m)
        for found, wanted in zip(launch(o), of.reference(s, o).values(), strict=True):
            assert torch.equal(found.double(), wanted.double().reshape(found.shape))


def test_the_least_time_is_that_of_bytes() -> None:
    assert tuning(PERMUTE).work(PERMUTE, 100).bytes == 100 * 5 * 64 + 4 * (2 * 400 + 12)
    assert tuning(COMBINE).work(COMBINE, 100).bytes == 100 * (5 * 64 + 8 * 4)
    assert combine_measures.CombineMeasures().max_error(COMBINE, "y") == measure.tolerance("bf16")
