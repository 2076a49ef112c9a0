"""`aot rebuild`: the same bytes from what an archive says of its build, and what is said where they are not."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aot.compile import toolchain as toolchains
from aot.pack.write import Package
from aot.search import provider
from runtime.container.archive import Archive

from .command_line import COMMAND, MANIFEST, ROOT, Run
from .signed_archives import make_key
from .simulated_tuning import scripted, tuned


@pytest.fixture
def rebuild(run: Run, folder: Path) -> Any:
    """`aot rebuild ARCHIVE tiny.yaml --check`, from the cache of the build."""

    def call(path: Path, *options: object) -> Any:
        return run("rebuild", path, folder / "tiny.yaml", "--check", "--cache", folder / "cache", *options)

    return call


@pytest.fixture
def model(folder: Path) -> Path:
    """The archive tiny.aot tuned on a simulated GPU, beside it."""
    path = folder / "model.aot"
    tuned(folder / "tiny.aot", path, scripted(lambda name, s, m: 2.0))
    return path


def changed(path: Path, out: Path) -> str:
    """Write an archive with another cubin in one function; the function's name."""
    with Archive.open(path) as archive:
        package, (name, *others) = Package(), sorted(archive.functions)
        package.add_archive(archive, others)
        cubin = archive.cubin(name) + b"\0"
        record = archive.record(name)
        package.add_function(record | {"cubin": hashlib.sha256(cubin).hexdigest()}, cubin)
        for table in archive.tables:
            package.set_table(table, archive.table(table))
        package.write(out)
    return name


def test_ranked_archive_is_built_as_the_same_bytes(rebuild: Any, archive: Path, tmp_path: Path) -> None:
    done = rebuild(archive, "-o", tmp_path / "again.aot")
    assert (done.status, done.out.splitlines()[0]) == (0, f"{archive}: the same bytes were built, 9 functions")
    assert (tmp_path / "again.aot").read_bytes() == archive.read_bytes()


def test_tuned_archive_has_functions_of_the_candidates_that_it_names(rebuild: Any, model: Path, archive: Path) -> None:
    found = json.loads(rebuild(model, "--json").out)
    with Archive.open(archive) as candidates:
        assert found["candidates"] == found["rebuilt"] == candidates.digest
    assert (found["same"], found["tuned"], found["differences"]) == (True, True, [])
    assert "is one of its candidates, which were built as the same bytes" in rebuild(model).out


def test_function_with_other_bytes_is_named(rebuild: Any, model: Path, tmp_path: Path) -> None:
    name = changed(model, tmp_path / "changed.aot")
    done = rebuild(tmp_path / "changed.aot")
    assert done.status == 1
    assert f"{name}: has another record\n" in done.out
    assert done.out.endswith("is not what was built here: 1 difference\n")


def test_damage_is_told_before_anything_is_compiled(run: Run, folder: Path, archive: Path, tmp_path: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[-1] ^= 1
    (tmp_path / "damaged.aot").write_bytes(data)
    done = run("rebuild", tmp_path / "damaged.aot", folder / "tiny.yaml", "--check", "--cache", tmp_path / "cache")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert not (tmp_path / "cache").exists()


def test_candidates_that_were_others_are_told(rebuild: Any, archive: Path, tmp_path: Path) -> None:
    changed(archive, tmp_path / "others.aot")
    tuned(tmp_path / "others.aot", tmp_path / "model.aot", scripted(lambda name, s, m: 2.0))
    done = rebuild(tmp_path / "model.aot")
    assert done.status == 1
    assert "candidates: it was measured from an archive with the digest" in done.out


def test_manifest_that_it_was_not_built_of_is_refused(run: Run, folder: Path, archive: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(MANIFEST.replace("k: 512", "k: 768"))
    done = run("rebuild", archive, other, "--check")
    assert done.status == 2
    assert f"error: {other}: {archive} was not built of it" in done.err
    done = run("rebuild", archive, "--check")
    assert (done.status, "was built of a manifest of tiny too" in done.err) == (2, True)


def test_base_that_it_was_built_without_is_refused(rebuild: Any, archive: Path) -> None:
    done = rebuild(archive, "--base", archive)
    assert done.status == 2
    assert f"{archive}: was built without --base; leave it out" in done.err


def test_archive_with_a_base_is_built_over_the_same_base(rebuild: Any, build_again: Run, model: Path) -> None:
    path = model.with_name("again.aot")
    done = build_again("--base", model, "-o", path, "--force")
    assert done.status == 0, done
    done = rebuild(path)
    assert (done.status, "was built with --base, of the digest" in done.err) == (2, True)
    done = rebuild(path, "--base", model)
    assert done.status == 0, done


def test_tool_of_another_version_is_named(rebuild: Any, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = toolchains.toolchain

    def other(cache: Any) -> toolchains.Toolchain:
        found = real(cache)
        return toolchains.Toolchain(found.versions | {"nvidia-cutlass-dsl": "0.1"}, found.wheels)

    monkeypatch.setattr(toolchains, "toolchain", other)
    done = rebuild(archive)
    assert done.status == 2
    assert "was built with other versions of tools: nvidia-cutlass-dsl 4." in done.err
    assert ", here 0.1." in done.err


def test_wheel_with_other_contents_is_named(
    rebuild: Any, run: Run, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("securesystemslib", reason="the extra `sign` is not installed")
    make_key(tmp_path / "release.key", tmp_path / "keys" / "release.pub")
    assert run("sign", archive, "--key", tmp_path / "release.key", "--built-here").status == 0
    done = rebuild(archive, "--key", tmp_path / "keys", "--json")
    assert (done.status, json.loads(done.out)["contents"] > 0, done.err) == (0, True, "")
    real = toolchains.toolchain

    def other(cache: Any) -> toolchains.Toolchain:
        found = real(cache)
        return toolchains.Toolchain(found.versions, found.wheels | {"nvidia-cutlass-dsl": "4.8.1 " + "0" * 64})

    monkeypatch.setattr(toolchains, "toolchain", other)
    done = rebuild(archive)
    assert done.status == 2
    assert "was built with other contents of tools: nvidia-cutlass-dsl " in done.err
    assert "here 0000000000000000..." in done.err


def test_other_sources_of_a_kernel_are_named(rebuild: Any, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "source_digest", lambda item: "0" * 64)
    done = rebuild(archive)
    assert (done.status, "was built with other sources of kernels: " in done.err) == (2, True)


def test_archive_that_does_not_say_what_was_asked_is_refused(rebuild: Any, archive: Path, tmp_path: Path) -> None:
    with Archive.open(archive) as opened:
        package = Package()
        package.add_archive(opened, list(opened.functions))
        for name in opened.tables:
            table = opened.table(name)
            table.pop("asked", None)
            package.set_table(name, table)
        package.write(tmp_path / "old.aot")
    done = rebuild(tmp_path / "old.aot")
    assert (done.status, "does not say what `aot build` was asked" in done.err) == (2, True)


def test_merged_archive_is_refused_as_one(rebuild: Any, run: Run, model: Path, archive: Path, tmp_path: Path) -> None:
    assert run("merge", model, archive, "-o", tmp_path / "both.aot").status == 0
    done = rebuild(tmp_path / "both.aot")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "it was merged, or made by an earlier version; rebuild each of those that it was merged of" in done.err


def test_nothing_to_do_is_refused(run: Run, archive: Path) -> None:
    done = run("rebuild", archive)
    assert (done.status, "--check compares, -o OUT keeps what is built" in done.err) == (2, True)


@pytest.mark.long
def test_same_bytes_from_another_folder_with_an_empty_cache_and_another_order_of_hashes(
    archive: Path, folder: Path, tmp_path: Path
) -> None:
    """Two processes that share nothing but the sources, one in a longer path, each compiling all."""
    built = []
    for seed, where in (("1", tmp_path / "a"), ("20261124", tmp_path / "another" / "folder with spaces")):
        where.mkdir(parents=True)
        shutil.copy(folder / "tiny.yaml", where / "renamed.yaml")
        command = [*COMMAND, "build", "renamed.yaml", "-o", "x.aot", "--cache", "cache", "--candidates", "1"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed, "HOME": str(where)}
        done = subprocess.run([*command, "--no-tune", "--jobs", "1"], cwd=where, env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr
        built.append((where / "x.aot").read_bytes())
    assert built[0] == built[1] == archive.read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [("--universal", "--candidates", "2"), ("--function", "quantise", "--candidates", "1")]
)
def test_what_was_asked_besides_is_asked_again(
    run: Run, folder: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    path, cache = tmp_path / "x.aot", folder / "cache"
    given = ["--cache", cache, "--jobs", "1"]
    assert run("build", folder / "tiny.yaml", "-o", path, "--no-tune", *given, *options).status == 0
    done = run("rebuild", path, folder / "tiny.yaml", "--check", *given)
    assert (done.status, "the same bytes were built" in done.out) == (0, True), done
