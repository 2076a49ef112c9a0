"""All that `aot report` says of an archive, put together."""

from __future__ import annotations

from typing import Any

from runtime.container.archive import Archive

from ...pack import build_table, forms
from .. import predictions
from ..info import info
from ..serving import Serving
from ..uses import uses
from .functions import by_family, functions
from .layers import places
from .lint import lint

SCHEMA = 1  # raised when what a field means changes


def report(archive: Archive) -> dict[str, Any]:
    """What the archive is (`aot.inspect.info`), its layers by kind of GPU, forms, functions, and what is wrong with it.

    Raises:
        RecordError: a table or a record is malformed.
    """
    serving = Serving(archive)
    about = info(archive, serving.precedence)
    universal = serving.precedence.universal
    found = functions(archive, uses(archive, serving.precedence))
    by_place = places(archive, serving)
    return {
        "schema": SCHEMA,
        "archive": about,
        "places": by_place,
        "forms": predictions.listing(forms.rows(archive, universal)),
        "families": by_family(found),
        "functions": found,
        "lint": lint(about, by_place, found, build_table.traffic(build_table.read(archive))),
    }
