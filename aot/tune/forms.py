"""How the forms of a universal table are tuned: every function checked, and times that correct their estimates.

Forms whose kernels have the same tiles share what is measured: bf16 and f16, a bias or none. So a group of them is
timed at as many problems as any one alone would be. Like `session`, it asks for jobs and is sent their answers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.gemm.signature import Signature
from runtime.gemm.universal import FormSource, Function, UniversalForm, machine_of, write
from runtime.numbers.scaling import SCALINGS
from runtime.tables.dispatch import Capability, serves

from ..pack.forms import read
from ..search import universal
from ..search.costs import Machine
from ..search.legal import of_name, unsuited
from ..search.variants import Variant
from .halving import Measured
from .jobs import Answer, Job
from .session import CHECK_TOKENS, Tuned

_PROBLEMS = 48  # for each group of forms that are alike, as many in each regime of M
_REGIMES = (1, 64), (65, 511), (512, 8192)
_N, _K = (256, 32_768), (512, 16_384)
_MOST_FLOPS = 2.0**39  # a launch of about a millisecond, and a reference of about ten
_CHECKED_AT = (1, 1), (9, 17), (37, 5)  # N and K, in the least extents that a function takes; odd, so tiles hang over
_LEAST_EXTENT = 64
Time = tuple[Signature, universal.Measured]  # of functions at a problem, by which estimates are corrected
_TRIES = 100  # to draw a problem; functions that take only vast extents have none


class Task(NamedTuple):
    """A form to tune: its place in the table, what it is, and the (M, N, K) at which its functions are timed."""

    place: int
    form: UniversalForm
    problems: tuple[tuple[int, int, int], ...]


@dataclass
class TunedForm:
    """What was found of a form: functions that may not serve, with reasons, and the times at each problem."""

    rejected: dict[str, str] = field(default_factory=dict)
    times: list[tuple[Signature, Measured]] = field(default_factory=list)


def to_tune(archive: Archive, capability: Capability, gpu: Gpu, *, again: bool = False) -> list[Task]:
    """The forms for this GPU's targets whose functions were checked on no kind of GPU; with `again` also those that
    were checked on other kinds than its own."""
    table = read(archive)
    if table is None:
        return []

    def waits(form: UniversalForm) -> bool:
        not_checked = gpu.name not in form.checked_on if again else not form.checked_on
        return not_checked and serves(form.target, capability)

    mine = [(place, form) for place, (_, form) in enumerate(table.forms) if waits(form)]
    groups: dict[Any, list[int]] = {}
    for place, form in mine:
        groups.setdefault((form.target, _group(_sample(form))), []).append(place)
    found = []
    for place, form in mine:
        group = groups[form.target, _group(_sample(form))]
        count = len(range(group.index(place), _PROBLEMS, len(group)))
        found.append(Task(place, form, tuple(_problems(form, place, count))))
    return found


def are_for(archive: Archive, capability: Capability) -> bool:
    """Whether the archive has forms that such a GPU runs."""
    table = read(archive)
    return table is not None and any(serves(form.target, capability) for _, form in table.forms)


def steps(task: Task) -> int:
    """How many jobs `tune` asks for at most, which progress is told by."""
    return len(_CHECKED_AT) * len(_by_multiples(task.form)) + len(task.problems)


def tune(task: Task) -> Generator[Job, Answer, TunedForm]:
    """Tune one form: its functions are checked on few extents at many M, then at each problem, where they are timed."""
    found, form = TunedForm(), task.form

    def right(functions: Iterable[Function], n: int) -> tuple[str, ...]:
        return tuple(f.name for f in functions if f.name not in found.rejected and n <= f.most_n)

    for (n_step, k_step), alike in _by_multiples(form).items():
        for n, k in _CHECKED_AT:
            if names := right(alike, n * n_step):
                answer = yield Job(form.signature(n * n_step, k * k_step), names, CHECK_TOKENS)
                found.rejected |= answer.rejected
    for m, n, k in task.problems:
        if names := right(form.functions, n):
            signature = form.signature(n, k)
            answer = yield Job(signature, names, check=(m,), m=m, sustained=True)
            found.rejected |= answer.rejected
            if answer.measured is not None:
                found.times.append((signature, answer.measured))
    return found


def table(
    archive: Archive, tuned: Mapping[int, TunedForm], rejected: Collection[str], gpu: Gpu
) -> dict[str, Any] | None:
    """The archive's universal table without rejected functions; None where that leaves nothing, or there was none.

    `tuned` has every form that `to_tune` gave, or none: they are marked as checked on `gpu`, and their estimates are
    corrected by what was measured; not where they were checked on another kind first, by whose times they are corrected
    already: estimates know kinds by their rates, and have room for one kind's corrections.
    """
    there = read(archive)
    if there is None:
        return None
    forms, machine = [form for _, form in there.forms], Machine(*machine_of(gpu))
    known = {name: v for place in tuned for name, v in _variants(forms[place]).items()}
    measured = [
        (signature, universal.Measured(signature.n, signature.k, found.m, us, machine))
        for one in tuned.values()
        for signature, found in one.times
        if (us := {universal.choices_of(known[n]): t for n, t in found.short_us().items() if n in known})
    ]
    rows = []
    for place, form in enumerate(forms):
        left = universal.without(form.source(), rejected)
        if left is not None and place in tuned:
            left = left._replace(checked_on=tuple(dict.fromkeys((*form.checked_on, gpu.name))))
        if left is not None:
            first = place in tuned and left.checked_on[0] == gpu.name
            rows.append(_corrected(left, form, measured) if first else left)
    return write(rows) if rows else None


def corrected(forms: Iterable[UniversalForm], times: Sequence[Time]) -> dict[str, Any]:
    """The universal table of these forms with today's estimates, corrected by such times, of those that were checked on
    a GPU."""
    return write([_corrected(f.source(), f, times) if f.checked_on else f.source() for f in forms])


def tunings(archive: Archive, tuned: Mapping[int, TunedForm]) -> list[tuple[str, Tuned]]:
    """What was found at each signature, with the target, as the history keeps it."""
    there = read(archive)
    found: dict[tuple[str, Signature], Tuned] = {}
    for place, one in tuned.items():
        assert there is not None  # whose forms these are
        form = there.forms[place][1]
        for signature, measured in one.times:
            at = found.setdefault((form.target, signature), Tuned(signature, [f.name for f in form.functions]))
            at.measured = sorted([*at.measured, measured], key=lambda m: m.m)
    return [(target, of) for (target, _), of in found.items()]


def _corrected(row: FormSource, form: UniversalForm, measured: Sequence[Time]) -> FormSource:
    """The row with estimates that times of alike forms correct, where all of its functions are known variants."""
    signature, known = _sample(form), _variants(form)
    found = tuple([known[f.name] for f in row.functions if f.name in known])
    alike = [m for s, m in measured if _group(s) == _group(signature)]
    if not alike or len(found) < len(row.functions):
        return row
    lines = universal.corrections(found, signature, alike)
    return universal.source(universal.Chosen(signature, form.target, found, lines))._replace(checked_on=row.checked_on)


def _group(signature: Signature) -> tuple[Any, ...]:
    return (*universal.likeness(signature), signature.overlap)


def _variants(form: UniversalForm) -> dict[str, Variant]:
    """The variants that a form's functions were compiled from, by name, where a provider knows them."""
    found = ((f.name, of_name(f.name)) for f in form.functions)
    return {name: v for name, v in found if v is not None and unsuited(v, _sample(form)) is None}


def _by_multiples(form: UniversalForm) -> dict[tuple[int, int], list[Function]]:
    """Its functions by the least N and K of which they take all multiples."""
    found: dict[tuple[int, int], list[Function]] = {}
    for function in form.functions:
        found.setdefault((function.n_multiple, function.k_multiple), []).append(function)
    return found


def _multiples(form: UniversalForm) -> tuple[int, int]:
    """The least N and K of which every function of a form takes all multiples."""
    return math.lcm(*(f.n_multiple for f in form.functions)), math.lcm(*(f.k_multiple for f in form.functions))


def _sample(form: UniversalForm) -> Signature:
    n_step, k_step = _multiples(form)
    return form.signature(math.lcm(n_step, _LEAST_EXTENT), math.lcm(k_step, _LEAST_EXTENT))


def _problems(form: UniversalForm, place: int, count: int) -> list[tuple[int, int, int]]:
    """M, N and K of so many problems, the same each time: log-uniform, M in turns from each regime, none too large.

    They are fewer where all that functions take is too large.
    """
    drawn, found = random.Random(place), list[tuple[int, int, int]]()
    n_step, k_step = _multiples(form)
    # Whole blocks are what weights come in, and all that torch has a kernel for.
    scaling = SCALINGS[form.signature(n_step, k_step).scaling]
    whole = max(_LEAST_EXTENT, scaling.k or 1, scaling.rows_b or 1)
    steps = math.lcm(n_step, whole), math.lcm(k_step, whole)

    def log_uniform(low: int, high: int, step: int = 1) -> int:
        return max(1, round(math.exp(drawn.uniform(math.log(low), math.log(high))) / step)) * step

    for _ in range(_TRIES * count):
        m = log_uniform(*_REGIMES[(len(found) + place) % len(_REGIMES)])
        n, k = log_uniform(*_N, steps[0]), log_uniform(*_K, steps[1])
        if form.signature(n, k).flops(m) <= _MOST_FLOPS:
            found.append((m, n, k))
        if len(found) == count:
            break
    return found
