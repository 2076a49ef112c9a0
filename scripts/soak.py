"""Launch for a long time from many threads, on several streams, while the archive is reloaded; needs a GPU.

Each thread has tensors and a stream of its own (some share one) and launches GEMMs of changing shapes. Now and then it
waits and compares its output, bit by bit, with what the same kernel gave in the beginning. In the end: launches, wrong
results, and how much memory of the host and of the device has grown since the first tenth.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from report import ends, out_argument, write

import runtime
from aot.tune import measure
from runtime.container.archive import Archive
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.tables.dispatch import Dispatch

TOKENS = (1, 3, 16, 33, 64)
_COMPARE_EVERY = 500


class Worker(threading.Thread):
    """One thread: its GEMMs, its share of the launches, and what it found."""

    def __init__(self, library: Any, shapes: list[tuple[int, int]], number: int, stream: Any, launches: int) -> None:
        super().__init__(name=f"worker {number}", daemon=True)
        self.library, self.stream, self.launches = library, stream, launches
        self.done = self.wrong = 0
        self.failure: BaseException | None = None
        generator = torch.Generator("cuda").manual_seed(number)
        self.calls = []
        for n, k in shapes:
            b = torch.randn(n, k, device="cuda", generator=generator).bfloat16()
            for m in TOKENS:
                a = torch.randn(m, k, device="cuda", generator=generator).bfloat16()
                out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
                expected = (a.float() @ b.float().t()).bfloat16()
                self.calls.append((a, b, out, expected))

    def run(self) -> None:
        try:
            with torch.cuda.stream(self.stream):
                self._run()
        except BaseException as failure:
            self.failure = failure

    def _run(self) -> None:
        gemm, calls = self.library.gemm, self.calls
        bits: dict[int, Any] = {}
        while self.done < self.launches:
            for _ in range(_COMPARE_EVERY):
                place = self.done % len(calls)
                a, b, out, _ = calls[place]
                gemm(a, b, out=out)
                self.done += 1
            self.stream.synchronize()
            for place, (_, _, out, expected) in enumerate(calls):
                if place not in bits:  # what it is to be close to, and from then on to equal
                    error = (out.float() - expected.float()).norm() / expected.float().norm()
                    self.wrong += bool(error > DTYPES["bf16"].tolerance)
                    bits[place] = out.clone()
                self.wrong += not torch.equal(out, bits[place])
                out.fill_(float("nan"))


def resident_mb() -> float:
    """Of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="a tuned archive for this GPU")
    parser.add_argument("--launches", type=int, default=10_000_000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--reload-every", type=float, default=2.0, help="seconds")
    out_argument(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Two archives of the same kernels, whose bytes differ: reloading changes what is served, not its results.
        served = Path(folder, "served.aot")
        versions = [options.archive, _rewritten(options.archive, Path(folder, "other.aot"))]
        shutil.copy(versions[0], served)
        library = runtime.load(served)
        with Archive.open(options.archive) as archive:
            entries = Dispatch.from_json(archive.table(GEMM.name), GEMM).entries
        there = {entry.signature for entry in entries}
        of_bf16 = ("bf16", "bf16", "bf16", "f32", "none")
        shapes = sorted({(s.n, s.k) for s in there if Signature(*of_bf16, s.n, s.k) in there})[:4]
        streams = [torch.cuda.Stream() for _ in range(options.streams)]
        share = options.launches // options.threads
        workers = [Worker(library, shapes, i, streams[i % len(streams)], share) for i in range(options.threads)]
        torch.cuda.synchronize()
        began = time.monotonic()
        for worker in workers:
            worker.start()
        reloads, first, resident = 0, None, [round(resident_mb())]
        while any(worker.is_alive() for worker in workers):
            time.sleep(options.reload_every)
            shutil.copy(versions[(reloads + 1) % 2], served.with_suffix(".new"))
            served.with_suffix(".new").replace(served)
            reloads += bool(library.reload())
            library.drop_old()
            done = sum(worker.done for worker in workers)
            if first is None and done > options.launches // 10:
                first = resident_mb(), torch.cuda.mem_get_info()[0]
            resident.append(round(resident_mb()))
            waiting = library.stats().replaced
            print(f"{done:12,} launches, {reloads} reloads, {resident[-1]} MB resident, {waiting} waiting", flush=True)
        seconds = time.monotonic() - began
        first = first or (resident_mb(), torch.cuda.mem_get_info()[0])
        results = {
            "launches": sum(worker.done for worker in workers),
            "wrong": sum(worker.wrong for worker in workers),
            "failures": [repr(worker.failure) for worker in workers if worker.failure],
            "reloads": reloads,
            "seconds": round(seconds, 1),
            "resident_mb": resident[:: max(1, len(resident) // 10)],
            "host_growth_mb": round(resident_mb() - first[0], 1),
            "device_growth_mb": round((first[1] - torch.cuda.mem_get_info()[0]) / 2**20, 1),
        }
    print(results)
    write(options.out, measure.environment(), results=results)
    return 1 if results["wrong"] or results["failures"] else 0


def _rewritten(source: Path, destination: Path) -> Path:
    """The same archive with one more table, and so with another digest."""
    from aot.pack.write import Package

    with Archive.open(source) as archive:
        package = Package()
        package.add_archive(archive)
        for name in archive.tables:
            package.set_table(name, archive.table(name))
        package.set_table("soak", {"other": True})
        package.write(destination)
    return destination


if __name__ == "__main__":
    sys.exit(ends(main))
