"""What an archive says of a function, as plain data: its arguments, its launches, and what each takes of an SM."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from typing import Any

from runtime.container import canonical
from runtime.container.archive import Archive
from runtime.device.launch import (
    CLUSTER_DIMENSION,
    COOPERATIVE,
    PREFERRED_CLUSTER_DIMENSION,
    PROGRAMMATIC_STREAM_SERIALIZATION,
)
from runtime.errors import AotError
from runtime.program.record import Record

from ..pack import tuning_table
from ..suggest import did_you_mean
from .digests import SHORTEST, digests, function_named


class UnknownFunction(AotError):
    """The archive has no function of that name or digest."""


_ATTRIBUTES = {
    COOPERATIVE: "cooperative",
    CLUSTER_DIMENSION: "cluster",
    PROGRAMMATIC_STREAM_SERIALIZATION: "programmatic stream serialization",
    PREFERRED_CLUSTER_DIMENSION: "preferred cluster",
}


def function(archive: Archive, name: str) -> dict[str, Any]:
    """What the archive says of a function, which it must have: arguments, kernels, launches, sizes in bytes."""
    obj = archive.record(name)
    record = Record.from_json(obj)
    program = obj["program"]
    return {
        "name": name,
        "digest": digests(archive)[name],
        "target": record.target,
        "family": record.family,
        "checked_on": tuning_table.checked_on(archive).get(name, []),
        "arguments": obj["arguments"],
        "symbols": obj["symbols"],
        "kernels": obj["kernels"],
        "launches": [launch_of(launch, program) for launch in program["launches"]],
        "program": {"nodes": len(program["nodes"]), "bytes": len(canonical.dumps(program))},
        "cubin": {"sha256": record.cubin, "bytes": len(archive.cubin(name))},
    }


def named(archive: Archive, word: str) -> str:
    """The name of the function that `word` is, or that the digest of begins so.

    Raises:
        UnknownFunction: there is none.
        AmbiguousDigest: several functions' digests begin so.
    """
    found = function_named(archive, word)
    if found is None:
        near = did_you_mean(word, archive.functions).partition("known:")[0]
        raise UnknownFunction(
            f"{archive.path}: has no function {word!r:.100}, and no digest begins so, in at least {SHORTEST} digits; "
            f"{near}`aot ls {shlex.quote(str(archive.path))} --functions` lists them"
        )
    return found


def resources(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What each launch of a function record takes of an SM: threads, registers a thread, bytes of memory.

    `shared_bytes` is what its CTA has of shared memory, static and dynamic, `local_bytes` what each thread spills;
    None where it depends on the arguments.
    """
    found = []
    for launch in record["program"]["launches"]:
        kernel, what = record["kernels"][launch["kernel"]], launch_of(launch, record["program"])
        threads = None if None in what["block"] else math.prod(what["block"])
        dynamic = what["shared_bytes"]
        shared = None if dynamic is None else kernel["shared_bytes"] + dynamic
        found.append(
            {
                "threads": threads,
                "registers": kernel["registers"],
                "shared_bytes": shared,
                "local_bytes": kernel["local_bytes"],
            }
        )
    return found


def launch_of(launch: dict[str, Any], program: dict[str, Any]) -> dict[str, Any]:
    """A launch with None in place of every number that depends on the arguments."""

    def constants(references: Iterable[int]) -> list[int | None]:
        nodes = (program["nodes"][r - inputs] if r >= inputs else [None] for r in references)
        return [node[2] if node[0] == "const" else None for node in nodes]

    inputs = len(program["values"])
    parameters = launch["parameters"]
    return {
        "kernel": launch["kernel"],
        "grid": constants(launch["grid"]),
        "block": constants(launch["block"]),
        "shared_bytes": constants([launch["shared_bytes"]])[0],
        "attributes": {_ATTRIBUTES[number]: constants(words) for number, words in launch["attributes"]},
        "parameter_bytes": [p["size"] for p in parameters],
        "tma_descriptors": sum(slot[1] == "tma" for p in parameters for slot in p["slots"]),
    }
