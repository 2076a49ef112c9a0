"""The libraries that benchmarks time this archive against: one small file each, none of them needed.

A peer is imported only when it is asked for; one that is not installed says so and is reported as absent.
"""

from __future__ import annotations

import importlib

from .base import CACHE, Peer, PeerError, PeerMissing, Settings, guarded, written

# Module and class of each peer, in the order in which results show them.
PEERS = {
    "deep_gemm": ("deep_gemm", "DeepGemm"),
    "marlin": ("marlin", "Marlin"),
    "operators": ("operators", "Operators"),
    "quack": ("quack_kernels", "Quack"),
    "triton": ("triton_inductor", "TritonInductor"),
}

__all__ = ["CACHE", "PEERS", "Peer", "PeerError", "PeerMissing", "Settings", "guarded", "load", "written"]


def load(name: str, settings: Settings) -> Peer:
    """The peer `name`, imported now.

    Raises:
        PeerMissing: a package it needs is not installed; the message names it.
        KeyError: there is no peer of this name.
    """
    module, class_name = PEERS[name]
    try:
        peer: Peer = getattr(importlib.import_module(f"{__name__}.{module}"), class_name)(settings)
    except ImportError as missing:
        raise PeerMissing(f"{type(missing).__name__}: {missing}") from missing
    return peer
