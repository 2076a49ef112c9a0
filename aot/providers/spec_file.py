"""Functions of a user's spec, as a build compiles them: read, chosen, digested, and in a worker process made.

The spec is executed here and in workers; whatever its code raises is one `SpecError` that names the file and the line.
Imports no compiler but in `SpecFunction.build`, and what the spec itself imports.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from runtime.container.archive import MAGIC
from runtime.errors import AotError

from ..search.provider import Buildable, CodeFailed
from ..spec import ARGUMENTS, Constant, Function, Options, SpecError, Symbol
from ..suggest import did_you_mean
from . import arguments
from .origin import Origin, origin

_HERE = Path(__file__)
# This project's files, besides those of the compiler, that decide what a spec's function compiles to.
_MACHINERY = (_HERE, _HERE.with_name("origin.py"), _HERE.with_name("arguments.py"), _HERE.parents[1] / "spec.py")
_STDLIB = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
_OURS = os.path.join(_HERE.parents[1], "")
_DSL = f"{os.sep}nvidia_cutlass_dsl{os.sep}"


@dataclass(frozen=True)
class Spec:
    """A spec that was read: its file, the digest of its content, and its functions."""

    path: Path
    digest: str
    functions: tuple[Function, ...]

    def function(self, name: str) -> Function:
        """The function of that name."""
        return next(f for f in self.functions if f.name == name)


@dataclass(frozen=True)
class SpecFunction:
    """One variant of a function of a spec on a target: what is compiled, as data (`aot.search.provider.Compilable`).

    `digest` is that of the spec's content; `sources` that of all that the function says it comes from.
    """

    path: str
    digest: str
    function: str
    variant: str
    target: str
    family: str
    sources: str
    origins: tuple[tuple[str, str], ...] = ()  # distributions with their versions, which a build tells
    checkable: bool = False  # whether the function has a reference

    provider: ClassVar[str] = "spec"

    def name(self) -> str:
        """Its name in an archive."""
        return ".".join(part for part in (self.function, self.variant, self.target) if part)

    def to_json(self) -> dict[str, Any]:
        """What decides its code, wherever the spec lies."""
        kept = {"spec": self.digest, "function": self.function, "target": self.target, "sources": self.sources}
        return kept | ({"variant": self.variant} if self.variant else {})

    def source_digest(self) -> str:
        """SHA-256 over the spec, its function's sources and what is done here with them."""
        ours = ((path.name, path.read_bytes()) for path in _MACHINERY)
        return arguments.digest([("spec", self.digest.encode()), ("sources", self.sources.encode()), *ours])

    def build(self) -> Buildable:
        """Prepare it for `cute.compile`. Called in a worker process that was told its architecture beforehand.

        Raises:
            SpecError: the spec changed since it was read, its code fails, or the function takes other arguments.
        """
        spec = load(Path(self.path), lasting=True)
        if spec.digest != self.digest:
            raise SpecError(f"{self.path}: changed while it was built; build it again")
        function = spec.function(self.function)
        told = f"{self.path}: function {self.function!r}"
        with _theirs(f"{told}: make" if function.make else told, [spec.path.parent]):
            made = self._made(function)
        if not callable(made):
            raise SpecError(f"{told}: make returned {made!r:.60}; return what cute.compile takes")
        if wrong := _miscounted(made, len(function.arguments)):
            raise SpecError(f"{told}: {wrong}")
        tree, symbols = function.record()
        found = iter(arguments.stand_ins(tree, symbols))
        given = [a.value if isinstance(a, Constant) else next(found) for a in function.arguments]
        folders = [spec.path.parent, *(o.folder for o in _origins(function, spec.path))]
        return Buildable(
            made,
            given,
            tree,
            symbols,
            options=_compile_options(function),
            local_memory=function.options.local_memory,
            explain=partial(_explained, told, folders),
        )

    def _made(self, function: Function) -> Any:
        if function.make is not None:
            return function.make(**function.variants[self.variant])
        module, _, name = function.source.partition(":")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            if not hasattr(found, part):
                hint = did_you_mean(part, [n for n in vars(found) if not n.startswith("_")]).split("known:")[0]
                raise SpecError(f"{self.path}: {module} has no {name!r}; {hint or 'look at its names'}")
            found = getattr(found, part)
        return found


def load(path: Path, *, lasting: bool = False) -> Spec:
    """Execute a spec. `lasting`: in a process that builds, after another has read it: keep its folder on sys.path, as
    its `make` may import what is beside it, and leave out Python's warnings, which were shown.

    Raises:
        SpecError: it cannot be read or executed, or has no functions that make sense; the message names the file.
    """
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read ({getattr(error, 'strerror', error)}); name a spec") from None
    if b"\0" in content:
        what = "is an archive, not a spec" if content.startswith(MAGIC) else "has null bytes, so it is no spec"
        raise SpecError(f"{path}: {what}; a spec is a Python file, as docs/functions.md has one")
    file = path.resolve()
    digest = hashlib.sha256(content).hexdigest()
    module = ModuleType(f"aot_spec_{digest[:16]}")
    module.__file__ = str(file)
    before = list(sys.path)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    sys.modules[module.__name__] = module
    try:
        with _theirs(str(file), [file.parent]), warnings.catch_warnings():
            if lasting:
                warnings.simplefilter("ignore")
            exec(compile(content, str(file), "exec", dont_inherit=True), vars(module))
    finally:
        if not lasting:
            sys.path[:] = before
    return Spec(file, digest, _functions(path, module))


def _functions(path: Path, module: ModuleType) -> tuple[Function, ...]:
    found = getattr(module, "functions", None)
    if not isinstance(found, list | tuple) or not found:
        raise SpecError(f"{path}: needs a list called functions, found {found!r:.60}; docs/functions.md has an example")
    for one in found:
        if not isinstance(one, Function):
            raise SpecError(f"{path}: functions must be aot.spec.Function objects, found {one!r:.60}")
    names = [name for one in found for name in one.names().values()]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SpecError(f"{path}: two functions are called {twice!r}; rename one")
    return tuple(found)


def chosen(spec: Spec, words: Collection[str]) -> tuple[list[Function], list[str]]:
    """The functions that `words` name by name or source, all if there are no words; and the words of others.

    Raises:
        SpecError: a word that can only be a source is none, or none of the words is of this spec.
    """
    others = [w for w in words if not any(w in (f.name, f.source) for f in spec.functions)]
    for word in others:
        if ":" in word or len(others) == len(words):
            known = dict.fromkeys(x for f in spec.functions for x in (f.source, f.name) if x)
            raise SpecError(f"{spec.path}: has no function {word!r}; {did_you_mean(word, known)}")
    named = [f for f in spec.functions if f.name in words or f.source in words]
    return (named if words else list(spec.functions)), others


def compilable(spec: Spec, functions: Iterable[Function], targets: Sequence[str]) -> list[SpecFunction]:
    """What to compile of `functions` for those of `targets` that each is for; for all of its own if there are none.

    Raises:
        SpecError: a function is for none of them, or a module that it comes from cannot be found.
    """
    found, targets = list[SpecFunction](), tuple(dict.fromkeys(targets))
    for f in functions:
        mine = [t for t in targets or f.targets if not f.targets or t in f.targets]
        if not mine:
            of = f"its targets are {', '.join(f.targets)}" if f.targets else "it names no targets; give --target"
            found_ = f"not for {', '.join(targets)}: " if targets else ""
            raise SpecError(f"{spec.path}: function {f.name!r}: {found_}{of}")
        origins = _origins(f, spec.path)
        sources = arguments.digest((f"{i} {o.name}", o.digest.encode()) for i, o in enumerate(origins))
        versions = tuple((o.name, o.version) for o in origins if o.version)
        found += [
            SpecFunction(
                str(spec.path),
                spec.digest,
                f.name,
                variant,
                target,
                f.source or f.name,
                sources,
                versions,
                f.reference is not None,
            )
            for target in mine
            for variant in f.variants
        ]
    return found


def _origins(function: Function, spec: Path) -> list[Origin]:
    modules = [function.source.partition(":")[0], *function.depends] if function.source else function.depends
    path = [str(spec.parent), *(entry or os.getcwd() for entry in sys.path)]
    try:
        return [origin(module, path) for module in modules]
    except AotError as error:
        raise SpecError(f"{spec}: function {function.name!r}: {error}") from None


def _miscounted(made: Any, given: int) -> str:
    """What is wrong where `made`, which is called by position, does not take so many arguments; nothing elsewhere."""
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):  # it has none that Python knows
        return ""
    kinds = [p.kind for p in parameters]
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    least, most = sum(p.default is p.empty for p in placed), len(placed)
    if least <= given and (given <= most or inspect.Parameter.VAR_POSITIONAL in kinds):
        return ""
    takes = f"{most}" if least == most else f"{least} to {most}"
    return f"the spec gives {given} arguments, and the function takes {takes}; describe each of these, in that order"


def _compile_options(function: Function) -> tuple[Any, ...]:
    from cutlass import cute

    options = function.options
    found = [] if options.opt_level is None else [cute.OptLevel(options.opt_level)]
    return (*found, *([cute.PtxasOptions(options.ptxas)] if options.ptxas else ()))


# --- what the user's code raises ---


@contextmanager
def _theirs(where: str, folders: Sequence[Path]) -> Iterator[None]:
    """Run the user's code: what it raises is a SpecError that names the line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise SpecError(_said(where, folders, error)) from None


@contextmanager
def theirs(where: str, spec: Spec) -> Iterator[None]:
    """Run code of a spec: what it raises is a SpecError that names the line."""
    with _theirs(f"{spec.path}: {where}", [spec.path.parent]):
        yield


def _explained(where: str, folders: Sequence[Path], error: Exception) -> CodeFailed:
    return CodeFailed(_said(where, folders, error))


def _said(where: str, folders: Sequence[Path], error: BaseException) -> str:
    """What was raised, in a line: `where` it was, and the innermost line in `folders`, or else of nobody's package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    theirs = [f for f in frames if not f.filename.startswith((_OURS, *_STDLIB)) or _is_package(f.filename)]
    theirs = [f for f in theirs if _DSL not in f.filename]
    inside = [f for f in theirs if any(Path(f.filename).is_relative_to(folder) for folder in folders)]
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    if not isinstance(error, SpecError):
        text = _misused(error) or f"{type(error).__name__}: {text}"
    for frame in (inside or theirs)[-1:]:
        at = f"{frame.filename}:{frame.lineno}"
        text = f"{at}: {text}" if where.startswith(frame.filename) else f"{where}: at {at}: {text}"
    if not (inside or theirs):
        text = f"{where}: {text}"
    if isinstance(error, ModuleNotFoundError):
        text += "; import the DSL inside make and torch inside reference, or install it"
    return text


def _misused(error: BaseException) -> str:
    """What is wrong where the code that failed gives one of `aot.spec` a field that it has not, or leaves out one that
    it needs; nothing elsewhere."""
    found = re.match(
        r"(\w+)\.__init__\(\) (?:got an unexpected keyword argument|missing [^:]*arguments?:) (.*)", str(error)
    )
    frames = list(traceback.walk_tb(error.__traceback__))
    if not isinstance(error, TypeError) or found is None or not frames:
        return ""
    classes = {of.__name__: of for of in (Function, Options, Symbol, *ARGUMENTS)}
    of = frames[-1][0].f_globals.get(found[1], classes.get(found[1]))
    if of is None or of not in classes.values():
        return ""
    named = re.findall(r"'(\w+)'", found[2])
    if " missing " in str(error):
        return f"{found[1]} needs {', '.join(named)}; give {', '.join(f'{name}=...' for name in named)}"
    return f"{found[1]} has no field {named[0]!r}; {did_you_mean(named[0], [f.name for f in fields(of)])}"


def _is_package(filename: str) -> bool:
    """Whether a file of Python's folders is an installed package's."""
    return f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename
