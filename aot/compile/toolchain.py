"""What is installed that decides code or choices: versions, for an archive to tell, and contents, for cache keys.

Knows nothing of kernels, and imports nothing of what it looks at.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

import zstandard

from runtime.errors import AotError

from ..extras import to_install
from ..search.targets import TARGETS
from .cache import Cache, Entry

_DSL = "nvidia-cutlass-dsl"  # and all whose names begin so
_COMPILER = f"{_DSL}-libs-cu"  # and a version of CUDA
# They decide what is chosen, or how an archive is written; of the Operator API's sources its provider takes a digest.
_OTHERS = ("nvidia-cutlass-operators", "nvidia-matmul-heuristics", "zstandard")
_KIND = "contents"  # of entries of the cache
_SCHEMA = 1  # raised when the meaning of a digest of contents changes
_SETTLED_NS = 2_000_000_000  # a file as old as this shows a change by its times, however coarse the clock of its disk


class ToolchainError(AotError):
    """What compiles is not installed, or not so that its contents can be told."""


@dataclass(frozen=True)
class Toolchain:
    """What is installed. `versions` of all that decides code or choices; `wheels` of what generates code: the version
    and the SHA-256 of the contents, the same wherever and whenever they were installed."""

    versions: dict[str, str]
    wheels: dict[str, str]


def toolchain(cache: Cache) -> Toolchain:
    """What is installed here. `cache` keeps digests of contents, which take most of a second to make.

    Contents are the files that a distribution lists, but for what installing writes: bytecode, scripts and metadata.

    Raises:
        ToolchainError: the DSL is not installed, or lists no files.
        UntrustedCache: others may write to the cache directory.
    """
    found: dict[str, Distribution] = {}
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name.startswith(_DSL) or name in _OTHERS:
            found.setdefault(name, distribution)
    dsl = {name: found[name] for name in sorted(found) if name.startswith(_DSL)}
    if not dsl:
        raise ToolchainError(f"{_DSL} is not installed; {to_install('build')}")
    versions = {name: distribution.version for name, distribution in found.items()}
    versions |= {"python": python(), "zstd": ".".join(map(str, zstandard.ZSTD_VERSION))}
    contents = _contents(dsl, cache)
    return Toolchain(dict(sorted(versions.items())), {name: f"{versions[name]} {contents[name]}" for name in dsl})


def require_compiler(tools: Toolchain, targets: Iterable[str]) -> None:
    """Refuse targets that no compiler of the installed DSL knows. It has one for each major version of CUDA, each in a
    wheel.

    Raises:
        ToolchainError: there is one; the message says what to install.
    """
    for name in sorted(set(targets)):
        cuda = TARGETS[name].compiler_cuda if name in TARGETS else 0
        found = [int(wheel.removeprefix(_COMPILER)) for wheel in tools.wheels if wheel.startswith(_COMPILER)]
        if found and max(found) < cuda:
            raise ToolchainError(
                f"{name} needs the compiler of CUDA {cuda}, and {_DSL} has that of CUDA {max(found)} here; "
                f"pip install '{_DSL}[cu{cuda}]=={tools.versions[_DSL]}', or name other targets"
            )


def python() -> str:
    """The version of Python as far as it decides code: the DSL rewrites the syntax tree of kernels."""
    return ".".join(map(str, sys.version_info[:2]))


class _File(NamedTuple):
    distribution: str
    name: str  # as the distribution lists it
    path: str
    size: int
    changed_ns: tuple[int, int]  # its content; its inode, which nobody can set back
    inode: int


def _contents(distributions: Mapping[str, Distribution], cache: Cache) -> dict[str, str]:
    """The digest of what each distribution consists of; from `cache` where no file of any has changed since."""
    now_ns = time.time_ns()
    files = [file for name, distribution in distributions.items() for file in _files(name, distribution)]
    seen = hashlib.sha256(repr((_SCHEMA, files)).encode()).hexdigest()

    def check(entry: Entry) -> None:
        if set(entry.record) != set(distributions) or not all(type(d) is str and d for d in entry.record.values()):
            raise ValueError("does not hold the digests of what is installed")

    if known := cache.get(seen, check, _KIND):
        return known.record
    settled = all(max(file.changed_ns) < now_ns - _SETTLED_NS for file in files)
    digests = _digests if settled else _digests.__wrapped__
    found = dict(digests(tuple(distributions), tuple(files)))
    if settled:
        cache.put(seen, Entry(found, b""), _KIND)
    return found


@lru_cache(maxsize=1)  # for a process that builds with one cache after another
def _digests(distributions: tuple[str, ...], files: tuple[_File, ...]) -> tuple[tuple[str, str], ...]:
    """The digest of each distribution, over the names and contents of its files."""
    digests = {name: hashlib.sha256() for name in distributions}
    for file in sorted(files, key=lambda file: file.name):
        digests[file.distribution].update(os.fsencode(f"{file.name}\0{file.size}\0"))
        with open(file.path, "rb") as opened:
            while part := opened.read(1 << 20):
                digests[file.distribution].update(part)
    return tuple((name, digest.hexdigest()) for name, digest in digests.items())


def _files(name: str, distribution: Distribution) -> list[_File]:
    """The files of an installed distribution that are as its wheel has them."""
    listed = distribution.files
    if not listed:
        raise ToolchainError(f"{name} {distribution.version} lists no files; install it from its wheel")
    root = Path(str(distribution.locate_file("")))
    found = []
    for file in listed:
        if file.parts[0] == ".." or file.suffix == ".pyc" or file.parts[0].endswith((".dist-info", ".egg-info")):
            continue
        path = os.path.join(root, file)
        try:
            status = os.stat(path)
        except FileNotFoundError:  # which shows in the digest
            continue
        changed_ns = status.st_mtime_ns, status.st_ctime_ns
        found.append(_File(name, file.as_posix(), path, status.st_size, changed_ns, status.st_ino))
    return found
