"""Fuzz the readers in Python with atheris: whatever the bytes, a value or an AotError, or ValueError where one says so.

    python -m tests.fuzz.readers --executions 1000000 [--seed 1] [--keep FOLDER] [-o RESULT.json] [--save]

The first byte of an input says which reader gets the rest (`READERS`). Where that is JSON, half of the mutations change
one value in it and write it canonically again, so that what follows the checks of spelling is reached too. Needs
`pip install atheris`; native code is left out, which `native.py` fuzzes. Ends with exit status 1 where there is a
finding: an exception that nobody promised, more than a second, or more than 512 MB.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


def _instrumented() -> contextlib.AbstractContextManager[Any]:
    """Imports in it count what they reach, in the process that fuzzes."""
    if sys.argv[1:2] != ["--fuzz"]:
        return contextlib.nullcontext()
    import atheris

    found: contextlib.AbstractContextManager[Any] = atheris.instrument_imports(include=["runtime"])
    return found


with _instrumented():
    from runtime import native
    from runtime.container import canonical
    from runtime.container.archive import Archive
    from runtime.container.index import Index
    from runtime.device.gpus import Gpu
    from runtime.errors import AotError, ProgramError
    from runtime.gemm.operation import GEMM
    from runtime.gemm.signature import Signature
    from runtime.gemm.universal import Universal
    from runtime.program.record import Record
    from runtime.signing import keys, statement
    from runtime.tables.dispatch import Dispatch
    from tests.fuzz.corpus import load, save
    from tests.fuzz.libfuzzer import Run, run
    from tests.fuzz_archive import mutate_value

CORPUS = Path(__file__).parent / "corpus" / "readers.zip"
GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
_TARGETS = {f"golden.{name}.sm_90a": "sm_90a" for name in ("gemm_small", "gemm_large", "gemm_wrong", "gemm_wide")}
H200 = Gpu("NVIDIA H200", 132, 4_800)
_ENOUGH_MB = 1024  # of this process: the interpreter, the instrumented modules, and 512 MB


def _spelled(data: bytes) -> None:
    """Canonical JSON is written as it was read, by the reader of servers too, but for how it spells small floats."""
    with suppress(ValueError):
        found = canonical.loads(data)
        assert canonical.dumps(found) == data
        assert canonical.loads_for_serving(data) == found


def _index(data: bytes) -> None:
    with suppress(ValueError):
        index = Index(data, 64)
        for number in range(sum(len(block.blobs) for block in index.blocks)):
            index.blob(number)
        index.record_digests()


def _archive(data: bytes) -> None:
    """A whole file, every block of which is then read."""
    descriptor = os.memfd_create("archive")
    with io.FileIO(descriptor, "r+") as file:
        file.write(data)
        file.seek(0)
        with suppress(AotError):
            archive = Archive(file, "archive")
            archive.verify()


def _record(data: bytes) -> None:
    """A record, whose program is evaluated for extents of 16."""
    record = Record.from_json(canonical.loads(data))
    with suppress(ProgramError):
        record.plan([16 for _ in record.program.values])


def _gemm(data: bytes) -> None:
    Dispatch.from_json(canonical.loads(data), GEMM, _TARGETS)


def _universal(data: bytes) -> None:
    """Forms and their cost programs, which give a time for a problem."""
    universal = Universal.from_json(canonical.loads(data), _TARGETS)
    signature = Signature("bf16", "bf16", "bf16", "f32", "none", 1024, 512)
    entry = universal.entry(signature, (9, 0), H200)
    if entry is not None:
        entry.best(16)


def _statement(data: bytes) -> None:
    statement.read(data)


def _policy(data: bytes) -> None:
    keys._policy(json.loads(data, object_pairs_hook=keys._once))


# By the first byte of an input; those from `_DOCUMENTS` on read JSON, and raise ValueError where it is none.
READERS: tuple[Callable[[bytes], None], ...] = (
    _spelled,
    _index,
    _archive,
    _record,
    _gemm,
    _universal,
    _statement,
    _policy,
)
_DOCUMENTS = 3


def read(data: bytes) -> None:
    """Give an input to its reader; what that may raise is not raised."""
    number = data[0] % len(READERS) if data else 0
    try:
        READERS[number](data[1:])
    except AotError:
        pass
    except (ValueError, RecursionError):
        if number < _DOCUMENTS:
            raise


def seeds() -> list[bytes]:
    """The golden documents and their archive, and a statement and a policy."""
    found = [bytes([2]) + (GOLDEN / "archive.aot").read_bytes()]
    for name, number in (("every", 3), ("gemm_small", 3), ("norm", 3), ("gemm", 4), ("universal", 5), ("build", 0)):
        found.append(bytes([number]) + (GOLDEN / f"{name}.json").read_bytes().strip())
    digests = {"sha256": "0" * 64, "aotIndex": "1" * 64, "aotContents": "2" * 64}
    predicate = {"name": "a", "version": 1, "signedOn": "2026-01-01T00:00:00Z", "provenance": {}}
    of = {"_type": statement.TYPE, "subject": [{"name": "a", "digest": digests}], "predicate": predicate}
    found.append(bytes([6]) + canonical.dumps(of | {"predicateType": statement.PREDICATE_TYPE}))
    found.append(bytes([7]) + canonical.dumps({"archives": {"a": 1}, "revoked": ["0" * 64]}))
    head = {"blocks": [{"blobs": 1, "kind": "tables", "length": 1}], "functions": {}, "tables": ["gemm"]}
    return [*found, bytes([1]) + canonical.dumps(head) + b"\n\n" + b"\1\0\0\0" + bytes(64)]


def _mutate(data: bytes, most: int, seed: int) -> bytes:
    """Change one value of a document, or bytes."""
    import atheris

    rng = random.Random(seed)
    if data and (data[0] % len(READERS) >= _DOCUMENTS or data[0] % len(READERS) == 0) and rng.random() < 0.5:
        with suppress(ValueError, RecursionError, TypeError):
            changed = data[:1] + canonical.dumps(mutate_value(rng, json.loads(data[1:])))
            if len(changed) <= most:
                return changed
    found: bytes = atheris.Mutate(data, most)
    return found


def _fuzz(arguments: list[str]) -> None:
    """Be the fuzzer: what libFuzzer is told in `arguments`."""
    import atheris

    native._native = native.costs = None
    atheris.Setup(arguments, read, custom_mutator=_mutate)
    atheris.Fuzz()


def main() -> None:
    """Run the fuzzer in a process of its own, and say what was found."""
    if sys.argv[1:2] == ["--fuzz"]:
        return _fuzz([sys.argv[0], *sys.argv[2:]])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for inputs that are findings")
    parser.add_argument("--save", action="store_true", help="keep what covers most in the corpus")
    parser.add_argument("-o", "--output", type=Path, help="a file for the result")
    options = parser.parse_args()
    fuzzer = [sys.executable, "-m", "tests.fuzz.readers", "--fuzz"]
    with tempfile.TemporaryDirectory() as name:
        corpus = Path(name)
        load(CORPUS, corpus)
        for number, seed in enumerate(seeds()):
            (corpus / f"seed{number}").write_bytes(seed)
        ran = run(fuzzer, corpus, Run(options.executions, options.seed, options.keep), _ENOUGH_MB)
        if options.save:
            save(corpus, CORPUS)
    ran.report("readers in Python (atheris)", options.output)
    sys.exit(bool(ran.findings))


if __name__ == "__main__":
    main()
