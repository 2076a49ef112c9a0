"""What tuning measures RMSNorm by, on the CPU: operands, the reference against loops, what checks notice, baselines."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from aot.tune import measure  # noqa: E402  # needs torch
from aot.tune.operation import tuning  # noqa: E402
from aot.tune.rmsnorm.measures import OperandSet, RmsNormMeasures, Weights  # noqa: E402
from runtime.errors import ProgramError  # noqa: E402
from runtime.rmsnorm import RMSNORM, USUAL_EPS, Signature  # noqa: E402

OF = Signature("bf16", "bf16", "bf16", 256)
ADDED = Signature("bf16", "bf16", "bf16", 256, "bf16")
SAMPLES = [OF, ADDED, Signature("f16", "f16", "f16", 64), Signature("bf16", "f32", "f16", 128)]
SCALED = [
    Signature("bf16", "bf16", "e4m3", 400, "bf16", "block"),
    Signature("f16", "f16", "e4m3", 256, scaling="row_column"),
]
MEASURES = RmsNormMeasures()


def by_name(s: Signature) -> str:
    return s.key()


def made(s: Signature, m: int = 17, seed: int = 0) -> OperandSet:
    return Weights(s, m, 0, seed, device="cpu").operands(m)[0]


def expected(s: Signature, o: OperandSet) -> Any:
    return MEASURES.reference(s, o)["y"]


def writes(s: Signature, **change: Any) -> Callable[[OperandSet], None]:
    """What computes RMSNorm with some operands replaced, and rounds it to what is written."""

    def launch(o: OperandSet) -> None:
        given = {name: made(getattr(o, name)) if callable(made) else made for name, made in change.items()}
        for name, value in MEASURES.reference(s, dataclasses.replace(o, **given)).items():
            o.outputs()[name].copy_(value)

    return launch


@pytest.mark.parametrize("s", [*SAMPLES, *SCALED], ids=by_name)
def test_operands_are_those_of_the_signature(s: Signature) -> None:
    o = made(s)
    *views, eps = RMSNORM.arguments(s, 17, 0)
    of_launch = o.arguments()[-1]
    tensors: list[Any] = list(o.arguments()[:-1])
    assert [(tuple(t.shape), t.stride()) for t in tensors] == [(v.shape, v.strides) for v in views]
    assert [measure.name_of(t) for t in tensors] == [v.dtype for v in views]
    assert type(of_launch) is type(eps)
    assert of_launch != USUAL_EPS, "which a function might have for its own"
    assert bool(torch.isnan(o.y.float()).all())


def test_weights_stay_from_one_m_to_the_next_and_are_enough_to_find_l2_cold() -> None:
    weights = Weights(OF, 16, 1 << 20, 0, "cpu")
    first, second = weights.operands(16), weights.operands(3)
    assert all(a.weight is b.weight for a, b in zip(first, second, strict=True))
    assert 3 << 20 <= len(first) * tuning(OF).work(OF, 16).bytes < (3 << 20) + tuning(OF).work(OF, 16).bytes
    assert len({float(o.x.float().sum()) for o in first[:8]}) == 8


@pytest.mark.parametrize("s", SAMPLES, ids=by_name)
def test_reference_is_what_the_operation_says(s: Signature) -> None:
    o = made(s)
    found = expected(s, o)
    for row, column in ((0, 0), (5, 3), (16, s.n - 1), (9, 17)):
        x = [float(value) for value in (o.x[row].double() + (0 if o.residual is None else o.residual[row].double()))]
        mean = math.fsum(value * value for value in x) / s.n
        value = x[column] * float(o.weight[column]) / math.sqrt(mean + o.eps)
        assert float(found[row, column]) == pytest.approx(value, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("s", SCALED, ids=by_name)
def test_reference_with_scales_is_what_quantising_makes_of_the_norm(s: Signature) -> None:
    o = made(s)
    found = MEASURES.reference(s, o)
    norm = MEASURES.reference(dataclasses.replace(s, y=s.x, scaling="none"), o)["y"].to(o.x.dtype).double()
    scale = found["scale"].double().reshape(17, -1).repeat_interleave(128 if s.scaling == "block" else s.n, 1)
    torch.testing.assert_close(found["y"].double() * scale[:, : s.n], norm, rtol=1e-5, atol=1e-12)
    assert float(found["y"].abs().amax()) == pytest.approx(448.0)


@pytest.mark.parametrize("s", SCALED, ids=by_name)
def test_check_notices_other_scales_numbers_and_sums(s: Signature) -> None:
    def other(name: str, factor: float) -> Callable[[OperandSet], None]:
        def launch(o: OperandSet) -> None:
            writes(s)(o)
            part = o.outputs()[name].view(-1)[:1]
            part.copy_(part.float() * factor)

        return launch

    launches: dict[str, measure.Launch] = {
        "right": writes(s),
        "nothing": lambda o: None,
        "scale": other("scale", 1.5),
        "number": other("y", -1.0),
        "no weight": writes(s, weight=torch.ones_like),
    }
    found = measure.check(s, 17, Weights(s, 17, 0, 1, device="cpu"), launches)
    assert isinstance(found.pop("right"), float), found
    assert all(isinstance(why, str) for why in found.values()), found


@pytest.mark.parametrize("s", SAMPLES, ids=by_name)
@pytest.mark.parametrize("m", [1, 17])
def test_check_accepts_right_results_only(s: Signature, m: int) -> None:
    def failing(o: OperandSet) -> None:
        raise ProgramError("no")

    def one_wrong_element(o: OperandSet) -> None:
        writes(s)(o)
        o.y.view(-1)[7] += 0.1 * expected(s, o).square().mean().sqrt()

    launches: dict[str, measure.Launch] = {
        "right": writes(s),
        "unwritten": lambda o: None,
        "one element": one_wrong_element,
        "failing": failing,
        "behind": lambda o: o.y.as_strided((1,), (1,), o.y.numel()).zero_(),
        "no weight": writes(s, weight=torch.ones_like),
        "rows of others": writes(s, x=lambda x: x.roll(1, 1)),
        "half of a row": writes(s, x=lambda x: x * (torch.arange(s.n) < s.n // 2)),
    }
    if m > 1:  # a row alone may be so large that eps does not matter
        launches |= {"its own eps": writes(s, eps=USUAL_EPS), "no eps": writes(s, eps=0.0)}
    found = measure.check(s, m, Weights(s, m, 0, 1, device="cpu"), launches)
    assert isinstance(found.pop("right"), float), found
    assert found.pop("failing") == "ProgramError: no"
    assert found.pop("behind") == "it writes behind the output"
    assert found.pop("unwritten") == "it leaves part of the output unwritten, or writes NaN"
    if m > 1:
        assert found.pop("no eps") == "it leaves part of the output unwritten, or writes NaN", "of the row of zeros"
    for name, reason in found.items():
        assert isinstance(reason, str), name
        assert reason.startswith("relative error"), name


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("s", SAMPLES, ids=by_name)
def test_baseline_computes_the_signature_at_other_m_too(s: Signature) -> None:
    """Of mixed types torch rounds to that of x first."""
    name, launch = MEASURES.baseline(s, made(s, 8))
    assert name == (
        "an addition, " * (s.residual != "none") + "torch.nn.functional.rms_norm" + (", to f16" if s.x != s.y else "")
    )
    for m in (8, 1, 33):
        o = made(s, m, seed=m)
        found, wanted = launch(o), expected(s, o)
        assert found.dtype == o.y.dtype
        assert float((found.double() - wanted).norm() / wanted.norm()) < 2 * max(map(measure.tolerance, (s.x, s.y)))


@pytest.mark.parametrize("s", SCALED, ids=by_name)
def test_baseline_with_scales_is_one_compiled_function(s: Signature) -> None:
    name, launch = MEASURES.baseline(s, made(s, 8))
    assert name == "torch.compile'd rms_norm, amax, quotient and rounding"
    o = made(s, 33)
    wanted, found = MEASURES.reference(s, o), dict(zip(o.written, launch(o), strict=True))
    for output, value in found.items():
        error = (value.double() - wanted[output].double()).norm() / wanted[output].double().norm()
        assert float(error) < MEASURES.max_error(s, output), output


def test_baseline_names_what_torch_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("not on this GPU\nand more")

    monkeypatch.setattr(torch.nn.functional, "rms_norm", refuse)
    with pytest.raises(measure.MeasureError, match=rf"torch cannot compute {OF.key()}: not on this GPU$"):
        MEASURES.baseline(OF, made(OF))


def test_check_notices_a_sum_that_is_another_or_missing() -> None:
    launches: dict[str, measure.Launch] = {
        "right": writes(ADDED),
        "no sum": lambda o: o.y.copy_(expected(ADDED, o)),
        "not added": writes(ADDED, residual=torch.zeros_like),
    }
    found = measure.check(ADDED, 17, Weights(ADDED, 17, 0, 1, device="cpu"), launches)
    assert isinstance(found.pop("right"), float), found
    assert found.pop("no sum") == "it leaves part of the output unwritten, or writes NaN"
    assert str(found.pop("not added")).startswith("relative error")


def test_the_least_time_is_that_of_its_bytes() -> None:
    work = tuning(OF).work(OF, 1000)
    assert work.bytes == 2 * (2 * 1000 * 256 + 256)
    assert tuning(ADDED).work(ADDED, 1000).bytes == 2 * (4 * 1000 * 256 + 256)
    by_blocks = tuning(SCALED[0]).work(SCALED[0], 1000)
    assert by_blocks.bytes == 2 * (3 * 1000 * 400 + 400) + 1000 * 400 + 4 * 1000 * 4
    large = dataclasses.replace(OF, n=8192)
    assert measure.expected_us(large, 8192) == pytest.approx(2 * measure.expected_us(large, 4096), rel=1e-3)
    assert not any(measure.power_bound(large, m) for m in (1, 64, 8192))
