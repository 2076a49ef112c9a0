"""Mutants of real archives given to all that reads them: nothing but an AotError may escape, late or large.

    python tests/fuzz_library.py --mutants 100000 --seed 0 --jobs 2 [--keep FOLDER] [--only NUMBER]

Each mutant (`tests/mutants.py`) is opened on a recording driver, with native code and without, and either listed, shown
and verified; or its functions are called; or its GEMMs are; or it is preloaded and reloaded; the last two also as by
callers who want equal bits at every M. Five things are findings: an exception that is no AotError, an operation of more
than a second of CPU time (3 for `verify`), one that needs more than 512 MB of memory, an answer that native code and
Python do not agree on, and a launch with an address that lies in none of its operands or workspaces. Mutant NUMBER of a
seed is always the same; `--keep` keeps the smallest mutant of each finding.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aot import repack
from aot.cli.commands import diff as diff_command
from aot.cli.commands import explain as explain_command
from aot.cli.commands import history as history_command
from aot.cli.commands import info as info_command
from aot.cli.commands import ls as ls_command
from aot.cli.commands import show as show_command
from aot.cli.commands import verify as verify_command
from aot.cli.tables import cleaned
from aot.inspect.diff import diff
from aot.inspect.explain import Where, explain
from aot.inspect.history import history
from aot.inspect.info import info
from aot.inspect.listing import listing
from aot.inspect.report.data import report
from aot.inspect.serving import Serving
from aot.inspect.show import show
from aot.report.page import page
from aot.verify import archive as verify
from aot.verify import shapes
from runtime import Library, native
from runtime.container.archive import Archive
from runtime.device.launch import Launch
from runtime.device.prepared_launch import PreparedLaunch
from runtime.errors import AotError
from runtime.gemm.signature import Signature
from runtime.gemm.universal import WORDS
from runtime.numbers.dtypes import TORCH_NAMES
from runtime.program.geometry import span_bytes
from runtime.program.operation import extents_at
from runtime.program.record import Record, TensorView
from runtime.serve.options import Options
from runtime.tables.dispatch import record_mismatch
from tests import mutants, recording_driver
from tests.native_stand_in import exchange_capsule
from tests.pace import slowness
from tests.recording_driver import (
    DTYPES,
    FakeTensor,
    FakeTorch,
    Launched,
    RecordingDriver,
    TorchDType,
    _Recorded,
)

# `verify` reads all that there is, one thing after the other; of mutants the slowest took 0.14 s, of bombs
# (`tests/bombs.py`), which are made to cost much, 1.4 s.
CPU_SECONDS = {"verify": 3.0}  # of everything else 1
MEMORY_BYTES = 512 << 20
RUNAWAY_SECONDS = 20.0  # of CPU time, after which an operation is ended
STUCK_SECONDS = 120.0  # of one mutant, after which its process is ended
ROWS = (1, 77, 5000, 78)
PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 512, 512)  # asked for where the table has none
PLANS = 6  # of `Session.run`; from `_EQUAL_BITS` on for callers who want equal bits
_EQUAL_BITS = 4
ANSWER_EVERY = 100  # mutants, of which a process that ends early loses the account
_NATIVE = native._native


class Runaway(BaseException):
    """An operation took so long that it was ended."""


class Outcome(NamedTuple):
    """How an operation ended: its answer, or the class of an error; CPU seconds; where an escaped exception is from."""

    operation: str
    ended: str
    answer: Any
    seconds: float
    place: str = ""


class Finding(NamedTuple):
    """Something that should not be; findings of equal `kind`, `operation` and `what` are one."""

    kind: str
    operation: str
    what: str
    number: int
    detail: str


@dataclass
class Totals:
    """What a run came to."""

    mutants: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[tuple[str, str, str], tuple[Finding, int]] = field(default_factory=dict)
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    slowest: list[tuple[float, str, int]] = field(default_factory=list)
    largest: list[tuple[int, str, int]] = field(default_factory=list)

    def add(self, finding: Finding, size: int) -> bool:
        """Count a finding; whether it is the first or smallest of its kind."""
        key = finding[:3]
        self.counts[key] += 1
        if key in self.findings and self.findings[key][1] <= size:
            return False
        self.findings[key] = finding, size
        return True

    def worst(self, seconds: float, grown: int, what: str, number: int) -> None:
        """Remember the slowest operations and those that raised the most memory that the process ever had."""
        self.slowest = sorted([*self.slowest, (seconds, what, number)], reverse=True)[:8]
        if grown:
            self.largest = sorted([*self.largest, (grown, what, number)], reverse=True)[:8]

    def merge(self, other: Totals) -> None:
        """Add what another process found."""
        self.mutants += other.mutants
        self.outcomes += other.outcomes
        for key, (finding, size) in other.findings.items():
            if key not in self.findings or size < self.findings[key][1]:
                self.findings[key] = finding, size
        self.counts += other.counts
        self.slowest = sorted(self.slowest + other.slowest, reverse=True)[:8]
        self.largest = sorted(self.largest + other.largest, reverse=True)[:8]


# --- a device and tensors that are the same in every run ---


class LenientDriver(RecordingDriver):
    """Finds in every cubin the kernels that `described` gives for it, and makes launches as the real driver does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.slots: dict[tuple[str, tuple[int, ...]], Launch] = {}  # by kernel and the sizes of its parameters

    def prepare(self, kernel: Any, launch: Launch, pointers: int, like: PreparedLaunch | None = None) -> PreparedLaunch:
        self.slots[kernel[1], launch.sizes] = launch
        try:
            return super().prepare(kernel, launch, pointers, like)
        except OverflowError:  # as `runtime.device.driver` has it: larger than native code has room for
            return _Recorded(self, kernel[1], launch)

    def kernel_count(self, library: Any) -> int:
        return len(self.kernels.get(library, {}))


def addresses(launched: Launched, of: Launch) -> list[tuple[int, bool]]:
    """The addresses that a launch gave its kernel, which has slots as `of` has, and whether each is a descriptor's."""
    buffer = bytearray(of.parameters)
    for offset, parameter in zip(of.offsets, launched.parameters, strict=True):
        buffer[offset : offset + len(parameter)] = parameter
    return [(int.from_bytes(buffer[slot.offset : slot.offset + 8], "little"), slot.tma) for slot in of.slots]


def extent_of(x: FakeTensor) -> tuple[int, int]:
    """Where a tensor is, and the bytes from its first element to the end of its last."""
    dtype = next((name for name, of in TORCH_NAMES.items() if of == x.dtype.name), x.dtype.name)
    return x.pointer, span_bytes(TensorView(x.pointer, dtype, x.shape, x.stride(), 0))


def operands_of(given: Any) -> list[tuple[int, int]]:
    """Where the tensors are that were given, or came back."""
    if isinstance(given, list | tuple):
        return [found for x in given for found in operands_of(x)]
    return [extent_of(given)] if isinstance(given, FakeTensor) else []


def is_inside(address: int, tma: bool, operands: list[tuple[int, int]]) -> bool:
    """Whether an address is in one of `operands`, or at its end; a descriptor has no bits 0 to 3 of it."""
    slack = 15 if tma else 0
    return any(start - slack <= address <= start + size for start, size in operands)


def driver_for(content: mutants.Content) -> LenientDriver:
    """A device whose cubins hold what the records say, where they say it."""
    kernels: dict[bytes, dict[str, tuple[int, ...]]] = {}
    capability = (9, 0)
    for record, binary in zip(content.records, content.cubins, strict=True):
        try:
            held: dict[str, tuple[int, ...]] = {kernel["symbol"]: () for kernel in record["kernels"]}
            for launch in record["program"]["launches"]:
                sizes = tuple(parameter["size"] for parameter in launch["parameters"])
                held[record["kernels"][launch["kernel"]]["symbol"]] = sizes
            kernels[binary] = held
            capability = (10, 0) if record["target"] == "sm_100a" else capability
        except (LookupError, TypeError):
            kernels[binary] = {}
    return LenientDriver(kernels=kernels, capability=capability)


def tensor(view: TensorView) -> FakeTensor:
    made = FakeTensor(view.shape, "bfloat16", view.strides, view.pointer)
    name = TORCH_NAMES.get(view.dtype, view.dtype)
    made.dtype = DTYPES.get(name) or TorchDType(name)
    return made


def tensors(given: Any) -> Any:
    """`given` with a tensor for each view."""
    if isinstance(given, TensorView):
        return tensor(given)
    return [tensors(x) for x in given] if isinstance(given, list) else given


def gemm_call(signature: Signature, m: int, with_out: bool) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of `Library.gemm`."""
    extents, seen, address = extents_at(signature, m), {}, 1 << 44
    for operand in signature.operands():
        shape = tuple(extents[axis] for axis in operand.axes)
        strides = [1] * len(shape)
        for i in reversed(range(len(shape) - 1)):
            strides[i] = strides[i + 1] * shape[i + 1]
        if operand.name == "b" and signature.b_major == "n":
            strides[-2:] = [1, shape[-2]]
        address += 1 << 40
        seen[operand.name] = tensor(TensorView(address, operand.dtype, shape, tuple(strides), 0))
    a, b, d = (seen.pop(name) for name in "abd")
    words: dict[str, Any] = {"overlap": signature.overlap, **seen} if signature.overlap != "serial" else {**seen}
    if signature.parts.activation != "none":
        words["epilogue"] = signature.parts.activation_word
    return [a, b], words | ({"out": d} if with_out else {})


# --- what is done to a mutant ---


def print_explained(answers: list[dict[str, Any]]) -> None:
    """What `aot explain` prints."""
    for answer in answers:
        explain_command.print_answer(answer)


def print_shown(found: dict[str, Any]) -> None:
    """What `aot show` prints."""
    if "function" in found:
        show_command.print_function(found["function"])
    for entry in found.get("entries", []):
        show_command.print_entry(entry, found["short_names"])
    for entry in found.get("predicted", []):
        show_command.print_predicted(entry, found["short_names"])


def print_found(checks: list[verify.Finding]) -> None:
    """What `aot verify` prints."""
    verify_command.print_checks(verify.causes(checks), [check for check in checks if check.warning])


class Session:
    """Everything that reads an archive, done to one mutant, with native code or without."""

    def __init__(
        self, path: Path, base: Path, content: mutants.Content, plan: int, patience: float = RUNAWAY_SECONDS
    ) -> None:
        """What follows an operation of more than `patience` seconds of CPU time is left out."""
        self.path, self.base, self.content, self.plan, self.patience = path, base, content, plan, patience
        self.signatures = _signatures(content) or [PLAIN]
        self.predicted = _predicted(content)
        self.outcomes: list[Outcome] = []
        self.grown: list[int] = []
        self.peak = _peak_kb()

    def run(self, compiled: bool) -> list[Outcome]:
        """Do one of the things that are done to archives, which of them depends on the mutant."""
        native._native = _NATIVE if compiled else None
        native.costs = getattr(native._native, "Costs", None)
        _set_capsule(compiled and _NATIVE is not None)
        self.driver = driver_for(self.content)
        recording_driver._addresses = itertools.count(1 << 50, 1 << 30)  # of what is allocated, the same each time
        archive = self.attempt("open", lambda: Archive.open(self.path), keep=True)
        if archive is None:
            return self.outcomes
        try:
            if self.plan == 0:
                return self.describe(archive)
            equal_bits = self.plan >= _EQUAL_BITS
            library = self.attempt(
                "library", lambda: Library(archive, self.driver, Options(batch_invariant=equal_bits)), keep=True
            )
            if library is not None:
                self.archive = archive
                plans = self.call_functions, self.call_gemm, self.preload, self.call_gemm, self.preload
                plans[self.plan - 1](library)
                self.attempt("close", library.close)
        finally:
            archive.close()
        return self.outcomes

    def describe(self, archive: Archive) -> list[Outcome]:
        """What the command line does, but that what it prints is thrown away."""
        self.printed("ls", lambda: listing(archive), ls_command.print_listing)
        asked = [*self.signatures[:1], *self.predicted]
        for name in [self.content.names[0], *(signature.key() for signature in asked)]:
            self.printed("show", partial(show, archive, name), print_shown)
        self.printed("info", lambda: info(archive), info_command.print_info)
        self.printed("report", lambda: cleaned(report(archive)), page)
        self.printed("history", lambda: history(archive), history_command.print_steps)
        self.printed("diff", lambda: diff(archive, archive), diff_command.print_diff)
        for signature in asked:
            explained = partial(self.explained, archive, signature)
            self.printed("explain", explained, print_explained)
        self.attempt("contents", lambda: repack.contents(archive))
        self.printed("verify", lambda: verify.verify(archive), print_found)
        return self.outcomes

    def explained(self, archive: Archive, signature: Signature) -> list[dict[str, Any]]:
        """What `aot explain` says of a signature, on GPUs of the archive's targets."""
        return explain(archive, Serving(archive), [signature], 64, Where())

    def printed(self, operation: str, find: Callable[[], Any], show: Callable[[Any], object]) -> None:
        """Find something and print it."""
        found = self.attempt(operation, find)
        if found is not None:
            with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
                self.attempt(f"print {operation}", partial(show, found))

    def call_functions(self, library: Library) -> None:
        """Every function, with tensors of two sizes that its record takes."""
        for name in (self.attempt("functions", lambda: list(library.functions)) or [])[:2]:
            record = self.attempt("record", partial(self.record, library, name), keep=True)
            for wanted in (1, 77) if record is not None else ():
                given = self.attempt("arguments", partial(self.arguments, record, wanted), keep=True)
                if given is not None:
                    call = partial(library.functions[name], *given, stream=5)
                    self.attempt("call", call, operands=given)

    def record(self, library: Library, name: str) -> Record:
        return library.functions[name].record

    def arguments(self, record: Record, wanted: int) -> list[Any]:
        made: list[Any] = tensors(shapes.arguments(record, shapes.near(record, wanted)))
        return made

    def call_gemm(self, library: Library) -> None:
        """A GEMM for several numbers of rows, of which the last is planned from one before, and of another type."""
        for signature in [*self.signatures[:1], *self.predicted]:
            for m in ROWS:
                given, words = gemm_call(signature, m, m != 5000)
                before = len(self.driver.launches)
                self.attempt(
                    "gemm", partial(library.gemm, *given, **words), keep=True, operands=[*given, *words.values()]
                )
                served = {launch.symbol for launch in self.driver.launches[before:]}
                self.attempt("what served it", partial(self.require_fitting, signature, served))
            wrong, words = gemm_call(signature, 3, False)
            wrong[0].dtype = DTYPES["float32"]
            self.attempt("gemm of f32", partial(library.gemm, *wrong, **words), keep=True, operands=wrong)

    def require_fitting(self, signature: Signature, served: set[str]) -> None:
        """Fail where a GEMM was served by a kernel whose record does not compute it."""
        for symbol in served:
            records = [self.read(name) for name in self.archive.functions]
            having = [r for r in records if r is not None and symbol in {kernel.symbol for kernel in r.kernels}]
            if all(record_mismatch(signature, record) for record in having):
                raise AssertionError(f"{signature.key()} was served by {symbol}")

    def read(self, name: str) -> Record | None:
        try:
            return Record.from_json(self.archive.record(name))
        except AotError:
            return None

    def preload(self, library: Library) -> None:
        """What a server does besides calls."""
        self.attempt("preload", lambda: library.preload(tokens=[77]))
        for signature in self.predicted:
            self.attempt("preload of one", partial(library.preload, tokens=[77], only=[signature]))
            self.attempt("entry", lambda signature=signature: library.entry(signature).state)  # type: ignore[misc]
        for signature in [*self.signatures[:1], *self.predicted]:
            given, words = gemm_call(signature, 77, True)
            self.attempt("gemm", partial(library.gemm, *given, **words), keep=True, operands=[*given, *words.values()])
        self.attempt("stats", lambda: library.stats().launches_by_function)
        self.attempt("prometheus", lambda: len(library.prometheus()) > 0)
        self.attempt("reload of another", lambda: library.reload(self.base))
        self.attempt("reload", lambda: library.reload(self.path))
        self.attempt("drop_old", library.drop_old)

    def attempt(
        self, operation: str, what: Callable[[], Any], keep: bool = False, operands: list[Any] | None = None
    ) -> Any:
        """Do something, and note how it ended; what it gave, or None. It launches on `operands` alone, if it does."""
        if self.outcomes and self.outcomes[-1].seconds > self.patience:
            return None
        before = len(self.driver.launches)
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, RUNAWAY_SECONDS)
        result, place = None, ""
        try:
            try:
                result = what()
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            ended = "fine"
        except AotError as error:
            str(error)
            ended = type(error).__name__
        except (Exception, Runaway) as error:
            ended, place = type(error).__name__, f"{_place(error)}: {type(error).__name__}: {str(error)[:150]}"
        seconds = time.process_time() - began
        peak, self.peak = self.peak, _peak_kb()
        self.grown.append(self.peak - peak)
        answer = None if keep or ended != "fine" else result
        if operands is not None:
            answer = self.driver.launches[before:]
            if outside := self.outside(before, operands_of([*operands, result])):
                ended, place = "outside", outside
        self.outcomes.append(Outcome(operation, ended, answer, seconds, place))
        return result

    def outside(self, before: int, operands: list[tuple[int, int]]) -> str:
        """What is wrong with the addresses of the launches since `before`, each of which must be in an operand or in a
        workspace; empty where nothing is."""
        known = operands + [(start, size) for start, (size, _) in self.driver.allocated.items()]
        for launched in self.driver.launches[before:]:
            of = self.driver.slots[launched.symbol, tuple(map(len, launched.parameters))]
            for address, tma in addresses(launched, of):
                if not is_inside(address, tma, known):
                    return f"{launched.symbol}: is given {address:#x}, which is outside of its operands"
        return ""


def _peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@cache
def _capsule() -> Any:
    return exchange_capsule(lambda device: 0)


def _set_capsule(there: bool) -> None:
    """Let native code read tensors, or not."""
    if there:
        FakeTensor.__dlpack_c_exchange_api__ = _capsule()  # type: ignore[attr-defined]
    elif hasattr(FakeTensor, "__dlpack_c_exchange_api__"):
        del FakeTensor.__dlpack_c_exchange_api__


def _place(error: BaseException) -> str:
    """Where an exception that escaped was raised: the innermost line of the runtime or the builder."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/runtime/" in f.filename or "/aot/" in f.filename] or frames
    return f"{'/'.join(Path(ours[-1].filename).parts[-2:])} {ours[-1].name}"


def _runaway(_number: int, _frame: Any) -> None:
    raise Runaway


class Fuzzer:
    """Makes and tries mutants, one after the other, in this process, whose memory it limits."""

    def __init__(self, seed: int, folder: Path, keep: Path | None) -> None:
        self.seed, self.folder, self.keep = seed, folder, keep
        self.samples = [mutants.json.dumps(record) for record in mutants.real_records()]
        self.totals = Totals()
        logging.disable(logging.CRITICAL)
        sys.modules["torch"] = FakeTorch()
        signal.signal(signal.SIGPROF, _runaway)
        self.base = folder / "base.aot"
        rng = random.Random(seed)
        self.base.write_bytes(mutants.write(random.Random(1), mutants.fresh(rng, self.samples[:2])))

    def try_one(self, number: int) -> None:
        """Make mutant `number` and do everything to it, twice."""
        lift_memory()  # what makes a mutant may take more than what reads it
        rng = random.Random(f"{self.seed} {number}")
        content = mutants.make(rng, self.samples)
        data = mutants.write(rng, content)
        path = self.folder / "mutant.aot"
        path.write_bytes(data)
        runs = []
        for compiled in (True, False) if _NATIVE is not None else (False,):
            limit_memory()
            session = Session(path, self.base, content, number % PLANS)
            runs.append(session.run(compiled))
            self.judge(number, data, compiled, session)
        if len(runs) == 2:
            self._compare(number, data, *runs)
        self.totals.mutants += 1

    def judge(self, number: int, data: bytes, compiled: bool, session: Session) -> None:
        how = "native" if compiled else "python"
        for outcome, grown in zip(session.outcomes, session.grown, strict=True):
            operation = f"{outcome.operation} ({how})"
            self.totals.outcomes[f"{outcome.operation}: {outcome.ended}"] += 1
            if outcome.seconds > 0.05 or grown > 4096:
                self.totals.worst(outcome.seconds, grown, operation, number)
            if outcome.ended == "MemoryError":
                self._found(Finding("memory", outcome.operation, outcome.place, number, operation), data)
            elif outcome.place and outcome.ended != "Runaway":
                self._found(
                    Finding(
                        "outside" if outcome.ended == "outside" else "escape",
                        outcome.operation,
                        outcome.place.split(": ")[0] + " " + outcome.ended,
                        number,
                        outcome.place,
                    ),
                    data,
                )
            most_s = CPU_SECONDS.get(outcome.operation, 1.0)
            if outcome.seconds > most_s and outcome.seconds > most_s * slowness():
                self._found(
                    Finding(
                        "slow",
                        outcome.operation,
                        outcome.ended,
                        number,
                        f"{operation} {outcome.seconds:.2f} s {outcome.place}",
                    ),
                    data,
                )

    def _compare(self, number: int, data: bytes, first: list[Outcome], second: list[Outcome]) -> None:
        for ours, theirs in zip(first, second, strict=False):
            if "Runaway" in (ours.ended, theirs.ended) or "MemoryError" in (ours.ended, theirs.ended):
                return
            if _left_out(ours) or _left_out(theirs):
                continue
            if ours[:3] != theirs[:3]:
                detail = f"native: {str(ours)[:600]}\npython: {str(theirs)[:600]}"
                self._found(Finding("differ", ours.operation, f"{ours.ended} {theirs.ended}", number, detail), data)
                return
        if len(first) != len(second):
            self._found(Finding("differ", "number of operations", "", number, ""), data)

    def _found(self, finding: Finding, data: bytes) -> None:
        if self.totals.add(finding, len(data)) and self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            name = "".join(c if c.isalnum() else "_" for c in " ".join(finding[:3]))[:120]
            (self.keep / f"{name}.aot").write_bytes(data)
            text = f"seed {self.seed}, mutant {finding.number}\n{finding.kind}, {finding.operation}\n{finding.detail}\n"
            (self.keep / f"{name}.txt").write_text(text)


def _left_out(outcome: Outcome) -> bool:
    """Whether `verify` had no time for something, which without native code it has less of."""
    checks = outcome.answer if outcome.operation == "verify" else None
    return any(check.subject.endswith(" left out") for check in checks or ())


def _signatures(content: mutants.Content) -> list[Signature]:
    """What the gemm table may be asked for: the signatures that it has, where they can be called."""
    found: dict[Signature, None] = {}
    for entry in _entries(content):
        try:
            signature = Signature.from_json(entry["signature"])
            if max(signature.n, signature.k, signature.batch) < 1 << 31:
                found[signature] = None
        except (AotError, LookupError, TypeError):
            continue
    return [*found]


def _predicted(content: mutants.Content) -> list[Signature]:
    """A signature of a form of the universal table, of an N and K that no entry has; none where there is no form."""
    try:
        row = content.tables["universal"]["forms"][0]
        words = {word: row["form"][word] for word in WORDS}
        return [Signature.from_json(words | {"n": 1536, "k": 1040, "batch": 2 if row["form"]["batched"] else 1})]
    except (AotError, LookupError, TypeError):
        return []


def _entries(content: mutants.Content) -> Iterator[Any]:
    try:
        yield from content.tables["gemm"]["entries"][:3]
    except (LookupError, TypeError):
        return


def limit_memory() -> None:
    """Let this process have 512 MB more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))


def lift_memory() -> None:
    """Let this process have all the memory that it might."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


# --- processes ---


def _work(seed: int, numbers: range, keep: Path | None, at: Any, answers: Any) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        fuzzer = Fuzzer(seed, Path(folder), keep)
        for number in numbers:
            at.value = number
            fuzzer.try_one(number)
            if fuzzer.totals.mutants == ANSWER_EVERY:
                answers.send(fuzzer.totals)
                fuzzer.totals = Totals()
        answers.send(fuzzer.totals)
        answers.send(None)


def _run(seed: int, numbers: range, keep: Path | None, totals: Totals) -> Iterator[int]:
    """Run over `numbers` in a process of their own, and in another after one that ended early; gives progress."""
    processes = multiprocessing.get_context("fork")
    while numbers:
        at, (receiver, sender) = processes.Value("q", numbers.start), processes.Pipe(duplex=False)
        process = processes.Process(target=_work, args=(seed, numbers, keep, at, sender))
        process.start()
        sender.close()
        before, since, answer = -1, time.monotonic(), None
        try:
            while True:
                if receiver.poll(0.2):
                    answer = receiver.recv()
                    if answer is None:
                        process.join()
                        return
                    totals.merge(answer)
                elif at.value != before:
                    before, since = at.value, time.monotonic()
                    yield before
                elif time.monotonic() - since > STUCK_SECONDS:
                    process.kill()
        except EOFError:
            process.join()
        number = at.value
        what = f"its process ended with status {process.exitcode}"
        totals.add(Finding("crash", "process", what, number, "the process ended, or was stuck and was ended"), 0)
        numbers = range(number + numbers.step, numbers.stop, numbers.step)


def fuzz(count: int, seed: int, jobs: int, keep: Path | None = None) -> Totals:
    """Try `count` mutants of `seed` in `jobs` processes."""
    totals = Totals()
    shares = [_run(seed, range(job, count, jobs), keep, totals) for job in range(jobs)]
    shown = time.monotonic()
    while shares:
        for share in list(shares):
            at = next(share, None)
            if at is None:
                shares.remove(share)
            elif time.monotonic() - shown > 30:
                shown = time.monotonic()
                print(f"at mutant {at}", file=sys.stderr, flush=True)
    return totals


def main() -> None:
    """Fuzz and print what happened; exit status 1 where there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", type=int, help="this mutant alone, in this process")
    options = parser.parse_args()
    began = time.monotonic()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            fuzzer = Fuzzer(options.seed, Path(folder), options.keep)
            fuzzer.try_one(options.only)
        totals = fuzzer.totals
    else:
        totals = fuzz(options.mutants, options.seed, options.jobs, options.keep)
    for outcome, number in sorted(totals.outcomes.items()):
        print(f"{number:9}  {outcome}")
    print("slowest:", *(f"  {s:.3f} s  {what}, mutant {n}" for s, what, n in totals.slowest), sep="\n")
    print("largest:", *(f"  {kb >> 10} MB  {what}, mutant {n}" for kb, what, n in totals.largest), sep="\n")
    for key, (finding, size) in sorted(totals.findings.items()):
        print(
            f"FOUND {totals.counts[key]} x {finding.kind}: {finding.operation}: {finding.what}; mutant {finding.number}"
        )
        print(f"      {finding.detail} ({size} bytes)")
    seconds = time.monotonic() - began
    print(f"{totals.mutants} mutants in {seconds:.0f} s, {len(totals.findings)} findings")
    sys.exit(bool(totals.findings))


if __name__ == "__main__":
    main()
