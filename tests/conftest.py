"""Options and fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--archive", metavar="PATH", help="an archive tuned for this machine's GPU, for tests marked gpu")


def _missing_gpu() -> str:
    """Why tests that need a GPU cannot run here; empty if they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "there is no CUDA GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _missing_gpu() if marked else ""
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tuned_archive(request: pytest.FixtureRequest) -> Path:
    """The archive that `--archive` names."""
    path = request.config.getoption("--archive")
    if path is None:
        pytest.skip("needs --archive PATH, an archive tuned for this GPU")
    return Path(path)
