"""Whether a launch program makes launches that a GPU takes: evaluated for one shape, as a server evaluates it.

What that takes is counted, since a small file can ask for much. Knows nothing of archives, tables or cubins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from runtime.device.launch import CLUSTER_DIMENSION, PREFERRED_CLUSTER_DIMENSION, Launch
from runtime.errors import ArgumentError, ProgramError, RecordError
from runtime.program.evaluator import PythonEvaluator
from runtime.program.program import NativeEvaluator
from runtime.program.record import DeviceArgument, Record, TensorArgument, WorkspaceArgument
from runtime.program.slots import outside, tensors_of

from ..search.h200 import MULTIPROCESSORS  # of the GPU that programs are evaluated for
from . import shapes

# CTAs of a cluster: CUDA allows 8 on every GPU that has clusters; Hopper and later data-centre GPUs allow 16 to kernels
# that opt in to a non-portable size (CUDA C++ programming guide, thread block clusters).
MAX_CLUSTER_CTAS = 16

# What evaluating may take, in steps: one is a node of a program in Python, about 0.2 us. Found: 5.8 million steps in
# 700,140 bytes, which may take 12.6 million.
ALLOWANCE_STEPS = 1 << 22  # of an archive, and besides
STEPS_OF_A_BYTE = 12  # for each byte of its file
STEPS_OF_A_SHAPE = 256  # for which a call is made up, bound and evaluated, and for
STEPS_OF_A_NUMBER = 32  # each extent and stride of its tensors,
STEPS_OF_A_SLOT = 8  # each place of a pointer
NATIVE_NODES = 16  # and so many nodes where native code evaluates them
STEPS_TO_READ_A_COST_NODE = 16  # of a cost program, by Python and by native code
STEPS_OF_A_COST_NODE = 3  # evaluated in Python: about 0.6 us
PYTHON_SHAPES = 2  # of a function, that Python evaluates too where native code does


class Budget:
    """The steps that evaluating the launches of an archive may still take."""

    def __init__(self, file_bytes: int) -> None:
        self.most_steps = self._left = ALLOWANCE_STEPS + STEPS_OF_A_BYTE * file_bytes

    def take(self, steps: int) -> bool:
        """Take that many steps; False, and none are taken, where fewer are left."""
        if steps > self._left:
            return False
        self._left -= steps
        return True


class Case(NamedTuple):
    """One shape to evaluate for: what it is in words, and the free extents."""

    what: str
    extents: dict[str, int]


class Evaluator:
    """A record's program, in native code where that reads it, and for the first shapes in Python too."""

    def __init__(self, obj: dict[str, Any], record: Record) -> None:
        self._record, self._program = record, obj["program"]
        self._native = isinstance(record.program._evaluator, NativeEvaluator)
        self._python: PythonEvaluator | None = None
        self._evaluated = 0
        devices = (a for a in record.leaves() if isinstance(a, DeviceArgument))
        self._clusters = {a.name: max(MULTIPROCESSORS // a.cluster_size, 1) for a in devices}
        numbers = sum(2 * len(a.shape) for a in record.leaves() if isinstance(a, TensorArgument))
        slots = sum(len(p["slots"]) for launch in self._program["launches"] for p in launch["parameters"])
        self._steps = STEPS_OF_A_SHAPE + STEPS_OF_A_NUMBER * numbers + STEPS_OF_A_SLOT * slots

    @property
    def steps_to_read(self) -> int:
        """What it takes Python to read the program, and to evaluate what no input enters."""
        return len(orjson.dumps(self._program)) + self._record.program.steps

    @property
    def steps(self) -> int:
        """What the next shape takes."""
        nodes = self._record.program.steps
        if not self._native:
            return self._steps + nodes
        return self._steps + nodes // NATIVE_NODES + (nodes if self._evaluated < PYTHON_SHAPES else 0)

    def launch(self, case: Case) -> str | None:
        """Check the launches for one shape; why there are none, if there are none.

        Raises:
            RecordError: they cannot work, or native code and Python do not agree on them.
        """
        record = self._record
        arguments = shapes.arguments(record, case.extents)
        try:
            values = record.bind(arguments, self._clusters).values
        except ArgumentError as error:
            return f"{case.what}: {error}"
        found = _outcome(record.program, values)
        if self._native and self._evaluated < PYTHON_SHAPES and _outcome(self._in_python(), values) != found:
            raise RecordError(
                f"function {record.name}: native code and Python disagree on its launches for {case.what}; report this"
            )
        self._evaluated += 1
        if isinstance(found, str):
            return f"{case.what}: {found}"
        views = list(tensors_of(arguments))
        for number, launch in enumerate(found):
            problem = _cluster_problem(launch) or outside(launch, record.program.pointers, views, self._workspaces())
            if problem:
                raise RecordError(f"function {record.name}: launch {number} for {case.what} {problem}; build it again")
        return None

    def _in_python(self) -> PythonEvaluator:
        if self._python is None:
            read, program = self._record.program, self._program
            inputs = read.values, program["nodes"], program["launches"], len(read.pointers), read.kernels
            self._python = PythonEvaluator.from_json(*inputs)
        return self._python

    def _workspaces(self) -> list[int]:
        spaces = (a for a in self._record.leaves() if isinstance(a, WorkspaceArgument))
        return [a.bytes * (1 if a.each is None else self._clusters[a.each]) for a in spaces]


def _outcome(evaluator: Any, values: tuple[int, ...]) -> tuple[Launch, ...] | str:
    """The launches, or why there are none."""
    try:
        launches: tuple[Launch, ...] = evaluator.evaluate(values, None).launches
    except ProgramError as error:
        return str(error)
    return launches


def _cluster_problem(launch: Launch) -> str | None:
    """Why no GPU takes its clusters, as the end of a sentence; None where one does."""
    attributes = dict(launch.attributes)
    cluster = attributes.get(CLUSTER_DIMENSION, (1, 1, 1))
    for what, extents in (("", cluster), ("preferred ", attributes.get(PREFERRED_CLUSTER_DIMENSION, cluster))):
        x, y, z = extents
        if min(extents) < 1 or x * y * z > MAX_CLUSTER_CTAS:
            return f"has {what}clusters of {x} x {y} x {z} CTAs; a cluster has 1 to {MAX_CLUSTER_CTAS}"
        if any(n % extent for n, extent in zip(launch.grid, extents, strict=True)):
            return f"has a grid of {launch.grid}, which {what}clusters of {x} x {y} x {z} CTAs do not divide"
        if any(n % extent for n, extent in zip(extents, cluster, strict=True)):
            return f"has preferred clusters of {x} x {y} x {z} CTAs, which those of {cluster} do not divide"
    return None
