"""The fuzzer of native readers: it runs, and finds what is planted. Needs clang with its sanitizers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .fuzz import corpus, native
from .fuzz.libfuzzer import Ran, Run, run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed"),
]
CHECK = " || number >= reader->values) return 0;"  # of program_read.c: a value that is there


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def fuzzed(folder: Path, executions: int) -> Ran:
    """Build what `native.SOURCES` has, and run it on the kept corpus and the seeds."""
    try:
        fuzzer = native.build(folder)
    except SystemExit as error:
        if "clang_rt" in str(error):
            pytest.skip("clang has no sanitizers here")
        raise
    inputs = folder / "corpus"
    inputs.mkdir()
    corpus.load(native.CORPUS, inputs)
    for number, seed in enumerate(native.seeds()):
        (inputs / f"seed{number}").write_bytes(seed)
    return run([str(fuzzer)], inputs, Run(executions, 1))


def test_native_readers_withstand_the_kept_corpus_and_more(folder: Path) -> None:
    ran = fuzzed(folder, 5000)
    assert (ran.executions, ran.findings) == (5000, ())


def test_a_check_that_is_left_out_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = folder / "native"
    shutil.copytree(native.SOURCES[0].parent, sources)
    reader = sources / "program_read.c"
    text = reader.read_text()
    assert text.count(CHECK) == 1
    reader.write_text(text.replace(CHECK, ") return 0;"))
    monkeypatch.setattr(native, "SOURCES", sorted(sources.glob("*.c")))
    (finding,) = fuzzed(folder, 50_000).findings
    assert finding.startswith("crash-")


def test_seeds_reach_evaluation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where evaluation ends the process, a seed does so at once: programs of records are read from bytes."""
    sources = folder / "native"
    shutil.copytree(native.SOURCES[0].parent, sources)
    program = sources / "program.c"
    text = program.read_text()
    assert text.count("    result = PyList_New(0);\n") == 1
    program.write_text(text.replace("    result = PyList_New(0);\n", "    abort();\n"))
    monkeypatch.setattr(native, "SOURCES", sorted(sources.glob("*.c")))
    ran = fuzzed(folder, 1000)
    assert ran.findings
    assert ran.executions < 500


def test_without_clang_the_command_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="clang was not found; install it"):
        native.build(folder)
