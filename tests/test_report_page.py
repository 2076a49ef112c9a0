"""The page of `aot report`: self-contained, safe whatever an archive says, and usable in a browser in all ways."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from .chromium import NAMES, Chromium, installed
from .command_line import Run
from .inspected import BUILD, ENVIRONMENT, FEW, H200, QKV, tables, write
from .recording_driver import entry, signature, table

HOSTILE = """"'></title></style><script>window.taken=1</script><img src=x onerror="window.taken=1">{{ 7 * 7 }}\u202e"""


class Elements(HTMLParser):
    """The elements and attributes of a page, those with which it could load something by their value too."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.addresses: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses |= {value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")}


def hostile(path: Path) -> Path:
    """An archive that has HTML in all that may be any text."""
    model = {"model": HOSTILE, "source": HOSTILE, "manifest": HOSTILE, "gemms": [{"name": HOSTILE, "signature": QKV}]}
    build = BUILD | {
        "models": [model],
        "ranking": {"sm_90a": HOSTILE},
        "tools": {"cute-aot": HOSTILE, HOSTILE: HOSTILE},
        "providers": BUILD["providers"] | {HOSTILE: HOSTILE},
        "failures": [[HOSTILE, HOSTILE]],
        "unserved": [[HOSTILE, HOSTILE, HOSTILE]],
    }
    timings = [{**row, "function": FEW, "baseline": HOSTILE} for row in tables()["gemm"]["entries"][0]["timings"]]
    environment = ENVIRONMENT | {"gpu": HOSTILE, "driver": HOSTILE, "rejected": {HOSTILE: HOSTILE}}
    changed = {
        "build": build,
        "gemm": table(
            [
                entry(signature(6144, 4096), [(None, FEW)], gpu=gpu, torch_faster=[(400, 600)]) | {"timings": timings}
                for gpu in (H200, H200._replace(name=HOSTILE))
            ]
        ),
        "tuning": {"schema": 1, "environments": [environment]},
        "history": {"schema": 1, "tunings": []},
    }
    return write(path, changed)


@pytest.fixture
def page(run: Run, tmp_path: Path) -> Path:
    assert run("report", write(tmp_path / "x.aot"), "-o", tmp_path / "report.html") == (0, "", "")
    return tmp_path / "report.html"


@pytest.fixture
def hostile_page(run: Run, tmp_path: Path) -> Path:
    assert run("report", hostile(tmp_path / "h.aot"), "-o", tmp_path / "hostile.html") == (0, "", "")
    return tmp_path / "hostile.html"


def test_a_page_loads_nothing(page: Path) -> None:
    text = page.read_text()
    assert all(address.startswith("#") for address in Elements(text).addresses)
    assert not re.search(r"url\(|@import", text)
    assert "default-src &#39;none&#39;" in text


def test_every_link_in_a_page_leads_to_a_part_of_it(page: Path) -> None:
    text = page.read_text()
    assert [a for a in Elements(text).addresses if f'id="{a[1:]}"' not in text] == []


def test_nothing_in_an_archive_becomes_html(page: Path, hostile_page: Path) -> None:
    usual, found = Elements(page.read_text()), Elements(hostile_page.read_text())
    assert set(found.tags) <= set(usual.tags)
    assert found.attributes <= usual.attributes
    assert found.tags.count("script") == 2
    assert all(address.startswith("#") for address in found.addresses)


def test_nothing_in_an_archive_is_read_as_a_template_or_turns_text_around(hostile_page: Path) -> None:
    text = hostile_page.read_text()
    assert "{{ 7 * 7 }}" in text
    assert "\u202e" not in text


def test_what_is_slower_and_who_made_it_stand_before_the_layers(page: Path) -> None:
    top = page.read_text().partition('id="layers"')[0]
    for said in ("400-600", "made-up-8b", "cute-aot 0.1.0", "NVIDIA H200, driver 580.1", "failed to compile"):
        assert said in top


def test_the_slowest_of_many_layers_are_shown_and_the_cut_is_told(run: Run, tmp_path: Path) -> None:
    row = tables()["gemm"]["entries"][0]
    rows = [row | {"signature": signature(8 * n, 4096), "gpu": H200} for n in range(1, 71)]
    rows[69] = rows[69] | {"timings": [timing | {"baseline_us": 5.0} for timing in row["timings"]]}
    write(tmp_path / "x.aot", {"gemm": table(rows), "history": {"schema": 1, "tunings": []}})
    assert run("report", tmp_path / "x.aot", "-o", tmp_path / "x.html").status == 0
    text = (tmp_path / "x.html").read_text()
    assert "The 60 slowest of 72 layers" in text
    assert 'title="bf16_bf16_bf16_f32_none_n560_k4096"' in text


# --- in a browser ---


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = installed()
    if program is None:
        pytest.skip(f"needs a Chromium: none of {', '.join(NAMES)} is on the path")
    found = Chromium(program, tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_fits_its_window_and_draws_its_chart(browser: Chromium, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width, dark)
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("document.querySelectorAll('.chart canvas').length") == 1
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]


def _contrast(browser: Chromium, selector: str) -> float:
    """The ratio of luminances of an element's text and ground, as WCAG 2 has it."""
    colours = browser.run(
        f"(s => [s.color, s.backgroundColor])(getComputedStyle(document.querySelector('{selector}')))"
    )

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_cells_can_be_read(browser: Chromium, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    kinds = ("slow3", "slow2", "slow1", "even", "fast1", "fast2", "fast3", "near")
    assert {kind for kind in kinds if _contrast(browser, f".legend .{kind}") < 4.5} == set()
    assert _contrast(browser, "body") > 10


def _focused(browser: Chromium) -> Any:
    return browser.run("document.activeElement.dataset.says || document.activeElement.textContent.trim()")


def test_cells_are_read_with_the_keyboard_alone(browser: Chromium, page: Path) -> None:
    browser.open(page)
    for _ in range(40):
        browser.press("Tab")
        if browser.run("document.activeElement.tagName") == "TD":
            break
    assert _focused(browser).startswith("qkv at M = 1-15: not measured here")
    browser.press("ArrowRight")
    assert browser.run("document.getElementById('says-1').textContent") == _focused(browser)
    assert _focused(browser).startswith("qkv at M = 16: 14.0 us")
    browser.press("ArrowDown")
    assert _focused(browser).startswith("o at M = 16: nothing was timed")
    browser.press("Tab")
    assert browser.run("document.activeElement.className") == "chart", "a table is one stop"


def test_a_chart_is_read_with_the_keyboard_alone(browser: Chromium, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('.chart').focus()")
    for _ in range(2):
        browser.press("ArrowRight")
    legend = "[...document.querySelectorAll('.u-legend .u-value')].map(value => value.textContent)"
    assert browser.run(legend) == ["512", "1.12"]
    browser.press("Tab")
    assert _focused(browser) == "qkv"
    pressed = "document.activeElement.getAttribute('aria-pressed')"
    assert browser.run(pressed) == "true"
    browser.press("Enter")
    assert browser.run("document.querySelectorAll('.u-legend .u-off').length") == 1
    assert browser.run(pressed) == "false"


def test_a_hostile_archive_runs_nothing(browser: Chromium, hostile_page: Path) -> None:
    browser.open(hostile_page)
    browser.run("document.querySelector('.heat td').focus()")
    assert browser.run("window.taken") is None
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert "<script>" in browser.run("document.getElementById('says-1').textContent")
    assert "<script>" in browser.run("document.querySelector('.u-legend').textContent")
    assert (browser.errors, browser.requests) == ([], [hostile_page.as_uri()])
