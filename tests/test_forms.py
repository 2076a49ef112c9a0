"""What `aot ls`, `show`, `verify` and `build` say of archives that serve forms at any N and K."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aot import build, selection
from aot.inspect import digests
from aot.pack import forms
from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.gemm.universal import Universal

from . import universal_archives
from .command_line import Run, unwrapped
from .recording_driver import FakeTorch, RecordingDriver, entry, signature
from .universal_archives import (
    FORM,
    FORM_NAME,
    GPU,
    MOST,
    NAMES,
    PROGRAM,
    ROW,
    TABLE,
    K,
    changed,
    checks,
    launched,
    library,
    of,
    write,
)

KEY = "bf16_bf16_bf16_f32_none_n520_k512"
archive = universal_archives.archive  # a fixture


def short_names(path: Path) -> dict[str, str]:
    with Archive.open(path) as opened:
        return digests.short_names(opened)


# --- ls ---


def test_ls_lists_each_form_after_the_entries(run: Run, archive: Path) -> None:
    lines = [line.split() for line in run("ls", archive).out.splitlines()]
    of_form = [FORM_NAME, "sm_90a", "4", "8,", "8", "NVIDIA", "H200"]
    assert lines.index(of_form) > next(i for i, line in enumerate(lines) if of(512).key() in line)
    others = next(line for line in lines if "other" in line)
    assert not set(others) & {"few", "many", "wide", "shared"}, "those are the form's"
    assert lines[-1][:5] == ["5", "functions", "for", "sm_100a,", "sm_90a:"]


def test_ls_as_json_has_the_forms_and_no_function_of_theirs(run: Run, archive: Path) -> None:
    found = json.loads(run("ls", archive, "--json").out)
    assert found["forms"] == [
        {
            "form": FORM_NAME,
            "words": FORM,
            "target": "sm_90a",
            "functions": 4,
            "multiples": [{"n": 8, "k": 8}],
            "most_n": MOST,
            "checked_on": ["NVIDIA H200"],
        }
    ]
    assert found["functions"] == [{"name": "other", "target": "sm_100a", "checked_on": []}]
    assert found["totals"]["functions"] == 5


def test_ls_of_forms_alone_says_that_they_ran_nowhere(run: Run, tmp_path: Path) -> None:
    path = changed(tmp_path, lambda obj: obj["forms"][0].pop("checked_on"))
    result = run("ls", path)
    assert (result.status, result.err) == (0, "")
    first, second, *_ = result.out.splitlines()
    assert first.split() == [
        "any",
        "N",
        "and",
        "K",
        "target",
        "functions",
        "N,",
        "K",
        "by",
        "checked",
        "on",
    ]
    assert second.endswith("  never run")


def test_ls_gives_each_pair_of_multiples_that_no_other_function_takes(run: Run, tmp_path: Path) -> None:
    def change(obj: dict[str, Any]) -> None:
        for function, (n, k) in zip(
            obj["forms"][0]["functions"], ((8, 64), (64, 8), (16, 128), (128, 16)), strict=True
        ):
            function[1:3] = [n, k]

    assert "  8, 64 or 64, 8  " in run("ls", changed(tmp_path, change)).out


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"batched": True}, "bf16_bf16_bf16_f32_none_n*_k*_b*"),
        ({"epilogue": "swiglu", "overlap": "weights"}, "bf16_bf16_bf16_f32_swiglu_n*_k*_weights"),
        ({"scaling": "block", "b_major": "n"}, "bf16_bf16_bf16_f32_none_n*_k*_block_n-major"),
    ],
)
def test_a_form_is_named_as_the_keys_of_its_signatures(words: dict[str, Any], name: str) -> None:
    table = Universal.from_json(TABLE | {"forms": [ROW | {"form": FORM | words}]}, dict.fromkeys(NAMES, "sm_90a"))
    ((key, form),) = table.forms
    row = forms.FormRow(key[:-2], key[-2], form, 0)
    assert row.name == name
    assert row.to_json() == FORM | words
    made = row.signature(512, 64).key()
    assert made == name.replace("n*", "n512").replace("k*", "k64").replace("b*", "b2")


def test_a_malformed_table_is_an_error(run: Run, tmp_path: Path) -> None:
    path = changed(tmp_path, lambda obj: obj.update(programs=[]))
    for command in (["ls", path], ["show", path, KEY]):
        result = run(*command)
        assert (result.status, result.out) == (2, "")
        assert "universal table: form 0: program must be one of the 0 there are" in result.err


# --- show ---


def test_show_predicts_for_a_signature_that_no_entry_has(run: Run, archive: Path) -> None:
    out = run("show", archive, KEY).out
    assert unwrapped(out).startswith(f"{KEY} on sm_90a: predicted for NVIDIA H200 (132 SMs, 4917 GB/s), not measured ")
    assert "takes: a bf16 (M, 512), b bf16 (520, 512), d bf16 (M, 520)\n" in out
    assert "functions that can compute it: 3, checked on NVIDIA H200\n" in out
    rows = [line.split() for line in out[out.index("predicted us") :].splitlines()[1:]]
    equal = rows.index([])
    assert rows[equal + 1][-9:] == ["of", "those", "that", "give", "equal", "bits", "at", "every", "M"]
    assert [row[-1] for row in rows[equal + 2 :]] == ["few", "few", "many", "many", "many", "many"]
    assert [[row[0], row[1], row[-1]] for row in rows[:equal]] == [
        ["1", "101.0", "few"],
        ["16", "116.0", "few"],
        ["64", "156.4", "many"],
        ["256", "175.6", "many"],
        ["1024", "1.0", "shared"],
        ["4096", "1.0", "shared"],
    ]


def test_show_predicts_for_exactly_the_rows_asked_for(run: Run, archive: Path) -> None:
    found = json.loads(run("show", archive, KEY, "--m", 70, "--m", 3, "--m", 70, "--json").out)
    (of_key,) = found["predicted"]
    assert of_key["choices"] == [{"m": 70, "function": "many", "us": 157.0}, {"m": 3, "function": "few", "us": 103.0}]
    assert (of_key["state"], of_key["functions"], of_key["checked_on"]) == ("predicted", 3, ["NVIDIA H200"])
    assert of_key["gpu"] == {"name": "NVIDIA H200", "multiprocessors": 132, "memory_gbps": 4917}


def test_show_predicts_for_the_kind_that_the_functions_were_checked_on(run: Run, tmp_path: Path) -> None:
    """Where the archive has its rates; a program of SMs alone shows which kind it was."""
    kind = Gpu("NVIDIA H20", 78, 4000)
    rows = [entry(signature(512, 512), [(None, "few")], gpu=kind)]
    by_sms = PROGRAM | {"operations": "", "operands": [], "results": [4, 4, 4, 4]}
    for checked, sms in (("NVIDIA H20", 78), ("NVIDIA L4", 132), ("NVIDIA H200", 132)):
        write(tmp_path / "kind.aot", rows, universal_archives.checked_on(checked) | {"programs": [by_sms]})
        (found,) = json.loads(run("show", tmp_path / "kind.aot", KEY, "--json").out)["predicted"]
        assert (found["gpu"]["multiprocessors"], found["choices"][0]["us"]) == (sms, sms)


def test_a_layer_that_no_manifest_has_may_be_asked_for_by_n_and_k(run: Run, archive: Path) -> None:
    result = run("explain", archive, "qkv", "--m", 3)
    assert (result.status, result.out) == (2, "")
    assert "give --n and --k, of which forms serve any" in result.err
    assert run("explain", archive, "--n", 520, "--k", 512, "--m", 3).status == 0


def test_show_of_a_form_asks_for_an_n_and_a_k(run: Run, archive: Path) -> None:
    result = run("show", archive, FORM_NAME)
    assert (result.status, result.out) == (2, "")
    assert "is a form; put an N and a K in place of its stars" in result.err


def test_show_of_a_function_takes_no_rows(run: Run, archive: Path) -> None:
    assert list(json.loads(run("show", archive, "few", "--json").out)) == ["function"]
    result = run("show", archive, "few", "--m", 3)
    assert result == (2, "", f"error: {archive}: 'few' is a function, and --m is for signatures; leave it out\n")


def test_show_of_a_tuned_entry_at_some_rows_says_what_serves_there_and_the_times_measured_there(
    run: Run, tmp_path: Path
) -> None:
    row = entry(signature(512, 512), [(64, "few"), (None, "many")], invariant=[(None, "many")])
    timing = {"function": "few", "us": 5.0, "baseline_us": 10.0}
    row["timings"] = [{"m": 3} | timing, {"m": 100} | timing]
    write(tmp_path / "tuned.aot", [row])
    shown = run("show", tmp_path / "tuned.aot", of(512).key(), "--m", 100, "--m", 3, "--json").out
    (found,) = json.loads(shown)["entries"]
    assert found["serves"] == {
        "state": "tuned",
        "choices": [{"m": 100, "function": "many", "us": None}, {"m": 3, "function": "few", "us": 5.0}],
        "invariant": [{"m": 100, "function": "many", "us": None}, {"m": 3, "function": "many", "us": None}],
    }
    out = run("show", tmp_path / "tuned.aot", of(512).key(), "--m", 100, "--m", 3).out
    assert out.startswith(f"{of(512).key()} on sm_90a: tuned\n")
    few, many = (short_names(tmp_path / "tuned.aot")[name] for name in ("few", "many"))
    assert f"\n  M   us  digest    function\n100       {many}  many\n  3  5.0  {few}  few\n" in out
    assert "64" not in out, "ranges are for who asks for no rows"


# --- entries that give way ---


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("rows", ["tuned", "ranked", "ranked any, tuned H20", "ranked H200, tuned H20", "other N"])
def test_what_show_says_serves_is_what_a_library_launches(
    run: Run, tmp_path: Path, torch: FakeTorch, rows: str, checked: bool, invariant: bool
) -> None:
    """On an H200, for which predictions are too; entries for it come before those for others."""
    equal = [(None, "many")]
    of_entry = signature(512, K)

    def row(state: str, name: str, gpu: Gpu | None = None) -> dict[str, Any]:
        return entry(of_entry, [(None, name)], state=state, gpu=gpu, invariant=equal)

    h20, h200 = Gpu("NVIDIA H20", 78, 4000), Gpu("NVIDIA H200", 132, 4917)
    entries = {
        "tuned": [row("tuned", "shared")],
        "ranked": [row("ranked", "shared")],
        "ranked any, tuned H20": [row("ranked", "few"), row("tuned", "shared", h20)],
        "ranked H200, tuned H20": [row("ranked", "shared", h200), row("tuned", "many", h20)],
        "other N": [entry(signature(520, K), [(None, "shared")], state="ranked", invariant=equal)],
    }[rows]
    obj = TABLE if checked else universal_archives.checked_on()
    driver = RecordingDriver(kind=h200)
    lib = library(tmp_path, driver, entries, obj, batch_invariant=invariant)
    found = json.loads(run("show", tmp_path / "universal.aot", of(512).key(), "--m", 3, "--json").out)
    serves = next(e["serves"] for e in found["entries"] if e["serves"]) if "entries" in found else found["predicted"][0]
    (choice,) = serves["invariant" if invariant else "choices"]
    assert launched(lib, driver, 512, 3) == choice["function"]
    assert serves["state"] == lib.entry(of(512)).state


def test_ls_lists_no_ranges_that_serve_nothing(run: Run, tmp_path: Path) -> None:
    ranked = entry(signature(512, K), [(64, "many"), (None, "few")], state="ranked")
    write(tmp_path / "both.aot", [ranked, entry(signature(520, K), [(None, "few")])])
    found = json.loads(run("ls", tmp_path / "both.aot", "--json").out)
    instead = {"state": "predicted", "form": FORM_NAME, "checked_on": ["NVIDIA H200"]}
    assert [e["instead"] for e in found["entries"]] == [instead, None]
    out = run("ls", tmp_path / "both.aot").out
    (row,) = [line.split() for line in out.splitlines() if line.startswith(of(512).key())]
    assert row == [of(512).key(), "sm_90a", "ranked", "a", "form"]
    assert "\n1 of 2 entries were never tuned and give way: " in out
    unchecked = changed(tmp_path, lambda obj: obj["forms"][0].pop("checked_on"), [ranked])
    (row,) = [line.split() for line in run("ls", unchecked, "--m", 64).out.splitlines() if of(512).key() in line]
    assert row[1:4] == ["sm_90a", "ranked", "1-64"]


def test_show_puts_what_serves_before_an_entry_that_gives_way(run: Run, tmp_path: Path) -> None:
    candidates = [(16, ["many", "few"])]
    write(tmp_path / "both.aot", [entry(signature(512, K), [(None, "many")], candidates, state="ranked")])
    show = "show", tmp_path / "both.aot", of(512).key()
    whole, asked = (run(*show, *more).out for more in (["--candidates"], ["--m", 3]))
    assert "\nup to 2 candidates at each M that aot tune would time; --candidates prints them\n" in run(*show).out
    elsewhere = run(*show, "--target", "sm_100a")
    assert (elsewhere.status, elsewhere.out) == (2, "")
    assert elsewhere.err.endswith("is there for sm_90a, not for sm_100a\n")
    assert run(*show, "--target", "sm_90a").out == run(*show).out
    head = f"{of(512).key()} on sm_90a: ranked, unused\n"
    way = f" gives way to what {FORM_NAME} predicts, here for NVIDIA H200 (132 SMs, 4917 GB/s), not measured "
    for out in (whole, asked):
        assert out.startswith(head)
        assert way in unwrapped(out)
    few, many, shared = (short_names(tmp_path / "both.aot")[name] for name in ("few", "many", "shared"))
    assert whole.index(f"4096           1.0  {shared}  shared") < whole.index(
        "\nof the entry itself, which serves nothing:\n M  "
    )
    assert f"\ncandidates at M = 16, best first: {many} {few}\n" in whole
    assert f"\nM  predicted us  digest    function\n3         103.0  {few}  few\n" in asked
    assert "of the entry itself" not in asked
    kinds = [
        entry(signature(512, K), [(None, "many")], state="ranked"),
        entry(signature(512, K), [(None, "few")], gpu=GPU),
    ]
    write(tmp_path / "kinds.aot", kinds)
    assert "gives way to the entries that were tuned\n" in run("show", tmp_path / "kinds.aot", of(512).key()).out


@pytest.mark.parametrize("extents", ["n512_k520", "n*_k*"])
def test_show_of_what_is_nearly_a_forms_key_suggests_it_with_the_same_extents(
    run: Run, archive: Path, extents: str
) -> None:
    result = run("show", archive, f"bf16_bf16_bf16_f32_non_{extents}")
    assert (result.status, result.out) == (2, "")
    assert f"; did you mean 'bf16_bf16_bf16_f32_none_{extents}'? `aot ls" in result.err


@pytest.mark.parametrize("name", ["fewer", "x" * 9])
def test_show_of_what_is_no_signature_suggests_the_nearest(run: Run, archive: Path, name: str) -> None:
    result = run("show", archive, name)
    assert (result.status, result.out) == (2, "")
    assert f"has no function or signature '{name}', and no manifest's name" in result.err
    assert ("did you mean 'few'?" in result.err) is (name == "fewer")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bf16_bf16_bf16_f32_none_n12_k512", "take an N that is a multiple of 8 and a K of 8"),
        (
            "bf16_bf16_bf16_f32_silu_n520_k512",
            "no form has its types and words; did you mean 'bf16_bf16_bf16_f32_none_n520_k512'?",
        ),
    ],
)
def test_show_of_what_no_form_can_compute_says_why(run: Run, archive: Path, name: str, why: str) -> None:
    result = run("show", archive, name)
    assert (result.status, result.out) == (2, "")
    assert f"'{name}' has no entry, and " in result.err
    assert why in result.err


def test_a_time_that_is_no_number_is_shown_as_none(run: Run, tmp_path: Path) -> None:
    of_zero = PROGRAM | {"constants": [0], "operations": "div", "operands": [0, 6], "results": [7] * 4}
    path = changed(tmp_path, lambda obj: obj.update(programs=[of_zero]))
    (found,) = json.loads(run("show", path, KEY, "--json").out)["predicted"]
    assert {choice["us"] for choice in found["choices"]} == {None}
    assert run("show", path, KEY).status == 0


# --- build ---


def test_a_build_replaces_forms_that_ran_nowhere(run: Run, folder: Path, tmp_path: Path) -> None:
    out = changed(tmp_path, lambda obj: obj["forms"][0].pop("checked_on"))
    arguments = ["build", folder / "tiny.yaml", "--candidates", 1, "--cache", folder / "cache", "--no-tune"]
    assert run(*arguments, "-o", out).status == 0
    assert out.read_bytes() == (folder / "tiny.aot").read_bytes()


def test_a_build_counts_the_forms_of_its_base(run: Run, folder: Path, archive: Path, tmp_path: Path) -> None:
    arguments = ["build", folder / "tiny.yaml", "--candidates", 1, "--cache", folder / "cache", "--no-tune"]
    plain = run(*arguments, "-o", tmp_path / "plain.aot")
    assert "at any N and K" not in plain.out
    based = run(*arguments, "--base", archive, "-o", tmp_path / "based.aot")
    assert ", serving 1 form at any N and K, " in based.out
    again = run(*arguments, "--base", archive, "-o", tmp_path / "again.aot", "--json")
    assert json.loads(again.out)["forms"] == 1


def test_a_build_counts_the_forms_that_it_serves(run: Run, folder: Path, tmp_path: Path) -> None:
    arguments = ["build", folder / "tiny.yaml", "--universal", "--candidates", 1, "--cache", folder / "cache"]
    result = run(*arguments, "--no-tune", "-o", tmp_path / "forms.aot", "--json")
    assert (result.status, json.loads(result.out)["forms"]) == (0, 1)
    assert checks(tmp_path / "forms.aot", "form ")[0].detail == "1 functions"
    assert [finding for finding in checks(tmp_path / "forms.aot", "") if not finding.ok] == []


def test_a_table_that_readers_refuse_is_not_written() -> None:
    table = TABLE | {"forms": [None] * 513}
    with pytest.raises(selection.BuildError, match="at most 512 are read; split the manifests over several archives"):
        build._require_readable(table, {})
