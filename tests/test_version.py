"""The version that archives and `aot --version` tell."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from aot import version

from .command_line import ROOT, Run


def _nothing_installed(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_a_source_tree_says_its_version_though_it_was_never_installed(
    monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr(metadata, "version", _nothing_installed)
    assert f'\nversion = "{version.own_version()}"\n' in (ROOT / "pyproject.toml").read_text()
    assert run("--version") == (0, f"{version.own_version()}\n", "")


@pytest.mark.parametrize("beside", [None, '[project]\nname = "another"\nversion = "7"\n', "\udcff"])
def test_an_install_says_the_version_that_was_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, beside: str | None
) -> None:
    if beside is not None:
        (tmp_path / "pyproject.toml").write_text(beside, errors="surrogateescape")
    monkeypatch.setattr(version, "_PROJECT", tmp_path / "pyproject.toml")
    monkeypatch.setattr(metadata, "version", lambda name: f"{name} 5.6")
    assert version.own_version() == "cute-aot 5.6"
    monkeypatch.setattr(metadata, "version", _nothing_installed)
    assert version.own_version() == version.UNKNOWN
