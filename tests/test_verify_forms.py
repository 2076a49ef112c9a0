"""What `aot verify` holds forms against: their records, and the times that their cost programs give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aot.pack import forms
from aot.verify import archive as verify
from aot.verify import form_checks, launch_checks
from aot.verify.evaluation import Budget
from runtime import native
from runtime.container.archive import Archive
from runtime.gemm.universal import Universal
from runtime.program.costs import CostProgram
from runtime.program.record import Record

from . import universal_archives
from .command_line import Run
from .universal_archives import (
    FORM,
    FORM_NAME,
    NAMES,
    PROGRAM,
    RECORDS,
    ROW,
    TABLE,
    Change,
    changed,
    checks,
    failed,
    of,
)

archive = universal_archives.archive  # a fixture


def test_verify_holds_forms_against_records_and_evaluates_their_costs(archive: Path) -> None:
    assert failed(archive) == []
    assert checks(archive, "universal table") == [verify.Finding("universal table", True, "1 forms, 1 cost programs")]
    assert checks(archive, "form ") == [verify.Finding(f"form {FORM_NAME} on sm_90a", True, "4 functions")]
    problems = len(form_checks.ROWS) * 3 * 3 * len(form_checks.GPUS)
    assert checks(archive, "costs of form") == [
        verify.Finding(f"costs of form {FORM_NAME} on sm_90a", True, f"{problems} problems")
    ]
    details = {finding.subject: finding.detail for finding in checks(archive, "launches of")}
    assert details["launches of many"] == "6 shapes"
    assert details["launches of few"] == "9 shapes", "those of its entry too"


def _bias(obj: dict[str, Any]) -> None:
    obj["forms"][0]["form"]["epilogue"] = "bias"


def _shared_is_invariant(obj: dict[str, Any]) -> None:
    obj["forms"][0]["equal_bits"][3] = 1


def _takes_no_n(obj: dict[str, Any]) -> None:
    obj["forms"][0]["functions"][2][1:] = [1024, 8, 1000]


def _program(**fields: Any) -> Change:
    return lambda obj: obj["programs"][0].update(fields)


WRONG: dict[str, tuple[Change, str, str]] = {
    "operands": (_bias, "form", "does not take the arguments of this gemm (a, b, d, bias) but (a, b, d); build the"),
    "invariant": (
        _shared_is_invariant,
        "form",
        "function shared is to give equal bits at every M, but takes the workspace",
    ),
    "no N": (_takes_no_n, "form", "function wide takes no N or no K: multiples of 1024 up to 1000"),
    "zero": (
        _program(constants=[100, 150, 10, 0, 1000]),
        "costs of form",
        "function wide is said to take 0.0 us at M = 1, N = 4096,",
    ),
    "negative": (
        _program(constants=[-100, 150, 10, 1, 1000]),
        "costs of form",
        "function few is said to take -99.0 us at M = 1,",
    ),
    "infinite": (
        _program(constants=[100, 150, 0, 1, 1000]),
        "costs of form",
        "function many is said to take inf us at M = 1,",
    ),
    "too few": (_program(results=[11]), "costs of form", "its cost program gives 1 times for 4 functions"),
    "damaged": (_program(operations="add div add pow"), "costs of form", "its cost program: unknown operation 'pow'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_verify_fails_once_and_names_the_form(tmp_path: Path, what: str) -> None:
    change, subject, message = WRONG[what]
    path = changed(tmp_path, change)
    (found,) = failed(path)
    name = FORM_NAME.replace("none", "bias") if what == "operands" else FORM_NAME
    assert found.subject == f"{subject} {name} on sm_90a"
    assert "form " not in found.detail, "the subject says it"
    assert message in found.detail


def test_verify_tells_a_damaged_block_once_however_many_forms_need_it(run: Run, archive: Path, tmp_path: Path) -> None:
    data = bytearray(archive.read_bytes())
    with Archive.open(archive) as opened:
        (block,) = (block for block in opened.blocks if block.kind == "records")
    data[block.offset] ^= 1
    (tmp_path / "damaged.aot").write_bytes(data)
    result = run("verify", tmp_path / "damaged.aot")
    assert result.status == 1
    told, needing, _ = result.out.splitlines()
    assert told.startswith("block ")
    assert needing.endswith(" checks that need it")


def test_verify_of_a_table_that_cannot_be_read_fails_once(run: Run, tmp_path: Path) -> None:
    path = changed(tmp_path, lambda obj: obj["forms"][0].update(target="sm_80"))
    (found,) = failed(path)
    assert found.subject == "universal table"
    assert "form 0: function 'few' is not in the archive for 'sm_80'" in found.detail


def test_verify_takes_no_time_of_a_problem_that_a_function_does_not_compute(tmp_path: Path) -> None:
    """ "wide" takes N up to 4096, and its time is infinite beyond."""
    beyond = PROGRAM | {
        "constants": [100, 150, 10, 1, 1000, 0, 4096],
        "operations": "add div add select div select",  # from place 13
        "operands": [0, 6, 0, 8, 14, 7, 0, 10, 10, 9, 9, 11, 1, 12, 9, 17],
        "results": [13, 15, 18, 16],
    }
    assert failed(changed(tmp_path, lambda obj: obj.update(programs=[beyond]))) == []


def test_verify_launches_the_least_and_large_extents_of_each_function(tmp_path: Path) -> None:
    """Multiples that a record does not allow are refused: its N and K must be multiples of 8."""
    path = changed(tmp_path, lambda obj: obj["forms"][0]["functions"][0].__setitem__(1, 4))
    (found,) = failed(path)
    assert found.subject == "launches of few"
    assert f"refuses every shape of bf16_bf16_bf16_f32_none_n4_k8, of the form {FORM_NAME} on sm_90a" in found.detail


def test_a_sample_that_an_entry_has_is_launched_for_the_entry_alone() -> None:
    record = RECORDS[0]
    of_form = {of(8): "a form"}
    found = launch_checks.check(record, Record.from_json(record), {of(8): [5]}, Budget(0), of_form)
    assert found.launched == 4
    assert launch_checks.check(record, Record.from_json(record), {}, Budget(0), of_form).launched == 3


def test_samples_are_of_even_n_where_there_is_a_gate() -> None:
    row = ROW | {"form": FORM | {"epilogue": "swiglu"}, "functions": [["few", 3, 1, 500]], "equal_bits": [1]}
    gated = TABLE | {"forms": [row]}
    ((key, form),) = Universal.from_json(gated, dict.fromkeys(NAMES, "sm_90a")).forms
    least, large = form_checks.Suiting(forms.FormRow(key[:-2], key[-2], form, 0)).samples(form.functions[0])
    assert (least.n, least.k) == (6, 1)
    assert (large.n, large.k) == (498, form_checks.LARGE_K)


@pytest.mark.skipif(native.costs is None, reason="runtime._native was not built")
def test_native_code_and_python_that_disagree_are_told_of(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = CostProgram.from_json

    def other(obj: Any, inputs: int, where: str, in_python: bool = False) -> CostProgram:
        return read(obj | {"constants": [101, 150, 10, 1, 1000]} if in_python else obj, inputs, where, in_python)

    monkeypatch.setattr(CostProgram, "from_json", other)
    (found,) = failed(archive)
    assert "native code and Python disagree on its times at (1, 8, 8, 1, 132, 4917); report this" in found.detail


def test_times_are_evaluated_within_the_budget(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four operations and five constants are 16 x 9 steps to read, and 3 x 9 for a problem that Python evaluates: each,
    or where native code does so one in five, of which the others take less than a step."""
    monkeypatch.setattr(verify, "Budget", lambda size: _Few(size, 16 * 9 + 2 * 27))
    (found,) = checks(archive, "costs of form")
    done = 2 if native.costs is None else 10
    assert found.detail == f"{done} problems, {len(form_checks.ROWS) * 18 - done} left out"
    (warned,) = checks(archive, "costs left out")
    assert f"the times of 1 forms, first {FORM_NAME} on sm_90a, were not evaluated for every problem" in warned.warning


class _Few(Budget):
    """A budget of so many steps."""

    def __init__(self, file_bytes: int, steps: int) -> None:
        super().__init__(file_bytes)
        self.take(self.most_steps - steps)


def test_a_program_is_read_once_for_all_of_its_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, asked = CostProgram.from_json, []

    def counted(*given: Any, **more: Any) -> CostProgram:
        asked.append(given)
        return read(*given, **more)

    def change(obj: dict[str, Any]) -> None:
        obj["forms"].append(ROW | {"form": FORM | {"overlap": "weights"}})

    monkeypatch.setattr(CostProgram, "from_json", counted)
    path = changed(tmp_path, change)
    assert failed(path) == []
    assert len(asked) == 2, "in native code and in Python"
    asked.clear()
    with Archive.open(path) as opened:
        table = forms.read(opened)
    assert table is not None
    assert len({id(form.costs) for _, form in table.forms}) == len(asked) == 1
