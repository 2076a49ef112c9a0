"""The command info: what an archive is, who built it and from what."""

import copy
import json
from pathlib import Path

import pytest

import runtime
from aot.pack.write import Package

from .command_line import Run, unwrapped
from .inspected import BUILD, ENVIRONMENT, MANY, OTHER, WIDE, WRONG, tables, write
from .recording_driver import RecordingDriver, cubin, gemm_record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.aot")


def test_the_digest_is_the_one_that_a_library_reports(run: Run, path: Path) -> None:
    from runtime.serve.layers import open_archives

    digest = runtime.Library(open_archives([path]), RecordingDriver()).digest
    assert json.loads(run("info", path, "--json").out)["digest"] == digest
    assert digest in run("info", path).out


def test_it_says_who_built_it_and_from_what(run: Run, path: Path) -> None:
    out = run("info", path).out
    said = [
        "made-up-8b, 2 layers",
        "made-up/8B config.json at tp 1",
        "ab" * 32,
        "cute-aot 0.1.0, nvidia-cutlass-dsl 4.8.1",
    ]
    said += ["tuned       on NVIDIA H200, driver 580.1, torch 2.11"]
    assert [word for word in said if word not in out] == []
    assert "libs-base" not in out, "a package of the same version as the one it belongs to"
    assert json.loads(run("info", path, "--json").out)["tools"] == BUILD["tools"]


def test_it_says_what_was_tuned(run: Run, tmp_path: Path) -> None:
    tuning = {"schema": 1, "environments": [ENVIRONMENT | {"candidates": "8f591776" * 8}]}
    path = write(tmp_path / "x.aot", {"tuning": tuning})
    assert "on NVIDIA H200, driver 580.1, torch 2.11, of candidates 8f591776 " in unwrapped(run("info", path).out)


def test_one_function_is_not_spoken_of_as_several(run: Run, path: Path) -> None:
    said = unwrapped(run("info", path).out)
    assert "3 serve an entry, 1 is a candidate that serves nothing, 1 is in no table, called by name" in said


def test_it_says_what_failed_is_not_served_and_was_rejected(run: Run, path: Path) -> None:
    found = json.loads(run("info", path, "--json").out)
    assert (found["failures"], found["unserved"]) == (BUILD["failures"], BUILD["unserved"])
    assert found["rejected"] == [[WRONG, ENVIRONMENT["rejected"][WRONG]]]
    out = run("info", path).out
    for said in ("out of registers", "no kernel takes an N of 7", "relative error of 0.5"):
        assert said in out


def test_functions_that_were_checked_are_not_said_to_be_tuned(run: Run, tmp_path: Path) -> None:
    given = copy.deepcopy(tables())
    given["tuning"]["environments"][0]["right"] = {OTHER: "ab" * 32}
    path = write(tmp_path / "checked.aot", given)
    assert "checked     on NVIDIA H200" in run("info", path).out
    assert json.loads(run("info", path, "--json").out)["tuning"][0]["right"] == 1, "how many, and not which"


def test_it_counts_entries_by_state_and_functions_by_use(run: Run, path: Path) -> None:
    found = json.loads(run("info", path, "--json").out)
    assert found["entries"] == {"tuned": 1, "ranked": 1, "give_way": 0}
    assert found["uses"] == {"serves": 3, "candidate": 1, "by name": 1}
    assert found["unused"] == [OTHER, WRONG]


def test_an_entry_that_gives_way_is_counted_and_its_functions_serve_nothing(run: Run, tmp_path: Path) -> None:
    gemm = tables()["gemm"]
    gemm["entries"][1]["signature"] = gemm["entries"][0]["signature"]
    path = write(tmp_path / "x.aot", {"gemm": gemm})
    found = json.loads(run("info", path, "--json").out)
    assert found["entries"]["give_way"] == 1
    assert "1 entry was never tuned" in run("info", path).out


def test_a_cubin_of_two_functions_counts_once(run: Run, tmp_path: Path) -> None:
    package = Package()
    for name in (MANY, WIDE):
        record = gemm_record(name)
        package.add_function(record | {"cubin": gemm_record(MANY)["cubin"]}, cubin(MANY))
    package.set_table("build", BUILD)
    package.write(tmp_path / "x.aot")
    found = json.loads(run("info", tmp_path / "x.aot", "--json").out)
    assert [(row["functions"], row["cubins"]) for row in found["families"]] == [(2, 1)]
    (target,) = found["targets"]
    kinds = found["totals"]["by_kind"]
    assert target["bytes"] == kinds["records"]["raw"] + kinds["sm_9x"]["raw"]


def test_sizes_by_family_and_by_target_add_up(run: Run, path: Path) -> None:
    found = json.loads(run("info", path, "--json").out)
    kinds = found["totals"]["by_kind"]
    raw = sum(size["raw"] for kind, size in kinds.items() if kind != "tables")
    assert sum(row["bytes"] for row in found["families"]) == raw
    assert sum(row["bytes"] for row in found["targets"]) == raw
    assert {row["family"]: row["functions"] for row in found["families"]}["own.sm90_persistent"] == 3


def test_an_archive_without_tables_says_that_it_does_not_say(run: Run, tmp_path: Path) -> None:
    Package().write(tmp_path / "empty.aot")
    result = run("info", tmp_path / "empty.aot")
    assert (result.status, result.err) == (0, "")
    assert "model       the archive does not say\n" in result.out
    assert "tuned       never\n" in result.out
