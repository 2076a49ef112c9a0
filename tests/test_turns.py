"""Processes that measure in turn: `scripts/turns.py`, with real ones."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from .command_line import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import turns

PROGRAM = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "scripts")!r})
import turns
name, log, count, before = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
def say(what):
    with open(log, "a") as file:
        file.write(what + " ")
time.sleep(before)
say("ready")
mine = turns.Turns(sys.argv[sys.argv.index(turns.FLAG) + 1])
for i in range(count):
    with mine.turn():
        say(f"{{name}}{{i}}")
        time.sleep(0.05)
        say(f"-{{name}}{{i}}")
sys.exit(3 if count == 1 else 0)
"""


def commands(log: Path, **takers: tuple[int, float]) -> dict[str, list[str]]:
    """Of each by its name: how many turns it takes, and what it sleeps first."""
    return {
        name: [sys.executable, "-c", PROGRAM, name, str(log), str(count), str(before)]
        for name, (count, before) in takers.items()
    }


def test_turns_go_round_once_all_are_ready_and_never_overlap(tmp_path: Path) -> None:
    log = tmp_path / "log"
    statuses = turns.run(commands(log, a=(2, 0.3), b=(3, 0.0), c=(1, 0.0)), 60)
    assert statuses == {"a": 0, "b": 0, "c": 3}
    said = log.read_text().split()
    assert said[:3] == ["ready"] * 3
    assert said[3:] == [word for turn in ("a0", "b0", "c0", "a1", "b1", "b2") for word in (turn, f"-{turn}")]


def test_a_process_that_ends_before_its_turn_stops_no_other(tmp_path: Path) -> None:
    takers = commands(tmp_path / "log", a=(2, 0.0)) | {"broken": [sys.executable, "-c", "raise SystemExit(4)"]}
    assert turns.run(takers, 60) == {"a": 0, "broken": 4}


def test_a_process_that_ends_after_it_asked_stops_no_other(tmp_path: Path) -> None:
    asks = f"import os, sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import turns"
    asks += "; os.write(int(sys.argv[sys.argv.index(turns.FLAG) + 1].split(',')[1]), b'.')"
    takers = {"gone": [sys.executable, "-c", asks], **commands(tmp_path / "log", a=(2, 1.5))}
    assert turns.run(takers, 60) == {"gone": 0, "a": 0}


def test_what_a_process_leaves_behind_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = f"import subprocess; print(subprocess.Popen(['sleep', '60']).pid, file=open({str(pid)!r}, 'w'))"
    assert turns.run({"leaves": [sys.executable, "-c", program]}, 60) == {"leaves": 0}
    time.sleep(0.2)
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_what_is_late_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = (
        f"import subprocess; p = subprocess.Popen(['sleep', '60']); open({str(pid)!r}, 'w').write(str(p.pid)); p.wait()"
    )
    began = time.monotonic()
    statuses = turns.run({"late": [sys.executable, "-c", program], **commands(tmp_path / "log", a=(1, 0.0))}, 3)
    assert statuses["late"] < 0
    assert time.monotonic() - began < 30
    time.sleep(0.2)
    state = Path(f"/proc/{pid.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_process_alone_waits_for_nobody() -> None:
    with turns.Turns().turn():
        pass


def test_a_process_ends_where_what_gives_turns_has_ended() -> None:
    (read, write), (mine, other) = os.pipe(), os.pipe()
    os.close(write)
    with pytest.raises(SystemExit), turns.Turns(f"{read},{other}").turn():
        pass
    for end in (read, mine, other):
        os.close(end)
