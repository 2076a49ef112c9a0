"""Small YAML files as nodes, each of which knows its line, and the checks of one node by itself.

Every mistake is a `ManifestError` that names the file, the line, the field and the fix. A file cannot make the reader
run code, follow an alias, or be larger or deeper than the limits below. Knows nothing of what the fields mean.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import yaml

from runtime.container.archive import MAGIC

from ...suggest import did_you_mean
from .manifest import FORMAT, ManifestError

MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH = 8
MAX_ITEMS = 1_000
MAX_TEXT_CHARACTERS = 2_000

TAG = "tag:yaml.org,2002:"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_MAX_DIGITS = 19


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


def compose(text: str, path: str) -> yaml.Node:
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


class Nodes:
    """The checks of nodes of one file; remembers its path, so that every complaint can name it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def mapping(
        self, node: yaml.Node, where: str, known: Sequence[str], required: Sequence[str]
    ) -> dict[str, yaml.Node]:
        """The values of a mapping by field: each of `known` at most once, and all of `required`."""
        if not isinstance(node, yaml.MappingNode):
            self.fail(
                node,
                where or "the file",
                f"must be a mapping with the fields {', '.join(known)}, found {describe(node)}",
            )
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != TAG + "str":
                self.fail(
                    key,
                    where or "the file",
                    f"field names are words, found {describe(key)}; known: {', '.join(known)}",
                )
            field = f"{where}.{key.value}" if where else key.value
            if key.value not in known:
                self.fail(key, shortened(field), f"unknown; {did_you_mean(key.value[:64], known)}")
            if key.value in found:
                first = found[key.value].start_mark.line + 1
                self.fail(key, field, f"given twice, first on line {first}; remove one")
            found[key.value] = value
        for name in required:
            if name not in found:
                self.fail(node, f"{where}.{name}" if where else name, f"missing; add `{name}:`")
        return found

    def items(self, node: yaml.Node, where: str) -> list[yaml.Node]:
        """The items of a list that is neither empty nor absurdly long."""
        if not isinstance(node, yaml.SequenceNode):
            self.fail(node, where, f"must be a list, found {describe(node)}; write it as [...] or with a dash an item")
        if not 1 <= len(node.value) <= MAX_ITEMS:
            self.fail(node, where, f"must hold 1 to {MAX_ITEMS} items, found {len(node.value)}; add or remove some")
        return list(node.value)

    def integer(self, node: yaml.Node, where: str, most: int) -> int:
        """An integer from 1 to `most`, in plain digits."""
        if not isinstance(node, yaml.ScalarNode) or node.tag != TAG + "int":
            self.fail(node, where, f"must be a positive integer, found {describe(node)}; write plain digits")
        plain = _INTEGER.fullmatch(node.value) is not None
        if not plain or len(node.value) > _MAX_DIGITS or not 1 <= int(node.value) <= most:
            fix = "check the value" if plain else "write plain digits"
            self.fail(node, where, f"must be an integer from 1 to {most}, found {shortened(node.value)}; {fix}")
        return int(node.value)

    def string(self, node: yaml.Node, where: str) -> str:
        """Any text, as it is."""
        if not isinstance(node, yaml.ScalarNode) or node.tag != TAG + "str":
            self.fail(node, where, f"must be text, found {describe(node)}; put quotes around text")
        return str(node.value)

    def text(self, node: yaml.Node, where: str) -> str:
        """One line of printable text for people."""
        value = self.string(node, where).strip()
        if not value or len(value) > MAX_TEXT_CHARACTERS or not value.isprintable():
            self.fail(
                node, where, f"must be one line of 1 to {MAX_TEXT_CHARACTERS} printable characters; fold it with `>-`"
            )
        return value

    def name(self, node: yaml.Node, where: str) -> str:
        """A word that can stand in a key or a file's name."""
        value = self.string(node, where)
        if not _NAME.fullmatch(value):
            self.fail(
                node, where, f"must be 1 to 64 letters, digits, '_', '.' or '-', found {shortened(repr(value))}; rename"
            )
        return value

    def choice(self, node: yaml.Node, where: str, known: Sequence[str]) -> str:
        """One of the known words."""
        value = self.string(node, where)
        if value not in known:
            self.fail(node, where, f"unknown value {shortened(repr(value))}; {did_you_mean(value[:64], known)}")
        return value

    def place(self, node: yaml.Node) -> str:
        """The file and line of a node, as messages begin."""
        return f"{self.path}:{node.start_mark.line + 1}"

    def fail(self, node: yaml.Node, where: str, complaint: str) -> NoReturn:
        """Raise a `ManifestError` about the field `where`."""
        field = where if where == "the file" else f"field {where!r}"
        raise ManifestError(f"{self.place(node)}: {field}: {complaint}")


def describe(node: yaml.Node) -> str:
    """What a node is, in the words of someone who reads the file."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    kind = node.tag.removeprefix(TAG)
    if kind == "null":
        return "nothing"
    kind = {"str": "text", "bool": "boolean", "int": "integer", "float": "number"}.get(kind, shortened(kind))
    return f"the {kind} {shortened(repr(node.value))}"


def shortened(text: str, most: int = 60) -> str:
    """Text for a message, cut where it is long."""
    return text if len(text) <= most else text[: most - 3] + "..."


def flow(values: Iterable[int | str]) -> str:
    """A YAML list on one line."""
    return f"[{', '.join(str(v) for v in values)}]"
