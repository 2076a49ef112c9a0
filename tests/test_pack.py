"""The writing side of the archive: the same content gives the same bytes, written whole or not at all."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aot.pack import write as pack
from aot.pack.write import Package, PackError
from runtime.container.archive import Archive

from .packed_functions import add, record


@settings(max_examples=30)
@given(
    cubins=st.dictionaries(
        st.text("abcXYZ019._:/-", min_size=1, max_size=12),
        st.tuples(st.sampled_from(["sm_80", "sm_90a"]), st.sampled_from(["", "f", "g"]), st.binary(min_size=1)),
        max_size=12,
    ),
    seed=st.integers(0, 999),
)
def test_shuffled_insertion_gives_identical_files_that_read_back(
    tmp_path_factory: pytest.TempPathFactory, cubins: dict[str, tuple[str, str, bytes]], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("shuffle")
    items = list(cubins.items())
    files = []
    for path in (folder / "a.aot", folder / "b.aot"):
        package = Package()
        for name, (target, family, cubin) in items:
            add(package, name, cubin, target, family=family)
        tables = [("gemm", {"z": 1, "a": 2}), ("build", {})]
        for table, obj in tables if path.name == "a.aot" else reversed(tables):
            package.set_table(table, dict(sorted(obj.items())))
        package.write(path, level=1)
        files.append(path.read_bytes())
        random.Random(seed).shuffle(items)
    assert files[0] == files[1]
    with Archive.open(folder / "a.aot") as archive:
        assert list(archive.functions) == sorted(cubins)
        for name, (target, _, cubin) in cubins.items():
            assert (archive.functions[name].target, archive.cubin(name)) == (target, cubin)
        assert all(check.ok for check in archive.verify())


def test_insertion_order_of_keys_does_not_show(tmp_path: Path) -> None:
    for path, items in ((tmp_path / "a", 1), (tmp_path / "b", -1)):
        package = Package()
        package.add_function(dict(list(record("f", b"cubin").items())[::items]), b"cubin")
        package.write(path)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_equal_cubins_are_stored_once(tmp_path: Path) -> None:
    package = Package()
    for name in ("a", "b", "c"):
        add(package, name, b"same")
    package.write(tmp_path / "x.aot")
    with Archive.open(tmp_path / "x.aot") as archive:
        assert archive.sizes()["sm_9x"].blobs == 1
        assert len({entry.cubin for entry in archive.functions.values()}) == 1


def test_one_cubin_under_two_targets_of_a_generation_is_stored_once(tmp_path: Path) -> None:
    package = Package()
    add(package, "a", b"same", "sm_100a")
    add(package, "b", b"same", "sm_103a")
    package.write(tmp_path / "x.aot")
    with Archive.open(tmp_path / "x.aot") as archive:
        assert archive.targets == ("sm_100a", "sm_103a")
        assert archive.functions["a"].cubin == archive.functions["b"].cubin
        assert [archive.record(name)["target"] for name in "ab"] == ["sm_100a", "sm_103a"]
        assert all(check.ok for check in archive.verify())


def test_one_cubin_under_two_generations_reads_back(tmp_path: Path) -> None:
    package = Package()
    add(package, "a", b"same", "sm_80")
    add(package, "b", b"same", "sm_90a")
    package.write(tmp_path / "x.aot")
    with Archive.open(tmp_path / "x.aot") as archive:
        assert archive.targets == ("sm_80", "sm_90a")
        assert archive.cubin("a") == archive.cubin("b") == b"same"


def test_equal_tables_read_back_under_both_names(tmp_path: Path) -> None:
    package = Package()
    package.set_table("a", {"x": 1})
    package.set_table("b", {"x": 1})
    package.write(tmp_path / "x.aot")
    with Archive.open(tmp_path / "x.aot") as archive:
        assert archive.table("a") == archive.table("b") == {"x": 1}
        assert [check.subject for check in archive.verify()][2:] == ["table a", "blob 1 (tables)", "table b"]


def test_table_set_again_replaces_the_first(tmp_path: Path) -> None:
    package = Package()
    package.set_table("a", {"x": 1})
    package.set_table("a", {"x": 2})
    package.write(tmp_path / "x.aot")
    with Archive.open(tmp_path / "x.aot") as archive:
        assert archive.table("a") == {"x": 2}


def test_only_the_history_has_a_block_of_its_own(tmp_path: Path) -> None:
    package = Package()
    for name in ("build", "gemm", "history", "tuning", "universal"):
        package.set_table(name, {"x": name})
    package.write(tmp_path / "x.aot")
    with Archive.open(tmp_path / "x.aot") as archive:
        assert [len(block.blobs) for block in archive.blocks] == [2, 1, 2]


def test_families_are_neighbours(tmp_path: Path) -> None:
    package = Package()
    for name, family in (("a", "f"), ("b", "g"), ("c", "f")):
        add(package, name, name.encode(), family=family)
    package.write(tmp_path / "x.aot")
    with Archive.open(tmp_path / "x.aot") as archive:
        assert sorted(archive.functions, key=lambda name: archive.functions[name].cubin) == ["a", "c", "b"]


def test_twins_for_two_targets_are_neighbours_in_one_block(tmp_path: Path) -> None:
    package = Package()
    for name in ("x.sm_100a", "x.sm_103a", "y.sm_100a", "y.sm_103a", "z.sm_120a"):
        add(package, name, name.encode(), name[2:])
    package.write(tmp_path / "x.aot")
    with Archive.open(tmp_path / "x.aot") as archive:
        assert sorted(archive.functions, key=lambda name: archive.functions[name].cubin) == list(archive.functions)
        assert [block.kind for block in archive.blocks] == ["records", "sm_10x", "sm_12x"]


def test_number_of_threads_does_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "SOLID_BLOCK_BYTES", 1000)
    monkeypatch.setattr(pack, "RECORDS_BLOCK_BYTES", 1000)
    package = Package()
    rng = random.Random(0)
    for number in range(40):
        add(package, f"f{number}", rng.randbytes(300) * 2)
    files = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(pack, "MAX_THREADS", threads)
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        package.write(tmp_path / "x.aot")
        files.append((tmp_path / "x.aot").read_bytes())
    assert len(set(files)) == 1


def test_blocks_are_bounded_and_a_large_cubin_has_its_own(tmp_path: Path) -> None:
    package = Package()
    rng = random.Random(0)
    for number, size in enumerate([4_000_000, 4_000_000, 4_000_000, 9_000_000, 10]):
        add(package, f"f{number}", rng.randbytes(size))
    package.write(tmp_path / "x.aot", level=1)
    with Archive.open(tmp_path / "x.aot") as archive:
        lengths = [block.raw_length for block in archive.blocks if block.kind == "sm_9x"]
        assert lengths == [8_000_000, 4_000_000, 9_000_000, 10]
        assert all(check.ok for check in archive.verify())


def test_blocks_of_records_are_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "RECORDS_BLOCK_BYTES", 1000)
    package = Package()
    for number in range(20):
        add(package, f"f{number}", b"x" * 500 + str(number).encode())
    package.write(tmp_path / "x.aot")
    with Archive.open(tmp_path / "x.aot") as archive:
        lengths = {kind: [b.raw_length for b in archive.blocks if b.kind == kind] for kind in ("records", "sm_9x")}
        assert len(lengths["records"]) > 1
        assert max(lengths["records"]) <= 1000
        assert len(lengths["sm_9x"]) == 1
        assert all(check.ok for check in archive.verify())


def test_similar_cubins_share_their_bytes(tmp_path: Path) -> None:
    rng = random.Random(0)
    base = rng.randbytes(100_000)
    package = Package()
    for number in range(20):
        add(package, f"f{number}", base + rng.randbytes(100))
    package.write(tmp_path / "x.aot")
    with Archive.open(tmp_path / "x.aot") as archive:
        assert archive.file_bytes < 110_000


def test_merging_archives_keeps_every_function(tmp_path: Path) -> None:
    merged = Package()
    for file in ("a", "b"):
        package = Package()
        add(package, file, file.encode())
        add(package, "common", b"common")
        package.set_table("gemm", {"of": file})
        package.write(tmp_path / file)
        with Archive.open(tmp_path / file) as archive:
            merged.add_archive(archive)
    merged.write(tmp_path / "merged")
    with Archive.open(tmp_path / "merged") as archive:
        assert list(archive.functions) == ["a", "b", "common"]
        assert not archive.tables


def test_pruning_keeps_the_named_functions_alone(tmp_path: Path) -> None:
    package = Package()
    for name in "abc":
        add(package, name, name.encode())
    package.write(tmp_path / "x.aot")
    pruned = Package()
    with Archive.open(tmp_path / "x.aot") as archive:
        pruned.add_archive(archive, ["c", "a"])
        with pytest.raises(Exception, match="no function 'd'"):
            pruned.add_archive(archive, ["d"])
    pruned.write(tmp_path / "x.aot")
    with Archive.open(tmp_path / "x.aot") as archive:
        assert {name: archive.cubin(name) for name in archive.functions} == {"a": b"a", "c": b"c"}


def test_copy_of_an_archive_is_the_same_file(tmp_path: Path) -> None:
    package = Package()
    for name in "abc":
        add(package, name, name.encode() * 100, family=name)
    package.write(tmp_path / "x.aot")
    copy = Package()
    with Archive.open(tmp_path / "x.aot") as archive:
        copy.add_archive(archive)
    copy.write(tmp_path / "y.aot")
    assert (tmp_path / "x.aot").read_bytes() == (tmp_path / "y.aot").read_bytes()


def test_same_function_again_changes_nothing(tmp_path: Path) -> None:
    package = Package()
    add(package, "a", b"1")
    add(package, "a", b"1")
    package.write(tmp_path / "x.aot")


@pytest.mark.parametrize("other", [{"cubin": b"2"}, {"cubin": b"1", "family": "g"}, {"cubin": b"1", "target": "sm_80"}])
def test_pack_rejects_another_function_of_the_same_name(other: dict[str, Any]) -> None:
    package = Package()
    add(package, "a", b"1")
    with pytest.raises(PackError, match="function a: a different one of this name"):
        add(package, "a", **other)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": ""}, "a function's name must be"),
        ({"name": "a b"}, "a function's name must be"),
        ({"name": "a\x00"}, "a function's name must be"),
        ({"name": "x" * 256}, "a function's name must be"),
        ({"name": None}, "a function's name must be"),
        ({"target": "records"}, "its target must be like"),
        ({"target": "sm_90a\n"}, "its target must be like"),
        ({"target": None}, "its target must be like"),
        ({"family": 3}, "its family must be a string"),
        ({"cubin": "0" * 64}, "but the cubin given has SHA-256"),
        ({"extra": float("nan")}, "is not JSON"),
        ({"extra": {1: 2}}, "a key of canonical JSON must be a string"),
        ({"extra": b"bytes"}, "is not JSON"),
        ({"extra": "\ud800"}, "is not JSON"),
    ],
)
def test_pack_rejects_bad_record(change: dict[str, Any], match: str) -> None:
    with pytest.raises(PackError, match=match):
        Package().add_function({**record("a", b"1"), **change}, b"1")


def test_pack_rejects_record_that_is_no_object() -> None:
    with pytest.raises(PackError, match="must be a dict, found list"):
        Package().add_function([], b"1")  # type: ignore[arg-type]


def test_pack_rejects_empty_cubin() -> None:
    with pytest.raises(PackError, match="its cubin has 0 bytes"):
        add(Package(), "a", b"")


def test_pack_rejects_oversized_cubin() -> None:
    with pytest.raises(PackError, match="its cubin has 67108865 bytes"):
        add(Package(), "a", bytes((64 << 20) + 1))


def test_pack_rejects_bad_table_name() -> None:
    with pytest.raises(PackError, match="a table's name must be"):
        Package().set_table("a b", {})


def test_pack_rejects_table_that_is_no_object() -> None:
    with pytest.raises(PackError, match="table a must be a dict, found list"):
        Package().set_table("a", [])  # type: ignore[arg-type]


def test_pack_rejects_oversized_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "MAX_INDEX_BYTES", 10)
    with pytest.raises(PackError, match="the index of 0 functions has 42 bytes"):
        Package().write(tmp_path / "x.aot")
