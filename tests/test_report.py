"""The command report, and the data that it shows: layers by M, and what is wrong with an archive."""

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot.inspect.report.bins import Bin, bins
from aot.inspect.report.data import report
from aot.pack.write import Package
from aot.report.layers import meeting
from aot.report.view import view
from runtime.container.archive import Archive
from runtime.device.gpus import Gpu

from . import universal_archives
from .command_line import Run
from .inspected import BUILD, FEW, H200, MANY, QKV, TIMINGS, WIDE, tables, write
from .recording_driver import cubin, gemm_record, table

UNKNOWN = "bf16_bf16_bf16_f32_none_n512_k512"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.aot")


def found(path: Path) -> dict[str, Any]:
    with Archive.open(path) as archive:
        return report(archive)


def rules(path: Path) -> dict[tuple[str, str], str]:
    """What is wrong, by rule and subject."""
    return {(row["rule"], row["subject"]): row["says"] for row in found(path)["lint"]}


def model_with(**more: Any) -> dict[str, Any]:
    """The table `build` whose model has a third layer, which nothing serves."""
    problem = {"name": "third", "signature": UNKNOWN}
    model = BUILD["models"][0]
    return {"build": BUILD | {"models": [model | {"gemms": [*model["gemms"], problem]}]} | more}


# --- columns ---


def test_columns_are_powers_of_two_and_what_was_measured_between() -> None:
    spans = [(b.first, b.last) for b in bins([1, 2, 4, 6, 16])]
    assert spans == [(1, 1), (2, 2), (4, 4), (5, 7), (8, 8), (16, 16), (17, None)]


def test_a_range_in_which_torch_is_faster_has_a_column_though_nothing_was_measured_there() -> None:
    assert (9, 15) in bins([8, 16], [[(10, 11)]])
    assert (9, 15) not in bins([8, 16], [[(16, 20)]])


@given(st.sets(st.integers(1, 2**31), min_size=1, max_size=20), st.integers(1, 2**31))
def test_each_measured_m_is_in_one_column_and_columns_do_not_overlap(ms: set[int], first: int) -> None:
    columns = bins(ms, [[(first, None)]])
    assert all(column.last is None or column.first <= column.last for column in columns)
    assert all(sum(column.has(m) for column in columns) == 1 for m in ms)
    ends = [column.last for column in columns]
    assert ends[-1] is None
    assert all(end is not None and end < after.first for end, after in zip(ends[:-1], columns[1:], strict=True))


@given(st.lists(st.integers(1, 200), unique=True, max_size=12), st.integers(1, 210), st.integers(0, 40), st.booleans())
def test_a_column_meets_ranges_that_ascend_as_it_meets_each(
    ends: list[int], first: int, more: int, open_: bool
) -> None:
    ends = sorted(ends)[: len(ends) // 2 * 2]
    ranges: list[tuple[int, int | None]] = list(zip(ends[::2], ends[1::2], strict=True))
    if ranges and open_:
        ranges[-1] = (ranges[-1][0], None)
    for column in (Bin(first, first + more), Bin(first, None)):
        assert column.meets_any(ranges) == any(column.meets(*pair) for pair in ranges)


@given(st.lists(st.integers(1, 200), unique=True, max_size=12), st.integers(1, 210), st.integers(0, 40), st.booleans())
def test_a_cell_tells_of_the_ranges_that_its_column_meets(ends: list[int], first: int, more: int, open_: bool) -> None:
    ends = sorted(ends)[: len(ends) // 2 * 2]
    ranges: list[dict[str, Any]] = [{"m_min": a, "m_max": b} for a, b in zip(ends[::2], ends[1::2], strict=True)]
    if ranges and open_:
        ranges[-1]["m_max"] = None
    for column in (Bin(first, first + more), Bin(first, None)):
        met = [row for row in ranges if column.meets(row["m_min"], row["m_max"])]
        assert meeting(ranges, column._asdict()) == met


# --- layers ---


def test_cells_say_what_was_measured_and_what_serves_where_nothing_was(path: Path) -> None:
    (place,) = found(path)["places"]
    qkv, o = place["layers"]
    states = {(b["first"], b["last"]): c for b, c in zip(place["bins"], qkv["cells"], strict=True)}
    between = dict.fromkeys([(m, m) for m in (32, 64, 128, 256)], "tuned")
    assert {span: cell["state"] for span, cell in states.items()} == between | {
        (1, 15): "tuned",
        (16, 16): "measured",
        (257, 511): "torch_faster",
        (512, 512): "measured",
        (513, 1023): "torch_faster",
        (1024, 1024): "measured",
        (1025, None): "beyond",
    }
    assert (states[16, 16]["worst"], states[512, 512]["worst"]) == (1.15, 0.95)
    short = {row["name"]: row["digest"] for row in found(path)["functions"]}
    assert states[513, 1023]["serves"] == [short[MANY], short[WIDE]]
    assert {cell["state"] for cell in o["cells"]} == {"ranked"}


def test_a_column_of_several_times_shows_the_least(tmp_path: Path) -> None:
    changed = tables()["gemm"]
    more = [TIMINGS[1] | {"m": m, "us": us} for m, us in ((600, 30.0), (700, 50.0))]
    changed["entries"][0]["timings"] = [*TIMINGS[:2], *more, TIMINGS[2]]
    place = found(write(tmp_path / "x.aot", {"gemm": changed}))["places"][0]
    (cell,) = [c for b, c in zip(place["bins"], place["layers"][0]["cells"], strict=True) if b["first"] == 513]
    assert (cell["measured"], cell["worst"], cell["worst_m"]) == (2, 0.76, 700)


def test_a_time_is_compared_with_the_floor_of_the_gpu(path: Path) -> None:
    point = found(path)["places"][0]["layers"][0]["points"][1]
    assert (point["m"], point["us"], point["bound"]) == (512, 40.0, "tensor cores")
    assert point["over_floor"] == round(40.0 / point["floor_us"], 3) == 1.118


def test_a_layer_of_a_form_has_predicted_times(tmp_path: Path) -> None:
    build = BUILD | {"models": [{"model": "m", "gemms": [{"name": "up", "signature": UNKNOWN}]}]}
    universal_archives.write(tmp_path / "forms.aot")
    package = Package()
    with Archive.open(tmp_path / "forms.aot") as archive:
        package.add_archive(archive)
        package.set_table("universal", archive.table("universal"))
    package.set_table("build", build)
    package.write(tmp_path / "forms.aot")
    places = {place["compute_capability"]: place for place in found(tmp_path / "forms.aot")["places"]}
    (up,) = places["9.0"]["layers"]
    assert (up["state"], up["cells"][0]["state"], up["cells"][0]["us"]) == ("predicted", "predicted", 101.0)


def test_the_legend_of_a_kind_of_gpu_has_the_families_that_serve_there(path: Path, run: Run) -> None:
    data = found(path)
    (place,) = view(data)["places"]
    assert (
        place["families"].keys()
        == {"own.sm90_small_m", "own.sm90_persistent"}
        < {r["family"] for r in data["families"]}
    )
    run("report", path, "-o", path.parent / "x.html")
    (legend,) = re.findall('<p class="legend">.*', (path.parent / "x.html").read_text())
    assert legend.count("<span>") == 2


def test_functions_are_added_up_by_target_and_family(path: Path) -> None:
    data = found(path)
    assert sum(row["functions"] for row in data["families"]) == len(data["functions"]) == 5
    assert sum(row["bytes"] for row in data["families"]) == sum(row["bytes"] for row in data["functions"])


def test_times_of_another_kind_of_gpu_are_told_and_counted_once(tmp_path: Path) -> None:
    qkv, o = tables()["gemm"]["entries"]
    h100 = Gpu("NVIDIA H100 80GB HBM3", 132, 3352)
    tuned = {"state": "tuned", "functions": [WIDE], "ranges": [[None, 0]], "candidates": [], "gpu": h100}
    write(tmp_path / "x.aot", {"gemm": table([qkv | {"gpu": H200}, o | tuned])})
    h200, other = found(tmp_path / "x.aot")["places"]
    assert [place["layers"][0]["elsewhere"] for place in (h200, other)] == [False, True]
    assert h200["layers"][0]["points"] == other["layers"][0]["points"], "their floor is that of the H200"
    assert rules(tmp_path / "x.aot")["untuned", "qkv"].startswith("was tuned on NVIDIA H200 alone")
    assert view(found(tmp_path / "x.aot"))["against"]["measured"] == 3


# --- what is wrong ---


@pytest.mark.parametrize(
    ("rule", "subject", "said"),
    [
        ("slower than torch", "qkv", "torch is faster at M = 400-600; the least measured is 0.95x at M = 512"),
        ("untuned", "o", "chosen by estimates"),
        ("gap in M", "qkv", "nothing was measured between M = 16 and 512"),
        ("failed to compile", "own.sm90_persistent.gone.sm_90a", "ptxas: out of registers"),
        ("missing", "bf16_bf16_bf16_f32_none_n7_k7", "no kernel takes an N of 7"),
    ],
)
def test_what_is_wrong_is_found(path: Path, rule: str, subject: str, said: str) -> None:
    assert said in rules(path)[rule, subject]


def test_functions_that_serve_nothing_are_found(path: Path) -> None:
    said = [says for (rule, _), says in rules(path).items() if rule == "unused"]
    assert said == ["are candidates that serve nothing", "are in no table: only callers who name them use them"]


def test_a_layer_that_a_model_asks_for_and_nothing_serves_is_a_problem(tmp_path: Path) -> None:
    path = write(tmp_path / "x.aot", model_with())
    first = found(path)["lint"][0]
    assert "missing" in {row["rule"] for row in found(path)["lint"] if row["subject"] == "third"}
    assert first["severity"] == "problem"


def test_a_layer_that_the_build_could_not_serve_is_told_once(tmp_path: Path) -> None:
    path = write(tmp_path / "x.aot", model_with(unserved=[[UNKNOWN, "sm_90a", "no kernel"]]))
    assert [row["subject"] for row in found(path)["lint"] if row["rule"] == "missing"] == [UNKNOWN]


def test_traffic_beyond_what_was_measured_is_found(tmp_path: Path) -> None:
    model = BUILD["models"][0]
    gemms = [{"name": "qkv", "signature": QKV, "traffic": [[512, 9], [4096, 7]]}]
    path = write(tmp_path / "x.aot", {"build": BUILD | {"models": [model | {"gemms": gemms}]}})
    assert "7 calls of its traffic have an M above 1024" in [
        row["says"].partition(",")[0] for row in found(path)["lint"]
    ]


def test_times_that_spread_are_found(tmp_path: Path) -> None:
    changed = tables()["gemm"]
    changed["entries"][0]["timings"] = [TIMINGS[0] | {"spread": 0.06}, TIMINGS[1] | {"bimodal": True}, TIMINGS[2]]
    assert "at M = 16, 512" in rules(write(tmp_path / "x.aot", {"gemm": changed}))["unsteady time", "qkv"]


def test_functions_that_spill_are_found_and_an_archive_that_says_nothing_of_itself(tmp_path: Path) -> None:
    package, record = Package(), gemm_record(FEW)
    record["kernels"][0]["local_bytes"] = 24
    package.add_function(record, cubin(FEW))
    package.write(tmp_path / "x.aot")
    said = {rule: says for (rule, _), says in rules(tmp_path / "x.aot").items()}
    assert said["spills"] == "spill registers to local memory, up to 24 bytes a thread"
    assert "provenance" in said


# --- the command ---


def test_json_is_the_data_of_the_page(run: Run, path: Path) -> None:
    result = run("report", path, "--json")
    assert (result.status, result.err) == (0, "")
    assert json.loads(result.out) == found(path)


def test_a_page_is_replaced_by_another_and_leaves_nothing_beside_it(run: Run, path: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert run("report", path, "-o", page) == (0, "", "")
    page.write_text(page.read_text().replace("made-up-8b", "older"))
    assert run("report", path, "-o", page) == (0, "", "")
    assert "made-up-8b" in page.read_text()
    assert {file.name for file in tmp_path.iterdir()} == {"x.aot", "report.html"}


def test_a_file_that_is_no_page_is_not_replaced_unless_it_is_forced(run: Run, path: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.html"
    notes.write_text("<!DOCTYPE html>mine")
    result = run("report", path, "-o", notes)
    assert (result.status, result.err.count("\n"), notes.read_text()) == (2, 1, "<!DOCTYPE html>mine")
    assert "is there and is no report" in result.err
    assert run("report", path, "-o", notes, "--force").status == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ARCHIVE"], "give -o FILE for the page, or --json for its data"),
        (["ARCHIVE", "-o", "OUT", "--json"], "give -o FILE for the page, or --json for its data"),
        (["ARCHIVE", "-o", "ARCHIVE"], "is an input too"),
        (["ARCHIVE", "-o", "FOLDER/none/x.html"], "its folder does not exist"),
        (["ARCHIVE", "-o", "FOLDER"], "it is a folder"),
        (["FOLDER/none.aot", "-o", "OUT"], "none.aot"),
    ],
)
def test_a_wrong_call_is_one_line_and_writes_nothing(
    run: Run, path: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    names = {"ARCHIVE": str(path), "OUT": str(tmp_path / "out.html"), "FOLDER": str(tmp_path)}
    for name, value in names.items():
        arguments = [word.replace(name, value) for word in arguments]
    result = run("report", *arguments)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert said in result.err
    assert [file.name for file in tmp_path.iterdir()] == ["x.aot"]


def test_a_damaged_table_is_one_line_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "x.aot", {"build": BUILD | {"failures": [["a"]]}})
    result = run("report", path, "-o", tmp_path / "out.html")
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert "failures" in result.err
    assert not (tmp_path / "out.html").exists()


def test_where_the_disk_is_full_the_old_page_stays(
    run: Run, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "report.html"
    assert run("report", path, "-o", page).status == 0
    before = page.read_bytes()
    write(path, model_with())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("aot.cli.commands.report.os.replace", full)
    result = run("report", path, "-o", page)
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert "cannot be written (No space left on device)" in result.err
    assert page.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {"x.aot", "report.html"}
