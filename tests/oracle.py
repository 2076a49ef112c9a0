"""The oracle: the compiler's own host code against the extracted launch program, byte for byte, with no GPU.

`compiled.dump_to_object` gives the host object that the DSL would run. Linked against `oracle_shim.c`, which stands in
for the CUDA calls and records what `_cudaLaunchKernelEx` is given, it says what a launch must be for any extents,
strides, scalars and pointers. Every byte that the host code defines is compared; which those are is seen by running it
twice over a stack filled with different bytes.

`python -m tests.oracle sm_90a` checks one target; a process can compile for one only. With `--spec` it checks a user's
functions.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from aot.compile.host.ir import _argument_inputs
from aot.compile.host.text import parse_function
from aot.compile.host.types import leaves, parse_type
from aot.compile.lower import Lowered, lower
from aot.kernels.sm90.persistent.form import Form
from aot.kernels.sm90.persistent.plan import Plan
from aot.problem.manifest import signature_problem
from aot.providers import spec_file
from aot.search.legal import illegal, legal_variants
from aot.search.provider import PROVIDERS, Compilable, provider
from aot.search.variants import Family, Variant, choices
from runtime.device.launch import Evaluation, Launch
from runtime.errors import ProgramError, RecordError
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.scaling import SCALINGS, TILES
from runtime.program.evaluator import PythonEvaluator
from runtime.program.record import Record, TensorArgument

from .parameters import with_pointers

SHIM = Path(__file__).with_name("oracle_shim.c")
PREFIX = "oracle"
_OFF_WHEN_ZERO = (2, 6)
# Of random cases up to a third has so few tiles that a grid of whole clusters, as some kernels have, would be empty.
_TRIES = 2


@dataclass(frozen=True)
class NativeLaunch:
    """What the compiler's host code passed to `_cudaLaunchKernelEx`."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    attributes: tuple[tuple[int, tuple[int, ...]], ...]
    parameters: tuple[bytes, ...]


class Oracle:
    """The host object of one compiled function, and our program for the same function."""

    def __init__(self, lowered: Lowered, directory: Path) -> None:
        self.read(lowered.record)
        self.flat, _, _ = _argument_inputs(self.record.arguments, self.record.symbols)
        entry = next(iter(parse_function(lowered.host_text).values()))
        self.argument_types = [parse_type(t) for _, t in entry.arguments]
        match = re.search(r'sym_name = "([^"]+)"', lowered.host_text)
        assert match
        object_file, library = directory / "host.o", directory / "host.so"
        object_file.write_bytes(lowered.compiled.dump_to_object(PREFIX))
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O1", "-Wl,-Bsymbolic", "-o", library, SHIM, object_file], check=True
        )
        self.library = ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL)
        self.function = getattr(self.library, f"_mlir_{PREFIX}_{match.group(1)}")
        self.function.restype = None

    def read(self, record: dict[str, Any]) -> None:
        """Take our program from `record`: as the runtime reads it, and as Python does."""
        self.record = Record.from_json(record)
        program, source = self.record.program, record["program"]
        counts = len(program.pointers), len(self.record.kernels)
        self.python = PythonEvaluator.from_json(program.values, source["nodes"], source["launches"], *counts)
        self._last: Evaluation | None = None

    def native(self, values: Mapping[str, int], pointers: Sequence[int], stream: int, fill: int) -> list[NativeLaunch]:
        """Run the compiler's host code on these inputs, over a stack filled with `fill`."""
        lib, launches = self.library, self.record.program.launches
        sizes = [size for launch in launches for size in launch.sizes]
        counts = [len(launch.sizes) for launch in launches]
        lib.oracle_reset((ctypes.c_int * len(counts))(*counts), (ctypes.c_int * len(sizes))(*sizes), len(counts))
        buffers = []
        inputs = iter(self.flat)
        for t in self.argument_types:
            raw = bytearray(max(t.bytes, 8))
            for offset, scalar in leaves(t):
                kind, what = next(inputs)
                value = stream if kind == "stream" else pointers[what] if kind == "pointer" else values[what]
                form = {1: "<B", 4: "<I", 8: "<Q"}[scalar.bytes]
                struct.pack_into(form, raw, offset, value & ((1 << (8 * scalar.bytes)) - 1))
            buffers.append((ctypes.c_char * len(raw)).from_buffer(raw))
        result = ctypes.c_int(-1)
        addresses = [ctypes.addressof(b) for b in buffers] + [ctypes.addressof(result)]
        lib.oracle_run(self.function, (ctypes.c_void_p * len(addresses))(*addresses), fill)
        assert result.value == 0, f"the host function returned {result.value}"
        assert lib.oracle_launches() == len(launches)
        return [self._read(i, counts[i]) for i in range(len(launches))]

    def _read(self, index: int, count: int) -> NativeLaunch:
        lib = self.library
        numbers = (ctypes.c_uint64 * 9)()
        lib.oracle_config(index, numbers)
        attributes = []
        for i in range(numbers[8]):
            words = (ctypes.c_uint32 * 4)()
            lib.oracle_attribute(index, i, words)
            identity, size = words[0], {2: 1, 6: 1}.get(words[0], 3)
            if identity in _OFF_WHEN_ZERO and words[1] == 0:
                continue
            attributes.append((int(identity), tuple(int(w) for w in words[1 : 1 + size])))
        parameters = []
        for i in range(count):
            size = self.record.program.launches[index].sizes[i]
            raw = ctypes.create_string_buffer(size)
            lib.oracle_parameter(index, i, raw)
            parameters.append(raw.raw)
        grid, block = tuple(numbers[0:3]), tuple(numbers[3:6])
        return NativeLaunch(grid, block, numbers[6], numbers[7], tuple(sorted(attributes)), tuple(parameters))

    def compare(self, values: Mapping[str, int], pointers: Sequence[int], stream: int = 0x5EA) -> bool:
        """Check one case; an assertion fails on a difference. False if our program refuses the case as undefined."""
        try:
            given = [values[name] for name, _ in self.record.program.values]
            ours = self.record.plan(given)
        except ProgramError as refused:
            with pytest.raises(ProgramError, match=f"^{re.escape(str(refused))}$"):
                self.python.evaluate(tuple(given), None)
            return False
        assert self.record.program.evaluate(given).launches == ours
        self._last = self.python.evaluate(tuple(given), self._last)
        assert self._last.launches == ours, f"not what it is after another case, with {dict(values)}"
        runs = [self.native(values, pointers, stream, fill) for fill in (0x00, 0xA5, 0xFF)]
        for index, a in enumerate(ours):
            where = f"launch {index} with {dict(values)}"
            b = runs[0][index]
            assert (a.grid, a.block, a.shared_bytes) == (b.grid, b.block, b.shared_bytes), where
            assert tuple(sorted(a.attributes)) == b.attributes, where
            assert b.stream == stream, where
            self._compare_parameters(a, [run[index] for run in runs], pointers, where)
        return True

    @staticmethod
    def _compare_parameters(a: Launch, runs: list[NativeLaunch], pointers: Sequence[int], where: str) -> None:
        buffer = with_pointers(a, pointers)
        for number, (start, size) in enumerate(zip(a.offsets, a.sizes, strict=True)):
            for offset, theirs in enumerate(zip(*(run.parameters[number] for run in runs), strict=True)):
                if len(set(theirs)) == 1:  # otherwise it shows the filling: nobody writes it
                    mine = buffer[start + offset]
                    assert mine == theirs[0], f"{where}: parameter {number} byte {offset}: {mine} is not {theirs[0]}"
            assert size == len(runs[0].parameters[number])


def random_case(record: Record, rng: random.Random) -> tuple[dict[str, int], list[int]]:
    """Random inputs a caller could pass: symbols within their divisibility, aligned made-up device addresses."""
    values: dict[str, int] = {}
    for name, symbol in record.symbols.items():
        top = rng.choice([1, 2, 8, 64, 512, 4096, 32768] + [1 << 28, 1 << 36] * (symbol.width == 64))
        values[name] = symbol.divisibility * rng.randint(1, max(1, top))
    multiprocessors = rng.choice([46, 78, 108, 114, 132, 148, 188])
    for device in record.device_arguments:
        values[device.name] = multiprocessors // device.cluster_size
    scalars: dict[str, Any] = dict(record.program.values)
    for name, width in scalars.items():
        values.setdefault(name, rng.getrandbits(width))
    tensors = [a.alignment for a in record.leaves() if isinstance(a, TensorArgument)]
    workspaces = [128 for _ in record.workspace_arguments]
    pointers = [alignment * rng.randrange(1 << 26, (1 << 47) // alignment) for alignment in tensors + workspaces]
    return values, pointers


def sample(target: str) -> list[Variant]:
    """One variant of every family, scheduler, element type and form that the target has, and every non-GEMM.

    Of every family also such that every way to share loads is among them, of plain ones every way to order tiles and to
    lay tokens out too, and of these and gated ones every way to store D. And what is legal but not likely to be fast.
    """
    chosen: dict[tuple[Any, ...], Variant] = {}
    others: dict[tuple[Any, ...], Variant] = {}
    for name in PROVIDERS:
        for family in _gemm_families(name):
            for v in _gemms(name, family, target):
                form = (v.elements, v.batched, v.scaling, v.b_major, v.epilogue)
                # Batching, other element types and operands change the host code of a family in the same way.
                plain = form == (("bf16",) * 3, False, "none", "k", "none")
                options = ("scheduler", "schedule", "split_k", "stream_k", "nonpersistent", "overlap", "swap")
                hosts = [v.options.get(o) if plain else None for o in options]
                chosen.setdefault((name, family, form, *hosts), v)
                for option in _SHARING if plain else _OF_ANY_FORM:
                    others.setdefault((name, family, option, _value(v, option)), v)
        for v in (*provider(name).functions(target), *_asked(name, target)):
            names = ("overlap", "schedule", "swap", "cluster_n", "two_cta") if v.a != "f16" else ()  # as of bf16
            hosts = [v.options.get(option) for option in names]
            chosen.setdefault((name, v.family, v.elements, v.epilogue, v.scaling, v.operation, *hosts), v)
    found = list(chosen.values())
    for (name, family, option, value), v in others.items():
        of_family = (x for x in found if (x.provider, x.family) == (name, family))
        if all(_value(x, option) != value for x in of_family):
            found.append(v)
    return [*found, *_unlikely(found)]


def first_of_each_family(target: str) -> list[Variant]:
    """The first variant of `sample` of every family, without enumerating the others."""
    found: dict[str, Variant] = {}
    for name in PROVIDERS:
        firsts = (islice(_gemms(name, family, target), 1) for family in _gemm_families(name))
        for v in (*chain.from_iterable(firsts), *provider(name).functions(target), *_asked(name, target)):
            found.setdefault(v.family, v)
    return list(found.values())


def _gemm_families(name: str) -> list[str]:
    return [family for family, f in provider(name).families.items() if f.operation == "gemm"]


def _gemms(name: str, family: str, target: str) -> Iterator[Variant]:
    forms = _forms(provider(name).families[family], partial(_of_family, name, family, target))
    return chain.from_iterable(forms)


def _asked(name: str, target: str) -> Iterator[Variant]:
    """Variants of operations whose variants are enumerated for a signature only: for those that the operation's folder
    here names in its `sample_signatures`."""
    for path in sorted(Path(__file__).parent.glob("*/sample_signatures.py")):
        for signature in importlib.import_module(f".{path.parent.name}.{path.stem}", __package__).SIGNATURES:
            yield from legal_variants(name, target, signature)


def _unlikely(likely: Iterable[Variant]) -> list[Variant]:
    """For every choice a variant that is legal and not worth compiling, but for that choice one of `likely`."""
    found: dict[tuple[Any, ...], Variant] = {}
    for v in likely:
        family = provider(v.provider).families[v.family]
        for option, values in family.options.items():
            key = v.provider, v.family, option
            for value in values if key not in found else ():
                twin = replace(v, config=choices(**{**v.options, option: value}))
                if illegal(twin) is None and family.likely.unlikely(twin):
                    found[key] = twin
    return list(found.values())


_SHARING = ("cluster_m", "cluster_n", "two_cta", "order", "ctas_per_sm", "many tokens", "odd pieces")
_OF_ANY_FORM = ("cluster_m", "cluster_n", "two_cta", "odd pieces", "tiles of scales")


def _value(v: Variant, option: str) -> Any:
    """What a variant chose; with more than 64 tokens in a tile they are on the other side of the MMA, and pieces of D
    that have an odd number of 16 bytes are stored without a swizzle, of gated tiles and of others. Which scales are
    read depends on the columns of a tile, and on whether two CTAs share it."""
    if option == "tiles of scales":
        tiles = SCALINGS[v.scaling].layout == TILES
        return (v.integer("tile_n"), v.options["two_cta"]) if tiles else None
    if option == "odd pieces":
        if v.family != "sm90_persistent" or v.options["swap"]:
            return False, False
        form = Form(v.a, v.d, v.scaling, v.epilogue, v.b_major)
        odd = Plan.of(v.options, form).epilogue_tile_columns * DTYPES[v.d].bytes % 32 == 16
        return odd, odd and form.gated
    return v.integer("tile_m") > 64 if option == "many tokens" else v.options.get(option)


def _of_family(name: str, family: str, target: str, signature: Signature) -> list[Variant]:
    return [v for v in provider(name).variants(target, signature) if v.family == family]


def _forms(family: Family, serving: Callable[[Signature], list[Variant]]) -> Iterator[list[Variant]]:
    """Variants that between them have every element type, scaling, order of B and batching of a family.

    `serving` finds those for a signature. Plain ones, and with the epilogue of the most parts that there is, which has
    gate and up interleaved if it is gated; the first form also with gates before all that they gate. Of what is neither
    plain nor the first, that with the most parts alone.
    """
    for types, scaling, b_major, batched in itertools.product(
        family.elements, family.scalings, family.b_majors, family.batched
    ):
        a, b, d = types
        plain = Signature(a, b, d, "f32", "none", 4096, 4096, 2 if batched else 1, scaling, b_major)
        if not batched:
            plain = replace(plain, overlap="weights")  # which suits variants that rely on less too
        possible = [replace(plain, epilogue=epilogue) for epilogue in family.epilogues]
        legal = [s for s in possible if signature_problem(s) is None]
        legal.sort(key=lambda s: (s.epilogue.count("+"), s.epilogue), reverse=True)
        yield next((found for found in map(serving, legal) if found), [])
        if types == family.elements[0] and (scaling, b_major) == (family.scalings[0], family.b_majors[0]):
            yield from (serving(s) for s in legal if s.epilogue in ("none", "swiglu"))


def _of_spec(options: argparse.Namespace) -> list[spec_file.SpecFunction]:
    spec = spec_file.load(options.spec)
    return spec_file.compilable(spec, spec.functions, [options.target])


def _notices(oracle: Oracle, record: Any, node: list[Any], value: int, cases: Sequence[Any]) -> bool:
    """Whether the oracle tells a program from the host code, one constant of which is now another."""
    node[2] = value
    try:
        oracle.read(record)
        return not all(oracle.compare(*case) for case in cases)
    except (AssertionError, RecordError):
        return True


def _mutate(variant: Compilable, rng: random.Random) -> int:
    """Change every constant of one program that is right, one at a time; status 1 unless the oracle notices nearly all.

    A few are beyond notice: the guard for 2^31 tiles, for instance, compares with a number no case reaches.
    """
    lowered = lower(variant)
    with tempfile.TemporaryDirectory() as directory:
        oracle = Oracle(lowered, Path(directory))
        cases = [random_case(oracle.record, rng) for _ in range(40)]
        assert sum(oracle.compare(*case) for case in cases) >= len(cases) * 4 // 5, variant.name()
        nodes = lowered.record["program"]["nodes"]
        constants = [node for node in nodes if node[0] == "const"]
        unnoticed = []
        for node in constants:
            original = node[2]
            # Not by 1 alone: strides of a tensor map are in units of 16 bytes, and extents of scales in tiles.
            if not any(_notices(oracle, lowered.record, node, original ^ bit, cases) for bit in (1, 16, 1 << 12)):
                unnoticed.append(original)
            node[2] = original
    noticed = len(constants) - len(unnoticed)
    print(f"{noticed} of {len(constants)} changed constants noticed, not {unnoticed}  {variant.name()}", flush=True)
    return 1 if len(unnoticed) > len(constants) // 5 else 0


def main() -> int:
    """Check a sample of variants for one target; exit status 1 if any differs or cannot be checked."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutate", action="store_true", help="change each program, and see the oracle notice")
    parser.add_argument("--family", help="only this family of the sample")
    parser.add_argument("--spec", type=Path, help="check the functions of a spec in place of the sample")
    options = parser.parse_args()
    os.environ["CUTE_DSL_ARCH"] = options.target  # latched when the DSL is imported
    rng, failures = random.Random(options.seed), 0
    if options.mutate:
        return max(_mutate(v, rng) for v in first_of_each_family(options.target))
    chosen: Sequence[Compilable] = sample(options.target) if options.spec is None else _of_spec(options)
    if options.family is not None:
        chosen = [v for v in chosen if v.family == options.family]
    for variant in chosen:
        with tempfile.TemporaryDirectory() as directory:
            checked, tried, problem = 0, 0, ""
            try:
                oracle = Oracle(lower(variant), Path(directory))
                while checked < options.cases and tried < options.cases * _TRIES:
                    tried += 1
                    checked += oracle.compare(*random_case(oracle.record, rng))
                if checked < options.cases:
                    problem = f"only {checked} of {tried} random cases have defined behaviour"
            except Exception as e:
                problem = f"{type(e).__name__}: {e}"
        failures += bool(problem)
        print(f"{'FAIL' if problem else 'ok':5s}{checked:5d} cases  {variant.name()}  {problem}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
