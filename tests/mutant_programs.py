"""Launch programs changed so that they may still be read: other arithmetic, odd launches, much of everything."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from runtime.container.fields import WIDTHS
from runtime.program.arithmetic import BINARY, CAST, COMPARE, FLAGS, UNARY_FLAGGED

Program = dict[str, Any]
_SIZES = [2, 8, 15, 16, 17, 100]
_RARELY = 0.05  # how often something is made so large that it takes long


class Refused(Exception):
    """There is nothing here to change in this way."""


class _Nodes:
    """Nodes that are added one by one at the end of those that are there."""

    def __init__(self, rng: random.Random, widths: list[int]) -> None:
        self.rng, self.widths = rng, widths
        self.made: list[list[Any]] = []

    def any_of(self, width: int | None = None) -> int:
        rng, count = self.rng, len(self.widths)
        for _ in range(12):  # what is new is taken more often, so that one thing leads to another
            at = rng.randrange(count) if rng.random() < 0.5 else max(0, count - 1 - rng.randrange(6))
            if width in (None, self.widths[at]):
                return at
        fitting = [i for i, w in enumerate(self.widths) if w == width]
        if not fitting:
            raise Refused
        return rng.choice(fitting)

    def append(self, node: list[Any]) -> int:
        self.made.append(node)
        self.widths.append(node[1])
        return len(self.widths) - 1

    def add(self, in_loop: bool = False) -> None:
        rng = self.rng
        width = rng.choice(WIDTHS)
        kind = rng.random()
        try:
            if kind < 0.25:
                edges = [0, 1, 2, 7, 31, 32, 63, 64, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1]
                self.append(["const", width, rng.choice([rng.getrandbits(width), *edges]) & ((1 << width) - 1)])
            elif kind < 0.65:
                op = rng.choice(sorted(BINARY))
                node = [op, width, self.any_of(width), self.any_of(width)]
                flags = [flag for flag, ops in FLAGS.items() if op in ops]
                if flags and rng.random() < 0.5:
                    node.append(rng.sample(flags, rng.randrange(len(flags) + 1)))
                self.append(node)
            elif kind < 0.75:
                a = self.any_of()
                self.append([rng.choice(sorted(COMPARE)), 1, a, self.any_of(self.widths[a])])
            elif kind < 0.85:
                a = self.any_of()
                source = self.widths[a]
                op = rng.choice(sorted(CAST))
                fitting = [w for w in WIDTHS if (w < source if op == "trunc" else w > source)]
                if fitting:
                    self.append([op, rng.choice(fitting), a])
            elif kind < 0.9:
                self.append([rng.choice(sorted(UNARY_FLAGGED)), width, self.any_of(width), rng.randrange(2)])
            elif kind < 0.95 or in_loop:
                self.append(["select", width, self.any_of(1), self.any_of(width), self.any_of(width)])
            else:
                self.append(self.loop(width, rng.choice([1, 1, 2, 3, 16, 17])))
        except Refused:
            return

    def loop(self, width: int, variables: int) -> list[Any]:
        """A loop of random nodes, of which many do not end."""
        rng = self.rng
        initial = [self.any_of(width), *(self.any_of() for _ in range(variables - 1))]
        inside = _Nodes(rng, self.widths + [self.widths[i] for i in initial])
        for _ in range(rng.choice([0, 1, 3])):
            inside.add(in_loop=True)
        head, inside.made = inside.made, []
        test = inside.any_of(1)
        for _ in range(rng.choice([0, 1, 3, 10])):
            inside.add(in_loop=True)
        following = [inside.any_of(self.widths[i]) for i in initial]
        limit = rng.choice([1, 2, 5, 64, 256, 257])
        return ["loop", width, limit, 0, initial, head, test, inside.made, following]


def _nodes_of(rng: random.Random, program: Program) -> _Nodes:
    nodes = _Nodes(rng, [w for _, w in program["values"]] + [node[1] for node in program["nodes"]])
    if not all(type(w) is int for w in nodes.widths):
        raise Refused
    return nodes


def _hook(rng: random.Random, program: Program, ref: int, width: int) -> None:
    """Let a launch use value `ref`."""
    launch = rng.choice(program["launches"])
    parameters = launch["parameters"]
    places: list[tuple[Any, Any]] = []
    if width == 32:
        places += [(launch["grid"], rng.randrange(3)), (launch["grid"], 0), (launch["block"], rng.randrange(3))]
        places += [(words, rng.randrange(len(words))) for _, words in launch["attributes"] if words]
    if width == 64:
        places += [(launch, "shared_bytes")]
        places += [(slot, 3) for parameter in parameters for slot in parameter["slots"]]
    if width >= 8:
        same = [w for p in parameters for w in p["words"] if w[1] == width // 8]
        places += [(word, 2) for word in same[:8]]
        if parameters and rng.random() < 0.5:
            size = rng.choice([8, 16, 4096])
            parameters.append({"size": size, "words": [[size - 8, width // 8, ref]], "slots": []})
            return
    if not places:
        raise Refused
    where, key = rng.choice(places)
    where[key] = ref


def _more_nodes(rng: random.Random, program: Program) -> None:
    nodes = _nodes_of(rng, program)
    for _ in range(rng.choice([1, 5, 5, 20, 20, 60])):
        nodes.add()
    program["nodes"] += nodes.made
    new = range(len(nodes.widths) - len(nodes.made), len(nodes.widths))
    for _ in range(rng.choice([1, 1, 2, 4])):
        ref = rng.choice(new) if new else 0
        _hook(rng, program, ref, nodes.widths[ref])


def _constant(rng: random.Random, program: Program) -> None:
    """A number of a launch is another constant."""
    nodes, width = _nodes_of(rng, program), rng.choice([32, 32, 64])
    edges = [0, 1, 2, 3, 16, 17, 1024, 1025, 65_535, 65_536, 1 << 18, (1 << 18) + 1, 1 << 31, (1 << width) - 1]
    ref = nodes.append(["const", width, rng.choice(edges)])
    program["nodes"] += nodes.made
    _hook(rng, program, ref, width)


def _other_constant(rng: random.Random, program: Program) -> None:
    found = [node for node in program["nodes"] if node[0] == "const"]
    node = rng.choice(found)
    node[2] = rng.choice([0, 1, node[2] + 1, node[2] * 2, (1 << node[1]) - 1, 1 << node[1], 1 << (node[1] - 1), 3])


def _big_loops(rng: random.Random, program: Program) -> None:
    """Loops that run to their bound, with many nodes and variables."""
    nodes = _nodes_of(rng, program)
    one = nodes.append(["const", 32, 1])
    true = nodes.append(["const", 1, 1])
    variables, body, loops = rng.choice([1, 8, 16, 17]), rng.choice([1, 5, 20]), 1
    if rng.random() < _RARELY:
        variables, body, loops = 100, 300, rng.choice([1, 10, 60])
    first = len(nodes.widths)
    for _ in range(loops):
        here = len(nodes.widths)
        inner = [["add", 32, here if i == 0 else here + variables + i - 1, one] for i in range(body)]
        following = [here + variables + body - 1] * variables
        nodes.append(["loop", 32, rng.choice([64, 256]), 0, [one] * variables, [], true, inner, following])
    program["nodes"] += nodes.made
    if rng.random() < 0.7:
        _hook(rng, program, rng.randrange(first, len(nodes.widths)), 32)


def _much_poison(rng: random.Random, program: Program) -> None:
    """Poison that spreads through everything after it."""
    nodes = _nodes_of(rng, program)
    zero = nodes.append(["const", 64, 0])
    last = nodes.append([rng.choice(["udiv", "srem", "ceildivsi"]), 64, zero, zero])
    for _ in range(rng.choice([1, 10, 200])):
        op = rng.choice(["add", "mul", "shl", "sdiv", "smax"])
        last = nodes.append([op, 64, *rng.choice([(last, zero), (zero, last), (last, last)])])
    kind = rng.randrange(4)
    if kind == 1:
        last = nodes.append(["eq", 1, last, zero])
    elif kind == 2:
        last = nodes.append(["trunc", 32, last])
    elif kind == 3:
        condition = nodes.append(["const", 1, rng.randrange(2)])
        last = nodes.append(["select", 64, condition, last, zero])
    program["nodes"] += nodes.made
    if rng.random() < 0.8:
        _hook(rng, program, last, nodes.widths[last])


def _many_nodes(rng: random.Random, program: Program) -> None:
    nodes = _nodes_of(rng, program)
    first = nodes.append(["const", 64, 3])
    for _ in range(rng.choice([1000, 6000, 20_000]) if rng.random() < _RARELY else 50):
        nodes.append([rng.choice(["add", "mul", "xor"]), 64, first, len(nodes.widths) - 1, []])
    program["nodes"] += nodes.made


def _many_launches(rng: random.Random, program: Program) -> None:
    launches = program["launches"]
    program["launches"] = launches * rng.choice([100, 1000] if rng.random() < _RARELY else _SIZES[:5])


def _many_parameters(rng: random.Random, program: Program) -> None:
    """More parameters, words or slots than any kernel has; up to what there is room for, and beyond."""
    parameters, count = rng.choice(program["launches"])["parameters"], rng.choice(_SIZES)
    count = 4096 if rng.random() < _RARELY else count
    ref = next(i for i, (_, width) in enumerate(program["values"]) if width == 32)
    how = rng.randrange(5)
    if how == 0:
        parameters += [{"size": rng.choice([1, 4, 8]), "words": [], "slots": []} for _ in range(count)]
    elif how == 1:
        parameters.append({"size": 32_764, "words": [[4 * i, 4, ref] for i in range(count)], "slots": []})
    elif how == 2:
        slots = [[8 * i, rng.choice(["raw", "tma"]), 0, None] for i in range(count)]
        parameters.append({"size": min(8 * count, 32_764), "words": [], "slots": slots})
    elif how == 3:
        parameters.append({"size": rng.choice([1, 3, 5000, 20_000, 32_764, 32_765]), "words": [], "slots": []})
    else:
        parameter = rng.choice(parameters)
        parameter["words"].append([rng.choice([0, 4, 7, parameter["size"] - 4, parameter["size"]]), 4, ref])


def _attributes(rng: random.Random, program: Program) -> None:
    """Launch attributes with odd words."""
    nodes, launch = _nodes_of(rng, program), rng.choice(program["launches"])
    words = [nodes.append(["const", 32, rng.choice([0, 1, 2, 3, 4, 8, 16, 17, 1 << 31])]) for _ in range(3)]
    program["nodes"] += nodes.made
    identity = rng.choice([2, 4, 6, 11, 1, 5])
    kept = [a for a in launch["attributes"] if a[0] != identity or rng.random() < 0.2]
    launch["attributes"] = [*kept, [identity, words if identity in (4, 11) else words[:1]]]


def _slots(rng: random.Random, program: Program) -> None:
    """Pointers shifted, moved, swapped or dropped."""
    launch = rng.choice(program["launches"])
    found = [p for p in launch["parameters"] if p["slots"]]
    parameter = rng.choice(found)
    slot, how = rng.choice(parameter["slots"]), rng.randrange(5)
    if how == 0:
        slot[3] = rng.randrange(len(program["values"]) + len(program["nodes"]))
    elif how == 1:
        slot[2] = rng.randrange(len(program["pointers"]))
    elif how == 2:
        slot[0] = rng.choice([0, 8, 16, 4, parameter["size"] - 8, parameter["size"]])
    elif how == 3:
        slot[1] = "raw" if slot[1] == "tma" else "tma"
    else:
        parameter["slots"].remove(slot)


def _share_everything(rng: random.Random, program: Program) -> None:
    """The same node again and again, some of it of other types that compare equal."""
    node = rng.choice(program["nodes"])
    odd = [float(x) if type(x) is int else x for x in node]
    program["nodes"] += [list(node), odd if rng.random() < 0.5 else [True if x == 1 else x for x in node]]


PROGRAM_CHANGES: list[Callable[[random.Random, Program], None]] = [
    _more_nodes,
    _more_nodes,
    _more_nodes,
    _more_nodes,
    _constant,
    _other_constant,
    _big_loops,
    _much_poison,
    _many_nodes,
    _many_launches,
    _many_parameters,
    _attributes,
    _slots,
    _share_everything,
]
