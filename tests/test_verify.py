"""What `aot verify` says of launches that cannot work, though records and digests are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot.compile import cubin
from aot.pack.write import Package
from aot.search.provider import provider
from aot.verify import evaluation, launch_checks, shapes
from aot.verify.archive import Finding, causes, verify
from aot.verify.evaluation import Budget
from runtime import native
from runtime.container.archive import Archive
from runtime.errors import RecordError
from runtime.gemm.signature import Signature
from runtime.program.evaluator import PythonEvaluator
from runtime.program.program import NativeEvaluator
from runtime.program.record import Record

from .command_line import Run
from .made_up_kernel import kernel
from .mutants import real_records
from .recording_driver import H200, entry, gemm_record, signature, table, write_archive
from .recording_driver import cubin as made_up_cubin

Change = Callable[[dict[str, Any]], None]
FIRST_NODE = 5  # of `gemm_record`
USES = {Signature.from_json(signature(512, 256)): [64]}


def node(record: dict[str, Any], *fields: Any) -> int:
    """The number of the value of a new node."""
    program = record["program"]
    program["nodes"].append(list(fields))
    return len(program["values"]) + len(program["nodes"]) - 1


def launches(record: dict[str, Any], uses: Any = USES, budget: Budget | None = None) -> launch_checks.Launches:
    return launch_checks.check(record, Record.from_json(record), uses, budget or Budget(0))


def check(record: dict[str, Any], uses: Any = USES) -> int:
    """How many shapes could be launched; none may be left out."""
    found = launches(record, uses)
    assert found.left_out == 0
    return found.launched


def clusters(*extents: int) -> Change:
    def change(record: dict[str, Any]) -> None:
        launch = record["program"]["launches"][0]
        launch["attributes"] = [[4, [node(record, "const", 32, extent) for extent in extents]]]

    return change


def grid(*extents: int) -> Change:
    def change(record: dict[str, Any]) -> None:
        launch = record["program"]["launches"][0]
        launch["grid"] = [node(record, "const", 32, extent) for extent in extents]

    return change


def preferred(*extents: int) -> Change:
    def change(record: dict[str, Any]) -> None:
        words = [node(record, "const", 32, extent) for extent in extents]
        record["program"]["launches"][0]["attributes"].append([11, words])

    return change


def addend(value: int, tma: bool = False, pointer: int = 1) -> Change:
    """Shift the address of B, or of another tensor."""

    def change(record: dict[str, Any]) -> None:
        for parameter in record["program"]["launches"][0]["parameters"]:
            for slot in parameter["slots"]:
                if slot[2] == pointer:
                    slot[1] = "tma" if tma else slot[1]
                    slot[3] = node(record, "const", 64, value % (1 << 64))

    return change


def changed(*changes: Change) -> dict[str, Any]:
    record = gemm_record("f")
    for change in changes:
        change(record)
    return record


@pytest.mark.parametrize("record", real_records(), ids=lambda record: record["name"])
def test_real_records_are_launched_for_every_shape_without_a_warning(record: dict[str, Any]) -> None:
    gemm = record.pop("gemm", None)
    uses = {} if gemm is None else {Signature.from_json(gemm): [64, 300]}
    assert check(record, uses) == (3 if gemm is None else 5)
    assert launch_checks.suspicious_constants(record) == []


@pytest.mark.parametrize(
    ("extents", "said"),
    [
        ((0, 2, 1), "has clusters of 0 x 2 x 1 CTAs; a cluster has 1 to 16"),
        ((1, 2, 0), "has clusters of 1 x 2 x 0 CTAs"),
        ((1, 17, 1), "has clusters of 1 x 17 x 1 CTAs"),
        ((4, 2, 4), "has clusters of 4 x 2 x 4 CTAs"),
        ((1 << 31, 1 << 31, 4), "a cluster has 1 to 16"),
    ],
)
def test_clusters_that_no_gpu_has_are_refused(extents: tuple[int, ...], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        check(changed(clusters(*extents)))


@pytest.mark.parametrize("extents", [(1, 1, 1), (8, 1, 1), (2, 2, 2), (16, 1, 1), (4, 4, 1)])
def test_clusters_of_up_to_16_are_taken_where_they_divide_the_grid(extents: tuple[int, ...]) -> None:
    assert check(changed(clusters(*extents), grid(16, 4, 2))) == 4


def test_grid_that_clusters_do_not_divide_is_refused() -> None:
    with pytest.raises(RecordError, match=r"has a grid of \(3, 4, 1\), which clusters of 2 x 1 x 1 CTAs do not divide"):
        check(changed(clusters(2, 1, 1), grid(3, 4, 1)))


@pytest.mark.parametrize(
    ("extents", "said"),
    [
        ((2, 4, 4), "preferred clusters of 2 x 4 x 4 CTAs; a cluster has"),
        ((1, 3, 1), "which preferred clusters of 1 x 3 x 1 CTAs do not divide"),
        ((2, 1, 1), "preferred clusters of 2 x 1 x 1 CTAs, which those of"),
    ],
)
def test_preferred_clusters_are_multiples_that_divide_the_grid(extents: tuple[int, ...], said: str) -> None:
    record = changed(clusters(1, 2, 1), grid(4, 8, 4), preferred(*extents))
    with pytest.raises(RecordError, match=said):
        check(record)
    assert check(changed(clusters(1, 2, 1), grid(4, 8, 4), preferred(2, 4, 1))) == 4


def without_slots(*pointers: int) -> dict[str, Any]:
    """A record of which no launch is given these tensors."""
    record = gemm_record("f")
    for parameter in record["program"]["launches"][0]["parameters"]:
        parameter["slots"] = [slot for slot in parameter["slots"] if slot[2] not in pointers]
    return record


@pytest.mark.parametrize(("pointer", "name"), [(0, "a"), (1, "b"), (2, "d")])
def test_operand_of_a_gemm_that_no_kernel_is_given_is_refused(pointer: int, name: str) -> None:
    with pytest.raises(RecordError, match=f"no launch is given the tensor or workspace '{name}', so it cannot compute"):
        check(without_slots(pointer))


def test_tensor_that_no_kernel_is_given_is_warned_of_where_no_gemm_names_the_function() -> None:
    found = launches(without_slots(1), {})
    assert found.launched == 3
    assert found.warnings == ("no launch is given the tensor or workspace 'b'; is that meant?",)


def test_function_of_which_no_tensor_reaches_a_kernel_is_refused() -> None:
    with pytest.raises(RecordError, match=r"no launch is given the tensors or workspaces \['a', 'b', 'd'\]"):
        launches(without_slots(0, 1, 2), {})


def test_workspace_that_no_kernel_is_given_is_refused() -> None:
    record = gemm_record("f", workspaces=((64, None, False),))
    record["program"]["launches"][0]["parameters"][-1]["slots"] = []
    with pytest.raises(RecordError, match="no launch is given the tensor or workspace 'space0'"):
        check(record)


def test_symbol_that_no_tensor_has_is_refused() -> None:
    record = gemm_record("f")
    record["symbols"]["q"] = {"width": 32, "divisibility": 1}
    with pytest.raises(RecordError, match="the symbol 'q' is no extent or stride of a tensor"):
        check(record)


@pytest.mark.parametrize("value", [-1, -16, 1 << 40, (1 << 63) - 1, -(1 << 63), 512 * 256 * 2 + 1])
@pytest.mark.parametrize("tma", [False, True])
def test_address_outside_its_tensor_is_refused(value: int, tma: bool) -> None:
    with pytest.raises(RecordError, match=r"gives a kernel the address of 'b' plus -?\d+, where that has 262144 bytes"):
        check(changed(addend(value, tma)))


def test_address_of_a_tensor_without_elements_is_taken() -> None:
    record = gemm_record("f")
    record["arguments"][1]["shape"] = [0, "k"]
    assert check(record, {}) == 3


@pytest.mark.parametrize("value", [0, 512 * 256 * 2 - 16, 512 * 256 * 2])
def test_address_within_its_tensor_or_at_its_end_is_taken(value: int) -> None:
    assert check(changed(addend(value))) == 4


def test_address_outside_its_workspace_is_refused() -> None:
    record = gemm_record("f", workspaces=((64, "max_active_clusters", False),))
    addend(64 * 66, pointer=3)(record)
    assert check(record) == 4
    addend(64 * 66 + 8, pointer=3)(record)
    with pytest.raises(RecordError, match="address of 'space0' plus 4232, where that has 4224 bytes"):
        check(record)


def test_shift_of_tma_stores_of_variable_length_is_taken() -> None:
    """By -2^30 strides modulo 2^57, of rows in bytes, and of TMA descriptors alone."""
    shift = (-(1 << 30) * 256 * 2) % (1 << 57)
    assert check(changed(addend(shift, tma=True))) == 4
    with pytest.raises(RecordError, match="gives a kernel the address of 'b'"):
        check(changed(addend(shift)))


def test_program_that_refuses_every_shape_of_a_gemm_is_refused() -> None:
    huge = Signature.from_json(signature(512, 256))
    record = changed()
    record["program"]["launches"][0]["grid"][0] = node(record, "udiv", 32, 0, node(record, "const", 32, 0))
    with pytest.raises(
        RecordError, match=r"it refuses every shape of bf16_.*_n512_k256, first 1 rows: division by zero"
    ):
        check(record, {huge: []})


def test_program_that_serves_some_shapes_is_taken() -> None:
    assert check(gemm_record("f", max_m=999)) == 3  # and not 8192 rows


def test_functions_of_no_gemm_are_evaluated_for_legal_extents() -> None:
    record = next(record for record in real_records() if "gemm" not in record)
    assert check(record, {}) == 3
    record["program"]["launches"][0]["block"][0] = node(record, "const", 32, 2000)
    with pytest.raises(RecordError, match=r"it refuses every shape of any extents, first .* launch block"):
        check(record, {})


@pytest.mark.skipif(native._native is None, reason="runtime._native was not built")
def test_evaluators_that_disagree_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = PythonEvaluator.evaluate

    def other(self: PythonEvaluator, values: tuple[int, ...], last: Any) -> Any:
        found = evaluate(self, values, last)
        return found._replace(launches=(found.launches[0]._replace(shared_bytes=1),))

    monkeypatch.setattr(PythonEvaluator, "evaluate", other)
    with pytest.raises(RecordError, match="native code and Python disagree on its launches for 1 rows"):
        check(gemm_record("f"))


def test_constants_that_look_like_addresses_are_warned_of() -> None:
    record = gemm_record("f")
    parameters = record["program"]["launches"][0]["parameters"]
    parameters[2]["words"].append([0, 8, node(record, "const", 64, 0x7F12_3400_0000)])
    parameters[2]["slots"] = []
    assert launch_checks.suspicious_constants(record) == ["parameter 2 holds 0x7f1234000000 at byte 0"]


def test_constants_of_tma_descriptors_and_small_ones_are_not_warned_of() -> None:
    record = gemm_record("f")
    parameters = record["program"]["launches"][0]["parameters"]
    parameters[0]["words"].append([8, 8, node(record, "const", 64, 0x7F12_3400_0000)])
    parameters[2]["words"][-1][2] = node(record, "const", 64, 1 << 31)
    assert launch_checks.suspicious_constants(record) == []


def test_addresses_that_are_put_together_of_constants_are_warned_of() -> None:
    record = gemm_record("f")
    high = node(record, "shl", 64, node(record, "const", 64, 0x7F12), node(record, "const", 64, 32))
    record["program"]["launches"][0]["parameters"][2]["words"][-1][2] = high
    assert launch_checks.suspicious_constants(record) == ["parameter 2 holds 0x7f1200000000 at byte 16"]


def test_packed_tensors_are_what_their_records_take() -> None:
    for obj in real_records():
        obj.pop("gemm", None)
        record = Record.from_json(obj)
        given = shapes.arguments(record, shapes.near(record, 1000))
        record.bind(given, {a.name: 1 for a in record.device_arguments})


def test_launches_are_evaluated_where_ranges_begin_to_end_and_end(tmp_path: Path) -> None:
    """The first and the last bound of a function's ranges, besides `ROWS`."""
    ranges: list[tuple[int | None, str]] = [(16, "f"), (64, "h"), (2000, "f"), (None, "h")]
    write_archive(tmp_path / "a.aot", [gemm_record(name) for name in "fgh"], [entry(signature(), ranges)])
    with Archive.open(tmp_path / "a.aot") as opened:
        found = {finding.subject: finding for finding in verify(opened)}
    assert found["launches of f"] == Finding("launches of f", True, "5 shapes")
    assert found["launches of g"] == Finding("launches of g", True, "3 shapes")


def test_function_of_many_gemms_is_evaluated_for_all(tmp_path: Path) -> None:
    entries = [entry(signature(8 * (i + 1)), [(None, "f")]) for i in range(100)]
    write_archive(tmp_path / "a.aot", [gemm_record("f")], entries)
    with Archive.open(tmp_path / "a.aot") as opened:
        found = {finding.subject: finding for finding in verify(opened)}
    assert found["launches of f"].detail == "300 shapes"
    assert "launches left out" not in found


def test_function_for_equal_bits_may_share_no_tiles(tmp_path: Path) -> None:
    records = [gemm_record("alone"), gemm_record("shared", workspaces=((4096, None, True),))]
    for name, ok in (("alone", True), ("shared", False)):
        row = entry(signature(), [(16, "shared"), (None, "alone")], gpu=H200, invariant=[(None, name)])
        write_archive(tmp_path / f"{name}.aot", records, [row])
        with Archive.open(tmp_path / f"{name}.aot") as opened:
            (found,) = [f for f in verify(opened) if f.subject.startswith("gemm bf16")]
        assert found.subject.endswith(" on sm_90a, NVIDIA H200 (132 SMs, 4800 GB/s)")
        assert found.ok is ok, found.detail
        assert ok or "takes the workspace space0, so CTAs share tiles" in found.detail


def names_of(**options: Any) -> list[str]:
    """Variants for `signature()`, so that it is known how they add up along K."""
    found = provider("own").variants("sm_90a", Signature.from_json(signature()))
    return [v.name() for v in found if options.items() <= v.options.items()]


UNCUT, HALVES = (names_of(split_k=split, swap=False, stream_k=False)[:2] for split in (1, 2))
STREAMED = names_of(stream_k=True)[0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (UNCUT, None),
        (HALVES, None),
        ([*UNCUT, "unknown"], None),
        (
            [STREAMED],
            f"function {STREAMED} is to give equal bits at every M, but how it adds up along K may depend on M",
        ),
        ([UNCUT[0], HALVES[0]], "they add up along K in different ways"),
        ([*UNCUT, HALVES[0]], "they add up along K in different ways"),
    ],
)
@pytest.mark.parametrize("in_a_form", [False, True])
def test_functions_for_equal_bits_add_up_along_k_in_one_way(
    tmp_path: Path, names: list[str], message: str | None, in_a_form: bool
) -> None:
    every = [*dict.fromkeys([*names, "other"])]
    bounds = [*range(16, 16 * len(names), 16), None]
    row = entry(signature(), [(None, "other")], invariant=None if in_a_form else list(zip(bounds, names, strict=True)))
    package = Package()
    for name in every:
        package.add_function(gemm_record(name), made_up_cubin(name))
    package.set_table("gemm", table([row]))
    words = {name: word for name, word in signature().items() if name not in ("n", "k", "batch")}
    form = {
        "form": words | {"batched": False},
        "target": "sm_90a",
        "functions": [[name, 8, 8, 1 << 20] for name in every],
        "equal_bits": [int(name in names) for name in every],
        "program": 0,
    }
    costs = {"constants": [7], "operations": "", "operands": [], "results": [6] * len(every)}
    package.set_table("universal", {"schema": 2, "forms": [form] * in_a_form, "programs": [costs] * in_a_form})
    package.write(tmp_path / "bits.aot")
    with Archive.open(tmp_path / "bits.aot") as opened:
        found = {f.subject: f for f in verify(opened)}
    prefix = "form bf16" if in_a_form else "gemm bf16"
    (subject,) = [s for s in found if s.startswith(prefix)]
    assert found[subject].ok is (message is None), found[subject].detail
    assert message is None or message in found[subject].detail


# --- the budget ---


def heavy(name: str) -> dict[str, Any]:
    """A record whose program has as many steps as may be, in few bytes."""
    record = gemm_record(name)
    zero, one, true = node(record, "const", 32, 0), node(record, "const", 32, 1), node(record, "const", 1, 1)
    adds = [["add", 32, true + 1, one]] * 60
    node(record, "loop", 32, 256, 0, [zero], [], true, adds, [true + 2])
    return record


def test_small_file_is_evaluated_within_a_budget_and_what_is_left_out_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"f{i:02}" for i in range(20)]
    served: list[tuple[int | None, str]] = [*((i + 1, name) for i, name in enumerate(names)), (None, names[0])]
    write_archive(
        tmp_path / "a.aot", [heavy(name) for name in names], [entry(signature(64 * i), served) for i in range(1, 65)]
    )
    steps = {"native": 0, "python": 0}
    for evaluator, which in ((NativeEvaluator, "native"), (PythonEvaluator, "python")):

        def evaluate(self: Any, *arguments: Any, which: str = which, before: Any = evaluator.evaluate) -> Any:
            steps[which] += self.steps
            return before(self, *arguments)

        monkeypatch.setattr(evaluator, "evaluate", evaluate)
    with Archive.open(tmp_path / "a.aot") as opened:
        found = {finding.subject: finding for finding in verify(opened)}
        most = Budget(opened.file_bytes).most_steps
    assert 0 < steps["python"] + steps["native"] // evaluation.NATIVE_NODES < most
    left_out = found["launches left out"]
    assert left_out.ok
    assert f"verify takes {most} steps for a file of" in left_out.warning
    of_each = [found[f"launches of {name}"].detail for name in names]
    shapes_found = sum(int(word) for detail in of_each for word in detail.split() if word.isdigit())
    assert shapes_found == sum(64 * len({1, 77, 8192, i + 1}) for i in range(20))


@pytest.mark.skipif(native._native is None, reason="runtime._native was not built")
def test_python_evaluates_few_shapes_where_native_code_evaluates_all(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[Any] = []
    evaluate = PythonEvaluator.evaluate

    def counted(*given: Any) -> Any:
        evaluated.append(given)
        return evaluate(*given)

    monkeypatch.setattr(PythonEvaluator, "evaluate", counted)
    assert check(gemm_record("f"), {Signature.from_json(signature(8 * i, 256)): [64] for i in range(1, 11)}) == 40
    assert len(evaluated) == evaluation.PYTHON_SHAPES


def test_program_that_there_is_no_budget_to_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even its constants are looked for, which takes as long."""
    record, budget = gemm_record("f"), Budget(0)
    monkeypatch.setattr(launch_checks, "suspicious_constants", lambda obj: pytest.fail("read the program"))
    evaluator = evaluation.Evaluator(record, Record.from_json(record))
    budget.take(budget.most_steps - evaluator.steps_to_read + 1)
    assert launches(record, budget=budget) == (0, 4, ())


def test_gemm_is_not_called_refused_where_the_budget_ends_among_its_shapes() -> None:
    record = gemm_record("f")
    record["program"]["launches"][0]["grid"][0] = node(record, "udiv", 32, 0, node(record, "const", 32, 0))
    budget = Budget(0)
    evaluator = evaluation.Evaluator(record, Record.from_json(record))
    budget.take(budget.most_steps - evaluator.steps_to_read - evaluator.steps)
    assert launches(record, budget=budget) == (0, 3, ())


def test_record_that_cannot_be_read_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry(signature(8 * (i + 1)), [(None, "f")]) for i in range(50)]
    write_archive(tmp_path / "a.aot", [gemm_record("f") | {"symbols": 1}], entries)
    asked: list[str] = []
    read = Archive.record

    def record(self: Archive, name: str) -> dict[str, Any]:
        asked.append(name)
        return read(self, name)

    monkeypatch.setattr(Archive, "record", record)
    with Archive.open(tmp_path / "a.aot") as opened:
        failed = causes(verify(opened))
    assert asked == ["f"]
    assert len([1 for finding, _ in failed if "'symbols' must be a dictionary" in finding.detail]) == 1


# --- the command ---


def _repacked(archive: Path, destination: Path, change: Change) -> Path:
    """A copy of an archive with its first record changed, and its tables."""
    with Archive.open(archive) as opened:
        package = Package()
        for number, name in enumerate(opened.functions):
            record = opened.record(name)
            if number == 0:
                change(record)
            package.add_function(record, opened.cubin(name))
        for table in opened.tables:
            package.set_table(table, opened.table(table))
    package.write(destination)
    return destination


def test_verify_fails_where_launches_cannot_work(run: Run, archive: Path, tmp_path: Path) -> None:
    bad = _repacked(archive, tmp_path / "bad.aot", clusters(32, 1, 1))
    result = run("verify", bad)
    assert (result.status, result.err) == (1, "")
    with Archive.open(bad) as opened:
        name = next(iter(opened.functions))
    assert f"launches of {name}: launch 0 for " in result.out, "the function is named once"
    assert "clusters of 32 x 1 x 1" in result.out


def test_verify_warns_and_succeeds_where_a_constant_looks_like_an_address(
    run: Run, archive: Path, tmp_path: Path
) -> None:
    def change(record: dict[str, Any]) -> None:
        record["program"]["launches"].append(json.loads(json.dumps(record["program"]["launches"][0])))
        parameter = record["program"]["launches"][1]["parameters"][0]
        parameter |= {"slots": [], "words": [[0, 8, node(record, "const", 64, 0x7F12_3400_0000)]]}

    odd = _repacked(archive, tmp_path / "odd.aot", change)
    result = run("verify", odd)
    assert (result.status, result.err) == (0, "")
    assert "warning: launches of " in result.out
    assert "0x7f1234000000" in result.out
    found = json.loads(run("verify", odd, "--json").out)
    assert [bool(check["warning"]) for check in found["checks"]].count(True) == 1


def test_a_malformed_gemm_table_hides_no_launch(archive: Path, tmp_path: Path) -> None:
    with Archive.open(_repacked(archive, tmp_path / "copy.aot", lambda record: None)) as opened:
        package = Package()
        package.add_archive(opened)
    package.set_table("gemm", {"schema": 1, "entries": 1})
    package.write(tmp_path / "odd.aot")
    with Archive.open(tmp_path / "odd.aot") as opened:
        found = verify(opened)
    assert [finding.subject for finding in found if not finding.ok] == ["gemm table"]
    assert sum(finding.subject.startswith("launches of ") for finding in found) == len(opened.functions)
    assert isinstance(found[0], Finding)


def test_a_cubin_that_functions_share_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, binary = kernel("one.sm_90a", "sm_90a", "own.fake", b"")
    package = Package()
    for name in ("one.sm_90a", "two.sm_90a"):
        package.add_function(record | {"name": name}, binary)
    package.write(tmp_path / "shared.aot")
    parsed: list[bytes] = []

    def parse(data: bytes, real: Any = cubin.kernels) -> Any:
        parsed.append(data)
        return real(data)

    monkeypatch.setattr(cubin, "kernels", parse)
    with Archive.open(tmp_path / "shared.aot") as opened:
        verify(opened)
    assert parsed == [binary]
