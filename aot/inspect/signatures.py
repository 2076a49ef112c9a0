"""Which signatures a question is about: a layer by name or key, those of a function, or a GEMM by its extents."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any, NamedTuple

from runtime.container.archive import Archive
from runtime.errors import AotError
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.program.operation import operation
from runtime.tables.table import Entry

from ..search.operation import names as operation_names
from ..suggest import did_you_mean
from .digests import function_named
from .entries import names_of
from .serving import Serving
from .show import UnknownName


class Unclear(AotError):
    """A question that names no layer, or one in two ways."""


class Extents(NamedTuple):
    """A GEMM by N, K and the element type of A and B."""

    n: int | None = None
    k: int | None = None
    dtype: str | None = None


def signatures(archive: Archive, serving: Serving, layer: str | None, extents: Extents, m: int) -> list[Any]:
    """The signatures of a layer: those that manifests call so, the one whose key it is, or those that the function of
    this name, or beginning of a digest, serves at `m` rows; or the archive's GEMMs of these extents, else the plain
    one. Each once; one at least, and the archive need not have it.

    Raises:
        Unclear: neither is given, or both, or only part of the extents.
        UnknownName: no manifest has the name, it is no key and no function, or a function that serves nothing there.
        AmbiguousDigest: digests of several functions begin so.
    """
    if layer is not None:
        if any(value is not None for value in extents):
            raise Unclear(f"the layer is {layer!r}, so leave out --n, --k and --dtype; or leave out the layer")
        return _named(archive, serving, layer, m)
    if extents.n is None or extents.k is None:
        raise Unclear("name a layer, such as qkv, or give --n and --k")
    return _of_extents(serving, extents)


def _named(archive: Archive, serving: Serving, layer: str, m: int) -> list[Any]:
    names = names_of(archive)
    keys = [key for key, of in names.items() if layer in of] or [layer]
    entries = {entry.signature.key(): entry.signature for entry in serving.entries}
    found = [entries[key] if key in entries else of_key(key) for key in keys]
    known = [*dict.fromkeys(name for of in names.values() for name in of)]
    if all(signature is None for signature in found):
        if function := function_named(archive, layer):
            return _served_by(archive, serving, function, m)
        near = did_you_mean(layer, known or list(entries))
        forms = "; or give --n and --k, of which forms serve any" if serving.precedence.universal else ""
        raise UnknownName(f"{archive.path}: no manifest has a layer {layer!r}, and it is no signature; {near}{forms}")
    return list(dict.fromkeys(s for s in found if s is not None))


def _served_by(archive: Archive, serving: Serving, function: str, m: int) -> list[Any]:
    served = [e.signature for e in serving.entries if _serves(serving, e, m) == function]
    if not served:
        raise UnknownName(
            f"{archive.path}: {function} serves no layer at M = {m}; "
            f"`aot show {shlex.quote(str(archive.path))} {function}` describes it"
        )
    return list(dict.fromkeys(served))


def _serves(serving: Serving, entry: Entry, m: int) -> str | None:
    """The function that serves `m` rows where an entry is looked up; None where another entry, or a form, always goes
    before it."""
    if serving.precedence.instead_of(entry) is not None:
        return None
    begins = serving.precedence.predicted_from(entry)
    return (entry if begins is None or m < begins else serving.precedence.predicted_for(entry)).best(m)


def of_key(key: str) -> Any:
    """The signature of any operation whose key this is, or None."""
    found = (operation(name).of_key(key) for name in operation_names())
    return next((signature for signature in found if signature is not None), None)


def _of_extents(serving: Serving, wanted: Extents) -> list[Any]:
    if wanted.dtype is not None and wanted.dtype not in DTYPES:
        raise Unclear(f"unknown element type {wanted.dtype!r:.50}; {did_you_mean(wanted.dtype, DTYPES)}")
    usual = plain(wanted.dtype or "bf16", int(wanted.n or 0), int(wanted.k or 0))
    there: Iterable[Any] = (e.signature for e in serving.dispatch(usual.operation).entries)
    found = [
        s for s in there if (s.n, s.k) == (wanted.n, wanted.k) and (wanted.dtype is None or s.a == s.b == wanted.dtype)
    ]
    return list(dict.fromkeys(found)) or [usual]


def plain(dtype: str, n: int, k: int) -> Signature:
    """The GEMM of A and B of an element type as manifests have it unless they say more: D of the same type, or of 8
    bits bf16 with scales of rows and columns."""
    narrow = DTYPES[dtype].bits < 16
    d, scaling = ("bf16", "row_column") if narrow else (dtype, "none")
    return Signature(dtype, dtype, d, "f32", "none", n, k, scaling=scaling)
