"""Which distributions are installed here, and which extras of this one they make up, by the metadata of installs.

Imports nothing of what it looks at, which takes seconds of torch or of the DSL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata, util

_DISTRIBUTION = "cute-aot"
_FOR_DEVELOPERS = ("test", "wheels")  # extras that nobody needs who uses this
# As the metadata of an install has it: the name, extras of it, what is asked of the version, and whose extra it is.
_REQUIREMENT = re.compile(r"""([\w.-]+)\s*(?:\[([\w,\s-]+)\])?\s*([^;]*?)\s*;.*extra == ['"]([\w-]+)['"]""")
_CLAUSE = re.compile(r"(==|>=)\s*([\w.]+)")


@dataclass(frozen=True)
class Extra:
    """An extra of this distribution. `lacking` has what it needs and is not installed, such as "torch>=2.9", and of
    what is installed in another version also which: "nvidia-cutlass-dsl==4.8.1 (4.7.0 is installed)"."""

    name: str
    lacking: tuple[str, ...]


def version(distribution: str) -> str | None:
    """The installed version of a distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def importable(package: str) -> bool:
    """Whether a top-level package is where an import would look for it."""
    return util.find_spec(package) is not None


def extras() -> list[Extra] | None:
    """The extras that this distribution has for its users, by name; None where it runs from its source tree with no
    install, which alone knows them."""
    try:
        lines = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    asked: dict[str, list[tuple[str, str, str]]] = {}
    for line in lines:
        if match := _REQUIREMENT.fullmatch(line.strip()):
            name, inner, clauses, extra = match.groups()
            asked.setdefault(extra, []).append((name, inner or "", clauses))
    return [Extra(name, tuple(_lacking(name, asked))) for name in sorted(asked) if name not in _FOR_DEVELOPERS]


def _lacking(extra: str, asked: dict[str, list[tuple[str, str, str]]]) -> list[str]:
    found = []
    for name, inner, clauses in asked.get(extra, []):
        if name == _DISTRIBUTION:  # an extra that holds others
            found += [row for other in inner.split(",") for row in _lacking(other.strip(), asked)]
            continue
        installed = version(name)
        if installed is None:
            found.append(f"{name}{clauses}")
        elif not all(_meets(installed, *clause) for clause in _CLAUSE.findall(clauses)):
            found.append(f"{name}{clauses} ({installed} is installed)")
    return found


def _meets(installed: str, relation: str, wanted: str) -> bool:
    """Whether a version is at least, or is, the wanted one; what follows its numbers, such as "+cpu", is left out."""
    have, want = (_numbers(text) for text in (installed, wanted))
    longest = max(len(have), len(want))
    have, want = (numbers + (0,) * (longest - len(numbers)) for numbers in (have, want))
    return have == want if relation == "==" else have >= want


def _numbers(text: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, release[0].split("."))) if release else ()
