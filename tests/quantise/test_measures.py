"""What tuning measures quantise by, on the CPU: operands, references, what checks notice; and permutations likewise."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from aot.tune import measure  # noqa: E402  # needs torch
from aot.tune.operation import tuning  # noqa: E402
from aot.tune.quantise.measures import quantised  # noqa: E402
from runtime.moe.permute import Signature as Permute  # noqa: E402
from runtime.program.operation import operation  # noqa: E402
from runtime.quantise import Signature  # noqa: E402

from ..moe.test_measures import copying, weights_of  # noqa: E402

SIGNATURES: list[Any] = [
    Signature("bf16", "e4m3", 400, "block"),
    Signature("f16", "e4m3", 256, "row_column", 5),
    Signature("bf16", "e4m3", 400, "block", activation="swiglu"),
    Permute("bf16", 12, 4, 400, scaling="block"),
    Permute("bf16", 12, 4, 256, 30, "row_column"),
]
each = pytest.mark.parametrize("s", SIGNATURES, ids=lambda s: str(s.key()))


@each
@pytest.mark.parametrize("m", [1, 17])
def test_operands_are_those_of_the_signature(s: Any, m: int) -> None:
    (o, *_) = weights_of(s, m).operands(m)
    views = operation(s.operation).arguments(s, m, 0)
    assert [(tuple(t.shape), t.stride()) for t in o.arguments()] == [(v.shape, v.strides) for v in views]
    assert [measure.name_of(t) for t in o.arguments()] == [v.dtype for v in views]


@each
def test_a_check_takes_what_is_right_and_notices_what_is_not(s: Any) -> None:
    """Another scale, another number, and a row of no group that was written."""
    rows = "y" if s.operation == "quantise" else "rows"

    def one_less(wanted: dict[str, Any], name: str, factor: float) -> None:
        wanted[name].view(-1)[:1] *= factor

    launches = {
        "right": copying(s, lambda wanted: None),
        "nothing": lambda o: None,
        # Behind gates scales are as exact as what these make.
        "scale": copying(s, lambda wanted: one_less(wanted, "scale", 8.0 if s.key().endswith("swiglu") else 1.5)),
        "number": copying(s, lambda wanted: one_less(wanted, rows, -1.0)),
    }
    found = measure.check(s, 17, weights_of(s, 17), launches)
    assert isinstance(found.pop("right"), float)
    assert all(isinstance(why, str) for why in found.values()), found


def test_gates_come_first_and_what_they_make_is_rounded() -> None:
    s = SIGNATURES[2]
    (o, *_) = weights_of(s, 17).operands(17)
    gates, ups = o.x[:, :400].float(), o.x[:, 400:].float()
    y, scale = quantised((gates * torch.sigmoid(gates) * ups).bfloat16(), "e4m3", "block")
    wanted = tuning(s).measures().reference(s, o)
    torch.testing.assert_close(wanted["scale"], scale, rtol=2**-7, atol=0)
    torch.testing.assert_close(wanted["y"], y, rtol=2**-6, atol=1e-3)
    assert tuning(s).work(s, 1000).bytes == 1000 * (2 * 2 * 400 + 400 + 4 * 4)
    name, launch = tuning(s).measures().baseline(s, o)
    assert name == "torch.compile'd swiglu, amax, quotient and rounding"
    torch.testing.assert_close(launch(o)[1], scale, rtol=2**-7, atol=0)


def test_rows_of_no_group_are_not_to_be_written() -> None:
    s = SIGNATURES[1]
    (o,) = weights_of(s, 17).unusual(17)
    wanted = tuning(s).measures().reference(s, o)
    assert bool(wanted["y"][11:].isnan().all() and wanted["scale"][11:].isnan().all())
    assert not bool(wanted["y"][:11].isnan().any())


@pytest.mark.parametrize("scaling", ["block", "row_column"])
def test_what_is_quantised_times_its_scales_is_what_it_was(scaling: str) -> None:
    x = torch.randn((7, 400), generator=torch.Generator().manual_seed(0)).bfloat16()
    y, scale = quantised(x, "e4m3", scaling)
    whole = scale[:, None] if scaling == "row_column" else scale.repeat_interleave(128, 1)[:, :400]
    torch.testing.assert_close(y * whole, x.float())
    assert float(y.abs().max()) == pytest.approx(448.0)
    y, scale = quantised(torch.zeros((2, 128)), "e4m3", scaling)
    assert not bool(y.any())
    assert float(scale.min()) > 0
