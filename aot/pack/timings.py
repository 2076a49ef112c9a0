"""What was measured at some M of an entry of an operation's table, its `timings`: for people, and opaque to servers.

`docs/records.md` has the fields. Unknown ones are left as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from runtime.tables.dispatch import Entry

from .fields import Test, fail, is_count, is_text, is_text_or_none, require

MAX_US = 1e12  # eleven days
MAX_SPREAD = 1e6
MAX_TOKENS = 2**31


class TimingRow(NamedTuple):
    """What serves at M = `m` and what it is compared with, in microseconds; what is None was not measured.

    Spreads are of samples, over their median. `runner_up` is the best other finalist of `candidates` functions, and
    `sustained_us` and `baseline_sustained_us` are times under sustained load; `bimodal`: its samples fall into two
    groups.
    """

    m: int
    function: str
    us: float
    baseline_us: float
    spread: float | None = None
    bimodal: bool | None = None
    baseline: str | None = None
    baseline_spread: float | None = None
    runner_up: str | None = None
    runner_up_us: float | None = None
    candidates: int | None = None
    sustained_us: float | None = None
    baseline_sustained_us: float | None = None

    def to_json(self) -> dict[str, Any]:
        """A row as `read` takes it, without what is None."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def read(entry: Entry) -> list[dict[str, Any]]:
    """The rows of an entry, each with its `ratio`, the baseline's time over its own, and `sustained_ratio`, that under
    sustained load or None where it was not measured.

    Raises:
        RecordError: a row lacks a time or has an absurd one, or they are out of order.
    """
    rows = []
    above = 0
    for i, row in enumerate(entry.timings):
        where = f"{entry.signature.operation} table: {entry.signature.key()} on {entry.target}: unreadable timings[{i}]"
        require(row, _FIELDS, _OPTIONAL, where)
        if row["m"] <= above:
            fail(where, f"m must increase, found {row['m']} after {above}")
        above = row["m"]
        ratio, sustained = row["baseline_us"] / row["us"], None
        if "sustained_us" in row and "baseline_sustained_us" in row:
            sustained = round(row["baseline_sustained_us"] / row["sustained_us"], 3)
        rows.append(row | {"ratio": round(ratio, 3), "sustained_ratio": sustained})
    return rows


def _is_us(value: Any) -> bool:
    return type(value) in (int, float) and 1e-6 <= value <= MAX_US


def _is_us_or_none(value: Any) -> bool:
    return value is None or _is_us(value)


def _is_spread(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_SPREAD


def _is_tokens(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_TOKENS


_FIELDS: dict[str, Test] = {"m": _is_tokens, "function": is_text, "us": _is_us, "baseline_us": _is_us}
_OPTIONAL: dict[str, Test] = {
    "spread": _is_spread,
    "bimodal": lambda value: type(value) is bool,
    "baseline": is_text,
    "baseline_spread": _is_spread,
    "runner_up": is_text_or_none,
    "runner_up_us": _is_us_or_none,
    "candidates": is_count,
    "sustained_us": _is_us,
    "baseline_sustained_us": _is_us,
}
