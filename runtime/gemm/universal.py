"""The table "universal" of an archive: for a form, which of its functions is best at any N, K and M, by a cost program.

A form is a signature without N and K. What is chosen is *predicted*: no one measured it. Has the face of
`runtime.tables.table.Entry`, so that a library serves both alike. `docs/records.md` has its fields.
Knows nothing of the tensors of a call or the driver.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from ..container import canonical
from ..container.fields import fail_table, is_int, require_schema, table_fields, table_list
from ..device.gpus import H200, Gpu
from ..errors import RecordError
from ..limits import (
    MAX_CALL_FUNCTIONS,
    MAX_CHECKED_GPUS,
    MAX_COST_RESULTS,
    MAX_EXTENT,
    MAX_NAME_CHARACTERS,
    MAX_UNIVERSAL_FORMS,
    MAX_UNIVERSAL_NODES,
)
from ..named_tuple import NamedTuple
from ..program.costs import CostProgram, CostSource
from ..program.operation import OVERLAPS
from ..tables.dispatch import preference, serves
from ..tables.table import TARGET, Entry
from .signature import Signature

SCHEMA = 2  # raised when what a field means changes
PREDICTED = "predicted"
# What cost programs take, in order; `aot.search.estimates` writes them so.
INPUTS = ("m", "n", "k", "batch", "multiprocessors", "memory_gbps")
_INVARIANT_M = tuple(1 << i for i in range(14))  # 1 to 8192
_TRUSTED = 2  # times the largest M that an entry was tuned at: to there calibrated times hold, as `aot tune` predicts
_KEPT = 4096  # choices of an entry that are kept, by M
# The fields of a signature that a form has too, in the order in which `Universal.forms` gives them.
WORDS = ("a", "b", "d", "accumulator", "epilogue", "scaling", "b_major", "overlap")
_TABLE_FIELDS = frozenset({"schema", "forms", "programs"})
_ROW_FIELDS = frozenset({"form", "target", "functions", "equal_bits", "checked_on", "program"})
_ROW_ABSENT = frozenset({"equal_bits", "checked_on"})
_FORM_FIELDS = frozenset({*WORDS, "batched"})


class Function(NamedTuple):
    """A function of a form: N and K must be multiples of these, N at most `most_n`. Those of the same `equal_bits` give
    equal bits, at every M; not those of 0."""

    name: str
    n_multiple: int
    k_multiple: int
    most_n: int
    equal_bits: int


class FormSource(NamedTuple):
    """A form that a table is written from: its words (`WORDS`) and whether it is batched, its functions on a target,
    the cost program that has a result for each, in order, and the kinds of GPU on which all were found right."""

    words: Sequence[str]
    batched: bool
    target: str
    functions: Sequence[Function]
    costs: CostSource
    checked_on: Sequence[str] = ()


class _Program:
    """A cost program of the table, which is read once for all forms that have it."""

    def __init__(self, obj: Any, where: str) -> None:
        self._obj, self._where = obj, where

    @cached_property
    def costs(self) -> CostProgram:
        return CostProgram.from_json(self._obj, len(INPUTS), self._where)

    @cached_property
    def source(self) -> CostSource:
        return CostSource.from_json(self._obj, self._where)


class UniversalForm:
    """The functions for a form on a target. `checked_on` names the kinds of GPU on which all were found right."""

    def __init__(
        self,
        words: tuple[Any, ...],
        target: str,
        functions: tuple[Function, ...],
        checked_on: tuple[str, ...],
        program: _Program,
        where: str,
    ) -> None:
        self._words, self.target, self.functions, self.checked_on = words, target, functions, checked_on
        self._program, self._where = program, where

    def signature(self, n: int, k: int) -> Signature:
        """The signature of this form with these extents, and with a batch of 2 where it is batched."""
        *words, batched = self._words
        return Signature(n=n, k=k, batch=2 if batched else 1, **dict(zip(WORDS, words, strict=True)))

    def source(self) -> FormSource:
        """It as a table is written from it.

        Raises:
            RecordError: its cost program is malformed.
        """
        *words, batched = self._words
        return FormSource(words, batched, self.target, self.functions, self._program.source, self.checked_on)

    @cached_property
    def costs(self) -> CostProgram:
        """What gives each function's time.

        Raises:
            RecordError: it is malformed.
        """
        found = self._program.costs
        if found.results != len(self.functions):
            raise RecordError(
                f"{self._where}: its cost program gives {found.results} times for {len(self.functions)} functions; "
                "build the archive again"
            )
        return found


class PredictedEntry:
    """What an archive serves for a signature that no table names: the function of least predicted time at each M.

    `candidates`, `timings`, `ranges`, `torch_faster` and `apart` are empty: nothing was measured.
    """

    state = PREDICTED
    gpu: Gpu | None = None
    candidates: tuple[Any, ...] = ()
    timings: tuple[Any, ...] = ()
    torch_faster: tuple[Any, ...] = ()
    apart: tuple[Any, ...] = ()
    ranges: tuple[Any, ...] = ()

    def __init__(
        self, signature: Signature, form: UniversalForm, machine: tuple[int, int], among: Sequence[int] | None = None
    ) -> None:
        """The functions of `form` that can compute the signature, or of these only those at the places `among`."""
        self.signature, self.target, self._form, self._machine = signature, form.target, form, machine
        # What programs take besides M, for this signature on a GPU of so many SMs and such a memory rate.
        self._values = (signature.n, signature.k, signature.batch, *machine)
        every = range(len(form.functions)) if among is None else among
        self._places = tuple([place for place in every if _takes(form.functions[place], signature)])
        self._chosen: dict[int, int] = {}

    @property
    def checked_on(self) -> tuple[str, ...]:
        """The kinds of GPU on which its functions were found right."""
        return self._form.checked_on

    @property
    def names(self) -> tuple[str, ...]:
        """The functions that can compute the signature."""
        return tuple(self._form.functions[place].name for place in self._places)

    def us(self, m: int) -> dict[str, float]:
        """The predicted time of each of `names` at `m` rows, in microseconds."""
        times = self._form.costs.evaluate((m, *self._values))
        return {self._form.functions[place].name: times[place] for place in self._places}

    def best(self, m: int) -> str:
        """The function of least predicted time at `m` rows."""
        place = self._chosen.get(m)
        if place is None:
            place = self._form.costs.least((m, *self._values), self._places)
            if len(self._chosen) >= _KEPT:
                self._chosen.clear()
            self._chosen[m] = place
        return self._form.functions[place].name

    def functions(self, m: int) -> tuple[str, ...]:
        """The best function for `m` rows, then what to try where the device cannot run it: best first, not too many."""
        times = self.us(m)
        return tuple(sorted(times, key=times.__getitem__))[:MAX_CALL_FUNCTIONS]

    def torch_is_faster(self, m: int) -> bool:
        """Never: nothing was measured."""
        return False

    def only_invariant(self) -> PredictedEntry:
        """This with the functions of `invariant`, which must be there, and no others."""
        assert self.invariant is not None
        return PredictedEntry(self.signature, self._form, self._machine, self._in_class(self._class))

    def likely(self) -> list[int]:
        """M values between which the choice changes little: 1 to 64, then by steps of a sixteenth."""
        found = list(range(1, 65))
        while found[-1] < _INVARIANT_M[-1]:
            found.append(found[-1] + max(8, found[-1] // 128 * 8))
        return found

    @property
    def invariant(self) -> tuple[str, ...] | None:
        """The functions among which to choose so that a row's bits do not depend on how many rows there are; None if
        there is none."""
        if not self._class:
            return None
        return tuple(self._form.functions[place].name for place in self._in_class(self._class))

    def _in_class(self, number: int) -> list[int]:
        return [place for place in self._places if self._form.functions[place].equal_bits == number]

    @cached_property
    def _class(self) -> int:
        """The `equal_bits` of `invariant`, 0 if there is none: of the numbers that there are, the one whose best
        functions lose least against the best of all, from M = 1 to 8192 by powers of two. So it is the same whatever M
        is asked for."""
        classes: dict[int, list[int]] = {}
        for place in self._places:
            classes.setdefault(self._form.functions[place].equal_bits, []).append(place)
        classes.pop(0, None)
        if len(classes) < 2:
            return next(iter(classes), 0)
        losses = dict.fromkeys(classes, 1.0)
        alone = [(number, places[0]) for number, places in classes.items() if len(places) == 1]  # mostly of 8 bits
        several = [(number, places) for number, places in classes.items() if len(places) > 1]
        for m in _INVARIANT_M:
            times = self._form.costs.evaluate((m, *self._values))
            least = min(map(times.__getitem__, self._places))
            if 0 < least < math.inf:  # else a ratio would say nothing
                for number, place in alone:
                    losses[number] *= times[place] / least
                for number, places in several:
                    losses[number] *= min(map(times.__getitem__, places)) / least
        return min(losses, key=losses.__getitem__)


def trusted_to(entry: Entry) -> int | None:
    """The largest M at which the choice of a tuned entry goes before what is predicted; None where that is every M."""
    return None if entry.state != "tuned" or entry.tuned_to is None else _TRUSTED * entry.tuned_to


class ExtendedEntry:
    """A tuned entry that serves up to the M that it can be trusted to, `last`, and what is predicted, beyond.

    Of the latter nothing was measured, torch neither. `ranges`, `apart`, `timings` and what serves callers who want
    equal bits are those of the entry.
    """

    def __init__(self, tuned: Entry, predicted: PredictedEntry, last: int) -> None:
        self.tuned, self.predicted, self.last = tuned, predicted, last
        self.signature, self.target, self.gpu, self.state = tuned.signature, tuned.target, tuned.gpu, tuned.state
        self.candidates, self.timings, self.apart = tuned.candidates, tuned.timings, tuned.apart
        self.ranges, self.invariant = tuned.ranges, tuned.invariant

    @property
    def names(self) -> tuple[str, ...]:
        """The functions of both."""
        return tuple(dict.fromkeys((*self.tuned.names, *self.predicted.names)))

    @property
    def torch_faster(self) -> tuple[tuple[int, int | None], ...]:
        """The first and the last M of where torch was measured to be faster."""
        pairs = [(first, last) for first, last in self.tuned.torch_faster if first <= self.last]
        return tuple([(first, self.last if last is None else min(last, self.last)) for first, last in pairs])

    def at(self, m: int) -> Entry | PredictedEntry:
        """That of the two which serves `m` rows."""
        return self.tuned if m <= self.last else self.predicted

    def best(self, m: int) -> str:
        """The function for `m` rows."""
        return self.at(m).best(m)

    def functions(self, m: int) -> tuple[str, ...]:
        """The function for `m` rows, then what to try where the device cannot run it, the tuned entry's last."""
        first = self.at(m).functions(m)
        return tuple(dict.fromkeys((*first, *self.tuned.functions(m))))[:MAX_CALL_FUNCTIONS]

    def torch_is_faster(self, m: int) -> bool:
        """Whether torch's own kernel was measured to be faster at `m`, or at M values around it."""
        return m <= self.last and self.tuned.torch_is_faster(m)

    def only_invariant(self) -> Entry:
        """The entry with what `invariant`, which must be there, has, and nothing else."""
        return self.tuned.only_invariant()


AnyEntry = Entry | PredictedEntry | ExtendedEntry  # what a library serves


class Universal:
    """The table, checked."""

    def __init__(self, forms: dict[tuple[Any, ...], UniversalForm]) -> None:
        self._forms = forms
        self._targets = {form.target for form in forms.values()}

    def __len__(self) -> int:
        return len(self._forms)

    @classmethod
    def from_json(cls, obj: Any, targets: Mapping[str, str]) -> Universal:
        """Check and read a table; `targets` has the target of each function by name. Cost programs are read later.

        Raises:
            RecordError: anything is missing, unknown, or names a function that is not there.
            UnsupportedSchema: it is of another schema than `SCHEMA`.
        """
        where = "universal table"
        require_schema(obj, SCHEMA, where)
        obj = table_fields(obj, _TABLE_FIELDS, where)
        programs = table_list(obj["programs"], where)
        if len(table_list(obj["forms"], where)) > MAX_UNIVERSAL_FORMS or len(programs) > MAX_UNIVERSAL_FORMS:
            fail_table(where, f"has {len(obj['forms'])} forms, at most {MAX_UNIVERSAL_FORMS} are read")
        if (nodes := sum(map(_nodes, programs))) > MAX_UNIVERSAL_NODES:
            fail_table(
                where,
                f"its cost programs have {nodes} constants and operations, at most {MAX_UNIVERSAL_NODES} are read",
            )
        shared = [_Program(program, f"{where}: program {number}") for number, program in enumerate(programs)]
        forms: dict[tuple[Any, ...], UniversalForm] = {}
        used = set()
        for number, row in enumerate(obj["forms"]):
            here = f"{where}: form {number}"
            row = table_fields(row, _ROW_FIELDS, here, _ROW_ABSENT)
            if not is_int(row["program"], 0, len(programs) - 1):
                fail_table(here, f"program must be one of the {len(programs)} there are, found {row['program']!r:.50}")
            used.add(row["program"])
            if not isinstance(row["target"], str) or not TARGET.fullmatch(row["target"]):
                fail_table(here, f"unknown target {row['target']!r:.50}")
            words = _key(row["form"], here)
            key = (*words, row["target"])
            if key in forms:
                fail_table(here, "it is there twice")
            functions = _functions(row, targets, here)
            if not 1 <= len(functions) <= MAX_COST_RESULTS or len({f.name for f in functions}) != len(functions):
                fail_table(here, f"needs 1 to {MAX_COST_RESULTS} functions, each once, found {len(functions)}")
            checked_on = _checked_on(row.get("checked_on", []), here)
            forms[key] = UniversalForm(words, row["target"], functions, checked_on, shared[row["program"]], here)
        if used != set(range(len(programs))):
            fail_table(where, "a program is used by no form")
        return cls(forms)

    @property
    def forms(self) -> tuple[tuple[tuple[Any, ...], UniversalForm], ...]:
        """Each form under its words, whether it is batched, and its target."""
        return tuple(self._forms.items())

    def entry(self, signature: Signature, capability: tuple[int, int], gpu: Gpu) -> PredictedEntry | None:
        """What is served for `signature` on a GPU, by the form that `form` finds; None if it finds none."""
        found = self.form(signature, capability)
        return None if found is None else PredictedEntry(signature, found, machine_of(gpu))

    def form(self, signature: Signature, capability: tuple[int, int]) -> UniversalForm | None:
        """Of the forms for `signature` on such a GPU the one that relies on most of the overlap it promises.

        None if no form for a target that the GPU runs, or no function of it, can compute the signature.
        """
        words = tuple(getattr(signature, word) for word in WORDS[:-1])
        for target in sorted(self._targets, key=preference, reverse=True):
            if not serves(target, capability):
                continue
            for overlap in reversed(OVERLAPS[: OVERLAPS.index(signature.overlap) + 1]):
                form = self._forms.get((*words, overlap, signature.batch > 1, target))
                if form is not None and any(_takes(f, signature) for f in form.functions):
                    return form
        return None

    def reason(self, signature: Signature, capability: tuple[int, int]) -> str:
        """Why no form serves `signature` on such a GPU, in words."""
        words = tuple(getattr(signature, word) for word in WORDS[:-1])
        for (*of_form, _, batched, target), form in self._forms.items():
            if (tuple(of_form), batched) == (words, signature.batch > 1) and serves(target, capability):
                pairs = {(f.n_multiple, f.k_multiple) for f in form.functions}
                least = [p for p in pairs if not any(p != q and p[0] % q[0] == p[1] % q[1] == 0 for q in pairs)]
                taken = " or ".join(f"N in multiples of {n} and K of {k}" for n, k in sorted(least))
                return f"the form that is served at any N and K takes {taken}"
        return f"of the forms that are served at any N and K, {len(self)}, none has these types and words"

    def functions(self, capability: tuple[int, int]) -> list[str]:
        """The functions of all forms that a GPU runs, each once."""
        forms = (form for form in self._forms.values() if serves(form.target, capability))
        return list(dict.fromkeys(f.name for form in forms for f in form.functions))


def write(forms: Iterable[FormSource]) -> dict[str, Any]:
    """The table of these forms, as `Universal.from_json` reads it; programs that are equal are there once."""
    rows, programs = [], dict[bytes, int]()
    for form in forms:
        functions = [[f.name, f.n_multiple, f.k_multiple, f.most_n] for f in form.functions]
        row = {
            "form": dict(zip(WORDS, form.words, strict=True)) | {"batched": form.batched},
            "target": form.target,
            "functions": functions,
            "program": programs.setdefault(canonical.dumps(form.costs.to_json()), len(programs)),
        }
        if any(equal_bits := [f.equal_bits for f in form.functions]):
            row["equal_bits"] = equal_bits
        if form.checked_on:
            row["checked_on"] = list(form.checked_on)
        rows.append(row)
    return {"schema": SCHEMA, "forms": rows, "programs": list(map(canonical.loads, programs))}


def machine_of(gpu: Gpu) -> tuple[int, int]:
    """What cost programs take of a GPU: its SMs, and its memory rate or, where the driver does not say, a usual one."""
    return gpu.multiprocessors, gpu.memory_gbps or H200.memory_gbps


def _takes(function: Function, signature: Signature) -> bool:
    return (
        signature.n % function.n_multiple == 0
        and signature.k % function.k_multiple == 0
        and signature.n <= function.most_n
    )


def _nodes(program: Any) -> int:
    """The constants and operations of a cost program, about, before it is read; 0 of what is none."""
    if not isinstance(program, dict):
        return 0
    constants, operations = program.get("constants"), program.get("operations")
    count = len(constants) if isinstance(constants, list) else 0
    return count + (operations.count(" ") + 1 if isinstance(operations, str) else 0)


def _key(obj: Any, where: str) -> tuple[Any, ...]:
    """What `Universal` keeps a form under, its words checked as a signature's are."""
    obj = table_fields(obj, _FORM_FIELDS, where)
    if type(obj["batched"]) is not bool:
        fail_table(where, f"batched must be true or false, found {obj['batched']!r:.50}")
    words = {word: obj[word] for word in WORDS}
    try:
        Signature.from_json(words | {"n": 256, "k": 256, "batch": 1})
    except RecordError as error:
        fail_table(where, str(error))
    return (*words.values(), obj["batched"])


def _checked_on(names: Any, where: str) -> tuple[str, ...]:
    if len(table_list(names, where)) > MAX_CHECKED_GPUS:
        fail_table(where, f"checked_on has {len(names)} names, at most {MAX_CHECKED_GPUS} are read")
    if not all(isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARACTERS for name in names):
        fail_table(where, f"checked_on must have names of GPUs, found {names!r:.300}")
    return tuple(names)


def _functions(row: Mapping[str, Any], targets: Mapping[str, str], where: str) -> tuple[Function, ...]:
    """Those of a form, with the number of each in `equal_bits`, where a new one is the least that was not there."""
    functions = table_list(row["functions"], where)
    numbers = table_list(row["equal_bits"], where) if "equal_bits" in row else [0] * len(functions)
    if len(numbers) != len(functions):
        fail_table(where, f"equal_bits needs a number for each of the {len(functions)} functions, found {len(numbers)}")
    most = 0
    for number in numbers:
        if not is_int(number, 0, most + 1):
            fail_table(where, f"equal_bits must be 0, or 1 and up in order of appearance, found {number!r:.50}")
        most = max(most, number)
    return tuple(
        _function(obj, number, row["target"], targets, where) for obj, number in zip(functions, numbers, strict=True)
    )


def _function(obj: Any, equal_bits: int, target: Any, targets: Mapping[str, str], where: str) -> Function:
    if not isinstance(obj, list) or len(obj) != 4:
        fail_table(where, f"a function is [name, multiple of N, of K, most N], found {obj!r:.100}")
    name, n_multiple, k_multiple, most_n = obj
    if not isinstance(name, str) or name not in targets or targets[name] != target:
        fail_table(where, f"function {name!r:.100} is not in the archive for {target!r:.50}")
    if not (is_int(n_multiple, 1, MAX_EXTENT) and is_int(k_multiple, 1, MAX_EXTENT) and is_int(most_n, 1, MAX_EXTENT)):
        fail_table(where, f"function {name!r:.100} has limits that are no positive integers")
    return Function(name, n_multiple, k_multiple, most_n, equal_bits)
