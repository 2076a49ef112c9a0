"""No small archive makes a reader spend more than a second of CPU time, or 512 MB, on any one thing."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from runtime.container.archive import Archive
from runtime.program.record import Record

from . import bombs
from .bombs import BOMBS

PROCESSES = multiprocessing.get_context("forkserver")  # which imports all that they need once
PROCESSES.set_forkserver_preload([bombs.__name__])


# Large to make, each beside one of its kind that is not.
LONG = {
    *("table_of_many_gpus", "form_checked_on_many_gpus", "forms_of_too_many_functions"),
    *("program_of_many_parameters", "table_of_many_entries", "table_of_many_ranges_for_torch"),
}


@pytest.mark.parametrize("readings", ["first", pytest.param("second", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.long) if x in LONG else x for x in BOMBS])
def test_small_archive_costs_little(name: str, readings: str) -> None:
    """Each is read in a process of its own, whose memory and CPU time nothing else takes."""
    hearing, saying = PROCESSES.Pipe(duplex=False)
    reader = PROCESSES.Process(target=bombs.tell, args=(saying, name, readings))
    reader.start()
    saying.close()
    try:
        assert hearing.poll(600), "it takes forever"
        assert hearing.recv() == []
        reader.join(600)
        assert reader.exitcode == 0
    finally:
        reader.kill()
        reader.join()


@pytest.mark.parametrize("name", [name for name in BOMBS if name.startswith(("cubin_", "cubins_of"))])
def test_bomb_of_a_cubin_is_read_as_far_as_its_cubin(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.aot"
    path.write_bytes(BOMBS[name]()[0])
    with Archive.open(path) as archive:
        for function in archive.functions:
            Record.from_json(archive.record(function))
            assert archive.cubin(function).startswith(b"\x7fELF\x02\x01")
