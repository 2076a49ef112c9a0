"""Manifests: the YAML files that say which GEMMs a model runs, read strictly and written back readably.

    format: 1                             # of this file; only 1 exists
    model: llama-3.1-8b                   # a name for people
    source: where the shapes come from    # one line of text
    layers: 32                            # optional, 1; how often a gemm marked `per: layer` repeats
    tokens: [1, 16, 64, 1024]             # the M values to tune for, strictly increasing
    traffic: {1: 812, 16: 20311}          # optional; how many forward passes of a server had so many rows
    targets: [sm_90a, sm_100a]            # names in aot.search.targets
    defaults:                             # optional; any field of a gemm but name, n and k
      dtypes: {a: bf16, b: bf16, d: bf16}
    gemms:
      - {name: qkv, n: 6144, k: 4096}
      - {name: gate_up, n: 28672, k: 4096, epilogue: swiglu}
      - {name: lm_head, n: 128256, k: 4096, per: model}
    operations:                           # optional; then gemms is, too
      rmsnorm:
        - {name: input_norm, x: bf16, weight: bf16, y: bf16, n: 4096}
      grouped_gemm:
        - {name: experts_down, a: bf16, b: bf16, d: bf16, n: 2048, k: 768, experts: {count: 128, top_k: 8}}

A gemm is D = epilogue(scale(A @ B^T)) with A (M, k), B (n, k) and D (M, n), or (M, n/2) where a gated epilogue makes
one column of two. Its fields:
`name`, unique in the file; `n` and `k`, such that rows are a multiple of 16 bytes; `dtypes`, one of
`runtime.numbers.products.PRODUCTS`; `accumulator` (f32); `epilogue` (none), such as silu or
bias+swiglu+residual+scale; `scaling` (none) of A and B of at most 8 bits, one of `runtime.numbers.scaling.SCALINGS`;
`b_major` (k), n where B is stored transposed; `overlap` (serial), what is promised about the kernel before; `batch`
(1); `count` (1), how many times it runs `per` (layer) layer or model; `tokens` and `traffic`, in place of the file's.
`runtime.gemm.signature` says what the words mean. Under `operations` are other operations by name
(`runtime.program.operation`), each a list of what the operation's signatures have, a `name`, and perhaps `tokens`. In
place of some of that an item may have a shorthand (`aot.search.shorthand`), such as `experts`.

Every mistake is a `ManifestError` that names the file, the line, the field and the fix. A file cannot make the
reader run code, follow an alias, or build more than the limits below allow.

Knows nothing of kernels, and of targets only their names.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import yaml

from runtime.container.archive import MAGIC
from runtime.errors import AotError, RecordError
from runtime.gemm.signature import ACTIVATIONS, EPILOGUES, GATED, MAJORS, OVERLAPS, Signature
from runtime.limits import MAX_EXTENT as MAX_SIGNATURE_EXTENT
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.products import (
    ACCUMULATORS,
    PRODUCTS,
    product_words,
    scalings_of,
    unsupported_scaling,
    unsupported_types,
)
from runtime.numbers.scaling import SCALINGS
from runtime.program.operation import Operation, operation

from .. import files
from ..search.operation import building
from ..search.operation import names as operation_names
from ..search.shorthand import Shorthand
from ..search.targets import TARGETS
from ..suggest import did_you_mean

FORMAT = 1
PER = ("layer", "model")

# TMA and vectorised copies need rows that start on this boundary.
ROW_ALIGNMENT_BYTES = 16

# Far above any real model; they bound the work a hostile or mistaken file can cause.
MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH = 8
MAX_EXTENT = 2**24
MAX_TOKENS = 2**20
MAX_COUNT = 10_000
MAX_ITEMS = 1_000
MAX_TEXT_CHARACTERS = 2_000
MAX_PASSES = 10**15

_TOP_FIELDS = ("format", "model", "source", "layers", "tokens", "traffic", "targets", "defaults", "gemms", "operations")
_WORDS = {
    "accumulator": ACCUMULATORS,
    "scaling": SCALINGS,
    "b_major": MAJORS,
    "overlap": OVERLAPS,
    "per": PER,
}
# What a gemm has that says nothing.
_USUAL = {"accumulator": "f32", "epilogue": "none", "scaling": "none", "b_major": "k", "overlap": "serial", "batch": 1}
_DEFAULT_FIELDS = ("dtypes", *_USUAL, "count", "per", "tokens", "traffic")
_GEMM_FIELDS = ("name", "n", "k", *_DEFAULT_FIELDS)

_TAG = "tag:yaml.org,2002:"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_MAX_DIGITS = 19
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


Traffic = tuple[tuple[int, int], ...]


class ManifestError(AotError):
    """A manifest, or a model's config.json, is missing, malformed, or asks for what is not supported."""


@dataclass(frozen=True)
class Gemm:
    """One GEMM of a model: `count` times per layer or per model, tuned for the M values in `tokens`.

    `traffic` has (M, forward passes of a server in which it had that M), by M; none where nobody counted.
    `place` is the file and line that it was read from and its name, for messages; none where it comes from no file.
    """

    name: str
    signature: Signature
    count: int
    tokens: tuple[int, ...]
    per: str = "layer"
    place: str = dataclasses.field(default="", compare=False)
    traffic: Traffic = ()

    def calls(self, layers: int) -> int:
        """How many times one forward pass of a model of so many layers runs it."""
        return self.count * (layers if self.per == "layer" else 1)


class Short(NamedTuple):
    """Integers of an operation's shorthand, by name, and the tokens of the model from which M follows."""

    values: tuple[tuple[str, int], ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Use:
    """What a model asks of an operation that has no section of its own: a signature of it, for the M values in
    `tokens`; `place` as of `Gemm`. `short` is what the file says in place of some of that, by which it is written."""

    name: str
    signature: Any
    tokens: tuple[int, ...]
    place: str = dataclasses.field(default="", compare=False)
    short: Short | None = None

    def calls(self, layers: int) -> None:
        """Nothing, as it does not say how often it runs."""


@dataclass(frozen=True)
class Problem:
    """A distinct signature, the names of the gemms or uses that have it, and every M that any of them asks for."""

    signature: Any  # of any operation
    names: tuple[str, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """What to build: the GEMMs of one model and the targets to build them for.

    `tokens` and `traffic` are what a gemm gets that does not bring its own; those of `Gemm` are always filled in.
    """

    model: str
    source: str
    tokens: tuple[int, ...]
    targets: tuple[str, ...]
    gemms: tuple[Gemm, ...]
    layers: int = 1
    uses: tuple[Use, ...] = ()
    traffic: Traffic = ()

    def items(self) -> tuple[Gemm | Use, ...]:
        """All that it asks for: its gemms, then what it asks of other operations."""
        return (*self.gemms, *self.uses)

    def problems(self) -> tuple[Problem, ...]:
        """The distinct signatures, in the order in which they first appear among `items`."""
        merged: dict[Any, list[Gemm | Use]] = {}
        for item in self.items():
            merged.setdefault(item.signature, []).append(item)
        return tuple(
            Problem(signature, tuple(of.name for of in items), tuple(sorted({m for of in items for m in of.tokens})))
            for signature, items in merged.items()
        )

    def calls(self, item: Gemm | Use) -> int | None:
        """How many times one forward pass of the whole model runs it; None where the file does not say."""
        return item.calls(self.layers)


def use(name: str, of: str, fields: Mapping[str, Any], tokens: Iterable[int], short: Mapping[str, int] | None) -> Use:
    """What a model asks of the operation `of`: its signature by `fields`, without those that are as usual, or that the
    integers of the operation's shorthand, `short`, stand for. `tokens` are M values, with `short` those of the model.

    Raises:
        RecordError: no signature has these fields, the integers do not go together, or M is more than manifests hold.
    """
    every: dict[str, Any] = {**operation(of).usual, **fields}
    asked = tuple(tokens)
    shorthand = building(of).shorthand
    if short is None or shorthand is None:
        return Use(name, operation(of).read(every), asked)
    every |= shorthand.fields(short)
    ms = sorted({shorthand.m(short, count, every) for count in asked})
    if ms[-1] > MAX_TOKENS:
        raise RecordError(f"{asked[-1]} tokens make M {ms[-1]}, which is at most {MAX_TOKENS}; give fewer tokens")
    return Use(name, operation(of).read(every), tuple(ms), short=Short(tuple(short.items()), asked))


def load(path: str | os.PathLike[str]) -> Manifest:
    """Read a manifest file.

    Raises:
        ManifestError: it cannot be read, or `loads` refuses it.
    """
    name = os.fspath(path)
    return loads(read_text(name, "a manifest"), name)


def lists_gemms(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a manifest, perhaps one with mistakes: text with the field `gemms` or `operations`."""
    try:
        return re.search("^(gemms|operations) *:", read_text(os.fspath(path), "a manifest"), re.MULTILINE) is not None
    except ManifestError:
        return False


def loads(text: str, path: str = "<manifest>") -> Manifest:
    """Read a manifest from its text; `path` is what messages call it.

    Raises:
        ManifestError: the text is not YAML, or not a manifest.
    """
    return _Reader(path).manifest(_compose(text, path))


def dump(manifest: Manifest) -> str:
    """Write a manifest as YAML that `loads` reads back to an equal one.

    Raises:
        ManifestError: the manifest holds what no file may hold, such as an unaligned extent.
    """
    kinds = Counter(((g.signature.a, g.signature.b, g.signature.d), g.signature.scaling) for g in manifest.gemms)
    common, scaling = kinds.most_common(1)[0][0] if kinds else (PRODUCTS[0], "none")
    model = _scalar(manifest.model)
    lines = [
        f"# The GEMMs of {model}, D = A @ B^T: A is (tokens, k), B (n, k), D (tokens, n).",
        f"format: {FORMAT}",
        f"model: {model}",
        f"source: {_folded(manifest.source)}",
        f"layers: {manifest.layers}",
        f"tokens: {_flow(manifest.tokens)}",
        *_wrapped_traffic(manifest.traffic),
        f"targets: {_flow(manifest.targets)}",
        "defaults:",
        f"  dtypes: {product_words(*common)}",
        *([f"  scaling: {scaling}"] if scaling != "none" else []),
        "gemms:",
    ]
    lines += [f"  - {{{_gemm_fields(g, common, scaling, manifest)}}}" for g in manifest.gemms]
    if not manifest.gemms:
        lines.pop()  # "gemms:"
    for number, use in enumerate(manifest.uses):
        lines += ["operations:"] if number == 0 else []
        if number == 0 or manifest.uses[number - 1].signature.operation != use.signature.operation:
            lines.append(f"  {use.signature.operation}:")
        lines.append(f"    - {{{_use_fields(use, manifest)}}}")
    text = "\n".join(lines) + "\n"
    if loads(text, f"manifest of {model}") != manifest:
        raise ManifestError(
            f"manifest of {model}: a file cannot hold it as it is; strip its texts of surrounding spaces"
        )
    return text


def write(text: str, path: str | os.PathLike[str], *, replace: bool = False) -> None:
    """Write what `dump` gave to a file, whole or not at all.

    Raises:
        ManifestError: the file is there, and not to be replaced, or the file system refuses.
        OutputError: nothing can be written there, such as a folder.
    """
    target = files.destination(path)
    if target.exists() and not replace:
        raise ManifestError(f"{path}: is there already; --force replaces it, or name another output")
    prefix = f".{target.name}."
    files.collect(target.parent, prefix)
    try:
        with files.file(target.parent, prefix, mode=0o666) as (written, file):
            file.write(text.encode())
            file.flush()
            os.replace(written, target)
    except OSError as error:
        raise ManifestError(f"{path}: cannot be written ({error.strerror}); check the folder and its space") from None


def read_text(path: str, what: str, max_bytes: int = MAX_FILE_BYTES) -> str:
    """The text of a small UTF-8 file, which should be `what`, such as "a manifest".

    Raises:
        ManifestError: it is missing, a folder, an archive, unreadable, too large, or not UTF-8.
    """
    if os.path.isdir(path):
        raise ManifestError(f"{path}: is a folder; name {what} in it")
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such file; check the path") from None
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path}: cannot be read: {error}; check the path and its permissions") from None
    if data.startswith(MAGIC):
        raise ManifestError(f"{path}: is an archive, not {what}; give it to `aot build --base`, `aot tune` or `aot ls`")
    if len(data) > max_bytes:
        raise ManifestError(f"{path}: larger than {max_bytes} bytes, the most that {what} may be; check the path")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ManifestError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None


def signature_problem(signature: Signature) -> tuple[str, str] | None:
    """Why no manifest may hold this signature, as (field, complaint with its fix), or None when it may."""
    if problem := unsupported_types(signature.a, signature.b, signature.d):
        return "dtypes", problem
    return _words_problem(signature) or _extents_problem(signature)


def _words_problem(signature: Signature) -> tuple[str, str] | None:
    """What does not go together, whatever the extents."""
    s = signature
    if problem := unsupported_scaling(s.a, s.scaling):
        return "scaling", f"{problem}; write `scaling: {' or '.join(scalings_of(s.a))}`"
    if s.b_major == "n" and DTYPES[s.b].narrow:
        return "b_major", f"n is for B of 16 bits, and {s.b} is K-major; write `b_major: k`"
    if s.b_major == "n" and s.parts.gated:
        return "b_major", f"n is not for gates, found {s.epilogue}; write `b_major: k` and store B (N, K)"
    if DTYPES[s.d].narrow and not s.parts.scale:
        fixed = "scale" if s.epilogue == "none" else f"{s.epilogue}+scale"
        return "epilogue", f"D in {s.d} needs a scale, found {s.epilogue}; write `epilogue: {fixed}`"
    if s.batch > 1:
        for field in ("scaling", "epilogue", "overlap"):
            found = getattr(s, field)
            if found != _USUAL[field]:
                return field, f"{found} is not for a batch, found {s.batch}; write `{field}: {_USUAL[field]}`"
    return None


def _extents_problem(signature: Signature) -> tuple[str, str] | None:
    """Which extent does not fill rows, or is absurd."""
    s = signature
    whole = {t: DTYPES[t].filling(ROW_ALIGNMENT_BYTES) for t in (s.a, s.b, s.d)}
    rows = [("n", s.n, "D", s.d, whole[s.d]), ("k", s.k, "A and B", s.a, whole[s.a])]
    if s.parts.gated:
        rows[0] = ("n", s.n, "D, n/2 columns,", s.d, 2 * whole[s.d])
    if s.b_major == "n":
        rows.insert(1, ("n", s.n, "an N-major B", s.b, whole[s.b]))
    for field, extent, operand, dtype, multiple in rows:
        if extent < 1 or extent % multiple:
            near = max(extent + -extent % multiple, multiple)
            return field, (
                f"must be a positive multiple of {multiple}, found {extent}; rows of {operand} in {dtype} must be "
                f"multiples of {ROW_ALIGNMENT_BYTES} bytes: pad to {near}"
            )
        if extent > MAX_EXTENT:
            return field, f"must be at most {MAX_EXTENT}, found {extent}; check the shape"
    return None


def _known_epilogues(found: str) -> str:
    """As `did_you_mean`, of words that are too many to list; known parts in another order mean those in this order."""
    parts = {part.strip().lower() for part in found.split("+")} - {"none"}
    same = [word for word in EPILOGUES if set(word.split("+")) - {"none"} == parts]
    near = same or difflib.get_close_matches(found, EPILOGUES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    activations = "|".join((*ACTIVATIONS[1:], *(f"{name}[_interleaved]" for name in GATED)))
    return f"{hint}known: none, or of bias+({activations})+residual+scale some parts, in this order"


class _Loader(yaml.SafeLoader):
    """Composes nodes only, without anchors and aliases and not deeper than a manifest can be."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise yaml.composer.ComposerError(
                None, None, "anchors and aliases are not allowed; use `defaults` or repeat the value", event.start_mark
            )
        if self.depth >= MAX_DEPTH:
            raise yaml.composer.ComposerError(
                None, None, f"nested deeper than {MAX_DEPTH} levels; a manifest needs 4", event.start_mark
            )
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _compose(text: str, path: str) -> yaml.Node:
    """The document's root node."""
    if len(text) > MAX_FILE_BYTES:
        raise ManifestError(f"{path}: larger than {MAX_FILE_BYTES} bytes, the most a manifest may be")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        parts = [p for p in (error.context, error.problem) if p]
        hint = "; indent with spaces, not tabs" if "'\\t'" in str(error.problem) else ""
        raise ManifestError(f"{path}:{line}: not a YAML manifest: {', '.join(parts)}{hint}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ManifestError(
            f"{path}:{line}: the character U+{ord(text[error.position]):04X} is not allowed in YAML; remove it"
        ) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML lets through what chr() and int() raise on absurd escapes and directives.
        raise ManifestError(f"{path}:1: not a YAML manifest: {error}") from None
    if node is None:
        raise ManifestError(f"{path}:1: the file is empty; a manifest begins with `format: {FORMAT}`")
    return node


class _Reader:
    """Turns nodes into a Manifest; remembers the path, so that every complaint can name it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.named: dict[str, yaml.Node] = {}  # gemms and uses of operations: where each name stands

    def manifest(self, root: yaml.Node) -> Manifest:
        if isinstance(root, yaml.MappingNode):
            for key, value in root.value:
                if isinstance(key, yaml.ScalarNode) and key.value == "format":
                    self.format(value)
        top = self.mapping(root, "", _TOP_FIELDS, ("format", "model", "source", "tokens", "targets"))
        if "gemms" not in top and "operations" not in top:
            self.fail(root, "gemms", "missing; add `gemms:`")
        model, source = self.text(top["model"], "model"), self.text(top["source"], "source")
        layers = self.integer(top["layers"], "layers", MAX_COUNT) if "layers" in top else 1
        tokens = self.tokens(top["tokens"], "tokens")
        traffic = self.traffic(top["traffic"], "traffic") if "traffic" in top else ()
        targets = self.targets(top["targets"])
        defaults: dict[str, yaml.Node] = {}
        if "defaults" in top:
            defaults = self.mapping(top["defaults"], "defaults", _DEFAULT_FIELDS, ())
            for field, value in defaults.items():  # so that an unused default is checked too
                self.value(field, value, f"defaults.{field}")
        gemms = [
            self.gemm(item, f"gemms[{i}]", defaults, {"tokens": tokens, "traffic": traffic})
            for i, item in enumerate(self.items(top["gemms"], "gemms") if "gemms" in top else ())
        ]
        uses = self.uses(top["operations"], tokens) if "operations" in top else ()
        return Manifest(model, source, tokens, targets, tuple(gemms), layers, uses, traffic)

    def uses(self, node: yaml.Node, tokens: tuple[int, ...]) -> tuple[Use, ...]:
        """What is asked of the operations whose problems stand in this section."""
        known = tuple(name for name in operation_names() if building(name).section == "operations")
        found = [
            self.use(item, f"operations.{name}[{i}]", operation(name), tokens)
            for name, items in self.mapping(node, "operations", known, ()).items()
            for i, item in enumerate(self.items(items, f"operations.{name}"))
        ]
        if not found:
            self.fail(node, "operations", f"names none; known: {', '.join(known)}")
        return tuple(found)

    def use(self, node: yaml.Node, where: str, of: Operation, tokens: tuple[int, ...]) -> Use:
        """One of them: `name`, perhaps `tokens`, and the fields of the operation's signatures."""
        if not isinstance(node, yaml.MappingNode):
            self.fail(node, where, f"must be a mapping, found {_describe(node)}")
        shorthand = building(of.name).shorthand
        short = shorthand.name if shorthand else ""
        there = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        replaced = shorthand.replaces if shorthand and short in there else ()
        needed = ("name", *(field for field in of.fields if field not in of.usual and field not in replaced))
        known = ("name", "tokens", *([short] if short else []), *of.fields) if of.fields else there
        own = self.mapping(node, where, known, needed)
        for field in replaced:
            if field in own:
                self.fail(own[field], f"{where}.{field}", f"follows from {short!r}; remove one of them")
        name = self.own_name(own.pop("name"), f"{where}.name")
        mine = self.tokens(own.pop("tokens"), f"{where}.tokens") if "tokens" in own else tokens
        inside = own.pop(short) if shorthand and replaced else None
        integers = self.short(inside, f"{where}.{short}", shorthand) if shorthand and inside else None
        values: dict[str, Any] = {}
        for field, value in own.items():
            is_number = isinstance(value, yaml.ScalarNode) and value.tag == _TAG + "int"
            here = f"{where}.{field}"
            values[field] = self.integer(value, here, MAX_SIGNATURE_EXTENT) if is_number else self.string(value, here)
        try:
            found = use(name, of.name, values, mine, integers)
        except RecordError as error:
            self.fail(node, where, f"{error}; docs/manifests.md has the fields of {of.name}")
        return dataclasses.replace(found, place=f"{self.place(node)}: {name}")

    def short(self, node: yaml.Node, where: str, shorthand: Shorthand) -> dict[str, int]:
        """The integers of an operation's shorthand, which go together."""
        found = self.mapping(node, where, (*shorthand.needed, *shorthand.optional), shorthand.needed)
        values = {name: self.integer(value, f"{where}.{name}", MAX_COUNT) for name, value in found.items()}
        try:
            shorthand.fields(values)
        except RecordError as error:
            self.fail(node, where, str(error))
        return values

    def gemm(self, node: yaml.Node, where: str, defaults: dict[str, yaml.Node], of_file: dict[str, Any]) -> Gemm:
        own = self.mapping(node, where, _GEMM_FIELDS, ("name", "n", "k"))
        if "dtypes" not in own and "dtypes" not in defaults:
            self.fail(node, f"{where}.dtypes", "missing; add `dtypes: {a: bf16, b: bf16, d: bf16}` here or in defaults")
        values: dict[str, Any] = {**_USUAL, "count": 1, "per": "layer", **of_file}
        for field, value in (defaults | own).items():
            values[field] = self.value(field, value, f"{where}.{field}")
        a, b, d = values["dtypes"]
        signature = Signature(a, b, d, n=values["n"], k=values["k"], **{field: values[field] for field in _USUAL})
        problem = signature_problem(signature)
        if problem:
            self.fail(own.get(problem[0], node), f"{where}.{problem[0]}", problem[1])
        name = values["name"]
        more = {field: values[field] for field in ("count", "tokens", "per", "traffic")}
        return Gemm(name, signature, place=f"{self.place(node)}: {name}", **more)

    def value(self, field: str, node: yaml.Node, where: str) -> Any:
        """One field of a gemm, checked by itself."""
        if field == "name":
            return self.own_name(node, where)
        if field in ("n", "k"):
            return self.integer(node, where, MAX_EXTENT)
        if field in ("batch", "count"):
            return self.integer(node, where, MAX_COUNT)
        if field == "tokens":
            return self.tokens(node, where)
        if field == "traffic":
            return self.traffic(node, where)
        if field == "dtypes":
            parts = self.mapping(node, where, ("a", "b", "d"), ("a", "b", "d"))
            known = zip(*PRODUCTS, strict=True)
            a, b, d = (
                self.choice(parts[part], f"{where}.{part}", tuple(dict.fromkeys(types)))
                for part, types in zip("abd", known, strict=True)
            )
            if problem := unsupported_types(a, b, d):
                self.fail(node, where, problem)
            return a, b, d
        if field == "epilogue":
            word = self.string(node, where)
            if word not in EPILOGUES:
                self.fail(node, where, f"unknown value {_short(repr(word))}; {_known_epilogues(word[:64])}")
            return word
        return self.choice(node, where, tuple(_WORDS[field]))

    def format(self, node: yaml.Node) -> None:
        found = self.integer(node, "format", MAX_COUNT)
        if found != FORMAT:
            self.fail(node, "format", f"found {found}, this version reads {FORMAT}; install a newer cute-aot")

    def tokens(self, node: yaml.Node, where: str) -> tuple[int, ...]:
        values = [self.integer(n, f"{where}[{i}]", MAX_TOKENS) for i, n in enumerate(self.items(node, where))]
        if values != sorted(set(values)):
            self.fail(node, where, f"must increase strictly; write {_flow(sorted(set(values)))}")
        return tuple(values)

    def traffic(self, node: yaml.Node, where: str) -> Traffic:
        """Forward passes by M."""
        if not isinstance(node, yaml.MappingNode) or not 1 <= len(node.value) <= MAX_ITEMS:
            found = f"{len(node.value)} of them" if isinstance(node, yaml.MappingNode) else _describe(node)
            self.fail(
                node,
                where,
                f"must be a mapping of 1 to {MAX_ITEMS} M to counts, found {found}; write {{1: 812, 16: 9}}",
            )
        pairs = [
            (self.integer(key, f"{where}, an M", MAX_TOKENS), self.integer(value, f"{where}, a count", MAX_PASSES))
            for key, value in node.value
        ]
        ms = [m for m, _ in pairs]
        if ms != sorted(set(ms)):
            self.fail(node, where, "its M must increase strictly; write them in order, each but once")
        return tuple(pairs)

    def targets(self, node: yaml.Node) -> tuple[str, ...]:
        names: list[str] = []
        for i, item in enumerate(self.items(node, "targets")):
            name = self.choice(item, f"targets[{i}]", tuple(TARGETS))
            if name in names:
                self.fail(item, f"targets[{i}]", f"{name!r} is there twice; remove one")
            names.append(name)
        return tuple(names)

    def mapping(
        self, node: yaml.Node, where: str, known: Sequence[str], required: Sequence[str]
    ) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            self.fail(
                node,
                where or "the file",
                f"must be a mapping with the fields {', '.join(known)}, found {_describe(node)}",
            )
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != _TAG + "str":
                self.fail(
                    key,
                    where or "the file",
                    f"field names are words, found {_describe(key)}; known: {', '.join(known)}",
                )
            field = f"{where}.{key.value}" if where else key.value
            if key.value not in known:
                self.fail(key, _short(field), f"unknown; {did_you_mean(key.value[:64], known)}")
            if key.value in found:
                first = found[key.value].start_mark.line + 1
                self.fail(key, field, f"given twice, first on line {first}; remove one")
            found[key.value] = value
        for name in required:
            if name not in found:
                self.fail(node, f"{where}.{name}" if where else name, f"missing; add `{name}:`")
        return found

    def items(self, node: yaml.Node, where: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            self.fail(node, where, f"must be a list, found {_describe(node)}; write it as [...] or with a dash an item")
        if not 1 <= len(node.value) <= MAX_ITEMS:
            self.fail(node, where, f"must hold 1 to {MAX_ITEMS} items, found {len(node.value)}; add or remove some")
        return list(node.value)

    def integer(self, node: yaml.Node, where: str, most: int) -> int:
        if not isinstance(node, yaml.ScalarNode) or node.tag != _TAG + "int":
            self.fail(node, where, f"must be a positive integer, found {_describe(node)}; write plain digits")
        plain = _INTEGER.fullmatch(node.value) is not None
        if not plain or len(node.value) > _MAX_DIGITS or not 1 <= int(node.value) <= most:
            fix = "check the value" if plain else "write plain digits"
            self.fail(node, where, f"must be an integer from 1 to {most}, found {_short(node.value)}; {fix}")
        return int(node.value)

    def string(self, node: yaml.Node, where: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag != _TAG + "str":
            self.fail(node, where, f"must be text, found {_describe(node)}; put quotes around text")
        return str(node.value)

    def text(self, node: yaml.Node, where: str) -> str:
        value = self.string(node, where).strip()
        if not value or len(value) > MAX_TEXT_CHARACTERS or not value.isprintable():
            self.fail(
                node, where, f"must be one line of 1 to {MAX_TEXT_CHARACTERS} printable characters; fold it with `>-`"
            )
        return value

    def name(self, node: yaml.Node, where: str) -> str:
        value = self.string(node, where)
        if not _NAME.fullmatch(value):
            self.fail(
                node, where, f"must be 1 to 64 letters, digits, '_', '.' or '-', found {_short(repr(value))}; rename"
            )
        return value

    def own_name(self, node: yaml.Node, where: str) -> str:
        """The name of a gemm or of a use of an operation, which nothing else in the file has."""
        value = self.name(node, where)
        first = self.named.setdefault(value, node)
        if first is not node:
            line = first.start_mark.line + 1
            self.fail(node, where, f"{value!r} is already taken on line {line}; give each its own name")
        return value

    def choice(self, node: yaml.Node, where: str, known: Sequence[str]) -> str:
        value = self.string(node, where)
        if value not in known:
            self.fail(node, where, f"unknown value {_short(repr(value))}; {did_you_mean(value[:64], known)}")
        return value

    def place(self, node: yaml.Node) -> str:
        return f"{self.path}:{node.start_mark.line + 1}"

    def fail(self, node: yaml.Node, where: str, complaint: str) -> NoReturn:
        field = where if where == "the file" else f"field {where!r}"
        raise ManifestError(f"{self.place(node)}: {field}: {complaint}")


def _describe(node: yaml.Node) -> str:
    """What a node is, in the words of someone who reads the file."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    kind = node.tag.removeprefix(_TAG)
    if kind == "null":
        return "nothing"
    kind = {"str": "text", "bool": "boolean", "int": "integer", "float": "number"}.get(kind, _short(kind))
    return f"the {kind} {_short(repr(node.value))}"


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _scalar(text: str) -> str:
    """A one-line YAML scalar that reads back as this text, inside a flow collection too."""
    tag = yaml.resolver.Resolver().resolve(yaml.ScalarNode, text, (True, False))
    if _PLAIN.fullmatch(text) and tag == _TAG + "str":
        return text
    return json.dumps(text, ensure_ascii=False)


def _folded(text: str) -> str:
    """A top-level scalar, folded over several lines where it is long and folding cannot change it."""
    if len(text) <= 90 or "  " in text or not text.isascii():  # quotes hold what a terminal has to escape
        return _scalar(text)
    lines = textwrap.wrap(text, 98, break_long_words=False, break_on_hyphens=False)
    return ">-\n" + "\n".join(f"  {line}" for line in lines)


def _flow(values: Iterable[int | str]) -> str:
    return f"[{', '.join(str(v) for v in values)}]"


def _traffic(traffic: Traffic) -> str:
    return f"{{{', '.join(f'{m}: {count}' for m, count in traffic)}}}"


def _wrapped_traffic(traffic: Traffic) -> list[str]:
    return textwrap.wrap(f"traffic: {_traffic(traffic)}", 110, subsequent_indent="  ") if traffic else []


def _gemm_fields(gemm: Gemm, dtypes: tuple[str, str, str], scaling: str, of: Manifest) -> str:
    """The fields of one gemm that differ from what the reader would fill in."""
    s = gemm.signature
    fields: dict[str, Any] = {"name": _scalar(gemm.name), "n": s.n, "k": s.k}
    if (s.a, s.b, s.d) != dtypes:
        fields["dtypes"] = product_words(s.a, s.b, s.d)
    usual = _USUAL | {"scaling": scaling}
    fields |= {name: getattr(s, name) for name, value in usual.items() if getattr(s, name) != value}
    if gemm.count != 1:
        fields["count"] = gemm.count
    if gemm.per != "layer":
        fields["per"] = gemm.per
    if gemm.tokens != of.tokens:
        fields["tokens"] = _flow(gemm.tokens)
    if gemm.traffic != of.traffic:
        fields["traffic"] = _traffic(gemm.traffic)
    return ", ".join(f"{name}: {value}" for name, value in fields.items())


def _use_fields(of: Use, manifest: Manifest) -> str:
    """The fields of one use that differ from what the reader would fill in."""
    name = of.signature.operation
    usual, shorthand = operation(name).usual, building(name).shorthand
    fields = {"name": of.name, **of.signature.to_json()}
    left_out = shorthand.replaces if shorthand and of.short else ()
    words = [
        f"{field}: {_scalar(value) if isinstance(value, str) else value}"
        for field, value in fields.items()
        if field not in left_out and (field not in usual or value != usual[field])
    ]
    if shorthand and of.short:
        words.append(f"{shorthand.name}: {{{', '.join(f'{field}: {value}' for field, value in of.short.values)}}}")
    tokens = of.short.tokens if of.short else of.tokens
    words += [f"tokens: {_flow(tokens)}"] if tokens != manifest.tokens else []
    return ", ".join(words)
