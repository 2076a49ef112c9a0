"""Small handwritten function records for tests that need no compiler."""

from __future__ import annotations

import copy
from typing import Any

# y[m, n] = f(x[m, n], scale): one kernel of 128 threads, a CTA for each row. Its parameters: x as a plain pointer, y as
# word 0 of a TMA descriptor behind a constant word, and m * n in 32 bits.
RECORD: dict[str, Any] = {
    "schema": 1,
    "name": "test.rows.sm_90a",
    "target": "sm_90a",
    "family": "test.rows",
    "arguments": [
        {"kind": "tensor", "name": "x", "dtype": "bf16", "shape": ["m", "n"], "strides": ["ldx", 1], "alignment": 16},
        {"kind": "tensor", "name": "y", "dtype": "bf16", "shape": ["m", "n"], "strides": ["ldy", 1], "alignment": 128},
        {"kind": "scalar", "name": "scale", "dtype": "f32"},
        {"kind": "device", "name": "clusters", "property": "max_active_clusters", "cluster_size": 2},
        {"kind": "none", "name": "bias"},
        {"kind": "stream", "name": "stream"},
    ],
    "symbols": {
        "m": {"width": 32, "divisibility": 1},
        "n": {"width": 32, "divisibility": 8},
        "ldx": {"width": 64, "divisibility": 8},
        "ldy": {"width": 64, "divisibility": 8},
    },
    "kernels": [{"symbol": "rows", "registers": 32, "shared_bytes": 0, "local_bytes": 0}],
    "program": {
        "values": [["m", 32], ["n", 32], ["ldx", 64], ["ldy", 64], ["scale", 32], ["clusters", 32]],
        "pointers": ["x", "y"],
        "nodes": [
            ["const", 32, 1],  # 6
            ["const", 32, 128],  # 7
            ["const", 64, 1024],  # 8
            ["mul", 32, 0, 1, ["nsw"]],  # 9: m * n
            ["const", 64, 2],  # 10
            ["mul", 64, 3, 10],  # 11: ldy in bytes
            ["smin", 32, 0, 5],  # 12: no more CTAs than clusters
            ["const", 32, 2],  # 13
        ],
        "launches": [
            {
                "kernel": 0,
                "grid": [12, 6, 6],
                "block": [7, 6, 6],
                "shared_bytes": 8,
                "attributes": [[4, [13, 6, 6]]],
                "parameters": [
                    {"size": 8, "words": [], "slots": [[0, "raw", 0, None]]},
                    {"size": 128, "words": [[8, 8, 11]], "slots": [[0, "tma", 1, None]]},
                    {"size": 8, "words": [[0, 4, 9], [4, 4, 4]], "slots": []},
                ],
            }
        ],
    },
    "cubin": "0" * 64,
}


def record() -> dict[str, Any]:
    """A fresh copy of `RECORD`."""
    return copy.deepcopy(RECORD)
