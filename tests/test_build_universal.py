"""`aot build --universal`: the table of forms that it writes, bases, files of times, and what it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from aot.__main__ import main
from aot.pack import tables, tuning_table
from aot.pack.write import Package
from aot.search import universal
from aot.search.costs import Machine
from aot.search.h200 import H200
from aot.search.provider import PROVIDERS, provider
from aot.search.universal import Chosen, choices_of
from aot.tune import times
from runtime.container.archive import Archive
from runtime.device.gpus import H100, Gpu
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.gemm.universal import Function, Universal, write
from runtime.program.costs import CostSource

from .command_line import ALONE, ROOT
from .shared import made_once

TIMES = ROOT / "benchmarks" / "variants_h200.json.xz"
PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 6144, 4096)
ROWS = Signature("e4m3", "e4m3", "bf16", "f32", "none", 6144, 4096, scaling="row_column")
TINY = """format: 1
model: tiny
source: a test
tokens: [1, 64]
targets: [sm_90a]
gemms:
  - {name: up, n: 1024, k: 512, dtypes: {a: bf16, b: bf16, d: bf16}}
"""


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Path:
    def make(folder: Path) -> None:
        (folder / "tiny.yaml").write_text(TINY)
        arguments = ["build", str(folder / "tiny.yaml"), "--universal", "--candidates", "2", "--no-tune", *ALONE]
        assert run(*arguments, "-o", str(folder / "universal.aot"), "--cache", str(folder / "cache")) == 0

    return made_once(request, "universal", make)


def run(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["aot", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)


def test_build_writes_a_table_of_forms_and_no_entries(built: Path) -> None:
    with Archive.open(built / "universal.aot") as archive:
        targets = archive.functions.targets_by_name()
        table = Universal.from_json(archive.table("universal"), targets)
        assert archive.table("gemm")["entries"] == []
        assert len(targets) == 2
    assert len(table) == 1
    assert [form.checked_on for _, form in table.forms] == [()]
    for n, k in ((1024, 512), (8, 8), (50_000, 13_824)):
        assert table.entry(dataclasses.replace(PLAIN, n=n, k=k), (9, 0), Gpu("NVIDIA H200", 132, 4917)) is not None


def test_a_build_on_a_base_has_all_of_both(built: Path) -> None:
    common = ["build", str(built / "tiny.yaml"), "--candidates", "1", "--no-tune", "--cache", str(built / "cache")]
    assert run(*common, "--base", str(built / "universal.aot"), "-o", str(built / "both.aot")) == 0
    with Archive.open(built / "universal.aot") as base, Archive.open(built / "both.aot") as both:
        assert set(base.functions) <= set(both.functions)
        assert both.table("universal") == base.table("universal")
        assert [e["signature"]["n"] for e in both.table("gemm")["entries"]] == [1024]
        models = both.table("build")["models"]
        assert [(m["model"], [p["name"] for p in m["gemms"]]) for m in models] == [("tiny", []), ("tiny", ["up"])], (
            "N and K of what forms were built for say nothing"
        )
    assert run(*common, "--base", str(built / "both.aot"), "-o", str(built / "again.aot")) == 0
    with Archive.open(built / "again.aot") as again, Archive.open(built / "both.aot") as both:
        assert len(again.table("gemm")["entries"]) == 1, "it takes the place of the base's"
        assert set(again.functions) == set(both.functions)


def test_a_damaged_base_is_refused_though_nothing_damaged_would_be_kept(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray((built / "universal.aot").read_bytes())
    with Archive.open(built / "universal.aot") as archive:
        (cubins,) = (block for block in archive.blocks if block.kind == "sm_9x")
    data[cubins.offset] ^= 1
    (tmp_path / "damaged.aot").write_bytes(data)
    arguments = ["--universal", "--base", str(tmp_path / "damaged.aot"), "-o", str(tmp_path / "x.aot"), "--no-tune"]
    assert run("build", str(built / "tiny.yaml"), *arguments) == 2
    error = capsys.readouterr().err
    assert f"error: {tmp_path / 'damaged.aot'}: block" in error
    assert error.endswith("; copy the file again\n")
    assert not (tmp_path / "x.aot").exists()


def test_where_nothing_tuned_is_kept_of_a_base_nothing_says_that_it_was_tuned(built: Path, tmp_path: Path) -> None:
    """With --universal the base's forms, which were tuned, give way to others."""
    package = Package()
    with Archive.open(built / "universal.aot") as archive:
        package.add_archive(archive)
        package.set_table("universal", archive.table("universal"))
    machine = {"gpu": "NVIDIA H200", "compute_capability": "9.0"}
    package.set_table("tuning", {"schema": 1, "environments": [machine]})
    package.set_table("history", {"schema": 1, "tunings": []})
    package.write(tmp_path / "base.aot")
    common = ["--candidates", "1", "--no-tune", "--cache", str(built / "cache"), "--base", str(tmp_path / "base.aot")]
    assert run("build", str(built / "tiny.yaml"), *common, "-o", str(tmp_path / "kept.aot")) == 0
    assert run("build", str(built / "tiny.yaml"), *common, "-o", str(tmp_path / "gone.aot"), "--universal") == 0
    with Archive.open(tmp_path / "kept.aot") as kept, Archive.open(tmp_path / "gone.aot") as gone:
        assert {"tuning", "history"} <= set(kept.tables)
        assert not {"tuning", "history"} & set(gone.tables)


@pytest.mark.parametrize("kept", ["entry", "form", "nothing"])
def test_a_build_on_a_base_gives_no_other_code_to_what_the_base_serves(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: str
) -> None:
    """Another version of the compiler makes another cubin of the same name, which nobody tuned or checked."""
    common = ["build", str(built / "tiny.yaml"), "--candidates", "1", "--no-tune", "--cache", str(built / "cache")]
    assert run(*common, "-o", str(tmp_path / "new.aot")) == 0
    package = Package()
    with Archive.open(tmp_path / "new.aot") as new:
        codes = {name: new.cubin(name) for name in new.functions}
        for name, code in codes.items():
            digest = hashlib.sha256(code + b"other").hexdigest()
            package.add_function(new.record(name) | {"cubin": digest}, code + b"other")
        gemm = new.table("gemm")
    if kept == "entry":
        gemm["entries"][0]["signature"]["n"] = 2048
    package.set_table("gemm", gemm)
    if kept == "form":
        functions = [Function(name, 8, 8, 1 << 20, 0) for name in codes]
        costs = CostSource([1], [], [], [6] * len(codes))
        form = universal.source(Chosen(PLAIN, "sm_90a", (), {}))
        table = write([form._replace(functions=functions, costs=costs)])
        package.set_table("universal", table)
    package.write(tmp_path / "old.aot")
    capsys.readouterr()
    status = run(*common, "--base", str(tmp_path / "old.aot"), "-o", str(tmp_path / "x.aot"))
    if kept == "nothing":
        assert status == 0
        with Archive.open(tmp_path / "x.aot") as both:
            assert {name: both.cubin(name) for name in codes} == codes
        return
    assert status == 2
    assert f"serves with {min(codes)}, and this build has other code of that name" in capsys.readouterr().err
    assert not (tmp_path / "x.aot").exists()


def test_a_build_on_a_tuned_base_says_what_it_replaces(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And has no function that only what was replaced named."""
    with Archive.open(built / "universal.aot") as archive:
        package, (name, other) = Package(), list(archive.functions)
        package.add_archive(archive)
        row = tables.Row(dataclasses.replace(PLAIN, n=1024, k=512), "sm_90a", None, "tuned", [(None, name)])
        package.set_table("gemm", tables.table([row], GEMM, archive.functions.targets_by_name()))
        package.write(built / "tuned.aot")
    common = ["build", str(built / "tiny.yaml"), "--no-tune", "--cache", str(built / "cache"), "--candidates", "1"]
    assert run(*common, "--base", str(built / "tuned.aot"), "-o", str(built / "over.aot"), "--json") == 0
    said = capsys.readouterr()
    assert "1 tuned entry of the base gave way to candidates" in said.err
    summary = json.loads(said.out)
    with Archive.open(built / "over.aot") as archive:
        assert other in archive.functions, "nothing says whose it is"
        assert len(archive.functions) == summary["functions"] + summary["functions_of_base"]
        named = {n for e in archive.table("gemm")["entries"] for n in e["functions"]}
        assert (name in archive.functions) is (name in named)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--universal", "--candidates", "129"], "a form has at most 128 functions"),
        (["--base", "a.aot", "--base", "b.aot"], "--base is there more than once"),
        (["--universal", "--function", "softmax"], "build that without --universal"),
        (["--times", "x.json"], "give that too"),
        (["--universal", "--times", "x.json"], "x.json: no file of times"),
        (["--universal", "--target", "sm_100a"], "any N and K; give --target sm_90a, or build without --universal"),
        (["--universal", "--target", "sm_1"], "sm_1"),
        (["--base", "gone.aot"], "gone.aot"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert run("build", str(built / "tiny.yaml"), "-o", str(tmp_path / "x.aot"), *more) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.count("\n") == 0
    assert not (tmp_path / "x.aot").exists()


def test_forms_of_several_targets_say_which_of_them_to_name(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all.yaml").write_text(
        (built / "tiny.yaml").read_text().replace("[sm_90a]", "[sm_80, sm_90a, sm_100a]")
    )
    assert run("build", str(tmp_path / "all.yaml"), "-o", str(tmp_path / "x.aot"), "--universal") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no kernel family that computes these gemms on sm_80, sm_100a estimates its times")
    assert error.endswith("; give --target sm_90a, or build without --universal\n")


def test_an_archive_without_times_is_no_file_of_times(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untuned, out = built / "universal.aot", tmp_path / "x.aot"
    arguments = ["--universal", "--times", str(TIMES), "--times", str(untuned), "-o", str(out), "--no-tune"]
    assert run("build", str(built / "tiny.yaml"), *arguments) == 2
    assert f"error: {untuned}: has no times of kernels for sm_90a; name an archive" in capsys.readouterr().err
    assert not out.exists()


def test_a_form_that_nothing_can_estimate_is_said_beside_one_that_something_can(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (built / "tiny.yaml").read_text()
    text += "  - {name: mx, n: 64, k: 64, scaling: mxfp8, dtypes: {a: e4m3, b: e4m3, d: bf16}}\n"
    (tmp_path / "two.yaml").write_text(text)
    out = tmp_path / "x.aot"
    arguments = ["--universal", "--candidates", "1", "--no-tune", "--cache", str(built / "cache")]
    assert run("build", str(tmp_path / "two.yaml"), "-o", str(out), *arguments) == 1
    line = text.count("\n")
    word = "e4m3_e4m3_bf16_f32_none_n*_k*_mxfp8"
    assert f"two.yaml:{line}: mx: {word} on sm_90a: no kernel family computes it" in capsys.readouterr().err
    with Archive.open(out) as archive:
        ((named, target, _),) = archive.table("build")["unserved"]
    assert (named, target) == (word, "sm_90a")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"names": [], "results": [{"signature": {}}]}',
        '{"names": [["f"]], "results": 3}',
        '{"results": [{"signature": "x"}]}',
        '{"results": [{"signature": "bf16_bf16_bf16_f32_none_n8_k8", "m": 1, "us": 3, "best": {}}]}',
    ],
)
def test_a_file_of_something_else_is_no_file_of_times(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(times.TimesError, match="no file of times"):
        times.load(tmp_path / "x.json", "sm_90a")


def test_times_by_key_and_name_are_read_as_those_in_lists(tmp_path: Path) -> None:
    """As scripts/sweep_variants.py writes them."""
    names = [v.name() for v in provider("own").variants("sm_90a", PLAIN)[:3]]
    us = {name: 10.0 + i for i, name in enumerate(names)}
    case = {"signature": PLAIN.key(), "m": 300, "best": {names[2]: 9.5, "torch": 12.0}, "loss": [1.0], "us": us}
    (tmp_path / "x.json").write_text(json.dumps({"results": [case]}))
    ((signature, found),) = times.load(tmp_path / "x.json", "sm_90a")
    assert (signature, found.n, found.k, found.m) == (PLAIN, 6144, 4096, 300)
    assert sorted(found.us.values()) == [9.5, 10.0, 11.0]
    listed = case | {"signature": PLAIN.to_json(), "names": 0, "us": list(us.values())}
    (tmp_path / "y.json").write_text(json.dumps({"names": [names], "results": [listed]}))
    assert times.load(tmp_path / "y.json", "sm_90a") == [(signature, found)]
    assert found.machine == H200, "where no GPU is named"
    for of in ({"gpu": H100.name}, {"environment": {"gpu": H100.name}}):
        (tmp_path / "z.json").write_text(json.dumps({"results": [case]} | of))
        ((_, there),) = times.load(tmp_path / "z.json", "sm_90a")
        assert there == dataclasses.replace(found, machine=Machine(H100.multiprocessors, H100.memory_gbps))


def test_times_of_a_tuned_archive_are_those_of_its_history(tmp_path: Path) -> None:
    """Without what they took under load."""
    names = sorted(v.name() for v in provider("own").variants("sm_90a", PLAIN)[:3])
    points = [
        {
            "m": 300,
            "baseline": ["torch.mm", 1200, 10, 0, 0],
            "finalists": [[2, 900, 10, 1600, 0], [0, 1000, 10, 0, 0]],
            "screened": [[1, 3000]],
        }
    ]
    row = {"signature": PLAIN.key(), "target": "sm_90a", "gpu": "made up", "names": names, "points": points}
    package = Package()
    package.set_table(tuning_table.HISTORY, {"schema": 1, "tunings": [row | {"rejected": []}]})
    package.write(tmp_path / "tuned.aot")
    ((signature, found),) = times.load(tmp_path / "tuned.aot", "sm_90a")
    assert (signature, found.n, found.k, found.m) == (PLAIN, 6144, 4096, 300)
    by_name = {v.name(): found.us[choices_of(v)] for v in provider("own").variants("sm_90a", PLAIN)[:3]}
    assert by_name == pytest.approx({names[2]: 9.0, names[0]: 10.0, names[1]: 30.0})
    assert times.load(tmp_path / "tuned.aot", "sm_80") == []


def test_times_are_of_variants_of_any_alike_form() -> None:
    every: list[tuple[Signature, Any]] = times.load(TIMES, "sm_90a")
    assert len(every) == 538
    bias, block = dataclasses.replace(PLAIN, epilogue="bias"), dataclasses.replace(ROWS, scaling="block")
    assert sum(universal.alike(s, bias) for s, _ in every) == 164
    assert sum(universal.alike(s, block) for s, _ in every) == 0
    legal = {choices_of(v) for p in PROVIDERS for v in provider(p).variants("sm_90a", bias)}
    assert legal & set(every[0][1].us)
