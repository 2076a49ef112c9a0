"""What it takes to look at an archive of 10,000 functions: the commands of `aot` as processes, on one core, no GPU.

    python scripts/bench_inspect.py model.aot --gemm qkv

The functions are those of the archive given, under other names until there are enough, each with a cubin of its own;
its tables stay. `verify` checks all of them. `decompress` is zstd and SHA-256 of every block, in this process, without
what `verify` reads of it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard
from report import ROOT, ends, out_argument, write

from aot.pack.write import Package
from runtime.container.archive import Archive


def main() -> int:
    """Make the archive, look at it, and say how long that took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--gemm", required=True, help="a layer of it, to explain")
    parser.add_argument("--functions", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    out_argument(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "many.aot"
        raw_bytes = repeated(options.archive, path, options.functions)
        commands = {"ls": ["ls"], "info": ["info"], "explain": ["explain", options.gemm, "--m", "700"]}
        results = [measured(name, process(words, path), options.rounds) for name, words in commands.items()]
        results.append(measured("verify", process(["verify"], path), min(options.rounds, 3)))
        results.append(measured("decompress", lambda: decompress(path), options.rounds))
        stored_bytes = path.stat().st_size
    results[-1]["mb_per_s"] = round(raw_bytes / 1e6 / results[-1]["least_s"])
    print(f"{options.functions} functions, {stored_bytes:,} bytes, {raw_bytes:,} of them decompressed")
    for row in results:
        rate = f", {row['mb_per_s']} MB/s" if "mb_per_s" in row else ""
        print(f"{row['what']:10}  {row['least_s']:7.3f} s least  {row['median_s']:7.3f} s median{rate}")
    sizes = {"functions": options.functions, "stored_bytes": stored_bytes, "raw_bytes": raw_bytes}
    environment = {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "gpu": None}
    write(options.out, environment, **sizes, results=results)
    return 0


def repeated(source: Path, path: Path, count: int) -> int:
    """Write an archive of `count` functions like those of `source`, with its tables; the bytes that it holds."""
    package = Package()
    with Archive.open(source) as archive:
        package.add_archive(archive, list(archive.functions))
        names = list(archive.functions)
        originals = {name: (archive.record(name), archive.cubin(name)) for name in names}
        for number in range(count - len(names)):
            record, cubin = originals[names[number % len(names)]]
            own = cubin + number.to_bytes(4, "little")
            target = record["target"]
            name = f"{record['name'].removesuffix(target)}like{number}.{target}"
            package.add_function(record | {"name": name, "cubin": hashlib.sha256(own).hexdigest()}, own)
        for name in archive.tables:
            package.set_table(name, archive.table(name))
    package.write(path)
    with Archive.open(path) as made:
        return sum(block.raw_length for block in made.blocks)


def process(words: list[str], path: Path) -> Callable[[], Any]:
    """A command of `aot` that looks at an archive, as a process of its own."""
    command: list[str | Path] = [sys.executable, "-m", "aot", words[0], path, *words[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # where it is set, as in many containers, all is compiled each time

    def run() -> None:
        subprocess.run(command, cwd=path.parent, env=environment, stdout=subprocess.DEVNULL, check=True)

    return run


def decompress(path: Path) -> None:
    """Hold every block of an archive against its digest, decompress it, and hash what it holds."""
    data = path.read_bytes()
    with Archive.open(path) as archive:
        for block in archive.blocks:
            stored = data[block.offset : block.offset + block.length]
            assert hashlib.sha256(stored).hexdigest() == block.sha256
            hashlib.sha256(zstandard.decompress(stored, max_output_size=block.raw_length)).digest()


def measured(what: str, work: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Do something several times; its least and its median time in seconds."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return {"what": what, "rounds": rounds, "least_s": min(seconds), "median_s": statistics.median(seconds)}


if __name__ == "__main__":
    sys.exit(ends(main))
