"""A made-up archive that has all that people are shown: a model, a tuned and a ranked layer, times, history, failures;
and commands as processes whose output is 80 columns wide."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path
from typing import Any

from aot.pack.write import Package
from runtime.device.gpus import Gpu
from runtime.gemm.signature import Signature

from .command_line import COMMAND, ROOT
from .recording_driver import cubin, entry, gemm_record, signature, table

FEW = "own.sm90_small_m.bf16_bf16_bf16_f32.tile8x48.cluster_n1.ctas_per_sm2.serial.split_k2.sm_90a"
MANY = "own.sm90_persistent.bf16_bf16_bf16_f32.tile88x192.cluster2x1.rows.serial.pingpong.split_k1.swap.sm_90a"
WIDE = "own.sm90_persistent.bf16_bf16_bf16_f32.tile128x192.cluster2x1.rows.serial.pingpong.split_k1.swap.sm_90a"
WRONG = "own.sm90_persistent.bf16_bf16_bf16_f32.tile120x192.cluster2x1.rows.serial.pingpong.split_k1.swap.sm_90a"
OTHER = "mine.other.sm_90a"
H200 = Gpu("NVIDIA H200", 132, 4814)
QKV, OUT = (Signature.from_json(signature(n, 4096)).key() for n in (6144, 4096))
ENVIRONMENT: dict[str, Any] = {
    "gpu": H200.name,
    "compute_capability": "9.0",
    "driver": "580.1",
    "torch": "2.11",
    "rejected": {WRONG: "D has a relative error of 0.5 at M = 17"},
}
BUILD: dict[str, Any] = {
    "schema": 1,
    "models": [
        {
            "model": "made-up-8b",
            "source": "made-up/8B config.json at tp 1",
            "manifest": "ab" * 32,
            "gemms": [{"name": "qkv", "signature": QKV}, {"name": "o", "signature": OUT}],
        }
    ],
    "targets": ["sm_90a"],
    "ranking": {"sm_90a": "estimates"},
    "candidates": 8,
    "tools": {"cute-aot": "0.1.0", "nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-base": "4.8.1"},
    "providers": {"own.sm90_small_m": "cd" * 32, "own.sm90_persistent": "ef" * 32},
    "failures": [["own.sm90_persistent.gone.sm_90a", "ptxas: out of registers"]],
    "unserved": [["bf16_bf16_bf16_f32_none_n7_k7", "sm_90a", "no kernel takes an N of 7"]],
}
TIMINGS = [
    {"m": 16, "function": FEW, "us": 14.0, "baseline_us": 16.1, "spread": 0.012, "baseline": "torch.mm"},
    {"m": 512, "function": MANY, "us": 40.0, "baseline_us": 38.0, "spread": 0.01, "baseline": "torch.mm"},
    {"m": 1024, "function": WIDE, "us": 72.0, "baseline_us": 76.0, "spread": 0.01, "baseline": "torch.mm"},
]
# Functions by their place among the names; times in 10 ns, spreads in thousandths.
POINTS: list[dict[str, Any]] = [
    {"m": 16, "baseline": ["torch.mm", 1610, 3, 0, 0], "finalists": [[0, 1400, 12, 0, 0]], "screened": [[1, 2500]]},
    {
        "m": 512,
        "baseline": ["torch.mm", 3800, 3, 0, 0],
        "finalists": [[1, 4000, 10, 0, 0], [3, 4100, 9, 0, 0]],
        "screened": [[0, 9000]],
    },
    {
        "m": 1024,
        "baseline": ["torch.mm", 7600, 3, 0, 0],
        "finalists": [[3, 7200, 10, 0, 0], [1, 7900, 9, 0, 0]],
        "screened": [],
    },
]
TUNING = {
    "signature": QKV,
    "target": "sm_90a",
    "gpu": H200.name,
    "names": [FEW, MANY, WRONG, WIDE],
    "rejected": [[2, "D has a relative error of 0.5 at M = 17"]],
    "points": POINTS,
}


def tables() -> dict[str, dict[str, Any]]:
    """The tables of the archive, to be changed at will."""
    qkv = entry(
        signature(6144, 4096),
        [(64, FEW), (700, MANY), (None, WIDE)],
        gpu=H200,
        torch_faster=[(400, 600)],
        invariant=[(None, WIDE)],
    )
    o = entry(signature(4096, 4096), [(None, WIDE)], [(16, [WIDE, WRONG])], state="ranked")
    return {
        "gemm": table([qkv | {"timings": TIMINGS}, o]),
        "build": BUILD,
        "tuning": {"schema": 1, "environments": [ENVIRONMENT]},
        "history": {"schema": 1, "tunings": [TUNING]},
    }


def write(path: Path, changed: dict[str, dict[str, Any]] | None = None) -> Path:
    """Write the archive with `changed` tables in place of its own."""
    package = Package()
    for name in (FEW, MANY, WIDE, WRONG, OTHER):
        package.add_function(gemm_record(name), cubin(name))
    for name, obj in {**tables(), **(changed or {})}.items():
        package.set_table(name, obj)
    package.write(path)
    return path


def on_a_terminal(*arguments: object) -> str:
    """What a command prints on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*COMMAND, *map(str, arguments)], env=environment, stdout=theirs) as process:
        os.close(theirs)
        found = b""
        while chunk := _read(ours):
            found += chunk
        process.wait()
    os.close(ours)
    return found.decode().replace("\r\n", "\n")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # what Linux answers when the other end is closed
        return b""
