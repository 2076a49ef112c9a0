"""Kinds of GPU that questions may name without having one: those of an archive's entries, and common ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from runtime.device.gpus import H100, Gpu
from runtime.errors import AotError
from runtime.tables.dispatch import Capability
from runtime.tables.table import Entry

from ..pack.forms import USUAL_GPU, capability
from ..suggest import did_you_mean


class UnknownGpu(AotError):
    """A name that is no kind of GPU known here."""


class Kind(NamedTuple):
    """A kind of GPU and its compute capability."""

    gpu: Gpu
    capability: Capability


# Names as the driver gives them; SMs and memory rates in GB/s of NVIDIA's data sheets, an H200's and an H100's as their
# drivers' clocks and bus widths give them.
COMMON = (
    Kind(USUAL_GPU, (9, 0)),
    Kind(H100, (9, 0)),
    Kind(Gpu("NVIDIA H20", 78, 4000), (9, 0)),
    Kind(Gpu("NVIDIA A100-SXM4-80GB", 108, 2039), (8, 0)),
    Kind(Gpu("NVIDIA B200", 148, 8000), (10, 0)),
    Kind(Gpu("NVIDIA GeForce RTX 5090", 170, 1792), (12, 0)),
)


def kinds_of(entries: Iterable[Entry]) -> list[Kind]:
    """The kinds that entries are for, each once."""
    return list(dict.fromkeys(Kind(e.gpu, capability(e.target)) for e in entries if e.gpu is not None))


def named(word: str, entries: Iterable[Entry]) -> Kind:
    """The kind that `word` is, or whose name has it, such as "H200": of the entries, else a common one.

    Raises:
        UnknownGpu: there is none.
    """
    kinds = [*kinds_of(entries), *COMMON]
    parts = word.lower().split()
    for kind in kinds:
        if word.lower() in (kind.gpu.name.lower(), *kind.gpu.name.lower().split()):
            return kind
    for kind in kinds:
        if all(part in kind.gpu.name.lower() for part in parts):
            return kind
    names = dict.fromkeys(kind.gpu.name.removeprefix("NVIDIA ") for kind in kinds)
    raise UnknownGpu(f"unknown GPU {word!r:.80}; {did_you_mean(word, names)}; or give --target")
