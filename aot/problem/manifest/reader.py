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

Knows nothing of kernels, and of targets only their names.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from typing import Any

import yaml

from runtime.errors import RecordError
from runtime.gemm.signature import MAJORS, Signature
from runtime.limits import MAX_EXTENT as MAX_SIGNATURE_EXTENT
from runtime.numbers.epilogue import ACTIVATIONS, EPILOGUES, GATED
from runtime.numbers.products import ACCUMULATORS, PRODUCTS, unsupported_types
from runtime.numbers.scaling import SCALINGS
from runtime.program.operation import OVERLAPS, Operation, operation

from ...search.operation import building
from ...search.operation import names as operation_names
from ...search.shorthand import Shorthand
from ...search.targets import TARGETS
from .manifest import (
    FORMAT,
    MAX_COUNT,
    MAX_EXTENT,
    MAX_PASSES,
    MAX_TOKENS,
    PER,
    USUAL,
    Gemm,
    Manifest,
    ManifestError,
    Traffic,
    Use,
    use,
)
from .nodes import MAX_ITEMS, TAG, Nodes, compose, describe, flow, read_text, shortened
from .rules import signature_problem

_TOP_FIELDS = ("format", "model", "source", "layers", "tokens", "traffic", "targets", "defaults", "gemms", "operations")
_WORDS = {
    "accumulator": ACCUMULATORS,
    "scaling": SCALINGS,
    "b_major": MAJORS,
    "overlap": OVERLAPS,
    "per": PER,
}
# What a gemm has that says nothing.
_DEFAULT_FIELDS = ("dtypes", *USUAL, "count", "per", "tokens", "traffic")
_GEMM_FIELDS = ("name", "n", "k", *_DEFAULT_FIELDS)


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
    return _Reader(path).manifest(compose(text, path))


class _Reader(Nodes):
    """Turns nodes into a Manifest."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
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
            self.fail(node, where, f"must be a mapping, found {describe(node)}")
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
            is_number = isinstance(value, yaml.ScalarNode) and value.tag == TAG + "int"
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
        values: dict[str, Any] = {**USUAL, "count": 1, "per": "layer", **of_file}
        for field, value in (defaults | own).items():
            values[field] = self.value(field, value, f"{where}.{field}")
        a, b, d = values["dtypes"]
        signature = Signature(a, b, d, n=values["n"], k=values["k"], **{field: values[field] for field in USUAL})
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
                self.fail(node, where, f"unknown value {shortened(repr(word))}; {_known_epilogues(word[:64])}")
            return word
        return self.choice(node, where, tuple(_WORDS[field]))

    def format(self, node: yaml.Node) -> None:
        found = self.integer(node, "format", MAX_COUNT)
        if found != FORMAT:
            self.fail(node, "format", f"found {found}, this version reads {FORMAT}; install a newer cute-aot")

    def tokens(self, node: yaml.Node, where: str) -> tuple[int, ...]:
        values = [self.integer(n, f"{where}[{i}]", MAX_TOKENS) for i, n in enumerate(self.items(node, where))]
        if values != sorted(set(values)):
            self.fail(node, where, f"must increase strictly; write {flow(sorted(set(values)))}")
        return tuple(values)

    def traffic(self, node: yaml.Node, where: str) -> Traffic:
        """Forward passes by M."""
        if not isinstance(node, yaml.MappingNode) or not 1 <= len(node.value) <= MAX_ITEMS:
            found = f"{len(node.value)} of them" if isinstance(node, yaml.MappingNode) else describe(node)
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

    def own_name(self, node: yaml.Node, where: str) -> str:
        """The name of a gemm or of a use of an operation, which nothing else in the file has."""
        value = self.name(node, where)
        first = self.named.setdefault(value, node)
        if first is not node:
            line = first.start_mark.line + 1
            self.fail(node, where, f"{value!r} is already taken on line {line}; give each its own name")
        return value


def _known_epilogues(found: str) -> str:
    """As `did_you_mean`, of words that are too many to list; known parts in another order mean those in this order."""
    parts = {part.strip().lower() for part in found.split("+")} - {"none"}
    same = [word for word in EPILOGUES if set(word.split("+")) - {"none"} == parts]
    near = same or difflib.get_close_matches(found, EPILOGUES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    activations = "|".join((*ACTIVATIONS[1:], *(f"{name}[_interleaved]" for name in GATED)))
    return f"{hint}known: none, or of bias+({activations})+residual+scale some parts, in this order"
