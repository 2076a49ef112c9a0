"""Cost programs: native code and Python give the same bits, what is malformed is refused, and symbols are numbers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aot.search import costs
from aot.search.costs import CostError, Machine, Tape
from aot.search.estimates import CORRECTED_M, Estimates, program, shares
from aot.search.h200 import H200
from aot.search.provider import PROVIDERS, family_of, provider
from aot.search.variants import Variant
from runtime import native
from runtime.errors import RecordError
from runtime.gemm.signature import Signature
from runtime.limits import MAX_COST_NODES, MAX_COST_RESULTS
from runtime.program.costs import OPERATIONS, CostProgram, _PythonCosts

PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 6144, 4096)
FORMS = [
    PLAIN,
    dataclasses.replace(PLAIN, epilogue="swiglu", overlap="weights"),
    Signature("e4m3", "e4m3", "bf16", "f32", "none", 6144, 4096, scaling="block"),
]
GOOD: dict[str, Any] = {"constants": [2], "operations": "mul add", "operands": [0, 2, 1, 3], "results": [4, 3]}


@pytest.fixture(params=["native", "python"])
def evaluator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(native, "costs", None)
    elif native.costs is None:
        pytest.skip("runtime._native was not built")


def read(obj: Any) -> CostProgram:
    return CostProgram.from_json(obj, 2, "here")


@pytest.mark.usefixtures("evaluator")
def test_operations_take_inputs_constants_and_each_other() -> None:
    assert read(GOOD).evaluate((3, 10)) == [16.0, 6.0]


@pytest.mark.usefixtures("evaluator")
@pytest.mark.parametrize(
    ("operation", "values", "expected"),
    [
        ("div", (1, 0), math.inf),
        ("sqrt", (-1, 0), math.inf),
        ("log", (0, 0), math.inf),
        ("exp", (701, 0), math.inf),
        ("exp", (0, 0), 1.0),
        ("ceil", (2.25, 0), 3.0),
        ("floor", (-2.25, 0), -3.0),
        ("max", (2, 3), 3.0),
        ("min", (2, 3), 2.0),
    ],
)
def test_what_has_no_finite_value_is_never_the_least(
    operation: str, values: tuple[float, float], expected: float
) -> None:
    operands = list(range(OPERATIONS[operation]))
    one = {"constants": [], "operations": operation, "operands": operands, "results": [2]}
    assert read(one).evaluate(values) == [expected]


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "a field is missing": ({k: v for k, v in GOOD.items() if k != "results"}, "exactly the fields"),
    "a field is unknown": (GOOD | {"loops": []}, "exactly the fields"),
    "operations are no string": (GOOD | {"operations": ["mul", "add"]}, "words in one string"),
    "an operation is unknown": (GOOD | {"operations": "mul call"}, "unknown operation 'call'"),
    "there are two spaces": (GOOD | {"operations": "mul  add"}, "unknown operation ''"),
    "operands are no list": (GOOD | {"operands": 4}, "operands must be a list"),
    "an operand is itself": (GOOD | {"operands": [0, 3, 1, 3]}, "is of .*3.* where there are 3 values"),
    "an operand is before the first": (GOOD | {"operands": [0, -1, 1, 3]}, "is of .*-1"),
    "an operand is a fraction": (GOOD | {"operands": [0, 1.5, 1, 3]}, "is of .*1.5"),
    "an operand is true": (GOOD | {"operands": [0, True, 1, 3]}, "is of .*True"),
    "an operand is huge": (GOOD | {"operands": [0, 1 << 62, 1, 3]}, "is of"),
    "operands are left": (GOOD | {"operands": [0, 2, 1, 3, 0]}, "take 4 operands, found 5"),
    "operands are short": (GOOD | {"operands": [0, 2, 1]}, "is of|more than the 3 operands"),
    "a constant is a word": (GOOD | {"constants": ["2"]}, "must be numbers"),
    "a constant is true": (GOOD | {"constants": [True]}, "must be numbers"),
    "a constant is NaN": (GOOD | {"constants": [math.nan]}, "must be numbers"),
    "a result is not there": (GOOD | {"results": [5]}, "is of .*5.* where there are 5 values"),
    "there is no result": (GOOD | {"results": []}, "1 to 128 results, found 0"),
    "there are too many results": (GOOD | {"results": [0] * (MAX_COST_RESULTS + 1)}, "1 to 128 results, found 129"),
    "there is too much": (GOOD | {"constants": [0] * MAX_COST_NODES}, "at most 16384 are read"),
}


@pytest.mark.usefixtures("evaluator")
@pytest.mark.parametrize("what", DAMAGE)
def test_malformed_program_is_refused_where(what: str) -> None:
    obj, message = DAMAGE[what]
    with pytest.raises(RecordError, match=f"here: .*{message}.*build the archive again"):
        read(obj)


@pytest.mark.skipif(native.costs is None, reason="runtime._native was not built")
@pytest.mark.parametrize("what", DAMAGE)
def test_a_program_is_refused_in_the_same_words_with_native_code_and_without(what: str) -> None:
    said = []
    for in_python in (False, True):
        with pytest.raises(RecordError) as error:
            CostProgram.from_json(DAMAGE[what][0], 2, "here", in_python)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.usefixtures("evaluator")
def test_a_value_for_each_input_is_needed() -> None:
    with pytest.raises(ValueError, match="a value for each input"):
        read(GOOD).evaluate((1,))


@pytest.mark.usefixtures("evaluator")
def test_the_least_of_some_results_is_found_by_its_place() -> None:
    # x, y, y again and infinity
    found = read({"constants": [0], "operations": "div", "operands": [0, 2], "results": [0, 1, 1, 3]})
    assert found.least((5, 3), (0, 1, 2, 3)) == 1
    assert found.least((5, 3), (3, 2, 1)) == 2  # the first of equal ones
    assert found.least((5, 3), (0, 3)) == 0
    assert found.least((5, 3), (3,)) == 3
    assert found.least((2, 3), (1, 0)) == 0
    for places in ((), (4,), (-5,)):
        with pytest.raises((ValueError, IndexError)):
            found.least((5, 3), places)


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    constants = draw(st.lists(st.floats(-1e6, 1e6), max_size=4))
    # Of few kinds there are runs, in which some take what others of the run give.
    kinds = draw(st.sampled_from([sorted(OPERATIONS), ["add", "max"], ["select", "ceil"]]))
    words = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=30))
    operands, known = [], 2 + len(constants)
    for word in words:
        operands += [draw(st.integers(0, known - 1)) for _ in range(OPERATIONS[word])]
        known += 1
    results = draw(st.lists(st.integers(0, known - 1), min_size=1, max_size=5))
    return {"constants": constants, "operations": " ".join(words), "operands": operands, "results": results}


@pytest.mark.skipif(native.costs is None, reason="runtime._native was not built")
@given(programs(), st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)))
@settings(max_examples=300, deadline=None)
def test_native_code_and_python_give_the_same_bits(obj: dict[str, Any], values: tuple[float, float]) -> None:
    codes = bytes(list(OPERATIONS).index(word) for word in obj["operations"].split())
    python = _PythonCosts(2, obj["constants"], codes, obj["operands"], obj["results"])
    assert [x.hex() for x in read(obj).evaluate(values)] == [x.hex() for x in python.evaluate(values)]


# --- writing them ---


def estimated(signature: Signature) -> list[Variant]:
    every = [v for p in PROVIDERS for v in provider(p).variants("sm_90a", signature)]
    return [v for v in every if (family := family_of(v)) and family.estimate_us]


@pytest.mark.parametrize("signature", FORMS, ids=Signature.key)
def test_the_program_of_every_family_gives_what_its_estimate_gives_for_numbers(signature: Signature) -> None:
    variants = estimated(signature)[::3]
    for machine in (H200, Machine(114, 2039)):
        of_all = Estimates(variants)
        for m in (1, 7, 64, 65, 333, 1300, 8192):
            found = of_all.us(signature, m, machine)
            for variant, us in zip(variants, found, strict=True):
                family = family_of(variant)
                assert family is not None
                assert family.estimate_us is not None
                assert us == family.estimate_us(variant, signature, m, machine), variant.name()


def test_what_takes_fewer_sms_and_less_memory_takes_longer() -> None:
    variants = estimated(PLAIN)[::5]
    for m in (1, 100, 4096):
        here, there = (Estimates(variants).us(PLAIN, m, machine) for machine in (H200, Machine(78, 4000)))
        assert sum(there) > 1.02 * sum(here), m


def test_a_correction_is_interpolated_in_the_logarithm_of_m_and_nothing_for_few_rows() -> None:
    variants = estimated(PLAIN)[:2]
    values = (0.0, 0.0, 0.0, 0.0, 0.1, 0.2, 0.0, -0.1, 0.0, 0.0, 0.05)
    plain, corrected = Estimates(variants), Estimates(variants, {variants[1]: values})
    at = {1: 0, 64: 0, 91: 0.05, 128: 0.1, 181: 0.15, 256: 0.2, 1024: -0.1, 8192: 0.05, 1 << 20: 0.05}
    for m, expected in at.items():
        before, after = plain.us(PLAIN, m), corrected.us(PLAIN, m)
        assert after[0] == before[0]
        assert math.log(after[1] / before[1]) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 40, 64, 100, 128, 3000, 8192, 20_000])
def test_shares_of_neighbours_make_one(m: int) -> None:
    found = shares(m)
    assert sum(found) == pytest.approx(1)
    assert 1 <= sum(x > 0 for x in found) <= 2
    if m in CORRECTED_M:
        assert found[CORRECTED_M.index(m)] == 1


def test_operations_that_estimates_share_are_there_once_and_unused_ones_not_at_all() -> None:
    tape = Tape(("x", "y"))
    x, y = tape.symbols()
    unused = x / y
    assert unused is not None
    twice = [(x + y) * 2, 1 + (x + y) * 2]
    assert tape.program(twice).to_json() == {
        "constants": [2, 1],
        "operations": "add mul add",
        "operands": [0, 1, 4, 2, 3, 5],
        "results": [5, 6],
    }


def test_operations_of_one_kind_follow_each_other_where_they_can() -> None:
    tape = Tape(("x", "y"))
    x, y = tape.symbols()
    many = [(x + i) * (y + i) for i in range(1, 5)]
    written = tape.program(many).to_json()
    assert written["operations"] == " ".join(["add"] * 8 + ["mul"] * 4)
    found = CostProgram.from_json(written, 2, "here")
    assert found.evaluate((10, 20)) == [(10 + i) * (20 + i) for i in range(1, 5)]


@pytest.mark.parametrize(
    ("estimate", "message"),
    [
        (lambda x: 1 if x else 2, "branches on a symbol"),
        (lambda x: max(x, 1), "branches on a symbol"),
        (lambda x: x * 1e-6, "divide by a rate"),
        (lambda x: x + math.inf, "has the constant inf"),
        (lambda x: x + Tape(("z",)).symbols()[0], "two tapes"),
    ],
)
def test_an_estimate_that_is_no_program_is_refused(estimate: Callable[[Any], Any], message: str) -> None:
    (x,) = Tape(("x",)).symbols()
    with pytest.raises(CostError, match=message):
        estimate(x)


@pytest.mark.parametrize(
    ("function", "operands", "expected"),
    [
        (costs.ceil, (2.5,), 3),
        (costs.floor, (2.5,), 2),
        (costs.sqrt, (9,), 3),
        (costs.log, (1,), 0),
        (costs.exp, (0,), 1),
        (costs.maximum, (1, 2), 2),
        (costs.minimum, (1, 2), 1),
        (costs.select, (1, 1, 5, 6), 5),
        (costs.select, (2, 1, 5, 6), 6),
    ],
)
def test_functions_are_the_same_for_numbers_and_symbols(
    function: Callable[..., Any], operands: tuple[float, ...], expected: float
) -> None:
    assert function(*operands) == expected
    names = tuple("abcd"[: len(operands)])
    tape = Tape(names)
    found = CostProgram.from_json(tape.program([function(*tape.symbols())]).to_json(), len(names), "here")
    assert found.evaluate(operands) == [expected]


def test_a_family_without_an_estimate_has_no_program() -> None:
    with pytest.raises(ValueError, match="no estimate"):
        program(provider("cutlass_operators").variants("sm_80", PLAIN)[:1])


def test_what_an_h200_is_and_reaches_is_stated_in_its_tables_alone() -> None:
    root = Path(__file__).resolve().parents[1]
    tables = {"runtime/device/gpus.py", "aot/search/h200.py", "aot/kernels/sm90/h200.py"}
    numbers = re.compile(r"\b(4917|4\.3e6|720e6|1400e6|200e3|110e3)\b|RASTER_ROWS = ")
    files = (path for folder in ("aot", "runtime") for path in (root / folder).rglob("*.py"))
    assert {str(f.relative_to(root)) for f in files if numbers.search(f.read_text())} == tables
