"""What many processes that open one archive take together: memory of their own, and bytes that left the disk; no GPU.

Each imports the runtime, opens the archive, reads every record and decompresses every cubin once, as a server that
loads all of them would, and then waits until all others have.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from report import ends, out_argument, version, write

_CHILD = """
import sys
import runtime
from runtime.container.archive import Archive

def private():
    found = [line.split() for line in open("/proc/self/smaps_rollup")]
    return sum(int(words[1]) for words in found if words[0] in ("Private_Clean:", "Private_Dirty:"))

def from_disk():
    return dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())["read_bytes"]

before, disk = private(), from_disk()
archive = Archive.open(sys.argv[1])
opened = private()
for name in archive.functions:
    archive.record(name), archive.cubin(name)
archive.forget_blocks()
print(opened - before, private() - before, int(from_disk()) - int(disk), flush=True)
sys.stdin.read()
"""


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--processes", type=int, default=1000)
    out_argument(parser)
    options = parser.parse_args()
    children = []
    found: list[list[int]] = []
    command = [sys.executable, "-c", _CHILD, str(options.archive)]
    for _ in range(options.processes):
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            parser.error(f"process {len(children)} ended: the message is above")
        found.append([int(x) for x in line.split()])
    for child in children:
        child.communicate()
    opened, served, disk = zip(*found, strict=True)
    results = {
        "processes": options.processes,
        "archive_mb": round(options.archive.stat().st_size / 1e6, 3),
        "own_mb_opened_median": round(statistics.median(opened) / 1e3, 3),
        "own_mb_opened_max": round(max(opened) / 1e3, 3),
        "own_mb_after_reading_all_median": round(statistics.median(served) / 1e3, 3),
        "own_mb_after_reading_all_max": round(max(served) / 1e3, 3),
        "mb_from_disk_by_all": round(sum(disk) / 1e6, 3),
    }
    for name, value in results.items():
        print(f"{name:32s} {value}")
    environment = {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "zstandard": version("zstandard"),
    }
    write(options.out, environment, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(ends(main))
