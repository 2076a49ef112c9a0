"""`require_signed` of `runtime.load` holds for every layer, at first and at each reload."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("securesystemslib", reason="the extra `sign` is not installed")

from runtime import ArgumentError, Library, SignatureError, load
from runtime.serve.layers import open_archives, opener

from .recording_driver import RecordingDriver
from .reloaded import driver as driver
from .reloaded import path as path
from .reloaded import version, write
from .signed_archives import make_key, sign


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key(tmp_path / "release.key", tmp_path / "keys" / "release.pub")
    return tmp_path / "release.key"


@pytest.fixture
def library(path: Path, key: Path, driver: RecordingDriver) -> Library:
    sign(path, key)
    open_signed = opener(path.with_name("keys"))
    return Library(open_signed([path]), driver, open_files=open_signed)


def test_load_opens_what_is_signed(path: Path, key: Path) -> None:
    sign(path, key)
    with load(path, require_signed=path.with_name("keys")) as lib, load(path) as other:
        assert lib.digest == other.digest


def test_load_refuses_what_is_not(path: Path, key: Path) -> None:
    with pytest.raises(SignatureError, match=r"model\.aot\.sig"):
        load(path, require_signed=str(path.with_name("keys")))


def test_every_layer_must_be_signed(path: Path, key: Path, driver: RecordingDriver) -> None:
    patch = path.with_name("patch.aot")
    write(patch, 1, driver)
    keys = path.with_name("keys")
    for one, other in ((path, patch), (patch, path)):
        sign(one, key)
        Path(f"{other}.sig").unlink(missing_ok=True)
        with pytest.raises(SignatureError, match=other.name):
            load([path, patch], require_signed=keys)
    sign(path, key)
    load([path, patch], require_signed=keys).close()


def test_require_signed_goes_with_require_tuned(path: Path, key: Path) -> None:
    with pytest.raises(SignatureError):
        load(path, require="tuned", require_signed=path.with_name("keys"))


@pytest.mark.parametrize("keys", ["", True, 7, ["keys"]])
def test_what_is_no_path_of_keys_does_not_turn_it_off(path: Path, keys: Any) -> None:
    with pytest.raises(ArgumentError, match="require_signed must be the path"):
        load(path, require_signed=keys)


def test_reload_serves_what_is_signed(library: Library, path: Path, key: Path, driver: RecordingDriver) -> None:
    write(path, 1, driver)
    sign(path, key)
    assert library.reload()
    assert version(library, driver) == "kernel_v1"


@pytest.mark.parametrize("layers", [1, 2])
def test_reload_to_what_is_not_signed_leaves_the_old_in_service(
    library: Library, path: Path, driver: RecordingDriver, layers: int
) -> None:
    new = path.with_name("new.aot")
    write(new, 1, driver)
    with pytest.raises(SignatureError, match=r"new\.aot\.sig"):
        library.reload([path, new][-layers:])
    assert version(library, driver) == "kernel_v0"
    assert library.reload() is False


def test_reload_reads_the_policy_anew(library: Library, path: Path) -> None:
    path.with_name("keys").joinpath("policy.json").write_text(json.dumps({"archives": {"model": 8}}))
    with pytest.raises(SignatureError, match="at least 8"):
        library.reload()


def test_keys_are_those_of_the_folder_that_was_named_first(
    path: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign(path, key)
    monkeypatch.chdir(tmp_path)
    open_signed = opener("keys")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for archive in open_signed([path]):
        archive.close()


def test_refused_archives_are_closed(path: Path, key: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SignatureError):
        opener(path.with_name("keys"))([path])
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_it_nothing_of_signatures_is_asked(path: Path) -> None:
    assert opener(None) is open_archives
