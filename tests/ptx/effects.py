"""Instructions that do more than set a lane's registers from its own: memory, barriers, other lanes, tensor cores."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import tcgen05, tensor_cores, tensor_map
from .arithmetic import TYPES, Values
from .memory import Fault, SharedMemory, aligned, as_bytes
from .parse import Instruction

if TYPE_CHECKING:
    from .machine import Code, Cta, Warp

WAIT = object()  # what a step gives where the warp waits, until `Warp.blocked` says that it need not
LANES = 32
Step = Any


def effect(code: Code, given: Instruction) -> Step:
    """The step of an instruction of `OPCODES`."""
    return OPCODES[given.opcode](code, given)


def _nothing(code: Code, given: Instruction) -> Step:
    return lambda warp: None


# --- loads and stores ---


def _elements(given: Instruction) -> tuple[str, int]:
    """The type of an access, and how many each lane has."""
    kind = given.words[-1]
    count = next((int(word[1:]) for word in given.words if re.fullmatch(r"v\d", word)), 1)
    return kind, count


def _load(code: Code, given: Instruction) -> Step:
    kind, count = _elements(given)
    puts, to = code.targets(given.operands[0], kind), TYPES[kind]
    size = np.dtype(to).itemsize
    if "param" in given.words:
        match = re.fullmatch(r"\[([\w$]+)(?:\+(\d+))?\]", given.operands[1])
        if match and match[1] in code.offsets:
            offset = code.offsets[match[1]] + int(match[2] or 0)

            def of_parameters(warp: Warp) -> None:
                data = np.frombuffer(warp.machine.parameters, np.uint8, size * count, offset).view(to)
                for put, value in zip(puts, data, strict=True):
                    put(warp, np.full(LANES, value, to))

            return of_parameters
    shared = any(word.startswith("shared") for word in given.words)
    place = code.address(given.operands[1])

    def load(warp: Warp) -> None:
        lanes = warp.active()
        addresses = place(warp)[lanes]
        aligned(addresses, size * count)
        memory = _shared(warp, addresses, given) if shared else warp.machine.memory
        found = memory.load(addresses, size * count).view(to).reshape(len(lanes), count)
        for i, put in enumerate(puts):
            values = np.zeros(LANES, to)
            values[lanes] = found[:, i]
            put(warp, values)

    return load


def _store(code: Code, given: Instruction) -> Step:
    if "async" in given.words:
        return _store_async(code, given)
    kind, count = _elements(given)
    place, values = code.address(given.operands[0]), code.vector(given.operands[1], kind)
    shared = any(word.startswith("shared") for word in given.words)
    size = np.dtype(TYPES[kind]).itemsize * count

    def store(warp: Warp) -> None:
        lanes = warp.active()
        addresses = place(warp)[lanes]
        aligned(addresses, size)
        data = as_bytes(np.stack([value(warp)[lanes] for value in values], 1))
        memory = _shared(warp, addresses, given) if shared else warp.machine.memory
        memory.store(addresses, data)

    return store


def _store_async(code: Code, given: Instruction) -> Step:
    """To a CTA of the cluster, whose mbarrier is told how many bytes came."""
    kind, _ = _elements(given)
    place, values = code.address(given.operands[0]), code.vector(given.operands[1], kind)
    barrier = code.address(given.operands[2])

    def store(warp: Warp) -> None:
        lanes, cluster = warp.active(), warp.cta.cluster
        data = as_bytes(np.stack([value(warp)[lanes] for value in values], 1))
        for address, at, row in zip(place(warp)[lanes], barrier(warp)[lanes], data, strict=True):
            warp.machine.pending.append(_arrival(cluster.shared(int(address)), int(address), int(at), row.copy()))

    def _arrival(memory: SharedMemory, address: int, at: int, row: Values) -> Callable[[], None]:
        def arrive() -> None:
            memory.store(np.array([address]), row[None])
            memory.barrier(at).complete(len(row))

        return arrive

    return store


def _shared(warp: Warp, addresses: Values, given: Instruction) -> SharedMemory:
    """The CTA's own, or of the cluster that of the one that the addresses are of."""
    if "shared_cluster" in given.words:
        return warp.cta.cluster.shared(int(addresses[0]))
    return warp.cta.shared


def _atomic(code: Code, given: Instruction) -> Step:
    """atom and red: of lanes one after the other."""
    kind = given.words[-1]
    combine: dict[str, Callable[[Any, Any], Any]] = {
        "add": lambda a, b: a + b,
        "min": min,
        "max": max,
        "exch": lambda a, b: b,
        "or": lambda a, b: a | b,
        "and": lambda a, b: a & b,
        "inc": lambda a, b: a.dtype.type(0) if a >= b else a + a.dtype.type(1),
    }
    names = [word for word in given.words if word in combine or word == "cas"]
    to, result = TYPES[kind], given.opcode == "atom"
    put = code.target(given.operands[0], kind) if result else None
    rest = given.operands[1:] if result else given.operands
    place, operands = code.address(rest[0]), [code.value(word, kind) for word in rest[1:]]
    shared = any(word.startswith("shared") for word in given.words)

    def atomic(warp: Warp) -> None:
        lanes, found = warp.active(), np.zeros(LANES, to)
        addresses, given_values = place(warp), [operand(warp) for operand in operands]
        for lane in lanes:
            address = int(addresses[lane])
            if shared:
                memory = warp.cta.cluster.shared(address)
                offset = memory.offset(address, np.dtype(to).itemsize)
                at = memory.data[offset : offset + np.dtype(to).itemsize].view(to)
            else:
                at = warp.machine.memory.bytes_of(address, np.dtype(to).itemsize, True).view(to)
            found[lane] = at[0]
            if names[0] == "cas":
                at[0] = given_values[1][lane] if at[0] == given_values[0][lane] else at[0]
            else:
                with np.errstate(over="ignore"):
                    at[0] = combine[names[0]](at[0], given_values[0][lane])
        if put is not None:
            put(warp, found)

    return atomic


# --- other lanes ---


class Apart(Fault):
    """Only some of the lanes that are to meet are there."""


def _require_all(warp: Warp, given: Instruction, members: Values | None = None) -> None:
    """Lanes that meet must be there together."""
    if members is None:
        if not warp.full:
            raise Apart(f"{given.text}: only some lanes of a warp are there")
    elif int(members[warp.active()[0]]) != sum(1 << int(lane) for lane in warp.active()):
        raise Apart(f"{given.text}: the lanes that are there are not its members")


def _shuffle(code: Code, given: Instruction) -> Step:
    how = given.words[2]
    target, _, predicate = given.operands[0].partition("|")
    put = code.target(target, "b32")
    put_inside = code.target(predicate, "pred") if predicate else None
    value, by, clamp, members = (
        code.value(word, "b32" if i == 0 else "u32") for i, word in enumerate(given.operands[1:])
    )

    def shuffle(warp: Warp) -> None:
        _require_all(warp, given, members(warp))
        lanes, b, c = np.arange(LANES), by(warp).astype(np.int64), clamp(warp).astype(np.int64)
        segment = c >> 8 & 31
        most = (lanes & segment) | (c & 31 & ~segment)
        least = lanes & segment
        if how == "idx":
            source = least | (b & 31 & ~segment)
            inside = source <= most
        elif how == "up":
            source = lanes - b
            inside = source >= most
        elif how == "down":
            source = lanes + b
            inside = source <= most
        else:
            source = lanes ^ b
            inside = source <= most
        source = np.where(inside, source, lanes)
        put(warp, value(warp)[source])
        if put_inside is not None:
            put_inside(warp, inside)

    return shuffle


def _vote(code: Code, given: Instruction) -> Step:
    how = given.words[2]
    put = code.target(given.operands[0], given.words[-1])
    source, members = code.value(given.operands[1].lstrip("!"), "pred"), code.value(given.operands[2], "u32")
    flipped = given.operands[1].startswith("!")

    def vote(warp: Warp) -> None:
        _require_all(warp, given, members(warp))
        chosen = (source(warp) ^ flipped) & warp.mask
        if how == "ballot":
            put(warp, np.full(LANES, sum(1 << int(lane) for lane in np.flatnonzero(chosen)), np.uint32))
        else:
            there = warp.active()
            put(warp, np.full(LANES, chosen[there].all() if how == "all" else chosen[there].any()))

    return vote


def _elect(code: Code, given: Instruction) -> Step:
    _, _, predicate = given.operands[0].partition("|")
    put = code.target(predicate, "pred")
    members = code.value(given.operands[1], "u32")

    def elect(warp: Warp) -> None:
        _require_all(warp, given, members(warp))
        put(warp, np.arange(LANES) == warp.active()[0])

    return elect


def _reduced(code: Code, given: Instruction) -> Step:
    kind = given.words[-1]
    put, value = code.target(given.operands[0], kind), code.value(given.operands[1], kind)
    how = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}

    def reduce(warp: Warp) -> None:
        found = how[given.words[2]].reduce(value(warp)[warp.active()])
        put(warp, np.full(LANES, found, TYPES[kind]))

    return reduce


# --- barriers ---


def _barrier(code: Code, given: Instruction) -> Step:
    if given.words[1] == "warp":
        members = code.value(given.operands[0], "u32")
        return lambda warp: _require_all(warp, given, members(warp))
    if given.opcode == "barrier" and given.words[1] == "cluster":
        return _cluster_barrier(given)
    number = code.value(given.operands[0], "u32")
    count = code.value(given.operands[1], "u32") if len(given.operands) > 1 else None
    waits = "arrive" not in given.words

    def barrier(warp: Warp) -> Any:
        _require_all(warp, given)
        cta, name = warp.cta, int(number(warp)[0])
        mine = cta.arrive(name, LANES * len(cta.warps) if count is None else int(count(warp)[0]))
        if not waits or cta.rounds.get(name, 0) > mine:
            return None
        warp.blocked = lambda: cta.rounds.get(name, 0) > mine
        return WAIT

    return barrier


def _cluster_barrier(given: Instruction) -> Step:
    def arrive(warp: Warp) -> None:
        warp.cluster_round = warp.cta.cluster.arrive(warp)

    def wait(warp: Warp) -> Any:
        cluster, mine = warp.cta.cluster, warp.cluster_round
        if cluster.rounds > mine:
            return None
        warp.blocked = lambda: cluster.rounds > mine
        return WAIT

    return arrive if given.words[2] == "arrive" else wait


def _mbarrier(code: Code, given: Instruction) -> Step:
    how = given.words[1]
    if how == "init":
        place, count = code.address(given.operands[0]), code.value(given.operands[1], "u32")

        def initialise(warp: Warp) -> None:
            for lane in warp.active():
                warp.cta.shared.initialise(int(place(warp)[lane]), int(count(warp)[lane]))

        return initialise
    if how in ("try_wait", "test_wait"):
        return _mbarrier_wait(code, given)
    if how in ("expect_tx", "arrive"):
        return _mbarrier_arrive(code, given)
    if how == "inval":
        return lambda warp: None
    raise NotImplementedError(given.text)


def _mbarrier_wait(code: Code, given: Instruction) -> Step:
    put, place, parity = (
        code.target(given.operands[0], "pred"),
        code.address(given.operands[1]),
        code.value(given.operands[2], "u32"),
    )

    def wait(warp: Warp) -> Any:
        lanes = warp.active()
        waited = {(int(place(warp)[lane]), int(parity(warp)[lane])) for lane in lanes}
        barriers = [(warp.cta.shared.barrier(address), bit) for address, bit in waited]
        passed = all(barrier.passed(bit) for barrier, bit in barriers)
        put(warp, np.full(LANES, passed))
        if passed:
            return None
        # It need not wait: a kernel may ask in advance, and has then other things to do.
        warp.blocked, warp.patient = lambda: all(barrier.passed(bit) for barrier, bit in barriers), False
        return WAIT

    return wait


def _mbarrier_arrive(code: Code, given: Instruction) -> Step:
    expects = "expect_tx" in given.words
    operands = [word for word in given.operands if word.startswith("[")]
    place = code.address(operands[0])
    after = given.operands[given.operands.index(operands[0]) + 1 :]
    more = code.value(after[0], "u32") if after else None
    arrives = "arrive" in given.words

    def arrive(warp: Warp) -> None:
        for lane in warp.active():
            address = int(place(warp)[lane])
            barrier = warp.cta.cluster.shared(address).barrier(address)
            if expects:
                assert more is not None
                barrier.expect(int(more(warp)[lane]))
            if arrives:
                barrier.arrive(1 if expects or more is None else int(more(warp)[lane]))

    return arrive


# --- copies ---


def _copy(code: Code, given: Instruction) -> Step:
    words = given.words
    if "bulk" in words and "tensor" in words and "prefetch" in words:
        return _nothing(code, given)
    if "bulk" in words and "tensor" in words:
        to_shared = next(word for word in words if word.startswith(("shared", "global"))).startswith("shared")
        return _tensor_load(code, given) if to_shared else _tensor_store(code, given)
    if "commit_group" in words:
        return _committed("bulk" if "bulk" in words else "copies")
    if "wait_group" in words or "wait_all" in words:
        return _waited("bulk" if "bulk" in words else "copies", int(given.operands[0], 0) if given.operands else 0)
    if "mbarrier" in words:
        return _copies_arrive(code, given)
    if "bulk" not in words:
        return _copy_lanes(code, given)
    raise NotImplementedError(given.text)


def _committed(kind: str) -> Step:
    return lambda warp: warp.late(getattr(warp, kind), -1)


def _waited(kind: str, left: int) -> Step:
    return lambda warp: warp.late(getattr(warp, kind), left)


def _tensor_operands(code: Code, word: str) -> tuple[Any, list[Any]]:
    """Of "[map, {c0, c1}]": where the map is, and coordinates."""
    match = re.fullmatch(r"\[\s*([^,]+?)\s*,\s*\{(.*)\}\s*\]", word)
    assert match, word
    return code.value(match[1], "u64"), [code.value(each.strip(), "s32") for each in match[2].split(",")]


def _tensor_load(code: Code, given: Instruction) -> Step:
    target, (where, coordinates), barrier = (
        code.address(given.operands[0]),
        _tensor_operands(code, given.operands[1]),
        code.address(given.operands[2]),
    )
    several = any(word.startswith("multicast") for word in given.words)
    mask = code.value(given.operands[3], "u16") if several else None
    paired = "cta_group_2" in given.words

    def load(warp: Warp) -> None:
        for lane in warp.active():
            of = warp.machine.tensor_map(int(where(warp)[lane]))
            at = tuple(int(c(warp)[lane]) for c in coordinates)
            address, full = int(target(warp)[lane]), int(barrier(warp)[lane])
            own = warp.cta
            ctas = own.cluster.ctas if mask is not None else [own]
            if mask is not None:
                bits = int(mask(warp)[lane])
                if bits >> len(ctas):
                    raise Fault(f"{given.text}: a mask of {bits:#x}, of {len(ctas)} CTAs")
                ctas = [cta for cta in ctas if bits >> cta.rank & 1]
            for cta in ctas:
                warp.machine.pending.append(_come(of, at, warp, cta, address, full))

    def _come(
        of: tensor_map.TensorMap, at: tuple[int, ...], warp: Warp, cta: Cta, address: int, full: int
    ) -> Callable[[], None]:
        # The same offsets, whichever CTA's addresses they were given as; of a pair one's barrier may count for both.
        memory, rank = cta.shared, cta.rank
        if paired:
            rank = rank & ~1 | full >> 24 & 1
        there = cta.cluster.ctas[rank].shared
        barrier = there.barrier(there.own(full))
        here = memory.own(address)

        def come() -> None:
            tensor_map.load(of, at, warp.machine.memory, memory, here)
            barrier.complete(of.bytes)

        return come

    return load


def _tensor_store(code: Code, given: Instruction) -> Step:
    (where, coordinates), source = _tensor_operands(code, given.operands[0]), code.address(given.operands[1])

    def store(warp: Warp) -> None:
        for lane in warp.active():
            of = warp.machine.tensor_map(int(where(warp)[lane]))
            at, address = tuple(int(c(warp)[lane]) for c in coordinates), int(source(warp)[lane])
            warp.bulk[-1].append(_leave(of, at, warp, address))

    def _leave(of: tensor_map.TensorMap, at: tuple[int, ...], warp: Warp, address: int) -> Callable[[], None]:
        return lambda: tensor_map.store(of, at, warp.machine.memory, warp.cta.shared, address)

    return store


def _copy_lanes(code: Code, given: Instruction) -> Step:
    """cp.async: a few bytes of each lane; with fewer source bytes than that the rest are zeros."""
    target, source = code.address(given.operands[0]), code.address(given.operands[1])
    size = int(given.operands[2], 0)
    given_bytes = code.value(given.operands[3], "u32") if len(given.operands) > 3 else None

    def copy(warp: Warp) -> None:
        lanes = warp.active()
        to, of = target(warp)[lanes], source(warp)[lanes]
        aligned(to, size)
        counts = np.full(len(lanes), size) if given_bytes is None else given_bytes(warp)[lanes].astype(np.int64)

        def come() -> None:
            for address, at, count in zip(to, of, counts, strict=True):
                row = np.zeros(size, np.uint8)
                if count:
                    row[:count] = warp.machine.memory.bytes_of(int(at), int(count), False)
                warp.cta.shared.store(np.array([address]), row[None])

        warp.copies[-1].append(come)

    return copy


def _copies_arrive(code: Code, given: Instruction) -> Step:
    """An mbarrier is arrived at by each lane when its copies so far are there."""
    place = code.address(given.operands[0])

    def arrive(warp: Warp) -> None:
        lanes = warp.active()
        addresses = [int(address) for address in place(warp)[lanes]]
        so_far = [each for group in warp.copies for each in group]
        warp.copies = [[]]

        def come() -> None:
            for each in so_far:
                each()
            for address in addresses:
                warp.cta.shared.barrier(address).arrive()

        warp.machine.pending.append(come)

    return arrive


# --- tensor cores ---


def _wgmma(code: Code, given: Instruction) -> Step:
    how = given.words[1]
    if how == "fence":
        return _nothing(code, given)
    if how == "commit_group":
        return _committed("products")
    if how == "wait_group":
        return _waited("products", int(given.operands[0], 0))
    match = re.fullmatch(r"m64n(\d+)k(\d+)", given.words[4])
    assert match
    columns, depth, kind = int(match[1]), int(match[2]), given.words[6]
    k_bytes = depth * (1 if kind == "e4m3" else 2)
    sums = [code.numbers[each] for each in _names(given.operands[0])]
    in_registers = "{" in given.operands[1]
    a = [code.numbers[each] for each in _names(given.operands[1])] if in_registers else []
    a_word = None if in_registers else code.value(given.operands[1], "u64")
    b_word, scale = code.value(given.operands[2], "u64"), code.value(given.operands[3], "pred")
    flags = [int(each, 0) for each in given.operands[4:]]
    signs, majors = flags[:2], flags[2:]
    if any(sign != 1 for sign in signs):
        raise NotImplementedError(given.text)
    a_transposed = bool(majors[0]) if len(majors) == 2 else False
    b_transposed = bool(majors[-1]) if majors else False

    def product(warp: Warp) -> None:
        _require_all(warp, given)
        if warp.number // 4 * 4 + 3 >= len(warp.cta.warps):
            raise Fault(f"{given.text}: in a warp group of fewer than four warps")
        memory, quarter = warp.cta.shared, warp.number % 4
        of_b = tensor_cores.Descriptor.read(int(b_word(warp)[0]))
        of_a = None if a_word is None else tensor_cores.Descriptor.read(int(a_word(warp)[0]))
        adds = bool(scale(warp)[0])

        def compute() -> None:
            if of_a is None:
                left = tensor_cores.a_registers([warp.registers[each] for each in a], kind)
            else:
                rows = range(16 * quarter, 16 * quarter + 16)
                left = of_a.matrix(memory, rows, k_bytes, a_transposed, kind)
            right = of_b.matrix(memory, range(columns), k_bytes, b_transposed, kind)
            found = left @ right.T
            if adds:
                found = found + tensor_cores.sums_of([warp.registers[each] for each in sums])
            for number, values in zip(sums, tensor_cores.registers_of(found), strict=True):
                warp.registers[number] = values

        warp.products[-1].append(compute)

    return product


def _names(word: str) -> list[str]:
    return [each.strip() for each in word.strip("{}").split(",")]


def _mma(code: Code, given: Instruction) -> Step:
    """mma.sync of m16n8."""
    kind = given.words[-2]
    puts = code.targets(given.operands[0], "b32")
    a, b, c = (code.vector(word, "b32") for word in given.operands[1:4])
    if given.words[-1] != "f32" or given.words[-4] != "f32":
        raise NotImplementedError(given.text)

    def product(warp: Warp) -> None:
        _require_all(warp, given)
        left = tensor_cores.a_registers([each(warp) for each in a], kind)
        right = tensor_cores.b_registers([each(warp) for each in b], kind)
        found = left @ right.T + tensor_cores.sums_of([each(warp) for each in c])
        for put, values in zip(puts, tensor_cores.registers_of(found), strict=True):
            put(warp, values)

    return product


def _matrices(code: Code, given: Instruction) -> Step:
    """ldmatrix and stmatrix."""
    count, transposed = (
        next(int(word[1:]) for word in given.words if re.fullmatch(r"x\d", word)),
        "trans" in given.words,
    )
    loads = given.opcode == "ldmatrix"
    registers, place = (given.operands if loads else given.operands[::-1])[:2]
    where = code.address(place)
    puts, values = (code.targets(registers, "b32"), []) if loads else ([], code.vector(registers, "b32"))

    def matrices(warp: Warp) -> None:
        _require_all(warp, given)
        addresses = where(warp)
        aligned(addresses[: 8 * count], 16)
        if loads:
            for put, found in zip(
                puts, tensor_cores.load_matrices(warp.cta.shared, addresses, count, transposed), strict=True
            ):
                put(warp, found)
        else:
            tensor_cores.store_matrices(warp.cta.shared, addresses, [each(warp) for each in values], transposed)

    return matrices


# --- addresses ---


def _mapped(code: Code, given: Instruction) -> Step:
    """mapa: the same shared offset, of another CTA of the cluster."""
    kind = given.words[-1]
    put, of, rank = (
        code.target(given.operands[0], kind),
        code.value(given.operands[1], kind),
        code.value(given.operands[2], "u32"),
    )
    to = TYPES[kind]

    def mapped(warp: Warp) -> None:
        offsets = of(warp) & to((1 << 24) - 1)
        put(warp, (rank(warp).astype(to) << to(24)) | offsets)

    return mapped


def _cluster_launch(code: Code, given: Instruction) -> Step:
    """clusterlaunchcontrol: a CTA that runs takes the work of a cluster that has not begun."""
    if given.words[1] == "query_cancel":
        kind = given.words[-2]
        put, number = code.target(given.operands[0], kind), code.numbers[given.operands[1]]
        what = given.words[2]
        axis = "xyz".find(what[-1]) if what.startswith("get_first_ctaid") else -1

        def query(warp: Warp) -> None:
            words = np.ascontiguousarray(warp.registers[number]).view(np.uint32)
            put(warp, words[:, axis] if axis >= 0 else words[:, 3] != 0)

        return query
    place, barrier = code.address(given.operands[0]), code.address(given.operands[1])
    everywhere = "multicast_cluster_all" in given.words

    def cancel(warp: Warp) -> None:
        for lane in warp.active():
            block = warp.machine.next_block()
            answer = np.array([0, 0, 0, 0] if block is None else [*block, 1], np.uint32).view(np.uint8)
            address, at = int(place(warp)[lane]), int(barrier(warp)[lane])
            for cta in warp.cta.cluster.ctas if everywhere else [warp.cta]:
                warp.machine.pending.append(_answer(cta.shared, address, at, answer))

    def _answer(memory: SharedMemory, address: int, at: int, answer: Values) -> Callable[[], None]:
        def come() -> None:
            memory.store(np.array([memory.own(address)]), answer[None])
            memory.barrier(memory.own(at)).complete(len(answer))

        return come

    return cancel


OPCODES: dict[str, Callable[[Any, Instruction], Step]] = {
    **dict.fromkeys(("prefetch", "fence", "griddepcontrol", "setmaxnreg", "nanosleep", "membar"), _nothing),
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "shfl": _shuffle,
    "vote": _vote,
    "elect": _elect,
    "redux": _reduced,
    "bar": _barrier,
    "barrier": _barrier,
    "mbarrier": _mbarrier,
    "cp": _copy,
    "wgmma": _wgmma,
    "mma": _mma,
    "ldmatrix": _matrices,
    "stmatrix": _matrices,
    "mapa": _mapped,
    "clusterlaunchcontrol": _cluster_launch,
    "tcgen05": tcgen05.effect,
}
