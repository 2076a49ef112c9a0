"""scripts/summarise_random.py: figures over the cases of several runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import summarise_random

from .bench_cases import a_result


def document(results: list[dict[str, Any]], archive: str = "a" * 64) -> dict[str, Any]:
    return {
        "archive": archive,
        "drawn": "all layers",
        "seed": "s",
        "date": "2026-11-24",
        "environments": {},
        "results": results,
    }


DOCUMENTS = [
    document([a_result(1, 10.0, 20.0), a_result(64, 10.0, 9.0), a_result(100, 10.0, 9.69)]),
    document([a_result(1, 10.0, 5.0, "g2"), a_result(100, 10.0, 9.7, "g2"), a_result(512, 10.0, 40.0, "g2")]),
]


def lines(documents: list[dict[str, Any]]) -> dict[tuple[str, ...], dict[str, Any]]:
    return {(s["who"], s["over"], s["group"], s["regime"]): s for s in summarise_random.summarise(documents)}


def test_the_summary_is_of_all_measurements_with_the_worst_gpu_beside() -> None:
    found = lines(DOCUMENTS)
    few = found["ours", "torch", "all", "M <= 64"]
    assert (few["cases"], few["measured"], few["gpus"]) == (2, 3, 2)
    assert few["geomean"] == round((2.0 * 0.9 * 0.5) ** (1 / 3), 5)
    assert few["lowest"] == 0.5, "of the second GPU; the first has the root of 1.8"
    assert (few["worst"], few["worst_at"]) == (0.5, "model:layer M=1")
    assert (few["slower"], few["most"]) == (round(2 / 3, 4), 1.0)
    many = found["ours", "torch", "all", "M >= 512"]
    assert (many["geomean"], many["worst"], many["slower"], many["gpus"]) == (4.0, 4.0, 0.0, 1)


def test_below_097_is_slower_and_097_is_not() -> None:
    middle = lines(DOCUMENTS)["ours", "torch", "all", "M = 65..511"]
    assert (middle["slower"], middle["most"]) == (0.5, 1.0)
    assert middle["worst"] == 0.969


def test_what_serves_is_never_faster_than_the_best_of_which_it_is_one() -> None:
    timed = [a_result(m, 10.0, 20.0) for m in (1, 2)]
    for result, us in zip(timed, (10.5, 8.0), strict=True):
        result["contenders"]["best_of"] = {"us": us}
    found = lines([document(timed)])["ours", "best_of", "all", "M <= 64"]
    assert (found["geomean"], found["worst"]) == (round(0.8**0.5, 5), 0.8)


def test_what_the_package_was_made_by_is_left_out() -> None:
    seen, new = ("bf16_bf16_bf16_f32_none_n6144_k4096", "bf16_bf16_bf16_f32_none_n6152_k4096_weights")
    results = [a_result(1, 10.0, 20.0) | {"signature": key} for key in (seen, new)]
    assert [r["signature"] for r in summarise_random.unseen(document(results))["results"]] == [new]


@pytest.mark.parametrize(("date", "seen"), [("2026-11-26", False), ("2026-11-27", True)])
def test_layers_that_gpus_were_tuned_with_are_known_from_the_day_the_package_knew_them(date: str, seen: bool) -> None:
    of_layer = document([a_result(1, 10.0, 20.0) | {"signature": "bf16_bf16_bf16_f32_none_n1152_k6912"}]) | {
        "date": date
    }
    assert (summarise_random.unseen(of_layer)["results"] == []) == seen


def test_groups_and_pairs_have_lines_of_their_own() -> None:
    fused = a_result(1, 10.0, 30.0) | {"group": "16 bits, fused"}
    fused["contenders"]["against"] = {"us": 15.0}
    fused["contenders"]["deep_gemm"] = {"unsupported": "no"}
    found = lines([document([a_result(1, 10.0, 20.0), fused])])
    assert found["ours", "torch", "16 bits", "M <= 64"]["geomean"] == 2.0
    assert found["ours", "torch", "16 bits, fused", "M <= 64"]["geomean"] == 3.0
    assert found["ours", "against", "all", "M <= 64"]["geomean"] == 1.5
    assert found["against", "torch", "all", "M <= 64"]["geomean"] == 2.0
    assert {pair for pair in found if "deep_gemm" in pair} == set()


@pytest.mark.parametrize("variant", ["dequantise, torch.mm", "torch.mm, eager swiglu (RuntimeError in torch.compile)"])
def test_what_torch_has_no_kernel_for_flatters_no_mean(variant: str) -> None:
    slow = a_result(2, 10.0, 500.0)
    slow["contenders"]["torch"]["variant"] = variant
    slow["contenders"]["against"] = {"us": 20.0}
    documents = [document([a_result(1, 10.0, 20.0), slow])]
    found = lines(documents)
    assert (found["ours", "torch", "all", "M <= 64"]["geomean"], found["ours", "torch", "all", "M <= 64"]["cases"]) == (
        2.0,
        1,
    )
    assert found["ours", "against", "all", "M <= 64"]["cases"] == 1
    assert "1 not compared with torch, which has no kernel for them" in summarise_random.table(documents)
    fused = a_result(3, 10.0, 20.0)
    fused["contenders"]["torch"]["variant"] = "torch.mm, torch.compile'd swiglu"
    assert not summarise_random.improvised(fused)


def test_archives_are_never_averaged_with_each_other() -> None:
    two = [document([a_result(1, 10.0, 20.0)]), document([a_result(1, 10.0, 5.0)], "b" * 64)]
    assert [s["geomean"] for s in summarise_random.summarise(two) if s["group"] == "all"] == [2.0, 0.5]


def test_the_summary_exits_1_where_any_archive_was_wrong(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = tmp_path / "random_a.json"
    monkeypatch.setattr(sys, "argv", ["summarise_random.py", str(path)])

    def status(result: dict[str, Any]) -> int:
        path.write_text(json.dumps(document([a_result(1), result])))
        return summarise_random.main()

    assert status(a_result(2)) == 0
    for name in ("ours", "against", "on_slower", "best_of"):
        assert status(a_result(2, contenders={name: {"wrong": "relative error 1"}})) == 1
        assert f"1 wrong, first {name}: " in capsys.readouterr().out
    assert status(a_result(2, contenders={"ours": {}, "deep_gemm": {"wrong": "relative error 1"}})) == 0
    assert status(a_result(2, contenders={"ours": {"unserved": "no kernel"}})) == 0
    assert "1 not served, first ours: " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["summarise_random.py", "--json", str(path)])
    capsys.readouterr()
    assert summarise_random.main() == 0
    assert json.loads(capsys.readouterr().out)["summary"][0]["geomean"] == 1.2


def test_a_file_that_is_no_result_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "random_a.json"
    for text in ("[]", "{", '{"results": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no result file of"):
            summarise_random.read([path])
    monkeypatch.setattr(sys, "argv", ["summarise_random.py", str(path)])
    with pytest.raises(SystemExit) as ended:
        summarise_random.main()
    assert ended.value.code == 2
