"""nvidia-matmul-heuristics as a model of what GEMMs cost, where it is installed and knows the target and the types.

Knows nothing of compilers or providers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES

from .shape import Shape
from .targets import Target
from .tile_waves import model_of


class Unknown(Exception):
    """The library is absent, or does not know what is asked."""


_DISTRIBUTION = "nvidia-matmul-heuristics"
# The library's device and code generator for a target: "CUTLASS" is the one without TMA and clusters.
_DEVICES = {
    "sm_80": ("A100_SXM_80GB", "CUTLASS"),
    "sm_90a": ("H200_SXM", "CUTLASS3"),
    "sm_100a": ("B200", "CUTLASS3"),
    "sm_103a": ("GB300_NVL", "CUTLASS3"),
    "sm_120a": ("RTX_5090", "CUTLASS"),
}
_SUGGESTIONS = 64  # more than it ever gives


class MatmulHeuristics:
    """Estimated seconds of each shape, then its place among the library's suggestions, then what `tile_waves` says."""

    def __init__(self, target: Target, signature: Signature) -> None:
        if target.name not in _DEVICES:
            raise Unknown(f"{_DISTRIBUTION} does not know {target.name}")
        self._precision = _precision(signature)
        try:
            import nvMatmulHeuristics as library

            version = metadata.version(_DISTRIBUTION)
            device, backend = _DEVICES[target.name]
            self._interface = library.NvMatmulHeuristicsInterfaceEx(
                backend=library.NvMatmulHeuristicsTarget[backend],
                flags=library.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
                gpu=library.NvMatmulHeuristicsNvidiaGpu[device],
            )
            self._layouts = library.NvMatmulHeuristicsMatmulLayout
            # What the library knows of measured times; it would do so itself when first asked for suggestions.
            self._interface.loadInternalDiscoverySet(self._layouts.TN_ROW_MAJOR, self._precision)
        except (ImportError, OSError, AssertionError, KeyError, AttributeError, RuntimeError) as e:
            raise Unknown(f"{_DISTRIBUTION} cannot be loaded: {e}") from e
        self._configured: tuple[Sequence[Shape], list[tuple[bool, Any]]] = [], []  # the shapes last asked for
        self._suggested: tuple[tuple[Any, ...], dict[tuple[int, ...], int]] = (), {}  # for the problem last asked for
        self._encoded = self._precision.encode()
        self._waves = model_of(target)
        self._instruction_k = DTYPES[signature.a].filling(32)
        self.source = f"{_DISTRIBUTION} {version}"

    def costs(self, shapes: Sequence[Shape], signature: Signature, m: int) -> list[float]:
        """Seconds, or infinity where the library has no estimate (it says 0).

        The library's own wrapper of this function calls one that does not exist.
        """
        if self._configured[0] is not shapes:
            self._configured = shapes, [self._configuration(s) for s in shapes]
        made, layouts = self._interface.makeNvMatmulHeuristicsProblem, self._layouts
        straight = made(m, signature.n, signature.k, layouts.TN_ROW_MAJOR, signature.batch)
        swapped = made(signature.n, m, signature.k, layouts.TN_COL_MAJOR, signature.batch)
        problems = ctypes.byref(straight), ctypes.byref(swapped)
        ask, target = self._interface.nvMatmulHeuristicsEstimateRuntime, ctypes.c_int(self._interface.target)
        handle, encoded, hardware = self._interface.handle, self._encoded, self._interface.hardware_descriptor
        found = [
            0.0 if config is None else ask(handle, encoded, target, problems[is_swapped], config, hardware)
            for is_swapped, config in self._configured[1]
        ]
        return [seconds if seconds > 0 else math.inf for seconds in found]

    def settle(self, shapes: Sequence[Shape], signature: Signature, m: int) -> list[tuple[float, ...]]:
        """The place among the library's suggestions, then what `tile_waves` says."""
        problem = m, signature.n, signature.k, self._layouts.TN_ROW_MAJOR, signature.batch
        if self._suggested[0] != problem:
            self._suggested = problem, self._suggestions(problem)
        places, waves = self._suggested[1], self._waves.costs(shapes, signature, m)
        tiles = ((s.tile_m, s.tile_n, s.cluster_m, s.cluster_n) for s in shapes)
        return [(places.get(tile, _SUGGESTIONS), cost) for tile, cost in zip(tiles, waves, strict=True)]

    def _suggestions(self, problem: tuple[Any, ...]) -> dict[tuple[int, ...], int]:
        """The place of each tile and cluster among the library's suggestions.

        The library's own wrapper of this function also estimates the time of each.
        """
        known = self._interface
        made = known.makeNvMatmulHeuristicsProblem(*problem)
        found = (known.nvmmhKernelConfiguration * _SUGGESTIONS)()
        flags, target = ctypes.c_int(known.flags), ctypes.c_int(known.target)
        where = ctypes.byref(made), found, _SUGGESTIONS, known.hardware_descriptor
        count = known.nvMatmulHeuristicsGetGemmConfig(known.handle, self._encoded, flags, target, *where)
        places: dict[tuple[int, ...], int] = {}
        for place, kernel in enumerate(found[:count]):
            places.setdefault((*kernel.cta[:2], *kernel.cluster), place)
        return places

    def _configuration(self, s: Shape) -> tuple[bool, Any]:
        """Whether the library has to swap A and B for a shape, and its form of it; None where a field is too narrow for
        its value: the library would divide by what is left of that.

        The extents below a CTA's tile have no effect, but must divide it, or there is no estimate; nor is there one for
        a tile narrower than 32.
        """
        swapped = s.tile_m < 64  # the MMA's M side holds the weights
        tile, cluster = (s.tile_m, s.tile_n), (s.cluster_m, s.cluster_n)
        if swapped:
            tile, cluster = tile[::-1], cluster[::-1]
        tile_m, tile_n = tile[0], max(tile[1], 32)
        config = self._interface.nvmmhKernelConfiguration()
        config.cta[:] = tile_m, tile_n, s.tile_k
        config.warp[:] = min(64, tile_m), min(64, tile_n), s.tile_k
        config.instr[:] = s.instruction_m, 8, self._instruction_k
        config.cluster[:] = cluster
        config.loadStages = s.stages
        config.splitK = s.split_k
        config.gridSwizzle = 1
        fits = (*config.cta, *config.cluster, config.splitK) == (tile_m, tile_n, s.tile_k, *cluster, s.split_k)
        return swapped, ctypes.byref(config) if fits else None


def _precision(signature: Signature) -> str:
    """The library's word for a signature's types: A, accumulator, D; for 8-bit floats A, B, C, accumulator, D."""
    types = signature.a, signature.b, signature.d, signature.accumulator
    for t in types:
        if not DTYPES[t].heuristics:
            raise Unknown(f"{_DISTRIBUTION} does not know the element type {t!r}")
    a, b, d, accumulator = (DTYPES[t].heuristics for t in types)
    return f"{a}{b}{d}{accumulator}{d}" if DTYPES[signature.a].bits == 8 else f"{a}{accumulator}{d}"
