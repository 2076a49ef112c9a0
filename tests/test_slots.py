"""Addresses that launch programs make of a call's pointers: a served launch stays inside its operands."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime import AotError, Library, ProgramError
from runtime.container.archive import Archive

from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, entry, gemm_record, signature, write_archive

N, K = 512, 256


def serve(folder: Path, addend: int) -> tuple[Library, RecordingDriver]:
    """A library whose one GEMM gives its kernel the address of D plus `addend` bytes."""
    record = gemm_record("moved")
    program = record["program"]
    program["nodes"].append(["const", 64, addend % (1 << 64)])
    place = len(program["values"]) + len(program["nodes"]) - 1
    program["launches"][0]["parameters"][2]["slots"][0][3] = place
    kernels = write_archive(folder / "m.aot", [record], [entry(signature(N, K), [(None, "moved")])])
    driver = RecordingDriver(kernels=kernels)
    return Library(Archive.open(folder / "m.aot"), driver), driver


def call(library: Library, rows: int) -> None:
    library.functions["moved"](FakeTensor((rows, K)), FakeTensor((N, K)), FakeTensor((rows, N)), stream=1)


@pytest.mark.parametrize("addend", [0, 16, 100 * N * 2])
def test_address_in_an_operand_or_at_its_end_is_launched_with(tmp_path: Path, torch: FakeTorch, addend: int) -> None:
    library, driver = serve(tmp_path, addend)
    call(library, 100)
    assert len(driver.launches) == 1


@pytest.mark.parametrize("addend", [-16, 100 * N * 2 + 16, 1 << 40])
def test_launch_outside_of_its_operands_is_refused(tmp_path: Path, torch: FakeTorch, addend: int) -> None:
    library, driver = serve(tmp_path, addend)
    with pytest.raises(ProgramError, match=r"moved: a launch gives a kernel the address of 'd' plus -?\d+, where"):
        call(library, 100)
    assert not driver.launches


def test_fewer_rows_are_refused_where_the_address_is_in_more_alone(tmp_path: Path, torch: FakeTorch) -> None:
    library, driver = serve(tmp_path, 100 * N * 2)
    for rows in (200, 150):
        library.gemm(FakeTensor((rows, K)), FakeTensor((N, K)), out=FakeTensor((rows, N)))
    assert len(driver.launches) == 2
    with pytest.raises(AotError):
        library.gemm(FakeTensor((50, K)), FakeTensor((N, K)), out=FakeTensor((50, N)))
    assert len(driver.launches) == 2
