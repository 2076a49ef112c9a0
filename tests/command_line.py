"""What tests of the command line share: how it is called, and a small manifest. Its fixtures are in conftest.py."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "aot"]
# For builds of few kernels: each further process would import the compiler, which takes longer than to compile two.
ALONE = "--jobs", "1"

MANIFEST = """\
format: 1
model: tiny
source: made up
tokens: [16, 256]
targets: [sm_90a]
defaults:
  dtypes: {a: bf16, b: bf16, d: bf16}
gemms:
  - {name: up, n: 1024, k: 512}
  - {name: down, n: 512, k: 1024, tokens: [1]}
"""
UP, DOWN = "bf16_bf16_bf16_f32_none_n1024_k512", "bf16_bf16_bf16_f32_none_n512_k1024"


def hear_control_c() -> None:
    """In a child, before it begins: a shell that runs tests in the background has its children ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Result(NamedTuple):
    status: int
    out: str
    err: str


Run = Callable[..., Result]


def unwrapped(text: str) -> str:
    """What was printed, in one line with single spaces."""
    return " ".join(text.split())


def read_as_aot_does(words: list[str]) -> None:
    """Read the words of a call of `aot` as it does, and do nothing; a wrong one raises."""
    from aot.cli import commands

    command, name, context = commands.command(), "aot", None
    while True:
        context = command.make_context(name, list(words), parent=context)
        if not hasattr(command, "commands"):
            return
        name, command, words = command.resolve_command(context, words)
