"""What is known of an H100 SXM: the floors of its times. Not measured: it has an H200's SMs and power limit, and its
memory's rate is that share of an H200's.

Variants are put in order by an H200's table, with this GPU's SMs and memory rate.
"""

from __future__ import annotations

from runtime.device.gpus import H100, H200

from . import h200

NAME = H100.name
FLOOR = h200.FLOOR._replace(memory_bytes_per_us=h200.FLOOR.memory_bytes_per_us * H100.memory_gbps / H200.memory_gbps)
