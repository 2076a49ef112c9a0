"""Manifests as readable YAML: each field that the reader would fill in is left out."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections import Counter
from hashlib import sha256
from typing import Any

import yaml

from runtime.numbers.products import PRODUCTS, product_words
from runtime.program.operation import operation

from ... import files
from ...search.operation import building
from .manifest import FORMAT, USUAL, Gemm, Manifest, ManifestError, Traffic, Use
from .nodes import TAG, flow
from .reader import loads

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


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
        f"tokens: {flow(manifest.tokens)}",
        *_wrapped_traffic(manifest.traffic),
        f"targets: {flow(manifest.targets)}",
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


def digest(manifest: Manifest) -> str:
    """The SHA-256, in hexadecimal, by which archives name a manifest: that of what `dump` writes, however the file was
    written that it came from.

    Raises:
        ManifestError: as `dump` does.
    """
    return sha256(dump(manifest).encode()).hexdigest()


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


def _scalar(text: str) -> str:
    """A one-line YAML scalar that reads back as this text, inside a flow collection too."""
    tag = yaml.resolver.Resolver().resolve(yaml.ScalarNode, text, (True, False))
    if _PLAIN.fullmatch(text) and tag == TAG + "str":
        return text
    return json.dumps(text, ensure_ascii=False)


def _folded(text: str) -> str:
    """A top-level scalar, folded over several lines where it is long and folding cannot change it."""
    if len(text) <= 90 or "  " in text or not text.isascii():  # quotes hold what a terminal has to escape
        return _scalar(text)
    lines = textwrap.wrap(text, 98, break_long_words=False, break_on_hyphens=False)
    return ">-\n" + "\n".join(f"  {line}" for line in lines)


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
    usual = USUAL | {"scaling": scaling}
    fields |= {name: getattr(s, name) for name, value in usual.items() if getattr(s, name) != value}
    if gemm.count != 1:
        fields["count"] = gemm.count
    if gemm.per != "layer":
        fields["per"] = gemm.per
    if gemm.tokens != of.tokens:
        fields["tokens"] = flow(gemm.tokens)
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
    words += [f"tokens: {flow(tokens)}"] if tokens != manifest.tokens else []
    return ", ".join(words)
