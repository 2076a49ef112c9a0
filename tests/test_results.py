"""What benchmarks/results/ keeps, and docs/benchmarks.md, which is made from it: summaries of what was measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import reduce_results  # noqa: E402
import render_benchmarks  # noqa: E402
import summarise_random  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
HAND_WRITTEN = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RATIO = re.compile(r"\b(\d\.\d{3}) \((\d\.\d\d)\)")
GENERATED = re.compile(r"<!-- table .*?<!-- end -->", re.DOTALL)
SUMMARIES = sorted(p for p in RESULTS.glob("*.json") if "summary_of" in json.loads(p.read_text()))
ENVIRONMENT = {"gpu": "a GPU", "gpu_id": "g1", "driver": "580"}


def a_gemm(m: int, speedup: float, **more: Any) -> dict[str, Any]:
    row = {"signature": "s", "types": "bf16", "m": m, "error": 1e-3, "us": 10.0, "torch_us": 10 * speedup}
    return row | {"spread": 0.01 * m, "speedup": speedup, "noise": 1.0, "layers": "layers:a"} | more


def a_document(results: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    where = {
        "command": "python scripts/some.py",
        "date": "2026-11-22",
        "commit": "0123abcdef",
        "environment": ENVIRONMENT,
    }
    return where | more | {"results": results}


def a_case(m: int, ours: float, torch: float, **more: Any) -> dict[str, Any]:
    said = {"ours": {"us": ours, "spread": 0.1, "variant": "v", "error": 1e-3}, "torch": {"us": torch, "variant": "mm"}}
    row = {"layers": "model:layer", "signature": "bf16_s", "m": m, "group": "16 bits", "noise": 1.0, "gpu_id": "g1"}
    return row | {"contenders": said | more}


def a_run(*results: dict[str, Any]) -> dict[str, Any]:
    return a_document(list(results), seed="s", drawn="all layers", archive="a" * 64, environments={})


# --- reducing ---


def test_a_gemm_is_averaged_over_all_gpus_and_says_the_least_favourable() -> None:
    other = ENVIRONMENT | {"gpu_id": "g2"}
    documents = [
        a_document([a_gemm(1, 1.2), a_gemm(512, 0.9), a_gemm(2, 3.0, layers="manifest:b")]),
        a_document([a_gemm(1, 1.0), a_gemm(512, 0.9)], environment=other),
    ]
    found = reduce_results.reduced(["one", "two"], documents)
    assert found["summary_of"] == ["one", "two"]
    assert [run["environment"]["gpu_id"] for run in found["runs"]] == ["g1", "g2"]
    assert [(run["cases"], run["wrong"], run["largest_error"]) for run in found["runs"]] == [(3, 0, 1e-3), (2, 0, 1e-3)]
    lines = {(s["group"], s["regime"]): s for s in found["summary"]}
    eight = lines["eight layers", "M <= 64"]
    assert (eight["cases"], eight["measured"], eight["gpus"]) == (1, 2, 2)
    assert (eight["geomean"], eight["lowest"], eight["worst"]) == (round(1.2**0.5, 5), 1.0, 1.0)
    assert lines["all", "M <= 64"]["geomean"] == round((1.2 * 3.0) ** (1 / 3), 5)
    assert (lines["all", "M >= 512"]["slower"], lines["all", "M >= 512"]["largest_spread"]) == (1.0, 5.12)


def test_a_wrong_gemm_is_counted_and_not_averaged() -> None:
    missed = {"signature": "s", "m": 1, "layers": "layers:a", "error": "no kernel"}
    found = reduce_results.reduced(["one"], [a_document([a_gemm(1, 1.2), missed])])
    assert (found["runs"][0]["cases"], found["runs"][0]["wrong"]) == (2, 1)
    assert {s["cases"] for s in found["summary"]} == {1}


def test_a_cold_read_is_what_gemms_are_held_against_where_it_was_timed() -> None:
    rows = [a_gemm(1, 1.5, read_us=8.0), a_gemm(16, 1.5, read_us=10.0, layers="other:b"), a_gemm(64, 1.0)]
    found = reduce_results.reduced(["one"], [a_document(rows)])["over_cold_read"]
    ratios = {(r["what"], r["group"]): (r["cases"], r["most_m"], r["geomean"], r["most"]) for r in found}
    assert ratios["bf16", "eight layers"] == (1, 1, 1.25, 1.25)
    assert ratios["bf16", "all"] == (2, 16, round(1.25**0.5, 4), 1.25)
    assert ratios["torch", "all"] == (2, 16, round((1.875 * 1.5) ** 0.5, 4), 1.875)


def test_random_cases_are_summarised_as_before() -> None:
    wrong = {"against": {"wrong": "relative error 1"}, "on_slower": {"unserved": "no kernel"}}
    document = a_run(a_case(1, 10.0, 12.0), a_case(100, 10.0, 9.0, **wrong), a_case(512, 10.0, 9.8))
    kept = summarise_random.whole(reduce_results.reduced(["one"], [document]))
    assert kept["results"][0]["contenders"]["ours"] == {"us": 10.0, "spread": 0.1}
    assert summarise_random.table([kept]) == summarise_random.table([document])
    assert summarise_random.wrong([kept]) == summarise_random.wrong([document]) != []


def test_what_has_no_summary_is_kept_whole() -> None:
    documents = [a_document([]) | {"results": {"ms": ms}} for ms in (1.0, 2.0)]
    assert reduce_results.reduced(["one", "two"], documents)["runs"] == documents


def test_functions_of_equal_bits_are_named_once() -> None:
    a, b, c = "own.few.bf16.tile8.sm_90a", "own.few.bf16.tile8.x.sm_90a", "own.many.bf16.tile8.sm_90a"
    results = [{"signature": "s", "groups": [[b, c], [a]]}, {"signature": "t", "groups": [[c]]}]
    found = reduce_results.reduced(["one"], [a_document(results)])
    assert found["functions"] == {
        "own.few.bf16": ["tile8.sm_90a", "tile8.x.sm_90a"],
        "own.many.bf16": ["tile8.sm_90a"],
    }
    assert found["results"] == [{"signature": "s", "groups": [[1, 2], [0]]}, {"signature": "t", "groups": [[2]]}]


def test_one_occasion_may_be_lines_too() -> None:
    documents = [a_run(a_case(1, 10.0, 12.0))]
    found = reduce_results.reduced(["one"], documents, lines=True)
    assert [(line["run"], line["regime"]) for line in found["summary"]] == [(0, "M <= 64")]
    assert "results" not in found


def test_several_occasions_are_lines_for_each() -> None:
    documents = [a_run(a_case(1, 10.0, 12.0)), a_run(a_case(1, 10.0, 9.0), a_case(600, 10.0, 20.0))]
    found = reduce_results.reduced(["one", "two"], documents)
    assert [(run["cases"], run["wrong"]) for run in found["runs"]] == [(1, 0), (2, 0)]
    lines = [(s["run"], s["regime"], s["cases"], s["geomean"], s["slower"]) for s in found["summary"]]
    assert lines == [(0, "M <= 64", 1, 1.2, 0.0), (1, "M <= 64", 1, 0.9, 1.0), (1, "M >= 512", 1, 2.0, 0.0)]


def test_results_of_two_scripts_are_not_put_together() -> None:
    with pytest.raises(ValueError, match="of several scripts"):
        reduce_results.reduced(["one", "two"], [a_document([a_gemm(1, 1.2)]), a_run(a_case(1, 10.0, 12.0))])


def test_what_is_no_result_is_refused(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = tmp_path / "some.json"
    for text in ("[]", "{", '{"results": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no result file"):
            reduce_results.read(str(path))
    monkeypatch.setattr(sys, "argv", ["reduce_results.py", "HEAD:missing.json", "-o", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit, match="2"):
        reduce_results.main()
    assert "HEAD:missing.json is no result file" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_the_command_writes_what_the_options_ask_for(tmp_path: Path, monkeypatch: Any) -> None:
    whole, out = tmp_path / "whole.json", tmp_path / "out.json"
    whole.write_text(json.dumps(a_document([a_gemm(1, 1.2)])))
    monkeypatch.setattr(sys, "argv", ["reduce_results.py", str(whole), "-o", str(out), "--note", "n", "--over", "else"])
    assert reduce_results.main() == 0
    found = json.loads(out.read_text())
    assert (found["note"], found["summary"], found["summary_of"]) == ("n", [], [str(whole)])


# --- what is kept ---


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: path.stem)
def test_a_summary_is_what_the_whole_files_give(path: Path) -> None:
    kept = json.loads(path.read_text())
    shown = subprocess.run(["git", "cat-file", "-e", kept["summary_of"][0]], cwd=ROOT, capture_output=True, check=False)
    if shown.returncode:
        pytest.skip("the history that has the whole files is not here")
    documents = [reduce_results.read(source) for source in kept["summary_of"]]
    again = reduce_results.reduced(kept["summary_of"], documents, lines="results" not in kept)
    found = json.loads(reduce_results.dump(again))
    overs = {line["over"] for line in kept.get("summary", ())}
    if "summary" in found:
        found["summary"] = [line for line in found["summary"] if line["over"] in overs]
    assert found | {"note": kept.get("note")} == kept | {"note": kept.get("note")}


def test_results_stay_small() -> None:
    assert sum(path.stat().st_size for path in RESULTS.iterdir()) <= 300_000


# --- the page ---


def page(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> str:
    monkeypatch.setattr(render_benchmarks, "RESULTS", folder)
    monkeypatch.setattr(render_benchmarks, "PAGES", (folder / "page.md",))
    monkeypatch.setattr(sys, "argv", ["render_benchmarks.py"])
    (folder / "page.md").write_text(text)
    assert render_benchmarks.main() == 0
    return (folder / "page.md").read_text()


def test_the_pages_that_are_kept_are_those_that_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [page.read_text() for page in render_benchmarks.PAGES]
    assert list(map(render_benchmarks.render, kept)) == kept
    assert all(f"<!-- table {name} -->" in "".join(kept) for name in render_benchmarks.TABLES)
    assert render_benchmarks.USUAL in kept[0]
    monkeypatch.setattr(sys, "argv", ["render_benchmarks.py", "--check"])
    assert render_benchmarks.main() == 0


def test_a_page_that_is_out_of_date_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stale = tmp_path / "page.md"
    stale.write_text(render_benchmarks.PAGE.read_text().replace("1.", "2."))
    monkeypatch.setattr(render_benchmarks, "PAGES", (stale,))
    monkeypatch.setattr(sys, "argv", ["render_benchmarks.py", "--check"])
    before = stale.read_text()
    assert render_benchmarks.main() == 1
    assert stale.read_text() == before


def test_words_between_tables_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(render_benchmarks.TABLES, "made-up", lambda: ["| new |"])
    text = page(monkeypatch, tmp_path, "# Head\n\n<!-- table made-up -->\nold\n<!-- end -->\n\nTail\n")
    assert text == "# Head\n\n<!-- table made-up -->\n\n| new |\n\n<!-- end -->\n\nTail\n"


def test_a_table_that_there_is_not_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no-such"):
        page(monkeypatch, tmp_path, "<!-- table no-such -->\n<!-- end -->\n")


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_ratios_that_are_written_by_hand_are_of_a_kept_result(page: Path) -> None:
    """Those such as "1.051 (0.93)", a geometric mean and its worst case, but in tables that are made."""
    kept = {pair for path in RESULTS.glob("*.json") for pair in ratios_in(json.loads(path.read_text()))}
    text = GENERATED.sub("", page.read_text())
    assert [" ".join(pair) for pair in RATIO.findall(text) if pair not in kept] == []


def ratios_in(document: Any) -> Iterator[tuple[str, str]]:
    """Every geometric mean of a result, or the lowest of several GPUs, and the worst case, as pages write them."""
    if isinstance(document, dict) and "worst" in document:
        means = (document[name] for name in ("geomean", "lowest") if name in document)
        yield from ((f"{mean:.3f}", f"{document['worst']:.2f}") for mean in means)
    inner = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    for each in inner:
        yield from ratios_in(each)


def test_the_page_is_read_in_minutes() -> None:
    assert len(render_benchmarks.PAGE.read_text().split()) <= 1450
