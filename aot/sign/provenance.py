"""Where an archive comes from, in the shape of SLSA's provenance, version 1: https://slsa.dev/spec/v1.0/provenance.

It is made of what the archive says of itself and of what the signer adds. Nothing of it is checked against a build.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.container.archive import Archive

from ..pack import build_table, tuning_table

BUILD_TYPE = "urn:cute-aot:build:v1"
UNKNOWN_BUILDER = "urn:cute-aot:builder:unknown"  # where the signer gave none: the format wants one


def provenance(archive: Archive, commands: Sequence[str], builder: str, contents: Mapping[str, str]) -> dict[str, Any]:
    """The provenance of `archive`, as the `predicate` of a SLSA statement has it.

    `commands` made it, in their order, and `builder` is the URI of who ran them. Manifests and the sources of kernels
    are dependencies by their SHA-256, tools by their version and, where `contents` has it by name, the SHA-256 of what
    they consist of; the machines that it was tuned on are byproducts.

    Raises:
        RecordError: the table of the build, or of tuning, is malformed.
    """
    build = build_table.read(archive)
    manifests = [
        {"name": f"manifest {model.model or number}", "digest": {"sha256": model.manifest}}
        | ({"annotations": {"source": model.source}} if model.source else {})
        for number, model in enumerate(build.models)
        if model.manifest
    ]
    sources = [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(build.providers.items())]
    tools = [
        {"name": name, "annotations": _given(version=version, contents=contents.get(name))}
        for name, version in sorted(build.tools.items())
    ]
    details: dict[str, Any] = {"builder": {"id": builder}}
    if tuned := tuning_table.read(archive):
        details["byproducts"] = [{"name": f"tuning on {row['gpu']}", "annotations": _machine(row)} for row in tuned]
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "models": [model.model for model in build.models],
                "targets": list(build.targets),
                "commands": list(commands),
            },
            "resolvedDependencies": [*manifests, *sources, *tools],
        },
        "runDetails": details,
    }


def _machine(row: dict[str, Any]) -> dict[str, Any]:
    """What the table says of a machine, but for what it says of functions."""
    return _given(**{name: value for name, value in row.items() if name not in ("rejected", "right")})


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
