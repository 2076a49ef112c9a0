"""Calls of operations that are like one before: launched by its plan, and only where their pointers fit it."""

from __future__ import annotations

import dataclasses
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from runtime import Library
from runtime.container.archive import Archive
from runtime.errors import ArgumentError, LayoutError
from runtime.grouped_gemm import GroupedGemm
from runtime.serve import native_plans, planned_call

from .grouped_gemm.test_operation import PLAIN, driver, library, tensors
from .recording_driver import FakeTensor, FakeTorch, RecordingDriver
from .rmsnorm.archives import write_added

__all__ = ["driver", "library"]  # fixtures


def pointers(launch: Any) -> list[int]:
    return [struct.unpack_from("<Q", p)[0] for p in launch.parameters[:4]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The signatures of calls that the operation was asked about."""
    found: list[str] = []
    ask = GroupedGemm.ask

    def noting(*given: Any, **words: Any) -> Any:
        result = ask(*given, **words)
        found.append(result.signature.key())
        return result

    monkeypatch.setattr(GroupedGemm, "ask", noting)
    return found


def test_a_call_like_one_before_is_launched_by_its_plan(
    library: Library, driver: RecordingDriver, asked: list[str]
) -> None:
    launches = library.stats().launches
    for _ in range(3):
        a, b, ends = tensors()
        out = FakeTensor((9, 256))
        assert library.call("grouped_gemm", a, b, ends, out=out) is out
        assert pointers(driver.launches[-1]) == [t.data_ptr() for t in (a, b, ends, out)]
    assert asked == [PLAIN.key()], "once"
    assert library.stats().launches == launches + 3, "each is counted"


def test_what_the_first_call_made_is_made_again(
    library: Library, driver: RecordingDriver, asked: list[str], torch: FakeTorch
) -> None:
    for _ in range(3):
        a, b, ends = tensors()
        out = library.call("grouped_gemm", a, b, ends)
        assert (out.shape, out.dtype) == ((9, 256), a.dtype)
        assert pointers(driver.launches[-1]) == [t.data_ptr() for t in (a, b, ends, out)]
    assert asked == [PLAIN.key()], "once"
    given = FakeTensor((9, 256))
    assert library.call("grouped_gemm", *tensors(), out=given) is given


def test_a_call_is_told_from_others_by_words_names_and_tensors() -> None:
    """Of which a plan depends on all but pointers."""
    x, y = FakeTensor((4, 8)), FakeTensor((4, 8))

    def key(*tensors: Any, of: str = "some", **words: Any) -> Any:
        return planned_call.call_of(of, tensors, words).key()

    same = key(x, y, flag=True)
    assert key(y, x, flag=True) == same, "pointers are no part of it"
    strided = FakeTensor((4, 8), strides=(16, 1))
    others = [
        key(x, y, flag=True, of="another"),
        key(x, y, flag=1),
        key(x, y, flag=1.0),
        key(x, y, other=True),
        key(x, flag=True),
        key(x, y, True),
        key(x, y, flag=(True,)),
        key(x, y, flag=None),
        key(x, strided, flag=True),
        key(strided, y, flag=True),
        key(x, FakeTensor((4, 8), "float16"), flag=True),
        key(x, FakeTensor((4, 8), device=1), flag=True),
        key(x, FakeTensor((8, 4)), flag=True),
    ]
    assert len({same, *others}) == 1 + len(others)
    assert key(x, first=x, second=(y, x)) != key(x, second=x, first=(y, x))
    assert key(x, object()) is None


def test_a_table_that_is_full_begins_anew_with_all_plans(
    library: Library, driver: RecordingDriver, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_plans, "MAX_PLANS", 2)
    for m in (3, 4, 5, 3, 5):
        a, b, ends = tensors(m)
        out = FakeTensor((m, 256))
        assert library.call("grouped_gemm", a, b, ends, out=out) is out
        assert pointers(driver.launches[-1]) == [t.data_ptr() for t in (a, b, ends, out)]
    if library._now.calls.native.held():
        assert len(asked) == 4, "of three rows twice"
        assert len(library._now.calls.planned) == 2


def test_native_code_launches_what_has_a_plan(library: Library, driver: RecordingDriver, torch: FakeTorch) -> None:
    """Without asking Python's plan, whose pointers it would be given in another order."""
    out = FakeTensor((9, 256))
    library.call("grouped_gemm", *tensors(), out=out)
    calls = library._now.calls
    if not calls.native.held():
        assert not calls.native.by_words
        return
    calls.planned.clear()
    a, b, ends = tensors()
    assert library.call("grouped_gemm", a, b, ends, out=out) is out
    assert not calls.planned, "which a call that is planned anew would be in"
    assert pointers(driver.launches[-1]) == [t.data_ptr() for t in (a, b, ends, out)]
    over = FakeTensor((9, 256))
    over.pointer = b.data_ptr() + 16
    with pytest.raises(ArgumentError, match="shares memory with another operand"):
        library.call("grouped_gemm", a, b, ends, out=over)
    ((launch, tag, _),) = calls.native.by_words.values()
    calls.clear()
    assert launch(tag, None, a, b, ends, out) is None
    library.call("grouped_gemm", a, b, ends, out=out)
    ((_, again, _),) = calls.native.by_words.values()
    assert again != tag, "which another thread may be about to call by"


@pytest.mark.parametrize(
    "change",
    [
        {"m": 10},
        {"overlap": "launch"},
        {"epilogue": "swiglu"},
        {"stream": 7},
    ],
    ids=str,
)
def test_another_call_is_asked_for(
    library: Library, driver: RecordingDriver, asked: list[str], change: dict[str, Any]
) -> None:
    library.call("grouped_gemm", *tensors(), out=FakeTensor((9, 256)))
    more = {"out": FakeTensor((change.get("m", 9), 128 if "epilogue" in change else 256))} | change
    m = more.pop("m", 9)
    library.call("grouped_gemm", *tensors(m), **more)
    assert len(driver.launches) == 2
    assert driver.launches[-1].stream == change.get("stream", driver.launches[0].stream)
    assert len(asked) == (1 if "stream" in change else 2), "the stream is no part of a plan"


def test_pointers_that_do_not_fit_a_plan_are_refused_as_by_a_first_call(library: Library) -> None:
    a, b, ends = tensors()
    out = FakeTensor((9, 256))
    library.call("grouped_gemm", a, b, ends, out=out)
    askew = FakeTensor((9, 128))
    askew.pointer += 2
    with pytest.raises(LayoutError, match="must start at a multiple of 16 bytes"):
        library.call("grouped_gemm", askew, b, ends, out=out)
    over = FakeTensor((9, 256))
    over.pointer = b.data_ptr() + 16
    with pytest.raises(ArgumentError, match="shares memory with another operand"):
        library.call("grouped_gemm", a, b, ends, out=over)
    gone = FakeTensor((9, 128))
    gone.pointer = 0
    with pytest.raises(ArgumentError):
        library.call("grouped_gemm", gone, b, ends, out=out)


def test_a_call_whose_pointers_do_not_tell_its_tensors_apart_is_asked_for_each_time(
    library: Library, driver: RecordingDriver, asked: list[str]
) -> None:
    a, b, ends = tensors()
    a.pointer = b.data_ptr()  # both are read alone
    for _ in range(2):
        library.call("grouped_gemm", a, b, ends, out=FakeTensor((9, 256)))
    assert (len(asked), len(driver.launches)) == (2, 2)
    assert not library._now.calls.planned


def test_a_reload_forgets_plans(library: Library, driver: RecordingDriver, tmp_path: Path, asked: list[str]) -> None:
    a, b, ends = tensors()
    out = FakeTensor((9, 256))
    library.call("grouped_gemm", a, b, ends, out=out)
    (planned,) = library._now.calls.planned.values()
    assert isinstance(planned, planned_call.PlannedCall)
    before = library._now
    library._serve(library._generation([Archive.open(tmp_path / "experts.aot")]))
    before.retire()
    assert not before.calls.planned
    library.call("grouped_gemm", a, b, ends, out=out)
    assert len(asked) == 2
    assert library.entry(dataclasses.replace(PLAIN)) is not None


def test_a_call_whose_archive_is_replaced_and_unloaded_meanwhile_is_launched_by_what_replaced_it(
    library: Library, driver: RecordingDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_added(tmp_path / "norms.aot")
    ask, reloads = GroupedGemm.ask, iter([[tmp_path / "experts.aot", tmp_path / "norms.aot"]])

    def work(paths: list[Path]) -> None:
        library.reload(paths)
        library.drop_old()

    def while_another_thread_reloads(*given: Any, **words: Any) -> Any:
        for paths in reloads:
            worker = threading.Thread(target=work, args=(paths,))
            worker.start()
            worker.join()
        return ask(*given, **words)

    monkeypatch.setattr(GroupedGemm, "ask", while_another_thread_reloads)
    out = FakeTensor((9, 256))
    assert library.call("grouped_gemm", *tensors(), out=out) is out
    assert len(library.stats().archives) == 2
    assert len(driver.launches) == 1
