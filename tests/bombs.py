"""Small archives that ask for much: each a way to make a reader spend time or memory that its size does not show.

    python tests/bombs.py NAME [first | second]

reads one as a server and as the command line do, with native code and without, and prints what took more than a second
of CPU time or 512 MB, or what escaped; exit status 1 if there is any. Half of these readings may be asked for: the
first does every operation, some with native code and some without, the second the others. `tests/test_bombs.py` runs
them all.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import bombs_of_documents, bombs_of_tables, fuzz_library
from tests.fuzz_library import Finding, Fuzzer, Session, Totals

BOMBS = bombs_of_documents.BOMBS | bombs_of_tables.BOMBS
FILE_BYTES = 100_000  # what each is below
RUNAWAY_SECONDS = 4.0
_ATTEMPTS = 3  # of which one in time is enough, as a neighbour on the same core slows others

# Plans of `Session.run`, and whether there is native code. Each of the first half has a twin in the second.
_ONE_HALF = [(plan, plan in (0, 2, 3)) for plan in range(fuzz_library.PLANS)]
_OTHER_HALF = [(plan, not compiled) for plan, compiled in _ONE_HALF]
READINGS = {"first": _ONE_HALF, "second": _OTHER_HALF, "all": [*_ONE_HALF, *_OTHER_HALF]}


def read(name: str, readings: str = "all") -> list[Finding]:
    """Read a bomb in the ways of `READINGS`; what should not have been, slow readings where none of 3 is quicker."""
    data, content = BOMBS[name]()
    assert len(data) < FILE_BYTES, f"{name} has {len(data)} bytes"
    fuzz_library.RUNAWAY_SECONDS = RUNAWAY_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(0, Path(folder), None)
        path = Path(folder) / f"{name}.aot"
        path.write_bytes(data)
        del data
        found: list[Finding] = []
        for plan, compiled in READINGS[readings]:
            for _ in range(_ATTEMPTS):
                fuzzer.totals = Totals()
                fuzz_library.limit_memory()
                session = Session(path, fuzzer.base, content, plan, patience=1.0)
                session.run(compiled)
                fuzzer.judge(plan, b"", compiled, session)
                judged = [finding for finding, _ in fuzzer.totals.findings.values()]
                slow = [finding for finding in judged if finding.kind == "slow"]
                found += [finding for finding in judged if finding not in slow]
                if not slow:
                    break
            found += slow
            if any(finding.operation == "open" for finding in judged):
                break
        return found


def tell(hearer: Connection, name: str, readings: str) -> None:
    """Send `hearer` what `read` finds, in words, or what it raises."""
    try:
        hearer.send([str(finding) for finding in read(name, readings)])
    except BaseException:
        hearer.send([traceback.format_exc()])
        raise


def main() -> None:
    """Read the bomb that is named."""
    found = read(*sys.argv[1:])
    for finding in found:
        print(f"{finding.kind}: {finding.operation}: {finding.what}: {finding.detail}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
