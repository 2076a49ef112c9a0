"""How calls say which scales of weights in e4m3 alone are meant, for A in bf16."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.errors import ArgumentError
from runtime.gemm.call import signature_of
from runtime.numbers.epilogue import Epilogue
from runtime.program.record import TensorView

N, K = 16, 2048  # of which scales of blocks, (1, 16), look like a row of channels'


def view(shape: tuple[int, ...], dtype: str) -> TensorView:
    strides = tuple(shape[1] if axis == 0 else 1 for axis in range(len(shape))) if len(shape) > 1 else (1,)
    return TensorView(0, dtype, shape, strides, 0)


def scaling(scale_b: tuple[int, ...], a: str = "bf16", n: int = N, **more: Any) -> str:
    views = {
        "a": view((5, K), a),
        "b": view((n, K), "e4m3"),
        "d": view((5, n), "bf16" if a == "bf16" else a),
        "scale_b": view(scale_b, "f32"),
    }
    return signature_of(views | more, Epilogue(), "serial").scaling


def test_blocks_and_channels_are_told_apart_by_shape() -> None:
    assert scaling((1, 16)) == scaling((2, 16), n=256) == "block_weight"
    assert scaling((16,)) == scaling((16, 1)) == "column_weight"


def test_a_row_of_channels_is_refused_where_it_could_be_meant() -> None:
    with pytest.raises(ArgumentError, match=r"block_weight \(2, 16\) of f32 or column_weight \(256,\) of f32$"):
        scaling((1, 256), n=256)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"scale_ab": view((1,), "f32")}, "scale_ab is for the scaling nvfp4, found block_weight"),
        ({"a": "f16"}, "under a of f16: there is none$"),
    ],
)
def test_what_does_not_go_together_is_said(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        scaling((1, 16), **more)
