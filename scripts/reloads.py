"""Archives that are rewritten and loaded again while an engine serves random traffic, for minutes.

Each file has two versions in turn, which differ in tables that no call reads. So a reload replaces every function that
calls use, graphs that were captured go on with those of before, and answers stay what they were.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import report  # noqa: F401, puts the checkout on the path
import traffic

import runtime
from aot.pack.write import Package
from runtime.container.archive import Archive
from runtime.serve.library import alive

REQUESTS = 64  # between two reloads, in turn


class Files:
    """Copies of archives, and another version of each to replace it by."""

    def __init__(self, archives: Sequence[str], folder: Path) -> None:
        self.paths, self._others = [], []
        for i, given in enumerate(archives):
            path, other = folder / f"{i}.aot", folder / f"{i}_other.aot"
            shutil.copy(runtime.universal() if given == "universal" else given, path)
            with Archive.open(path) as archive:
                package = Package()
                package.add_archive(archive)
                for name in archive.tables:
                    package.set_table(name, archive.table(name))
                package.set_table("version", {"schema": 1, "number": 2})
                package.write(other)
            self.paths.append(str(path))
            self._others.append(other)

    def exchange(self) -> None:
        """Put the other version in the place of each file, whole, and keep the one that was there."""
        for path, other in zip(map(Path, self.paths), self._others, strict=True):
            kept = path.with_suffix(".kept")
            shutil.copy(path, kept)
            other.replace(path)
            kept.replace(other)


@contextlib.contextmanager
def copied(archives: Sequence[str]) -> Iterator[Files]:
    """Copies of these archives, paths or "universal", for as long as an engine serves from them."""
    with tempfile.TemporaryDirectory() as folder:
        yield Files(archives, Path(folder))


def reloaded(_model: Any) -> list[bool]:
    """In a worker, load its archives again; for each library whether that changed anything."""
    return [library.reload() for library in list(alive.values()) if not library.closed]


def under_traffic(
    engine: Any,
    files: Files,
    sampling: Callable[[int], Any],
    minutes: float,
    clock: Callable[[], float] = time.perf_counter,
    **clocks: Any,
) -> dict[str, Any]:
    """Random requests to an engine, an LLM of vLLM's, for so many minutes, with a reload in each worker between any
    `REQUESTS` of them: how many of each, and how long the slowest reload took.

    Raises:
        RuntimeError: a worker found nothing new in the files, or a request got fewer tokens than it asked for.
    """
    began, requests, tokens, slowest_s, rounds = clock(), 0, 0, 0.0, 0
    while clock() - began < 60 * minutes:
        asked = traffic.drawn(f"reloads {rounds}", REQUESTS, traffic.PER_S)
        came = traffic.served(engine.llm_engine, asked, sampling, clock=clock, **clocks)
        short = [i for i, request in enumerate(asked) if len(came.get(str(i), ())) != request.answer_tokens]
        if short:
            raise RuntimeError(f"after {rounds} reloads {len(short)} of {REQUESTS} requests got too few tokens")
        files.exchange()
        start = clock()
        if not all(changed and all(changed) for changed in engine.apply_model(reloaded)):
            raise RuntimeError(f"after {rounds} reloads a worker found nothing new in {', '.join(files.paths)}")
        slowest_s = max(slowest_s, clock() - start)
        rounds += 1
        requests += len(asked)
        tokens += sum(len(request.prompt) + request.answer_tokens for request in asked)
    return {
        "minutes": round((clock() - began) / 60, 2),
        "reloads": rounds,
        "requests": requests,
        "tokens": tokens,
        "slowest_reload_s": round(slowest_s, 3),
    }
