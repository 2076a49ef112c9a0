"""Looking at an archive of 10,000 functions takes half a second of a process on an idle core of a server.

The limit here is twice that, in processor time: tests share a machine that is none, and may run without bytecode.
"""

import os
import resource
import subprocess
from pathlib import Path

import pytest

from aot.pack.write import Package

from .command_line import COMMAND, ROOT
from .inspected import FEW, MANY, OTHER, WIDE, WRONG, tables
from .pace import assert_takes_less_than
from .recording_driver import cubin, gemm_record

FUNCTIONS = 10_000
MOST_S = 1.0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package, path = Package(), tmp_path_factory.mktemp("large") / "large.aot"
    others = [f"mine.other{number}.sm_90a" for number in range(FUNCTIONS - 5)]
    for name in (FEW, MANY, WIDE, WRONG, OTHER, *others):
        package.add_function(gemm_record(name), cubin(name))
    for name, obj in tables().items():
        package.set_table(name, obj)
    package.write(path, level=1)
    return path


@pytest.mark.parametrize("words", ["ls", "info", "explain LARGE qkv --m 700", "ls LARGE --functions", "history"])
def test_a_command_takes_little_of_the_processor(large: Path, words: str) -> None:
    command, *more = words.replace("LARGE ", "").split()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    asked = [*COMMAND, command, str(large), *(str(word) for word in more)]
    assert_takes_less_than(
        MOST_S,
        lambda: subprocess.run(asked, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True),
        spent=_spent_s,
    )


def _spent_s() -> float:
    """Seconds of processors that ended children took."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime
