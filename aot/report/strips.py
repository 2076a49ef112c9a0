"""The picture of dispatch: M from 1 along x in octaves, and a strip for each layer, in pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .text import span

_LABEL_PX, _OCTAVE_PX, _ROW_PX, _AXIS_PX = 150, 50, 22, 20
MOST_RANGES = 200  # of a layer, the first in M
_COLOURS = 8  # that the style has


def family_class(number: int) -> str:
    """The class that colours a family of functions."""
    return f"c{number % _COLOURS}"


def strips(
    names: Sequence[str], layers: Sequence[dict[str, Any]], by_digest: dict[str, Any], families: dict[str, int]
) -> dict[str, Any] | None:
    """Rectangles, in pixels, for the ranges of each layer; None where nothing has ranges."""
    shown = [(name, layer["ranges"]) for name, layer in zip(names, layers, strict=True) if layer["ranges"]]
    if not shown:
        return None
    most = max((row["m_min"] for _, ranges in shown for row in ranges[:MOST_RANGES]), default=1)
    octaves = max(1, math.ceil(math.log2(most + 1))) + 1

    def x(m: int) -> float:
        return round(_LABEL_PX + _OCTAVE_PX * math.log2(m), 1)

    end = _LABEL_PX + _OCTAVE_PX * octaves
    return {
        "width": end,
        "height": _ROW_PX * len(shown) + _AXIS_PX,
        "ticks": [{"x": x(1 << octave), "text": str(1 << octave)} for octave in range(0, octaves, 2)],
        "rows": [
            {
                "label": name if len(name) <= 22 else f"{name[:21]}…",
                "y": _ROW_PX * place + _AXIS_PX,
                "parts": [
                    {
                        "x": x(row["m_min"]),
                        "width": round((end if row["m_max"] is None else x(row["m_max"] + 1)) - x(row["m_min"]), 1),
                        "class": family_class(families[by_digest[row["digest"]]["family"]]),
                        "says": f"{name}, M = {span(row['m_min'], row['m_max'])}: {row['digest']}",
                    }
                    for row in ranges[:MOST_RANGES]
                ],
            }
            for place, (name, ranges) in enumerate(shown)
        ],
    }
