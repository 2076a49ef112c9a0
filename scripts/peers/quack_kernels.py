"""quack (quack-kernels): its own tuning space for Hopper, each configuration pinned in turn, the fastest kept.

Its tuner is not used, so that all peers are searched by the same measurement. Row and column scales go through the
epilogue of its normalised GEMM (value * column vector * row vector). It sums e4m3 products in the tensor core over all
of K, as cuBLAS's fast accumulation does.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aot.tune.gemm.operands import OperandSet, Weights
from aot.tune.measure import Launch
from runtime.gemm.signature import Signature

from .base import Problem, Settings, versions_of

NAME = "quack"
_MAJOR, _MULTIPROCESSORS = 9, 132
_K_TILE = 64  # elements of 16 bits
# Split-K makes one more kernel of a configuration for each factor, so only the four smallest tiles have it.
_SPLIT_TILES = ((128, 128), (128, 160), (128, 192), (192, 128))
_SPLITS = (2, 4, 8)


@dataclass(frozen=True)
class Modules:
    """The modules of quack that launches need."""

    configs: Any
    interface: Any
    compile: Any

    def space(self, epilogue: str | None) -> list[Any]:
        """The configurations that its tuner has for Hopper."""
        return [c for c in self.configs.get_all_configs(epilogue) if c.device_capacity == _MAJOR]

    def compile_ahead(self, launches: Iterable[tuple[Launch, Any]], expired: Callable[[], bool]) -> None:
        """Compile in worker processes, until `expired()`, by calling each of `launches` with its operands, of any
        operation, until it returns: a first call raises when it has handed a kernel to them."""
        waiting = deque(launches)
        with self.compile.pool_scope():
            pending = 0
            while waiting and not expired():
                launch, operands = waiting.popleft()
                try:
                    launch(operands)
                except self.compile.CompilePending:
                    waiting.append((launch, operands))
                    pending += 1
                    if pending >= len(waiting):
                        pending = 0
                        time.sleep(0.1)
                except Exception:
                    continue  # it is said with its reason when it is timed; with no GPU every launch ends here


def import_quack(settings: Settings) -> Modules:
    """Its modules, imported to compile with `settings`.

    Raises:
        ImportError: it is not installed, or a package that it needs.
    """
    # It reads these when it is imported; where there is no GPU to ask, they say what to compile for.
    os.environ["QUACK_COMPILE_WORKERS"] = str(settings.workers)
    if settings.device == "cpu":
        os.environ["QUACK_ARCH"], os.environ["CUTE_DSL_ARCH"] = "90", "sm_90a"
    import quack.cache
    from quack import gemm_config, gemm_interface
    from quack.cache import async_compile

    quack.cache.CACHE_DIR = str(settings.cache / NAME)
    return Modules(gemm_config, gemm_interface, async_compile)


def quack_versions() -> dict[str, str]:
    """The versions of its packages."""
    return versions_of("quack-kernels", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi")


class Quack:
    """The peer; see `base.Peer`."""

    name = NAME
    search = (
        "all its sm90 configurations (44; 18 where gated), and in bf16 its serial split-K by 2, 4 and 8 of pingpong "
        "tiles up to 192 x 128 where tiles are fewer than SMs"
    )

    def __init__(self, settings: Settings) -> None:
        self._device, self._modules = settings.device, import_quack(settings)
        from quack.epilogue import library

        self._scaled = library.norm_act_mod(None, gated=False, has_c=False, has_rowvec=True, has_colvec=True)

    def versions(self) -> dict[str, str]:
        """The versions of its packages."""
        return quack_versions()

    def refuse(self, signature: Signature) -> str | None:
        """Why it cannot compute `signature`; None if it can."""
        if (signature.scaling, signature.epilogue) not in (
            ("none", "none"),
            ("row_column", "none"),
            ("none", "swiglu"),
            ("none", "swiglu_interleaved"),
        ):
            return f"no epilogue of its own for {signature.epilogue} with {signature.scaling} scales"
        return None

    def prepare(self, problems: Sequence[Problem], expired: Callable[[], bool]) -> None:
        """See `base.Peer`; kernels serve all shapes, so that small ones do."""
        waiting: dict[tuple[Signature, str], tuple[Launch, OperandSet]] = {}
        for signature, m in problems:
            small = replace(signature, n=512, k=1024)
            operands = _small_operands(small, self._device)
            for name, launch in self.launches(signature, m).items():
                waiting.setdefault((small, name), (launch, operands))
        self._modules.compile_ahead(waiting.values(), expired)

    def launches(self, signature: Signature, m: int) -> Mapping[str, Launch]:
        """Its candidates for the shape."""
        if signature.parts.gated:
            layout = None if signature.parts.interleaved else ("B",)
            return {named(c): self._gated(c, layout) for c in self._modules.space("gated")}
        if signature.scaling == "row_column":
            return {named(c): self._row_column(c) for c in self._modules.space(None)}
        configs = [s for c in self._modules.space(None) for s in _with_splits(c, signature, m)]
        return {named(c): self._plain(c) for c in configs}

    def _plain(self, config: Any) -> Launch:
        def launch(o: OperandSet) -> None:
            self._modules.interface.gemm_tuned.fn(o.a, o.b.mT, o.d, config=config, split_k=None)

        return launch

    def _row_column(self, config: Any) -> Launch:
        def launch(o: OperandSet) -> None:
            scales = {
                "mColVecBroadcast": o.extras["scale_a"].view(-1),
                "mRowVecBroadcast": o.extras["scale_b"].view(-1),
            }
            out = {"mAuxOut": o.d}
            self._scaled(o.a, o.b.mT, None, out=out, store_d=False, config=config, tuned=False, **scales)

        return launch

    def _gated(self, config: Any, layout: tuple[str, ...] | None) -> Launch:
        def launch(o: OperandSet) -> None:
            self._modules.interface.gemm_act(
                o.a,
                o.b.mT,
                activation="swiglu",
                postact_out=o.d,
                store_preact=False,
                tuned=False,
                config=config,
                concat_layout=layout,
            )

        return launch


def _with_splits(config: Any, signature: Signature, m: int) -> list[Any]:
    """`config`, and its splits of K where its tiles leave SMs idle, at most four CTAs for each SM."""
    if not config.pingpong or (config.tile_m, config.tile_n) not in _SPLIT_TILES:
        return [config]
    tile_m, tile_n = (config.tile_n, config.tile_m) if config.swap_ab else (config.tile_m, config.tile_n)
    tiles = -(-m // tile_m) * -(-signature.n // tile_n)
    k_tiles = -(-signature.k // _K_TILE)
    if tiles >= _MULTIPROCESSORS:
        return [config]
    fitting = [s for s in _SPLITS if tiles * s <= 4 * _MULTIPROCESSORS and 2 * s <= k_tiles]
    return [config, *(replace(config, split_k=s) for s in fitting)]


def named(c: Any) -> str:
    """A configuration in words."""
    words = [f"tile {c.tile_m}x{c.tile_n} cluster {c.cluster_m}x{c.cluster_n}"]
    words += ["pingpong" if c.pingpong else "cooperative"]
    words += ["swap-AB"] * c.swap_ab + [f"split-K {c.split_k}"] * (c.split_k > 1)
    return " ".join(words)


def _small_operands(s: Signature, device: str) -> OperandSet:
    """Operands of 64 rows: only their layout matters, since nothing that uses them is timed."""
    return Weights(s, 64, 0, seed=0, device=device).operands(64)[0]
