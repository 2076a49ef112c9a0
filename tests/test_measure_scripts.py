"""Scripts that measure, as far as they need no GPU: what they make of figures, and what they refuse."""

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

import bench_startup
import compare_bits
import launch_all
import report
import sweep_variants

from aot.search.legal import legal_variants
from runtime.gemm.signature import Signature

from .ranking import rank


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


def test_tiles_of_fewer_rows_than_wgmma_multiplies_are_schedules_of_their_own() -> None:
    tiles = ("tile8x88", "tile8x128", "swiglu.tile8x176", "swiglu.tile8x192", "swiglu.tile8x256")
    names = [f"own.sm90_grouped.bf16_bf16_bf16_f32.{t}.cluster_n1.launch.cooperative.swap.sm_90a" for t in tiles]
    assert ["ragged" in launch_all.schedule(name) for name in names] == [True, False, True, True, False]
    assert "ragged" not in launch_all.schedule(names[0].replace("swap.", ""))


def test_weights_of_each_type_in_4_bits_are_schedules_of_their_own() -> None:
    rest = "tile64x128x128.cluster_n1.ctas_per_sm1.serial.sliced_k1.split_k1.sm_90a"
    names = [f"own.sm90_w4.bf16_{b}_bf16_f32.{b}_weight_scaled.{rest}" for b in ("e2m1", "u4")]
    assert launch_all.one_of_each(names) == names


def test_groups_whose_d_has_scales_of_its_own_are_schedules_of_their_own() -> None:
    words = "swiglu.block_scaled.tile64x256.cluster_n1.launch.cooperative.sm_90a"
    names = [f"own.sm90_grouped.e4m3_e4m3_{d}_f32.{words}" for d in ("bf16", "e4m3")]
    permute = "own.moe_permute.bf16_i32_e4m3_i32_i32_f32_f32.block_scaled.overlap"
    names += [f"{permute}.{launches}.threads128.sm_90a" for launches in ("one_launch", "two_launches")]
    assert launch_all.one_of_each(names) == sorted(names)


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


def test_the_ranking_is_asked_again_about_times_that_were_taken() -> None:
    """Of the fastest first, nothing is lost; of a variant that is ranked last and took half as long, half."""
    signature = Signature("bf16", "bf16", "bf16", "f32", "none", 8192, 4096)
    names = [v.name() for v in rank(legal(signature), signature, 512, "sm_90a").variants]
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
def test_a_sweep_of_nothing_says_so(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(sweep_variants.__file__), *arguments])
    try:
        status = report.ends(sweep_variants.main)
    except SystemExit as exit:  # of the options
        status = int(exit.code or 0)
    assert status == 2
    assert "error: " in capsys.readouterr().err


def test_functions_whose_bits_are_equal_at_every_m_are_a_group() -> None:
    seen = {"a": ["1", "2"], "b": ["1", "3"], "c": ["1", "2"], "d": ["9", "3"]}
    assert compare_bits.groups(seen) == [["a", "c"], ["b"], ["d"]]
    assert compare_bits.groups({}) == []
