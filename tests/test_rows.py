"""Plans for new numbers of rows must be what a first call of that shape makes, and refuse what it refuses."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime import ArgumentError, KernelMiss, LayoutError, Library
from runtime.container.archive import Archive
from runtime.serve.gemm.plans import Plans

from .recording_driver import (
    FakeTensor,
    FakeTorch,
    Launched,
    RecordingDriver,
    entry,
    gemm_record,
    operands_record,
    signature,
    write_archive,
)

N, K, P = 512, 4160, 256
E4M3, F32 = "float8_e4m3fn", "float32"
FULL: dict[str, Any] = {"epilogue": "bias+swiglu+residual+scale", "scaling": "row_column", "dtype": "e4m3", "d": "bf16"}
SPACES = ((256, "max_active_clusters", False),)


def tiles_record() -> dict[str, Any]:
    """A function whose kernel takes the number of tiles of scales of A in place of M."""
    found = operands_record("tiles", signature(N, K, scaling="mxfp8", dtype="e4m3", d="bf16"))
    program = found["program"]
    program["values"] = [["m", 32], ["mb", 32]]
    launch = program["launches"][0]
    launch |= {"grid": [2, 2, 2], "block": [2, 2, 2], "shared_bytes": 3}  # a value more before the constants
    launch["parameters"][-1]["words"] = [[0, 4, 1]]
    return found


@pytest.fixture
def driver(tmp_path: Path, torch: FakeTorch) -> RecordingDriver:
    full = signature(N, K, **FULL)
    records = [
        gemm_record("small", tile_m=16),
        gemm_record("large", tile_m=128),
        gemm_record("bounded", tile_m=64, max_m=600),
        gemm_record("spaced", workspaces=SPACES),
        operands_record("full", full),
        tiles_record(),
    ]
    entries = [
        entry(signature(N, K), [(64, "small"), (None, "large")]),
        entry(signature(N, 512), [(None, "bounded")], candidates=[[16, ["bounded", "small"]]]),
        entry(signature(N, 1024), [(None, "spaced")]),
        entry(full, [(None, "full")]),
        entry(signature(N, K, scaling="mxfp8", dtype="e4m3", d="bf16"), [(None, "tiles")]),
    ]
    return RecordingDriver(kernels=write_archive(tmp_path / "model.aot", records, entries))


@pytest.fixture
def library(driver: RecordingDriver, tmp_path: Path) -> Library:
    return Library(Archive.open(tmp_path / "model.aot"), driver)


def plain(m: int, k: int = K, allocate: bool = False) -> dict[str, Any]:
    given = {"a": FakeTensor((m, k)), "b": FakeTensor((N, k))}
    return given if allocate else given | {"out": FakeTensor((m, N))}


def everything(m: int) -> dict[str, Any]:
    return {
        "a": FakeTensor((m, K), E4M3),
        "b": FakeTensor((N, K), E4M3),
        "out": FakeTensor((m, P)),
        "scale_a": FakeTensor((m, 1), F32),
        "scale_b": FakeTensor((N,), F32),
        "bias": FakeTensor((N,)),
        "residual": FakeTensor((m, P)),
        "scale_d": FakeTensor((), F32),
        "epilogue": "swiglu",
    }


def first_call(path: Path, given: dict[str, Any]) -> Launched:
    """What a library launches that has seen nothing before."""
    with Archive.open(path) as archive:
        kernels = {archive.cubin(n): {f"kernel_{n}": _sizes(archive, n)} for n in archive.functions}
    driver = RecordingDriver(kernels=kernels)
    library = Library(Archive.open(path), driver)
    library.gemm(**given)
    return driver.launches[-1]


def _sizes(archive: Archive, name: str) -> tuple[int, ...]:
    (launch,) = archive.record(name)["program"]["launches"]
    return tuple(parameter["size"] for parameter in launch["parameters"])


@pytest.mark.parametrize("make", [plain, everything, lambda m: plain(m, 512), lambda m: plain(m, 1024)])
def test_a_new_number_of_rows_launches_what_a_first_call_does(
    library: Library, driver: RecordingDriver, tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []
    real = Plans._make_plan

    def plan_gemm(*given: Any) -> Any:
        planned.append(1)
        return real(*given)

    monkeypatch.setattr(Plans, "_make_plan", plan_gemm)
    rng = random.Random(5)
    tokens = [333, 20, *(rng.randint(1, 2000) for _ in range(40)), N, K, 1, 2, 600, 601, 602]
    for m in tokens:
        given = make(m)
        library.gemm(**given)
        launched = driver.launches[-1]
        before = len(planned)
        again = first_call(tmp_path / "model.aot", given)
        del planned[before:]
        if given["a"].shape[1] == 1024:  # a workspace's address is the library's own
            launched, again = (replace(x, parameters=x.parameters[:3]) for x in (launched, again))
        assert launched == again, m
    # Planned in full are one row, the first call of each function, and what the program of "bounded" cannot serve.
    assert len(planned) <= 4 + sum(m > 600 for m in tokens if make(2)["a"].shape[1] == 512)


def tiled(m: int) -> dict[str, Any]:
    rows, blocks = -(-m // 128) * 128, -(-K // 128) * 4
    return {
        "a": FakeTensor((m, K), E4M3),
        "b": FakeTensor((N, K), E4M3),
        "out": FakeTensor((m, N)),
        "scale_a": FakeTensor((rows, blocks), "float8_e8m0fnu"),
        "scale_b": FakeTensor((N, blocks), "float8_e8m0fnu"),
    }


def test_tiles_of_scales_are_counted_anew(library: Library, driver: RecordingDriver, tmp_path: Path) -> None:
    """Their number depends on M too, so such a plan is none for other rows, even where there are as many scales."""
    for m in (128, 256, 1024, 130, 131, 256):
        given = tiled(m)
        library.gemm(**given)
        assert driver.launches[-1] == first_call(tmp_path / "model.aot", given)
        assert int.from_bytes(driver.launches[-1].parameters[-1], "little") == -(-m // 128)


def test_results_are_allocated_with_their_rows(library: Library, driver: RecordingDriver) -> None:
    for m in (100, 200, 333):
        assert library.gemm(**plain(m, allocate=True)).shape == (m, N)
    assert len(driver.launches) == 3


def test_what_is_wrong_with_a_call_of_new_rows_is_said(library: Library, driver: RecordingDriver) -> None:
    library.gemm(**plain(100))
    given = plain(200)
    with pytest.raises(LayoutError, match="a must start at a multiple of 16"):
        library.gemm(**given | {"a": FakeTensor((200, K), pointer=given["a"].pointer + 2)})
    with pytest.raises(ArgumentError, match="shares memory with a"):
        library.gemm(
            **plain(300)
            | {
                "out": FakeTensor((300, N), pointer=given["a"].pointer),
                "a": FakeTensor((300, K), pointer=given["a"].pointer),
            }
        )
    with pytest.raises(ArgumentError, match="out must have shape"):
        library.gemm(**plain(400) | {"out": FakeTensor((401, N))})
    with pytest.raises(ArgumentError, match="no memory behind it"):
        library.gemm(**plain(500) | {"a": FakeTensor((500, K), pointer=0)})
    freed = FakeTensor((600, K))
    freed.offset, freed.storage_bytes = 8, 0
    with pytest.raises(ArgumentError, match="no memory behind it"):
        library.gemm(**plain(600) | {"a": freed})
    with pytest.raises(ArgumentError, match="is on device 1"):
        library.gemm(**plain(700) | {"a": FakeTensor((700, K), device=1)})
    with pytest.raises(KernelMiss):
        library.gemm(**plain(800, 4168))
    assert len(driver.launches) == 1


def test_operands_with_other_rows_are_refused(library: Library, driver: RecordingDriver) -> None:
    library.gemm(**everything(100))
    library.gemm(**everything(N))
    with pytest.raises(ArgumentError, match="residual"):
        library.gemm(**everything(200) | {"residual": FakeTensor((100, P))})
    with pytest.raises(ArgumentError, match="scale_a"):
        library.gemm(**everything(200) | {"scale_a": FakeTensor((100, 1), F32)})
    with pytest.raises(ArgumentError, match="bias"):
        library.gemm(**everything(200) | {"bias": FakeTensor((200,))})
    assert len(driver.launches) == 2


def test_overlap_is_found_with_the_new_rows_extent(library: Library, driver: RecordingDriver) -> None:
    """The out of 100 rows ends before a; that of 200 reaches into it."""
    start = 1 << 50
    for m, shared in ((100, False), (200, True)):
        given = plain(m) | {
            "out": FakeTensor((m, N), pointer=start),
            "a": FakeTensor((m, K), pointer=start + 100 * N * 2),
        }
        if shared:
            with pytest.raises(ArgumentError, match="shares memory with a"):
                library.gemm(**given)
        else:
            library.gemm(**given)
    assert len(driver.launches) == 1


def test_overlap_of_what_else_has_rows_is_found_with_the_new_extent(library: Library, driver: RecordingDriver) -> None:
    """The residual of 100 rows ends before the out; that of 200 reaches into it, and so do the scales of 200."""
    start = 1 << 50
    for name, row_bytes, x in (
        ("residual", P * 2, lambda m: FakeTensor((m, P), pointer=start)),
        ("scale_a", 4, lambda m: FakeTensor((m, 1), F32, pointer=start)),
    ):
        library.gemm(**everything(100) | {name: x(100), "out": FakeTensor((100, P), pointer=start + 400 * row_bytes)})
        launched = len(driver.launches)
        library.gemm(**everything(150) | {name: x(150), "out": FakeTensor((150, P), pointer=start + 160 * row_bytes)})
        assert len(driver.launches) == launched + 1
        with pytest.raises(ArgumentError, match=f"shares memory with {name}"):
            library.gemm(
                **everything(200) | {name: x(200), "out": FakeTensor((200, P), pointer=start + 160 * row_bytes)}
            )


def record_of_two_sizes(**more: Any) -> dict[str, Any]:
    """From 500 rows on it takes twice as much shared memory."""
    record = gemm_record("f", **more)
    program = record["program"]
    first = len(program["values"]) + len(program["nodes"])
    program["nodes"] += [
        ["const", 32, 500],
        ["udiv", 32, 0, first],
        ["const", 32, 1],
        ["umin", 32, first + 1, first + 2],
        ["add", 32, first + 3, first + 2],
        ["zext", 64, first + 4],
        ["const", 64, 65536],
        ["mul", 64, first + 5, first + 6],
    ]
    program["launches"][0]["shared_bytes"] = first + 7
    return record


def test_plan_of_other_rows_is_like_the_last_plan_and_not_like_what_was_only_tried(
    tmp_path: Path, torch: FakeTorch
) -> None:
    records = [record_of_two_sizes(), gemm_record("g")]
    kernels = write_archive(
        tmp_path / "f.aot", records, [entry(signature(N, 512), [(600, "f"), (700, "g"), (None, "f")])]
    )
    driver = RecordingDriver(kernels=kernels)
    library = Library(Archive.open(tmp_path / "f.aot"), driver)
    library.gemm(**plain(100, 512))
    library.preload()  # tries 701 rows last
    for m, size in ((800, 1 << 17), (200, 1 << 16)):
        library.gemm(**plain(m, 512))
        assert driver.launches[-1].shared_bytes == size


def test_plan_of_other_rows_is_told_what_the_device_has_for_it(tmp_path: Path, torch: FakeTorch) -> None:
    """Of what takes twice as much shared memory half as many clusters are resident."""
    record = record_of_two_sizes(workspaces=((1 << 16, "max_active_clusters", False),))
    kernels = write_archive(tmp_path / "f.aot", [record], [entry(signature(N, 512), [(None, "f")])])

    class Driver(RecordingDriver):
        def max_active_clusters(self, kernel: Any, cluster: Any, block: Any, shared_bytes: int) -> int:
            return 66 if shared_bytes <= 65536 else 33

    driver = Driver(kernels=kernels)
    library = Library(Archive.open(tmp_path / "f.aot"), driver)
    for stream, m in enumerate((100, 1000, 2000, 300, 600, 200)):
        library.gemm(**plain(m, 512), stream=stream + 5)
        told = int.from_bytes(driver.launches[-1].parameters[2][12:16], "little")
        space, _ = list(driver.allocated.values())[-1]
        assert (told, space >> 16) == ((66, 66) if m < 500 else (33, 33)), m
