"""Answers as they come, in a file beside the output, so that a tuning that is killed goes on where it was.

JSON lines: first what the answers are of, then one for each job. A file of anything else is begun anew.
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
        self._kept = 0
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
            try:
                row = json.loads(line)
                answer = Answer.from_json(row["answer"])
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n"):
                break
            self._answers[row["job"]] = answer
            whole += len(line)
        return whole

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def only_goes_on(self) -> bool:
        """Whether there are answers of before, and none was added."""
        return bool(self._answers) and not self._kept

    def answer(self, job: Job) -> Answer | None:
        """The answer to a job, if it was done."""
        return self._answers.get(self._key(job))

    def keep(self, job: Job, answer: Answer) -> None:
        """Write an answer down."""
        self._kept += 1
        if self._file is not None:
            with contextlib.suppress(OSError):  # a disk that is full costs the journal, not the tuning
                self._file.write(json.dumps({"job": self._key(job), "answer": answer.to_json()}) + "\n")
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
