"""Archives tuned on several kinds of GPU of one target: which entries serve, what is said of it, and options of serving
that pick among what an entry has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime import ArgumentError, KernelMiss, Library, RecordError
from runtime.device.gpus import Gpu
from runtime.gemm.signature import Signature
from runtime.serve.layers import open_archives
from runtime.serve.options import Options

from .recording_driver import (
    H200,
    FakeTensor,
    FakeTorch,
    RecordingDriver,
    entry,
    gemm_record,
    signature,
    write_archive,
)

K = 512
H100, H20 = Gpu("NVIDIA H100 80GB HBM3", 132, 3_352), Gpu("NVIDIA H20", 78, 4_000)
A, B = signature(1024, K), signature(2048, K)
NAMES = ("small", "large", "other", "shared")
RECORDS = [
    gemm_record("small", tile_m=16),
    gemm_record("large", tile_m=128),
    gemm_record("other"),
    gemm_record("shared", workspaces=((4096, None, True),)),
    gemm_record("bounded", max_m=99),
]


@pytest.fixture
def driver(torch: FakeTorch) -> RecordingDriver:
    return RecordingDriver()


def opened(
    folder: Path, driver: RecordingDriver, *layers: list[dict[str, Any]], records: Any = RECORDS, **options: Any
) -> Library:
    """A library of archives of `records`, each with the entries of one of `layers`."""
    paths = [folder / f"{i}.aot" for i in range(len(layers))]
    for path, entries in zip(paths, layers, strict=True):
        driver.kernels |= write_archive(path, records, entries)
    return Library(open_archives(paths), driver, Options(**options))


def launched(library: Library, driver: RecordingDriver, m: int, n: int = 1024, **more: Any) -> str:
    library.gemm(FakeTensor((m, K)), FakeTensor((n, K)), out=FakeTensor((m, n)), **more)
    return driver.launches[-1].symbol.removeprefix("kernel_")


# --- kinds of GPU ---


@pytest.mark.parametrize(
    ("here", "serves", "said"),
    [
        (H200, "large", []),
        (H20, "small", []),
        (H20._replace(memory_gbps=0), "small", []),
        (H100, "large", ["1 of 2 signatures were tuned on NVIDIA H200 (132 SMs, 4800 GB/s), and this is NVIDIA H100"]),
        (Gpu("NVIDIA H30", 80, 4_000), "small", ["tuned on NVIDIA H20 (78 SMs, 4000 GB/s), and this is NVIDIA H30"]),
    ],
)
def test_what_was_tuned_on_the_nearest_kind_serves_and_another_is_told_of_once(
    tmp_path: Path, driver: RecordingDriver, caplog: pytest.LogCaptureFixture, here: Gpu, serves: str, said: list[str]
) -> None:
    driver.kind = here
    rows = [
        entry(A, [(None, "small")], gpu=H20),
        entry(A, [(None, "large")], gpu=H200),
        entry(A, [(None, "other")], state="ranked"),
        entry(B, [(None, "other")]),
    ]
    library = opened(tmp_path, driver, rows)
    before = library.stats()
    assert (before.gpu, before.tuned_for, driver.count("gpu")) == (None, (), 0)
    for m in (5, 6):
        assert launched(library, driver, m) == serves
    assert launched(library, driver, 5, 2048) == "other"
    library.preload()
    found = [message for message in caplog.messages if "others may be faster" in message]
    assert len(found) == len(said)
    assert all(part in message for part, message in zip(said, found, strict=True))
    stats = library.stats()
    kind = {"small": H20, "large": H200}[serves]
    assert (stats.gpu, stats.tuned_for) == (here.words(), (kind.words(),))
    assert json.loads(json.dumps(stats.to_json()))["tuned_for"] == [kind.words()]
    text = library.prometheus("x")
    assert f'cute_aot_gpu_info{{library="x",gpu="{here.words()}"}} 1\n' in text
    assert f'cute_aot_tuned_for_info{{library="x",gpu="{kind.words()}"}} 1\n' in text


def test_entries_that_were_ranked_are_tuned_for_no_kind(
    tmp_path: Path, driver: RecordingDriver, caplog: pytest.LogCaptureFixture
) -> None:
    library = opened(tmp_path, driver, [entry(A, [(None, "small")], state="ranked", gpu=H20)])
    assert launched(library, driver, 5) == "small"
    assert library.stats().tuned_for == ()
    assert not [message for message in caplog.messages if "others may be faster" in message]


def test_layer_takes_the_place_of_every_kind_of_its_signature(tmp_path: Path, driver: RecordingDriver) -> None:
    """What is wrong in the base and right in the patch must not serve on, whatever it was tuned on."""
    base = [entry(A, [(None, "small")], gpu=H200), entry(B, [(None, "small")], gpu=H200)]
    library = opened(tmp_path, driver, base, [entry(A, [(None, "large")], gpu=H20)])
    assert launched(library, driver, 5) == "large"
    assert launched(library, driver, 5, 2048) == "small"


# --- equal bits at every M ---

DENSE = entry(
    A,
    [(16, "small"), (64, "large"), (None, "other")],
    candidates=[[1, ["small", "large"]]],
    invariant=[(99, "bounded"), (None, "large")],
    torch_faster=[(3, None)],
)


def test_batch_invariant_library_has_the_functions_for_equal_bits_and_no_others(
    tmp_path: Path, driver: RecordingDriver
) -> None:
    library = opened(tmp_path, driver, [DENSE], batch_invariant=True)
    ms = (5000, 1, 2, 16, 17, 64, 65, 99, 100)
    assert [launched(library, driver, m) for m in ms] == ["large", *["bounded"] * 7, "large"]
    assert set(library.preload(tokens=[1, 100])) == {"bounded", "large"}
    assert library.entry(Signature.from_json(A)).names == ("bounded", "large")
    plain = opened(tmp_path, driver, [DENSE])
    assert [launched(plain, driver, m) for m in (16, 17, 65)] == ["small", "large", "other"]


def test_batch_invariant_library_misses_where_no_function_is_named(tmp_path: Path, driver: RecordingDriver) -> None:
    library = opened(tmp_path, driver, [DENSE, entry(B, [(None, "small")])], batch_invariant=True)
    for _ in range(2):
        with pytest.raises(KernelMiss, match=r"n2048_k512 on sm_90a has no function that serves every M") as miss:
            launched(library, driver, 5, 2048)
    assert miss.value.reason == "not batch-invariant"
    assert [(r.reason, r.misses) for r in library.stats().refusals] == [("not batch-invariant", 2)]
    with pytest.raises(KernelMiss, match="every M"):
        library.entry(Signature.from_json(B))
    assert set(library.preload()) == {"bounded", "large"}
    with pytest.raises(KernelMiss, match="no such entry for this GPU with a function for equal bits"):
        library.preload(only=[Signature.from_json(B)])


def test_only_what_gives_equal_bits_stands_in_for_a_function_that_cannot_run(
    tmp_path: Path, driver: RecordingDriver
) -> None:
    """ "bounded" does not take 100 rows."""
    alone = entry(A, [(None, "small")], candidates=[[1, ["small", "large"]]], invariant=[(None, "bounded")])
    library = opened(tmp_path, driver, [alone], batch_invariant=True)
    assert launched(library, driver, 50) == "bounded"
    with pytest.raises(KernelMiss, match="no kernel for"):
        launched(library, driver, 100)
    two = entry(A, [(None, "small")], candidates=[[1, ["small"]]], invariant=[(8, "other"), (None, "bounded")])
    library = opened(tmp_path, driver, [two], batch_invariant=True)
    assert [launched(library, driver, m) for m in (8, 9, 99, 100)] == ["other", "bounded", "bounded", "other"]


def test_batch_invariant_library_refuses_a_function_whose_ctas_share_tiles(
    tmp_path: Path, driver: RecordingDriver
) -> None:
    made = entry(A, [(None, "shared")], invariant=[(8, "small"), (None, "shared")])
    library = opened(tmp_path, driver, [made], batch_invariant=True)
    assert launched(library, driver, 5) == "small"
    with pytest.raises(RecordError, match=r"shared to give .* at every M, but it takes the workspace space0"):
        launched(library, driver, 9)


def test_reload_goes_on_with_what_gives_equal_bits(tmp_path: Path, driver: RecordingDriver) -> None:
    library = opened(tmp_path, driver, [DENSE], batch_invariant=True)
    library.preload()
    made = entry(A, [(None, "small")], invariant=[(8, "other"), (None, "large")])
    driver.kernels |= write_archive(tmp_path / "new.aot", RECORDS, [made])
    assert library.reload(tmp_path / "new.aot")
    assert [launched(library, driver, m) for m in (5, 9)] == ["other", "large"]


def test_layer_takes_the_place_of_what_gives_equal_bits_too(tmp_path: Path, driver: RecordingDriver) -> None:
    base = [DENSE, entry(B, [(None, "small")], invariant=[(None, "small")])]
    patch = entry(A, [(None, "small")], invariant=[(4, "other"), (None, "small")])
    library = opened(tmp_path, driver, base, [patch], batch_invariant=True)
    assert [launched(library, driver, m) for m in (4, 5, 5000)] == ["other", "small", "small"]
    assert launched(library, driver, 5, 2048) == "small"


def test_batch_invariant_is_an_option_that_is_checked_and_told(tmp_path: Path, driver: RecordingDriver) -> None:
    found = [opened(tmp_path, driver, [DENSE], batch_invariant=flag) for flag in (False, True)]
    assert found[0].identity != found[1].identity
    path = tmp_path / "0.aot"
    with pytest.raises(ArgumentError, match="batch_invariant must be True or False, found 1"):
        runtime.load(path, batch_invariant=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="batch_invariant=True with on_miss='torch'"):
        runtime.load(path, on_miss="torch", batch_invariant=True)
