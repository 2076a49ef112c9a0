"""Operators that are given tensors of classes which answer for themselves, as weights of vLLM's do."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from runtime.torch import operator


class Weight(torch.nn.Parameter):
    """Counts what is asked of it."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Seen:
    """Stands for a library: keeps what reaches it."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []

    def gemm(self, a: Any, b: Any, **more: Any) -> Any:
        self.tensors += [a, b]
        return a.new_empty(a.shape[0], b.shape[0])


def test_the_library_gets_plain_tensors_of_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, weight = Seen(), Weight(torch.randn(8, 4), requires_grad=False)
    monkeypatch.setattr(operator, "library_of", lambda number: seen)
    a = torch.randn(2, 4)
    operator.GEMM(1, a, weight)
    operator._GEMM_OUT(1, a, weight, torch.empty(2, 8))
    before = Weight.asked
    assert [type(x) for x in seen.tensors] == [torch.Tensor] * 4
    assert [x.data_ptr() for x in seen.tensors[1::2]] == [torch.Tensor.data_ptr(weight)] * 2
    assert Weight.asked == before + 1  # by the line above, for one weight twice: what was seen has no such class


def test_a_class_that_has_none_is_passed_on_as_it_is() -> None:
    for x in (torch.randn(2, 4), torch.nn.Parameter(torch.randn(2, 4))):
        assert operator.bare(x) is x
