"""What is known of an H100 SXM: the floors of its times. Not measured: it has an H200's SMs and power limit, and its
memory's rate is that share of an H200's.

Variants are put in order by an H200's table, with this GPU's SMs and memory rate.
"""

from __future__ import annotations

from runtime.device.gpus import H200

from . import h200

NAME, _MEMORY_GBPS = "NVIDIA H100 80GB HBM3", 3352  # as CUDA's attributes give it

FLOOR = h200.FLOOR._replace(memory_bytes_per_us=h200.FLOOR.memory_bytes_per_us * _MEMORY_GBPS / H200.memory_gbps)
