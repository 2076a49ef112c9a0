"""Whether a form of the table "universal" keeps its promises: its functions compute it, and its times are times.

What evaluating takes is counted (`aot.verify.evaluation.Budget`), since a small file can ask for much. Knows nothing of
archives or launches.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from runtime import native
from runtime.device.gpus import H200, Gpu
from runtime.errors import RecordError
from runtime.gemm.signature import Signature
from runtime.gemm.universal import INPUTS, Function
from runtime.limits import MAX_EXTENT
from runtime.program.costs import CostProgram
from runtime.program.operation import OVERLAPS
from runtime.program.record import Record
from runtime.tables.dispatch import record_mismatch, workspaces_of

from ..pack.forms import FormRow
from .evaluation import NATIVE_NODES, STEPS_OF_A_COST_NODE, STEPS_TO_READ_A_COST_NODE, Budget

# The grid that times are evaluated over, besides the least N and K that a function takes.
ROWS = (1, 16, 100, 1024, 8192, 65_536)
N, K = (4096, 131_072), (4096, 32_768)
GPUS = (H200, Gpu("NVIDIA H20", 78, 4000))
LARGE_N, LARGE_K = 131_072, 32_768  # about the most that a model has
PYTHON_EVERY = 5  # of the problems of the grid one in so many is evaluated by Python too where native code evaluates it


class Suiting:
    """Holds the functions of one form against it; what several share, their multiples or their tensors, once."""

    def __init__(self, row: FormRow) -> None:
        self._row = row
        self._samples: dict[Any, tuple[Signature, ...]] = {}  # by multiples and the most N
        self._mismatches: dict[Any, str | None] = {}  # by a record's tensors and a signature

    def samples(self, function: Function) -> tuple[Signature, ...]:
        """A signature of the form with the least N and K that a function says it takes, and a large one.

        Raises:
            RecordError: it takes no N, or no K.
        """
        limits = function.n_multiple, function.k_multiple, function.most_n
        if limits not in self._samples:
            self._samples[limits] = _samples(self._row, function)
        return self._samples[limits]

    def require_suited(self, function: Function, record: Record) -> None:
        """Hold a function's record against its `samples`.

        Raises:
            RecordError: it takes no N or no K, cannot compute one of `samples`, or is said to give equal bits at every
                M and takes a workspace.
        """
        for signature in self.samples(function):
            of = record.tensors, signature
            if of not in self._mismatches:
                self._mismatches[of] = record_mismatch(signature, record)
            if mismatch := self._mismatches[of]:
                raise RecordError(f"function {function.name} {mismatch}; build the archive again")
        if function.equal_bits and (spaces := workspaces_of(record)):
            raise RecordError(
                f"function {function.name} is to give equal bits at every M, but takes the workspace {spaces[0]}, so "
                "CTAs share tiles; build the archive again"
            )


def serial(signature: Signature) -> Signature:
    """`signature` without its promise: launches are the same with it."""
    return dataclasses.replace(signature, overlap=OVERLAPS[0])


class Costs:
    """The cost programs of a table, each read once and evaluated once for each problem, as far as the budget goes."""

    def __init__(self, programs: Sequence[Any], budget: Budget) -> None:
        self._programs, self._budget = programs, budget
        self._read: dict[int, tuple[CostProgram, CostProgram | None, int] | RecordError | None] = {}
        self._known: dict[tuple[int, tuple[float, ...]], tuple[list[float], bool]] = {}

    def check(self, row: FormRow) -> tuple[int, int]:
        """Evaluate a form's program over a grid: how many problems it was evaluated for, and how many were left out.

        Raises:
            RecordError: it is malformed, a time of a function that can compute a problem is not a positive number, or
                native code and Python do not agree.
        """
        problems = _problems(row)
        read = self._program(row.program)
        if read is None:
            return 0, len(problems)
        results, functions = read[0].results, row.form.functions
        if results != len(functions):
            raise RecordError(f"its cost program gives {results} times for {len(functions)} functions")
        batch = row.signature(2, 1).batch
        able: dict[tuple[int, int], list[int]] = {}  # places of functions that take an N and K
        for done, (m, n, k, gpu) in enumerate(problems):
            values = m, n, k, batch, gpu.multiprocessors, gpu.memory_gbps
            found = self._evaluate(row.program, read, values, compare=done % PYTHON_EVERY == 0)
            if found is None:
                return done, len(problems) - done
            times, are_times = found
            if are_times:
                continue
            if (n, k) not in able:
                able[n, k] = [place for place, f in enumerate(functions) if _takes(f, n, k)]
            for place in able[n, k]:
                if not _is_time(times[place]):
                    raise RecordError(
                        f"function {functions[place].name} is said to take {times[place]} us at M = {m}, N = {n}, "
                        f"K = {k} on {gpu.words()}; build the archive again"
                    )
        return len(problems), 0

    def _program(self, number: int) -> tuple[CostProgram, CostProgram | None, int] | None:
        """A program in native code, or where there is none in Python; in Python too where there is; its nodes."""
        if number not in self._read:
            self._read[number] = self._read_once(number)
        found = self._read[number]
        if isinstance(found, RecordError):
            raise found.with_traceback(None)
        return found

    def _read_once(self, number: int) -> tuple[CostProgram, CostProgram | None, int] | RecordError | None:
        obj, inputs = self._programs[number], len(INPUTS)
        nodes = _nodes(obj)
        if not self._budget.take(STEPS_TO_READ_A_COST_NODE * nodes):
            return None
        try:
            program = CostProgram.from_json(obj, inputs, "its cost program")
            in_python = CostProgram.from_json(obj, inputs, "its cost program", in_python=True)
        except RecordError as error:
            return error.with_traceback(None)
        return program, None if native.costs is None else in_python, nodes

    def _evaluate(
        self, number: int, read: tuple[CostProgram, CostProgram | None, int], values: tuple[float, ...], compare: bool
    ) -> tuple[list[float], bool] | None:
        """The times and whether each of them is one, or None where there is no budget left for them; `compare` native
        code's with Python's."""
        if (number, values) in self._known:
            return self._known[number, values]
        program, in_python, nodes = read
        steps = STEPS_OF_A_COST_NODE * nodes if in_python is None or compare else 0
        if not self._budget.take(steps + nodes // NATIVE_NODES):
            return None
        times = program.evaluate(values)
        if compare and in_python is not None and in_python.evaluate(values) != times:
            raise RecordError(f"native code and Python disagree on its times at {values}; report this")
        self._known[number, values] = times, all(map(_is_time, times))
        return self._known[number, values]


def _is_time(us: float) -> bool:
    return 0 < us < math.inf


def _problems(row: FormRow) -> list[tuple[int, int, int, Gpu]]:
    """M, N, K and the kind of GPU of the problems to evaluate a form's program for."""
    functions = row.form.functions
    least_n = min(f.n_multiple * _least_times(row, f) for f in functions)
    least_k = min(f.k_multiple for f in functions)
    ns, ks = (sorted({least, *each}) for least, each in ((least_n, N), (least_k, K)))
    return list(itertools.product(ROWS, ns, ks, GPUS))


def _least_times(row: FormRow, function: Function) -> int:
    """How many of a function's multiple the least N is: with a gate it is even."""
    return 2 if function.n_multiple % 2 and row.signature(2, 1).parts.gated else 1


def _samples(row: FormRow, function: Function) -> tuple[Signature, ...]:
    ns = _extents(function.n_multiple * _least_times(row, function), function.most_n, LARGE_N)
    ks = _extents(function.k_multiple, MAX_EXTENT, LARGE_K)
    if not ns or not ks:
        raise RecordError(
            f"function {function.name} takes no N or no K: multiples of {function.n_multiple} up to {function.most_n}, "
            f"and of {function.k_multiple}; build the archive again"
        )
    return tuple(dict.fromkeys(row.signature(n, k) for n, k in ((ns[0], ks[0]), (ns[-1], ks[-1]))))


def _extents(multiple: int, most: int, large: int) -> list[int]:
    """The least extent that is such a multiple, and the largest up to `large`; none above `most`."""
    return sorted({x for x in (multiple, min(large, most) // multiple * multiple) if 0 < x <= most})


def _takes(function: Function, n: int, k: int) -> bool:
    return n % function.n_multiple == 0 and k % function.k_multiple == 0 and n <= function.most_n


def _nodes(program: Any) -> int:
    """The constants and operations of a program that may be none; about."""
    try:
        return 1 + len(program["constants"]) + int(program["operations"].count(" "))
    except (TypeError, LookupError, AttributeError):
        return 1
