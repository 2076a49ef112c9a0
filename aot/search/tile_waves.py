"""What a GEMM costs by its tiles, its clusters and the waves in which they run: models that need no library.

Knows nothing of compilers or providers. Which one puts variants in order where is in `rank`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.scaling import SCALINGS, TILES

from . import b200, rubin, thor
from .rates import Tcgen05Rates
from .shape import Shape
from .targets import Target

_LANES = 128  # of tensor memory: rows of D that a CTA's MMA has, used or not


class Model(Protocol):
    """What puts variants in order."""

    source: str  # in words

    def costs(self, shapes: Sequence[Shape], signature: Signature, m: int) -> list[float]:
        """Of each shape, in any unit that they share."""

    def settle(self, shapes: Sequence[Shape], signature: Signature, m: int) -> list[tuple[float, ...]]:
        """What puts shapes of one cost in order."""


class TileWaves:
    """Waves of CTAs, times what one CTA does for a slice of K: multiply its tile, and load its share of A and B.

    Counts what is wasted: rows and columns of tiles past the edge of D, CTAs that only fill a cluster, and the part of
    the last wave that stays empty. Loads weigh 64 multiply columns each, about the ratio of tensor-core to L2
    throughput in elements, and multicast within a cluster divides them. To add up the parts of a split K costs nothing.
    """

    _LOAD_WEIGHT = 64

    def __init__(self, target: Target, reason: str = "") -> None:
        """`reason`: why no other model was taken, which `source` then says."""
        self._multiprocessors = target.multiprocessors
        self.source = "tile-wave model" + (f" ({reason})" if reason else "")

    def costs(self, shapes: Sequence[Shape], signature: Signature, m: int) -> list[float]:
        """See `Model`."""
        return [self.cost(shape, signature, m) for shape in shapes]

    def settle(self, shapes: Sequence[Shape], signature: Signature, m: int) -> list[tuple[float, ...]]:
        """None is before another."""
        return [()] * len(shapes)

    def cost(self, s: Shape, signature: Signature, m: int) -> float:
        """Of one shape."""
        in_flight = max(1, self._multiprocessors // (s.cluster_m * s.cluster_n))
        waves = -(-_clusters(s, signature, m) * s.split_k // in_flight)
        loads = s.tile_m / s.cluster_n + s.tile_n / s.cluster_m
        slices = -(-signature.k // (s.tile_k * s.split_k)) * DTYPES[signature.a].bytes_of(s.tile_k)
        return waves * slices * (s.tile_m * s.tile_n + self._LOAD_WEIGHT * loads)


class Tcgen05Tiles(TileWaves):
    """Microseconds of a persistent GEMM whose sums are in tensor memory: a norm of four flows, and what nothing hides.

    The flows are tile after tile through the busiest SM, at the slowest of products, reads of shared memory and what
    TMA brings (of which two CTAs that multiply together share half of B); bytes out of L2; and bytes out of memory.
    Sums of 64 rows by a CTA alone take as long as those of 128. An epilogue hides behind the next tile where tensor
    memory has room for both, and the last one does not. Nothing of it was measured.
    """

    def __init__(self, target: Target, rates: Tcgen05Rates, reason: str = "") -> None:
        """`rates` are those of a GPU like the target's."""
        super().__init__(target)
        self._rates = rates
        self.source = "model of tcgen05 tiles, not measured" + (f" ({reason})" if reason else "")

    def cost(self, s: Shape, signature: Signature, m: int) -> float:
        """Of one shape."""
        rates, element = self._rates, DTYPES[signature.a].bits / 8
        depth = signature.k / s.split_k
        # With fewer than 64 rows of D in a tile, B cannot but be on the MMA's side of 128.
        rows, columns = (s.tile_n, s.tile_m) if s.swap_ab or s.tile_m < 64 else (s.tile_m, s.tile_n)
        macs_per_cycle = rates.macs_per_cycle.get(DTYPES[signature.a].bits, rates.macs_per_cycle[16])
        products = _LANES * columns * depth / macs_per_cycle
        operands = (rows + columns / (2 if s.two_cta else 1)) * depth * element  # bytes
        tile_us = max(
            products / rates.cycles_per_us,
            operands / (rates.shared_bytes_per_cycle * rates.cycles_per_us),
            operands / rates.brought_bytes_per_us,
        )
        size = s.cluster_m * s.cluster_n
        clusters = _clusters(s, signature, m) * s.split_k
        waves = -(-clusters // self._resident(size))
        epilogue_us = rates.epilogue_cycles_of_column * columns / rates.cycles_per_us
        scaled = SCALINGS[signature.scaling].layout == TILES
        room = rates.tensor_memory_columns - (rates.scale_columns if scaled else 0)
        shown_us = 0.0 if 2 * columns <= room else (waves - 1) * epilogue_us
        # Rows and columns past the edge of D are zeros that no memory is asked for.
        loads = (min(s.tile_m, m) / s.cluster_n + min(s.tile_n, signature.n) / s.cluster_m) * depth * element
        flows = (
            waves * tile_us + shown_us,
            clusters * size * loads / rates.l2_bytes_per_us,
            signature.bytes(m) / rates.memory_bytes_per_us,
        )
        return float(sum(flow**4 for flow in flows)) ** 0.25 + epilogue_us + rates.start_us

    def _resident(self, size: int) -> int:
        """Clusters of so many CTAs that run at a time; of a size that no table has, as many as there are SMs for."""
        known = self._rates.resident_clusters.get(size, self._rates.resident_clusters[1] // size)
        return max(1, known * self._multiprocessors // self._rates.resident_clusters[1])


# A B300 is taken for a B200: as many SMs and as fast a memory; of its formats only that of 4 bits is faster.
_TCGEN05 = {"sm_100a": b200.TCGEN05, "sm_103a": b200.TCGEN05, "sm_107a": rubin.TCGEN05, "sm_110a": thor.TCGEN05}


def model_of(target: Target, reason: str = "") -> TileWaves:
    """The model for a target's GEMMs that needs no library; `reason` as for `TileWaves`."""
    rates = _TCGEN05.get(target.name)
    return TileWaves(target, reason) if rates is None else Tcgen05Tiles(target, rates, reason)


def _clusters(s: Shape, signature: Signature, m: int) -> int:
    """How many clusters' tiles D has, of all batches."""
    along_m = -(-m // (s.tile_m * s.cluster_m))
    return along_m * -(-signature.n // (s.tile_n * s.cluster_n)) * signature.batch
