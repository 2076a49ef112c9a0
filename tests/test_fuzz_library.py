"""A few hundred mutants of real archives, and proof that the fuzzer sees what it looks for."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from runtime import native

ROOT = Path(__file__).resolve().parents[1]


def fuzzer(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own, whose memory it limits."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def test_no_mutant_is_answered_by_anything_but_an_aot_error() -> None:
    done = fuzzer("tests/fuzz_library.py", "--mutants", "300", "--seed", "7")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


PLANTED = {
    "escape: stats": "raise KeyError('planted')",
    "slow: stats": "import time\nfrom tests.pace import slowness\nLibrary.stats = Library.real_stats\n"  # once
    "end = time.process_time() + 2.5 * slowness()\nwhile time.process_time() < end: pass",
    "memory: stats": "bytearray(600 << 20)",
    "differ: stats": "from runtime import native\nreturn SimpleNamespace(launches_by_function=native._native is None)",
    "crash: process": "import os\nos._exit(3)",
}


@pytest.mark.parametrize("finding", PLANTED)
def test_fuzzer_finds_what_is_planted(finding: str) -> None:
    if finding.startswith("differ") and native._native is None:
        pytest.skip("runtime._native was not built")
    program = "from types import SimpleNamespace\nfrom runtime import Library\nfrom tests import fuzz_library\n"
    program += f"def planted(self):\n{textwrap.indent(PLANTED[finding], '    ')}\n    return self.real_stats()\n"
    program += "Library.real_stats, Library.stats = Library.stats, planted\n"
    program += "totals = fuzz_library.fuzz(8, 0, 1)\nfor found in totals.findings: print(': '.join(found[:2]))\n"
    done = fuzzer("-c", program)
    assert finding in done.stdout.splitlines(), done.stdout + done.stderr


def test_fuzzer_finds_a_gemm_that_was_served_by_a_function_of_another() -> None:
    program = "from tests import fuzz_library\n"
    program += "fuzz_library.record_mismatch = lambda signature, record: 'planted'\n"
    program += "totals = fuzz_library.fuzz(100, 0, 1)\nfor found in totals.findings: print(': '.join(found[:2]))\n"
    done = fuzzer("-c", program)
    assert done.stdout.splitlines() == ["escape: what served it"], done.stdout + done.stderr


@pytest.mark.skipif(native.costs is None, reason="runtime._native was not built")
def test_fuzzer_finds_cost_programs_whose_times_differ_without_native_code() -> None:
    program = "from runtime.program import costs\nfrom tests import fuzz_library\n"
    program += "evaluate = costs._PythonCosts.evaluate\n"
    program += "costs._PythonCosts.evaluate = lambda self, values: [2 * x for x in evaluate(self, values)]\n"
    program += "totals = fuzz_library.fuzz(40, 0, 1)\nfor found in totals.findings: print(': '.join(found[:2]))\n"
    done = fuzzer("-c", program)
    assert "differ: show" in done.stdout.splitlines(), done.stdout + done.stderr


def test_fuzzer_finds_a_launch_with_an_address_outside_of_its_operands() -> None:
    program = "import tempfile\nfrom pathlib import Path\nfrom runtime.serve import function\n"
    program += "from tests import fuzz_library\nfunction.require_inside = lambda *_: None\n"
    program += "fuzzer = fuzz_library.Fuzzer(0, Path(tempfile.mkdtemp()), None)\nfuzzer.try_one(355)\n"
    program += "for found in fuzzer.totals.findings: print(': '.join(found[:2]))\n"
    done = fuzzer("-c", program)
    assert done.stdout.splitlines() == ["outside: call"], done.stdout + done.stderr
