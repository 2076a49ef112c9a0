"""What of measuring needs no GPU: the order of turns, what power bounds, how the GPU backend launches and announces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aot.search.h200 import LOAD
from aot.tune import halving, measure
from aot.tune.gemm.operands import OperandSet
from aot.tune.operation import unusual
from aot.tune.options import TuneOptions
from aot.tune.timing import Timing
from aot.version import UNKNOWN, own_version
from runtime.errors import DeviceError
from runtime.gemm.signature import Signature

pytest.importorskip("torch")

from aot.tune import gpu


def test_weights_that_say_nothing_of_unusual_sets_have_none() -> None:
    weights: Any = SimpleNamespace(operands=lambda m: [m])
    assert unusual(weights, 3) == ()
    weights.unusual = lambda m: [m]
    assert unusual(weights, 3) == [3]


def test_power_bounds_large_problems_only() -> None:
    large = Signature("bf16", "bf16", "bf16", "f32", "none", 8192, 8192)
    assert [m for m in (16, 128, 512, 4096) if measure.power_bound(large, m)] == [128, 512, 4096]


def test_short_launches_are_bound_by_power_where_operations_take_longer_than_memory() -> None:
    small = Signature("bf16", "bf16", "bf16", "f32", "none", 2048, 2048)
    assert [m for m in (16, 128, 512, 4096) if measure.power_bound(small, m)] == [512, 4096]


def test_contenders_are_replayed_in_turns_once_all_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[str] = []

    class Graph:
        asked, replays = 4, measure.Contender.replays

        def __init__(self, name: str) -> None:
            self.name, self.events = name, list[Any]()

        def replay(self, times: int = 1, timed: bool = True) -> None:
            replayed.append(self.name * times if timed else ".")
            self.events += [times] * timed

        def timing(self) -> Timing:
            return Timing.of([1.0] * len(self.events))

    monkeypatch.setattr(measure, "capture", lambda contenders, *_: {name: Graph(name) for name in contenders})
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: None)
    none: Any = None
    contenders = {"a": none, "b": none, "c": none}
    measure.time_interleaved(contenders, [], 1.0, 3, 1.0, lambda: replayed.append("!"))
    assert "".join(replayed) == "!......abccbabca"
    replayed.clear()
    rounds = iter([False, True])
    clock = iter([10.0, 10.0001, 10.0009, 10.0011, 11.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    measure.time_interleaved(contenders, [], 1.0, 2, 1.0, lambda: None, 1e3, lambda found: next(rounds))
    assert "".join(replayed) == "......" + 2 * "......abccba", "none is timed on a GPU that was idle"
    measure._settle([], 1e12)  # nobody is waited for
    replayed.clear()
    clock = iter([10.0, 11.0] * 2)
    graphs = cast(Any, {"a": Graph("a"), "b": Graph("b")})
    for _ in range(2):
        found = measure.time_in_turn(graphs, 2, launches=5, warm_up=0)
        assert [len(of.samples) for of in found.values()] == [2, 2], "of this call alone"
    assert "".join(replayed) == 2 * ".aabbbbaa", "a sample has as many launches as are asked for, and a busy GPU"


def test_nobody_is_timed_while_a_sustained_load_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[tuple[str, float, bool]] = []
    us = {"a": 100.0, "b": 200.0, "c": 50.0}

    class Graph:
        count = 5

        def __init__(self, name: str) -> None:
            self.name = name

        def replay(self, times: int, timed: bool) -> None:
            replayed.append((self.name, times * self.count * us[self.name], timed))

        def timing(self) -> Timing:
            return Timing(1.0, 0.0)

    monkeypatch.setattr(measure, "capture", lambda contenders, *_: {name: Graph(name) for name in contenders})
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: replayed.append(("|", 0.0, False)))
    measure.time_sustained(dict.fromkeys(us), [], 1.0, us, lambda: replayed.append(("!", 0.0, False)))  # type: ignore[arg-type]
    words = "".join(name.upper() if timed else name for name, _, timed in replayed)
    assert words == "!abcaAAAAbBBBBcCCCC|", "the first follows the last, as each follows another"
    settled = sum(taken for name, taken, _ in replayed[1:4])
    assert LOAD.settle_us <= settled < 1.02 * LOAD.settle_us
    assert all(taken >= LOAD.own_us for _, taken, timed in replayed[4:-1] if not timed)
    assert all(LOAD.sample_us <= taken <= 1.1 * LOAD.sample_us for _, taken, timed in replayed if timed)
    assert sum(taken for _, taken, _ in replayed) == pytest.approx(LOAD.us(3), rel=0.01)


class Backend(gpu.GpuBackend):
    """The GPU's backend with functions that are called and no GPU; `log` has what was announced and called."""

    def __init__(self, **functions: Any) -> None:
        self.careful, self.log = False, list[Any]()
        self.announce = lambda name, m: self.log.append((name, m))
        self.library = SimpleNamespace(functions=functions)  # type: ignore[assignment]
        self.baselines = {SIGNATURE: ("torch.mm", lambda o: self.log.append("torch.mm"))}


SIGNATURE = Signature("bf16", "bf16", "bf16", "f32", "none", 512, 512)
OPERANDS: Any = OperandSet("a", "b", "d", {"scale_a": "sa", "scale_b": "sb", "bias": "c"})


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "current_stream", lambda: 7)
    monkeypatch.setattr(gpu.torch.cuda, "is_current_stream_capturing", lambda: False)


def test_a_function_is_announced_and_called_with_all_operands_in_order() -> None:
    called: list[Any] = []
    backend = Backend(f=lambda *given, stream: called.append((given, stream)))
    backend.launch("f", 33)(OPERANDS)
    assert (backend.log, called) == ([("f", 33)], [(("a", "b", "d", "sa", "sb", "c"), 7)])


def test_an_error_of_the_device_is_the_functions_own_only_while_the_context_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*given: Any, stream: Any) -> None:
        raise DeviceError("cuLaunchKernelEx failed")

    monkeypatch.setattr(gpu.torch.cuda, "synchronize", lambda: None)
    with pytest.raises(DeviceError):
        Backend(f=fails).launch("f", 33)(OPERANDS)

    def poisoned() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu.torch.cuda, "synchronize", poisoned)
    with pytest.raises(RuntimeError, match="illegal memory"):
        Backend(f=fails).launch("f", 33)(OPERANDS)


@pytest.mark.parametrize("careful", [False, True])
def test_replays_are_announced_as_nobodys_unless_each_is_timed_alone(
    monkeypatch: pytest.MonkeyPatch, careful: bool
) -> None:
    settled = list[float]()

    def time_interleaved(
        launches: Any, operands: Any, floor: float, repeats: int, graph: float, *more: Any, settle_us: float = 0.0
    ) -> Any:
        for launch in launches.values():
            launch(OPERANDS)
        for captured in more[:1]:
            captured()
        backend.log.append("replay")
        settled.append(settle_us)
        return {name: Timing(1.0, 0.0) for name in launches}

    monkeypatch.setattr(measure, "time_interleaved", time_interleaved)
    backend = Backend(f=lambda *given, stream: None, g=lambda *given, stream: None)
    backend.careful = careful
    found = gpu.GpuBench(backend, SIGNATURE, 64, []).time(["f", "g", "torch.mm"], 2, 100.0)
    assert list(found) == ["f", "g", "torch.mm"]
    alone = [("f", 64), "replay", ("g", 64), "replay", ("", 64), "torch.mm", "replay"]
    together = [("f", 64), ("g", 64), ("", 64), "torch.mm", ("", 64), "replay"]
    assert backend.log == (alone if careful else together)
    assert set(settled) == {0.0}
    if careful:
        bench = gpu.GpuBench(backend, SIGNATURE, 64, [])
        bench.power_bound = True
        bench.time(["f"], 2, 100.0)
        assert settled[-1] == 25e3, "as its neighbours that are timed in turn after load"


class Clock:
    """A stream, events and a graph of a GPU that is none: launches take what they say, and none begins early."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = self
        self.now_us, self.captured = 0.0, list[float]()
        self.capturing = False

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self, stream: Any) -> None:
                self.at = clock.now_us

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

        class Graph:
            replays = 0

            def capture_begin(self) -> None:
                clock.capturing, clock.captured = True, []

            def capture_end(self) -> None:
                clock.capturing, self.us = False, sum(clock.captured)

            def replay(self) -> None:
                clock.now_us += self.us * (1 if self.replays else 9)  # the first one also brings it to the device
                self.replays += 1

        monkeypatch.setattr(measure.torch.cuda, "Event", Event)
        monkeypatch.setattr(measure.torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(measure.torch.cuda, "stream", contextlib.nullcontext)

    def synchronize(self) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def launch(self, us: float) -> Callable[[Any], None]:
        def launched(operands: Any) -> None:
            if self.capturing:
                self.captured.append(us)
            else:
                self.now_us += us + 500.0  # of the host

        return launched


def test_a_graph_of_what_takes_far_longer_than_was_expected_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch dequantises an expert's weights for milliseconds where a grouped GEMM takes microseconds."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(measure.torch.cuda, "Stream", lambda: clock)
    monkeypatch.setattr(measure.torch.cuda, "current_stream", lambda: clock)
    us = {"as expected": 10.0, "slower": 75.0, "far slower": 100.0, "slowest": 5700.0, "nothing": 1e-9}
    launches: Any = {name: clock.launch(each) for name, each in us.items()}
    graphs = measure.capture(launches, [None] * 5, floor_us=10.0, graph_us=1000.0)  # type: ignore[list-item]
    counts = {"as expected": 100, "slower": 100, "far slower": 80, "slowest": 2, "nothing": 100}
    assert {name: graph.count for name, graph in graphs.items()} == counts, "by what the device takes, not the host"
    for name, graph in graphs.items():
        assert [graph.replays(launches) for launches in (1, 100, 250)] == [1, 1, 3], "samples of as many graphs"
        graph.replay()  # as before what is timed
        graph.events.clear()
        graph.replay(2)
        assert graph.timing().us == pytest.approx(us[name])
    (alone,) = measure.capture({"slowest": launches["slowest"]}, [None], 10.0, 1000.0).values()  # type: ignore[list-item]
    assert alone.count == 1, "which finds L2 cold without a second set"


def test_where_power_bounds_graphs_are_captured_once_and_load_comes_before_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = Signature("bf16", "bf16", "bf16", "f32", "none", 8192, 8192)
    captured, timed, alone = list[list[str]](), list[tuple[list[str], int, float, int]](), list[list[str]]()

    def capture(launches: Any, operands: Any, floor_us: float, graph_us: float) -> Any:
        captured.append(list(launches))
        assert graph_us >= len(operands) * floor_us, "a graph reads all operands"
        return {name: SimpleNamespace() for name in launches if name != "fails"}

    def time_in_turn(graphs: Any, repeats: int, settle_us: float, launches: int, warm_up: int) -> dict[str, Timing]:
        timed.append((list(graphs), repeats, settle_us, launches))
        assert not warm_up
        return {name: Timing(1.0, 0.0) for name in graphs}

    def time_interleaved(launches: Any, *_: Any) -> dict[str, Timing]:
        alone.append(list(launches))
        return {name: Timing(1.0, 0.0) for name in launches}

    monkeypatch.setattr(measure, "capture", capture)
    monkeypatch.setattr(measure, "time_in_turn", time_in_turn)
    monkeypatch.setattr(measure, "time_interleaved", time_interleaved)
    backend = Backend(**dict.fromkeys(("f", "g", "fails"), lambda *given, stream: None))
    backend.careful = False
    backend.baselines[large] = backend.baselines[SIGNATURE]
    for m in (16, 4096):
        bench = gpu.GpuBench(backend, large, m, [OPERANDS] * 3)
        assert bench.power_bound == (m == 4096)
        halving.measure(bench, m, ["f", "fails", "g"], TuneOptions())
        halving.glance(bench, ["f"])
    everyone = ["f", "g", "torch.mm"]
    assert alone == [["f", "fails", "g"], ["f", "fails", "g", "torch.mm"], ["f", "torch.mm"]]
    assert [names for names in captured if names] == [["f", "fails", "g", "torch.mm"]]
    assert timed == [(["f", "g"], 3, 50e3, 1), (everyone, 5, 10e3, 2), (["f", "torch.mm"], 4, 25e3, 1)]


def test_what_is_timed_after_a_sustained_load_waits_until_the_clock_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append)
    monkeypatch.setattr(gpu, "time", clock)
    monkeypatch.setattr(measure, "time_interleaved", lambda launches, *_: {})
    monkeypatch.setattr(measure, "time_sustained", lambda launches, *_: {})
    backend = Backend(f=lambda *given, stream: None)
    backend.careful = False
    bench = gpu.GpuBench(backend, SIGNATURE, 64, [])
    bench.time(["f"], 2, 100.0)
    bench.sustained({"f": 1.0})
    now[0] += 0.02
    gpu.GpuBench(backend, SIGNATURE, 128, []).time(["f"], 2, 100.0)
    now[0] += 1.0
    bench.time(["f"], 2, 100.0)
    assert slept == [0.0, pytest.approx(measure.RECOVER_S - 0.02), 0.0]


def test_where_times_are_from_names_the_version_of_a_tree_that_was_never_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    properties = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, L2_cache_size=60 << 20
    )
    monkeypatch.setattr(measure.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(measure.torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(measure, "Driver", lambda: SimpleNamespace(cuda_version="13.0"))
    monkeypatch.setattr(metadata, "version", nothing_installed)
    found = measure.environment()
    assert (found["gpu"], found["cute_aot"]) == ("NVIDIA H200", own_version())
    assert found["cute_aot"] != UNKNOWN
