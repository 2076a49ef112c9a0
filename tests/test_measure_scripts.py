"""Scripts that measure what bounds a GEMM, as far as they need no GPU: what they make of figures, what they refuse."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import itertools

import bench_startup
import compare_bits
import launch_all
import measure_bounds
import measure_company
import measure_gpcs
import measure_lengths
import measure_tiles
import report
import sweep_variants

from aot.measure import Timing
from aot.variants import legal_variants
from runtime.signature import Signature

COST_US = {"small": 2.0, "pause": 10.0, "memset": 80.0, "theirs": 30.0, "ours": 35.0}


def test_what_comes_before_is_taken_off_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch behind something else takes 1 us more than alone; the larger spread of both graphs is told."""
    ran: list[str] = []

    def did(name: str) -> Any:
        return lambda *_: ran.append(name)

    def graph_us(steps: Any) -> Timing:
        ran.clear()
        for step in steps:
            step()
        behind = sum(a != b == "ours" for a, b in itertools.pairwise(ran))
        return Timing(sum(COST_US[name] for name in ran) + behind, 0.02 if behind else 0.01)

    fake = SimpleNamespace(
        zeros=lambda *_, **__: SimpleNamespace(add_=did("small")),
        empty=lambda *_, **__: SimpleNamespace(zero_=did("memset")),
        uint8=None,
        cuda=SimpleNamespace(_sleep=did("pause")),
    )
    monkeypatch.setattr(measure_company, "torch", fake)
    monkeypatch.setattr(measure_company, "graph_us", graph_us)
    found = list(measure_company.companies(did("ours"), did("theirs"), ["one", "another"]))
    assert [us for _, us, _ in found] == [35.0, 35.0, 36.0, 36.0, 36.0, 36.0]
    assert [spread for *_, spread in found] == [0.01, 0.01, 0.02, 0.02, 0.02, 0.02]
    assert len({name for name, *_ in found}) == 6


def test_a_case_is_a_key_and_values_of_m() -> None:
    assert measure_bounds.parse_case("key:64,256") == [("key", 64), ("key", 256)]
    with pytest.raises(Exception, match="is not KEY:M,M"):
        measure_bounds.parse_case("key:many")


def test_a_peer_is_named_with_its_candidate() -> None:
    assert measure_bounds.parse_peer("quack:tile 128x128 pingpong") == ("quack", "tile 128x128 pingpong")
    for bad in ("quack", "cublas:tile 128x128"):
        with pytest.raises(Exception, match="is not PEER:CANDIDATE"):
            measure_bounds.parse_peer(bad)


def test_a_line_is_told_in_what_is_paid_once_and_for_each_column() -> None:
    exact = measure_lengths.line({1024: 3.0, 2048: 4.0, 4096: 6.0})
    assert exact == {"fixed_us": 2.0, "us_per_1024": 1.0, "off": 0.0}
    assert measure_lengths.line({1024: 3.0, 2048: 4.0, 4096: 6.6})["off"] > 0.02
    assert measure_lengths.lengths(4096, 64)[0] == 1024
    assert measure_lengths.lengths(1000, 64)[-1] == 1472  # whole stages
    with pytest.raises(ValueError, match="needs 1024 columns"):
        measure_lengths.lengths(1000, 128)


def test_sms_whose_reads_were_served_once_are_of_a_group() -> None:
    pairs = [(0, 2), (0, 4), (0, 6), (2, 4), (2, 6)]
    assert measure_gpcs.groups(8, pairs, [2.0, 1.0, 2.0, 2.0, 1.02]) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert measure_gpcs.groups(6, [(0, 2), (0, 4), (2, 4)], [2.0, 2.0, 2.0]) == [[0, 1], [2, 3], [4, 5]]


def test_a_part_of_an_archive_that_nothing_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_all.runtime, "load", lambda _: SimpleNamespace(functions={"own.one": None}))
    monkeypatch.setattr(sys, "argv", ["launch_all.py", "x.aot", "--only", "another"])
    with pytest.raises(SystemExit, match="2"):
        launch_all.main()
    assert "x.aot has no function whose name holds 'another'" in capsys.readouterr().err


def test_orders_of_tiles_that_move_them_are_schedules_of_their_own() -> None:
    names = [f"own.sm90_persistent.bf16_bf16_bf16_f32.tile128x80.cluster1x2.{o}.sm_90a" for o in ("columns", "quads")]
    assert launch_all.one_of_each(names) == names


def test_skipping_rows_past_m_is_a_schedule_of_its_own_and_is_timed_where_an_archive_has_it() -> None:
    signature = Signature("bf16", "bf16", "bf16", "f32", "none", 8192, 4096)
    (skips, *_) = (v for v in legal_variants("own", "sm_90a", signature, unoffered=True) if v.options.get("skip_oob"))
    names = [skips.name().replace(".skip_oob", ""), skips.name()]
    assert launch_all.one_of_each(names) == sorted(names)
    assert list(sweep_variants.variants(signature, names)) == names


@pytest.mark.parametrize("name", bench_startup.CHILDREN)
def test_children_that_are_timed_are_python_with_all_their_numbers(name: str) -> None:
    code = bench_startup.code_of(name, 12)
    compile(code, name, "exec")
    assert not re.search(r"\{(m|n|k|jit|tokens|what)\}", code)


def test_pieces_of_d_without_a_swizzle_are_schedules_of_their_own() -> None:
    tiles = ("tile128x160", "tile128x168", "swiglu.tile128x112", "bias+geglu_tanh_interleaved.tile256x144")
    names = [f"own.sm90_persistent.bf16_bf16_bf16_f32.{t}.cluster1x1.rows.serial.cooperative.sm_90a" for t in tiles]
    assert [launch_all.schedule(name).split(".").count("odd") for name in names] == [0, 1, 1, 1]
    swapped = "own.sm90_persistent.bf16_bf16_bf16_f32.tile88x168.cluster1x1.rows.swap.sm_90a"
    assert "odd" not in launch_all.schedule(swapped)


def test_a_result_names_the_commit_that_its_files_are_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert report.commit() == "unknown"
    (tmp_path / "COMMIT").write_text("copied\n")
    assert report.commit() == "copied"
    (tmp_path / "COMMIT").unlink()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert report.commit() == head
    (tmp_path / "file").touch()
    assert report.commit() == f"{head}+changes"
    (tmp_path / "COMMIT").write_text("copied\n")  # as a tree is that was copied over another commit's
    assert report.commit() == "copied"


def test_tiles_of_the_busiest_cta() -> None:
    """8192 rows of B are 43 tiles of 192, or 22 pairs of them."""
    name = "own.sm90_persistent.bf16_bf16_bf16_f32.tile{}.rows.serial.pingpong.split_k1{}.sm_90a"
    for tile, tiles in (("128x192.cluster1x1", 21), ("128x192.cluster2x1", 21), ("128x192.cluster1x2", 22)):
        assert measure_tiles.tiles_of_an_sm(name.format(tile, ""), 8192, 8192, 132) == (tiles, 128 * 192)
    assert measure_tiles.tiles_of_an_sm(name.format("176x128.cluster1x2", ".swap"), 8192, 8192, 132)[0] == 23
    assert measure_tiles.tiles_of_an_sm(name.format("128x128.cluster1x2", ""), 64, 128, 2)[0] == 1
    for wrong in ("own.sm90_small_m.bf16", name.format("128x128.cluster1x1", ".stream_k")):
        with pytest.raises(SystemExit, match="whole tiles"):
            measure_tiles.tiles_of_an_sm(wrong, 64, 64, 132)


def test_a_problem_is_three_numbers() -> None:
    assert measure_tiles.problem("1024x8192x512") == (1024, 8192, 512)
    with pytest.raises(Exception, match="is not MxNxK"):
        measure_tiles.problem("1024x8192")


def test_the_ranking_is_asked_again_about_times_that_were_taken() -> None:
    """Of the fastest first, nothing is lost; of a variant that is ranked last and took half as long, half."""
    signature = Signature("bf16", "bf16", "bf16", "f32", "none", 8192, 4096)
    names = [v.name() for v in sweep_variants.rank.rank(legal(signature), signature, 512, "sm_90a").variants]
    rising = [float(place + 1) for place in range(len(names))]
    unlike = [*(2.0 for _ in names[1:]), 1.0]
    results = sweep_variants.of_times(
        {
            "names": [names],
            "results": [
                of_case(signature, whole, us, {name: 1.0, "torch": 3.0, "what served": 2.0})
                for whole, us, name in ((True, rising, names[0]), (True, unlike, names[-1]), (False, rising, names[0]))
            ],
        }
    )
    assert [r["loss"] for r in results] == [[1.0] * len(sweep_variants.FIRST), [2.0] * len(sweep_variants.FIRST)]
    assert [r["best"] for r in results] == [{names[0]: 1.0, "torch": 3.0}, {names[-1]: 1.0, "torch": 3.0}]
    (line,) = sweep_variants.summarise(results)
    assert line["form"] == "bf16_bf16_bf16_f32_none"
    assert (line["cases"], line["geomean"][0], line["worst"][0]) == (2, 1.4142, 2.0)


def legal(signature: Signature) -> list[Any]:
    return legal_variants("own", "sm_90a", signature)


def of_case(signature: Signature, whole: bool, us: list[float], best: dict[str, float]) -> dict[str, Any]:
    return {"signature": signature.to_json(), "m": 512, "names": 0, "whole": whole, "us": us, "best": best}


def test_forms_are_told_apart_by_all_but_extents_and_promises() -> None:
    keys = (
        "bf16_bf16_bf16_f32_none_n8_k16",
        "bf16_bf16_bf16_f32_none_n16_k8_weights",
        "e4m3_e4m3_bf16_f32_none_n8_k16",
    )
    lines = sweep_variants.summarise([{"signature": k, "loss": [1.0]} for k in (*keys, keys[2] + "_row_column")])
    assert [line["cases"] for line in lines] == [2, 1, 1]


@pytest.mark.parametrize("arguments", [[], ["--times", __file__], ["--times", "missing.json.xz"]])
def test_a_sweep_of_nothing_says_so(arguments: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, sweep_variants.__file__, *arguments], capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "error: " in run.stderr
    assert "Traceback" not in run.stderr


def test_functions_whose_bits_are_equal_at_every_m_are_a_group() -> None:
    seen = {"a": ["1", "2"], "b": ["1", "3"], "c": ["1", "2"], "d": ["9", "3"]}
    assert compare_bits.groups(seen) == [["a", "c"], ["b"], ["d"]]
    assert compare_bits.groups({}) == []
