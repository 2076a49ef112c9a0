"""What a library says of what it did: counts that are exact, and text that Prometheus reads."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import ArgumentError, DeviceError, KernelMiss, Library, Stats, native
from runtime.container.archive import Archive
from runtime.serve import counters
from runtime.serve.counters import MAX_REFUSALS, Counter, Counters
from runtime.serve.options import Options
from runtime.serve.stats import prometheus_text

from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, entry, gemm_record, signature, write_archive

N, K = 2048, 512
Make = Callable[..., tuple[Library, RecordingDriver]]


@pytest.fixture
def make(tmp_path: Path, torch: FakeTorch) -> Make:
    def make(**options: Any) -> tuple[Library, RecordingDriver]:
        path = tmp_path / "model.aot"
        records = [
            gemm_record("small"),
            gemm_record("large"),
            gemm_record("spacious", workspaces=((4096, None, True),)),
        ]
        entries = [
            entry(signature(N, K), [(16, "small"), (None, "large")]),
            entry(signature(256, K), [(None, "spacious")]),
            entry(signature(512, K), [(None, "small")], state="ranked"),
        ]
        driver = RecordingDriver(kernels=write_archive(path, records, entries))
        return Library(Archive.open(path), driver, Options(**options)), driver

    return make


def gemm(library: Library, m: int, n: int = N, **more: Any) -> None:
    library.gemm(FakeTensor((m, K)), FakeTensor((n, K)), out=FakeTensor((m, n)), **more)


def test_new_library_has_done_nothing(make: Make) -> None:
    library, _ = make()
    stats = library.stats()
    assert [a.digest for a in stats.archives] == [stats.digest] == [library.digest]
    counts = {k: v for k, v in stats._asdict().items() if k not in ("archives", "digest", "native")}
    assert not any(counts.values()), counts


def test_launches_are_counted_by_function_first_and_later_calls_alike(make: Make) -> None:
    library, driver = make()
    for m in (1, 16, 16, 17, 300, 300, 300):
        gemm(library, m)
    library.functions["large"](FakeTensor((3, K)), FakeTensor((N, K)), FakeTensor((3, N)))
    stats = library.stats()
    assert stats.launches_by_function == {"large": 5, "small": 3}
    assert stats.launches == len(driver.launches) == 8
    assert (stats.plans_made, stats.plans_held) == (5, 4)  # that of the function is its own


def test_launches_that_allocate_or_take_a_stream_are_counted_too(make: Make) -> None:
    library, driver = make()
    a, b = FakeTensor((5, K)), FakeTensor((N, K))
    for _ in range(3):
        library.gemm(a, b)
        library.gemm(a, b, stream=7)
        gemm(library, 5, 256)
    assert library.stats().launches == len(driver.launches) == 9


def test_failed_launch_is_not_counted(make: Make) -> None:
    library, driver = make()
    gemm(library, 5)
    driver.failing = "cuLaunchKernelEx"
    with pytest.raises(DeviceError):
        gemm(library, 5)
    assert library.stats().launches == 1


def test_threads_lose_no_count(make: Make) -> None:
    library, driver = make()
    gemm(library, 5)
    driver.quiet = True
    interval, threads, calls = sys.getswitchinterval(), 6, 2000
    sys.setswitchinterval(1e-6)
    seen: list[int] = []

    def work() -> None:
        a, b, out = FakeTensor((5, K)), FakeTensor((N, K)), FakeTensor((5, N))
        for _ in range(calls):
            library.gemm(a, b, out=out)

    try:
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            seen.append(library.stats().launches)
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen == sorted(seen), "a counter went backwards"
    assert library.stats().launches == threads * calls + 1


def test_counter_of_python_counts_as_the_native_one_does() -> None:
    for counter in [Counter()] + ([] if native._native is None else [native._native.Counter()]):
        assert [counter.read(), counter.read()] == [0, 0]
        for _ in range(3):
            counter.add()
        assert [counter.read(), counter.read()] == [3, 3]


def test_library_counts_without_native_code(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_native", None)
    monkeypatch.setattr(native, "_native", None)
    library, _ = make()
    for _ in range(3):
        gemm(library, 5)
    assert isinstance(library._counters.launches_of("small"), Counter)
    assert library.stats().launches_by_function == {"small": 3}


@pytest.mark.parametrize("loaded", [False, True])
def test_stats_say_whether_native_code_is_in_use(make: Make, monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    monkeypatch.setattr("runtime.serve.library.native_loaded", loaded)
    library, _ = make()
    assert library.stats().native is loaded
    assert library.stats().to_json()["native"] is loaded
    assert f'\ncute_aot_native{{library="model.aot"}} {int(loaded)}\n' in library.prometheus()


def test_kernels_and_workspaces_that_are_held_are_counted_in_bytes(make: Make) -> None:
    library, driver = make()
    gemm(library, 5)
    gemm(library, 5, 256, stream=3)
    gemm(library, 5, 256, stream=4)
    stats = library.stats()
    cubins = [what for name, what in (e for e in driver.log if e[0] == "load")]
    assert (stats.kernels_loaded, stats.kernel_bytes, stats.loads) == (2, sum(map(len, cubins)), 2)
    assert 0 < stats.longest_load_seconds <= stats.load_seconds < 2 * stats.longest_load_seconds + 1e-9
    assert (stats.workspaces, stats.workspace_bytes) == (2, 8192)
    library.close()
    stats = library.stats()
    assert (stats.kernels_loaded, stats.kernel_bytes, stats.loads) == (0, 0, 2)
    assert (stats.workspaces, stats.workspace_bytes) == (0, 0)


def test_misses_say_why(make: Make) -> None:
    library, driver = make(require="tuned")
    driver.shared_bytes = 64 << 10
    for n in (8, 8, 512, N):
        with pytest.raises(KernelMiss):
            gemm(library, 5, n)
    stats = library.stats()
    key = "bf16_bf16_bf16_f32_none_n{}_k512".format
    found = [(r.signature, r.reason, r.misses, r.fallbacks) for r in stats.refusals]
    assert found == [
        (key(8), "no entry", 2, 0),
        (key(N), "no kernel runs", 1, 0),
        (key(512), "not tuned", 1, 0),
    ]
    assert (stats.misses, stats.fallbacks, library.misses) == (4, 0, {})


def test_fallbacks_are_misses_that_torch_computed(make: Make) -> None:
    library, _ = make(on_miss="torch")
    gemm(library, 5, 8)
    gemm(library, 5, 8)
    library.gemm(FakeTensor((16, K), strides=(1, 16)), FakeTensor((N, K)), out=FakeTensor((16, N)))
    with pytest.raises(KernelMiss):
        library.gemm(FakeTensor((16, K), "float8_e4m3fn"), FakeTensor((8, K), "float8_e4m3fn"))
    with pytest.raises(ArgumentError):
        library.gemm(FakeTensor((16, K)), FakeTensor((N, K + 8)))
    stats = library.stats()
    assert (stats.misses, stats.fallbacks) == (4, 3)
    key = "bf16_bf16_bf16_f32_none_n{}_k512".format
    assert library.misses == {key(8): 2, f"{key(N)}, strides of a": 1}


def test_refusals_are_bounded() -> None:
    found = Counters()
    for n in range(MAX_REFUSALS + 10):
        found.refused(f"n{n}", "no entry", True)
    assert len(found.refusals) == MAX_REFUSALS + 1
    assert found.refusals[counters.OTHERS].misses == 10


def test_stats_are_json(make: Make) -> None:
    library, _ = make(on_miss="torch")
    gemm(library, 5)
    gemm(library, 5, 8)
    obj = json.loads(json.dumps(library.stats().to_json()))
    assert obj["launches"] == obj["misses"] == obj["fallbacks"] == 1
    assert obj["refusals"][0]["reason"] == "no entry"
    assert obj["archives"][0]["digest"] == library.digest


# --- Prometheus ---

LABELS = r'\{(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)+\}'
SAMPLE = re.compile(rf"([a-z_]+)({LABELS})? (-?[0-9][0-9.e+-]*)")


def parse(text: str) -> dict[str, dict[str, float]]:
    """By metric and labels; fails where the text breaks a rule of the format."""
    assert text.endswith("\n")
    types: dict[str, str] = {}
    found: dict[str, dict[str, float]] = {}
    described = ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            described = line.split(" ")[2]
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == described, "a type is behind its help"
            assert name not in types
            assert (kind == "counter") == name.endswith("_total")
            types[name] = kind
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] == list(types)[-1], "the samples of a metric are together"
        assert match[2] not in found.setdefault(match[1], {}), "one series twice"
        found[match[1]][match[2]] = float(match[3])
    return found


def test_prometheus_reads_it(make: Make) -> None:
    library, _ = make(on_miss="torch")
    gemm(library, 5)
    gemm(library, 5)
    gemm(library, 50)
    gemm(library, 5, 8)
    found = parse(library.prometheus())
    assert found["cute_aot_launches_total"] == {
        '{library="model.aot",function="large"}': 1,
        '{library="model.aot",function="small"}': 2,
    }
    missed = '{library="model.aot",signature="bf16_bf16_bf16_f32_none_n8_k512",reason="no entry"}'
    assert found["cute_aot_misses_total"] == found["cute_aot_fallbacks_total"] == {missed: 1}
    assert found["cute_aot_kernels_loaded"] == {'{library="model.aot"}': 2}
    assert found["cute_aot_load_seconds_total"]['{library="model.aot"}'] == library.stats().load_seconds
    (info,) = found["cute_aot_archive_info"]
    assert library.digest in info


def test_labels_are_escaped(make: Make) -> None:
    library, _ = make()
    gemm(library, 5)
    text = library.prometheus('a "b" \\ c\nd')
    parse(text)
    assert r'library="a \"b\" \\ c\nd"' in text


def test_several_libraries_share_one_text(make: Make) -> None:
    library, _ = make()
    stats: Stats = library.stats()
    found = parse(prometheus_text({"one": stats, "two": stats._replace(reloads=3)}))
    assert found["cute_aot_reloads_total"] == {'{library="one"}': 0, '{library="two"}': 3}
