"""Random operands, references and baselines on the CPU: against loops written out, and against what must be noticed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from aot.tune import measure
from aot.tune.elements import TORCH_DTYPES
from aot.tune.gemm.operands import OperandSet, Weights, max_error, put_zeros, reference
from runtime.errors import ProgramError, WorkspaceError
from runtime.gemm.call import EXTRAS
from runtime.gemm.fallback import one_call, torch_gemm, torch_runs
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.program.operation import extents_at

torch = pytest.importorskip("torch")

from aot.tune.gemm.baseline import baseline  # noqa: E402  # needs torch

PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 144, 160)
QUICK_TO_COMPILE = "gelu_tanh", "bias+geglu_tanh+residual+scale"  # of epilogues of 16-bit A and B, enough
FP8 = dataclasses.replace(PLAIN, a="e4m3", b="e4m3")
SAMPLES = [
    PLAIN,
    dataclasses.replace(PLAIN, b_major="n"),
    dataclasses.replace(PLAIN, batch=3),
    dataclasses.replace(PLAIN, batch=3, b_major="n"),
    *(dataclasses.replace(PLAIN, epilogue=e) for e in ("bias", "relu", "gelu", "gelu_tanh", "silu", "residual")),
    *(
        dataclasses.replace(PLAIN, epilogue=e)
        for e in ("swiglu", "geglu_interleaved", "bias+geglu_tanh+residual+scale")
    ),
    dataclasses.replace(PLAIN, a="f16", b="f16", d="f16", epilogue="bias+swiglu_interleaved+residual"),
    dataclasses.replace(PLAIN, d="e4m3", epilogue="silu+scale"),
    FP8,
    *(dataclasses.replace(FP8, scaling=s) for s in ("tensor", "row_column", "block")),
    dataclasses.replace(FP8, scaling="block", d="f16", epilogue="bias+silu+residual"),
    dataclasses.replace(FP8, scaling="row_column", d="e4m3", epilogue="swiglu+scale"),
]


def by_name(s: Signature) -> str:
    return s.key()


def made(s: Signature, m: int = 5, seed: int = 0) -> OperandSet:
    return Weights(s, m, 0, seed, device="cpu").operands(m)[0]


def activation(name: str, x: float) -> float:
    return {
        "none": lambda: x,
        "relu": lambda: max(x, 0.0),
        "silu": lambda: x / (1 + math.exp(-x)),
        "gelu": lambda: x * (1 + math.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    }[name]()


def element(s: Signature, o: OperandSet, m: int, column: int) -> float:
    """One element of D, as the docstrings of `runtime.gemm.signature` have it."""
    x = {name: t.double() for name, t in o.extras.items()}

    def total(n: int) -> float:
        value = 0.0
        for k in range(s.k):
            product = float(o.a[m, k]) * float(o.b[n, k])
            if s.scaling == "block":
                product *= float(x["scale_a"][m, k // 128] * x["scale_b"][n // 128, k // 128])
            value += product
        if s.scaling == "tensor":
            value *= float(x["scale_a"][0] * x["scale_b"][0])
        if s.scaling == "row_column":
            value *= float(x["scale_a"][m] * x["scale_b"][n])
        return value + (float(x["bias"][n]) if s.parts.bias else 0.0)

    if s.parts.gated:
        gate, up = (2 * column, 2 * column + 1) if s.parts.interleaved else (column, s.n // 2 + column)
        name = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}[s.parts.activation]
        value = activation(name, total(gate)) * total(up)
    else:
        value = activation(s.parts.activation, total(column))
    if s.parts.residual:
        value += float(x["residual"][m, column])
    if s.parts.scale:
        value *= float(x["scale_d"][0])
    return max(-448.0, min(448.0, value)) if s.d == "e4m3" else value


def test_sets_of_operands_exceed_l2_three_times_but_no_graph() -> None:
    l2_bytes = 1 << 20
    s = Signature("bf16", "bf16", "bf16", "f32", "none", 256, 512)
    weights = Weights(s, 16, l2_bytes, 0, "cpu")
    assert 3 * l2_bytes <= len(weights.b) * s.bytes(16) < 3 * l2_bytes + s.bytes(16)
    tiny = Signature("bf16", "bf16", "bf16", "f32", "none", 8, 8)
    assert len(Weights(tiny, 1, l2_bytes, 0, "cpu").b) == measure.MOST_LAUNCHES


@pytest.mark.parametrize("s", [s for s in SAMPLES if s.batch == 1], ids=by_name)
def test_reference_is_what_the_signature_says(s: Signature) -> None:
    o = made(s)
    found = reference(s, o)
    assert found.shape == (5, s.columns)
    for m, column in ((0, 0), (4, s.columns - 1), (2, 17), (3, 70)):
        assert float(found[m, column]) == pytest.approx(element(s, o, m, column), rel=1e-9, abs=1e-9)


def test_reference_of_a_batch_is_that_of_each() -> None:
    s = dataclasses.replace(PLAIN, batch=3)
    o = made(s)
    found = reference(s, o)
    for i in range(3):
        assert torch.equal(found[i], reference(PLAIN, OperandSet(o.a[i], o.b[i], o.d[i])))


@pytest.mark.parametrize("s", SAMPLES, ids=by_name)
def test_operands_are_those_of_the_signature(s: Signature) -> None:
    o = made(s)
    extents = extents_at(s, 5)
    wanted = [(p.dtype, tuple(extents[a] for a in p.axes)) for p in s.operands()]
    shorts = {dtype: short for short, dtype in TORCH_DTYPES.items()}
    assert [(shorts[t.dtype], tuple(t.shape)) for t in o.arguments()] == wanted
    assert list(o.extras) == [p.name for p in s.operands()[3:]]
    assert (o.b.stride(-1), o.b.stride(-2)) == ((1, s.k) if s.b_major == "k" else (s.n, 1))
    for name, t in o.extras.items():
        assert t.numel() == 1 or t.float().unique().numel() > t.numel() // 8, name
    assert bool(torch.isnan(o.d.float()).all())
    rms = reference(s, o).square().mean().sqrt().item()
    assert 0.1 < rms / (s.k**0.5 if s.a == "e4m3" and s.scaling == "none" else 1.0) < 200


def rounded(s: Signature, o: OperandSet) -> Any:
    """A right result."""
    return reference(s, o).to(o.d.dtype)


@pytest.mark.parametrize("s", SAMPLES, ids=by_name)
def test_check_accepts_right_results_only(s: Signature) -> None:
    weights = Weights(s, 17, 0, 1, device="cpu")

    def failing(o: OperandSet) -> None:
        raise ProgramError("no")

    def without(name: str) -> measure.Launch:
        def launch(o: OperandSet) -> None:
            gone = torch.ones_like if name.startswith("scale") else torch.zeros_like
            o.d.copy_(rounded(s, dataclasses.replace(o, extras={**o.extras, name: gone(o.extras[name])})))

        return launch

    def one_wrong_element(o: OperandSet) -> None:
        o.d.copy_(rounded(s, o))
        o.d.view(-1)[7:8] = (o.d.view(-1)[7:8].float() + 0.3 * reference(s, o).square().mean().sqrt()).to(o.d.dtype)

    launches: dict[str, measure.Launch] = {
        "right": lambda o: o.d.copy_(rounded(s, o)),
        "unwritten": lambda o: None,
        "one element": one_wrong_element,
        "failing": failing,
        "behind": lambda o: o.d.as_strided((1,), (1,), o.d.numel()).copy_(torch.zeros(1)),
        **{name: without(name) for name in made(s).extras},
    }
    found = measure.check(s, 17, weights, launches)
    assert isinstance(found.pop("right"), float), found
    assert found.pop("failing") == "ProgramError: no"
    assert found.pop("behind") == "it writes behind the output"
    assert found.pop("unwritten") == "it leaves part of the output unwritten, or writes NaN"
    for name, reason in found.items():
        assert isinstance(reason, str), name
        assert reason.startswith("relative error"), name


@pytest.mark.parametrize(
    ("d", "elements", "share", "right"),
    [
        ("e4m3", 16, 1.3, True),
        ("e4m3", 16, 1.6, False),
        ("e4m3", 1 << 20, 1.003, False),
        ("e4m3", 1 << 20, 0.99, True),
        ("bf16", 16, 1.01, False),
        ("bf16", 16, 0.99, True),
    ],
)
def test_the_limit_of_e4m3_allows_for_few_elements_and_for_no_more(
    d: str, elements: int, share: float, right: bool
) -> None:
    s = Signature("bf16", "bf16", d, "f32", "none", 16, 16)
    expected = torch.ones(1, elements)
    out = expected * (1 + share * max_error(s))
    wanted = measure._Expected.of(expected, d, max_error(s))
    guarded = torch.full((measure._GUARD_ROWS, elements), math.nan)
    assert isinstance(measure._judge(guarded, out, wanted), float) == right


def test_no_memory_for_a_workspace_is_not_the_functions_fault() -> None:
    s = Signature("bf16", "bf16", "bf16", "f32", "none", 16, 16)

    def launch(_: OperandSet) -> None:
        raise WorkspaceError("no memory")

    with pytest.raises(WorkspaceError):
        measure.check(s, 3, Weights(s, 3, 0, 0, device="cpu"), {"right": launch})


def test_limits_are_those_of_the_output_and_of_how_sums_are_kept() -> None:
    found = {s.key(): max_error(s) for s in SAMPLES}
    assert found[PLAIN.key()] == 3e-3
    assert found[FP8.key()] == 1e-2
    assert {found[dataclasses.replace(FP8, scaling=s).key()] for s in ("row_column", "block")} == {3e-3}
    assert {max_error(s) for s in SAMPLES if s.d == "e4m3"} == {4e-2}
    assert {max_error(s) for s in SAMPLES if s.a == s.d == "f16"} == {5e-4}


@pytest.mark.parametrize("s", [s for s in SAMPLES if torch_runs(s)], ids=by_name)
def test_one_call_of_torch_is_what_the_baseline_measures(s: Signature, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def seen(x: Any) -> Any:
        return (x.data_ptr(), tuple(x.shape), x.stride()) if isinstance(x, torch.Tensor) else x

    def recorded(name: str, real: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            calls.append((name, *map(seen, given), *sorted((key, seen(x)) for key, x in more.items())))
            return real(*given, **more)

        return call

    o = made(s, 16)
    name, launch = baseline(s, o)
    if "dequantise" in name:
        pytest.skip("torch has no such product on a CPU")
    for function in ("mm", "bmm", "addmm", "_scaled_mm"):
        monkeypatch.setattr(torch, function, recorded(function, getattr(torch, function)))
    launch(o)
    run = one_call(s)
    assert run is not None
    assert run(torch, o.a, o.b, tuple(o.extras.get(name) for name in EXTRAS), o.d) is o.d
    assert len(calls) == 2
    assert calls[0] == calls[1]
    error = (o.d.double() - reference(s, o)).norm() / reference(s, o).norm()
    assert float(error) < 2 * DTYPES[s.d].tolerance


@pytest.mark.parametrize(
    "s",
    [
        pytest.param(s, marks=[pytest.mark.long] * (s.a != "e4m3" and s.epilogue not in QUICK_TO_COMPILE))
        for s in SAMPLES
        if not torch_runs(s)
    ],
    ids=by_name,
)
def test_what_torch_has_no_one_call_for_takes_the_baseline_more(s: Signature) -> None:
    """But for e4m3 without scales, for which torch wants factors that nobody passes."""
    name, _ = baseline(s, made(s, 8))
    alone = s.a == "e4m3" and s.scaling == "none" and "dequantise" not in name
    assert alone or "torch.compile" in name or "dequantise" in name


@pytest.mark.parametrize("s", [s for s in SAMPLES if DTYPES[s.a].bits == 16 and s.a == s.d], ids=by_name)
def test_fallback_of_the_runtime_computes_the_signature(s: Signature) -> None:
    o = made(s, 17)
    torch_gemm(torch, s.parts, {"a": o.a, "b": o.b, **o.extras}, o.d)
    error = (o.d.double() - reference(s, o)).norm() / reference(s, o).norm()
    assert float(error) < 2 * DTYPES[s.d].tolerance


def test_fallback_takes_the_residual_in_place() -> None:
    s = dataclasses.replace(PLAIN, epilogue="residual")
    o = made(s)
    expected = reference(s, o)
    x = o.extras["residual"].clone()
    torch_gemm(torch, s.parts, {"a": o.a, "b": o.b, "residual": x}, x)
    assert float((x.double() - expected).norm() / expected.norm()) < 2 * DTYPES["bf16"].tolerance


# --- baselines; on the CPU torch has less, so names differ from a GPU's ---


@pytest.mark.parametrize("s", SAMPLES, ids=by_name)
def test_baseline_computes_the_signature_at_other_m_too(s: Signature, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend="eager", **options))
    name, launch = baseline(s, made(s, 8))
    assert "in torch.compile" not in name
    assert ("torch.compile'd" in name) == (s.epilogue not in ("none", "bias"))
    for m in (8, 3, 1, 17):
        o = made(s, m, seed=m)
        launch(o)
        expected = reference(s, o)
        assert float((o.d.double() - expected).norm() / expected.norm()) < 2.5 * DTYPES[s.d].tolerance, name


def test_baseline_says_where_torch_compile_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(f: Any, **options: Any) -> Any:
        def run(*arguments: Any) -> None:
            raise OSError("no compiler")

        return run

    monkeypatch.setattr(torch, "compile", compile)
    s = dataclasses.replace(PLAIN, epilogue="swiglu")
    name, launch = baseline(s, made(s))
    assert name == "torch.mm, eager swiglu (OSError in torch.compile)"
    o = made(s)
    launch(o)
    assert not torch.isnan(o.d.float()).any()


def refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("not on this GPU\nand more")


def test_baseline_of_extents_that_scaled_mm_does_not_take_is_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    for scaling in ("none", "tensor", "row_column"):
        s = dataclasses.replace(FP8, scaling=scaling)
        o = made(s)
        name, launch = baseline(s, o)
        assert name.startswith("dequantise, torch.mm")
        launch(o)
        assert float((o.d.double() - reference(s, o)).norm() / reference(s, o).norm()) < 2 * DTYPES[s.d].tolerance


def test_baseline_names_what_torch_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", refuse)
    with pytest.raises(measure.MeasureError, match=r"torch cannot compute .*torch.mm: not on this GPU"):
        baseline(PLAIN, made(PLAIN))


@pytest.mark.parametrize("s", SAMPLES, ids=by_name)
def test_rows_of_zeros_have_one_sign_each_and_meet_positive_numbers(s: Signature) -> None:
    o, untouched = made(s, 13), made(s, 13)
    put_zeros(o)
    a, b = o.a.float(), o.b.float()
    for row, negative in ((5, False), (11, True)):
        assert (a[..., row, :] == 0).all()
        assert (torch.signbit(a[..., row, :]) == negative).all()
    assert (b[..., 0, :] >= 0).all()
    assert torch.equal(b.abs(), untouched.b.float().abs())
    assert torch.equal(a[..., :5, :], untouched.a.float()[..., :5, :])
    few = made(s, 3)
    put_zeros(few)
    assert torch.equal(few.a.float(), made(s, 3).a.float())
