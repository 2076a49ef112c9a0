"""Which forms of `small_m.SmallM` exist, as pure arithmetic: options, rules, pipeline depth, a guess at the time.

Imports no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SHARED_BYTES_PER_SM = 228 << 10
SHARED_BYTES_PER_CTA = 227 << 10
RESERVED_BYTES_PER_CTA = 1 << 10  # what CUDA keeps of an SM's shared memory for each CTA
_STATIC_BYTES = 1 << 10  # of a CTA's, what every kernel of the DSL declares
_BARRIER_BYTES = 1 << 10  # room for every mbarrier, and for aligning what comes before them
_ELEMENT_BYTES = 2
_PAD = 4  # f32 elements between rows of sums: eight rows and four tokens of a warp meet 32 different banks
_MOST_STAGES = 32
_FEWEST_STAGES = 3  # with two, loads stop while a stage is multiplied: up to 4 times as slow on an H200
_PORTABLE_CLUSTER = 8
_ATOM_ROWS = 8

# What won somewhere, of wider choices, over 11 layers at seven M from 1 to 64 on an H200 (docs/kernels.md).
# tile_n need not divide N, nor be a multiple of WGMMA's 64 rows.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "tile_m": (8, 16, 24, 32, 48, 64),  # tokens; rows past M are not free: docs/kernels.md
    "tile_n": (48, 56, 64, 112),  # rows of B
    "tile_k": (128,),
    "split_k": (1, 2, 4, 8),  # CTAs of a cluster that share a tile of D
    "cluster_n": (1, 2, 4),  # tiles of D whose CTAs, in one cluster, share the loads of A
    "ctas_per_sm": (1, 2),  # how many fit, by shared memory
    # What may happen before the kernel before this one ends: nothing ("serial"), all but reading ("launch"), or
    # reading B too ("weights"), which is right only where that kernel does not write B.
    "overlap": ("serial", "launch", "weights"),
}


BEST_UP_TO_M = 64  # beyond, each further token tile reads B again


def sums_pitch(tile_n: int) -> int:
    """F32 elements from one token's sums to the next in shared memory."""
    return tile_n + _PAD


def stages(options: Mapping[str, Any]) -> int:
    """How many stages fill the shared memory of a CTA, if `ctas_per_sm` of them share an SM."""
    tile_m, tile_n, tile_k = (options[f"tile_{mode}"] for mode in "mnk")
    ctas = options["ctas_per_sm"]
    memory = min(SHARED_BYTES_PER_CTA, SHARED_BYTES_PER_SM // ctas - RESERVED_BYTES_PER_CTA)
    sums = (1 if options["split_k"] == 1 else 2) * tile_m * sums_pitch(tile_n) * 4
    left: int = memory - _STATIC_BYTES - _BARRIER_BYTES - sums
    return min(_MOST_STAGES, left // ((tile_m + tile_n) * tile_k * _ELEMENT_BYTES))


def rule(options: Mapping[str, Any]) -> str | None:
    """Why options that are allowed one by one are not together, or None."""
    cluster = options["split_k"] * options["cluster_n"]
    if cluster > _PORTABLE_CLUSTER:
        return f"a cluster of {cluster} CTAs exceeds {_PORTABLE_CLUSTER}"
    if options["tile_m"] % (options["cluster_n"] * _ATOM_ROWS):
        return f"each of cluster_n CTAs loads as many whole groups of {_ATOM_ROWS} tokens, and tile_m has no such share"
    if options["tile_m"] % options["split_k"]:
        return "each of split_k CTAs adds up as many tokens, and tile_m has no such share"
    if options["cluster_n"] > 1 and options["ctas_per_sm"] > 1:
        return "cluster_n above 1 is made for one CTA an SM"
    found = stages(options)
    if found < _FEWEST_STAGES:
        return f"shared memory holds {found} stages, fewer than {_FEWEST_STAGES}"
    return None


def limit(options: Mapping[str, Any]) -> str | None:
    """Why no signature can be computed this way as yet, or None.

    Overlap gains 3-10% behind a kernel that lets the next begin early, and costs 5-9% behind any other.
    """
    if options["overlap"] == "weights":
        return "it reads B before the kernel before it ends, and no signature says that B is constant"
    if options["overlap"] == "launch":
        return "it gains only behind a kernel that lets it begin early, and no signature says what runs before"
    return None


# Fitted to times on an H200 (132 SMs; November 2026): microseconds, bytes.
_START_US, _START_OF_CTA_US, _SPLIT_US, _MULTICAST_US, _OVERLAP_US = 1.4, 1.6, 0.5, 0.1, 0.7
_MEMORY_BYTES_PER_US, _L2_BYTES_PER_US, _SM_BYTES_PER_US = 4.5e6, 9.5e6, 0.2e6
_SPARE_TOKEN_US = 1.6e-5  # for each row past M and each column of A that a CTA loads
_LATENCY_US = 1.5  # of a load while the memory is busy
_TAIL = 1.4
# Clusters of 4 and 8 CTAs do not fill every GPC: how many CTAs fit with one and with two an SM, of 132 and 264.
_CTAS_IN_CLUSTERS = {1: (132, 264), 2: (132, 264), 4: (120, 248), 8: (120, 240)}


def estimate_us(options: Mapping[str, Any], m: int, n: int, k: int) -> float:
    """A guess at the time on an H200, good for putting the choices for one problem in order and for nothing else.

    The slowest of three flows (memory to L2, L2 to the SMs, and into the busiest SM with what it keeps in flight), a
    little of the other two, and the time to start and to add up. For 11 layers at seven M from 1 to 64 (2,915 times,
    most of them later than the fit) its first choice took 4.2% longer than the best on average (15% at worst), the best
    of its first six 0.5% (5%), of its first eight 0.2% (5%).
    """
    tile_m, tile_n, tile_k = (options[f"tile_{mode}"] for mode in "mnk")
    split_k, cluster_n, per_sm = options["split_k"], options["cluster_n"], options["ctas_per_sm"]
    tiles_m, tokens = math.ceil(m / tile_m), min(m, tile_m)
    tiles_n = math.ceil(n / tile_n / cluster_n) * cluster_n
    ctas = tiles_m * tiles_n * split_k
    cta_bytes = (tile_n + tokens) * math.ceil(k / tile_k / split_k) * tile_k * _ELEMENT_BYTES

    b_bytes = tiles_m * n * k * _ELEMENT_BYTES
    memory = b_bytes / _MEMORY_BYTES_PER_US
    a_bytes = tiles_m * tiles_n * tokens * k * _ELEMENT_BYTES / cluster_n
    l2 = (b_bytes + a_bytes) / _L2_BYTES_PER_US

    waves = ctas / _CTAS_IN_CLUSTERS[split_k * cluster_n][per_sm - 1]
    busiest = min(per_sm, math.ceil(ctas / _CTAS_IN_CLUSTERS[1][0]))
    in_flight = busiest * stages(options) * (tile_n + tokens) * tile_k * _ELEMENT_BYTES
    cta_us = cta_bytes / min(_SM_BYTES_PER_US, in_flight / _LATENCY_US)
    sm = busiest * cta_us if waves <= 1 else (waves * busiest + _TAIL * (math.ceil(waves) - waves)) * cta_us

    slowest = max(memory, l2, sm)
    flows = slowest + 0.05 * (memory + l2 + sm - slowest)
    starts = _START_US + math.ceil(waves) * _START_OF_CTA_US / per_sm
    spare = (tile_m - tokens) / cluster_n * k / split_k * _SPARE_TOKEN_US
    meeting = spare + _SPLIT_US * (split_k > 1) + _MULTICAST_US * (cluster_n > 1)
    return flows + starts + meeting - _OVERLAP_US * (options["overlap"] != "serial")
