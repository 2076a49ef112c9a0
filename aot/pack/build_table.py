"""The table `build` of an archive: which models it was built for, and with what. It is for people; no server reads it.

`docs/records.md` has its fields. Any but `schema` may be absent, which says nothing, and unknown ones are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from runtime.container.archive import Archive
from runtime.container.fields import require_schema

from .fields import (
    Test,
    is_count,
    is_list,
    is_rows_of_text,
    is_text,
    is_text_or_none,
    is_texts_by_name,
    list_field,
    require,
)

TABLE = "build"
SCHEMA = 1  # raised when what a field means changes


class Problem(NamedTuple):
    """What a model asks of an operation: its name in the manifest, the key of its signature, how often one forward pass
    runs it, and by (M, count) how many forward passes of a server had so many rows."""

    name: str
    signature: str
    calls: int | None = None
    traffic: Sequence[Sequence[int]] | None = None


class Model(NamedTuple):
    """A model: its name, where its layers are from, the SHA-256 of its manifest, and its problems, which documents call
    gemms."""

    model: str | None
    source: str | None
    manifest: str | None
    problems: Sequence[Problem]


class Asked(NamedTuple):
    """What `aot build` was asked besides manifests and the number of candidates: the `targets` and `functions` that it
    named, whether `universal`, and the digests of further `inputs` (`input_digests`)."""

    targets: Sequence[str] = ()
    functions: Sequence[str] = ()
    universal: bool = False
    inputs: Mapping[str, str] = {}


class Build(NamedTuple):
    """What an archive was built for and with.

    `ranking` says for each target what ordered the candidates, of which each problem had `candidates`; `tools` has
    versions by name, and `providers` digests of sources by family, as records name it; `failures` pairs functions that
    did not compile with the reason, and `unserved` has signatures, by key, with a target and the reason. `asked` is
    there where `aot build` made it.
    """

    models: Sequence[Model] = ()
    targets: Sequence[str] = ()
    ranking: Mapping[str, str] = {}
    candidates: int | None = None
    tools: Mapping[str, str] = {}
    providers: Mapping[str, str] = {}
    failures: Sequence[tuple[str, str]] = ()
    unserved: Sequence[tuple[str, str, str]] = ()
    asked: Asked | None = None

    def to_json(self) -> dict[str, Any]:
        """The table, as `read` takes it."""
        return {
            "schema": SCHEMA,
            "models": [_model_json(m) for m in self.models],
            "targets": list(self.targets),
            "ranking": dict(self.ranking),
            "tools": dict(self.tools),
            "providers": dict(self.providers),
            "failures": [list(row) for row in self.failures],
            "unserved": [list(row) for row in self.unserved],
        } | _given({"candidates": self.candidates, "asked": None if self.asked is None else self.asked._asdict()})


def input_digests(spec: Path | None = None, times: Sequence[Path] = (), base: Archive | None = None) -> dict[str, str]:
    """The digests, in hexadecimal, of what a build is made of besides manifests, by role: "spec", "times 1", "times 2"
    and so on have the SHA-256 of a file, "base" has that of an archive's index.

    Raises:
        OSError: a file cannot be read.
    """
    files = ({"spec": spec} if spec else {}) | {f"times {number}": path for number, path in enumerate(times, 1)}
    found = {role: sha256(path.read_bytes()).hexdigest() for role, path in files.items()}
    return found if base is None else found | {"base": base.digest}


def read(archive: Archive) -> Build:
    """What the table says; nothing where there is none.

    Raises:
        RecordError: a field is not what it must be.
        UnsupportedSchema: it is of another schema than `SCHEMA`.
    """
    if TABLE not in archive.tables:
        return Build()
    where = f"{archive.path}: table {TABLE}"
    obj = archive.table(TABLE)
    require_schema(obj, SCHEMA, where)
    require(obj, {}, _FIELDS, where)
    found = {name: obj[name] for name in _FIELDS if name in obj}
    if "models" in found:
        found["models"] = [_model(m, f"{where}: models[{i}]") for i, m in enumerate(found["models"])]
    if "asked" in found:
        require(found["asked"], {}, _OF_ASKED, f"{where}: asked")
        found["asked"] = Asked(**{name: found["asked"][name] for name in _OF_ASKED if name in found["asked"]})
    return Build(**found)


def _model(obj: Any, where: str) -> Model:
    require(obj, {}, dict.fromkeys(("model", "source", "manifest"), is_text_or_none), where)
    gemms = list_field(obj, "gemms", where)
    for i, gemm in enumerate(gemms):
        require(gemm, {"signature": is_text, "name": is_text}, _OF_PROBLEM, f"{where}.gemms[{i}]")
    found = [Problem(gemm["name"], gemm["signature"], *map(gemm.get, _OF_PROBLEM)) for gemm in gemms]
    return Model(obj.get("model"), obj.get("source"), obj.get("manifest"), found)


def _model_json(model: Model) -> dict[str, Any]:
    fields = model._asdict()
    del fields["problems"]
    return _given(fields) | {"gemms": [_given(problem._asdict()) for problem in model.problems]}


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def traffic(build: Build) -> dict[str, dict[int, int]]:
    """By signatures' keys, how many calls of all models were seen with each M; only of those that were counted."""
    found: dict[str, dict[int, int]] = {}
    for problem in (problem for model in build.models for problem in model.problems):
        for m, count in problem.traffic or ():
            of = found.setdefault(problem.signature, {})
            of[m] = of.get(m, 0) + count * (problem.calls or 1)
    return found


def _is_traffic(value: Any) -> bool:
    """Whether this is a list of pairs of positive integers."""
    return is_list(value) and all(
        is_list(pair) and len(pair) == 2 and all(is_count(number) and number > 0 for number in pair) for pair in value
    )


_OF_PROBLEM: dict[str, Test] = {"calls": is_count, "traffic": _is_traffic}


def _is_texts(value: Any) -> bool:
    return is_list(value) and all(map(is_text, value))


_OF_ASKED: dict[str, Test] = {
    "targets": _is_texts,
    "functions": _is_texts,
    "universal": lambda value: isinstance(value, bool),
    "inputs": is_texts_by_name,
}
_FIELDS: dict[str, Test] = {
    "models": is_list,
    "targets": _is_texts,
    "ranking": is_texts_by_name,
    "candidates": is_count,
    "tools": is_texts_by_name,
    "providers": is_texts_by_name,
    "failures": is_rows_of_text(2),
    "unserved": is_rows_of_text(3),
    "asked": lambda value: isinstance(value, dict),
}
