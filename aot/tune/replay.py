"""A decode step of a few layers, as a server runs it, for every way to compute their GEMMs; timed in CUDA graphs.

Between an archive's GEMMs run kernels of torch's: norms that add the residual, rotary embeddings, the write to the
cache, attention over it, the activation; none of them begins or ends early. Norms are the archive's where they were
tuned, as servers' plugins have it. Each layer has weights and a cache of its own, so a step finds them outside L2.
Needs torch and a GPU. Knows nothing of what choices are for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from runtime.errors import AotError
from runtime.gemm.signature import Signature
from runtime.rmsnorm import Signature as Norm
from runtime.serve.library import Library
from runtime.serve.load import load

from .block import Block, Choice
from .elements import TORCH_DTYPES
from .measure import MeasureError, time_interleaved
from .options import GraphOptions
from .timing import Timing

_TIMES_L2 = 3  # that weights of all layers must be, to be read from memory in each step
_STEP_US = 1e6  # more than a step takes, so that a graph holds one
_EPS = 1e-5

Gemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]


def _added_and_normed(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The root mean square norm of x + residual, and that sum."""
    total = x + residual
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)
    return (wide * scale).to(x.dtype) * weight, total


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)
    return (wide * scale).to(x.dtype) * weight


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x (M, heads, width), its halves turned by `angles` (2, width / 2): cosines and sines."""
    one, two = x.chunk(2, -1)
    return torch.cat((one * angles[0] - two * angles[1], two * angles[0] + one * angles[1]), -1)


def _turned(qkv: torch.Tensor, angles: torch.Tensor, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries (M, pairs, queries of a pair, width), and what goes to the cache (2, M, pairs, width)."""
    m, width = qkv.shape[0], 2 * angles.shape[1]
    heads = qkv.view(m, -1, width)
    keys_from = heads.shape[1] - 2 * pairs
    queries = _rotated(heads[:, :keys_from], angles).view(m, pairs, -1, width)
    return queries, torch.stack((_rotated(heads[:, keys_from:-pairs], angles), heads[:, -pairs:]))


def _gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


@dataclass(frozen=True)
class Neighbours:
    """The kernels between GEMMs; for measurements compiled, as servers compile theirs."""

    added_and_normed: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _added_and_normed
    normed: Callable[..., torch.Tensor] = _normed
    turned: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _turned
    gated: Callable[..., torch.Tensor] = _gated

    @classmethod
    def compiled(cls) -> Neighbours:
        """Those of torch.compile.

        Raises:
            MeasureError: it does not work here.
        """
        torch._dynamo.reset()  # whose limit on recompilations may be near
        made = cls(*(torch.compile(f, fullgraph=True) for f in (_added_and_normed, _normed, _turned, _gated)))
        try:
            with torch.no_grad():
                made.gated(torch.zeros(1, 16, device="cuda", dtype=torch.bfloat16))
        except Exception as error:  # whatever a compiler, a C++ toolchain or Triton may raise
            what = " ".join(str(error).split())[:200]
            raise MeasureError(f"torch.compile, which makes the kernels between GEMMs, does not work: {what}") from None
        return made

    def with_norms_of(self, lib: Library, dtype: str, hidden: int) -> Neighbours:
        """The same, but for norms of a sum that the archive was tuned for."""
        norm = Norm(dtype, dtype, dtype, hidden, dtype)
        try:
            tuned = lib.is_tuned(norm)
        except AotError:  # it has no norms
            tuned = False
        if not tuned:
            return self

        def added_and_normed(
            x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            found: tuple[torch.Tensor, torch.Tensor] = lib.call(norm.operation, x, weight, residual=residual, eps=_EPS)
            return found

        return replace(self, added_and_normed=added_and_normed)


class Layer:
    """A layer's weights, norms' too."""

    def __init__(self, block: Block, device: str, generator: torch.Generator) -> None:
        dtype = TORCH_DTYPES[next(iter(block.ways.values()))[0].a]

        def drawn(*shape: int) -> torch.Tensor:
            made = torch.empty(shape, device=device, dtype=dtype)
            return made.normal_(0, shape[-1] ** -0.5, generator=generator)

        self.weights = {part: drawn(ways[0].n, ways[0].k) for part, ways in block.ways.items()}
        self.biases = {part: drawn(ways[0].n) for part, ways in block.ways.items() if ways[0].parts.bias}
        self.norms = [torch.ones(block.hidden, device=device, dtype=dtype) for _ in range(2)]


class Step:
    """One decode step of `m` sequences through `layers`, whose caches hold `context` tokens each."""

    def __init__(
        self, block: Block, layers: list[Layer], m: int, options: GraphOptions, neighbours: Neighbours
    ) -> None:
        self.block, self.layers, self.run, self.m = block, layers, neighbours, m
        first = next(iter(layers[0].weights.values()))
        generator = torch.Generator(first.device).manual_seed(options.seed + m)
        draw = functools.partial(torch.randn, device=first.device, dtype=first.dtype, generator=generator)
        self.x = draw(m, block.hidden)
        self.heads = block.heads
        if self.heads is not None:
            of = self.heads
            self.caches = [draw(2, m, of.pairs, options.context, of.width) for _ in layers]
            turns = torch.arange(of.width // 2, device=first.device) * 0.1
            self.angles = torch.stack((turns.cos(), turns.sin())).to(first.dtype)

    def __call__(self, gemms: Mapping[str, Gemm], adds: frozenset[str] = frozenset(), fused: bool = False) -> Any:
        """The hidden state after all layers, normed. `gemms` compute the parts, those in `adds` with the residual, and
        gate_up, if `fused`, with the activation."""
        x, residual = self.x, torch.zeros_like(self.x)

        def normed(weight: torch.Tensor, added: bool) -> torch.Tensor:
            nonlocal residual
            if added:  # x is the sum
                residual = x
                return self.run.normed(x, weight)
            y, residual = self.run.added_and_normed(x, residual, weight)
            return y

        added = False  # whether x has the residual in it
        for i, layer in enumerate(self.layers):

            def of(part: str, a: torch.Tensor, layer: Layer = layer) -> torch.Tensor:
                more = layer.biases.get(part), residual if part in adds else None
                return gemms[part](a, layer.weights[part], *more)

            if self.heads is not None:
                qkv, cache = of("qkv", normed(layer.norms[0], added)), self.caches[i]
                queries, cache[:, :, :, -1] = self.run.turned(qkv, self.angles, self.heads.pairs)
                attended = scaled_dot_product_attention(queries, cache[0], cache[1])
                # Heads in another order than they came, as they lie in memory: nothing is to be copied.
                x, added = of("o", attended.transpose(1, 2).reshape(self.m, -1)), "o" in adds
            if "down" in self.block.ways:
                between = of("gate_up", normed(layer.norms[1], added))
                x, added = of("down", between if fused else self.run.gated(between)), "down" in adds
        return normed(self.layers[0].norms[0], added)


def opened(archive: Path) -> Library:
    """An archive as plugins of servers open it: torch computes what its own kernels are faster at."""
    return load(archive, on_miss="torch", on_slower="torch", capture_workspaces="shared")


class DecodeReplay:
    """Steps of the layers of a block that an archive serves, as `aot.tune.in_graph.Replay`."""

    def __init__(self, archive: Path, block: Block, options: GraphOptions) -> None:
        self.lib = opened(archive)
        self.block, self.options = block, options
        of = next(iter(block.ways.values()))[0]
        self.neighbours = Neighbours.compiled().with_norms_of(self.lib, of.a, block.hidden)
        self.layers = layers_of(block, options)
        self._step: Step | None = None

    def times(self, m: int, choices: Mapping[str, Choice], repeats: int) -> dict[str, Timing]:
        """Microseconds of a layer by the name of a choice, in turns; without those that cannot be launched."""
        if self._step is None or self._step.m != m:
            self._step = None  # before the next one's caches are made
            self._step = Step(self.block, self.layers, m, self.options, self.neighbours)
        step = self._step
        runs = {name: functools.partial(run, step, self.lib, choice) for name, choice in choices.items()}
        return per_layer(runs, repeats, len(self.layers))


def per_layer(runs: Mapping[str, Callable[[Any], Any]], repeats: int, layers: int) -> dict[str, Timing]:
    """Microseconds of a layer, of steps that are each captured in a graph, timed in turns."""
    try:
        with torch.no_grad():
            found = time_interleaved(runs, [cast(Any, None)], _STEP_US, repeats, 1.0)
    except torch.OutOfMemoryError as error:
        raise MeasureError(f"there is no memory for steps of {layers} layers: {error}") from None
    return {name: Timing(t.us / layers, t.spread, bimodal=t.bimodal) for name, t in found.items()}


def layers_of(block: Block, options: GraphOptions) -> list[Layer]:
    """As many as are asked for, or more, if their weights would stay in L2."""
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    count = max(options.layers, -(-_TIMES_L2 * l2_bytes // block.weight_bytes))
    generator = torch.Generator("cuda").manual_seed(options.seed)
    return [Layer(block, "cuda", generator) for _ in range(count)]


def run(step: Step, lib: Library, choice: Choice, _: Any = None) -> Any:
    """The step as a choice has it."""
    ways = dict(zip(step.block.ways, choice, strict=True))
    gemms = {part: gemm_of(lib, way) for part, way in ways.items()}
    adds = frozenset(part for part, way in ways.items() if way.parts.residual)
    return step(gemms, adds, "gate_up" in ways and ways["gate_up"].parts.gated)


def gemm_of(lib: Library, way: Signature) -> Gemm:
    """What calls `lib` for a signature."""

    def gemm(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        epilogue, overlap = way.parts.activation_word, way.overlap
        found: torch.Tensor = lib.gemm(a, b, bias=bias, residual=residual, epilogue=epilogue, overlap=overlap)
        return found

    return gemm
