"""Whether an archive is what its own word makes: held against another that was built by what it says of its build.

A ranked archive must be the same bytes. A tuned one has functions of the candidates that it was measured from, each of
which must be the same. Knows nothing of how the other was built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from runtime.container.archive import Archive
from runtime.errors import AotError, ArchiveError

from ..pack import build_table, tuning_table
from ..pack.build_table import Asked, Build, Model


class NotRebuildable(AotError):
    """An archive does not say what it would take, or that is not what was given, or installed here."""


@dataclass(frozen=True)
class Difference:
    """Something that differs: a function, a table, or the archive; and how, as the end of a sentence."""

    subject: str
    detail: str


@dataclass(frozen=True)
class Comparison:
    """What an archive was found to be.

    `same_file` is whether all bytes of both files are equal. `tuned` says that it was, and `candidates` names what it
    says it was first measured from, None where it says nothing. `functions` counts those that were held against the
    other's.
    """

    same_file: bool
    tuned: bool
    candidates: str | None
    functions: int
    differences: tuple[Difference, ...]


def require_whole(archive: Archive) -> None:
    """Read and hash all that an archive holds.

    Raises:
        ArchiveError: it is damaged, or holds something else than its index says.
    """
    for check in archive.verify():
        if not check.ok:
            raise ArchiveError(check.detail)


def asked_of(archive: Archive) -> tuple[Build, Asked]:
    """What an archive says of its build.

    Raises:
        NotRebuildable: it does not say what was asked.
        RecordError: the table is malformed.
    """
    build = build_table.read(archive)
    if build.asked is None:
        raise NotRebuildable(
            f"{archive.path}: does not say what `aot build` was asked: it was merged, or made by an earlier version; "
            "rebuild each of those that it was merged of, or build it again"
        )
    return build, build.asked


def in_order(archive: Archive, models: Sequence[Model], given: Mapping[str, str]) -> list[str]:
    """The paths of manifests, `given` with the SHA-256 of each, in the order in which the archive was built of them.

    Raises:
        NotRebuildable: one is missing, or the archive was not built of it.
    """
    wanted = {model.manifest: model.model for model in models if model.manifest}
    by_digest = {digest: path for path, digest in given.items()}
    for path, digest in given.items():
        if digest not in wanted:
            there = ", ".join(f"{model or 'a model without a name'} {of}" for of, model in wanted.items()) or "none"
            raise NotRebuildable(
                f"{path}: {archive.path} was not built of it: its SHA-256, as written anew, is {digest}, and those of "
                f"the archive are {there}; give the manifest as it was"
            )
    for digest, model in wanted.items():
        if digest not in by_digest:
            raise NotRebuildable(
                f"{archive.path}: was built of a manifest of {model or 'a model without a name'} too, whose SHA-256 is "
                f"{digest}; give it"
            )
    return [by_digest[digest] for digest in wanted if digest is not None]


def require_inputs(archive: Archive, wanted: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Hold the digests of further inputs, by role, against those that the archive names.

    Raises:
        NotRebuildable: one is missing, is of no use, or has other contents.
    """
    for role in sorted({*wanted, *given}):
        option = f"--{role.split()[0]}"
        if role not in given:
            raise NotRebuildable(f"{archive.path}: was built with {option}, of the digest {wanted[role]}; give it")
        if role not in wanted:
            raise NotRebuildable(f"{archive.path}: was built without {option}; leave it out")
        if wanted[role] != given[role]:
            raise NotRebuildable(
                f"{archive.path}: was built with {option} of the digest {wanted[role]}, the one given has "
                f"{given[role]}; give the one that it was built with"
            )


def require_tools(
    archive: Archive, what: str, wanted: Mapping[str, str], here: Mapping[str, str], names: Iterable[str] | None = None
) -> None:
    """Hold what is installed against what the archive, or its provenance, names: `what` says which facts these are,
    such as "contents of tools"; `names` of them count, by default all.

    Raises:
        NotRebuildable: they differ; the message names each that does.
    """
    of = wanted if names is None else {name: wanted[name] for name in names if name in wanted}
    wrong = [name for name, value in sorted(of.items()) if here.get(name) != value]
    if wrong:
        said = "; ".join(f"{name} {_short(of[name])}, here {_short(here.get(name, 'it is not'))}" for name in wrong)
        raise NotRebuildable(
            f"{archive.path}: was built with other {what}: {said}. Install what it was built with, and run this there"
        )


def compare(archive: Archive, rebuilt: Archive) -> Comparison:
    """Hold an archive against one that was built anew, by the digests of what they hold. The first must be whole
    (`require_whole`).

    Raises:
        ArchiveError: what was built is damaged.
    """
    require_whole(rebuilt)
    tuned = tuning_table.read(archive)
    named = tuned[0].get("candidates") if tuned else None
    same_file = archive.digest == rebuilt.digest
    differences = list[Difference]()
    if not same_file:
        differences += _functions(archive, rebuilt, some=bool(tuned))
        if not tuned:
            differences += _tables(archive, rebuilt)
    if named is not None and named != rebuilt.digest:
        differences.append(
            Difference(
                "candidates", f"it was measured from an archive with the digest {named}, built is {rebuilt.digest}"
            )
        )
    if not same_file and not tuned and not differences:
        differences.append(Difference("file", "it holds the same, compressed or ordered in another way"))
    return Comparison(same_file, bool(tuned), named, len(archive.functions), tuple(differences))


def _functions(archive: Archive, rebuilt: Archive, some: bool) -> list[Difference]:
    """Functions that differ; `some` of the other's may be absent."""
    found, records, theirs = list[Difference](), archive.record_digests(), rebuilt.record_digests()
    for name, entry in archive.functions.items():
        if name not in rebuilt.functions:
            found.append(Difference(name, "is not among what was built"))
        elif records[name] != theirs[name]:
            found.append(Difference(name, "has another record"))
        elif archive.blob_entry(entry.cubin).sha256 != rebuilt.blob_entry(rebuilt.functions[name].cubin).sha256:
            found.append(Difference(name, "has another cubin"))
    if not some:
        found += [Difference(n, "was built, and is not in it") for n in rebuilt.functions if n not in archive.functions]
    return found


def _tables(archive: Archive, rebuilt: Archive) -> list[Difference]:
    ours, theirs = (
        {name: each.blob_entry(number).sha256 for name, number in each.tables.items()} for each in (archive, rebuilt)
    )
    return [
        Difference(f"table {name}", "differs" if name in ours and name in theirs else "is in one of both alone")
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]


def _short(value: str) -> str:
    return value if len(value) <= 40 else f"{value[:16]}..."
