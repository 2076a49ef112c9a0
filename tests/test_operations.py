"""Operations besides GEMM: a table each, found by name, called and preloaded like GEMM's; others bring their own."""

from __future__ import annotations

import ast
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aot.search import operation as building
from aot.tune import operation as tuning
from runtime import ArgumentError, KernelMiss, Library, RecordError
from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.program import operation as operations
from runtime.program.operation import operation
from runtime.serve.function import Unfit
from runtime.tables.dispatch import Dispatch

from .command_line import ROOT, Run
from .distributions import OPERATIONS, install
from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, entry, write_archive
from .row_scale.archives import OF, record, row, tensors, write
from .row_scale.operation import ROW_SCALE

pytestmark = pytest.mark.usefixtures("row_scale")

OTHER = replace(OF, n=128)
KIND = Gpu("made up", 132, 4800)


@pytest.fixture
def driver(tmp_path: Path, torch: FakeTorch) -> RecordingDriver:
    return write(tmp_path / "scales.aot")


@pytest.fixture
def library(tmp_path: Path, driver: RecordingDriver) -> Library:
    return Library(Archive.open(tmp_path / "scales.aot"), driver)


def test_call_launches_what_the_table_has_for_the_rows_at_hand(library: Library, driver: RecordingDriver) -> None:
    for m, symbol in ((8, "kernel_narrow"), (9, "kernel_wide")):
        x, weight, y = tensors(m)
        assert library.call("row_scale", x, weight, out=y, factor=0.5) is y
        launch = driver.launches[-1]
        assert launch.symbol == symbol
        assert launch.grid[0] == m
        pointers = [struct.unpack_from("<Q", p)[0] for p in launch.parameters[:3]]
        assert pointers == [t.data_ptr() for t in (x, weight, y)]
        assert struct.unpack("<f", launch.parameters[3]) == (0.5,)
    assert library.stats().launches_by_function == {"narrow": 1, "wide": 1}


def test_call_flattens_rows_and_allocates_like_x(library: Library, driver: RecordingDriver) -> None:
    x, weight = FakeTensor((2, 3, 4096)), FakeTensor((4096,))
    found = library.call("row_scale", x, weight)
    assert found.shape == x.shape
    assert driver.launches[-1].grid[0] == 6


def test_call_of_no_rows_launches_nothing(library: Library, driver: RecordingDriver) -> None:
    x, weight, y = tensors(0)
    assert library.call("row_scale", x, weight, out=y) is y
    assert not driver.launches


def test_what_the_operation_refuses_the_caller_sees(library: Library, driver: RecordingDriver) -> None:
    x, _, y = tensors(4)
    with pytest.raises(ArgumentError, match=r"row_scale takes x \(..., N\), weight \(N\)"):
        library.call("row_scale", x, FakeTensor((8,)), out=y)
    assert not driver.launches


def test_miss_names_the_nearest_signature(library: Library) -> None:
    x, weight, y = tensors(4, 2048)
    with pytest.raises(
        KernelMiss, match=r"no kernel for bf16_bf16_bf16_row_scale_n2048 .*(\n.*)*N is 4096, wanted 2048"
    ):
        library.call("row_scale", x, weight, out=y)
    assert library.stats().refusals[0].signature == "bf16_bf16_bf16_row_scale_n2048"


def test_preload_loads_the_functions_of_every_operation(library: Library, driver: RecordingDriver) -> None:
    assert set(library.preload([1, 16])) == {"narrow", "wide"}
    assert library.preload(only=[OF.key()]) == ("narrow", "wide")
    with pytest.raises(KernelMiss, match="cannot preload bf16_bf16_bf16_row_scale_n8"):
        library.preload(only=["bf16_bf16_bf16_row_scale_n8"])


def test_preload_plans_calls_at_the_rows_it_is_given(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.preload([1, 16])
    made = library.stats().plans_made
    x, weight, y = tensors(16)
    library.call("row_scale", x, weight, out=y)
    assert library.stats().plans_made == made
    library.preload([16])
    assert library.stats().plans_made == made
    for change in ({"factor": 0.5}, {"m": 17}):
        x, weight, y = tensors(int(change.pop("m", 16)))
        library.call("row_scale", x, weight, out=y, **change)
        made += 1
        assert library.stats().plans_made == made, "which nobody prepared"


def test_preload_plans_what_serves_where_the_best_cannot(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = library.functions["wide"]
    monkeypatch.setattr(wide, "_evaluate", lambda values: (_ for _ in ()).throw(Unfit("too large")))
    assert library.preload([16]) == ("narrow", "wide")
    made = library.stats().plans_made
    x, weight, y = tensors(16)
    library.call("row_scale", x, weight, out=y)
    assert library.stats().plans_made == made
    assert library.stats().launches_by_function == {"narrow": 1}


def test_unknown_operation_is_refused_by_name(library: Library) -> None:
    with pytest.raises(ArgumentError, match=r"unknown operation 'softmax'; the operations are gemm, (\w+, )*row_scale"):
        library.call("softmax", *tensors(4))


def test_arguments_that_an_operation_does_not_take_are_told(library: Library) -> None:
    x, weight, y = tensors(4)
    with pytest.raises(ArgumentError, match="row_scale: missing a required argument: 'weight'"):
        library.call("row_scale", x)
    with pytest.raises(ArgumentError, match="row_scale: got an unexpected keyword argument 'epsilon'"):
        library.call("row_scale", x, weight, out=y, epsilon=1e-5)


def test_entry_is_found_by_its_key(library: Library) -> None:
    assert library.entry(OF.key()).best(8) == library.entry(OF).best(8) == "narrow"
    with pytest.raises(ArgumentError, match="signature must be one or its key"):
        library.entry("bf16_row_scale")


def test_gemm_is_called_by_its_own_method(library: Library) -> None:
    with pytest.raises(ArgumentError, match=r"gemm is not called by its name; Library\.gemm is the way"):
        library.call("gemm", *tensors(4))


def test_a_signature_that_the_operation_refuses_is_refused_where_the_table_is_read() -> None:
    of = row([(None, "f")])
    of["gpu"], of["signature"] = None, of["signature"] | {"n": 0}
    with pytest.raises(RecordError, match="signature field 'n'"):
        Dispatch.from_json({"schema": 1, "entries": [of]}, ROW_SCALE)


# --- which operations there are ---


def folder_or_module(place: str) -> str:
    """Of an operation's place, such as "runtime.gemm.operation:GEMM": its folder in a room, or its file."""
    *folder, module = place.partition(":")[0].split(".")
    alone = folder in (["runtime"], ["aot", "search"])
    return "/".join([*folder, f"{module}.py"] if alone else [*folder, ""])


# What may name an operation: operations, what makes kernels of them, the lists of operations, the bindings to torch and
# servers, whose operator `gemm` is, methods of libraries, GEMM's planned calls, and what experts ask of some.
NAMING = (
    *(folder_or_module(of_runtime) for of_runtime in operations._OWN.values()),
    *(folder_or_module(of_search) for of_search in building._OWN.values()),
    *(folder_or_module(of_tune) for of_tune in tuning._OWN.values()),
    *("aot/kernels/", "aot/providers/"),
    *("runtime/program/operation.py", "aot/search/operation.py", "aot/tune/operation.py"),
    *("runtime/torch/", "runtime/plugin/", "runtime/sglang/", "runtime/vllm/"),
    *("runtime/serve/gemm/", "runtime/serve/operation_calls.py", "aot/problem/models/experts.py"),
)


def names_an_operation(node: ast.AST) -> bool:
    """Whether it is the name of one as a value, or imports one."""
    if isinstance(node, ast.ImportFrom):
        return any(alias.name in {name.upper() for name in operations._OWN} for alias in node.names)
    return isinstance(node, ast.Constant) and node.value in operations._OWN


def test_no_other_module_names_an_operation() -> None:
    paths = [p.relative_to(ROOT) for room in ("aot", "runtime") for p in sorted((ROOT / room).rglob("*.py"))]
    others = [path for path in paths if not path.as_posix().startswith(NAMING)]
    found = {
        p: [getattr(n, "lineno", 0) for n in ast.walk(ast.parse((ROOT / p).read_text())) if names_an_operation(n)]
        for p in others
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_an_operation_is_found_by_its_entry_point() -> None:
    assert operation("row_scale") is ROW_SCALE


def test_an_operation_whose_package_is_broken_says_so(site: Path) -> None:
    (site / "broken_operation.py").write_text("import nothing_of_this_name")
    install(site, "broken", {OPERATIONS: "broken = broken_operation:BROKEN"})
    with pytest.raises(ArgumentError, match=r"operation broken: .*cannot be imported .*nothing_of_this_name"):
        operation("broken")


def test_what_is_no_operation_is_refused_by_name(site: Path) -> None:
    install(site, "wrong", {OPERATIONS: "wrong = json:dumps"})
    with pytest.raises(ArgumentError, match=r"json:dumps, in the group cute_aot\.operations, lacks name, read"):
        operation("wrong")


def test_one_name_for_two_packages_operations_is_refused(site: Path) -> None:
    install(site, "other", {OPERATIONS: "row_scale = other:ROW_SCALE"})
    with pytest.raises(
        ArgumentError, match=r"tests\.row_scale\.operation:ROW_SCALE.* are in the group .*; uninstall all but one"
    ):
        operation("row_scale")


def test_a_table_of_an_operation_that_is_not_here_is_left_alone(tmp_path: Path, torch: FakeTorch) -> None:
    driver = write(tmp_path / "later.aot", "of_a_later_version")
    library = Library(Archive.open(tmp_path / "later.aot"), driver)
    assert "narrow" in library.functions
    with pytest.raises(ArgumentError, match="unknown operation 'of_a_later_version'"):
        library.call("of_a_later_version", *tensors(4))


# --- files whose tables have others than GEMM's ---


def test_an_entry_of_any_operation_that_was_never_tuned_gives_way_to_tuned_ones(run: Run, tmp_path: Path) -> None:
    ranked = row([(None, "narrow")], state="ranked")
    rows = [entry(OF.to_json(), [(None, "wide")], gpu=KIND), ranked, row([(None, "narrow")], OTHER, "ranked")]
    write_archive(tmp_path / "kinds.aot", [record("narrow"), record("wide")], rows, "row_scale")
    found = json.loads(run("ls", tmp_path / "kinds.aot", "--json").out)["entries"]
    tuned: dict[str, Any] = {"state": "tuned", "form": None, "checked_on": []}
    assert [(e["operation"], e["instead"]) for e in found] == [
        ("row_scale", None),
        ("row_scale", tuned),
        ("row_scale", None),
    ]
    assert "  ranked  tuned entries\n" in run("ls", tmp_path / "kinds.aot").out


def test_launches_of_every_operation_are_evaluated_at_what_its_entries_serve(run: Run, tmp_path: Path) -> None:
    """The extents of a signature, not any: of N = 4100 the record allows none."""
    rows = [row([(None, "narrow")], replace(OF, n=4100))]
    write_archive(tmp_path / "odd.aot", [record("narrow")], rows, "row_scale")
    said = run("verify", tmp_path / "odd.aot").out
    assert (
        "it refuses every shape of bf16_bf16_bf16_row_scale_n4100, first 1 rows: x.extent[1] must be a multiple" in said
    )


def test_each_function_with_numbers_is_held_against_the_signature(tmp_path: Path, torch: FakeTorch, run: Run) -> None:
    """Though one before it was right: they have no tensors alone to be known by."""
    wide = record("wide")
    wide["arguments"] = [a | {"dtype": "f16"} if a["kind"] == "tensor" else a for a in wide["arguments"]]
    rows = [row([(8, "narrow"), (None, "wide")])]
    path = tmp_path / "mixed.aot"
    driver = RecordingDriver(kernels=write_archive(path, [record("narrow"), wide], rows, "row_scale"))
    assert "function wide takes x as f16, not bf16" in run("verify", path).out
    library = Library(Archive.open(path), driver)
    library.call("row_scale", *tensors(8)[:2], out=tensors(8)[2])
    with pytest.raises(
        RecordError, match="has wide for bf16_bf16_bf16_row_scale_n4096, but it takes x as f16, not bf16"
    ):
        library.call("row_scale", *tensors(9)[:2], out=tensors(9)[2])
