"""What is installed decides the cache's keys by its contents, wherever and whenever it was installed."""

import os
import sys
import time
from pathlib import Path

import pytest

from aot.compile import toolchain as toolchains
from aot.compile.cache import Cache
from aot.compile.toolchain import Toolchain, ToolchainError, require_compiler, toolchain
from aot.search.provider import provider

DSL = "nvidia-cutlass-dsl"
LONG_AGO_NS = time.time_ns() - 10**15


def install(site: Path, name: str, files: dict[str, str], version: str = "9.8.7", listed: bool = True) -> None:
    """What pip leaves of a wheel, as far as it matters here."""
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "INSTALLER").write_text(str(site))
    for file, text in files.items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if listed:
        names = [*files, f"{metadata.name}/METADATA", f"{metadata.name}/INSTALLER", f"{metadata.name}/RECORD"]
        (metadata / "RECORD").write_text("".join(f"{file},,\n" for file in names))


def install_dsl(site: Path) -> None:
    install(site, DSL, {"dsl_packages.pth": "dsl\n"})
    files = {"dsl/a.py": "A = 1\n", "dsl/b.so": "binary", "dsl/__pycache__/a.cpython-311.pyc": f"made in {site}"}
    install(site, f"{DSL}-libs-base", files | {"../bin/tool": f"#!{site}/python"})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment in which this DSL is all that is installed."""
    site = tmp_path / "one" / "site"
    install_dsl(site)
    monkeypatch.setattr(sys, "path", [str(site)])
    return site


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def test_it_has_the_versions_of_all_that_decides_code_or_choices(cache: Cache) -> None:
    found = toolchain(cache).versions
    named = {DSL, "nvidia-cutlass-operators", "nvidia-matmul-heuristics", "zstandard", "zstd", "python"}
    assert named <= set(found)
    assert any(name.startswith(f"{DSL}-libs") for name in found)
    assert found["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"


def test_every_wheel_that_generates_code_is_named(site: Path, cache: Cache) -> None:
    install(site, f"{DSL}-libs-cu99", {"dsl/cu99.so": "x"})
    install(site, "nvidia-cutlass-operators", {"operators.py": "x"})
    assert set(toolchain(cache).wheels) == {DSL, f"{DSL}-libs-base", f"{DSL}-libs-cu99"}


@pytest.mark.usefixtures("site")
def test_the_same_contents_elsewhere_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Cache
) -> None:
    here = toolchain(cache)
    install_dsl(tmp_path / "another" / "place" / "site")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "another" / "place" / "site")])
    assert toolchain(cache) == toolchain(Cache(None)) == here


@pytest.mark.parametrize("file", ["dsl/a.py", "dsl/b.so", "dsl_packages.pth"])
@pytest.mark.parametrize("known", [False, True])
def test_a_file_edited_in_place_changes_the_digest(site: Path, cache: Cache, file: str, known: bool) -> None:
    """Though its size and its times are what they were, and though the digest before was kept."""
    path = site / file
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    if known:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(toolchains, "_SETTLED_NS", -(10**12))
            before = toolchain(cache)
    else:
        before = toolchain(cache)
    time.sleep(0.02)  # more than a tick of the clock that files are stamped by
    path.write_text(path.read_text().swapcase())
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert toolchain(cache).wheels != before.wheels
    assert toolchain(cache).versions == before.versions


@pytest.mark.parametrize("file", ["dsl/__pycache__/a.cpython-311.pyc", "../bin/tool"])
def test_what_installing_writes_does_not_count(site: Path, cache: Cache, file: str) -> None:
    before = toolchain(cache)
    (site / file).write_text("other")
    assert toolchain(cache) == before


def test_a_file_that_is_missing_or_has_another_name_shows(site: Path, cache: Cache) -> None:
    found = [toolchain(cache)]
    (site / "dsl/b.so").unlink()
    found.append(toolchain(cache))
    install(site, f"{DSL}-libs-other", {"dsl/c.so": "binary"})
    found.append(toolchain(cache))
    assert len({str(t.wheels) for t in found}) == 3


def _reads(monkeypatch: pytest.MonkeyPatch, site: Path) -> list[str]:
    """The installed files that are opened from now on."""
    opened: list[str] = []

    def noted(path: str, mode: str) -> object:
        opened.append(os.path.relpath(path, site))
        return open(path, mode)

    monkeypatch.setattr(toolchains, "open", noted, raising=False)
    return opened


def test_contents_are_read_once_and_again_when_a_file_has_changed(
    site: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchains, "_SETTLED_NS", -(10**12))
    opened = _reads(monkeypatch, site)
    found = toolchain(cache)
    assert sorted(opened) == ["dsl/a.py", "dsl/b.so", "dsl_packages.pth"]
    opened.clear()
    assert toolchain(cache) == found
    assert opened == []
    (site / "dsl/a.py").write_text("A = 12\n")
    toolchain(cache)
    assert len(opened) == 3


def test_contents_that_changed_a_moment_ago_are_not_taken_for_known(
    site: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = _reads(monkeypatch, site)
    toolchain(cache)
    toolchain(cache)
    assert len(opened) == 6


@pytest.mark.usefixtures("site")
def test_without_the_dsl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ToolchainError, match="nvidia-cutlass-dsl is not installed; pip install"):
        toolchain(Cache(None))


@pytest.mark.parametrize(
    ("installed", "target", "refused"),
    [
        (("cu12",), "sm_107a", True),
        (("cu12", "cu13"), "sm_107a", False),
        (("cu13",), "sm_110a", False),
        (("cu12",), "sm_100a", False),
    ],
)
def test_a_target_that_no_compiler_knows_is_refused_with_what_to_install(
    installed: tuple[str, ...], target: str, refused: bool
) -> None:
    tools = Toolchain({DSL: "9.8.7"}, {f"{DSL}-libs-{cuda}": "9.8.7 digest" for cuda in installed})
    if not refused:
        require_compiler(tools, [target])
        return
    with pytest.raises(ToolchainError, match=r"sm_107a needs the compiler of CUDA 13, .*\[cu13\]==9.8.7'"):
        require_compiler(tools, ["sm_90a", target])


def test_a_wheel_whose_files_cannot_be_told_is_refused(site: Path) -> None:
    install(site, f"{DSL}-libs-core", {"dsl/core.so": "x"}, listed=False)
    with pytest.raises(ToolchainError, match="lists no files; install it from its wheel"):
        toolchain(Cache(None))


def test_a_source_of_the_operator_api_edited_in_place_changes_its_providers_digest(site: Path) -> None:
    install(site, "nvidia-cutlass-operators", {"operators/gemm.py": "x = 1"})
    operators = provider("cutlass_operators")
    before = [operators.source_digest(family) for family in operators.families]
    (site / "operators/gemm.py").write_text("x = 2")
    after = [operators.source_digest(family) for family in operators.families]
    assert not set(before) & set(after)
