"""What a universal table serves: a prediction for any N and K, where no gemm entry is; and how it is read."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import ArgumentError, KernelMiss, Library, RecordError, native
from runtime.gemm.signature import MAJORS, Signature
from runtime.gemm.universal import PREDICTED
from runtime.numbers.epilogue import EPILOGUES
from runtime.numbers.scaling import SCALINGS
from runtime.program.operation import OVERLAPS
from runtime.serve import entries, plan, preload
from runtime.serve.layers import open_archives
from runtime.serve.options import Options
from runtime.torch.layers import choose

from .recording_driver import (
    FakeTensor,
    FakeTorch,
    RecordingDriver,
    entry,
    gemm_record,
    signature,
    write_archive,
)
from .universal_archives import (
    FORM,
    GPU,
    HOPPER,
    MOST,
    NAMES,
    PROGRAM,
    ROW,
    TABLE,
    K,
    checked_on,
    launched,
    library,
    of,
    universal,
    write,
)


@pytest.fixture
def driver(torch: FakeTorch) -> RecordingDriver:
    return RecordingDriver()


# --- choosing ---


@pytest.mark.parametrize("without_native", [False, True])
def test_the_least_time_at_the_exact_m_decides(monkeypatch: pytest.MonkeyPatch, without_native: bool) -> None:
    if without_native:
        monkeypatch.setattr(native, "costs", None)
    found = universal().entry(of(512), HOPPER, GPU)
    assert found is not None
    assert (found.state, found.target) == (PREDICTED, "sm_90a")
    assert [found.best(m) for m in (1, 55, 56, 999, 1000, 1001)] == ["few", "few", "many", "many", "many", "shared"]
    assert found.functions(56) == ("many", "few", "shared")
    assert found.us(10) == {"few": 110.0, "many": 151.0, "shared": 1000.0}


def test_functions_take_multiples_of_n_and_k_and_n_up_to_a_most() -> None:
    table = universal()
    for n, k, names in (
        (512, 8, {"few", "many", "shared"}),
        (1024, 8, set(NAMES)),
        (4096, 512, set(NAMES)),
        (5120, 512, {"few", "many", "shared"}),
        (512, 12, None),
        (20, 512, None),
    ):
        found = table.entry(of(n, k), HOPPER, GPU)
        assert (None if found is None else set(found.names)) == names


@pytest.mark.parametrize(
    "more", [{"epilogue": "silu"}, {"batch": 2}, {"b_major": "n"}, {"dtype": "f16"}, {"dtype": "e4m3", "d": "bf16"}]
)
def test_other_forms_are_not_guessed(more: dict[str, Any]) -> None:
    assert universal().entry(of(512, **more), HOPPER, GPU) is None


def test_other_gpus_are_not_served() -> None:
    assert universal().entry(of(512), (10, 0), GPU) is None
    assert universal().functions((10, 0)) == []


def test_a_form_that_relies_on_less_serves_what_promises_more() -> None:
    table = universal()
    found = table.entry(of(512, overlap="weights"), HOPPER, GPU)
    assert found is not None
    assert found.signature.overlap == "weights"
    early = copy.deepcopy(TABLE)
    alone = {"functions": [["few", 8, 8, MOST]], "equal_bits": [1], "program": 1}
    early["forms"].append(ROW | alone | {"form": FORM | {"overlap": "launch"}})
    early["programs"] = [PROGRAM, PROGRAM | {"results": [11]}]
    for overlap, names in (("serial", 3), ("launch", 1), ("weights", 1)):
        found = universal(early).entry(of(512, overlap=overlap), HOPPER, GPU)
        assert found is not None
        assert len(found.names) == names, overlap


def test_functions_that_give_equal_bits_take_turns_and_no_others_do(tmp_path: Path, driver: RecordingDriver) -> None:
    found = universal().entry(of(512), HOPPER, GPU)
    assert found is not None
    assert found.invariant == ("few", "many")
    lib = library(tmp_path, driver, batch_invariant=True)
    assert [launched(lib, driver, 512, m) for m in (4000, 1, 50, 56)] == ["many", "few", "few", "many"]
    assert lib.entry(of(512)).names == ("few", "many")
    alone = copy.deepcopy(TABLE)
    alone["forms"][0]["equal_bits"] = [0] * 4
    with pytest.raises(KernelMiss, match="no function that serves every M with equal bits"):
        launched(library(tmp_path, driver, obj=alone, batch_invariant=True), driver, 512, 1)


@pytest.mark.parametrize("numbers", list(itertools.product((0, 1, 2, 3), repeat=3)))
@pytest.mark.parametrize("without_native", [False, True])
def test_which_functions_give_equal_bits_is_the_same_whatever_m_is_asked_for_first(
    monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...], without_native: bool
) -> None:
    """And they are those of one number of which the best at each M loses least, from M = 1 to 8192."""
    if without_native:
        monkeypatch.setattr(native, "costs", None)
    if any(number > 1 + max(0, 0, *numbers[:i]) for i, number in enumerate(numbers)):
        return  # no table has that
    obj = copy.deepcopy(TABLE)
    obj["forms"][0]["equal_bits"] = [*numbers[:2], 0, numbers[2]]
    names, found = ("few", "many", "shared"), list[Any]()
    for first in (1, 70, 5000):
        entry = universal(obj).entry(of(512), HOPPER, GPU)
        assert entry is not None
        entry.best(first)
        if entry.invariant is None:
            assert not any(numbers)
            return
        only = entry.only_invariant()
        only.best(first)
        found.append((only.names, only.invariant, [only.best(m) for m in (1, 56, 5000)]))
        us = [entry.us(1 << i) for i in range(14)]
    assert found[0] == found[1] == found[2]
    same, again, _ = found[0]
    classes = {n: tuple(x for x, of in zip(names, numbers, strict=True) if of == n) for n in numbers if n}
    assert same == again
    assert same in classes.values()

    def behind(members: tuple[str, ...]) -> float:
        return math.fsum(math.log(min(at[name] for name in members) / min(at.values())) for at in us)

    assert behind(same) == min(map(behind, classes.values()))


def test_which_functions_give_equal_bits_follows_n_and_k(tmp_path: Path, driver: RecordingDriver) -> None:
    lib = library(tmp_path, driver, batch_invariant=True)
    assert {launched(lib, driver, 1024, m) for m in (1, 50, 4000)} == {"wide"}
    assert {launched(lib, driver, 5120, m) for m in (1, 4000)} == {"few", "many"}


@pytest.mark.parametrize("time", [0, -5, 1e308])
def test_times_that_mean_nothing_choose_a_function_all_the_same(time: float) -> None:
    """The first, where all are said to take as long; 1e308 squared has no finite value."""
    odd = PROGRAM | {"constants": [time], "operations": "mul", "operands": [6, 6 if time == 1e308 else 4]}
    found = universal(TABLE | {"programs": [odd | {"results": [7] * 4}]}).entry(of(512), HOPPER, GPU)
    assert found is not None
    assert (found.best(3), found.invariant) == ("few", ("few", "many"))


def test_times_of_nothing_are_no_reason_for_equal_bits_to_fail(tmp_path: Path, driver: RecordingDriver) -> None:
    free = copy.deepcopy(TABLE)
    free["programs"][0] = {"constants": [0], "operations": "", "operands": [], "results": [6] * 4}
    lib = library(tmp_path, driver, obj=free, batch_invariant=True)
    assert launched(lib, driver, 512, 3) == "few"


# --- serving ---


def test_any_n_and_k_is_served_by_prediction(tmp_path: Path, driver: RecordingDriver) -> None:
    lib = library(tmp_path, driver)
    assert launched(lib, driver, 1024, 3) == "wide"
    for n, m, name in ((512, 3, "few"), (520, 70, "many"), (512, 70, "many"), (512, 4, "few"), (512, 3, "few")):
        assert launched(lib, driver, n, m) == name


@pytest.mark.parametrize("first", [True, False])
def test_a_tuned_entry_wins_over_the_model_whatever_the_order(
    tmp_path: Path, driver: RecordingDriver, first: bool
) -> None:
    driver.kernels |= write(tmp_path / "universal.aot")
    driver.kernels |= write_archive(
        tmp_path / "tuned.aot", [gemm_record("tuned")], [entry(signature(512, K), [(None, "tuned")])]
    )
    paths = [tmp_path / "tuned.aot", tmp_path / "universal.aot"]
    lib = Library(open_archives(paths if first else paths[::-1]), driver)
    assert launched(lib, driver, 512, 3) == "tuned"
    assert launched(lib, driver, 520, 3) == "few"


def tuned_and_universal(folder: Path, driver: RecordingDriver, **options: Any) -> Library:
    """An archive with an entry that was tuned up to M = 40, layered on a universal one."""
    rows = [
        entry(signature(512, K), [(16, "least"), (None, "tuned")], tuned_to=40, torch_faster=[(30, 35), (70, None)])
    ]
    driver.kernels |= write(folder / "universal.aot")
    driver.kernels |= write_archive(folder / "tuned.aot", [gemm_record("least"), gemm_record("tuned")], rows)
    return Library(open_archives([folder / "universal.aot", folder / "tuned.aot"]), driver, Options(**options))


def test_the_model_chooses_at_twice_the_rows_that_an_entry_was_tuned_to(
    tmp_path: Path, driver: RecordingDriver
) -> None:
    lib = tuned_and_universal(tmp_path, driver)
    names = {
        1: "least",
        16: "least",
        17: "tuned",
        80: "tuned",
        81: "many",
        1000: "many",
        1001: "shared",
        1200: "shared",
        9000: "shared",
    }
    assert {m: launched(lib, driver, 512, m) for m in names} == names
    found = lib.entry(of(512))
    assert (found.state, found.best(9000), found.best(40_000)) == ("tuned", "shared", "shared")
    assert [found.torch_is_faster(m) for m in (33, 36, 80, 81)] == [True, False, True, False]
    assert found.torch_faster == ((30, 35), (70, 80))
    assert found.functions(100)[0] == "many"
    assert {"tuned", "least"} <= set(found.functions(100)), "tried where the device cannot run what is predicted"


def test_what_the_model_chooses_beyond_an_entry_is_preloaded(tmp_path: Path, driver: RecordingDriver) -> None:
    lib = tuned_and_universal(tmp_path, driver)
    assert set(lib.preload([8, 500], only=[of(512)])) == {"least", "tuned", "many", "shared"}
    loads, plans = lib.stats().loads, lib.stats().plans_made
    assert [launched(lib, driver, 512, m) for m in (8, 500)] == ["least", "many"]
    assert (lib.stats().loads, lib.stats().plans_made) == (loads, plans)
    assert [launched(lib, driver, 512, m) for m in (81, 5000)] == ["many", "shared"]
    assert lib.stats().loads == loads


def test_preload_of_all_tries_entries_as_far_as_they_serve(
    tmp_path: Path, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions of forms are loaded, all of them; to try these for each of a thousand entries would be too much."""
    rows = [entry(signature(8 * i, K), [(None, "few")], tuned_to=40) for i in range(1, 100)]
    lib, tried = library(tmp_path, driver, rows), preload._tried
    seen: list[set[int]] = []

    def noted(of: Any) -> set[int]:
        seen.append(tried(of))
        return seen[-1]

    monkeypatch.setattr(preload, "_tried", noted)
    assert set(lib.preload()) == set(NAMES)
    assert seen == [{1}] * 99
    loads = lib.stats().loads
    assert [launched(lib, driver, 512, m) for m in (80, 81, 9000)] == ["few", "many", "shared"]
    assert lib.stats().loads == loads


@pytest.mark.parametrize("options", [{"require": "tuned"}, {"batch_invariant": True}])
def test_an_entry_serves_every_m_where_the_model_may_not_choose(
    tmp_path: Path, driver: RecordingDriver, options: dict[str, Any]
) -> None:
    lib = tuned_and_universal(tmp_path, driver, **options)
    if "require" in options:
        assert launched(lib, driver, 512, 9000) == "tuned"
    else:
        with pytest.raises(KernelMiss, match="equal bits"):
            launched(lib, driver, 512, 9000)


def test_an_entry_serves_every_m_where_the_functions_of_the_model_ran_nowhere(
    tmp_path: Path, driver: RecordingDriver
) -> None:
    rows = [entry(signature(512, K), [(None, "few")], tuned_to=40)]
    lib = library(tmp_path, driver, rows, checked_on())
    assert launched(lib, driver, 512, 9000) == "few"
    checked = library(tmp_path, driver, rows)
    assert launched(checked, driver, 512, 9000) == "shared"
    unknown = library(tmp_path, driver, [entry(signature(512, K), [(None, "few")])])
    assert launched(unknown, driver, 512, 9000) == "few", "nobody knows up to where it was tuned"


def test_a_damaged_function_of_the_model_gives_way_to_the_entry(tmp_path: Path, driver: RecordingDriver) -> None:
    lib = tuned_and_universal(tmp_path, driver, on_damage="torch")
    shared = lib._now.entries.of_file(lib.entry(of(512)), "shared")
    assert shared._archive.path == str(tmp_path / "universal.aot")
    shared.damage = "it is damaged"
    assert launched(lib, driver, 512, 9000) in ("many", "tuned")


def test_of_two_universal_tables_the_last_serves(tmp_path: Path, driver: RecordingDriver) -> None:
    driver.kernels |= write(tmp_path / "base.aot")
    swapped = copy.deepcopy(TABLE)
    swapped["programs"][0]["results"] = [13, 11, 9, 14]
    driver.kernels |= write(tmp_path / "last.aot", obj=swapped)
    lib = Library(open_archives([tmp_path / "base.aot", tmp_path / "last.aot"]), driver)
    assert launched(lib, driver, 512, 3) == "many"


def test_signatures_without_end_take_no_memory_without_end(
    tmp_path: Path, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (plan, entries):
        monkeypatch.setattr(module, "MAX_PLANS", 8)
    driver.kernels |= write(tmp_path / "base.aot") | write(tmp_path / "last.aot")
    lib = Library(open_archives([tmp_path / "base.aot", tmp_path / "last.aot"]), driver)
    for n in range(8, 8 * 30, 8):
        assert launched(lib, driver, n, 3) == "few"
    now, plans = lib._now.entries, lib._now.plans
    kept = (now._predicted, now._matched, now._owners, plans._by_shape, plans.by_call)
    assert max(map(len, kept)) <= 8
    assert now.layer(lib.entry(of(8))).archive.path == str(tmp_path / "last.aot")


def test_a_prediction_that_is_pushed_out_while_it_is_looked_up_is_made_again(
    tmp_path: Path, driver: RecordingDriver
) -> None:
    class Pushed(OrderedDict[Any, Any]):
        def __contains__(self, key: object) -> bool:
            return super().__contains__(key) and (self.pop(key), True)[1]

    lib = library(tmp_path, driver)
    launched(lib, driver, 512, 3)
    lib._now.entries._predicted = Pushed(lib._now.entries._predicted)
    assert launched(lib, driver, 512, 70) == "many"


def test_what_the_model_chose_is_refused_where_tuned_is_required(tmp_path: Path, driver: RecordingDriver) -> None:
    lib = library(tmp_path, driver, require="tuned")
    with pytest.raises(
        KernelMiss, match="is predicted: its kernels were checked on NVIDIA H200 and chosen by estimate"
    ):
        launched(lib, driver, 512, 3)
    assert lib.stats().refusals[0].reason == "not tuned"
    assert lib.preload() == ()


@pytest.mark.parametrize(
    ("gpus", "of_another_target", "warned"),
    [(["NVIDIA H200"], [], 0), ([], [], 1), ([], ["NVIDIA B200"], 1)],
)
def test_functions_that_ran_nowhere_are_warned_of_and_left_out_of_models(
    tmp_path: Path,
    driver: RecordingDriver,
    caplog: pytest.LogCaptureFixture,
    gpus: list[str],
    of_another_target: list[str],
    warned: int,
) -> None:
    obj = copy.deepcopy(checked_on(*gpus))
    alone = {"functions": [["other", 8, 8, MOST]], "equal_bits": [1], "program": 1}
    obj["forms"].append(ROW | alone | {"target": "sm_100a", "checked_on": of_another_target})
    obj["programs"].append(PROGRAM | {"results": [11]})
    lib = library(tmp_path, driver, obj=obj)
    with caplog.at_level(logging.WARNING):
        launched(lib, driver, 512, 3)
        launched(lib, driver, 520, 3)
    assert [r for r in caplog.records if "never run or checked" in r.message] == caplog.records[:warned]
    assert len(caplog.records) == warned
    taken, reason = choose(lib, of(512))
    assert (taken is None) is bool(warned)
    assert ("never run on a GPU" in reason) is bool(warned)


def test_models_take_tuned_entries_that_rely_on_less_before_predicted_ones(
    tmp_path: Path, driver: RecordingDriver
) -> None:
    lib = library(tmp_path, driver, [entry(signature(512, K), [(None, "few")])])
    taken, _ = choose(lib, of(512, overlap="weights"))
    assert taken == of(512)
    taken, _ = choose(lib, of(520, overlap="weights"))
    assert taken == of(520, overlap="weights")


def test_a_miss_says_that_no_form_fits(tmp_path: Path, driver: RecordingDriver) -> None:
    lib = library(tmp_path, driver)
    advice = "add the problem to the manifest"
    with pytest.raises(KernelMiss, match=rf"forms that are served .*, 1, none has these types and words\n{advice}"):
        launched(lib, driver, 512, 3, epilogue="silu")
    taken = rf"any N and K takes N in multiples of 8 and K of 8\n{advice}"
    with pytest.raises(KernelMiss, match=taken):
        launched(lib, driver, 20, 3)


def test_an_entry_may_be_asked_for_by_its_key(tmp_path: Path, driver: RecordingDriver) -> None:
    lib = library(tmp_path, driver)
    assert lib.entry(of(512).key()) is lib.entry(of(512))
    unknown: Any
    for unknown in ("qkv", None, 3):
        with pytest.raises(ArgumentError, match="signature must be one or its key"):
            lib.entry(unknown)


def test_a_library_in_use_counts_its_forms(tmp_path: Path, driver: RecordingDriver) -> None:
    lib = library(tmp_path, driver)
    assert "form" not in repr(lib)
    launched(lib, driver, 512, 3)
    assert ", 0 signatures and 1 forms, cuda:0>" in repr(lib)


@pytest.mark.parametrize(
    ("state", "checked", "serves"),
    [("tuned", True, "many"), ("ranked", True, "few"), ("ranked", False, "many"), ("tuned", False, "many")],
)
def test_what_was_never_run_gives_way_to_checked_functions(
    tmp_path: Path, driver: RecordingDriver, state: str, checked: bool, serves: str
) -> None:
    rows = [entry(signature(512, K), [(None, "many")], state=state)]
    obj = TABLE if checked else checked_on()
    lib = library(tmp_path, driver, rows, obj)
    assert launched(lib, driver, 512, 3) == serves
    taken, _ = choose(lib, of(512))
    assert (taken is None) is (not checked and state == "ranked")
    again = library(tmp_path, driver, rows, obj)
    assert serves in again.preload([3], only=[of(512)])
    plans = again.stats().plans_made
    assert launched(again, driver, 512, 3) == serves
    assert again.stats().plans_made == plans


def test_a_function_that_is_none_of_the_form_is_refused(tmp_path: Path, driver: RecordingDriver) -> None:
    wrong = copy.deepcopy(TABLE)
    wrong["forms"][0]["form"]["epilogue"] = "bias"
    lib = library(tmp_path, driver, obj=wrong)
    bias = FakeTensor((512,))
    with pytest.raises(RecordError, match="does not take the arguments of this gemm"):
        lib.gemm(FakeTensor((3, K)), FakeTensor((512, K)), out=FakeTensor((3, 512)), bias=bias)


def test_an_entry_serves_calls_of_its_own_overlap_and_a_form_those_of_more(
    tmp_path: Path, driver: RecordingDriver
) -> None:
    lib = library(tmp_path, driver, [entry(signature(512, K), [(None, "many")])])
    assert launched(lib, driver, 512, 3) == "many"
    assert launched(lib, driver, 512, 3, overlap="launch") == "few"
    assert lib.entry(of(512, overlap="launch")).state == PREDICTED


def test_what_is_predicted_is_never_left_to_torch(tmp_path: Path, driver: RecordingDriver, torch: FakeTorch) -> None:
    lib = library(tmp_path, driver, on_slower="torch")
    for m in (1, 70, 2000, 70):
        launched(lib, driver, 512, m)
    assert (lib.stats().given_to_torch, torch.products) == (0, [])


# --- preload ---


def test_preload_loads_every_function_that_the_model_may_choose(tmp_path: Path, driver: RecordingDriver) -> None:
    lib = library(tmp_path, driver)
    assert set(lib.preload()) == set(NAMES)
    loads = lib.stats().loads
    for n, m in itertools.product((8, 512, 1024, 5120), (1, 60, 2000)):
        launched(lib, driver, n, m)
    assert lib.stats().loads == loads


@pytest.mark.parametrize("by_key", [True, False])
def test_preload_of_a_signature_loads_what_is_best_somewhere(
    tmp_path: Path, driver: RecordingDriver, by_key: bool
) -> None:
    lib = library(tmp_path, driver)
    wanted = of(512)
    assert set(lib.preload([3, 70], only=[wanted.key() if by_key else wanted])) == {"few", "many", "shared"}
    loads, plans = lib.stats().loads, lib.stats().plans_made
    assert [launched(lib, driver, 512, m) for m in (3, 70)] == ["few", "many"]
    assert (lib.stats().loads, lib.stats().plans_made) == (loads, plans)
    assert launched(lib, driver, 1024, 3) == "wide", "others go on being loaded when they are first asked for"
    with pytest.raises(KernelMiss, match="cannot preload"):
        lib.preload(only=[of(20)])


def test_as_many_signatures_are_preloaded_as_are_named(tmp_path: Path, driver: RecordingDriver) -> None:
    """What they take to try is no matter of the archive's size: it does not name them."""
    lib = library(tmp_path, driver)
    assert set(lib.preload(only=[of(8 * i) for i in range(1, 1_500)])) == {"few", "many", "wide", "shared"}


def test_preload_promises_no_prediction_where_an_entry_wins_that_is_refused(
    tmp_path: Path, driver: RecordingDriver
) -> None:
    """The entry names no function for equal bits, the form has one, and a call is a miss all the same."""
    lib = library(tmp_path, driver, [entry(signature(512, K), [(None, "few")])], batch_invariant=True)
    with pytest.raises(KernelMiss, match=r"cannot preload.*with a function for equal bits"):
        lib.preload(only=[of(512)])
    assert lib.preload(only=[of(520)]) == ("few", "many")


def test_plans_of_what_was_predicted_count_among_those_that_are_kept(
    tmp_path: Path, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = library(tmp_path, driver)
    monkeypatch.setattr(preload, "MAX_PLANS", 2 * 7)
    lib.preload(range(1, 4), only=[of(512)])
    with pytest.raises(ArgumentError, match=r"4 M values for 2 signatures .* give fewer, 3 in all"):
        lib.preload(range(1, 5), only=[of(520)])
    lib.preload(range(1, 4), only=[of(520)])


def test_reload_keeps_to_what_was_preloaded(tmp_path: Path, driver: RecordingDriver) -> None:
    lib = library(tmp_path, driver)
    lib.preload([3], only=[of(512)])
    swapped = copy.deepcopy(TABLE)
    swapped["programs"][0]["results"] = [13, 11, 9, 14]
    driver.kernels |= write(tmp_path / "other.aot", obj=swapped)
    assert lib.reload(tmp_path / "other.aot")
    loads = lib.stats().loads
    assert launched(lib, driver, 512, 3) == "many"
    assert lib.stats().loads == loads


def test_reload_refuses_a_malformed_program(tmp_path: Path, driver: RecordingDriver) -> None:
    lib = library(tmp_path, driver)
    launched(lib, driver, 512, 3)
    wrong = copy.deepcopy(TABLE)
    wrong["programs"][0]["results"] = [11]
    write(tmp_path / "wrong.aot", obj=wrong)
    with pytest.raises(RecordError, match="gives 1 times for 4 functions"):
        lib.reload(tmp_path / "wrong.aot")
    assert launched(lib, driver, 512, 3) == "few"


# --- reading ---

DAMAGE: dict[str, tuple[Any, Any, str]] = {
    "a field is missing": ([], {"schema": 2, "programs": []}, "exactly the fields"),
    "a field is unknown": (["forms", 0, "batch"], 1, "exactly the fields"),
    "checked_on is of the whole table": (["checked_on"], ["NVIDIA H200"], "exactly the fields"),
    "checked_on is a word": (["forms", 0, "checked_on"], "NVIDIA H200", "must be a list"),
    "checked_on has no name": (["forms", 0, "checked_on"], [""], "must have names"),
    "checked_on has a long name": (["forms", 0, "checked_on"], ["x" * 256], "must have names"),
    "checked_on has many names": (["forms", 0, "checked_on"], ["NVIDIA H200"] * 65, "at most 64 are read"),
    "programs are long": (["programs"], [PROGRAM | {"operations": "add " * 131_072}] * 2, "at most 262144 are read"),
    "a form is there twice": (["forms"], [ROW, ROW], "twice"),
    "a word is unknown": (["forms", 0, "form", "epilogue"], "tanh", "unknown epilogue"),
    "a type is unknown": (["forms", 0, "form", "a"], "bf17", "unknown element type"),
    "batched is a number": (["forms", 0, "form", "batched"], 1, "batched must be true or false"),
    "a function is not there": (["forms", 0, "functions", 0, 0], "gone", "not in the archive for 'sm_90a'"),
    "a function is for another target": (["forms", 0, "target"], "sm_100a", "not in the archive for 'sm_100a'"),
    "a target is a list": (["forms", 0, "target"], ["sm_90a"], "unknown target"),
    "a target is unknown": (["forms", 0, "target"], "sm90", "unknown target"),
    "a function is there twice": (["forms", 0, "functions", 0, 0], "many", "each once"),
    "a function is a word": (["forms", 0, "functions", 0], "few", "a function is"),
    "a multiple is 0": (["forms", 0, "functions", 0, 1], 0, "no positive integers"),
    "a multiple is a fraction": (["forms", 0, "functions", 0, 2], 8.0, "no positive integers"),
    "a function has a fifth": (["forms", 0, "functions", 0], ["few", 8, 8, MOST, 1], "a function is"),
    "equal bits are true": (["forms", 0, "equal_bits", 0], True, "equal_bits must be 0, or 1 and up in order"),
    "equal bits are a fraction": (["forms", 0, "equal_bits", 0], 1.0, "equal_bits must be 0, or 1 and up in order"),
    "equal bits begin at 2": (["forms", 0, "equal_bits"], [2, 1, 1, 1], "in order of appearance, found 2"),
    "equal bits leave one out": (["forms", 0, "equal_bits"], [0, 1, 3, 2], "in order of appearance, found 3"),
    "equal bits are less than none": (["forms", 0, "equal_bits", 3], -1, "in order of appearance, found -1"),
    "equal bits are of fewer": (["forms", 0, "equal_bits"], [1, 1, 2], "a number for each of the 4 functions, found 3"),
    "equal bits are no list": (["forms", 0, "equal_bits"], 1, "must be a list"),
    "there is no function": (["forms", 0], ROW | {"functions": [], "equal_bits": []}, "1 to 128 functions"),
    "a program is not there": (["forms", 0, "program"], 1, "one of the 1 there are"),
    "a program is unused": (["programs"], [PROGRAM, PROGRAM], "used by no form"),
    "forms are no list": (["forms"], {}, "must be a list"),
    "there are too many": (["forms"], [None] * 513, "at most 512"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_malformed_table_is_refused_where(what: str) -> None:
    path, value, message = DAMAGE[what]
    obj = copy.deepcopy(TABLE)
    if not path:
        obj = value
    else:
        place = obj
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
    with pytest.raises(RecordError, match=f"universal table.*{message}.*build the archive again"):
        universal(obj)


def test_a_program_of_many_forms_is_read_once() -> None:
    """A file of a few kilobytes may have 512 forms of one program of 8,192 operations, which Python reads in 10 ms."""
    shared = copy.deepcopy(TABLE)
    shared["forms"].append(ROW | {"form": FORM | {"overlap": "launch"}})
    (_, one), (_, other) = universal(shared).forms
    assert one.costs is other.costs


TYPES = st.sampled_from(["bf16", "f16", "e4m3", "f32"])


@given(
    st.builds(
        Signature,
        TYPES,
        TYPES,
        TYPES,
        st.just("f32"),
        st.sampled_from(sorted(EPILOGUES)),
        st.integers(1, 1 << 20).map(lambda n: 2 * n),
        st.integers(1, 1 << 20),
        st.integers(1, 9),
        st.sampled_from(tuple(SCALINGS)),
        st.sampled_from(MAJORS),
        st.sampled_from(OVERLAPS),
    )
)
def test_a_key_says_all_of_its_signature(wanted: Signature) -> None:
    assert Signature.of_key(wanted.key()) == wanted


@pytest.mark.parametrize(
    "word",
    [
        "",
        "qkv",
        "bf16_bf16_bf16_f32_none_n8_k08",
        "bf16_bf16_bf16_f32_none_n8_k8_b1",
        "bf16_bf16_bf16_f32_none_n8_k8_serial",
        "bf16_bf16_bf16_f32_what_n8_k8",
        "bf16_bf16_bf16_f32_swiglu_n9_k8",
        f"bf16_bf16_bf16_f32_none_n{2**31}_k8",
    ],
)
def test_what_is_no_key_is_none(word: str) -> None:
    assert Signature.of_key(word) is None
