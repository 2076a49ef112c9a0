"""Captures that share workspaces, on a recording driver: how much memory that takes, when it is allocated, who has it,
and when it is given back."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import ArgumentError, DeviceError, Library, WorkspaceError
from runtime.container.archive import Archive
from runtime.device.workspace import Need, Workspaces
from runtime.limits import MAX_SHARED_WORKSPACE_BYTES
from runtime.serve.options import Options

from . import universal_archives
from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, entry, gemm_record, signature, write_archive

MIB = 1 << 20
CTAS = 132
# What vLLM 0.25 captures by default, for 256 sequences or more (`VllmConfig._set_cudagraph_sizes`).
VLLM_CAPTURES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
LAYERS = 32  # of Llama-3.1-8B; each is a piece of the model that vLLM captures by itself
N, K = 4096, 14336  # of its down projection


def stream_k(name: str, tile_elements: int) -> dict[str, Any]:
    """A function with the workspaces of `stream_k`: f32 partial sums of a tile, and counters, for each CTA."""
    return gemm_record(
        name, workspaces=((4 * tile_elements, "max_active_clusters", False), (256, "max_active_clusters", True))
    )


PLAIN = gemm_record("plain")
SMALL = stream_k("small", 128 * 128)  # 8.3 MiB
LARGE = stream_k("large", 168 * 128)  # 10.9 MiB
HUGE = stream_k("huge", 1024 * 128)  # 66 MiB
DOWN = [(64, "plain"), (128, "small"), (256, "plain"), (None, "large")]
Make = Callable[..., Library]


@pytest.fixture
def driver(torch: FakeTorch) -> RecordingDriver:
    return RecordingDriver(active_clusters=CTAS)


@pytest.fixture
def write(tmp_path: Path, driver: RecordingDriver) -> Callable[..., Path]:
    """Write an archive for the down projection; its path, which is always the same."""

    def call(ranges: list[tuple[int | None, str]], candidates: list[Any] | None = None) -> Path:
        records = [PLAIN, SMALL, LARGE, HUGE]
        row = entry(signature(N, K), ranges, candidates)
        driver.kernels |= write_archive(tmp_path / "model.aot", records, [row])
        return tmp_path / "model.aot"

    return call


@pytest.fixture
def make(write: Callable[..., Path], driver: RecordingDriver) -> Make:
    def call(ranges: Any = DOWN, candidates: Any = None, *, capture_workspaces: str = "shared") -> Library:
        path = write(ranges, candidates)
        return Library(Archive.open(path), driver, Options(capture_workspaces=capture_workspaces))

    return call


def gemm(library: Library, m: int, stream: int = 5) -> tuple[int, ...]:
    """Call it; the workspaces of the launch."""
    driver: Any = library._driver
    library.gemm(FakeTensor((m, K)), FakeTensor((N, K)), out=FakeTensor((m, N)), stream=stream)
    return tuple(int.from_bytes(p, "little") for p in driver.launches[-1].parameters[3:])


def captured(library: Library, capture: int, m: int, stream: int = 5) -> tuple[int, ...]:
    """The same within a capture."""
    driver: Any = library._driver
    driver.captures[stream] = capture
    try:
        return gemm(library, m, stream)
    finally:
        del driver.captures[stream]


def freed(driver: RecordingDriver) -> list[int]:
    return [pointer for what, pointer, *_ in (e for e in driver.log if e[0] == "free")]


def test_captures_of_a_server_take_what_preload_allocated(make: Make, driver: RecordingDriver) -> None:
    library = make()
    library.preload(tokens=VLLM_CAPTURES)
    held = library.stats().workspace_bytes
    assert held == library.stats().shared_workspace_bytes == CTAS * (4 * 168 * 128 + 256) <= MAX_SHARED_WORKSPACE_BYTES
    used, captures = set(), 0
    for m in reversed(VLLM_CAPTURES):  # vLLM begins with the largest
        for _layer in range(LAYERS):
            captures += 1
            used.add(captured(library, captures, m))
    assert used - {()} == {tuple(driver.allocated)}
    assert library.stats().workspace_bytes == held
    assert captures == len(driver.launches) == 51 * LAYERS


def test_captures_allocate_nothing_between_warm_ups_and_requests(make: Make, driver: RecordingDriver) -> None:
    """A server runs each size outside of graphs before it captures it, on the same stream, and serves on another."""
    library = make()
    library.preload(tokens=VLLM_CAPTURES)
    gemm(library, 8192, stream=3)
    for number, m in enumerate(reversed(VLLM_CAPTURES)):
        gemm(library, m)
        before = len(driver.allocated)
        captured(library, number, m)
        assert len(driver.allocated) == before
        gemm(library, m, stream=3)
    assert library.stats().workspace_bytes <= MAX_SHARED_WORKSPACE_BYTES


def test_captures_that_do_not_share_take_more_than_a_server_has_left(make: Make) -> None:
    """Which is why they may."""
    library = make(capture_workspaces="own")
    library.preload(tokens=VLLM_CAPTURES)
    assert library.stats().workspace_bytes == 0
    for number in range(12 * LAYERS):
        captured(library, number, 128)
    assert library.stats().workspace_bytes > 3 << 30
    assert library.stats().shared_workspace_bytes == 0


def test_streams_outside_captures_have_workspaces_of_their_own(make: Make) -> None:
    library = make()
    library.preload(tokens=[128])
    sets = [gemm(library, 128, 5), gemm(library, 128, 7), captured(library, 1, 128, 5)]
    assert len({pointer for pair in sets for pointer in pair}) == 6
    assert gemm(library, 128, 5) == sets[0]
    assert library.stats().workspace_bytes > library.stats().shared_workspace_bytes


def test_streams_of_one_capture_have_workspaces_of_their_own(make: Make) -> None:
    """They run at the same time; those of other captures, whatever their handles, take the same sets in order."""
    library = make()
    library.preload(tokens=[128])
    first, second = captured(library, 1, 128, stream=5), captured(library, 1, 128, stream=7)
    assert not set(first) & set(second)
    assert captured(library, 1, 128, stream=5) == first
    assert captured(library, 2, 128, stream=9) == first
    assert captured(library, 2, 128, stream=5) == second


def test_without_preload_the_first_capture_allocates(make: Make, driver: RecordingDriver) -> None:
    library = make()
    assert captured(library, 1, 128) == captured(library, 2, 128) == tuple(driver.allocated)


def test_what_forms_may_choose_is_reserved_for(tmp_path: Path, driver: RecordingDriver) -> None:
    of_forms = universal_archives.library(tmp_path, driver, capture_workspaces="shared")
    of_forms.preload()
    reserved = list(driver.allocated)
    driver.captures[5] = 1
    assert universal_archives.launched(of_forms, driver, 512, 1001, stream=5) == "shared"
    assert list(driver.allocated) == reserved != []


def test_needs_of_no_known_shape_are_those_of_one_block_on_each_multiprocessor(make: Make) -> None:
    function = make().functions["small"]
    assert function.likely_needs() == (Need(66 * 4 * 128 * 128, False), Need(66 * 256, True))


def test_a_pool_that_grew_is_what_later_captures_have(make: Make, driver: RecordingDriver) -> None:
    library = make()
    small = captured(library, 1, 128)
    library.preload(tokens=[512])
    later = captured(library, 2, 128)
    assert later[0] != small[0]
    assert later == captured(library, 1, 128) == captured(library, 3, 512)
    assert freed(driver) == [], "a graph may hold it"


def test_a_kernel_that_needs_more_than_the_pool_gives_way_to_the_runner_up(make: Make) -> None:
    library = make([(None, "huge")], [(128, ["huge", "small"])])
    assert set(library.preload(tokens=[128])) == {"huge", "small"}
    captured(library, 1, 128)
    gemm(library, 128)
    assert library.stats().launches_by_function == {"small": 2}
    assert library.stats().shared_workspace_bytes == CTAS * (4 * 128 * 128 + 256)


def test_a_kernel_that_needs_more_serves_where_captures_do_not_share(make: Make) -> None:
    library = make([(None, "huge")], [(128, ["huge", "small"])], capture_workspaces="own")
    captured(library, 1, 128)
    assert library.stats().launches_by_function == {"huge": 1}


def test_more_streams_in_a_capture_than_the_pool_has_room_for_are_an_error(make: Make, driver: RecordingDriver) -> None:
    library = make()
    library.preload(tokens=[512])
    for stream in range(1, 6):
        captured(library, 1, 512, stream)
    with pytest.raises(WorkspaceError, match=r"captures share 67108864 bytes .* at most, of which .* are held"):
        captured(library, 1, 512, 6)
    assert library.stats().shared_workspace_bytes <= MAX_SHARED_WORKSPACE_BYTES
    captured(library, 2, 512, 6)


def test_memory_that_is_not_there_is_told_by_preload(make: Make, driver: RecordingDriver) -> None:
    library = make()
    driver.failing = "cuMemAlloc"
    with pytest.raises(DeviceError, match="cuMemAlloc"):
        library.preload(tokens=[128])
    driver.failing = ""
    library.preload(tokens=[128])
    assert library.stats().shared_workspace_bytes > 0


def test_reload_reserves_before_it_serves_and_drop_old_frees_what_was_outgrown(
    make: Make, write: Callable[..., Path], driver: RecordingDriver
) -> None:
    library = make([(None, "small")])
    library.preload(tokens=[128])
    small = captured(library, 1, 128)
    write([(None, "large")])
    assert library.reload()
    held = library.stats().shared_workspace_bytes
    large = captured(library, 2, 128)
    assert library.stats().shared_workspace_bytes == held
    assert freed(driver) == [], "a graph from before may be replayed"
    library.drop_old()
    assert freed(driver) == [small[0]]
    assert library.stats().shared_workspace_bytes == CTAS * (4 * 168 * 128 + 256)
    assert captured(library, 3, 128) == large


def test_what_was_outgrown_since_a_reload_is_kept_until_the_next(
    make: Make, write: Callable[..., Path], driver: RecordingDriver
) -> None:
    """A graph that was captured after the first reload may hold it, and be replayed after `drop_old`."""
    library = make([(256, "small"), (None, "large")])
    captured(library, 1, 128)
    write([(192, "small"), (None, "large")])
    assert library.reload()
    small = captured(library, 2, 128)
    captured(library, 3, 512)
    library.drop_old()
    assert freed(driver) == []
    write([(256, "small"), (None, "large")])
    assert library.reload()
    library.drop_old()
    assert freed(driver) == [small[0]]


def test_a_reload_that_fails_takes_nothing_more(
    make: Make, write: Callable[..., Path], driver: RecordingDriver
) -> None:
    library = make([(None, "small")])
    library.preload(tokens=[128])
    before = captured(library, 1, 128)
    write([(None, "large")])
    driver.failing = "cuMemAlloc"
    with pytest.raises(DeviceError, match="cuMemAlloc"):
        library.reload()
    driver.failing = ""
    assert captured(library, 2, 128) == before
    assert library.stats().workspaces == 2


def test_forgetting_captures_keeps_what_they_share(make: Make, driver: RecordingDriver) -> None:
    library = make()
    small = captured(library, 1, 128)
    large = captured(library, 2, 512)
    library.forget_captures()
    assert freed(driver) == [small[0]]
    assert captured(library, 3, 512) == large


def test_closing_frees_everything_once(make: Make, driver: RecordingDriver) -> None:
    library = make()
    for m in (128, 512):
        gemm(library, m)
        captured(library, m, m)
    library.close()
    library.close()
    assert sorted(freed(driver)) == sorted(driver.allocated)
    assert library.stats().shared_workspace_bytes == 0


def test_preloading_allocates_for_several_functions_at_once(driver: RecordingDriver) -> None:
    """The largest of each use, not one after the other."""
    workspaces = Workspaces(driver, shared=True)
    workspaces.reserve([(Need(64, True),), (Need(512, False), Need(32, True)), (Need(128, True), Need(8, False))])
    assert sorted(driver.allocated.values()) == [(128, True), (512, False)]


def test_nothing_is_reserved_after_closing(driver: RecordingDriver) -> None:
    workspaces = Workspaces(driver, shared=True)
    workspaces.close()
    with pytest.raises(DeviceError, match="closed"):
        workspaces.reserve([(Need(64, True),)])
    assert driver.allocated == {}


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ArgumentError, match=re.escape("must be one of ('own', 'shared'), found 'pool'")):
        Options(capture_workspaces="pool").check()


def test_metrics_say_what_captures_share(make: Make) -> None:
    library = make()
    library.preload(tokens=[128])
    held = library.stats().shared_workspace_bytes
    assert f'\ncute_aot_shared_workspace_bytes{{library="model.aot"}} {held}\n' in library.prometheus()
    assert library.stats().to_json()["shared_workspace_bytes"] == held > 0
