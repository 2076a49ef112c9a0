"""Bombs in the index, in blocks, in documents and in launch programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests import mutants
from tests.bomb_archives import (
    MEGABYTE,
    Bombs,
    archive,
    bomb_record,
    count,
    index,
    use,
    with_field,
    with_program,
)
from tests.fuzz_archive import Parts
from tests.recording_driver import entry, gemm_record, signature, table

BOMBS = Bombs()

# --- the index ---


@BOMBS.add
def index_head_nested() -> tuple[bytes, mutants.Content]:
    return index(lambda parts: parts, b"[" * (30 * MEGABYTE) + b"]" * (30 * MEGABYTE))


@BOMBS.add
def index_head_of_numbers() -> tuple[bytes, mutants.Content]:
    return index(lambda parts: parts, b'{"blocks":[' + b"0," * (31 * MEGABYTE) + b'0],"functions":{},"tables":[]}')


@BOMBS.add
def index_head_of_objects() -> tuple[bytes, mutants.Content]:
    return index(lambda parts: parts, b'{"blocks":[' + b"{}," * (20 * MEGABYTE) + b'{}],"functions":{},"tables":[]}')


@BOMBS.add
def index_head_of_strings() -> tuple[bytes, mutants.Content]:
    return index(lambda parts: parts, b'{"blocks":[],"functions":{},"tables":[' + b'"a",' * (15 * MEGABYTE) + b'"a"]}')


@BOMBS.add
def index_head_with_a_long_number() -> tuple[bytes, mutants.Content]:
    return index(lambda parts: parts, b'{"blocks":[],"functions":{"sm_90a":' + b"9" * 1_000_000 + b'},"tables":[]}')


@BOMBS.add
def index_of_many_blocks() -> tuple[bytes, mutants.Content]:
    row = b'{"blobs":1,"kind":"records","length":1},'
    return index(lambda parts: parts, b'{"blocks":[' + row * 1_500_000 + row[:-1] + b'],"functions":{},"tables":[]}')


@BOMBS.add
def index_of_names_alone() -> tuple[bytes, mutants.Content]:
    return index(lambda parts: replace(parts, names=["a"] * (30 * MEGABYTE)))


@BOMBS.add
def index_of_many_functions() -> tuple[bytes, mutants.Content]:
    """Sound, but that no record can be read: 250,000 functions of one cubin."""
    count = 250_000

    def grow(parts: Parts) -> Parts:
        names = sorted(f"{i:08d}" for i in range(count))
        blocks = [row | {"blobs": count} if row["kind"] == "records" else row for row in parts.head["blocks"]]
        head = parts.head | {"blocks": blocks, "functions": {"sm_90a": count}}
        digests = [bytes(32)] * count + parts.blob_digests[1:]
        return Parts(
            head, names, [1] * count + parts.lengths[1:], [count] * count, parts.block_digests, digests, parts.blocks
        )

    return index(grow)


# --- blocks and documents ---


@BOMBS.add
def records_block_for_each_record() -> tuple[bytes, mutants.Content]:
    """A block of 60 MB, larger than what is kept, decompressed for each of its records."""
    records: list[Any] = [gemm_record(f"f{i:02d}") for i in range(40)]
    entries = [entry(signature(512 * (i + 1), 512), [(None, record["name"])]) for i, record in enumerate(records)]
    padding = gemm_record("zz")
    padding["family"] = "x" * (60 * MEGABYTE)
    return archive(*records, padding, tables={"gemm": table(entries)})


@BOMBS.add
def cubins_block_for_each_cubin() -> tuple[bytes, mutants.Content]:
    """As above, of cubins: each function has its own, and one is long."""
    records = [gemm_record(f"f{i:02d}") for i in range(40)]
    entries = [entry(signature(512 * (i + 1), 512), [(None, record["name"])]) for i, record in enumerate(records)]
    long = gemm_record("zz")
    return archive(*records, long, tables={"gemm": table(entries)}, cubin={"zz": bytes(60 * MEGABYTE)})


@BOMBS.add
def record_of_zeros() -> tuple[bytes, mutants.Content]:
    return archive(bytes(60 * MEGABYTE))


@BOMBS.add
def record_of_spaces() -> tuple[bytes, mutants.Content]:
    return archive(b" " * (60 * MEGABYTE) + b"{}")


@BOMBS.add
def record_nested() -> tuple[bytes, mutants.Content]:
    return with_field("arguments", b"[" * (30 * MEGABYTE) + b"]" * (30 * MEGABYTE))


@BOMBS.add
def record_nested_in_objects() -> tuple[bytes, mutants.Content]:
    return with_field("arguments", b'{"a":' * (10 * MEGABYTE) + b"1" + b"}" * (10 * MEGABYTE))


@BOMBS.add
def record_with_arguments_of_numbers() -> tuple[bytes, mutants.Content]:
    return with_field("arguments", b"[" + b"0," * (30 * MEGABYTE) + b"0]")


@BOMBS.add
def record_with_arguments_of_objects() -> tuple[bytes, mutants.Content]:
    return with_field("arguments", b"[" + b"{}," * (20 * MEGABYTE) + b"{}]")


@BOMBS.add
def record_with_a_name_of_numbers() -> tuple[bytes, mutants.Content]:
    return with_field("family", b"[" + b"0," * (30 * MEGABYTE) + b"0]")


@BOMBS.add
def record_with_long_numbers() -> tuple[bytes, mutants.Content]:
    number = b"9" * 4300
    return with_field("kernels", b"[" + (number + b",") * 14_000 + number + b"]")


@BOMBS.add
def record_with_a_number_of_a_million_digits() -> tuple[bytes, mutants.Content]:
    return with_field("kernels", b"9" * 1_000_000)


@BOMBS.add
def record_with_a_long_fraction() -> tuple[bytes, mutants.Content]:
    return with_field("kernels", b"0." + b"9" * (50 * MEGABYTE))


@BOMBS.add
def record_with_many_symbols() -> tuple[bytes, mutants.Content]:
    record = bomb_record()
    record["symbols"] |= {f"s{i}": {"width": 32, "divisibility": 1} for i in range(12_000)}
    return archive(record)


@BOMBS.add
def record_with_many_arguments() -> tuple[bytes, mutants.Content]:
    record = bomb_record()
    record["arguments"] += [{"kind": "none", "name": f"n{i}"} for i in range(20_000)]
    return archive(record)


@BOMBS.add
def record_with_many_arguments_of_one_name() -> tuple[bytes, mutants.Content]:
    record = bomb_record()
    record["arguments"] += [{"kind": "none", "name": "n"}] * 2_000_000
    return archive(record)


@BOMBS.add
def record_with_many_kernels() -> tuple[bytes, mutants.Content]:
    record = bomb_record()
    record["kernels"] += [record["kernels"][0] | {"symbol": f"k{i}"} for i in range(12_000)]
    return archive(record)


@BOMBS.add
def record_with_many_kernels_launched() -> tuple[bytes, mutants.Content]:
    record = bomb_record()
    record["kernels"] += [record["kernels"][0] | {"symbol": f"k{i}"} for i in range(5_000)]
    record["program"]["launches"] = [record["program"]["launches"][0] | {"kernel": i} for i in range(5_001)]
    return archive(record)


# --- launch programs ---


@BOMBS.add
def program_of_many_nodes() -> tuple[bytes, mutants.Content]:
    def change(program: dict[str, Any]) -> None:
        program["nodes"] += [["add", 32, 0, 0, ["nsw", "nuw"]]] * (20_000 - len(program["nodes"]))

    return with_program(change)


@BOMBS.add
def program_of_too_many_nodes() -> tuple[bytes, mutants.Content]:
    return with_program(lambda program: program["nodes"].extend([["add", 32, 0, 0]] * 2_000_000))


@BOMBS.add
def program_of_much_poison() -> tuple[bytes, mutants.Content]:
    """Each node has a reason of its own with large numbers, of which one is told."""

    def change(program: dict[str, Any]) -> None:
        big = count(program)
        program["nodes"].append(["const", 64, (1 << 64) - 1])
        program["nodes"] += [["mul", 64, big, big, ["nuw"]]] * (19_999 - len(program["nodes"]))
        program["nodes"].append(["trunc", 32, count(program) - 1])
        use(program, count(program) - 1)

    return with_program(change)


def _loop(limit: int, initial: list[int], test: int, body: list[Any], following: list[int]) -> list[Any]:
    return ["loop", 32, limit, 0, initial, [], test, body, following]


@BOMBS.add
def program_of_a_loop_with_many_nodes() -> tuple[bytes, mutants.Content]:
    """256 rounds of 19,000 nodes."""

    def change(program: dict[str, Any]) -> None:
        true = count(program)
        program["nodes"].append(["const", 1, 1])
        body = [["add", 32, 0, 0]] * 19_000
        program["nodes"].append(_loop(256, [0], true, body, [true + 1]))
        use(program, true + 1)

    return with_program(change)


@BOMBS.add
def program_of_many_loops() -> tuple[bytes, mutants.Content]:
    """19,000 loops of 256 rounds, each of which sees all values before it."""

    def change(program: dict[str, Any]) -> None:
        true = count(program)
        program["nodes"].append(["const", 1, 1])
        program["nodes"] += [_loop(256, [0], true, [], [0])] * 19_000
        use(program, count(program) - 1)

    return with_program(change)


@BOMBS.add
def program_of_loops_with_many_variables() -> tuple[bytes, mutants.Content]:
    """Variables count as no nodes."""

    def change(program: dict[str, Any]) -> None:
        true = count(program)
        program["nodes"].append(["const", 1, 1])
        program["nodes"] += [_loop(256, [0] * 20_000, true, [], [0] * 20_000)] * 20
        use(program, count(program) - 1)

    return with_program(change)


@BOMBS.add
def program_of_many_values() -> tuple[bytes, mutants.Content]:
    """Each node after them knows by a bit for each on which it depends."""
    record = bomb_record()
    names = [f"s{i}" for i in range(10_000)]
    record["arguments"] += [{"kind": "scalar", "name": name, "dtype": "i32"} for name in names]
    program = record["program"]
    program["values"] = [[name, 32] for name in names]
    program["nodes"] = [["add", 32, i % 10_000, 9_999] for i in range(5_000)] + [["zext", 64, 0], ["const", 32, 1]]
    one, zero = 15_001, 15_000
    launch = program["launches"][0]
    launch |= {"grid": [one] * 3, "block": [one] * 3, "shared_bytes": zero, "attributes": []}
    launch["parameters"] = [{"size": 8, "words": [], "slots": [[0, "raw", i, None]]} for i in range(3)]
    return archive(record)


@BOMBS.add
def program_of_many_launches() -> tuple[bytes, mutants.Content]:
    return with_program(lambda program: program.update(launches=program["launches"] * 1_000))


@BOMBS.add
def program_of_too_many_launches() -> tuple[bytes, mutants.Content]:
    return with_program(lambda program: program.update(launches=program["launches"] * 150_000))


@BOMBS.add
def program_of_many_launches_with_many_words() -> tuple[bytes, mutants.Content]:
    """A thousand launches of 8,000 words each."""

    def change(program: dict[str, Any]) -> None:
        launch = program["launches"][0]
        launch["parameters"] = [{"size": 32_000, "words": [[4 * i, 4, 0] for i in range(8_000)], "slots": []}]
        program["launches"] = [launch] * 500

    return with_program(change)


@BOMBS.add
def program_of_many_parameters() -> tuple[bytes, mutants.Content]:
    """Each of one byte, of which there is room for 32,764."""

    def change(program: dict[str, Any]) -> None:
        program["launches"][0]["parameters"] += [{"size": 1, "words": [], "slots": []}] * 32_000
        program["launches"] *= 20

    return with_program(change)


@BOMBS.add
def program_of_many_slots() -> tuple[bytes, mutants.Content]:
    def change(program: dict[str, Any]) -> None:
        slots = [[8 * i, "tma", 0, None] for i in range(4_000)]
        program["launches"][0]["parameters"] = [{"size": 32_000, "words": [], "slots": slots}]
        program["launches"] *= 16

    return with_program(change)


@BOMBS.add
def program_with_many_flags() -> tuple[bytes, mutants.Content]:
    """The same flag again and again, each held against the operands."""

    def change(program: dict[str, Any]) -> None:
        program["nodes"] += [["add", 32, 0, 0, ["nsw"] * 1_000]] * 5_000
        use(program, count(program) - 1)

    return with_program(change)
