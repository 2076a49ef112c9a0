"""Renders the data of `aot report` as one HTML document that needs no network and takes nothing from the archive for
more than text.

Names, sources and reasons in an archive are anybody's. The template escapes them all, and a content security policy in
the page lets the browser run the two scripts and the style that are in it, by their SHA-256, and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from . import text, view

_FOLDER = Path(__file__).parent
GENERATOR = "aot report"  # by which a page is known that may be replaced by another


def page(data: dict[str, Any]) -> str:
    """The page for what `aot.inspect.report` gives, whose texts hold no control characters."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(text, name) for name in text.FILTERS}
    chart, script = _read("uplot/uPlot.iife.min.js"), _read("assets/report.js")
    style = _read("uplot/uPlot.min.css") + _read("assets/report.css")
    return environment.get_template("report.html").render(
        view.view(data),
        generator=GENERATOR,
        policy=_policy([chart, script], style),
        style=Markup(style),
        scripts=[Markup(chart), Markup(script)],
        notice=_read("uplot/LICENSE"),
    )


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _policy(scripts: list[str], style: str) -> str:
    """A content security policy that allows these and nothing else."""
    allowed = " ".join(map(_source, scripts))
    return f"default-src 'none'; script-src {allowed}; style-src {_source(style)}; base-uri 'none'; form-action 'none'"


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
