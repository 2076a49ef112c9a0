"""The command explain: what serves a layer at one M, why, and how far it is from the floor and from torch."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from aot.inspect.floor import floor
from runtime.device.gpus import Gpu
from runtime.gemm.signature import Signature
from runtime.moe.combine import Signature as Combine

from . import universal_archives
from .command_line import Run, unwrapped
from .inspected import FEW, H200, MANY, OTHER, OUT, POINTS, QKV, TUNING, WIDE, WRONG, tables, write
from .recording_driver import entry, gemm_record, signature, write_archive

F16 = Signature.from_json(signature(512, 512, dtype="f16")).key()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.aot")


def answer(run: Run, *arguments: object, status: int = 0) -> dict[str, Any]:
    result = run("explain", *arguments, "--json")
    assert (result.status, result.err) == (status, "")
    (found,) = json.loads(result.out)["answers"]
    return dict(found)


def test_where_it_was_measured_the_time_is_what_was_measured(run: Run, path: Path) -> None:
    found = answer(run, path, "qkv", "--m", 512)
    assert (found["function"]["name"], found["state"]) == (MANY, "tuned")
    assert (found["time"]["us"], found["time"]["how"], found["time"]["spread"]) == (40.0, "measured", 0.01)
    assert [(row["name"], row["us"], row["longer_by"]) for row in found["runners_up"]] == [
        (WIDE, 41.0, 0.025),
        (FEW, 90.0, 1.25),
    ]


def test_between_what_was_measured_the_time_is_predicted_as_tuning_predicts(run: Run, path: Path) -> None:
    found = answer(run, path, "qkv", "--m", 700)
    assert found["function"]["name"] == MANY
    assert (found["range"], found["time"]["how"]) == ({"m_min": 65, "m_max": 700}, "predicted")
    assert 40 < found["time"]["us"] < 72
    assert 0 < found["time"]["off_by"] < 0.2
    assert [row["m"] for row in found["near"]] == [512, 1024]


def test_without_a_history_only_what_the_entry_was_timed_at_is_known(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "x.aot", {"history": {"schema": 1, "tunings": []}})
    assert answer(run, path, "qkv", "--m", 512)["time"]["us"] == 40.0
    assert answer(run, path, "qkv", "--m", 700)["time"] is None
    assert "the archive kept no history" in run("explain", path, "qkv", "--m", 700).out


@pytest.mark.parametrize("place", ["baseline", "finalists", "screened"])
def test_a_history_with_times_that_are_none_is_not_predicted_by(run: Run, tmp_path: Path, place: str) -> None:
    point = copy.deepcopy(POINTS[1])
    (point["baseline"] if place == "baseline" else point[place][0])[1] = 0
    history = {"schema": 1, "tunings": [TUNING | {"points": [point]}]}
    path = write(tmp_path / "x.aot", {"history": history})
    assert answer(run, path, "qkv", "--m", 512)["time"]["us"] == 40.0, "which the entry itself says"
    assert answer(run, path, "qkv", "--m", 700)["time"] is None


def test_the_last_tuning_of_the_very_signature_is_what_counts(run: Run, tmp_path: Path) -> None:
    point = copy.deepcopy(POINTS[1])
    point["finalists"][0][1] = 4200
    tunings = [TUNING, TUNING | {"points": [point]}, TUNING | {"signature": OUT}]
    path = write(tmp_path / "x.aot", {"history": {"schema": 1, "tunings": tunings}})
    assert answer(run, path, "qkv", "--m", 512)["time"]["us"] == 42.0


def test_torch_is_interpolated_and_what_is_left_to_it_is_told(run: Run, path: Path) -> None:
    found = answer(run, path, "qkv", "--m", 600)["torch"]
    assert found["between"] == [512, 1024]
    assert 38 < found["us"] < 76
    assert found["faster_at"] == {"m_min": 400, "m_max": 600}
    assert 'on_slower="torch" leaves these to it' in " ".join(run("explain", path, "qkv", "--m", 600).out.split())
    assert answer(run, path, "qkv", "--m", 400)["torch"]["is_faster"]
    assert not answer(run, path, "qkv", "--m", 601)["torch"]["is_faster"]


def test_rejected_functions_are_named_with_their_reason(run: Run, path: Path) -> None:
    (row,) = answer(run, path, "qkv", "--m", 512)["rejected"]
    assert row == {"name": WRONG, "reason": "D has a relative error of 0.5 at M = 17"}


def test_choices_are_told_in_words(run: Run, path: Path) -> None:
    function = answer(run, path, "qkv", "--m", 512)["function"]
    assert function["variant"]["words"] == "tile 88x192, cluster 2x1, pingpong, swap-AB"


def test_a_ranked_entry_says_that_nothing_was_timed(run: Run, path: Path) -> None:
    found = answer(run, path, "o", "--m", 16)
    assert (found["state"], found["time"], found["function"]["name"]) == ("ranked", None, WIDE)
    assert [row["name"] for row in found["runners_up"]] == [WRONG]
    assert "nothing was timed: run aot tune" in " ".join(run("explain", path, "o", "--m", 16).out.split())


def test_a_gemm_is_found_by_its_extents(run: Run, path: Path) -> None:
    assert answer(run, path, "--n", 6144, "--k", 4096, "--dtype", "bf16", "--m", 1)["key"] == QKV


def test_a_function_is_explained_by_the_layer_that_it_serves(run: Run, path: Path) -> None:
    found = answer(run, path, "qkv", "--m", 512)
    for word in (MANY, found["function"]["digest"][:6]):
        assert answer(run, path, word, "--m", 512) == found


def test_extents_that_no_build_takes_are_told_with_what_to_pad_to(run: Run, path: Path) -> None:
    found = answer(run, path, "--n", 100, "--k", 4096, "--m", 1, status=1)
    (advice,) = found["advice"]
    assert advice.startswith("no build takes it: n must be a positive multiple of 8, found 100")
    assert advice.endswith("pad to 104")


def test_of_what_nothing_serves_the_nearest_and_the_remedy_are_told(run: Run, path: Path) -> None:
    found = answer(run, path, "--n", 4096, "--k", 4000, "--m", 1, status=1)
    assert (found["state"], found["nearest"][0]["signature"]) == (None, OUT)
    assert found["nearest"][0]["differs"] == ["K is 4096, wanted 4000"]
    assert "runtime.universal()" in found["advice"][0]
    result = run("explain", path, "--n", 4096, "--k", 4000, "--m", 1)
    assert (result.status, result.err) == (1, "")
    assert "aot build MANIFEST --target sm_90a --base" in result.out


def test_a_gpu_that_nothing_is_for_is_told(run: Run, path: Path) -> None:
    found = answer(run, path, "qkv", "--m", 1, "--gpu", "b200", status=1)
    assert found["gpu"]["name"] == "NVIDIA B200"
    assert found["nearest"][0]["differs"] == ["sm_90a does not run there"]


@pytest.mark.parametrize(
    ("target", "name", "said"),
    [
        ("sm_80", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB (108 SMs, 2039 GB/s)"),
        ("sm_90a", "NVIDIA H200", "NVIDIA H200 (132 SMs, 4917 GB/s)"),
        ("sm_100a", "NVIDIA B200", "NVIDIA B200 (148 SMs, 8000 GB/s)"),
        ("sm_103a", "NVIDIA B300 SXM6 AC", "NVIDIA B300 SXM6 AC (148 SMs, 8000 GB/s)"),
        ("sm_107a", "an sm_107a GPU", "an sm_107a GPU (224 SMs)"),
        ("sm_110a", "NVIDIA Thor", "NVIDIA Thor (20 SMs, 273 GB/s)"),
        ("sm_120a", "NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 5090 (170 SMs, 1792 GB/s)"),
        ("sm_121a", "an sm_121 GPU", "an sm_121 GPU (132 SMs)"),
    ],
)
def test_code_of_a_target_is_explained_on_a_gpu_that_runs_it(
    run: Run, tmp_path: Path, target: str, name: str, said: str
) -> None:
    rows = [entry(signature(512, 512), [(None, "f")], target=target, state="ranked")]
    write_archive(tmp_path / "x.aot", [gemm_record("f", target=target)], rows)
    found = answer(run, tmp_path / "x.aot", "--n", 512, "--k", 512, "--m", 1)
    assert (found["target"], found["gpu"]["name"], found["assumed_gpu"]) == (target, name, True)
    assert (found["floor"] is None) == (target != "sm_90a")
    out = unwrapped(run("explain", tmp_path / "x.aot", "--n", 512, "--k", 512, "--m", 1).out)
    assert f"at M = 1 on {said}: ranked" in out


@pytest.mark.parametrize(
    ("word", "name"),
    [("B300", "NVIDIA B300 SXM6 AC"), ("GB200", "NVIDIA GB200"), ("b200", "NVIDIA B200"), ("thor", "NVIDIA Thor")],
)
def test_a_kind_goes_by_the_word_that_people_use(run: Run, path: Path, word: str, name: str) -> None:
    assert answer(run, path, "qkv", "--m", 1, "--gpu", word, status=1)["gpu"]["name"] == name


def test_what_was_tuned_on_another_kind_has_the_times_and_the_floor_of_that(run: Run, path: Path) -> None:
    here, there = (answer(run, path, "qkv", "--m", 1, *gpu) for gpu in ([], ["--gpu", "H100"]))
    assert (here["of_another_kind"], there["of_another_kind"]) == (False, True)
    assert there["gpu"]["name"] == "NVIDIA H100 80GB HBM3"
    assert there["floor"] == here["floor"]
    assert (
        "tuned on NVIDIA H200 (132 SMs, 4814 GB/s), the nearest kind"
        in run("explain", path, "qkv", "--m", 1, "--gpu", "H100").out
    )


def test_targets_whose_forms_do_not_serve_a_layer_are_not_asked(run: Run, tmp_path: Path) -> None:
    path = _with_a_form_of_b200(tmp_path)
    assert answer(run, path, "--n", 512, "--k", 512, "--m", 1)["target"] == "sm_90a"


def test_a_form_is_shown_for_a_gpu_that_runs_it(run: Run, tmp_path: Path) -> None:
    (found,) = json.loads(run("show", _with_a_form_of_b200(tmp_path), F16, "--json").out)["predicted"]
    assert found["gpu"]["name"] == "NVIDIA B200"


def _with_a_form_of_b200(folder: Path) -> Path:
    """An archive with a bf16 entry for Hopper, and a form of f16 for sm_100a."""
    form = universal_archives.ROW["form"] | {"a": "f16", "b": "f16", "d": "f16"}
    row = universal_archives.ROW | {"form": form, "target": "sm_100a", "functions": [["other", 8, 8, 4096]]}
    del row["equal_bits"]
    program = {"constants": [1], "operations": "add", "operands": [0, 6], "results": [7]}
    table = {"schema": 2, "forms": [row], "programs": [program]}
    rows = [entry(signature(512, 512), [(None, "few")])]
    universal_archives.write(folder / "x.aot", rows, table)
    return folder / "x.aot"


def test_a_form_is_explained_by_what_it_predicts(run: Run, tmp_path: Path) -> None:
    universal_archives.write(tmp_path / "forms.aot")
    found = answer(run, tmp_path / "forms.aot", "--n", 512, "--k", 512, "--m", 10)
    assert (found["state"], found["function"]["name"], found["time"]["us"]) == ("predicted", "few", 110)
    assert [row["name"] for row in found["runners_up"]] == ["many", "shared"]
    assert "checked on NVIDIA H200" in " ".join(
        run("explain", tmp_path / "forms.aot", found["key"], "--m", 10).out.split()
    )


def test_beyond_what_an_entry_was_tuned_to_a_form_is_explained(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "both.aot"
    equal = [(None, "wide")]
    universal_archives.write(path, [entry(signature(512, 512), [(None, "few")], tuned_to=40, invariant=equal)])
    found = {m: answer(run, path, "--n", 512, "--k", 512, "--m", m) for m in (80, 81)}
    assert {m: (of["state"], of["function"]["name"]) for m, of in found.items()} == {
        80: ("tuned", "few"),
        81: ("predicted", "many"),
    }
    assert {of["equal_bits"] for of in found.values()} == {"wide"}, "callers who want those get no prediction"
    assert answer(run, path, "shared", "--m", 9000)["key"] == found[80]["key"]
    key = found[80]["key"]
    (shown,) = json.loads(run("show", path, key, "--m", 80, "--m", 81, "--m", 9000, "--json").out)["entries"]
    assert shown["predicted_from"] == 81
    assert [choice["function"] for choice in shown["serves"]["choices"]] == ["few", "many", "shared"]
    assert "from M = 81 on, twice what it was tuned to" in run("show", path, key).out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--m", 1], "name a layer, such as qkv, or give --n and --k"),
        (["qkv", "--n", 5, "--m", 1], "leave out --n, --k and --dtype"),
        (["qvk", "--m", 1], "did you mean 'qkv'?"),
        (["qkv", "--m", 1, "--gpu", "H300"], "unknown GPU 'H300'; did you mean 'H200'?"),
        (["qkv", "--m", 1, "--gpu", ""], "unknown GPU ''; known: H200"),
        (["qkv", "--m", 1, "--gpu", " "], "unknown GPU ' '; known: H200"),
        (["qkv", "--m", 700, "--m", 800], "--m is there twice, 700 and 800; ask for one M at a time"),
        (["qkv", "--m", 1, "--target", "sm_9a"], "unknown target 'sm_9a'"),
        (
            ["qkv", "--m", 1, "--target", "sm_80", "--gpu", "H200"],
            "does not run sm_80; leave out --target or --gpu, or ",
        ),
        (["--n", 5, "--k", 5, "--dtype", "fp8", "--m", 1], "unknown element type 'fp8'"),
        ([OTHER, "--m", 1], "serves no layer at M = 1; `aot show"),
    ],
)
def test_a_wrong_question_is_one_line(run: Run, path: Path, arguments: list[object], said: str) -> None:
    result = run("explain", path, *arguments)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert said in result.err


# --- floors ---


def test_few_rows_are_bound_by_memory_and_many_by_tensor_cores() -> None:
    of = Signature.from_json(signature(6144, 4096))
    few, many = floor(of, 1, H200), floor(of, 700, H200)
    assert few is not None
    assert many is not None
    assert (few.bound, round(few.us, 1)) == ("memory", 11.7)
    assert (many.bound, round(many.us, 1)) == ("tensor cores", 48.9)


def test_eight_bits_have_twice_the_rate() -> None:
    of = Signature.from_json(signature(6144, 4096, dtype="e4m3", d="bf16", scaling="row_column"))
    found = floor(of, 4096, H200)
    assert found is not None
    assert (found.bound, found.rate) == ("tensor cores", 1400e6)


def test_an_operation_without_products_is_bound_by_memory() -> None:
    found = floor(Combine("bf16", "bf16", 8, 2048), 4096, H200)
    assert found is not None
    assert found.bound == "memory"


def test_there_is_no_floor_of_a_gpu_whose_rates_nobody_knows() -> None:
    assert floor(Signature.from_json(signature(6144, 4096)), 1, Gpu("NVIDIA B200", 148, 8000)) is None


def test_tables_of_the_archive_are_those_that_verify_accepts(run: Run, path: Path) -> None:
    """What these tests rest on is no damaged archive."""
    assert tables().keys() == {"gemm", "build", "tuning", "history"}
    checks = json.loads(run("verify", path, "--json").out)["checks"]
    assert [c for c in checks if not c["ok"] and "table" in c["subject"]] == []
