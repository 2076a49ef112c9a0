"""The commands diff and history: what changed between two archives, and what was done to make one."""

import json
from pathlib import Path
from typing import Any

import pytest

from aot.pack.write import Package
from runtime.container.archive import Archive

from .command_line import Run, unwrapped
from .inspected import BUILD, ENVIRONMENT, FEW, MANY, OTHER, OUT, QKV, WIDE, WRONG, tables, write
from .recording_driver import cubin, entry, gemm_record, signature, table


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write(tmp_path / "old.aot")


def changed(run: Run, old: Path, **of: dict[str, Any]) -> dict[str, Any]:
    """What differs from an archive with these tables in place of its own."""
    result = run("diff", old, write(old.parent / "new.aot", of), "--json")
    assert (result.status, result.err) == (1, "")
    return dict(json.loads(result.out))


def test_what_is_equal_has_status_0_however_it_was_compressed(run: Run, old: Path) -> None:
    package = Package()
    with Archive.open(old) as archive:
        package.add_archive(archive)
        for name in archive.tables:
            package.set_table(name, archive.table(name))
    package.write(old.parent / "packed.aot", level=1)
    for other in (old, old.parent / "packed.aot"):
        result = run("diff", old, other)
        assert (result.status, result.err) == (0, "")
        assert "no function and no table differs" in result.out


def test_a_range_that_changed_its_function_is_told_by_m(run: Run, old: Path) -> None:
    gemm = tables()["gemm"]
    gemm["entries"][0]["ranges"] = [[64, 0], [900, 1], [None, 2]]
    found = changed(run, old, gemm=gemm)
    (entry,) = found["entries"]["changed"]
    assert (entry["signature"], entry["was"], entry["state"]) == (QKV, "tuned", "tuned")
    (choice,) = entry["choices"]
    assert (choice["m_min"], choice["m_max"], choice["old"], choice["new"]) == (701, 900, WIDE, MANY)
    assert found["tables"] == ["gemm"]
    out = run("diff", old, old.parent / "new.aot", "--gemm", "qkv").out
    assert "701-900" in out
    assert "\nentries for sm_90a, H200:\n" in out


def test_a_removed_layer_is_called_what_the_old_archive_calls_it(run: Run, old: Path) -> None:
    build = json.loads(json.dumps(tables()["build"]).replace('"qkv"', '"renamed"'))
    found = changed(run, old, gemm=table([entry(signature(4096, 4096), [(None, WIDE)])]), build=build)
    assert [row["names"] for row in found["entries"]["removed"]] == [["qkv"]]


def test_a_layer_that_neither_archive_has_is_refused(run: Run, old: Path) -> None:
    result = run("diff", old, old, "--gemm", "qkv", "--gemm", "no_such_layer")
    assert (result.status, result.out) == (2, "")
    assert "has nothing of the layer 'no_such_layer'" in result.err


def test_times_are_compared_where_both_were_measured(run: Run, old: Path) -> None:
    gemm = tables()["gemm"]
    rows = [dict(row) for row in gemm["entries"][0]["timings"]]
    rows[1]["us"] = 80.0
    gemm["entries"][0]["timings"] = rows
    (entry,) = changed(run, old, gemm=gemm)["entries"]["changed"]
    assert entry["times"] == {"measured": 3, "mean": 0.7937, "worst": 0.5, "worst_m": 512}
    assert entry["choices"] == []


def test_an_entry_that_was_tuned_since_is_one_that_changed(run: Run, old: Path) -> None:
    gemm = tables()["gemm"]
    gemm["entries"][1] |= {"state": "tuned", "gpu": 0}
    found = changed(run, old, gemm=gemm)["entries"]
    assert (found["added"], found["removed"]) == ([], [])
    assert [(e["signature"], e["was"], e["state"], e["was_for"]) for e in found["changed"]] == [
        (OUT, "ranked", "tuned", None)
    ]


def test_entries_for_two_kinds_of_gpu_are_not_compared(run: Run, old: Path) -> None:
    gemm = tables()["gemm"]
    gemm["gpus"][0]["name"] = "NVIDIA H100"
    found = changed(run, old, gemm=gemm)["entries"]
    assert ([e["gpu"]["name"] for e in found["added"]], len(found["removed"])) == (["NVIDIA H100"], 1)


def test_an_entry_that_is_gone_is_told(run: Run, old: Path) -> None:
    gemm = tables()["gemm"]
    del gemm["entries"][1]
    found = changed(run, old, gemm=gemm)["entries"]
    assert [e["signature"] for e in found["removed"]] == [OUT]


def test_other_code_under_the_same_name_is_a_change(run: Run, old: Path) -> None:
    package = Package()
    for name in (FEW, MANY, WIDE):
        package.add_function(gemm_record(name), cubin(name))
    other = gemm_record(OTHER)
    other["kernels"][0]["registers"] += 8
    package.add_function(other, cubin(OTHER))
    package.write(old.parent / "new.aot")
    found = json.loads(run("diff", old, old.parent / "new.aot", "--json").out)["functions"]
    assert found["changed"] == [OTHER]
    assert len(found["removed"]) == 1
    assert f"other code  {OTHER}\n" in run("diff", old, old.parent / "new.aot").out


def test_a_range_whose_function_has_other_code_changed(run: Run, old: Path) -> None:
    package = Package()
    for name in (FEW, MANY, WIDE, WRONG, OTHER):
        record = gemm_record(name)
        record["kernels"][0]["registers"] += 8 if name == MANY else 0
        package.add_function(record, cubin(name))
    for name, obj in tables().items():
        package.set_table(name, obj)
    package.write(old.parent / "new.aot")
    (entry,) = json.loads(run("diff", old, old.parent / "new.aot", "--json").out)["entries"]["changed"]
    assert [(c["m_min"], c["m_max"], c["old"] == c["new"] == MANY) for c in entry["choices"]] == [(65, 700, True)]


def test_a_row_says_which_target_and_gpu_it_is_of(run: Run, old: Path) -> None:
    gemm = tables()["gemm"]
    gemm["gpus"].append(dict(gemm["gpus"][0], name="NVIDIA H100 80GB HBM3"))
    gemm["entries"].append(gemm["entries"][0] | {"gpu": 1})
    both = write(old.parent / "both.aot", {"gemm": gemm})
    gemm["entries"][0] = gemm["entries"][0] | {"ranges": [[64, 0], [900, 1], [None, 2]]}
    gemm["entries"][2] = gemm["entries"][2] | {"ranges": [[64, 0], [900, 1], [None, 2]]}
    write(old.parent / "new.aot", {"gemm": gemm})
    out = run("diff", both, old.parent / "new.aot").out
    assert [line.split()[2:5] for line in out.splitlines() if line.startswith("qkv")] == [
        ["sm_90a", "H200", "changed"],
        ["sm_90a", "H100", "80GB"],
    ]
    assert "\nqkv, sm_90a, H100 80GB HBM3\n" in run("diff", both, old.parent / "new.aot", "--gemm", "qkv").out


@pytest.mark.parametrize(
    ("changes", "what", "said"),
    [
        ({"torch_faster": [[300, 600]]}, ["torch faster"], "torch is faster at M = 400-600 -> 300-600"),
        ({"torch_faster": []}, ["torch faster"], "torch is faster at M = 400-600 -> none"),
        ({"apart": [[1, 15]]}, ["apart"], "the activation apart is faster at M = none -> 1-15"),
        ({"invariant": [[8, 0], [None, 2]]}, ["equal bits"], "equal bits at M"),
        ({"candidates": [[16, [0, 1]]]}, ["candidates"], ""),
        ({"timings": []}, ["times"], ""),
    ],
)
def test_what_changed_without_a_range_is_named(
    run: Run, old: Path, changes: dict[str, Any], what: list[str], said: str
) -> None:
    gemm = tables()["gemm"]
    gemm["entries"][0] |= changes
    (entry,) = changed(run, old, gemm=gemm)["entries"]["changed"]
    assert (entry["what"], entry["choices"]) == (what, [])
    out = run("diff", old, old.parent / "new.aot").out
    (row,) = [line for line in out.splitlines() if line.startswith("qkv")]
    short = what[0].removeprefix("equal ").removesuffix(" faster")
    assert f"  0  {short}" in row
    ranges = run("diff", old, old.parent / "new.aot", "--gemm", "qkv").out.removeprefix(out.partition("speed:")[0])
    assert said in ranges
    assert ("\nqkv, sm_90a, H200\n" in ranges) == bool(said), "no title over nothing"


def test_what_a_build_was_asked_and_ranked_by_is_compared(run: Run, old: Path) -> None:
    build = BUILD | {"candidates": 16, "ranking": {"sm_90a": "times"}, "asked": {"inputs": {"base": "cd" * 32}}}
    found = changed(run, old, build=build)
    assert found["build"] == {
        "candidates": ["8", "16"],
        "input base": [None, "cd" * 32],
        "ranking sm_90a": ["estimates", "times"],
    }
    out = run("diff", old, old.parent / "new.aot").out
    assert "build      candidates 8 -> 16\n" in out
    assert "build      ranking sm_90a estimates -> times\n" in out
    assert "tables     build differs\n" in out


def test_two_tunings_that_differ_in_what_was_tuned_say_of_which(run: Run, old: Path) -> None:
    tuning = {"schema": 1, "environments": [ENVIRONMENT | {"candidates": "8f591776" * 8}]}
    changed(run, old, tuning=tuning)
    out = run("diff", old, old.parent / "new.aot").out
    assert "added      tuned on NVIDIA H200, driver 580.1, torch 2.11, of candidates\n" in out
    assert "8f591776\n" in out


def test_tools_models_and_machines_are_compared(run: Run, old: Path) -> None:
    build = BUILD | {"tools": {"cute-aot": "0.2.0"}, "models": [], "failures": []}
    found = changed(run, old, build=build, tuning={"schema": 1, "environments": [ENVIRONMENT | {"driver": "590.1"}]})
    assert found["tools"]["cute-aot"] == ["0.1.0", "0.2.0"]
    assert found["tools"]["nvidia-cutlass-dsl"] == ["4.8.1", None]
    assert found["models"]["removed"] == [["made-up-8b", "ab" * 32]]
    assert found["failures"]["removed"] == BUILD["failures"]
    assert [row["driver"] for row in found["tuning"]["added"]] == ["590.1"]
    out = run("diff", old, old.parent / "new.aot").out
    assert "cute-aot 0.1.0 -> 0.2.0" in out
    assert "driver 590.1" in out


# --- history ---


def test_history_has_the_build_before_its_tunings(run: Run, old: Path) -> None:
    steps = json.loads(run("history", old, "--json").out)["steps"]
    assert [step["step"] for step in steps] == ["build", "tune"]
    assert steps[0]["manifest"] == "ab" * 32
    assert [steps[1][what] for what in ("signatures", "points", "launched", "rejected")] == [1, 3, 7, 1]
    out = run("history", old).out
    assert out.startswith("1. build  built by cute-aot 0.1.0 with nvidia-cutlass-dsl 4.8.1 for made-up-8b,\n")
    assert "2. tune   tuned on NVIDIA H200, driver 580.1, torch 2.11\n" in out


def test_history_says_which_candidates_were_tuned(run: Run, tmp_path: Path) -> None:
    tuning = {"schema": 1, "environments": [ENVIRONMENT | {"candidates": "8f591776" * 8}]}
    out = run("history", write(tmp_path / "x.aot", {"tuning": tuning})).out
    assert "2. tune tuned on NVIDIA H200, driver 580.1, torch 2.11, of candidates 8f591776 " in unwrapped(out)


def test_history_of_an_archive_that_says_nothing_says_so(run: Run, tmp_path: Path) -> None:
    Package().write(tmp_path / "empty.aot")
    assert run("history", tmp_path / "empty.aot").out == "the archive does not say how it was made\n"


def test_a_check_of_functions_is_a_step_of_its_own(run: Run, tmp_path: Path) -> None:
    check = ENVIRONMENT | {"right": {OTHER: "00" * 32}, "rejected": {}}
    path = write(tmp_path / "x.aot", {"tuning": {"schema": 1, "environments": [check]}})
    assert [step["step"] for step in json.loads(run("history", path, "--json").out)["steps"]] == ["build", "check"]
    assert "2. check  functions checked on NVIDIA H200" in run("history", path).out
