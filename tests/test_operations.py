"""Operations besides GEMM: a table each, found by name, called and preloaded like GEMM's; others bring their own."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from runtime import ArgumentError, KernelMiss, Library, RecordError
from runtime.container.archive import Archive
from runtime.program.operation import operation
from runtime.serve.function import Unfit
from runtime.tables.dispatch import Dispatch

from .distributions import OPERATIONS, install
from .recording_driver import FakeTensor, FakeTorch, RecordingDriver
from .row_scale.archives import OF, row, tensors, write
from .row_scale.operation import ROW_SCALE

pytestmark = pytest.mark.usefixtures("row_scale")


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


def test_an_operation_is_found_by_its_entry_point() -> None:
    assert operation("row_scale") is ROW_SCALE


def test_an_operation_whose_package_is_broken_says_so(site: Path) -> None:
    (site / "broken_operation.py").write_text("import nothing_of_this_name")
    install(site, "broken", {OPERATIONS: "broken = broken_operation:BROKEN"})
    with pytest.raises(ArgumentError, match=r"operation broken: .*cannot be imported .*nothing_of_this_name"):
        operation("broken")


def test_what_is_no_operation_is_refused_by_name(site: Path) -> None:
    install(site, "wrong", {OPERATIONS: "wrong = json:dumps"})
    with pytest.raises(ArgumentError, match=r"json:dumps is no operation: it lacks name, read"):
        operation("wrong")


def test_one_name_for_two_packages_operations_is_refused(site: Path) -> None:
    install(site, "other", {OPERATIONS: "row_scale = other:ROW_SCALE"})
    with pytest.raises(
        ArgumentError, match=r"tests\.row_scale\.operation:ROW_SCALE.* have this name; uninstall all but one"
    ):
        operation("row_scale")


def test_a_table_of_an_operation_that_is_not_here_is_left_alone(tmp_path: Path, torch: FakeTorch) -> None:
    driver = write(tmp_path / "later.aot", "of_a_later_version")
    library = Library(Archive.open(tmp_path / "later.aot"), driver)
    assert "narrow" in library.functions
    with pytest.raises(ArgumentError, match="unknown operation 'of_a_later_version'"):
        library.call("of_a_later_version", *tensors(4))
