"""The commands prune and merge: archives made of archives, which serve what they keep as before."""

import json
from pathlib import Path
from typing import Any

import pytest

from aot.pack.write import Package
from runtime.container.archive import Archive

from . import universal_archives
from .command_line import Run
from .inspected import BUILD, ENVIRONMENT, FEW, MANY, OTHER, OUT, QKV, TUNING, WIDE, WRONG, tables, write
from .recording_driver import cubin, gemm_record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.aot")


def _entries(run: Run, path: Path) -> list[tuple[str, str]]:
    found = json.loads(run("ls", path, "--json").out)["entries"]
    return [(entry["signature"], entry["state"]) for entry in found]


def _functions(path: Path) -> set[str]:
    with Archive.open(path) as archive:
        return set(archive.functions)


def _good(run: Run, path: Path) -> bool:
    """Whether all of an archive's tables are what verify takes; made-up cubins are none."""
    checks = json.loads(run("verify", path, "--json").out)["checks"]
    return all(check["ok"] for check in checks if "table" in check["subject"])


# --- prune ---


def test_a_layer_stays_with_its_functions_its_model_and_its_tuning(run: Run, path: Path) -> None:
    out = path.parent / "out.aot"
    assert run("prune", path, "-o", out, "--gemm", "qkv").status == 0
    assert _entries(run, out) == [(QKV, "tuned")]
    assert _functions(out) == {FEW, MANY, WIDE}
    with Archive.open(out) as archive:
        assert [gemm["name"] for model in archive.table("build")["models"] for gemm in model["gemms"]] == ["qkv"]
        assert archive.table("history")["tunings"] == [TUNING]
    assert _good(run, out)


def test_a_state_stays_and_functions_of_no_table_go(run: Run, path: Path) -> None:
    out = path.parent / "out.aot"
    assert run("prune", path, "-o", out, "--state", "ranked").status == 0
    assert _entries(run, out) == [(OUT, "ranked")]
    assert _functions(out) == {WIDE, WRONG}
    with Archive.open(out) as archive:
        assert "history" not in archive.tables
    assert _good(run, out)


def test_a_target_stays_with_functions_that_are_called_by_name(run: Run, path: Path) -> None:
    out = path.parent / "out.aot"
    assert run("prune", path, "-o", out, "--target", "sm_90a").status == 0
    assert (_functions(out), _entries(run, out)) == (_functions(path), _entries(run, path))
    assert OTHER in _functions(out)


def test_forms_stay_as_they_are(run: Run, tmp_path: Path) -> None:
    universal_archives.write(tmp_path / "forms.aot")
    assert run("prune", tmp_path / "forms.aot", "-o", tmp_path / "out.aot", "--state", "predicted").status == 0
    assert _functions(tmp_path / "out.aot") == set(universal_archives.NAMES)
    with Archive.open(tmp_path / "forms.aot") as one, Archive.open(tmp_path / "out.aot") as other:
        assert one.table("universal") == other.table("universal")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing says what to keep; give --target, --gemm or --state"),
        (["--gemm", "qvk"], "did you mean 'qkv'?"),
        (["--gemm", "o", "--gemm", "qvk"], "has nothing of the layer 'qvk'; did you mean 'qkv'?"),
        (["--target", "sm_90a", "--target", "sm_80"], "has nothing of the target 'sm_80'"),
        (["--target", "sm_80"], "has nothing of the target 'sm_80'"),
    ],
)
def test_a_wrong_call_is_one_line_and_writes_nothing(run: Run, path: Path, arguments: list[str], said: str) -> None:
    result = run("prune", path, "-o", path.parent / "out.aot", *arguments)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert said in result.err
    assert not (path.parent / "out.aot").exists()


def test_the_input_and_what_was_tuned_are_not_written_over(run: Run, path: Path) -> None:
    other = write(path.parent / "other.aot")
    for out, said in ((path, "is an input too"), (other, "holds 1 tuned entry")):
        result = run("prune", path, "-o", out, "--gemm", "qkv")
        assert (result.status, result.out) == (2, "")
        assert said in result.err


# --- merge ---


def test_forms_keep_the_gpus_that_they_were_checked_on(run: Run, tmp_path: Path) -> None:
    """And of two equal ones that of the second archive stands."""
    more = universal_archives.ROW | {"form": universal_archives.FORM | {"a": "f16", "b": "f16", "d": "f16"}}
    both = universal_archives.TABLE | {"forms": [universal_archives.ROW, more]}
    universal_archives.write(tmp_path / "one.aot", obj=both)
    universal_archives.write(tmp_path / "other.aot", obj=universal_archives.checked_on("NVIDIA H100 80GB HBM3"))
    assert run("merge", tmp_path / "one.aot", tmp_path / "other.aot", "-o", tmp_path / "out.aot").status == 0
    with Archive.open(tmp_path / "out.aot") as archive:
        forms = archive.table("universal")["forms"]
    assert [(f["form"]["a"], f["checked_on"]) for f in forms] == [
        ("f16", ["NVIDIA H200"]),
        ("bf16", ["NVIDIA H100 80GB HBM3"]),
    ]


def test_entries_for_two_kinds_of_gpu_both_stay(run: Run, path: Path) -> None:
    gemm = tables()["gemm"]
    gemm["gpus"][0]["name"] = "NVIDIA H100"
    environment = ENVIRONMENT | {"gpu": "NVIDIA H100"}
    other = write(path.parent / "other.aot", {"gemm": gemm, "tuning": {"schema": 1, "environments": [environment]}})
    out = path.parent / "out.aot"
    assert run("merge", other, path, "-o", out).status == 0
    found = json.loads(run("ls", out, "--gemm", "qkv", "--json").out)
    assert [entry["gpu"]["name"] for entry in found["entries"]] == ["NVIDIA H100", "NVIDIA H200"]
    assert found["tuning"] == [environment, ENVIRONMENT]
    assert _functions(out) == _functions(path)
    assert _good(run, out)


def test_of_one_entry_in_both_that_of_the_second_stands(run: Run, path: Path) -> None:
    gemm = tables()["gemm"]
    gemm["entries"][0]["ranges"] = [[64, 0], [900, 1], [None, 2]]
    other = write(path.parent / "other.aot", {"gemm": gemm})
    for one, two, at_800 in ((path, other, MANY), (other, path, WIDE)):
        assert run("merge", one, two, "-o", path.parent / "out.aot", "--force").status == 0
        found = json.loads(run("ls", path.parent / "out.aot", "--gemm", "qkv", "--m", 800, "--json").out)
        assert [entry["ranges"][0]["function"] for entry in found["entries"]] == [at_800]


def test_models_of_both_are_named_and_what_is_served_now_is_not_missing(run: Run, path: Path) -> None:
    build: dict[str, Any] = BUILD | {
        "models": [BUILD["models"][0] | {"model": "second"}],
        "unserved": [[QKV, "sm_90a", "no"]],
    }
    other = write(path.parent / "other.aot", {"build": build})
    assert run("merge", path, other, "-o", path.parent / "out.aot").status == 0
    found = json.loads(run("info", path.parent / "out.aot", "--json").out)
    assert [model["model"] for model in found["models"]] == ["made-up-8b", "second"]
    assert found["unserved"] == BUILD["unserved"]


def test_forms_join_entries_and_both_serve(run: Run, path: Path) -> None:
    universal_archives.write(path.parent / "forms.aot")
    out = path.parent / "out.aot"
    assert run("merge", path.parent / "forms.aot", path, "-o", out).status == 0
    states = [
        json.loads(run("explain", out, *layer, "--m", 1, "--json").out)["answers"][0]["state"]
        for layer in (["qkv"], ["--n", 512, "--k", 512])
    ]
    assert states == ["tuned", "predicted"]
    assert _good(run, out)


def test_other_code_of_one_name_is_refused(run: Run, path: Path) -> None:
    record = gemm_record(OTHER)
    record["kernels"][0]["registers"] += 8
    package = Package()
    package.add_function(record, cubin(OTHER))
    package.write(path.parent / "other.aot")
    result = run("merge", path, path.parent / "other.aot", "-o", path.parent / "out.aot")
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert f"has other code of {OTHER} than" in result.err


def test_code_that_only_displaced_entries_need_gives_way(run: Run, path: Path) -> None:
    """As where layers were built and tuned again with newer kernels; not where one that stays needs it, too."""
    part, out = path.parent / "part.aot", path.parent / "out.aot"
    assert run("prune", path, "-o", part, "--gemm", "qkv").status == 0

    def newer(of: Path) -> Path:
        package = Package()
        with Archive.open(of) as archive:
            for name in archive.functions:
                record = archive.record(name)
                record["kernels"][0]["registers"] += 8 * (name != OTHER)
                package.add_function(record, cubin(name))
            package.set_table("gemm", archive.table("gemm"))
        package.write(of.parent / "newer.aot")
        return of.parent / "newer.aot"

    def registers(of: Path) -> dict[str, int]:
        with Archive.open(of) as archive:
            return {name: archive.record(name)["kernels"][0]["registers"] for name in archive.functions}

    assert run("merge", path, newer(path), "-o", out).status == 0
    now, before = registers(out), registers(path)
    assert now == {name: count + 8 * (name != OTHER) for name, count in before.items()}
    refused = run("merge", path, newer(part), "-o", out, "--force")
    assert refused.status == 2
    assert "has other code of" in refused.err
