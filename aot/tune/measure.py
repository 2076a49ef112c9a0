"""Check and time functions on the GPU: references, poisoned outputs, CUDA-graph replays on cold L2.

A measurement is one signature of an operation at one M; what is particular to the operation comes from
`aot.tune.operation`. Needs torch and a GPU, and no compiler. Knows nothing of archives or of what is done with the
figures.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.device.driver import Driver
from runtime.errors import AotError, WorkspaceError
from runtime.numbers.dtypes import DTYPES, DType
from runtime.program.operation import Signature

from ..search.h200 import LOAD, ROOF
from ..version import UNKNOWN, own_version
from .elements import is_poison, name_of, poisoned
from .operation import OperandSet, Weights, tuning, unusual
from .roofline import expected_us, power_bound
from .timing import Timing, turns

__all__ = ["Timing", "expected_us", "power_bound"]  # for those who measure, with what is defined here

MOST_LAUNCHES = 400  # of a graph, which needs no more operands
# A single wrong tile disappears in the norm of a large matrix, so no element may be off by more than its own rounding,
# half a unit in the last place, plus this share of the root mean square of its row, or of all where that is larger:
# rows have scales of their own, and a gate makes its partner's error, and its row's elements, as much larger.
MAX_ELEMENT_ERROR = 0.06
_GUARD_ROWS = 8
# Figures from a device that was idle between two replays would include its wake-up.
_WARMUP_REPLAYS = 2
_GRAPHS_OF_A_SAMPLE = 4  # under sustained load
# How many times as long as was meant a graph of something slow may take, if it has more than two launches: torch may
# dequantise weights for milliseconds.
_MOST_TIMES_GRAPH_US = 8
RECOVER_S = 0.06  # after which the clock has come back from a sustained load

Launch = Callable[[Any], Any]  # given operands of its operation


class MeasureError(AotError):
    """The machine cannot measure what was asked."""


def tolerance(dtype: str) -> float:
    """The relative error, in the norm, that a result of an element type may have where nothing but its own rounding and
    the order of sums makes one.

    Raises:
        MeasureError: nobody has said what it is.
    """
    found = DTYPES[dtype].tolerance
    if not found:
        known = ", ".join(t.name for t in DTYPES.values() if t.tolerance)
        raise MeasureError(f"how exact a result in {dtype} must be is not known; it is for {known}")
    return found


@dataclass(frozen=True)
class _Expected:
    """What an output of an element type must be, and how far from it, in the norm, it may be."""

    value: torch.Tensor
    left: torch.Tensor | None  # where an output must stay as it is, None for nowhere
    dtype: DType
    max_error: float
    norm: float
    scale: torch.Tensor  # of each row, which its elements' errors are held against: its rms, or that of all if larger

    @classmethod
    def of(cls, value: torch.Tensor, dtype: str, max_error: float) -> _Expected:
        left = value.isnan()
        some = bool(left.any())
        if some:
            value = value.masked_fill(left, 0.0)
        norm, rms = value.norm().item(), value.square().sum().div((~left).sum().clamp_min(1)).sqrt().item()
        # Zeros have no scale of their own.
        scale = value.square().mean(-1, keepdim=True).sqrt_().clamp_min_(rms or 1.0)
        return cls(value, left if some else None, DTYPES[dtype], max_error, norm or 1.0, scale)


def check(signature: Signature, m: int, weights: Weights, launches: Mapping[str, Launch]) -> dict[str, float | str]:
    """Run each function once on fresh random inputs and compare it with a reference in float32 or float64.

    Outputs start as NaN with guard rows behind them, and must stay so where a reference is NaN. Returns for each
    function its relative error, that of the worst output, or the reason why it is wrong.
    """
    results: dict[str, float | str] = {}
    for operands in (weights.operands(m)[0], *unusual(weights, m)):
        right = {name: launch for name, launch in launches.items() if not isinstance(results.get(name), str)}
        for name, found in _check_one(signature, operands, right, weights.device).items():
            before = results.get(name, 0.0)
            results[name] = found if isinstance(found, str) or isinstance(before, str) else max(found, before)
    return results


def _check_one(
    signature: Signature, operands: OperandSet, launches: Mapping[str, Launch], device: str
) -> dict[str, float | str]:
    """`check` on one set of operands."""
    measures = tuning(signature).measures()
    unwritten, wanted = operands.outputs(), measures.reference(signature, operands)
    expected = {
        name: _Expected.of(wanted[name], name_of(out), measures.max_error(signature, name))
        for name, out in unwritten.items()
    }
    results: dict[str, float | str] = {}
    for name, launch in launches.items():
        guarded = {output: _guarded(like, device) for output, like in unwritten.items()}
        outputs = {output: whole[:-_GUARD_ROWS].view(unwritten[output].shape) for output, whole in guarded.items()}
        try:
            launch(operands.writing(outputs))
        except WorkspaceError:
            raise  # there is no memory left, which is not this function's fault
        except AotError as failure:  # this function's own; a failure of the device itself ends the run
            results[name] = f"{type(failure).__name__}: {failure}"
            continue
        if device == "cuda":
            torch.cuda.synchronize()
        errors = []
        for output, of in expected.items():
            found = _judge(guarded[output], outputs[output], of)
            if isinstance(found, str):
                results[name] = found
                break
            errors.append(found)
        else:
            results[name] = max(errors)
    return results


def _guarded(like: torch.Tensor, device: str) -> torch.Tensor:
    """The rows of an output, all in one dimension, and guard rows behind them, full of NaN."""
    columns = like.shape[-1]
    return poisoned((like.numel() // columns + _GUARD_ROWS, columns), name_of(like), device)


def _judge(guarded: torch.Tensor, out: torch.Tensor, expected: _Expected) -> float | str:
    """The relative error of `out`, behind which `guarded` has guard rows, or what is wrong with it."""
    if not is_poison(guarded[-_GUARD_ROWS:]).all():
        return "it writes behind the output"
    d, value = expected.dtype, expected.value
    if d.mantissa_bits is None:
        wrong = int((out.to(value.dtype) != value).sum())
        return f"{wrong} of {out.numel()} integers are wrong" if wrong else 0.0
    difference = out.to(value.dtype).sub_(value)
    if expected.left is not None:
        if not difference[expected.left].isnan().all():
            return "it writes what it must leave as it is"
        difference.masked_fill_(expected.left, 0.0)
    error = difference.norm().item() / expected.norm
    worst = difference.abs_().sub_(value.abs() * d.rounding).div_(expected.scale).max().item()
    limit = expected.max_error
    if d.narrow:  # of few elements one large one may decide, and alone it errs by its own rounding
        limit *= 1 + 2 / math.sqrt(out.numel())
    if math.isnan(error):
        return "it leaves part of the output unwritten, or writes NaN"
    if error > limit or worst > MAX_ELEMENT_ERROR:
        return f"relative error {error:.2e} (limit {limit:.1e}), worst element {worst:.2f} rms of its row"
    return error


class Contender:
    """One function captured into a CUDA graph of `count` launches over rotated operands.

    These are the launches `asked` for, which were to take `graph_us` together; fewer, but two of two sets of operands,
    where they take more than `_MOST_TIMES_GRAPH_US` of it.
    """

    def __init__(
        self, launch: Launch, operands: Sequence[OperandSet], asked: int, stream: torch.cuda.Stream, graph_us: float
    ) -> None:
        self.asked = asked
        self.stream = stream
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []
        with torch.cuda.stream(stream):
            launch(operands[0])
            stream.synchronize()
            self._capture(launch, operands, min(asked, len(operands), 2))
            fit = int(_MOST_TIMES_GRAPH_US * graph_us / max(self._launch_us(), ROOF.launch_us))
            if min(asked, fit) > self.count:
                self._capture(launch, operands, min(asked, fit))

    def _capture(self, launch: Launch, operands: Sequence[OperandSet], count: int) -> None:
        self.count, self.graph = count, torch.cuda.CUDAGraph()
        self.graph.capture_begin()
        try:
            for i in range(count):
                launch(operands[i % len(operands)])
        finally:
            self.graph.capture_end()

    def _launch_us(self) -> float:
        """About how long a launch of the graph takes on the device, from what was not timed."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.graph.replay()
        start.record(self.stream)
        self.graph.replay()
        end.record(self.stream)
        self.stream.synchronize()
        return 1e3 * start.elapsed_time(end) / self.count

    def replays(self, launches: int) -> int:
        """How many make a sample of so many launches, if these take no longer than was expected."""
        return math.ceil(launches / self.asked)

    def replay(self, times: int = 1, timed: bool = True) -> None:
        """Queue `times` replays, as one sample."""
        with torch.cuda.stream(self.stream):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(self.stream)
            for _ in range(times):
                self.graph.replay()
            end.record(self.stream)
            if timed:
                self.events.append((start, end, times))

    def timing(self) -> Timing:
        """What the timed replays took; call after synchronising."""
        return Timing.of([start.elapsed_time(end) * 1e3 / (self.count * times) for start, end, times in self.events])


def time_interleaved(
    contenders: Mapping[str, Launch],
    operands: Sequence[OperandSet],
    floor_us: float,
    repeats: int,
    graph_us: float,
    captured: Callable[[], None] = lambda: None,
    settle_us: float = 0.0,
    enough: Callable[[Mapping[str, Timing]], bool] = lambda found: True,
) -> dict[str, Timing]:
    """Time launches in turn, each as a graph of about `graph_us` if it takes about `floor_us`, the least one can take,
    and of at most some times that where it takes longer.

    `captured` is called when every launch has run once and is captured, before the first that is timed. All are
    replayed for `settle_us` before they are timed, in which the clock becomes that of such a load. After `repeats`
    turns as many follow until `enough` holds of what was found, as it must some time. The samples of a timing are those
    of its turns, in order.

    Graphs hold two launches or more, unless one finds L2 cold without a second set of operands. A contender that cannot
    be launched at this shape (an `AotError`) is left out of the result.
    """
    graphs = capture(contenders, operands, floor_us, graph_us)
    captured()
    return time_in_turn(graphs, repeats, settle_us, enough=enough)


def time_in_turn(
    graphs: Mapping[str, Contender],
    repeats: int,
    settle_us: float = 0.0,
    launches: int = 1,
    warm_up: int = _WARMUP_REPLAYS,
    enough: Callable[[Mapping[str, Timing]], bool] = lambda found: True,
) -> dict[str, Timing]:
    """Time graphs as `time_interleaved` does, each sample of so many launches or more, but of graphs that have fewer
    than were asked for.

    Before the turns each graph is replayed `warm_up` times; the first one in any case, so that no sample begins on an
    idle GPU.
    """
    contenders = list(graphs.values())
    for graph in contenders:
        graph.events.clear()
    _settle(contenders, settle_us)
    while True:
        for graph in contenders * warm_up or contenders[:1]:
            graph.replay(timed=False)
        for order in turns(len(graphs), repeats):
            for place in order:
                graph = contenders[place]
                graph.replay(graph.replays(launches))
        torch.cuda.synchronize()
        found = {name: graph.timing() for name, graph in graphs.items()}
        if enough(found):
            return found


def _settle(graphs: Collection[Contender], for_us: float) -> None:
    """Replay graphs in turn until so much time is over."""
    end = time.perf_counter() + for_us / 1e6
    while graphs and time.perf_counter() < end:
        for graph in graphs:
            graph.replay(timed=False)
        torch.cuda.synchronize()


def time_sustained(
    contenders: Mapping[str, Launch],
    operands: Sequence[OperandSet],
    floor_us: float,
    us: Mapping[str, float],
    captured: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time launches as `time_interleaved` does, each without pause for long enough to meet the clock that its own power
    leaves it. In turns of a millisecond all share one clock, and what takes more energy an operation does not show.

    `us` says what each takes, about. Nobody is timed while the load begins, and the first follows the last as each
    follows another. What is timed next finds the clock low, unless it waits for `RECOVER_S`.
    """
    graphs = capture(contenders, operands, floor_us, LOAD.sample_us / _GRAPHS_OF_A_SAMPLE)
    captured()

    def replay(name: str, graph: Contender, for_us: float, timed: bool) -> None:
        graph.replay(math.ceil(for_us / (graph.count * us[name])), timed)

    for name, graph in graphs.items():
        replay(name, graph, LOAD.settle_us / len(graphs), False)
    for name, graph in graphs.items():
        replay(name, graph, LOAD.own_us, False)
        for _ in range(LOAD.samples):
            replay(name, graph, LOAD.sample_us, True)
    torch.cuda.synchronize()
    return {name: graph.timing() for name, graph in graphs.items()}


def capture(
    contenders: Mapping[str, Launch], operands: Sequence[OperandSet], floor_us: float, graph_us: float
) -> dict[str, Contender]:
    """Each contender's graph of about `graph_us`, without those that cannot be launched."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    count = min(max(math.ceil(graph_us / max(floor_us, ROOF.launch_us)), min(len(operands), 2)), MOST_LAUNCHES)
    graphs = {}
    for name, launch in contenders.items():
        try:
            graphs[name] = Contender(launch, operands, count, stream, graph_us)
        except WorkspaceError:
            raise
        except AotError:
            continue
    return graphs


def environment() -> dict[str, Any]:
    """The machine and the versions behind a measurement.

    Raises:
        MeasureError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise MeasureError("no CUDA GPU is available to measure on; run on a machine with one")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        # GPUs of one name differ; this tells them apart and no more.
        "gpu_id": hashlib.sha256(str(getattr(properties, "uuid", "")).encode()).hexdigest()[:8],
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "cuda_driver": Driver().cuda_version,
        "driver": _driver_version(),
        "cute_aot": own_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cublas": _cublas_version(),
    }


def _driver_version() -> str:
    """The kernel driver's version; it is in no driver API call."""
    try:
        with open("/proc/driver/nvidia/version") as f:
            words = f.readline().split()
    except OSError:
        return UNKNOWN
    return next((w for w in words if w[:1].isdigit() and "." in w), UNKNOWN)


def _cublas_version() -> str:
    import ctypes

    major_minor_patch = []
    try:
        library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).split('.')[0]}")
        for part in range(3):
            value = ctypes.c_int()
            library.cublasGetProperty(part, ctypes.byref(value))
            major_minor_patch.append(str(value.value))
    except (OSError, AttributeError):
        return UNKNOWN
    return ".".join(major_minor_patch)
