"""Numbers and ranges as the page writes them."""

from __future__ import annotations

from collections.abc import Sequence

FILTERS = ("bytes_text", "ratio", "span", "us", "plural", "extremes", "percent")


def bytes_text(number: int) -> str:
    """A size in KiB, or in bytes where it is less than one."""
    return f"{number / 1024:,.0f} KiB" if number >= 1024 else f"{number} B"


def ratio(value: float | None) -> str:
    """How many times as fast or as long, such as "1.05"; a dash where it is not known."""
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def span(first: int, last: int | None) -> str:
    """A range of M, such as "65-127"; of one without end "8193+"."""
    return f"{first}+" if last is None else str(first) if first == last else f"{first}-{last}"


def us(value: float | None) -> str:
    """Microseconds to three digits or so; a dash where they are not known."""
    return (
        "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
    )


def percent(share: float | None) -> str:
    """A share, such as "1.5%"; a dash where it is not known."""
    return "-" if share is None else f"{share:.1%}"


def plural(number: int, one: str, more: str = "") -> str:
    """A number of things, such as "1 layer" and "3 layers"."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def extremes(values: Sequence[int] | None) -> str:
    """The least and the most, such as "30-138"; a dash where none is known."""
    return "-" if not values else span(values[0], values[-1])
