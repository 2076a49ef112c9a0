"""Tables "universal" as a hostile writer could make them: of forms that records compute, and changed field by field."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from runtime.gemm.universal import INPUTS
from runtime.limits import MAX_COST_NODES, MAX_COST_RESULTS, MAX_EXTENT, MAX_UNIVERSAL_FORMS
from runtime.program.costs import OPERATIONS

from .mutant_programs import Refused

Table = dict[str, Any]
RawText = Callable[[str], str]  # a placeholder for text that no JSON encoder writes

_WORDS = ("a", "b", "d", "accumulator", "epilogue", "scaling", "b_major", "overlap")
_VALUES: list[Any] = ["bf16", "f16", "e4m3", "f32", "none", "bias", "swiglu", "tensor", "block", "row_column", "k", "n"]
_VALUES += ["serial", "launch", "weights", "tanh", "", None, 1, True, [], "x" * 300]
_EXTENTS: list[Any] = [0, 1, 2, 3, 7, 8, 16, 48, 128, 1 << 20, 1 << 30, MAX_EXTENT, MAX_EXTENT + 1, -8, 8.0]
_NUMBERS: list[Any] = [0, -1, 1, 0.5, -0.0, 1e308, -1e308, 1e-300, 5e-324, (1 << 64) - 1, -(1 << 63), 10**30, True, "1"]
_COUNTS = [2, MAX_COST_RESULTS - 1, MAX_COST_RESULTS, MAX_COST_RESULTS + 1, 300]


def table_of(gemms: list[tuple[str, str, dict[str, Any]]]) -> Table:
    """A sound table of functions (name, target, signature), those of one form together."""
    rows: list[dict[str, Any]] = []
    for name, target, of in gemms:
        form = {word: of[word] for word in _WORDS} | {"batched": of["batch"] > 1}
        row = next((r for r in rows if (r["form"], r["target"]) == (form, target)), None)
        if row is None:
            row = {"form": form, "target": target, "functions": [], "equal_bits": [], "program": len(rows)}
            rows.append(row)
        row["functions"].append([name, 16, 16, MAX_EXTENT])
        row["equal_bits"].append(1)
    programs = [program(len(row["functions"])) for row in rows]
    return {"schema": 2, "forms": rows, "programs": programs}


def program(results: int) -> dict[str, Any]:
    """A sound program: for each result a constant, and a third of the rows."""
    first = len(INPUTS) + 1 + results
    return {
        "constants": [3, *(50 + 10 * i for i in range(results))],
        "operations": " ".join(["div", *["add"] * results]),
        "operands": [0, len(INPUTS), *(x for i in range(results) for x in (first, len(INPUTS) + 1 + i))],
        "results": [first + 1 + i for i in range(results)],
    }


def random_program(rng: random.Random, results: int, nodes: int) -> dict[str, Any]:
    """A program that may be read, of any operations on odd constants."""
    constants = [rng.choice([0, -1, 1, 2, 0.5, 1e308, -1e308, 1e-300, 700, 65_536]) for _ in range(rng.randrange(1, 9))]
    known, words, operands = len(INPUTS) + len(constants), [], []
    for _ in range(nodes):
        word = rng.choice(list(OPERATIONS))
        words.append(word)
        operands += [rng.randrange(known) for _ in range(OPERATIONS[word])]
        known += 1
    places = [max(0, known - 1 - rng.randrange(8)) for _ in range(results)]
    return {"constants": constants, "operations": " ".join(words), "operands": operands, "results": places}


def _copy(obj: Any) -> Any:
    return json.loads(json.dumps(obj))


def _swap(rng: random.Random, table: Table, raw: RawText) -> None:
    """The words, functions, target or program of one form in another; or of itself."""
    one, other = rng.choice(table["forms"]), rng.choice(table["forms"])
    field = rng.choice(["form", "functions", "equal_bits", "target", "program"])
    if one is other:
        a, b = rng.choice(_WORDS), rng.choice(_WORDS)
        one["form"][a], one["form"][b] = one["form"][b], one["form"][a]
    one[field], other[field] = other[field], one[field]


def _limits(rng: random.Random, table: Table, raw: RawText) -> None:
    """Multiples, the most N, and which functions give equal bits."""
    row = rng.choice(table["forms"])
    place = rng.randrange(len(row["functions"]))
    at = rng.randrange(1, 5)
    if at == 4:
        row["equal_bits"][place : place + 1] = rng.choice([[0], [1], [2], [True], [-1], [1.0], [], [1, 1]])
    else:
        row["functions"][place][at] = rng.choice(_EXTENTS)


def _words(rng: random.Random, table: Table, raw: RawText) -> None:
    form = rng.choice(table["forms"])["form"]
    word = rng.choice([*_WORDS, "batched", "other"])
    form[word] = not form[word] if word == "batched" else rng.choice(_VALUES)


def _damage_program(rng: random.Random, table: Table, raw: RawText) -> None:
    """Operands and results of nothing, too few or too many; unknown operations; odd numbers."""
    of = rng.choice(table["programs"])
    how = rng.randrange(7)
    if how == 0:
        of["operands"][rng.randrange(len(of["operands"]))] = rng.choice(
            [-1, 0, 5, 11, 1 << 31, 1 << 63, 0.0, None, True]
        )
    elif how == 1:
        of["results"][rng.randrange(len(of["results"]))] = rng.choice([-1, 0, 6, 1000, 1 << 40, False, 2.0])
    elif how == 2:
        rng.choice([of["operands"].pop, of["results"].pop, of["constants"].pop])()
    elif how == 3:
        of["results"] *= rng.choice(_COUNTS) if len(of["results"]) < _COUNTS[-1] else 1
    elif how == 4:
        of["operations"] += rng.choice([" add", " ", " pow", " ADD", "\0", " sqrt\n", "add"])
    elif how == 5:
        of["constants"][rng.randrange(len(of["constants"]))] = rng.choice(_NUMBERS)
    else:
        text = rng.choice(["NaN", "Infinity", "-Infinity", "1e999", "-0", "1E5", "9" * 400])
        of["constants"][rng.randrange(len(of["constants"]))] = raw(text)


def _new_program(rng: random.Random, table: Table, raw: RawText) -> None:
    row = rng.choice(table["forms"])
    nodes = rng.choice([1, 5, 30, 30, 300, MAX_COST_NODES // 2 if rng.random() < 0.1 else 50])
    table["programs"][row["program"]] = random_program(rng, len(row["functions"]), nodes)


def _huge_program(rng: random.Random, table: Table, raw: RawText) -> None:
    """As many operations as may be read, or more."""
    of = rng.choice(table["programs"])
    count = rng.choice([MAX_COST_NODES - 100, MAX_COST_NODES - 100, MAX_COST_NODES, 3 * MAX_COST_NODES])
    of["operations"] += " sqrt" * count
    of["operands"] += [0] * count


def _many(rng: random.Random, table: Table, raw: RawText) -> None:
    """Forms or functions again and again."""
    row = rng.choice(table["forms"])
    if len(table["forms"]) * len(row["functions"]) > _COUNTS[-1]:
        raise Refused  # it was made many before, and would be too much to write
    if rng.random() < 0.5:
        count = rng.choice(_COUNTS)
        row["functions"] *= count
        row["equal_bits"] *= count
        return
    for i in range(rng.choice([2, 30, MAX_UNIVERSAL_FORMS, MAX_UNIVERSAL_FORMS + 1])):
        copied = _copy(row)
        copied["form"]["overlap"] = ["serial", "launch", "weights"][i % 3]
        copied["form"]["b_major"] = "kn"[i // 3 % 2]
        copied["form"]["batched"] = bool(i // 6 % 2)
        table["forms"].append(copied)


def _checked_on(rng: random.Random, table: Table, raw: RawText) -> None:
    names = rng.choice([["NVIDIA H200"], ["x" * 100_000], ["\x1b[31m"], [""], [1], ["x"] * 65, "H200", None])
    rng.choice(table["forms"])["checked_on"] = rng.choice([names, names, {"sm_90a": names}])


_CHANGES: list[Callable[[random.Random, Table, RawText], None]] = [
    _swap,
    _limits,
    _limits,
    _words,
    _damage_program,
    _damage_program,
    _new_program,
    _new_program,
    _huge_program,
    _many,
    _checked_on,
]


def change(rng: random.Random, table: Any, raw: RawText) -> None:
    """Change a table in one way; `raw` is `tests.mutants.Content.raw_text`.

    Raises:
        Refused: it has no forms.
    """
    if not isinstance(table, dict) or not table.get("forms"):
        raise Refused
    rng.choice(_CHANGES)(rng, table, raw)
