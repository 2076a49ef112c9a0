"""Answers as they come, in a file beside the output, so that a tuning that is killed goes on where it was.

JSON lines: first what the answers are of, then one for each job, and one whenever the output was written. A file of
anything else is begun anew.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, TextIO

from runtime.container import canonical

from .jobs import Answer, Job

_FORMAT = 4


class Journal:
    """Answers by job, for one archive, GPU and way to measure, which `of` says in JSON's terms."""

    def __init__(self, path: Path, of: dict[str, Any]) -> None:
        self.path = path
        self._head = json.dumps({"format": _FORMAT, **of}, sort_keys=True)
        self._answers: dict[str, Answer] = {}
        self._file: TextIO | None = None
        self.written: frozenset[str] = frozenset()  # what was known when the output was last written
        whole = self._read()
        with contextlib.suppress(OSError):  # a folder that cannot be written to is for the archive's writer to refuse
            if whole is None:
                path.write_text(self._head + "\n")
            elif whole < path.stat().st_size:  # a line that was cut short
                with path.open("r+b") as file:
                    file.truncate(whole)
            self._file = path.open("a")

    def _read(self) -> int | None:
        """Take up what is there; the bytes of its whole lines, or None where it is not of this tuning."""
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except OSError:
            return None
        if not lines or lines[0].rstrip(b"\n").decode(errors="replace") != self._head:
            return None
        whole = len(lines[0])
        for line in lines[1:]:
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                if "written" in row:
                    ours = row["of"] == canonical.digest(self._head)
                    self.written = frozenset(row["written"]) if ours else self.written
                else:
                    self._answers[row["job"]] = Answer.from_json(row["answer"])
            except (ValueError, KeyError, TypeError):
                break
            whole += len(line)
        return whole

    def __len__(self) -> int:
        return len(self._answers)

    def answer(self, job: Job) -> Answer | None:
        """The answer to a job, if it was done."""
        return self._answers.get(self._key(job))

    def keep(self, job: Job, answer: Answer) -> None:
        """Write an answer down."""
        self._append({"job": self._key(job), "answer": answer.to_json()})

    def wrote(self, known: frozenset[str]) -> None:
        """Write down that the output has what is `known`: what is complete, in words."""
        if known != self.written:
            self.written = known
            self._append({"written": sorted(known), "of": canonical.digest(self._head)})

    def _append(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a disk that is full costs the journal, not the tuning
                self._file.write(json.dumps(row) + "\n")
                self._file.flush()

    def _key(self, job: Job) -> str:
        """What a job's answer is kept under: another tuning with the same output may write to the file meanwhile."""
        return canonical.digest([self._head, job.key()])

    def close(self, remove: bool) -> None:
        """End it; `remove` where everything is in the output."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        if remove:
            with contextlib.suppress(OSError):
                self.path.unlink()
