"""Claims about many examples of hypothesis's: of few of them in `make test`, and of many among the long tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    """The argument `examples` of a test is `few`, and `many` where long tests run."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.long)])


def run_examples(examples: int, check: Callable[..., None], **arguments: st.SearchStrategy[Any]) -> None:
    """`check` with so many draws of its arguments; fails at the simplest that it fails for."""
    settings(max_examples=examples)(given(**arguments)(check))()
