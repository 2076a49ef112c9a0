"""`aot history`: what was done to make an archive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..arguments import ArchivePath, Json, count, examples
from ..inputs import open_archive
from ..layout import print_fields
from ..streams import print_json
from ..tables import built_by, cleaned, tuning_words

EXAMPLES = examples("aot history model.aot")


def command(archive: ArchivePath, as_json: Json = False) -> None:
    """Say how an archive was made, in order. Built for which model with what, then tuned on which machines.
    The archive keeps no time of day and no host."""
    from ...inspect.history import history

    with open_archive(archive) as opened:
        steps = history(opened)
    if as_json:
        return print_json({"archive": str(archive), "steps": steps})
    print_steps(steps)


def print_steps(steps: list[dict[str, Any]]) -> None:
    """What `aot history` prints."""
    if not steps:
        print("the archive does not say how it was made")
    print_fields([field for i, step in enumerate(cleaned(steps), 1) for field in _fields(i, step)])


def _fields(number: int, step: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if step["step"] == "build":
        of = f"{step['model'] or 'a model without a name'}, {count(step['layers'], 'layer')}"
        yield f"{number}. build", f"{built_by(step['tools'])} for {of}"
        yield "", step["source"] or "the archive does not say where its layers are from"
        if step["manifest"]:
            yield "", f"manifest {step['manifest'][:16]} (SHA-256, its beginning)"
        return
    done = {"signatures": "signature", "points": "M value", "launched": "time"}
    said = [count(step[what], word) for what, word in done.items() if step[what]]
    checked = [f"{step['right']} right"] if step["right"] else []
    environment = {name: value for name, value in step.items() if name != "right" or step["step"] == "check"}
    yield f"{number}. {step['step']}", tuning_words(environment)
    yield "", ", ".join([*said, *checked, f"{step['rejected']} rejected"])
