"""What a user says of CuTe DSL functions of their own, for `aot build --spec`: see docs/functions.md.

A spec is a Python file with a list called `functions`. Builders and tuners execute it, and servers never see it: of
what it says, an archive holds the argument description and the name. So it imports the DSL inside `make`, and torch
inside `reference`, each of which runs where that is installed.

Imports neither of them. Everything here raises `SpecError` where it makes no sense.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from runtime.errors import AotError
from runtime.numbers.dtypes import DTYPES
from runtime.program import arguments as record_arguments
from runtime.program.arguments import SCALAR_DTYPES

from .search.targets import target as target_named
from .suggest import did_you_mean

_WHOLE = tuple(name for name, d in DTYPES.items() if d.bits % 8 == 0 and not d.stored)  # of whole bytes, as tensors are
_CHECKED_AT = 1, 3, 17, 333  # one, fewer than any tile, and what fills none
ROLES = ("in", "out", "inout")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SOURCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MOST_NAME = 100  # characters, so that a function's name with its variant and target fits an archive


class SpecError(AotError):
    """A spec cannot be used: the file, what it says, or what its own code does."""


@dataclass(frozen=True)
class Symbol:
    """An extent or a stride that each call is free to choose: what it must be a multiple of, and its bits.

    `width` is 32 or 64; None: 32 for what is the extent of some tensor, 64 for what is only a stride. Wherever its name
    stands, it is the same number.
    """

    name: str
    divisibility: int = 1
    width: int | None = None

    def __post_init__(self) -> None:
        _require_name("a symbol", self.name)
        if type(self.divisibility) is not int or self.divisibility < 1:
            raise SpecError(f"symbol {self.name!r}: divisibility must be 1 or more, found {self.divisibility!r}")
        if self.width not in (None, 32, 64):
            raise SpecError(f"symbol {self.name!r}: width must be 32 or 64, found {self.width!r}")


Number: TypeAlias = "int | str | Symbol"  # a word stands for a symbol


@dataclass(frozen=True)
class Tensor:
    """A tensor in device memory: `shape` and `strides` in elements, `alignment` of its first element in bytes.

    Without `strides` the last is 1 and each other is free, a multiple of `divisibility` elements, by default as many as
    `alignment` has. Without `alignment` it is that of an element.

    For checks: `role` is "in", "out" or "inout", `values` the least value and the one past the greatest that random
    inputs have, where an extent's name may stand for the latter. Floats have a normal distribution without it.
    """

    name: str
    dtype: str
    shape: Sequence[Number]
    strides: Sequence[Number] | None = None
    alignment: int | None = None
    divisibility: int | None = None
    role: str = "in"
    values: tuple[float, float | str] | None = None

    def __post_init__(self) -> None:
        _require_name("a tensor", self.name)
        here = f"tensor {self.name!r}"
        if self.dtype not in _WHOLE:
            raise SpecError(f"{here}: unknown element type {self.dtype!r}; {did_you_mean(str(self.dtype), _WHOLE)}")
        for what, numbers in (("shape", self.shape), ("strides", self.strides)):
            if numbers is not None:
                _require_numbers(f"{here}: {what}", numbers)
        if self.strides is not None and len(self.strides) != len(self.shape):
            raise SpecError(f"{here}: has {len(self.shape)} extents and {len(self.strides)} strides; give one for each")
        bytes_ = self.alignment_bytes
        if type(bytes_) is not int or not 1 <= bytes_ <= 4096 or bytes_ & (bytes_ - 1):
            raise SpecError(f"{here}: alignment must be a power of two up to 4096 bytes, found {self.alignment!r}")
        if self.divisibility is not None and (type(self.divisibility) is not int or self.divisibility < 1):
            raise SpecError(f"{here}: divisibility must be 1 or more, found {self.divisibility!r}")
        if self.role not in ROLES:
            raise SpecError(f"{here}: role must be one of {', '.join(ROLES)}, found {self.role!r}")
        if self.values is not None and (not isinstance(self.values, tuple) or len(self.values) != 2):
            raise SpecError(f"{here}: values must be (least, past the greatest), found {self.values!r:.60}")

    @property
    def alignment_bytes(self) -> int:
        """Alignment of the first element."""
        return DTYPES[self.dtype].bytes if self.alignment is None else self.alignment

    def all_strides(self) -> tuple[int | str | Symbol, ...]:
        """The strides, those that are left to each call as symbols."""
        if self.strides is not None:
            return tuple(self.strides)
        steps = self.divisibility or max(1, self.alignment_bytes // DTYPES[self.dtype].bytes)
        last = len(self.shape) - 1
        return tuple(1 if i == last else Symbol(f"{self.name}_stride{i}", steps, 64) for i in range(last + 1))


@dataclass(frozen=True)
class Scalar:
    """A number that each call passes: "i32", "i64" or "f32". Checks pass `value`, a number of that type."""

    name: str
    dtype: str
    value: float = 1

    def __post_init__(self) -> None:
        _require_name("a scalar", self.name)
        if self.dtype not in SCALAR_DTYPES:
            known = did_you_mean(str(self.dtype), SCALAR_DTYPES)
            raise SpecError(f"scalar {self.name!r}: unknown type {self.dtype!r}; {known}")
        bits = DTYPES[self.dtype].bits - 1
        whole = type(self.value) is int and -1 << bits <= self.value < 1 << bits
        if not whole and (self.dtype != "f32" or type(self.value) not in (int, float)):
            wanted = "a number" if self.dtype == "f32" else f"an integer of {bits + 1} bits"
            raise SpecError(
                f"scalar {self.name!r}: value, which checks pass, must be {wanted}, found {self.value!r:.60}; give "
                f"value={1.0 if self.dtype == 'f32' else 1}, or leave it out"
            )


@dataclass(frozen=True)
class Constant:
    """What is fixed when the function is compiled, such as None for a tensor that is left out. Calls do without it."""

    name: str
    value: Any

    def __post_init__(self) -> None:
        _require_name("a constant", self.name)


@dataclass(frozen=True)
class Clusters:
    """An Int32 that the runtime passes: how many clusters of `cluster_size` CTAs the device holds at once."""

    name: str
    cluster_size: int = 1

    def __post_init__(self) -> None:
        _require_name("a count of clusters", self.name)
        if type(self.cluster_size) is not int or not 1 <= self.cluster_size <= 64:
            raise SpecError(f"{self.name!r}: cluster_size must be from 1 to 64, found {self.cluster_size!r}")


@dataclass(frozen=True)
class Workspace:
    """Device memory that the runtime passes as a pointer to bytes, aligned to 128: `bytes`, or so many for each of the
    count called `each`, a `Clusters`. `zeroed`: zero before each launch, and left zero by it."""

    name: str
    bytes: int
    each: str | None = None
    zeroed: bool = False

    def __post_init__(self) -> None:
        _require_name("a workspace", self.name)
        if type(self.bytes) is not int or self.bytes < 1:
            raise SpecError(f"workspace {self.name!r}: bytes must be 1 or more, found {self.bytes!r}")


@dataclass(frozen=True)
class Stream:
    """The stream to launch on, which every function takes."""

    name: str = "stream"

    def __post_init__(self) -> None:
        _require_name("a stream", self.name)


Argument: TypeAlias = "Tensor | Scalar | Constant | Clusters | Workspace | Stream"
ARGUMENTS = Tensor, Scalar, Constant, Clusters, Workspace, Stream


@dataclass(frozen=True)
class Options:
    """How a function is compiled: the compiler's level of optimisation, from 0 to 3, and words for ptxas.

    `local_memory`: ship kernels that keep values in local memory, which is where registers spill to.
    """

    opt_level: int | None = None
    ptxas: str = ""
    local_memory: bool = False

    def __post_init__(self) -> None:
        if self.opt_level is not None and (type(self.opt_level) is not int or not 0 <= self.opt_level <= 3):
            raise SpecError(f"opt_level must be from 0 to 3, found {self.opt_level!r}")
        if not isinstance(self.ptxas, str):
            raise SpecError(f"ptxas must be the words of a command line, found {self.ptxas!r:.60}")


@dataclass(frozen=True)
class Function:
    """A CuTe DSL function: what it takes, in order, and how it is made.

    `source` is where it comes from, "package.module:name"; the build cache notices what changes in that package, and in
    those of the modules `depends`. `make` returns what `cute.compile` takes, a `cute.jit` function or an object whose
    `__call__` is one; without it that is what `source` names. Each of `variants` is a name and what `make` is given by
    keyword for it. `targets` are those that it can be compiled for, all if there are none.

    `reference` computes in torch what the function must: it is given the inputs and scalars in order, and returns the
    outputs, one or a tuple. `cases` are the extents to check at, by symbol; without them 1, 3, 17 and 333, or the next
    multiples. `tolerance` is the relative error, in the norm, that an output may have, where that of its type is not
    right.
    """

    name: str
    arguments: Sequence[Argument]
    source: str = ""
    make: Callable[..., Any] | None = None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    targets: Sequence[str] = ()
    depends: Sequence[str] = ()
    options: Options = field(default_factory=Options)
    reference: Callable[..., Any] | None = None
    cases: Sequence[Mapping[str, int]] = ()
    tolerance: float | None = None

    def __post_init__(self) -> None:
        _require_name("a function", self.name)
        try:
            self._check()
        except AotError as error:
            raise SpecError(f"function {self.name!r}: {error}") from None

    def _check(self) -> None:
        if self.source and not _SOURCE.fullmatch(self.source):
            raise SpecError(f"source must be like 'package.module:name', found {self.source!r:.100}")
        if self.make is None and not self.source:
            raise SpecError("has neither make nor source; give one of them")
        for what, given in (("make", self.make), ("reference", self.reference)):
            if given is not None and not callable(given):
                raise SpecError(f"{what} must be a function, found {given!r:.60}")
        if not isinstance(self.variants, Mapping) or not self.variants:
            raise SpecError(f"variants must map names to what make is given, found {self.variants!r:.60}")
        for name, choices in self.variants.items():
            if name:
                _require_name("a variant", name)
            if not isinstance(choices, Mapping):
                raise SpecError(f"variant {name!r} must be a dictionary of what make is given, found {choices!r:.60}")
            if choices and self.make is None:
                raise SpecError(f"variant {name!r} has choices, but there is no make to give them to")
        self._check_sequences()
        for name in self.targets:
            target_named(name)
        number = isinstance(self.tolerance, (int, float)) and not isinstance(self.tolerance, bool)
        if self.tolerance is not None and not (number and self.tolerance > 0):
            raise SpecError(f"tolerance must be a number above 0, found {self.tolerance!r:.60}")
        if not isinstance(self.options, Options):
            raise SpecError(f"options must be Options(...), found {self.options!r:.60}")
        self._check_arguments()
        symbols = self.symbols()
        for case in self.cases:
            if set(case) != self.extents():
                raise SpecError(f"the case {dict(case)} and the free extents {sorted(self.extents())} differ")
            for name, value in case.items():
                if type(value) is not int or value < 1 or value % symbols[name].divisibility:
                    raise SpecError(f"case {name} = {value!r}: must be a multiple of {symbols[name].divisibility}")

    def _check_sequences(self) -> None:
        for what, kind, each in (
            ("arguments", object, "arguments such as Tensor(...)"),
            ("targets", str, 'names such as "sm_90a"'),
            ("depends", str, "names of modules"),
            ("cases", Mapping, 'dictionaries such as {"n": 4}'),
        ):
            given = getattr(self, what)
            if not isinstance(given, (list, tuple)) or not all(isinstance(x, kind) for x in given):
                raise SpecError(f"{what} must be a list of {each}, found {given!r:.60}")

    def _check_arguments(self) -> None:
        for argument in self.arguments:
            if not isinstance(argument, ARGUMENTS):
                known = ", ".join(kind.__name__ for kind in ARGUMENTS)
                raise SpecError(f"{argument!r:.60} is no argument; they are {known}")
        names = [argument.name for argument in self.arguments]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise SpecError(f"two arguments are called {twice!r}")
        streams = [a for a in self.arguments if isinstance(a, Stream)]
        if len(streams) != 1:
            raise SpecError(f"has {len(streams)} Stream arguments; it needs one, which its kernels are launched on")
        if not self.tensors():
            raise SpecError("has no Tensor argument, so it can compute nothing")
        spaces = [i for i, a in enumerate(self.arguments) if isinstance(a, Workspace)]
        last = max(i for i, a in enumerate(self.arguments) if isinstance(a, Tensor))
        if spaces and spaces[0] < last:
            raise SpecError("workspaces must follow all tensors")
        if clash := set(self.symbols()) & {a.name for a in self.arguments if isinstance(a, Scalar | Clusters)}:
            raise SpecError(f"{sorted(clash)[0]!r} names both a symbol and a number")
        if self.reference is not None:
            self._check_roles()

    def _check_roles(self) -> None:
        if all(t.role == "in" for t in self.tensors()):
            raise SpecError("has a reference and no output; give tensors that it writes role='out' or 'inout'")
        for t in self.tensors():
            if t.role != "out" and DTYPES[t.dtype].mantissa_bits is None and t.values is None:
                raise SpecError(f"tensor {t.name!r} of integers needs values=(least, past the greatest) to be checked")
            if t.values is not None and isinstance(t.values[1], str) and t.values[1] not in self.extents():
                raise SpecError(f"tensor {t.name!r}: values name {t.values[1]!r}, which is no free extent")

    def tensors(self) -> list[Tensor]:
        """The tensors, in order."""
        return [a for a in self.arguments if isinstance(a, Tensor)]

    def extents(self) -> set[str]:
        """The names of the extents that a call is free to choose."""
        return {_name(x) for t in self.tensors() for x in t.shape if not isinstance(x, int)}

    def symbols(self) -> dict[str, Symbol]:
        """Every symbol by name, with its width."""
        extents, found = self.extents(), dict[str, Symbol]()
        for t in self.tensors():
            for x in (*t.shape, *t.all_strides()):
                if isinstance(x, int):
                    continue
                name, known = _name(x), found.get(_name(x))
                if isinstance(x, Symbol):
                    said = Symbol(name, x.divisibility, x.width or (32 if name in extents else 64))
                    if known is not None and known != said and known != Symbol(name, 1, said.width):
                        raise SpecError(f"symbol {name!r} is described in two ways, {known} and {said}")
                    found[name] = said
                else:
                    found.setdefault(name, Symbol(name, 1, 32 if name in extents else 64))
        return found

    def record(self) -> tuple[list[record_arguments.Argument], dict[str, record_arguments.Symbol]]:
        """The arguments and symbols as a function record has them, constants left out."""
        symbols = {n: record_arguments.Symbol(s.width or 64, s.divisibility) for n, s in self.symbols().items()}
        return [_node(a) for a in self.arguments if not isinstance(a, Constant)], symbols

    def checked_at(self) -> list[dict[str, int]]:
        """The extents to check at: `cases`, or few and many, none of them round."""
        if self.cases:
            return [dict(case) for case in self.cases]
        steps = {name: s.divisibility for name, s in self.symbols().items() if name in self.extents()}
        found = [{name: -(-wanted // step) * step for name, step in steps.items()} for wanted in _CHECKED_AT]
        return [case for i, case in enumerate(found) if case not in found[:i]]

    def names(self) -> dict[str, str]:
        """The name of each variant in an archive, without the target."""
        return {variant: f"{self.name}.{variant}" if variant else self.name for variant in self.variants}


def _node(a: Argument) -> record_arguments.Argument:
    """An argument as a function record has it."""
    if isinstance(a, Tensor):
        shape, strides = (tuple(x if isinstance(x, int) else _name(x) for x in of) for of in (a.shape, a.all_strides()))
        return record_arguments.TensorArgument(a.name, a.dtype, shape, strides, a.alignment_bytes)
    if isinstance(a, Scalar):
        return record_arguments.ScalarArgument(a.name, a.dtype)
    if isinstance(a, Clusters):
        return record_arguments.DeviceArgument(a.name, "max_active_clusters", a.cluster_size)
    if isinstance(a, Workspace):
        return record_arguments.WorkspaceArgument(a.name, a.bytes, a.each, a.zeroed)
    return record_arguments.StreamArgument(a.name)


def _name(x: str | Symbol) -> str:
    return x.name if isinstance(x, Symbol) else x


def _require_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _MOST_NAME:
        raise SpecError(f"{what} cannot be called {name!r:.60}; a name has letters, digits and any of _.-")


def _require_numbers(where: str, numbers: object) -> None:
    if not isinstance(numbers, list | tuple):
        raise SpecError(f"{where} must be a list or a tuple, found {numbers!r:.60}")
    for x in numbers:
        if isinstance(x, Symbol):
            continue
        if isinstance(x, str):
            _require_name(f"{where}: a symbol", x)
        elif type(x) is not int or x < 0:
            raise SpecError(f"{where}: {x!r:.60} is no integer from 0 on, no name and no Symbol")
