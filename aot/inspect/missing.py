"""What to say of a signature that nothing of an archive serves: the nearest entries, and what else would serve it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from runtime.container.archive import Archive
from runtime.errors import ArchiveError
from runtime.gemm.signature import Signature
from runtime.packaged import universal as packaged
from runtime.program.operation import operation
from runtime.tables.dispatch import serves

from ..problem.manifest import signature_problem
from ..search.targets import target_for
from ..search.unserved import variants, why_none
from .serving import Place, Serving

_NEAREST = 3


def missing(
    archive: Archive, serving: Serving, signature: Any, place: Place, names: Mapping[str, list[str]]
) -> dict[str, Any]:
    """The `nearest` entries, by how they differ, and what to do about a signature: `advice`, of which the last may be
    to run `commands`, word by word."""
    of = operation(signature.operation)
    entries = {(e.signature, e.target): e for e in serving.dispatch(signature.operation).entries}

    def distance(key: tuple[Any, str]) -> tuple[float, str, str]:
        elsewhere = 10.0 * (not serves(key[1], place.capability))
        return of.distance(key[0], signature) + elsewhere, key[0].key(), key[1]

    nearest = []
    for have, target in sorted(entries, key=distance)[:_NEAREST]:
        reasons = of.differences(have, signature)
        if not serves(target, place.capability):
            reasons = [*reasons, f"{target} does not run there"]
        nearest.append(
            {"signature": have.key(), "names": names.get(have.key(), []), "target": target, "differs": reasons}
        )
    advice, commands = _advice(archive, signature, place)
    return {"nearest": nearest, "advice": advice, "commands": commands}


def _advice(archive: Archive, signature: Any, place: Place) -> tuple[list[str], list[list[str]]]:
    """What to do to have it served, and the commands that the last of it is of."""
    problem = signature_problem(signature) if isinstance(signature, Signature) else None
    if problem is not None:
        return [f"no build takes it: {problem[0]} {problem[1]}"], []
    advice, target = list[str](), target_for(place.capability)
    if served_by_package([signature], place):
        advice.append(
            f'load the package\'s archive below this one: runtime.load([runtime.universal(), "{archive.path}"])'
        )
    if target and not variants(target, signature):
        return [*advice, f"no build for {target} has it: {why_none(target, signature)}"], []
    advice.append("write a manifest of this layer alone, as tuned ones that it names would be ranked again, and run:")
    on = ["--target", target] if target else []
    build = ["aot", "build", "MANIFEST", *on, "--base", str(archive.path), "-o", "OUT"]
    return advice, [build, ["aot", "tune", "OUT", "-o", "TUNED"]]


def served_by_package(signatures: Iterable[Any], place: Place) -> set[Any]:
    """Those of some signatures that the archive in the package has a form for."""
    predicted = [s for s in signatures if operation(s.operation).predictions is not None]
    if not predicted:
        return set()
    try:
        with Archive.open(packaged()) as archive:
            serving = Serving(archive)
            return {signature for signature in predicted if serving.find(signature, place) is not None}
    except ArchiveError:
        return set()
