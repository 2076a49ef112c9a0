"""Which forms of `persistent.Persistent` exist, as pure arithmetic: options, rules, pipeline depth, a guess at the time.

Imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.dtypes import DTYPES
from runtime.signature import Epilogue

SHARED_BYTES_PER_CTA = 227 << 10
_STATIC_BYTES = 1 << 10  # of a CTA's, what every kernel of the DSL declares
_BARRIER_BYTES = 1 << 10  # room for every mbarrier, and for aligning what comes before them
STAGE_BYTES_OF_K = 128  # a swizzle atom of K
WARPGROUPS = 2
WGMMA_ROWS = 64
STORE_BUFFERS = 2  # of `WGMMA_ROWS` x `store_columns`, for each warpgroup
_FEWEST_STAGES = 3
# What a thread has for sums, of the 232 registers that it is given: the rest holds addresses, coordinates and counters.
_MOST_SUMS = 200

OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "schedule": ("cooperative", "pingpong"),
    "tile_m": (64, 128, 192, 256),
    "tile_n": (64, 96, 128, 160, 192, 224, 256),
    "cluster_m": (1, 2),
    "cluster_n": (1, 2),
    "raster": ("m", "n"),
    "group": (8,),
}


def split(options: Mapping[str, Any]) -> tuple[int, int]:
    """How the warpgroups that share a tile divide it: parts along M, parts along N."""
    if options["schedule"] == "pingpong":
        return 1, 1
    return (2, 1) if options["tile_m"] % (2 * WGMMA_ROWS) == 0 else (1, 2)


def tile_columns(options: Mapping[str, Any], epilogue: str) -> int:
    """Columns of D that a tile has."""
    columns: int = options["tile_n"] // (2 if Epilogue.of(epilogue).gated else 1)
    return columns


def store_columns(options: Mapping[str, Any], epilogue: str, d: str) -> int:
    """Columns of D that are stored at once: as much as a swizzle atom holds and a warpgroup's part divides into."""
    part = tile_columns(options, epilogue) // split(options)[1]
    widest = 128 // DTYPES[d].bytes
    return next((c for c in (widest, widest // 2, widest // 4) if part % c == 0), 0)


def sums(options: Mapping[str, Any]) -> int:
    """F32 sums that a thread holds."""
    parts_m, parts_n = split(options)
    return int(options["tile_m"] * options["tile_n"] // (parts_m * parts_n) // 128)


def stages(options: Mapping[str, Any], epilogue: str, d: str) -> int:
    """How many stages fill the shared memory of a CTA."""
    store = WARPGROUPS * STORE_BUFFERS * WGMMA_ROWS * store_columns(options, epilogue, d) * DTYPES[d].bytes
    left: int = SHARED_BYTES_PER_CTA - _STATIC_BYTES - _BARRIER_BYTES - store
    return left // ((options["tile_m"] + options["tile_n"]) * STAGE_BYTES_OF_K)


def rule(options: Mapping[str, Any], epilogue: str = "none", d: str = "bf16") -> str | None:
    """Why options that are allowed one by one are not together, or None."""
    if options["cluster_m"] * options["cluster_n"] > 2:
        return "clusters have at most two CTAs"
    if store_columns(options, epilogue, d) == 0:
        return "the tile does not divide into pieces that TMA can store"
    held = sums(options)
    if held > _MOST_SUMS:
        return f"{held} sums a thread exceed {_MOST_SUMS}"
    found = stages(options, epilogue, d)
    if found < _FEWEST_STAGES:
        return f"shared memory holds {found} stages, fewer than {_FEWEST_STAGES}"
    return None


@dataclass(frozen=True)
class Plan:
    """All that a kernel is specialised on."""

    tile_m: int
    tile_n: int
    tile_columns: int  # of D
    store_columns: int
    parts_m: int
    parts_n: int
    cluster_m: int
    cluster_n: int
    raster: str
    group: int
    stages: int
    pingpong: bool

    @classmethod
    def of(cls, options: Mapping[str, Any], epilogue: str = "none", d: str = "bf16") -> Plan:
        """What `options` come to for an epilogue and an output."""
        parts_m, parts_n = split(options)
        return cls(
            tile_m=options["tile_m"],
            tile_n=options["tile_n"],
            tile_columns=tile_columns(options, epilogue),
            store_columns=store_columns(options, epilogue, d),
            parts_m=parts_m,
            parts_n=parts_n,
            cluster_m=options["cluster_m"],
            cluster_n=options["cluster_n"],
            raster=options["raster"],
            group=options["group"],
            stages=stages(options, epilogue, d),
            pingpong=options["schedule"] == "pingpong",
        )

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def releases(self) -> int:
        """Warps, of all CTAs, that say of a stage that they have read it."""
        return (self.cluster_m + self.cluster_n - 1) * 4 * (1 if self.pingpong else WARPGROUPS)
