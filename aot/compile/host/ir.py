"""The DSL's lowered host function to a launch program. The only file that knows the DSL's lowered IR.

A compiled CuTe DSL function carries its host side as LLVM-dialect MLIR: it computes grid, block, attributes and
parameter bytes, and calls `_cudaLaunchKernelEx(config, kernel, params)`. This module walks that function once with
symbolic inputs. What is constant folds away; what depends on extents, strides and scalars becomes expressions;
branches on run-time values become selects and integer loops become loop nodes; pointers are followed separately and
must end as 8-byte slots: the plain address or word 0 of a TMA descriptor, plus an addend that no pointer enters.

That last point is proven here, for every path at once: an operation that would let a pointer reach anything else is
refused by name. So are a launch under a run-time condition, a host access to a tensor's memory, and any operation
this file does not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.device.launch import ATTRIBUTE_WORDS, COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION
from runtime.numbers.dtypes import DTYPES
from runtime.program.arguments import (
    Argument,
    DeviceArgument,
    ScalarArgument,
    StreamArgument,
    Symbol,
    TensorArgument,
    TupleArgument,
    WorkspaceArgument,
)
from runtime.program.arithmetic import OPERATIONS
from runtime.program.program import LaunchSource, ParameterSource, ProgramSource

from .expressions import Graph, Loop, Node, Writer
from .text import Block, Operation, parse_function
from .types import POINTER, Aggregate, HostIRError, Scalar, Type, leaves, parse_type, split_types

# Raised whenever extraction changes what it writes for the same function: it is part of every cache key.
EXTRACTION_VERSION = 1

_PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
_LAUNCH = "_cudaLaunchKernelEx"
# cudaLaunchConfig_t: grid at 0, block at 12, dynamic shared memory at 24, stream at 32, attributes at 40, count at 48.
_CONFIG_GRID, _CONFIG_BLOCK, _CONFIG_SHARED, _CONFIG_STREAM, _CONFIG_ATTRIBUTES, _CONFIG_COUNT = 0, 12, 24, 32, 40, 48
_ATTRIBUTE_STRIDE, _ATTRIBUTE_VALUE = 72, 8
_MAX_STEPS = 200_000


# --- what a value can be ---


@dataclass(eq=False)
class Memory:
    """A stack object of the host function: its scalars by byte offset."""

    type: Type
    count: int
    cells: dict[int, tuple[int, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Local:
    """The address of a byte in a stack object."""

    memory: Memory
    offset: int = 0


@dataclass(frozen=True)
class Global:
    """The address of a named global, or what was loaded from it (a kernel handle)."""

    name: str
    loaded: bool = False


@dataclass(frozen=True)
class Address:
    """A tensor's pointer, plus `addend` (64 bits), part of the way to a TMA descriptor's first word.

    `stage`: "raw", then "div16" (p / 16), "masked" (& 2^53 - 1) and "tma" (<< 4).
    """

    pointer: int
    addend: Node
    stage: str = "raw"


@dataclass(frozen=True)
class Stream:
    """The stream argument."""


UNDEFINED = object()


# --- the walk ---


@dataclass
class RawLaunch:
    """A launch as the walk met it: config object, kernel, and parameter objects."""

    config: Memory
    kernel: Global
    parameters: list[Memory]


class Walk:
    """One symbolic execution of a host function."""

    def __init__(self, blocks: dict[str, Block], graph: Graph) -> None:
        self.blocks = blocks
        self.graph = graph
        self.values: dict[str, Any] = {}
        self.launches: list[RawLaunch] = []
        self._branch_depth = 0
        self._loop: Loop | None = None
        self._steps = 0
        self._successors = {name: self._block_successors(b) for name, b in blocks.items()}
        self._reach = {name: self._reachable(name) for name in blocks}

    @staticmethod
    def _block_successors(block: Block) -> list[str]:
        return block.operations[-1].successors if block.operations else []

    def _reachable(self, start: str) -> frozenset[str]:
        seen: set[str] = set()
        todo = list(self._successors[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo.extend(self._successors[name])
        return frozenset(seen)

    def run(self, arguments: list[Any]) -> None:
        """Execute from the entry block to the return."""
        self._execute(next(iter(self.blocks)), arguments, None)

    def _execute(self, block: str, arguments: list[Any], stop: str | None) -> list[Any] | None:
        """Run from `block` until `stop` is entered (returning the arguments it is given) or the function returns."""
        while block != stop:
            self._enter(block, arguments)
            terminator = self._operations(block)
            if terminator.name == "llvm.return":
                return None
            if terminator.name == "llvm.br":
                block, arguments = terminator.successors[0], [self.values[o] for o in terminator.operands]
            elif terminator.name == "llvm.cond_br":
                block, arguments = self._branch(block, terminator, arguments)
            else:
                raise HostIRError(f"the host function ends a block with {terminator.name}")
        return arguments

    def _enter(self, block: str, arguments: list[Any]) -> None:
        names = self.blocks[block].arguments
        if len(names) != len(arguments):
            raise HostIRError(f"block {block} takes {len(names)} arguments, {len(arguments)} were passed")
        for (name, _), value in zip(names, arguments, strict=True):
            self.values[name] = value

    def _operations(self, block: str) -> Operation:
        *body, terminator = self.blocks[block].operations
        for operation in body:
            self._steps += 1
            if self._steps > _MAX_STEPS:
                raise HostIRError("the host function does not end")
            self._operation(operation)
        return terminator

    def _targets(self, terminator: Operation) -> list[tuple[str, list[Any]]]:
        _, when_true, _ = terminator.integers("operandSegmentSizes")
        passed = [self.values[o] for o in terminator.operands[1:]]
        return [
            (terminator.successors[0], passed[:when_true]),
            (terminator.successors[1], passed[when_true:]),
        ]

    def _branch(self, block: str, terminator: Operation, entered_with: list[Any]) -> tuple[str, list[Any]]:
        condition = self.values[terminator.operands[0]]
        if not isinstance(condition, Node):
            raise HostIRError("a branch depends on a pointer")
        targets = self._targets(terminator)
        if condition.constant is not None:
            return targets[0 if condition.constant else 1]
        if block in self._reach[block]:
            return self._symbolic_loop(block, entered_with)
        join = self._join(block)
        before = self._snapshot()
        self._branch_depth += 1
        outcomes = []
        for target, arguments in targets:
            self._restore(before)
            outcomes.append((self._execute(target, arguments, join), self._snapshot()))
        self._branch_depth -= 1
        (a, memory_a), (b, memory_b) = outcomes
        if a is None or b is None:
            raise HostIRError("the host function returns under a run-time condition")
        self._restore(self._merge_memory(condition, memory_a, memory_b))
        return join, [self._merge(condition, x, y) for x, y in zip(a, b, strict=True)]

    def _join(self, block: str) -> str:
        """The nearest block that every path from `block` passes (its immediate post-dominator)."""
        candidates = [n for n in self._reach[block] if n != block and self._always_passes(block, n)]
        for name in candidates:
            if all(name == other or other in self._reach[name] for other in candidates):
                return name
        raise HostIRError("a run-time condition whose two sides never meet again")

    def _always_passes(self, start: str, through: str) -> bool:
        seen, todo = {start}, [start]
        while todo:
            name = todo.pop()
            terminator = self.blocks[name].operations[-1].name
            if terminator == "llvm.return":
                return False
            for successor in self._successors[name]:
                if successor != through and successor not in seen:
                    seen.add(successor)
                    todo.append(successor)
        return True

    def _symbolic_loop(self, header: str, entered_with: list[Any]) -> tuple[str, list[Any]]:
        """A loop whose end depends on run-time values, entered at `header` with integers, without side effects."""
        if self._loop is not None:
            raise HostIRError("a run-time loop inside a run-time loop")
        if not all(isinstance(x, Node) for x in entered_with):
            raise HostIRError("a run-time loop carries a pointer")
        loop = self._loop = self.graph.loop(tuple(entered_with))
        self._enter(header, list(loop.variables))
        terminator = self._operations(header)
        test = self.values[terminator.operands[0]]
        targets = self._targets(terminator)
        stays = [header == t or header in self._reach[t] for t, _ in targets]
        if stays.count(True) != 1:
            raise HostIRError("a run-time loop with more than one way on")
        inside = stays.index(True)
        loop.test = test if inside == 0 else self.graph.op("xor", 1, test, self.graph.const(1, 1))
        following = self._execute(*targets[inside], header)
        if following is None:
            raise HostIRError("a run-time loop that returns")
        loop.following = tuple(following)
        self._loop = None
        self._enter(header, [self.graph.loop_result(loop, i) for i in range(len(loop.initial))])
        return self._targets(self._operations(header))[1 - inside]

    # memory under run-time conditions

    def _memories(self) -> list[Memory]:
        found: dict[int, Memory] = {}

        def walk(value: Any) -> None:
            if isinstance(value, Local) and id(value.memory) not in found:
                found[id(value.memory)] = value.memory
                for _, inner in value.memory.cells.values():
                    walk(inner)

        for value in self.values.values():
            walk(value)
        return list(found.values())

    def _snapshot(self) -> dict[int, tuple[Memory, dict[int, tuple[int, Any]]]]:
        return {id(m): (m, dict(m.cells)) for m in self._memories()}

    @staticmethod
    def _restore(snapshot: dict[int, tuple[Memory, dict[int, tuple[int, Any]]]]) -> None:
        for memory, cells in snapshot.values():
            memory.cells = dict(cells)

    def _merge_memory(
        self,
        condition: Node,
        a: dict[int, tuple[Memory, dict[int, tuple[int, Any]]]],
        b: dict[int, tuple[Memory, dict[int, tuple[int, Any]]]],
    ) -> dict[int, tuple[Memory, dict[int, tuple[int, Any]]]]:
        merged = {**a, **b}
        for key in a.keys() & b.keys():
            memory, cells_a = a[key]
            cells_b = b[key][1]
            cells = {}
            for offset in cells_a.keys() & cells_b.keys():
                (size_a, x), (size_b, y) = cells_a[offset], cells_b[offset]
                if size_a != size_b:
                    raise HostIRError("memory written in two widths under a run-time condition")
                cells[offset] = (size_a, self._merge(condition, x, y))
            if cells_a.keys() != cells_b.keys():
                raise HostIRError("memory written on one side of a run-time condition only")
            merged[key] = (memory, cells)
        return merged

    def _merge(self, condition: Node, a: Any, b: Any) -> Any:
        if a is b or a == b:
            return a
        if isinstance(a, Node) and isinstance(b, Node):
            return self.graph.op("select", a.width, condition, a, b)
        if isinstance(a, Address) and isinstance(b, Address) and (a.pointer, a.stage) == (b.pointer, b.stage):
            return Address(a.pointer, self.graph.op("select", 64, condition, a.addend, b.addend), a.stage)
        if isinstance(a, list) and isinstance(b, list):
            return [self._merge(condition, x, y) for x, y in zip(a, b, strict=True)]
        raise HostIRError("a run-time condition chooses between pointers")

    # operations

    def _operation(self, o: Operation) -> None:
        name = o.name.removeprefix("llvm.")
        handler = getattr(self, "_op_" + name.replace(".", "_"), None)
        if handler is not None:
            result = handler(o)
        elif name in OPERATIONS or name.removeprefix("intr.") in OPERATIONS:
            result = self._arithmetic(name.removeprefix("intr."), o)
        else:
            raise HostIRError(f"unknown host operation {o.name}")
        if o.results:
            self.values[o.results[0]] = result

    def _operands(self, o: Operation) -> list[Any]:
        return [self.values[x] for x in o.operands]

    def _integer_type(self, text: str, what: str) -> int:
        t = parse_type(text)
        if not isinstance(t, Scalar) or t.kind != "int":
            raise HostIRError(f"{what} on {text}: only integer arithmetic is supported on the host")
        return t.bits

    def _arithmetic(self, op: str, o: Operation) -> Any:
        width = self._integer_type(o.result_types[0], o.name)
        operands = self._operands(o)
        if any(x is UNDEFINED for x in operands):
            raise HostIRError(f"{o.name} on an undefined value")
        if any(isinstance(x, Address) for x in operands):
            return self._address_arithmetic(op, operands)
        if not all(isinstance(x, Node) for x in operands):
            raise HostIRError(f"{o.name} on a pointer")
        if op in ("zext", "sext", "trunc"):
            if o.integer("overflowFlags") or "nonNeg" in split_types(o.attributes):
                raise HostIRError(f"{o.name} with flags {o.attributes}")
            return self.graph.op(op, width, *operands)
        if op in ("ctlz", "abs"):
            flag = o.attribute("is_zero_poison" if op == "ctlz" else "is_int_min_poison")
            return self.graph.op(op, width, operands[0], int((flag or "false").startswith("true")))
        flags = []
        overflow = o.integer("overflowFlags")
        if overflow & ~3:
            raise HostIRError(f"{o.name} with unknown overflow flags {overflow}")
        flags += ["nsw"] * (overflow & 1) + ["nuw"] * (overflow >> 1 & 1)
        unit = [part for part in split_types(o.attributes) if "=" not in part]
        for flag in unit:
            if flag not in ("isExact", "isDisjoint"):
                raise HostIRError(f"{o.name} with unknown flag {flag}")
        flags += [name for flag, name in (("isExact", "exact"), ("isDisjoint", "disjoint")) if flag in unit]
        return self.graph.op(op, width, *operands, flags=tuple(flags))

    def _address_arithmetic(self, op: str, operands: list[Any]) -> Address:
        """The few steps a pointer may take: plus an integer, and the three that make a TMA descriptor's first word."""
        a, b = operands[0], operands[-1]
        if op == "add" and isinstance(b, Address) and isinstance(a, Node):
            a, b = b, a
        if len(operands) == 2 and isinstance(a, Address) and isinstance(b, Node):
            if a.stage == "raw" and op in ("add", "sub"):
                return Address(a.pointer, self.graph.op(op, 64, a.addend, b))
            step = (a.stage, op, b.constant)
            if step in (("raw", "udiv", 16), ("raw", "lshr", 4)):
                return Address(a.pointer, a.addend, "div16")
            if step == ("div16", "and", (1 << 53) - 1):
                return Address(a.pointer, a.addend, "masked")
            if step in (("masked", "shl", 4), ("masked", "mul", 16)):
                return Address(a.pointer, a.addend, "tma")
        raise HostIRError(f"host arithmetic on a tensor's address: {op} is not one of the forms a slot can hold")

    def _op_icmp(self, o: Operation) -> Node:
        a, b = self._operands(o)
        if not isinstance(a, Node) or not isinstance(b, Node):
            raise HostIRError("the host code compares pointers")
        return self.graph.op(_PREDICATES[o.integer("predicate")], 1, a, b)

    def _op_select(self, o: Operation) -> Any:
        condition, a, b = self._operands(o)
        if not isinstance(condition, Node):
            raise HostIRError("a select depends on a pointer")
        if condition.constant is not None:
            return a if condition.constant else b
        return self._merge(condition, a, b)

    def _op_mlir_constant(self, o: Operation) -> Any:
        t = parse_type(o.result_types[0])
        text = o.attribute("value") or ""
        if isinstance(t, Scalar):
            return self._constant(t, text.split(":")[0].strip())
        match = re.fullmatch(r"dense<\[?([^\]<>]*)\]?> : .*", text)
        if not match or not all(isinstance(m, Scalar) for m in t.members):
            raise HostIRError(f"a constant of type {o.result_types[0]}")
        parts = [p.strip() for p in match.group(1).split(",")]
        parts = parts * len(t.members) if len(parts) == 1 else parts
        return [self._constant(m, p) for m, p in zip(t.members, parts, strict=True) if isinstance(m, Scalar)]

    def _constant(self, t: Scalar, text: str) -> Node:
        if t.kind == "int":
            value = {"true": 1, "false": 0}.get(text)
            return self.graph.const(t.bits, int(text, 0) if value is None else value)
        raise HostIRError(f"a {t.kind} constant on the host")

    def _op_mlir_poison(self, o: Operation) -> Any:
        return _undefined(parse_type(o.result_types[0]))

    _op_mlir_undef = _op_mlir_poison

    def _op_mlir_zero(self, o: Operation) -> Any:
        def zero(t: Type) -> Any:
            if isinstance(t, Aggregate):
                return [zero(m) for m in t.members]
            if t.kind == "int":
                return self.graph.const(t.bits, 0)
            raise HostIRError(f"a zero of type {o.result_types[0]}")

        return zero(parse_type(o.result_types[0]))

    def _op_mlir_addressof(self, o: Operation) -> Global:
        return Global((o.attribute("global_name") or "").lstrip("@"))

    def _op_extractvalue(self, o: Operation) -> Any:
        value = self.values[o.operands[0]]
        for i in o.integers("position"):
            value = value[i]
        return value

    def _op_insertvalue(self, o: Operation) -> Any:
        container, value = self._operands(o)

        def put(into: list[Any], path: list[int]) -> list[Any]:
            copy = list(into)
            copy[path[0]] = value if len(path) == 1 else put(copy[path[0]], path[1:])
            return copy

        return put(container, o.integers("position"))

    def _op_alloca(self, o: Operation) -> Local:
        count = self.values[o.operands[0]]
        if not isinstance(count, Node) or count.constant is None:
            raise HostIRError("a stack object whose size is not constant")
        return Local(Memory(parse_type(o.attribute("elem_type") or ""), count.constant))

    def _op_getelementptr(self, o: Operation) -> Any:
        base, *dynamic = self._operands(o)
        indices: list[Any] = []
        for raw in o.integers("rawConstantIndices"):
            indices.append(dynamic.pop(0) if raw == -(2**31) else self.graph.const(32, raw))
        t = parse_type(o.attribute("elem_type") or "")
        offset = self._scaled(indices[0], t.bytes)
        for index in indices[1:]:
            if not isinstance(t, Aggregate):
                raise HostIRError("an element address inside a scalar")
            if index.constant is not None:
                offset = self.graph.op("add", 64, offset, self.graph.const(64, t.offsets[index.constant]))
                t = t.members[index.constant]
            else:
                t = t.members[0]
                offset = self.graph.op("add", 64, offset, self._scaled(index, t.bytes))
        if isinstance(base, Address):
            return self._address_arithmetic("add", [base, offset])
        if isinstance(base, Local) and offset.constant is not None:
            return Local(base.memory, base.offset + offset.constant)
        if isinstance(base, Global) and offset.constant == 0:
            return base
        raise HostIRError("an element address that is not constant")

    def _scaled(self, index: Any, size: int) -> Node:
        if not isinstance(index, Node):
            raise HostIRError("an element address that depends on a pointer")
        wide = index if index.width == 64 else self.graph.op("sext", 64, index)
        return self.graph.op("mul", 64, wide, self.graph.const(64, size))

    def _op_ptrtoint(self, o: Operation) -> Any:
        if self._integer_type(o.result_types[0], o.name) != 64:
            raise HostIRError("a pointer cut to fewer than 64 bits")
        return self.values[o.operands[0]]

    def _op_inttoptr(self, o: Operation) -> Any:
        value = self.values[o.operands[0]]
        if isinstance(value, Address) and value.stage != "raw":
            raise HostIRError("a pointer made of part of a TMA descriptor")
        if not isinstance(value, Address | Local):
            raise HostIRError("a pointer made of an integer")
        return value

    def _op_addrspacecast(self, o: Operation) -> Any:
        return self.values[o.operands[0]]

    _op_bitcast = _op_addrspacecast

    def _op_store(self, o: Operation) -> None:
        value, place = self._operands(o)
        if not isinstance(place, Local):
            raise HostIRError("the host code writes to memory that is not its own")
        if self._loop is not None:
            raise HostIRError("the host code writes memory in a run-time loop")
        flat = _flatten(value)
        for (offset, scalar), leaf in zip(leaves(parse_type(o.operand_types[0]), place.offset), flat, strict=True):
            cells = place.memory.cells
            for start in [s for s, (n, _) in cells.items() if s < offset + scalar.bytes and offset < s + n]:
                if (start, cells[start][0]) != (offset, scalar.bytes):
                    raise HostIRError("the host code overwrites part of a value")
            if leaf is UNDEFINED:
                cells.pop(offset, None)
            else:
                cells[offset] = (scalar.bytes, leaf)

    def _op_load(self, o: Operation) -> Any:
        place = self.values[o.operands[0]]
        if isinstance(place, Global):
            return Global(place.name, loaded=True)
        if not isinstance(place, Local):
            raise HostIRError("the host code reads a tensor's memory")

        def read(t: Type, offset: int) -> Any:
            if isinstance(t, Aggregate):
                return [read(m, offset + at) for m, at in zip(t.members, t.offsets, strict=True)]
            size, value = place.memory.cells.get(offset, (t.bytes, UNDEFINED))
            if size != t.bytes:
                raise HostIRError("the host code reads part of a value")
            return value

        return read(parse_type(o.result_types[0]), place.offset)

    def _op_call(self, o: Operation) -> Any:
        callee = (o.attribute("callee") or "").lstrip("@")
        if callee != _LAUNCH:
            raise HostIRError(f"the host function calls {callee}")
        if self._branch_depth or self._loop is not None:
            raise HostIRError("a launch under a run-time condition or in a run-time loop")
        config, kernel, array = self._operands(o)
        if not isinstance(config, Local) or not isinstance(array, Local) or not isinstance(kernel, Global):
            raise HostIRError("a launch whose config, kernel or parameters are not what the DSL writes")
        parameters = []
        for index in range(array.memory.count):
            place = array.memory.cells.get(8 * index, (8, UNDEFINED))[1]
            if not isinstance(place, Local) or place.offset:
                raise HostIRError(f"launch parameter {index} is not a stack object")
            parameters.append(_frozen(place.memory))
        self.launches.append(RawLaunch(_frozen(config.memory), kernel, parameters))
        return self.graph.const(32, 0)


def _frozen(memory: Memory) -> Memory:
    return Memory(memory.type, memory.count, dict(memory.cells))


def _undefined(t: Type) -> Any:
    return [_undefined(m) for m in t.members] if isinstance(t, Aggregate) else UNDEFINED


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [leaf for x in value for leaf in _flatten(x)]
    return [value]


# --- arguments ---


def _argument_inputs(
    tree: Sequence[Argument], symbols: Mapping[str, Symbol]
) -> tuple[list[tuple[str, Any]], list[tuple[str, int]], list[str]]:
    """The host function's flattened inputs by the argument tree: (kind, what) pairs, then values and pointers."""
    flat: list[tuple[str, Any]] = []
    pointers: list[str] = []
    values: dict[str, int] = {name: s.width for name, s in symbols.items()}

    def walk(arguments: Sequence[Argument]) -> None:
        for a in arguments:
            if isinstance(a, TensorArgument | WorkspaceArgument):
                flat.append(("pointer", len(pointers)))
                pointers.append(a.name)
                if isinstance(a, TensorArgument):
                    flat.extend(("value", x) for x in (*a.shape, *a.strides) if isinstance(x, str))
            elif isinstance(a, ScalarArgument | DeviceArgument):
                values[a.name] = DTYPES[a.dtype].bits if isinstance(a, ScalarArgument) else 32
                flat.append(("value", a.name))
            elif isinstance(a, StreamArgument):
                flat.append(("stream", None))
            elif isinstance(a, TupleArgument):
                walk(a.items)

    walk(tree)
    return flat, list(values.items()), pointers


def _bind_arguments(entry: Block, flat: list[tuple[str, Any]], widths: Mapping[str, int], graph: Graph) -> list[Any]:
    """The entry block's arguments as symbolic values; the tree must flatten to exactly the function's signature."""
    todo = list(flat)

    def take(t: Type) -> Any:
        if isinstance(t, Aggregate):
            return [take(m) for m in t.members]
        if not todo:
            raise HostIRError("the host function has more arguments than the argument tree")
        kind, what = todo.pop(0)
        if kind == "value":
            if t.kind == "ptr" or widths[what] != t.bits:
                raise HostIRError(f"argument {what} is {widths[what]} bits wide, the host function takes {t}")
            return graph.input(what, t.bits)
        if t != POINTER:
            raise HostIRError(f"the host function takes {t} where the argument tree has a {kind}")
        return Stream() if kind == "stream" else Address(what, graph.const(64, 0))

    bound = [take(parse_type(text)) for _, text in entry.arguments]
    if todo:
        raise HostIRError(f"the argument tree has {len(todo)} more inputs than the host function: {todo}")
    return bound


# --- writing ---


class _ProgramWriter:
    def __init__(self, graph: Graph, values: list[tuple[str, int]], kernels: list[str]) -> None:
        self.graph, self.writer, self.kernels = graph, Writer(values), kernels

    def launch(self, raw: RawLaunch) -> LaunchSource:
        cells = raw.config.cells
        if cells.get(_CONFIG_STREAM, (8, None))[1] != Stream():
            raise HostIRError("a launch on another stream than the caller's")
        return LaunchSource(
            kernel=self.kernels.index(raw.kernel.name),
            grid=[self._cell(cells, _CONFIG_GRID + 4 * i, "grid") for i in range(3)],
            block=[self._cell(cells, _CONFIG_BLOCK + 4 * i, "block") for i in range(3)],
            shared_bytes=self._cell(cells, _CONFIG_SHARED, "shared memory"),
            attributes=self._attributes(cells),
            parameters=[self._parameter(m, i) for i, m in enumerate(raw.parameters)],
        )

    def _cell(self, cells: dict[int, tuple[int, Any]], offset: int, what: str) -> int:
        value = cells.get(offset, (0, None))[1]
        if not isinstance(value, Node):
            raise HostIRError(f"a launch whose {what} is not an integer")
        return self.writer.number(value)

    def _attributes(self, cells: dict[int, tuple[int, Any]]) -> list[tuple[int, list[int]]]:
        count = cells[_CONFIG_COUNT][1]
        if not isinstance(count, Node) or count.constant is None:
            raise HostIRError("a launch whose number of attributes is not constant")
        if count.constant == 0:
            return []
        array = cells[_CONFIG_ATTRIBUTES][1]
        written: list[tuple[int, list[int]]] = []
        for i in range(count.constant):
            base = array.offset + _ATTRIBUTE_STRIDE * i
            identity = array.memory.cells[base][1].constant
            if identity not in ATTRIBUTE_WORDS:
                raise HostIRError(f"unknown launch attribute {identity}")
            nodes = [array.memory.cells[base + _ATTRIBUTE_VALUE + 4 * w][1] for w in range(ATTRIBUTE_WORDS[identity])]
            if identity in (COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION) and nodes[0].constant == 0:
                continue  # switched off: the same as absent
            written.append((identity, [self.writer.number(n) for n in nodes]))
        return sorted(written)

    def _parameter(self, memory: Memory, index: int) -> ParameterSource:
        size = memory.type.bytes * memory.count
        words, slots = list[tuple[int, int, int]](), list[tuple[int, str, int, int | None]]()
        for offset, (count, value) in sorted(memory.cells.items()):
            if isinstance(value, Node):
                if value.constant != 0:
                    words.append((offset, count, self.writer.number(value)))
            elif isinstance(value, Address) and value.stage in ("raw", "tma") and count == 8:
                addend = None if value.addend.constant == 0 else self.writer.number(value.addend)
                slots.append((offset, value.stage, value.pointer, addend))
            else:
                raise HostIRError(f"kernel parameter {index} holds something that is no integer and no pointer")
        return ParameterSource(size, words, slots)


@dataclass(frozen=True)
class HostProgram:
    """What `extract` found: kernel symbols, and the launch program."""

    kernels: tuple[str, ...]
    program: ProgramSource


def extract(function_text: str, tree: Sequence[Argument], symbols: Mapping[str, Symbol]) -> HostProgram:
    """Extract the launch program of a host function printed in MLIR's generic form.

    Args:
        function_text: the `llvm.func` operation, with types in full (`use_local_scope`).
        tree: the argument tree of the function, as a record has it.
        symbols: width and divisibility of each symbol that the tree names.

    Raises:
        HostIRError: the function cannot be expressed as a launch program; the message says what stands in the way.
    """
    blocks = parse_function(function_text)
    graph = Graph()
    flat, values, pointers = _argument_inputs(tree, symbols)
    walk = Walk(blocks, graph)
    entry = next(iter(blocks.values()))
    walk.run(_bind_arguments(entry, flat, dict(values), graph))
    if not walk.launches:
        raise HostIRError("the host function launches nothing")
    names: list[str] = []
    for launch in walk.launches:
        if not launch.kernel.loaded:
            raise HostIRError("a launch of something that is not a kernel handle")
        if launch.kernel.name not in names:
            names.append(launch.kernel.name)
    writer = _ProgramWriter(graph, values, names)
    launches = [writer.launch(launch) for launch in walk.launches]
    program = ProgramSource(values, pointers, writer.writer.nodes, launches)
    return HostProgram(tuple(n.removeprefix("kernels_") for n in names), program)


def host_function_text(module: Any) -> str:
    """The host entry function of a compiled module (`compiled.ir_module`), printed for `extract`.

    Raises:
        HostIRError: the module holds no, or more than one, host function that launches kernels.
    """
    texts = []
    for operation in module.body.operations:
        if operation.operation.name != "llvm.func":
            continue
        name = operation.attributes["sym_name"].value
        if name.startswith(("_mlir_ciface_", "cuda_")) or not operation.regions[0].blocks:
            continue
        text = operation.get_asm(print_generic_op_form=True, use_local_scope=True)
        if f"callee = @{_LAUNCH}" in text:
            texts.append(text)
    if len(texts) != 1:
        raise HostIRError(f"expected one host function that launches kernels, found {len(texts)}")
    return str(texts[0])
