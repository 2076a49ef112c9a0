"""The names of devices that `runtime.load` takes, and that no other reaches the driver."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import runtime
from runtime import ArgumentError
from runtime.device.ordinal import ordinal_of

from . import served_gemm as on_library

archive_path = on_library.archive_path  # a fixture


def of_torch(kind: str, index: int | None) -> Any:
    """What a `torch.device` shows of itself."""
    return SimpleNamespace(type=kind, index=index)


@pytest.mark.parametrize("device", [1, "cuda:1", of_torch("cuda", 1), np.int64(1)])
def test_ordinals_words_and_devices_of_torch_name_one_device(device: Any) -> None:
    assert ordinal_of(device) == 1


@pytest.mark.parametrize("device", [None, "cuda", of_torch("cuda", None)])
def test_device_without_an_ordinal_is_the_current_one(device: Any) -> None:
    assert ordinal_of(device) is None


def test_devices_of_torch_itself_are_understood() -> None:
    torch = pytest.importorskip("torch")
    assert ordinal_of(torch.device("cuda:3")) == 3
    assert ordinal_of(torch.device("cuda")) is None
    with pytest.raises(ArgumentError, match=r"found device\(type='cpu'\)"):
        ordinal_of(torch.device("cpu"))


NO_DEVICES = [
    *(-1, True, False, 1.5, 1 << 31, [0]),
    *("cpu", "cuda:x", "cuda:", "cuda:-1", "cuda:1.5", "cuda:\N{SUPERSCRIPT TWO}", "cuda:" + "9" * 5000, "0", ""),
    *(of_torch("cpu", None), of_torch("cuda", -1)),
]


@pytest.mark.parametrize("device", NO_DEVICES, ids=lambda device: f"{device!r:.30}")
def test_load_refuses_what_names_no_device_before_it_opens_a_file(tmp_path: Path, device: Any) -> None:
    with pytest.raises(ArgumentError, match=r"device must be an ordinal from 0 up, 'cuda:0' .*; found ") as caught:
        runtime.load(tmp_path / "missing.aot", device=device)
    assert "\n" not in str(caught.value)


def test_loaded_library_is_for_the_device_that_was_named(archive_path: Path) -> None:
    with runtime.load(archive_path, device="cuda:1") as library:
        assert library._driver.known_device == 1
