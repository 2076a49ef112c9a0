"""Fuzz the native readers with libFuzzer, under the sanitizers of addresses and of undefined behaviour.

    python -m tests.fuzz.native --executions 10000000 [--jobs 1] [--seed 1] [--keep FOLDER] [-o RESULT.json]

Needs clang with its runtime libraries (Debian: clang, libclang-rt-14-dev). Builds `native_readers.c` with all of
`runtime/native`, begins with the programs of real records and with `corpus/native.zip`, and ends with exit status 1
where an input crashed, took more than a second or more than 512 MB. `--save` puts what covers most into the zip.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from runtime.program.arithmetic import BINARY, CAST, COMPARE, FLAGS, UNARY_FLAGGED

from .corpus import load, save
from .libfuzzer import Run, run

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "runtime" / "native").glob("*.c"))
CORPUS = Path(__file__).parent / "corpus" / "native.zip"
WORDS = [*sorted({*BINARY, *COMPARE, *CAST, *UNARY_FLAGGED, *FLAGS}), "const", "select", "loop", "tma", "raw"]
_FIELDS = {
    0xEA: ("kernel", "grid", "block", "shared_bytes", "attributes", "parameters"),
    0xEB: ("size", "words", "slots"),
}


def encode(obj: Any) -> bytes:
    """An object as native_readers.c reads it."""
    if obj is None or isinstance(obj, bool):
        return bytes([0xE4 if obj is None else 0xE5 if obj else 0xFF])
    if isinstance(obj, int):
        for tag, size in ((None, 0), (0xE1, 2), (0xE2, 4), (0xE3, 8)):
            if tag is None and obj < 0x80:
                return bytes([obj])
            if tag is not None and obj < 1 << 8 * size:
                return bytes([tag]) + obj.to_bytes(size, "little")
        raise ValueError(f"{obj} has more than 64 bits")
    if isinstance(obj, float):
        return b"\xe6" + struct.pack("<d", obj)
    if isinstance(obj, str):
        return bytes([0x80 + WORDS.index(obj)])
    if isinstance(obj, bytes):
        return b"\xee" + struct.pack("<H", len(obj)) + obj
    if isinstance(obj, list):
        count = bytes([0xC0 + len(obj)]) if len(obj) < 0x20 else b"\xe0" + struct.pack("<H", len(obj))
        return count + b"".join(map(encode, obj))
    tag, names = next((tag, names) for tag, names in _FIELDS.items() if set(names) == obj.keys())
    return bytes([tag]) + b"".join(encode(obj[name]) for name in names)


def seeds() -> list[bytes]:
    """The launch programs of real records, each evaluated once, and a cost program with every operation."""
    found = []
    for record in json.loads((ROOT / "tests" / "data" / "records.json").read_text()):
        program = record["program"]
        sizes = bytes([1, len(program["pointers"]), len(record["kernels"])])
        parts = [[width for _, width in program["values"]], program["nodes"], program["launches"]]
        found.append(sizes + b"".join(map(encode, [*parts, *(4096 for _ in program["values"])])))
    operands = [i % 3 for i in range(6 * 2 + 5 + 4)]
    costs = [2, [1.5], bytes(range(12)), operands, [3, 14]]
    return [*found, b"\0" + b"".join(map(encode, [*costs, 64, 4096]))]


def build(folder: Path) -> Path:
    """Compile the harness into `folder`; what runs it.

    Raises:
        SystemExit: there is no clang, or it fails.
    """
    clang = shutil.which("clang")
    if clang is None:
        raise SystemExit("clang was not found; install it, with its sanitizers (Debian: clang, libclang-rt-14-dev)")
    words = ", ".join(f'"{word}"' for word in WORDS)
    (folder / "words.h").write_text(f"static const char *const WORDS[] = {{{words}}};\n")
    libraries, version = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LDVERSION")
    flags = ["-O1", "-g", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    paths = [f"-I{folder}", f"-I{sysconfig.get_path('include')}", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    sources = [Path(__file__).with_name("native_readers.c"), *SOURCES]
    command = [clang, *flags, *paths, "-o", folder / "native_readers", *sources, f"-lpython{version}", "-lm"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{clang} failed: {done.stderr.strip()[-2000:]}")
    return folder / "native_readers"


def main() -> None:
    """Build, run, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for inputs that are findings")
    parser.add_argument("--save", action="store_true", help="keep what covers most in the corpus")
    parser.add_argument("-o", "--output", type=Path, help="a file for the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fuzzer, corpus = build(folder), folder / "corpus"
        corpus.mkdir()
        load(CORPUS, corpus)
        for number, seed in enumerate(seeds()):
            (corpus / f"seed{number}").write_bytes(seed)
        ran = run([str(fuzzer)], corpus, Run(options.executions, options.seed, options.keep))
        if options.save:
            least = folder / "least"  # the fewest inputs that reach what all do
            least.mkdir()
            subprocess.run([fuzzer, "-merge=1", least, corpus], check=True, capture_output=True)
            save(least, CORPUS)
    ran.report("native readers (libFuzzer, clang, address and undefined sanitizers)", options.output)
    sys.exit(bool(ran.findings))


if __name__ == "__main__":
    main()
